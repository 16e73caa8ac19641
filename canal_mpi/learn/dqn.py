"""DQN: double Q-learning with a target network, Huber loss and Adam, for several tasks.

`examples/plain_dqn.py` is the same update for one task, in plain torch; a test compares the two.

The network of a task is made of blocks: a trunk and a head. With `learn.heads = shared` all tasks
share both, with `per_task` every task has a head (and an input layer in front of the trunk) of its
own, with `separate` a whole network.
"""

from collections.abc import Callable
from math import hypot
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from canal_mpi.errors import DamagedData, needed_for
from canal_mpi.interfaces import Array, Batch, Columns, Learner, Spaces
from canal_mpi.learn.fast_mlp import FastBackend, FastQNetwork, ParamBlock, array_of, has_own_input
from canal_mpi.settings import Job, LearnConfig
from canal_mpi.state import compiled, strip_prefix, with_prefix

if TYPE_CHECKING:
    from canal_mpi.learn.networks import TorchBackend, TorchQNetwork

SMALLEST = 1e-6  # temperature
HALF, ONE, TWO = (np.float32(number) for number in (0.5, 1, 2))  # keep single precision


QNetwork: TypeAlias = "FastQNetwork | TorchQNetwork"
Backend: TypeAlias = "FastBackend | TorchBackend"


def make_backend(spaces: Spaces, config: LearnConfig) -> Backend:
    """Compiled for a plain MLP on the CPU, which needs no torch; else torch."""
    plain = config.network == "mlp"
    if plain and config.device == "cpu":
        return FastBackend(spaces, config)
    name = "device" if plain else "network"
    with needed_for(f"learn.{name}={getattr(config, name)}"):
        from canal_mpi.learn.networks import TorchBackend, choose_device  # imports torch

    device = choose_device(config.device)
    if plain and device == "cpu":
        return FastBackend(spaces, config)
    return TorchBackend(spaces, config, device)


class TaskNetwork(NamedTuple):
    """What acts and learns for one task."""

    online: QNetwork
    target: QNetwork
    blocks: dict[str, ParamBlock]  # by name


