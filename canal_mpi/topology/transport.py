"""Bytes over MPI in bounded chunks; waits sleep, have a deadline and say whom they wait for.

Only buffers travel (upper-case calls): the lower-case ones pickle.
"""

import signal
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic, sleep
from typing import Any

from mpi4py import MPI

from canal_mpi.errors import DamagedData, ProtocolError
from canal_mpi.topology import Tag
from canal_mpi.topology.exchange import KINDS, OFFERS, OFFERS_LIMIT, REQUEST, Message, Transport
from canal_mpi.topology.graphs import Edges

CHUNK = 1 << 22
HEAD = struct.Struct("<8sQ")
HEAD_MAGIC = b"CANALMSG"
EXCHANGE_HEAD = struct.Struct("<8sBiiiQ")  # magic, kind, donor, its round, sender's round, bytes
EXCHANGE_MAGIC = b"CANALEXC"
DRAIN_LIMIT = 1 << 36  # what is read and thrown away to stay in step with a refused message
COLLECTIVE = 120  # seconds
Idle = Callable[[int, str], None]


@contextmanager
def deadline(seconds: float = COLLECTIVE) -> Iterator[None]:
    """For MPI's collective calls, which would wait for a silent rank for ever: SIGALRM ends us."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ceil(seconds))
    try:
        yield
    finally:
        signal.alarm(0)


def pause(turn: int) -> None:
    """Sleep a little longer each time: waiting costs no CPU."""
    sleep(min(50e-6 * 1.5 ** min(turn, 20), 0.02))


class PolledComm:
    """Sends and receives byte strings without ever spinning or waiting for ever."""

    def __init__(self, comm: MPI.Intracomm, idle: Idle) -> None:
        self.comm, self._idle = comm, idle
        self._open: list[tuple[MPI.Request, object]] = []
        self.waited = 0.0

    def wait(self, request: MPI.Request, peer: int, phase: str) -> MPI.Status:
        """Sleep until the request is done; `idle` is asked meanwhile and may raise."""
        status, turn, start = MPI.Status(), 0, monotonic()
        while not request.Test(status):
            self._idle(peer, phase)
            pause(turn)
            turn += 1
        self.waited += monotonic() - start
        return status

    def post(self, data: bytes, dest: int, tag: int) -> None:
        """Start sending; `settle` waits for the end of it."""
        self._open = _unfinished(self._open)
        self._open += _send(self.comm, HEAD.pack(HEAD_MAGIC, len(data)), data, dest, tag)

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

    def waiting(self, tag: int) -> int:
        """A rank from which a message has come, or -1."""
        status = MPI.Status()
        return status.Get_source() if self.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else -1

    def _receive(self, buffer: bytearray | memoryview, source: int, tag: int, phase: str) -> None:
        request = self.comm.Irecv([buffer, MPI.BYTE], source, tag)
        status = self.wait(request, source, phase)
        if status.Get_count(MPI.BYTE) != len(buffer):
            found = status.Get_count(MPI.BYTE)
            raise ProtocolError(f"rank {source} sent {found} bytes, not {len(buffer)}, in {phase}")


@dataclass
class Incoming:
    """A message whose chunks are arriving."""

    message: Message  # without its data
    data: bytearray
    left: int  # bytes to come
    requests: list[MPI.Request] = field(default_factory=list)

    def whole(self) -> bool:
        """Whether its last byte has come."""
        return not self.left and all(request.Test() for request in self.requests)


class MpiTransport(Transport):
    """Carries messages of an exchange; nothing here waits but `pause`."""

    def __init__(
        self, comm: MPI.Intracomm, edges: Edges, idle: Idle, limit: int, plain: bool = False
    ) -> None:
        self.comm, self._idle, self.limit = _graph(comm, edges, plain), idle, limit
        self._out: list[tuple[MPI.Request, object]] = []
        self._in: dict[int, deque[Incoming]] = {}
        self._status = MPI.Status()

    def send(self, to: int, message: Message) -> None:
        """Start sending a message."""
        numbers = (message.kind, *message.key, message.round, len(message.data))
        head = EXCHANGE_HEAD.pack(EXCHANGE_MAGIC, *numbers)
        self._out += _send(self.comm, head, message.data, to, Tag.MESSAGE)

    def poll(self) -> list[Message]:
        """Messages that have arrived whole; those of one sender in their order."""
        self._out = _unfinished(self._out)
        while (part := self.comm.Improbe(MPI.ANY_SOURCE, Tag.MESSAGE, self._status)) is not None:
            source, size = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
            line = self._in.setdefault(source, deque())
            if line and line[-1].left:
                self._chunk(line[-1], part, source, size)
            else:
                line.append(self._head(part, source, size))
        found = []
        for line in self._in.values():
            while line and line[0].whole():
                incoming = line.popleft()
                data = b"" if incoming.message.error else bytes(incoming.data)
                found.append(incoming.message._replace(data=data))
        return found

    def pause(self, turn: int, peer: int, phase: str) -> None:
        """Sleep a little; `idle` may end a wait that is hopeless."""
        self._idle(peer, phase)
        pause(turn)

    def settle(self) -> None:
        """Wait until everything sent has left; `idle` polls the exchange meanwhile."""
        turn = 0
        while self._out:
            self._out = _unfinished(self._out)
            self.pause(turn, -1, "the end")
            turn += 1

    def _head(self, part: MPI.Message, source: int, size: int) -> Incoming:
        head = bytearray(size)
        part.Recv([head, MPI.BYTE])
        if size != EXCHANGE_HEAD.size or head[: len(EXCHANGE_MAGIC)] != EXCHANGE_MAGIC:
            raise ProtocolError(f"agent {source} sent no proper message")
        _, kind, donor, lesson_round, round_, length = EXCHANGE_HEAD.unpack(head)
        if kind not in KINDS or length > DRAIN_LIMIT:
            raise ProtocolError(f"agent {source} sent a message of kind {kind}, {length} bytes")
        limit = OFFERS_LIMIT if kind in (OFFERS, REQUEST) else self.limit
        message = Message(source, kind, (donor, lesson_round), round_)
        if length <= limit:
            return Incoming(message, bytearray(length), length)
        error = f"message of {length} bytes is over the limit of {limit}"
        return Incoming(message._replace(error=error), bytearray(CHUNK), length)  # thrown away

    def _chunk(self, incoming: Incoming, part: MPI.Message, source: int, size: int) -> None:
        if size != min(CHUNK, incoming.left):
            raise ProtocolError(f"agent {source} sent {size} bytes in the middle of a message")
        start = 0 if incoming.message.error else len(incoming.data) - incoming.left
        buffer = memoryview(incoming.data)[start : start + size]
        incoming.requests.append(part.Irecv([buffer, MPI.BYTE]))
        incoming.left -= size
        self.received += size


def _graph(comm: MPI.Intracomm, edges: Edges, plain: bool) -> MPI.Intracomm:
    """A distributed-graph communicator, or a copy: Open MPI's graphs may not survive a death."""
    agent = comm.Get_rank()
    sources = sorted(a for a, b in edges if b == agent)
    destinations = sorted(b for a, b in edges if a == agent)
    with deadline():
        if isinstance(comm, ShrunkComm):
            return comm.copy()
        if plain:
            return comm.Dup()
        return comm.Create_dist_graph_adjacent(sources, destinations, reorder=False)


