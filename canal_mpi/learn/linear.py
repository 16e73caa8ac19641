"""A linear Q-learner: no hidden layer, no torch; small enough for many ranks a core.

Action values are linear in the observation's numbers, their squares and a 1 for the bias.
It has one matrix for all tasks (`learn.identity = "single"`) or one a task. Settings of the network
(network, widths, layer_norm, dueling, threads) mean nothing to it.
"""

from collections.abc import Callable
from math import prod

import numpy as np

from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.job import Job
from canal_mpi.learn.losses import departure, goals_of, imitation, temporal_difference
from canal_mpi.learn.twins import check_twin
from canal_mpi.types import Array, Batch, Columns, Spaces

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Matrix:
    """Action values = (inputs, 1) · weights; with a target and Adam of its own."""

    def __init__(self, inputs: int, actions: int, seed: int) -> None:
        rng = np.random.Generator(np.random.PCG64(seed))
        scale = 1 / np.sqrt(inputs + 1)
        self.weights: Array = (scale * rng.uniform(-1, 1, (inputs + 1, actions))).astype("<f4")
        self.target = self.weights.copy()
        self.mean, self.square = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.fisher, self.anchor = np.zeros_like(self.weights), self.weights.copy()
        self.steps = 0

    def step(self, gradient: Array, lr: float) -> None:
        """One step of Adam."""
        self.steps += 1
        self.mean += np.float32(1 - BETA1) * (gradient - self.mean)
        self.square += np.float32(1 - BETA2) * (gradient * gradient - self.square)
        size = lr / (1 - BETA1**self.steps)
        root = np.sqrt(self.square / np.float32(1 - BETA2**self.steps)) + np.float32(EPSILON)
        self.weights -= np.float32(size) * self.mean / root

    def take(self, weights: Array) -> None:
        """Start from other weights, if they are of the same make."""
        if weights.shape != (self.weights.size,):
            raise DamagedData(
                f"the donor's matrix has {weights.size} weights; this learner's {self.weights.size}"
            )
        self.weights = weights.astype("<f4").reshape(self.weights.shape)
        self.target = self.weights.copy()

    def state(self) -> Columns:
        """Everything needed to go on with the same bits."""
        names = ("weights", "target", "mean", "square", "fisher", "anchor")
        held = {name: getattr(self, name).copy() for name in names}
        return held | {"steps": np.array([self.steps], dtype="<i8")}

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        for name in ("weights", "target", "mean", "square", "fisher", "anchor"):
            if state[name].shape != self.weights.shape:
                raise DamagedData(
                    f"saved {name} have the shape {state[name].shape}, not {self.weights.shape}"
                )
            setattr(self, name, state[name].astype("<f4"))
        self.steps = int(state["steps"][0])


