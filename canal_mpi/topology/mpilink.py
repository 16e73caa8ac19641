"""Messages and links over MPI: bytes in bounded chunks, waits that sleep, have an end and a name.

Only buffers travel (upper-case calls): the lower-case ones pickle.
"""

import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep

import numpy as np
from mpi4py import MPI

from canal_mpi.columns import decode, encode
from canal_mpi.errors import DamagedData, ProtocolError
from canal_mpi.state import inside, under
from canal_mpi.topology.graphs import Edges
from canal_mpi.types import Columns, Offer, Parcel

CHUNK = 1 << 22
HEAD = struct.Struct("<8sQ")
HEAD_MAGIC = b"CANALMSG"
DRAIN_LIMIT = 1 << 36  # what is read and thrown away to stay in step with a refused message
OFFERS, REQUESTS, LESSON, TRADE = 11, 12, 13, 14
SMALL = 1 << 20  # offers and requests

COLLECTIVE = 120  # seconds

Idle = Callable[[int, str], None]


@contextmanager
def deadline() -> Iterator[None]:
    """For MPI's collective calls, which would wait for a silent rank for ever: SIGALRM ends us."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(COLLECTIVE)
    try:
        yield
    finally:
        signal.alarm(0)


class Mail:
    """Sends and receives byte strings without ever spinning or waiting for ever."""

    def __init__(self, comm: MPI.Intracomm, idle: Idle) -> None:
        self.comm, self._idle = comm, idle
        self._open: list[tuple[MPI.Request, object]] = []
        self.waited = 0.0

    def wait(self, request: MPI.Request, peer: int, phase: str) -> MPI.Status:
        """Sleep until the request is done; `idle` is asked meanwhile and may raise."""
        status, pause, start = MPI.Status(), 50e-6, monotonic()
        while not request.Test(status):
            self._idle(peer, phase)
            sleep(pause)
            pause = min(pause * 1.5, 0.02)
        self.waited += monotonic() - start
        return status

    def post(self, data: bytes, dest: int, tag: int) -> None:
        """Start sending; `settle` waits for the end of it."""
        view = memoryview(data)
        head = HEAD.pack(HEAD_MAGIC, len(view))
        self._open.append((self.comm.Isend([head, MPI.BYTE], dest, tag), head))
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._open.append((self.comm.Isend([part, MPI.BYTE], dest, tag), data))

    def settle(self, phase: str) -> None:
        """Wait until everything posted has left."""
        for request, _ in self._open:
            self.wait(request, -1, phase)
        self._open.clear()

    def collect(self, source: int, tag: int, limit: int, phase: str) -> bytearray:
        """The next message from `source`; ProtocolError where it breaks its promise."""
        head = bytearray(HEAD.size)
        self._receive(head, source, tag, phase)
        magic, length = HEAD.unpack(head)
        if magic != HEAD_MAGIC or length > DRAIN_LIMIT:
            raise ProtocolError(f"rank {source} sent no proper message in {phase}")
        if length > limit:
            scratch = bytearray(CHUNK)
            for start in range(0, length, CHUNK):
                part = memoryview(scratch)[: min(CHUNK, length - start)]
                self._receive(part, source, tag, phase)
            raise DamagedData(f"message of {length} bytes is over the limit of {limit}")
        data = bytearray(length)
        for start in range(0, length, CHUNK):
            self._receive(memoryview(data)[start : start + CHUNK], source, tag, phase)
        return data

    def _receive(self, buffer: bytearray | memoryview, source: int, tag: int, phase: str) -> None:
        request = self.comm.Irecv([buffer, MPI.BYTE], source, tag)
        status = self.wait(request, source, phase)
        if status.Get_count(MPI.BYTE) != len(buffer):
            found = status.Get_count(MPI.BYTE)
            raise ProtocolError(f"rank {source} sent {found} bytes, not {len(buffer)}, in {phase}")


class MpiLink:
    """Round-wise exchange over a distributed-graph communicator, direct neighbours only."""

    def __init__(self, comm: MPI.Intracomm, edges: Edges, idle: Idle, limit: int) -> None:
        self.agent = comm.Get_rank()
        self.sources: Sequence[int] = sorted(a for a, b in edges if b == self.agent)
        self.audience: Sequence[int] = sorted(b for a, b in edges if a == self.agent)
        with deadline():
            graph = comm.Create_dist_graph_adjacent(self.sources, self.audience, reorder=False)
        self.mail = Mail(graph, idle)
        self._limit = limit
        self._shelf: dict[tuple[int, int], bytes] = {}
        self._heard: dict[tuple[int, int], Offer] = {}

    @property
    def waited(self) -> float:
        """Seconds spent waiting for others so far."""
        return self.mail.waited

    def publish(self, offer: Offer | None, data: bytes) -> list[tuple[int, str]]:
        """Offer this round's lesson and hear the others' offers; returns refused ones."""
        if offer is not None:
            self._shelf[offer.key] = data
        message = encode(offers_to_columns([offer] if offer is not None else []))
        for agent in self.audience:
            self.mail.post(message, agent, OFFERS)
        refused = []
        for agent in self.sources:
            try:
                heard = self.mail.collect(agent, OFFERS, SMALL, "the exchange of offers")
                for new in columns_to_offers(decode(heard, SMALL), agent):
                    self._heard[new.key] = new
            except DamagedData as error:
                refused.append((agent, str(error)))
        self.mail.settle("the exchange of offers")
        return refused

    def offers(self) -> list[Offer]:
        """Everything heard so far, in an order that does not depend on arrival."""
        return [self._heard[key] for key in sorted(self._heard)]

    def fetch(self, wanted: Sequence[Offer]) -> list[Parcel]:
        """The wanted lessons; every agent takes part, also with nothing to want."""
        start, waited = monotonic(), self.mail.waited
        for agent in self.sources:
            keys = [offer.key for offer in wanted if offer.donor == agent]
            request = encode({"keys": np.array(keys, dtype="<i4").reshape(-1, 2)})
            self.mail.post(request, agent, REQUESTS)
        for agent in self.audience:
            self._serve(agent)
        waited = self.mail.waited - waited  # waiting for others to be there, not for bytes
        parcels = [self._take(offer, start, waited) for offer in wanted]
        self.mail.settle("the exchange of lessons")
        return parcels

    def trade(self, peers: Sequence[int], data: bytes) -> list[bytes]:
        """Swap messages with agents on the same task, which do the same at the same step."""
        phase = "sharing inside a task"
        for agent in peers:
            self.mail.post(data, agent, TRADE)
        swapped = [bytes(self.mail.collect(agent, TRADE, self._limit, phase)) for agent in peers]
        self.mail.settle(phase)
        return swapped

    def state(self) -> Columns:
        """Offers heard and lessons on the shelf, for a checkpoint."""
        offers = self.offers()
        held = under("heard", offers_to_columns(offers))
        held["heard/donor"] = np.array([offer.donor for offer in offers], dtype="<i4")
        for (donor, round_), data in self._shelf.items():
            held[f"shelf/{donor}-{round_}"] = np.frombuffer(data, dtype=np.uint8)
        return held

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        heard = inside("heard", state)
        donors = heard.pop("donor").tolist()
        rows = [
            {name: column[k : k + 1] for name, column in heard.items()} for k in range(len(donors))
        ]
        offers = [columns_to_offers(row, donor)[0] for row, donor in zip(rows, donors, strict=True)]
        self._heard = {offer.key: offer for offer in offers}
        for name, data in inside("shelf", state).items():
            donor, _, round_ = name.partition("-")
            self._shelf[int(donor), int(round_)] = data.tobytes()

    def _serve(self, agent: int) -> None:
        phase = "the exchange of requests"
        request = decode(self.mail.collect(agent, REQUESTS, SMALL, phase), SMALL).get("keys")
        if request is None or request.ndim != 2 or request.shape[1] != 2:
            raise ProtocolError(f"agent {agent} sent no proper request for lessons")
        for donor, round_ in request.tolist():
            self.mail.post(self._shelf.get((donor, round_), b""), agent, LESSON)

    def _take(self, offer: Offer, start: float, waited: float) -> Parcel:
        try:
            phase = "the exchange of lessons"
            data = bytes(self.mail.collect(offer.donor, LESSON, self._limit, phase))
            refusal = "" if data else "the donor no longer has it"
        except DamagedData as error:
            data, refusal = b"", str(error)
        return Parcel(offer, data, monotonic() - start, waited, refusal)


OFFER_COLUMNS = {
    "round": "<i4",
    "score": "<f8",
    "rows": "<i8",
    "bytes": "<i8",
    "task": "|S64",
    "embedding": "<f4",
}


def offers_to_columns(offers: Sequence[Offer]) -> Columns:
    """Offers for the wire; the sender's rank says who the donor is."""
    values = {
        "round": [offer.round for offer in offers],
        "score": [offer.score for offer in offers],
        "rows": [offer.rows for offer in offers],
        "bytes": [offer.bytes for offer in offers],
        "task": [offer.task.encode() for offer in offers],
    }
    embedding = np.stack([offer.embedding for offer in offers]) if offers else np.zeros((0, 0))
    columns = {n: np.array(v, dtype=OFFER_COLUMNS[n]) for n, v in values.items()}
    return columns | {"embedding": embedding.astype("<f4")}