def _send(
    comm: MPI.Intracomm, head: bytes, data: bytes, dest: int, tag: int
) -> list[tuple[MPI.Request, object]]:
    """Start sending a head and then the data in chunks; what must stay alive until they left."""
    view = memoryview(data)
    sends: list[tuple[MPI.Request, object]] = [(comm.Isend([head, MPI.BYTE], dest, tag), head)]
    for start in range(0, len(view), CHUNK):
        part = view[start : start + CHUNK]
        sends.append((comm.Isend([part, MPI.BYTE], dest, tag), data))
    return sends


def _unfinished(sends: list[tuple[MPI.Request, object]]) -> list[tuple[MPI.Request, object]]:
    return [(request, held) for request, held in sends if not request.Test()] if sends else sends


ANY_SOURCE, ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG


class ShrunkComm(MPI.Intracomm):
    """The calls that we use, for members that keep the numbers they had in a larger world."""

    numbers: Sequence[int]
    ranks: dict[int, int]

    def __new__(cls, comm: MPI.Intracomm, numbers: Sequence[int]) -> "ShrunkComm":
        """The members of `comm`, whose numbers are these in its order."""
        made = super().__new__(cls, comm)
        made.numbers = numbers
        made.ranks = {number: rank for rank, number in enumerate(numbers)}
        made.ranks[ANY_SOURCE] = ANY_SOURCE
        return made

    def Get_rank(self) -> int:
        """This process's number."""
        return self.numbers[super().Get_rank()]

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """Start sending."""
        return super().Isend(buf, self.ranks[dest], tag)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPI.Request:
        """Start receiving."""
        return super().Irecv(buf, self.ranks[source], tag)

    def Recv(
        self,
        buf: Any,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Receive what is known to be there."""
        super().Recv(buf, self.ranks[source], tag, status)

    def Iprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Whether something is there; the status names its sender by number."""
        status = status or MPI.Status()
        found = super().Iprobe(self.ranks[source], tag, status)
        self._name(status, found)
        return found

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Take what is there; the status names its sender by number."""
        status = status or MPI.Status()
        found = super().Improbe(self.ranks[source], tag, status)
        self._name(status, found is not None)
        return found

    def _name(self, status: MPI.Status, found: bool) -> None:
        if found:
            status.Set_source(self.numbers[status.Get_source()])

    def copy(self) -> "ShrunkComm":
        """The same members, whose messages can't be mixed up with those of this one."""
        return ShrunkComm(MPI.Intracomm(self).Dup(), self.numbers)


def shrunk(
    comm: MPI.Intracomm, numbers: Sequence[int], inner: MPI.Intracomm | None, seconds: float
) -> ShrunkComm:
    """The living members of a communicator; all others are made to notice, also in `inner`."""
    for one in (comm, inner):
        if one is not None:
            one.Revoke()
    with deadline(seconds):
        new = MPI.Intracomm(MPI.Intracomm(comm).Shrink())
    places = MPI.Group.Translate_ranks(new.Get_group(), None, comm.Get_group())
    return ShrunkComm(new, [numbers[place] for place in places])


def split(comm: ShrunkComm, agents: int, seconds: float) -> ShrunkComm:
    """The part of the living on this side of a number: the agents, or the env servers after."""
    is_env_server = comm.Get_rank() >= agents
    with deadline(seconds):
        part = MPI.Intracomm(comm).Split(int(is_env_server), comm.ranks[comm.Get_rank()])
    numbers = [number for number in comm.numbers if (number >= agents) == is_env_server]
    return ShrunkComm(MPI.Intracomm(part), numbers)


class MpiPort:
    """One end of a channel between an agent and its env server: whole messages, never blocks."""

    def __init__(
        self, comm: MPI.Intracomm, peer: int, receive_tag: int, send_tag: int, limit: int
    ) -> None:
        self.comm, self.peer, self.limit = comm, peer, limit
        self._receive_tag, self._send_tag = receive_tag, send_tag
        self._status = MPI.Status()
        self._coming: MPI.Request | None = None
        self._data = bytearray()
        self._out: list[tuple[MPI.Request, object]] = []

    def post(self, data: bytes) -> None:
        """Start sending a message."""
        request = self.comm.Isend([data, MPI.BYTE], self.peer, self._send_tag)
        self._out = [*_unfinished(self._out), (request, data)]

    def poll(self) -> bytearray | None:
        """The next message if it is here; ConnectionError where the peer has died (--ft)."""
        try:
            if self._coming is None:
                found = self.comm.Improbe(self.peer, self._receive_tag, self._status)
                if found is None:
                    return None
                size = self._status.Get_count(MPI.BYTE)
                if size > self.limit:
                    raise ProtocolError(
                        f"message of {size} bytes is over the limit of {self.limit}"
                    )
                self._data = bytearray(size)
                self._coming = found.Irecv([self._data, MPI.BYTE])
            if not self._coming.Test():
                return None
        except MPI.Exception as error:
            raise ConnectionError(str(error)) from error
        self._coming = None
        return self._data