class Linear:
    """A learner that meets the `Learner` protocol."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None:
        if job.learn.device == "cuda":
            raise UsageError(f"learn.device = {job.learn.device}: the linear learner needs cpu.")
        self.inputs, self.actions = 2 * prod(spaces.shape), spaces.actions
        self.config, self.memory, self.reuse, self._seed = job.learn, job.memory, job.reuse, seed
        scaled = job.learn.scale_input and spaces.dtype == "|u1"
        self.factor = np.float32(1 / 255 if scaled else 1)
        self.matrices: dict[str, Matrix] = {}
        self.teacher: Array | None = None
        self.combine: Callable[[Array], Array] | None = None
        self.task, self.updates = "", 0

    def begin(self, task: str) -> None:
        """Act and learn for this task from now on."""
        self.task, self.teacher = task, None
        self._matrix(task)

    def _matrix(self, task: str) -> Matrix:
        return self._named("matrix" if self.config.identity == "single" else f"matrix/{task}")

    def _named(self, name: str) -> Matrix:
        if name not in self.matrices:
            self.matrices[name] = Matrix(self.inputs, self.actions, self._seed(name))
        return self.matrices[name]

    def _input(self, obs: Array) -> Array:
        """Observations as rows: the numbers, their squares, and a 1 for the bias."""
        half = self.inputs // 2
        rows = np.ones((len(obs), self.inputs + 1), dtype=np.float32)
        plain = np.multiply(obs.reshape(len(obs), -1), self.factor, out=rows[:, :half])
        np.square(plain, out=rows[:, half:-1])
        return rows

    def values(self, obs: Array) -> Array:
        """Values of the actions in a few states of the current task."""
        found: Array = self._input(obs) @ self._matrix(self.task).weights
        return found

    def act(self, obs: Array) -> Array:
        """The best action for each observation of the current task."""
        best: Array = self.values(obs).argmax(axis=1)
        return best

    # ── learning ───────────────────────────────────────────────────────────────────────────────

    def learn(self, batch: Batch) -> float:
        """One step of Adam on one batch of one task; returns the loss."""
        matrix, obs = self._matrix(batch.task), self._input(batch.states)
        values = obs @ matrix.weights
        if batch.stored is not None and self.memory.alpha:
            how = self.reuse.temperature, self.memory.alpha
            loss, slope = departure(values, batch.stored, *how)
        else:
            loss, slope = self._difference(values, batch)
            if batch.imitate and self.teacher is not None:
                extra, more = imitation(values, obs @ self.teacher, self.reuse.temperature)
                loss, slope = loss + batch.imitate * extra, slope + np.float32(batch.imitate) * more
        gradient = obs.T @ (np.float32(batch.weight) * slope)
        if self.combine and batch.task == self.task:
            gradient = self.combine(gradient.reshape(-1)).reshape(gradient.shape)
        self._step(matrix, gradient, batch.rate)
        return loss

    def _goals(self, batch: Batch) -> Array:
        matrix, obs = self._matrix(batch.task), self._input(batch.next_states)
        online = obs @ matrix.weights
        following = obs @ matrix.target if self.config.target_every else online
        choice = online if self.config.double else following
        found: Array = goals_of(following, choice, batch.returns, batch.discounts)
        return found

    def _difference(self, values: Array, batch: Batch) -> tuple[float, Array]:
        """Loss of the values of the actions taken, and its gradient with respect to all values."""
        huber = self.config.loss == "huber"
        return temporal_difference(values, batch.actions, self._goals(batch), huber)[:2]

    def _step(self, matrix: Matrix, gradient: Array, rate: float) -> None:
        if self.memory.ewc:
            gradient = gradient + np.float32(self.memory.ewc) * matrix.fisher * (
                matrix.weights - matrix.anchor
            )
        norm = float(np.linalg.norm(gradient))
        if 0 < self.config.grad_clip < norm:
            gradient = gradient * np.float32(self.config.grad_clip / norm)
        matrix.step(gradient, self.config.lr * rate)
        self.updates += 1
        if self.config.target_every and self.updates % self.config.target_every == 0:
            for held in self.matrices.values():
                held.target = held.weights.copy()

    def errors(self, batch: Batch) -> Array:
        """Temporal differences of a batch, without learning from it."""
        values = self._input(batch.states) @ self._matrix(batch.task).weights
        taken = values[np.arange(len(values)), batch.actions]
        found: Array = np.abs(taken - self._goals(batch))
        return found

    # ── teaching and remembering ───────────────────────────────────────────────────────────────

    def network(self) -> Columns:
        """The matrix of the current task, for a lesson."""
        return {"matrix": self._matrix(self.task).weights.reshape(-1).copy()}

    def teach(self, network: Columns) -> None:
        """Take a donor's matrix of the current task as the teacher."""
        teacher = Matrix(self.inputs, self.actions, 0)
        teacher.take(_matrix_of(network))
        self.teacher = teacher.weights

    def adopt(self, network: Columns) -> None:
        """Start from the donor's weights instead of one's own."""
        self._matrix(self.task).take(_matrix_of(network))

    def blend(self, network: Columns, alpha: float) -> None:
        """Move the weights of the current task towards others'; the target stays."""
        mine, other = self._matrix(self.task), Matrix(self.inputs, self.actions, 0)
        other.take(_matrix_of(network))
        mine.weights += np.float32(alpha) * (other.weights - mine.weights)

    def twin(self) -> Columns:
        """Everything with which another agent goes on from here on the current task."""
        return self._matrix(self.task).state()

    def become(self, twin: Columns) -> None:
        """Go on from another agent's `twin`."""
        check_twin(twin, self.twin())
        self._matrix(self.task).restore(twin)

    def consolidate(self, sample: Callable[[], Batch]) -> None:
        """End of a task: remember which weights mattered to it (EWC)."""
        if not self.memory.ewc:
            return
        matrix, total = self._matrix(self.task), np.zeros((self.inputs + 1, self.actions))
        for _ in range(self.memory.ewc_batches):
            batch = sample()
            obs = self._input(batch.states)
            total += np.square(obs.T @ self._difference(obs @ matrix.weights, batch)[1])
        new, alpha = total / self.memory.ewc_batches, self.memory.ewc_alpha
        matrix.fisher = (alpha * matrix.fisher + (1 - alpha) * new).astype("<f4")
        matrix.anchor = matrix.weights.copy()

    def state(self) -> Columns:
        """Weights, targets and optimisers of all matrices."""
        held: Columns = {"updates": np.array([self.updates], dtype="<i8")}
        for name, matrix in self.matrices.items():
            held |= {f"{name}/{part}": column for part, column in matrix.state().items()}
        return held

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        groups: dict[str, Columns] = {}
        for key, column in state.items():
            name, _, part = key.rpartition("/")
            if name:
                groups.setdefault(name, {})[part] = column
        for name, columns in groups.items():
            self._named(name).restore(columns)
        self.updates = int(state["updates"][0])


def _matrix_of(network: Columns) -> Array:
    if network.keys() != {"matrix"}:
        raise DamagedData(f"the donor's network has {sorted(network)}; this learner has a matrix")
    return network["matrix"]
