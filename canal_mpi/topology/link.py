"""Links that need no MPI: none at all, and many agents in one process for tests."""

from collections.abc import Sequence
from queue import Queue
from time import monotonic

import numpy as np

from canal_mpi.state import inside, record_from_columns, record_to_columns, under
from canal_mpi.topology.graphs import Edges
from canal_mpi.types import Columns, Offer, Parcel


class SoloLink:
    """The link of an agent that shares with nobody."""

    def __init__(self, agent: int = 0) -> None:
        self.agent = agent
        self.audience: Sequence[int] = ()
        self.waited = 0.0

    def publish(self, offer: Offer | None, data: bytes) -> list[tuple[int, str]]:
        """Nobody listens."""
        return []

    def offers(self) -> list[Offer]:
        """Nobody offers."""
        return []

    def fetch(self, wanted: Sequence[Offer]) -> list[Parcel]:
        """Nothing is there to be fetched."""
        return []

    def trade(self, peers: Sequence[int], data: bytes) -> list[bytes]:
        """There are no peers."""
        return []

    def state(self) -> Columns:
        """Nothing was ever heard."""
        return {}

    def restore(self, state: Columns) -> None:
        """There is nothing to take back."""


class ThreadLink:
    """Round-wise exchange among threads, with the same calls as over MPI."""

    def __init__(self, agent: int, edges: Edges, boxes: dict[tuple[int, int], "Queue[Packet]"]):
        self.agent, self.waited, self._boxes = agent, 0.0, boxes
        self.audience: Sequence[int] = sorted(b for a, b in edges if a == agent)
        self._heard: dict[tuple[int, int], tuple[Offer, bytes]] = {}
        self._sources = sorted(a for a, b in edges if b == agent)

    @classmethod
    def mesh(cls, size: int, edges: Edges) -> "list[ThreadLink]":
        """One link an agent, joined by queues."""
        boxes: dict[tuple[int, int], Queue[Packet]] = {edge: Queue() for edge in edges}
        return [cls(agent, edges, boxes) for agent in range(size)]

    def publish(self, offer: Offer | None, data: bytes) -> list[tuple[int, str]]:
        """Hand this round's lesson to the audience and hear theirs."""
        for agent in self.audience:
            self._boxes[self.agent, agent].put((offer, data))
        for source in self._sources:
            heard, payload = self._boxes[source, self.agent].get(timeout=60)
            if heard is not None:
                self._heard[heard.key] = (heard, payload)
        return []

    def offers(self) -> list[Offer]:
        """Everything heard so far."""
        return [offer for offer, _ in self._heard.values()]

    def fetch(self, wanted: Sequence[Offer]) -> list[Parcel]:
        """The wanted lessons."""
        start = monotonic()
        return [
            Parcel(offer, self._heard[offer.key][1], monotonic() - start, 0.0) for offer in wanted
        ]

    def trade(self, peers: Sequence[int], data: bytes) -> list[bytes]:
        """Swap messages with agents on the same task."""
        for agent in peers:
            self._boxes[self.agent, agent].put((None, data))
        return [self._boxes[agent, self.agent].get(timeout=60)[1] for agent in peers]

    def state(self) -> Columns:
        """Everything heard so far."""
        held: Columns = {}
        for k, (offer, data) in enumerate(self._heard.values()):
            held |= under(f"{k:06d}/offer", record_to_columns(offer))
            held[f"{k:06d}/data"] = np.frombuffer(data, dtype=np.uint8)
        return held

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        self._heard.clear()
        for key in sorted({name.partition("/")[0] for name in state}):
            offer = record_from_columns(Offer, inside(f"{key}/offer", state))
            self._heard[offer.key] = (offer, state[f"{key}/data"].tobytes())


Packet = tuple[Offer | None, bytes]
