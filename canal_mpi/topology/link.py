"""Links that need no MPI: an agent alone, and many agents in one process for tests."""

from collections import deque
from collections.abc import Sequence
from time import sleep

from canal_mpi.topology.desk import IN_ROUNDS, Desk, Letter, Terms
from canal_mpi.topology.graphs import Edges


class Nobody:
    """A carrier without anybody to write to."""

    received = 0

    def send(self, to: int, letter: Letter) -> None:
        """Nobody is there."""

    def poll(self) -> list[Letter]:
        """Nobody writes."""
        return []

    def settle(self) -> None:
        """Nothing was sent."""

    def pause(self, turn: int, peer: int, phase: str) -> None:
        """Nobody to wait for."""


class SoloLink(Desk):
    """The link of an agent that shares with nobody."""

    def __init__(self, agent: int = 0) -> None:
        super().__init__(agent, set(), Nobody())


class Threads:
    """A carrier among threads of one process; who waits serves the others meanwhile."""

    def __init__(self, mesh: "list[ThreadLink]") -> None:
        self.mesh, self.received = mesh, 0
        self.inbox: deque[Letter] = deque()

    def send(self, to: int, letter: Letter) -> None:
        """Into the other's inbox."""
        carrier = self.mesh[to].carrier
        assert isinstance(carrier, Threads)
        carrier.inbox.append(letter)

    def poll(self) -> list[Letter]:
        """What has come."""
        letters = [self.inbox.popleft() for _ in range(len(self.inbox))]
        self.received += len(letters)
        return letters

    def settle(self) -> None:
        """Everything has left at once."""

    def pause(self, turn: int, peer: int, phase: str) -> None:
        """Answer for agents whose threads have ended."""
        for link in self.mesh:
            link.poll()
        sleep(0.0002)


class ThreadLink(Desk):
    """The link of one of several agents in this process."""

    @classmethod
    def mesh(cls, size: int, edges: Edges, terms: Terms = IN_ROUNDS) -> "Sequence[ThreadLink]":
        """One link an agent, joined to each other."""
        links: list[ThreadLink] = []
        links += [cls(agent, edges, Threads(links), terms) for agent in range(size)]
        return links
