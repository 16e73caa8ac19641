"""The DQN family: double, target network, Huber, on pieces that a task's identity chooses.

A learner owns pieces: trunks and heads. `single` has one of each for all tasks, `heads` a head for
every task on one trunk (and an input layer in front of it), `separate` a whole network for each.
"""

from collections.abc import Callable, Sequence
from math import hypot

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.job import Job
from canal_mpi.learn.elastic import Elastic
from canal_mpi.learn.layers import splits
from canal_mpi.learn.losses import departure, goals_of, imitation, temporal_difference
from canal_mpi.learn.makers import maker_of
from canal_mpi.learn.passes import Passes
from canal_mpi.learn.piece import Piece, array_of
from canal_mpi.learn.twins import check_twin
from canal_mpi.state import inside, under
from canal_mpi.types import Array, Batch, Columns, Spaces


class DQN:
    """A learner that meets the `Learner` protocol."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None:
        self.spaces, self.config, self.memory = spaces, job.learn, job.memory
        self.reuse, self._seed = job.reuse, seed
        self.maker = maker_of(spaces, job.learn)
        self.device, self.threads = self.maker.device, self.maker.threads
        self.factor = 1 / 255 if job.learn.scale_input and spaces.dtype == "|u1" else 1.0
        self.pieces: dict[str, Piece] = {}
        self._passes: dict[str, tuple[Passes, Passes]] = {}
        self._moved: dict[str, dict[str, Piece]] = {}  # by an update of a task
        self.elastic = Elastic(job.memory.ewc_alpha)
        self.teacher: Passes | None = None
        self.combine: Callable[[Array], Array] | None = None
        self.task, self.updates = "", 0
        self._slope = np.zeros((0, 0), dtype=np.float32)  # memory that is used again

    # ── which network ──────────────────────────────────────────────────────────────────────────

    def begin(self, task: str) -> None:
        """Act and learn for this task from now on."""
        self.task, self.teacher = task, None
        self._network(task)

    def names(self, task: str) -> dict[str, str]:
        """The pieces that a task uses, by what they are: its input, trunk and head."""
        identity = self.config.identity
        trunk = f"trunk/{task}" if identity == "separate" else "trunk"
        own = {"input": f"input/{task}"} if splits(self.config) else {}
        return own | {"trunk": trunk, "head": "head" if identity == "single" else f"head/{task}"}

    def _pieces(self, task: str = "") -> dict[str, Piece]:
        """The pieces of a task (the current one) by what they are."""
        return {part: self.pieces[name] for part, name in self.names(task or self.task).items()}

    def _network(self, task: str) -> tuple[Passes, Passes]:
        """Online and target passes of a task; made at first sight."""
        if task not in self._passes:
            pieces = [self._piece(part, name) for part, name in self.names(task).items()]
            online = self.maker.passes(pieces, self.factor)
            self._passes[task] = (online, self.maker.passes(pieces, self.factor, target=True))
            self._moved[task] = {name: self.pieces[name] for name in self.names(task).values()}
        return self._passes[task]

    def _piece(self, part: str, name: str) -> Piece:
        if name not in self.pieces:
            seed = self._seed("trunk" if part == "input" else name)
            self.pieces[name] = self.maker.piece(part, seed)
        return self.pieces[name]

    # ── acting ─────────────────────────────────────────────────────────────────────────────────

    def values(self, obs: Array) -> Array:
        """Values of the actions in a few states of the current task."""
        return self._network(self.task)[0].values(obs.reshape(len(obs), -1)).copy()

    def act(self, obs: Array) -> Array:
        """The best action for each observation of the current task."""
        best: Array = self.values(obs).argmax(axis=1)
        return best

    # ── learning ───────────────────────────────────────────────────────────────────────────────

    def learn(self, batch: Batch) -> float:
        """One step of Adam on one batch of one task; returns the loss."""
        if batch.stored is not None and self.memory.alpha:
            loss, gradient = self._departure(batch, batch.stored)
        else:
            values, loss, gradient, _ = self._difference(batch)
            if batch.imitate and self.teacher is not None:
                known = self.teacher.values(batch.states)
                extra, slope = imitation(values, known, self.reuse.temperature)
                loss += batch.imitate * extra
                gradient += np.float32(batch.imitate) * slope
        if batch.weight != 1:
            gradient *= np.float32(batch.weight)
        self._network(batch.task)[0].backward(gradient)
        self._step(batch.task, batch.rate)
        return loss

    def _departure(self, batch: Batch, stored: Array) -> tuple[float, Array]:
        """How far the policy is from the one of stored values, and the gradient of that."""
        values = self._network(batch.task)[0].forward(batch.states)
        loss, slope = departure(values, stored, self.reuse.temperature, self.memory.alpha)
        gradient = self._room(values)
        gradient[:] = slope
        return loss, gradient

    def _difference(self, batch: Batch) -> tuple[Array, float, Array, Array]:
        """Values of the states, loss of the temporal difference, its gradient, and itself."""
        online, target = self._network(batch.task)
        config = self.config
        judge = choice = (target if config.target_every else online).values(batch.next_states)
        if config.double and config.target_every:
            choice = online.values(batch.next_states)
        goals = goals_of(judge, choice, batch.returns, batch.discounts)
        values = online.forward(batch.states)
        huber, room = config.loss == "huber", self._room(values)
        return values, *temporal_difference(values, batch.actions, goals, huber, room)

    def _room(self, values: Array) -> Array:
        """Where the gradient with respect to the values is written."""
        if self._slope.shape != values.shape:
            self._slope = np.empty_like(values)
        return self._slope

    def _step(self, task: str, rate: float) -> None:
        """Move the pieces of one task, and let their targets follow when it is time."""
        pieces = self._moved[task]
        if self.combine and task == self.task:
            _combine(list(pieces.values()), self.combine)
        if self.memory.ewc:
            self.elastic.pull(pieces, self.memory.ewc)
        if self.config.grad_clip:
            _clip(list(pieces.values()), self.config.grad_clip)
        for piece in pieces.values():
            piece.step(self.config.lr * rate)
        self.updates += 1
        if self.config.target_every and self.updates % self.config.target_every == 0:
            for piece in self.pieces.values():
                piece.follow()

    def errors(self, batch: Batch) -> Array:
        """Temporal differences of a batch, without learning from it."""
        return np.abs(self._difference(batch)[3])

    # ── teaching and remembering ───────────────────────────────────────────────────────────────

    def network(self) -> Columns:
        """The network of the current task, for a lesson."""
        return {part: array_of(piece.weights) for part, piece in self._pieces().items()}

    def teach(self, network: Columns) -> None:
        """Take a donor's network of the current task as the teacher."""
        pieces = {part: self.maker.piece(part, seed=0) for part in self.names(self.task)}
        _copy(network, pieces)
        self.teacher = self.maker.passes(list(pieces.values()), self.factor)

    def adopt(self, network: Columns) -> None:
        """Start from the donor's weights instead of one's own."""
        _copy(network, self._pieces())

    def blend(self, network: Columns, alpha: float) -> None:
        """Move the weights of the current task towards others'; the target stays."""
        _check_make(network, self._pieces())
        for part, piece in self._pieces().items():
            piece.blend(network[part], alpha)

    def twin(self) -> Columns:
        """Everything with which another agent goes on from here on the current task."""
        held: Columns = {}
        for part, piece in self._pieces().items():
            held |= under(part, piece.state())
        return held

    def become(self, twin: Columns) -> None:
        """Go on from another agent's `twin`, if it is of the same make."""
        check_twin(twin, self.twin())
        for part, piece in self._pieces().items():
            piece.restore(inside(part, twin))

    def consolidate(self, sample: Callable[[], Batch]) -> None:
        """End of a task: remember which weights mattered to it (EWC)."""
        if not self.memory.ewc:
            return
        pieces = self._moved[self.task]
        with self.elastic.measuring(pieces) as measure:
            for _ in range(self.memory.ewc_batches):
                batch = sample()
                gradient = self._difference(batch)[2]
                self._network(batch.task)[0].backward(gradient)
                measure()

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def state(self) -> Columns:
        """Weights, targets and optimisers of all pieces."""
        held: Columns = {"updates": np.array([self.updates], dtype="<i8")}
        for name, piece in self.pieces.items():
            held |= under(f"pieces/{name}", piece.state())
        return held | under("elastic", self.elastic.state())

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        groups: dict[str, Columns] = {}
        for key, column in inside("pieces", state).items():
            name, _, part = key.rpartition("/")
            groups.setdefault(name, {})[part] = column
        for name, columns in sorted(groups.items(), reverse=True):  # trunks before heads
            self._piece(name.partition("/")[0], name).restore(columns)
        self.elastic.restore(inside("elastic", state))
        self.updates = int(state["updates"][0])


def _copy(network: Columns, pieces: dict[str, Piece]) -> None:
    """Give pieces the weights of a donor's network, if it is of the same make."""
    _check_make(network, pieces)
    for name, piece in pieces.items():
        piece.take(network[name])


def _check_make(network: Columns, pieces: dict[str, Piece]) -> None:
    for name, piece in pieces.items():
        if name not in network or network[name].shape != tuple(piece.weights.shape):
            raise DamagedData(f"the donor's network has another {name} than this learner")


def _combine(pieces: Sequence[Piece], combine: Callable[[Array], Array]) -> None:
    """Replace gradients by what the agents make of theirs together."""
    shared = combine(np.concatenate([array_of(piece.grad) for piece in pieces]))
    start = 0
    for piece in pieces:
        piece.grad[:] = piece.put(shared[start : start + len(piece.grad)])
        start += len(piece.grad)


def _clip(pieces: Sequence[Piece], most: float) -> None:
    length = hypot(*(piece.steepness() for piece in pieces))
    if length > most:
        for piece in pieces:
            piece.grad *= most / length