class DQN(Learner):
    """Double DQN, or what the settings of `learn` leave of it."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None:
        self.spaces, self.config, self.rehearsal = spaces, job.learn, job.rehearsal
        self.temperature, self._seed = job.reuse.temperature, seed
        self.backend = make_backend(spaces, job.learn)
        self.device = self.backend.device  # told in /agents
        self.blocks: dict[str, ParamBlock] = {}
        self._networks: dict[str, TaskNetwork] = {}
        self.teacher: QNetwork | None = None
        self.task, self.updates = "", 0

    # ── acting and learning ────────────────────────────────────────────────────────────────────

    def q_values(self, obs: Array) -> Array:
        """Q-values of a few observations of the current task."""
        return self.network(self.task).online.q_values(obs.reshape(len(obs), -1)).copy()

    def act(self, obs: Array) -> Array:
        """The greedy action for each observation of the current task."""
        best: Array = self.q_values(obs).argmax(axis=1)
        return best

    def update(self, batch: Batch) -> float:
        """One step of Adam on a batch of one task; returns the loss."""
        network = self.network(batch.task)
        loss, grad_q = self.loss(batch)
        network.online.backward(grad_q)
        blocks = network.blocks.values()
        if self.rehearsal.ewc_lambda:
            for block in blocks:
                block.add_penalty(self.rehearsal.ewc_lambda)
        if self.config.max_grad_norm:
            norm = hypot(*(block.grad_norm() for block in blocks))
            if norm > self.config.max_grad_norm:
                for block in blocks:
                    block.grad *= self.config.max_grad_norm / norm
        for block in blocks:
            block.adam_step(self.config.lr * batch.lr_scale)
        self.updates += 1
        interval = self.config.target_update_interval
        if interval and self.updates % interval == 0:
            self.update_target()
        return loss

    def loss(self, batch: Batch) -> tuple[float, Array]:
        """The loss of a batch and its gradient in the Q-values, for `backward`."""
        online = self.network(batch.task).online
        if batch.stored_q is not None and batch.distill:
            loss, grad_q = policy_kl(online.forward(batch.states), batch.stored_q, self.temperature)
            return batch.distill * loss, np.float32(batch.distill) * grad_q
        q, targets = self._q_and_targets(batch)
        loss, grad_q = td_loss(q, batch.actions, targets, self.config.loss == "huber")
        if batch.imitation and self.teacher is not None:
            wanted = self.teacher.q_values(batch.states)
            kl, grad_kl = policy_kl(q, wanted, self.temperature)
            loss += batch.imitation * kl
            grad_q += np.float32(batch.imitation) * grad_kl
        return loss, grad_q

    def _q_and_targets(self, batch: Batch) -> tuple[Array, Array]:
        """Q-values of the states, and what those of the actions taken should be: n-step returns
        plus a bootstrapped value."""
        network, config = self.network(batch.task), self.config
        has_target = bool(config.target_update_interval)
        if config.double or not has_target:
            q, online_q = network.online.forward_both(batch.states, batch.next_states)
        else:
            q, online_q = network.online.forward(batch.states), None
        target_q = network.target.q_values(batch.next_states) if has_target else online_q
        chooser = target_q if online_q is None else online_q
        return q, td_targets(target_q, chooser, batch.returns, batch.discounts)

    def update_target(self) -> None:
        """Copy all parameters to the target networks."""
        for block in self.blocks.values():
            block.update_target()

    def consolidate(self, sample: Callable[[], Batch]) -> None:
        """End of a task: measure which parameters mattered to it (EWC)."""
        if not self.rehearsal.ewc_lambda:
            return
        blocks = self.network(self.task).blocks.values()
        squares = [block.put(np.zeros(len(block.grad), np.float32)) for block in blocks]
        for _ in range(self.rehearsal.ewc_batches):
            batch = sample()
            _, grad_q = self.loss(batch)
            self.network(batch.task).online.backward(grad_q)
            for total, block in zip(squares, blocks, strict=True):
                total += block.grad * block.grad
        for total, block in zip(squares, blocks, strict=True):
            block.consolidate(total, self.rehearsal.ewc_batches, self.rehearsal.ewc_alpha)

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
            names = self.block_names(task)
            blocks = {name: self._block(part, name) for part, name in names.items()}
            made = list(blocks.values())
            online = self.backend.q_network(made)
            target = self.backend.q_network(made, target=True)
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

    # ── weights of the current task, for other agents ──────────────────────────────────────────

    def get_weights(self) -> Columns:
        """The network of the current task, for a lesson."""
        return {part: array_of(block.params) for part, block in self._parts().items()}

    def set_weights(self, weights: Columns) -> None:
        """Start from a donor's weights, the target too."""
        _check_like(weights, self.get_weights())
        for part, block in self._parts().items():
            block.set(weights[part])

    def set_teacher(self, weights: Columns) -> None:
        """Take a donor's network of the current task as the one to imitate."""
        _check_like(weights, self.get_weights())
        blocks = {part: self.backend.block(part, seed=0) for part in self.block_names(self.task)}
        for part, block in blocks.items():
            block.set(weights[part])
        self.teacher = self.backend.q_network(list(blocks.values()))

    def teacher_q_values(self, obs: Array) -> Array:
        """What the teacher says of observations."""
        if self.teacher is None:
            return super().teacher_q_values(obs)
        return self.teacher.q_values(obs.reshape(len(obs), -1)).copy()

    def agreement(self, obs: Array) -> tuple[float, float]:
        """KL(teacher ‖ own policy) and the fraction of equal greedy actions."""
        if self.teacher is None:
            return super().agreement(obs)
        own, wanted = self.q_values(obs), self.teacher_q_values(obs)
        kl, _ = policy_kl(own, wanted, self.temperature)
        return float(kl), float((own.argmax(axis=1) == wanted.argmax(axis=1)).mean())

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> Columns:
        """Weights, targets, Adam and EWC of all blocks."""
        held: Columns = {"updates": np.array([self.updates], dtype="<i8")}
        for name, block in self.blocks.items():
            held |= with_prefix(f"blocks/{name}", block.state_dict())
        return held

    def policy_state_dict(self) -> Columns:
        """The weights of all blocks: a quarter of `state_dict`."""
        weights = {name: block.state_dict()["params"] for name, block in self.blocks.items()}
        return {f"blocks/{name}/params": params for name, params in weights.items()}

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave; tasks that it did not know are new again."""
        self.blocks.clear()
        self._networks.clear()
        groups: dict[str, Columns] = {}
        for key, column in strip_prefix("blocks", state).items():
            name, _, part = key.rpartition("/")
            groups.setdefault(name, {})[part] = column
        for name, columns in sorted(groups.items(), reverse=True):  # trunks before heads
            self._block(name.partition("/")[0], name).load_state_dict(columns)
        self.updates = int(state["updates"][0]) if "updates" in state else 0


# ── losses: each gives its mean over the batch and its gradient in the Q-values ────────────────


@compiled
def td_targets(target_q: Any, online_q: Any, returns: Any, discounts: Any) -> Array:
    """Returns plus the discounted target_q of the action that online_q finds best."""
    targets: Array = np.empty_like(returns)
    for i in range(len(targets)):
        best = 0
        for j in range(1, online_q.shape[1]):
            if online_q[i, j] > online_q[i, best]:
                best = j
        targets[i] = returns[i] + discounts[i] * target_q[i, best]
    return targets


@compiled
def td_loss(q: Any, actions: Any, targets: Any, huber: bool) -> tuple[float, Array]:
    """Huber or squared loss of the TD errors of the actions."""
    rows, loss, grad = len(actions), 0.0, np.zeros_like(q)
    for i in range(rows):
        error = q[i, actions[i]] - targets[i]
        if huber:
            clipped = min(max(error, -ONE), ONE)
            loss += clipped * (error - HALF * clipped)
            grad[i, actions[i]] = clipped / rows
        else:
            loss += error * error
            grad[i, actions[i]] = TWO * error / rows
    return loss / rows, grad


@compiled
def policy_kl(q: Any, wanted_q: Any, temperature: float) -> tuple[float, Array]:
    """KL(wanted ‖ own) of the softmax policies of Q-values, as in QDagger.

    Their temperature is relative to how far the wanted Q-values of a state lie apart (their mean
    standard deviation). The gradient is that of temperature · KL, as long as a TD loss's.
    """
    rows, actions = q.shape
    spread, loss, grad = 0.0, 0.0, np.empty_like(q)
    for i in range(rows):
        spread += np.std(wanted_q[i]) / rows
    scale = np.float32(1 / max(temperature * spread, SMALLEST))
    for i in range(rows):
        own, wanted = q[i].max(), wanted_q[i].max()
        own_sum, wanted_sum = 0.0, 0.0
        for j in range(actions):
            own_sum += np.exp((q[i, j] - own) * scale)
            wanted_sum += np.exp((wanted_q[i, j] - wanted) * scale)
        log_sums = np.log(own_sum) - np.log(wanted_sum)
        for j in range(actions):
            p = np.exp((q[i, j] - own) * scale) / own_sum
            w = np.exp((wanted_q[i, j] - wanted) * scale) / wanted_sum
            apart = ((wanted_q[i, j] - wanted) - (q[i, j] - own)) * scale + log_sums
            loss += w * apart / rows
            grad[i, j] = (p - w) / rows
    return max(loss, 0.0), grad


# ── helpers ────────────────────────────────────────────────────────────────────────────────────


def _check_like(theirs: Columns, mine: Columns) -> None:
    """DamagedData where another agent's network does not fit one's own."""
    if theirs.keys() != mine.keys():
        raise DamagedData(f"the other's network has the parts {sorted(theirs)}")
    for name, column in theirs.items():
        wanted = mine[name]
        if column.dtype != wanted.dtype or column.shape != wanted.shape:
            raise DamagedData(f"the other's {name} is {column.dtype.str} of shape {column.shape}")
        if not np.isfinite(column).all():
            raise DamagedData(f"the other's {name} holds a number that can't be")
