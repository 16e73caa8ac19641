"""Parameter sharing inside a task: weights blended, or gradients averaged, with neighbours."""

from collections.abc import Callable, Sequence

import numpy as np

from canal_mpi.errors import DamagedData, logger
from canal_mpi.interfaces import Array, Columns, Learner, Link, MessageKind
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import SyncConfig

LIMIT = 1 << 32


class Group:
    """Neighbours on the same task that trade messages; whoever is done leaves."""

    def __init__(self, link: Link, kind: MessageKind, peers: Sequence[int]) -> None:
        self.link, self.kind, self.peers = link, kind, list(peers)

    def trade(self, data: bytes) -> list[tuple[int, bytes]]:
        """Swap a message with those who are still there; an empty answer is a goodbye."""
        answers = self.link.trade(self.peers, data, self.kind)
        gone = [agent for agent, answer in answers if not answer]
        self.peers = [agent for agent in self.peers if agent not in gone]
        return [(agent, answer) for agent, answer in answers if answer]

    def leave(self) -> None:
        """Say goodbye; nobody has to answer."""
        self.link.leave(self.peers, self.kind)
        self.peers = []


class Sync:
    """Keeps the learners of neighbours on the same task together."""

    def __init__(self, config: SyncConfig, number: int, link: Link) -> None:
        self.config, self.number, self.link = config, number, link
        self.group = Group(link, MessageKind.WEIGHTS, [])
        self.average_grad: Callable[[Array], Array] | None = None  # while gradients are shared

    def begin(self, peers: Sequence[int]) -> None:
        """A new task, with these agents on it too."""
        kind = MessageKind.GRADIENTS if self.config.mode == "gradients" else MessageKind.WEIGHTS
        self.group = Group(self.link, kind, peers if self.config.mode != "none" else [])

    def start(self, learner: Learner) -> None:
        """Play begins: with gradients, everybody goes on from the lowest agent's learner."""
        if self.config.mode != "gradients" or not self.group.peers:
            return
        twins = dict(self.group.trade(encode(learner.task_state_dict())))
        lowest = min([self.number, *twins])
        try:
            if lowest != self.number:
                learner.load_task_state_dict(decode(twins[lowest], LIMIT))
        except DamagedData as error:
            logger.warning("agent %d's learner is not taken over: %s", lowest, error)
        self.average_grad = self._average

    def blend(self, learner: Learner, done: int) -> bool:
        """Every so many own steps: move the weights towards the neighbours' mean; whether it is."""
        if self.config.mode != "weights" or not self.group.peers or done % self.config.interval:
            return False
        mine = learner.get_weights()
        newest = dict(self.group.trade(self._pack(mine)))
        theirs = [
            found for a, data in sorted(newest.items()) if (found := self._unpack(a, data, mine))
        ]
        if theirs:
            mean = {name: np.mean([t[name] for t in theirs], axis=0) for name in mine}
            others = {name: column.astype(np.float32) for name, column in mean.items()}
            learner.polyak_update(others, self.config.tau)
        return True

    def leave(self) -> None:
        """This agent is done with playing the task."""
        self.group.leave()
        self.average_grad = None

    def _average(self, gradient: Array) -> Array:
        """The mean of everybody's gradient, the same bits on every agent."""
        if not self.group.peers:
            return gradient
        mine = self._pack({"gradient": gradient})
        found = {self.number: mine} | dict(self.group.trade(mine))
        parts = [self._unpack(a, data, {"gradient": gradient}) for a, data in sorted(found.items())]
        whole = [part["gradient"] for part in parts if part]
        mean: Array = np.mean(whole, axis=0) if whole else np.zeros_like(gradient)
        return mean.astype(np.float32)

    def _pack(self, columns: Columns) -> bytes:
        """Columns as they go over the wire; empty ones would mean goodbye."""
        return encode({n: c.astype(f"<f{self._width}") for n, c in columns.items()})

    @property
    def _width(self) -> int:
        return 2 if self.config.dtype == "float16" else 4

    def _unpack(self, agent: int, data: bytes, like: Columns) -> Columns:
        """A neighbour's columns, checked; nothing where they don't fit."""
        try:
            found = decode(data, LIMIT)
            shapes = {n: c.shape for n, c in like.items()}
            if {n: c.shape for n, c in found.items()} != shapes:
                raise DamagedData(f"found the columns {sorted(found)}; expected {sorted(like)}")
            if any(c.dtype.str != f"<f{self._width}" for c in found.values()):
                raise DamagedData(f"expected numbers of the type {self.config.dtype}")
            if not all(np.isfinite(c).all() for c in found.values()):
                raise DamagedData("a number is not finite")
        except DamagedData as error:
            logger.warning("what agent %d sent to sync is refused: %s", agent, error)
            return {}
        return {name: column.astype(np.float32) for name, column in found.items()}
