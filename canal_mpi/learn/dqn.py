"""DQN: double Q-learning with a target network, Huber loss and Adam, for several tasks.

The network of a task is made of blocks: a trunk and a head. With `learn.heads = shared` all tasks
share both, with `per_task` every task has a head (and an input layer in front of the trunk) of its
own, with `separate` a whole network.
"""

from collections.abc import Callable, Iterable, Sequence
from math import hypot
from typing import Any, NamedTuple, Protocol

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Batch, Columns, Learner, Spaces
from canal_mpi.learn.ewc import EWC
from canal_mpi.learn.fast_mlp import FastBackend, ParamBlock, array_of, has_own_input
from canal_mpi.machine import compiled
from canal_mpi.settings import Job, LearnConfig
from canal_mpi.state import strip_prefix, with_prefix

HALF, ONE, TWO = (np.float32(number) for number in (0.5, 1, 2))  # keep single precision


class QNetwork(Protocol):
    """Q-values of flat observations; `backward` goes with the last `forward`."""

    def forward(self, obs: Array) -> Array:
        """Q-values, remembered for `backward`; the next call may overwrite them."""
        ...

    def backward(self, grad: Array) -> None:
        """Gradients of the parameters from the gradient of the loss in the Q-values."""
        ...

    def q_values(self, obs: Array) -> Array:
        """Q-values alone; the next call may overwrite them."""
        ...


class Backend(Protocol):
    """Makes blocks (an input, a trunk, a head) and networks of them, the head last."""

    device: str
    threads: int

    def block(self, part: str, seed: int) -> ParamBlock:
        """A new block; an input layer is the first layer of what the trunk would be alone."""
        ...

    def q_network(
        self, blocks: Sequence[ParamBlock], input_scale: float, target: bool = False
    ) -> QNetwork:
        """The network of these blocks, or of their targets."""
        ...


def make_backend(spaces: Spaces, config: LearnConfig) -> Backend:
    """Compiled for a plain MLP on the CPU, which needs no torch; else torch."""
    plain = config.network == "mlp" and not config.dueling
    if plain and config.device == "cpu":
        return FastBackend(spaces, config)
    from canal_mpi.learn.networks import TorchBackend, choose_device  # imports torch

    device = choose_device(config.device)
    if plain and device == "cpu":
        return FastBackend(spaces, config)
    return TorchBackend(spaces, config, device)


class TaskNetwork(NamedTuple):
    """What acts and learns for one task."""

    q_network: QNetwork
    target_network: QNetwork
    blocks: dict[str, ParamBlock]  # by name