def columns_to_offers(columns: Columns, donor: int) -> list[Offer]:
    """Checked offers from the wire."""
    if {name: column.dtype.str for name, column in columns.items()} != OFFER_COLUMNS:
        raise DamagedData(f"offer has the columns {sorted(columns)}")
    embedding = columns["embedding"]
    shapes = {column.shape for name, column in columns.items() if name != "embedding"}
    if shapes != {(len(columns["round"]),)} or embedding.shape[:1] not in shapes:
        raise DamagedData("offer's columns differ in length")
    if embedding.ndim != 2 or not np.isfinite(embedding).all():
        raise DamagedData("offer's embedding is no vector of finite numbers")
    if (columns["rows"] < 2).any() or (columns["bytes"] < 1).any() or (columns["round"] < 1).any():
        raise DamagedData("offer of an empty lesson")
    try:
        tasks = [task.decode() for task in columns["task"].tolist()]
    except UnicodeDecodeError as error:
        raise DamagedData("offer's task is not UTF-8") from error
    rows = zip(
        *(columns[name].tolist() for name in ("round", "score", "rows", "bytes")),
        tasks,
        strict=True,
    )
    return [
        Offer(donor, r, task, score, n, size, embedding[k])
        for k, (r, score, n, size, task) in enumerate(rows)
    ]