class DQN(Learner):
    """Double DQN, or what the settings of `learn` leave of it."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None:
        self.spaces, self.config, self.rehearsal = spaces, job.learn, job.rehearsal
        self.temperature, self._seed = job.reuse.temperature, seed
        self.backend = make_backend(spaces, job.learn)
        self.device, self.threads = self.backend.device, self.backend.threads
        scaled = job.learn.scale_input and spaces.dtype == "|u1"
        self.input_scale = 1 / 255 if scaled else 1.0
        self.blocks: dict[str, ParamBlock] = {}
        self._networks: dict[str, TaskNetwork] = {}
        self.ewc = EWC(job.rehearsal.ewc_alpha)
        self.teacher: QNetwork | None = None
        self.task, self.updates = "", 0
        self._grad = np.zeros((0, 0), dtype=np.float32)  # of the Q-values; used again

    # ── networks of tasks ──────────────────────────────────────────────────────────────────────

    def set_task(self, task: str) -> None:
        """Act and learn for this task from now on, without a teacher."""
        self.task, self.teacher = task, None
        self.network(task)

    def block_names(self, task: str) -> dict[str, str]:
        """The blocks that a task uses: by part (input, trunk, head) the name of each."""
        heads = self.config.heads
        trunk = f"trunk/{task}" if heads == "separate" else "trunk"
        own = {"input": f"input/{task}"} if has_own_input(self.config) else {}
        return own | {"trunk": trunk, "head": "head" if heads == "shared" else f"head/{task}"}

    def network(self, task: str) -> TaskNetwork:
        """The network of a task; made when it is first used."""
        if task not in self._networks:
            blocks = {
                name: self._block(part, name) for part, name in self.block_names(task).items()
            }
            made = list(blocks.values())
            online = self.backend.q_network(made, self.input_scale)
            target = self.backend.q_network(made, self.input_scale, target=True)
            self._networks[task] = TaskNetwork(online, target, blocks)
        return self._networks[task]

    def _block(self, part: str, name: str) -> ParamBlock:
        if name not in self.blocks:
            seed = self._seed("trunk" if part == "input" else name)
            self.blocks[name] = self.backend.block(part, seed)
        return self.blocks[name]

    def _parts(self) -> dict[str, ParamBlock]:
        """The blocks of the current task by part."""
        return {part: self.blocks[name] for part, name in self.block_names(self.task).items()}

    # ── acting ─────────────────────────────────────────────────────────────────────────────────

    def q_values(self, obs: Array) -> Array:
        """Q-values of a few observations of the current task."""
        return self.network(self.task).q_network.q_values(obs.reshape(len(obs), -1)).copy()

    def act(self, obs: Array) -> Array:
        """The greedy action for each observation of the current task."""
        best: Array = self.q_values(obs).argmax(axis=1)
        return best

    # ── learning ───────────────────────────────────────────────────────────────────────────────

    def update(self, batch: Batch, average_grad: Callable[[Array], Array] | None = None) -> float:
        """One step of Adam on a batch of one task; returns the loss.

        `average_grad` turns this agent's gradient into the mean of several agents'.
        """
        if batch.stored_q is not None and self.rehearsal.distill_coef:
            loss, grad = self._rehearse(batch, batch.stored_q)
        else:
            q, loss, grad, _ = self._td_loss(batch)
            if batch.imitation and self.teacher is not None:
                wanted = self.teacher.q_values(batch.states)
                extra, extra_grad = policy_kl(q, wanted, self.temperature)
                loss += batch.imitation * extra
                grad += np.float32(batch.imitation) * extra_grad
        if batch.weight != 1:
            grad *= np.float32(batch.weight)
        network = self.network(batch.task)
        network.q_network.backward(grad)
        self._optimize(network.blocks, self.config.lr * batch.lr_scale, average_grad)
        return loss

    def _rehearse(self, batch: Batch, stored_q: Array) -> tuple[float, Array]:
        """Loss and gradient of playing an old task otherwise than the stored Q-values say.

        Times the temperature, so that its gradient is as steep as that of other losses.
        """
        q = self.network(batch.task).q_network.forward(batch.states)
        loss, grad = policy_kl(q, stored_q, self.temperature)
        weight = self.rehearsal.distill_coef * self.temperature
        room = self._grad_of(q)
        room[:] = np.float32(weight) * grad
        return weight * loss, room

    def _td_loss(self, batch: Batch) -> tuple[Array, float, Array, Array]:
        """Q-values of the states, the loss of their TD errors, its gradient, and the errors."""
        q_network, target_network, _ = self.network(batch.task)
        config = self.config
        target_q = online_q = (
            target_network if config.target_update_interval else q_network
        ).q_values(batch.next_states)
        if config.double and config.target_update_interval:
            online_q = q_network.q_values(batch.next_states)
        targets = td_targets(target_q, online_q, batch.returns, batch.discounts)
        q = q_network.forward(batch.states)
        huber, room = config.loss == "huber", self._grad_of(q)
        loss, errors = td_loss(q, batch.actions, targets, huber, room)
        return q, loss, room, errors

    def _grad_of(self, q: Array) -> Array:
        """Where the gradient of the loss in the Q-values is written."""
        if self._grad.shape != q.shape:
            self._grad = np.empty_like(q)
        return self._grad

    def _optimize(
        self,
        blocks: dict[str, ParamBlock],
        lr: float,
        average_grad: Callable[[Array], Array] | None,
    ) -> None:
        """A step of Adam for the blocks of a task; now and then copy all to their targets."""
        if average_grad:
            _average(blocks.values(), average_grad)
        if self.rehearsal.ewc_lambda:
            self.ewc.add_penalty(blocks, self.rehearsal.ewc_lambda)
        if self.config.max_grad_norm:
            _clip(blocks.values(), self.config.max_grad_norm)
        for block in blocks.values():
            block.adam_step(lr)
        self.updates += 1
        if (
            self.config.target_update_interval
            and self.updates % self.config.target_update_interval == 0
        ):
            self.update_target()

    def update_target(self) -> None:
        """Copy all parameters to the target networks."""
        for block in self.blocks.values():
            block.update_target()

    def td_errors(self, batch: Batch) -> Array:
        """Absolute TD errors of a batch, without learning from it."""
        return np.abs(self._td_loss(batch)[3])

    def consolidate(self, sample: Callable[[], Batch]) -> None:
        """End of a task: measure which parameters mattered to it (EWC)."""
        if not self.rehearsal.ewc_lambda:
            return
        with self.ewc.measuring(self.network(self.task).blocks) as measure:
            for _ in range(self.rehearsal.ewc_batches):
                batch = sample()
                grad = self._td_loss(batch)[2]
                self.network(batch.task).q_network.backward(grad)
                measure()

    # ── weights of the current task, for other agents ──────────────────────────────────────────

    def get_weights(self) -> Columns:
        """The network of the current task, for a lesson."""
        return {part: array_of(block.params) for part, block in self._parts().items()}

    def set_weights(self, weights: Columns) -> None:
        """Start from a donor's weights, the target too."""
        _set_weights(weights, self._parts())

    def set_teacher(self, weights: Columns) -> None:
        """Take a donor's network of the current task as the one to imitate."""
        blocks = {part: self.backend.block(part, seed=0) for part in self.block_names(self.task)}
        _set_weights(weights, blocks)
        self.teacher = self.backend.q_network(list(blocks.values()), self.input_scale)

    def agreement(self, obs: Array) -> tuple[float, float]:
        """KL(teacher ‖ own policy) and the fraction of equal greedy actions."""
        if self.teacher is None:
            return super().agreement(obs)
        own, wanted = self.q_values(obs), self.teacher.q_values(obs.reshape(len(obs), -1))
        kl, _ = policy_kl(own, wanted, self.temperature)
        return kl, float((own.argmax(axis=1) == wanted.argmax(axis=1)).mean())

    def polyak_update(self, weights: Columns, tau: float) -> None:
        """Move the weights towards others': (1 − τ) · own + τ · theirs; the target stays."""
        _check_fits(weights, self._parts())
        for part, block in self._parts().items():
            block.polyak_update(weights[part], tau)

    def task_state_dict(self) -> Columns:
        """Weights, target and Adam of the current task, for an agent that joins in."""
        held: Columns = {}
        for part, block in self._parts().items():
            held |= with_prefix(part, block.state_dict())
        return held

    def load_task_state_dict(self, state: Columns) -> None:
        """Take over another agent's `task_state_dict`, if its network is of the same kind."""
        _check_state(state, self.task_state_dict())
        for part, block in self._parts().items():
            block.load_state_dict(strip_prefix(part, state))

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> Columns:
        """Weights, targets and Adam of all blocks, and EWC."""
        held: Columns = {"updates": np.array([self.updates], dtype="<i8")}
        for name, block in self.blocks.items():
            held |= with_prefix(f"blocks/{name}", block.state_dict())
        return held | with_prefix("ewc", self.ewc.state_dict())

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""
        groups: dict[str, Columns] = {}
        for key, column in strip_prefix("blocks", state).items():
            name, _, part = key.rpartition("/")
            groups.setdefault(name, {})[part] = column
        for name, columns in sorted(groups.items(), reverse=True):  # trunks before heads
            self._block(name.partition("/")[0], name).load_state_dict(columns)
        self.ewc.load_state_dict(strip_prefix("ewc", state))
        self.updates = int(state["updates"][0])


# ── losses: each gives its mean over the batch and its gradient in the Q-values ────────────────


@compiled
def td_targets(target_q: Any, online_q: Any, returns: Any, discounts: Any) -> Any:
    """Returns plus the discounted target_q of the action that online_q finds best."""
    targets = np.empty_like(returns)
    for i in range(len(targets)):
        best = 0
        for j in range(1, online_q.shape[1]):
            if online_q[i, j] > online_q[i, best]:
                best = j
        targets[i] = returns[i] + discounts[i] * target_q[i, best]
    return targets


@compiled
def td_loss(q: Any, actions: Any, targets: Any, huber: bool, grad: Any) -> tuple[float, Any]:
    """Huber or squared loss of the TD errors, and the errors; the gradient goes to `grad`."""
    rows, loss, errors = len(actions), 0.0, np.empty_like(targets)
    for i in range(rows):
        error = q[i, actions[i]] - targets[i]
        if huber:
            slope = min(max(error, -ONE), ONE)
            loss += slope * (error - HALF * slope)
        else:
            slope = TWO * error
            loss += error * error
        grad[i, :] = 0
        grad[i, actions[i]] = slope / rows
        errors[i] = error
    return loss / rows, errors


def policy_kl(q: Array, wanted_q: Array, temperature: float) -> tuple[float, Array]:
    """KL(wanted ‖ own) of the softmax policies of Q-values, as in QDagger."""
    log_policy, log_wanted = _log_softmax(q, temperature), _log_softmax(wanted_q, temperature)
    wanted = np.exp(log_wanted)
    loss = float((wanted * (log_wanted - log_policy)).sum(axis=1).mean())
    return loss, (np.exp(log_policy) - wanted) / (temperature * len(q))


def _log_softmax(q: Array, temperature: float) -> Array:
    lower = (q - q.max(axis=1, keepdims=True)) / temperature
    found: Array = lower - np.log(np.exp(lower).sum(axis=1, keepdims=True))
    return found


# ── helpers ────────────────────────────────────────────────────────────────────────────────────


def _set_weights(weights: Columns, blocks: dict[str, ParamBlock]) -> None:
    _check_fits(weights, blocks)
    for part, block in blocks.items():
        block.set(weights[part])


def _check_fits(weights: Columns, blocks: dict[str, ParamBlock]) -> None:
    for part, block in blocks.items():
        if part not in weights or weights[part].shape != tuple(block.params.shape):
            raise DamagedData(f"the donor's network has another {part} than this learner")


def _check_state(theirs: Columns, mine: Columns) -> None:
    """DamagedData where another agent's state does not fit one's own network."""
    if theirs.keys() != mine.keys():
        raise DamagedData(f"the other's learner has the parts {sorted(theirs)}")
    for name, column in theirs.items():
        wanted = mine[name]
        if column.dtype != wanted.dtype or column.shape != wanted.shape:
            raise DamagedData(f"the other's {name} is {column.dtype.str} of shape {column.shape}")
        if not np.isfinite(column).all() or (column.dtype.kind == "i" and (column < 0).any()):
            raise DamagedData(f"the other's {name} holds a number that can't be")


def _average(blocks: Iterable[ParamBlock], average_grad: Callable[[Array], Array]) -> None:
    """Replace the gradients by those that the agents share."""
    shared = average_grad(np.concatenate([array_of(block.grad) for block in blocks]))
    start = 0
    for block in blocks:
        block.grad[:] = block.put(shared[start : start + len(block.grad)])
        start += len(block.grad)


def _clip(blocks: Iterable[ParamBlock], max_grad_norm: float) -> None:
    norm = hypot(*(block.grad_norm() for block in blocks))
    if norm > max_grad_norm:
        for block in blocks:
            block.grad *= max_grad_norm / norm
