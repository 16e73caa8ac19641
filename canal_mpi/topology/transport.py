"""Messages over MPI in bounded chunks; waits sleep, have a deadline and say whom they wait for.

Only buffers travel (upper-case calls): the lower-case ones pickle.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from mpi4py import MPI

from canal_mpi.errors import DamagedData, ProtocolError
from canal_mpi.interfaces import MessageKind
from canal_mpi.topology import Tag
from canal_mpi.topology.exchange import Message, Transport

CHUNK = 1 << 22
INLINE = 3 << 10  # so few bytes travel with their head: MPI sends them at once
HEAD = struct.Struct("<8sHQ")  # magic, bytes of the header, of the data
MAGIC = b"CANALMSG"
EXCHANGE_HEADER = struct.Struct("<Biii")  # kind, donor, its round, sender's round
DRAIN_LIMIT = 1 << 36  # what is read and thrown away to stay in step with a refused message
SHORTEST, LONGEST = 50e-6, 0.02  # seconds of a sleep while waiting
ANY_SOURCE, ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
Idle = Callable[[int, str], None]


@dataclass
class Incoming:
    """A message whose chunks are arriving."""

    source: int
    header: bytes
    data: bytearray
    left: int  # bytes to come
    error: str = ""  # why the data is thrown away
    requests: list[MPI.Request] = field(default_factory=list)

    @classmethod
    def begin(cls, part: MPI.Message, source: int, size: int, limit: int) -> "Incoming":
        """Read the head of a message, and its data where they came together."""
        raw = bytearray(size)
        part.Recv([raw, MPI.BYTE])
        magic, header, length = HEAD.unpack_from(raw) if size >= HEAD.size else (b"", 0, 0)
        rest = size - HEAD.size - header
        if magic != MAGIC or length > DRAIN_LIMIT or rest != (length if length <= INLINE else 0):
            raise ProtocolError(f"rank {source} sent no proper message")
        error = f"message of {length} bytes is over the limit of {limit}" if length > limit else ""
        data = raw[HEAD.size + header :] if rest else bytearray(CHUNK if error else length)
        return cls(source, bytes(raw[HEAD.size : HEAD.size + header]), data, length - rest, error)

    def receive(self, part: MPI.Message, size: int) -> None:
        """Start receiving the next chunk."""
        if size != min(CHUNK, self.left):
            raise ProtocolError(f"rank {self.source} sent {size} bytes in the middle of a message")
        start = 0 if self.error else len(self.data) - self.left
        buffer = memoryview(self.data)[start : start + size]
        self.requests.append(part.Irecv([buffer, MPI.BYTE]))
        self.left -= size

    def whole(self) -> bool:
        """Whether its last byte has come."""
        return not self.left and all(request.Test() for request in self.requests)


class PolledComm:
    """Sends and receives byte strings without ever spinning or waiting for ever.

    Messages between two ranks under one tag arrive in the order in which they were posted.
    """

    def __init__(self, comm: MPI.Intracomm, idle: Idle) -> None:
        self.comm, self._idle = comm, idle
        self._received = 0  # bytes so far
        self._out: list[tuple[MPI.Request, object]] = []  # with what must stay alive until it left
        self._in: dict[tuple[int, int], deque[Incoming]] = {}  # by sender and tag
        self._status = MPI.Status()

    def post(self, data: bytes, dest: int, tag: int, header: bytes = b"") -> None:
        """Start sending; `settle` waits for the end of it."""
        self._test_sends()
        head = HEAD.pack(MAGIC, len(header), len(data)) + header
        starts = range(0, len(data) if len(data) > INLINE else 0, CHUNK)
        chunks = [memoryview(data)[start : start + CHUNK] for start in starts]
        for part in (head, *chunks) if chunks else (head + data,):
            self._out.append((self.comm.Isend([part, MPI.BYTE], dest, tag), part))

    def _test_sends(self) -> bool:
        """Forget what has left; whether that is everything."""
        if self._out:
            self._out = [(request, held) for request, held in self._out if not request.Test()]
        return not self._out

    def settle(self, phase: str) -> None:
        """Wait until everything posted has left."""
        self.wait(self._test_sends, -1, phase)

    def poll(self, tag: int, limit: int) -> list[Incoming]:
        """Messages of any rank that have arrived whole; never waits."""
        self._test_sends()
        while self._receive(ANY_SOURCE, tag, limit):
            pass
        found = []
        for (_, its_tag), line in self._in.items():
            while its_tag == tag and line and line[0].whole():
                found.append(line.popleft())
        return found

    def next(self, source: int, tag: int, limit: int) -> Incoming | None:
        """The next message of one rank if it has arrived whole; never waits."""
        line = self._in.setdefault((source, tag), deque())
        while not line or line[0].left:
            if not self._receive(source, tag, limit):
                return None
        return line.popleft() if line[0].whole() else None

    def collect(self, source: int, tag: int, limit: int, phase: str) -> bytes:
        """Wait for the next message of one rank; DamagedData where it is over the limit."""
        found: list[Incoming] = []

        def arrived() -> bool:
            found.extend(filter(None, [self.next(source, tag, limit)]))
            return bool(found)

        self.wait(arrived, source, phase)
        if found[0].error:
            raise DamagedData(found[0].error)
        return bytes(found[0].data)

    def _receive(self, source: int, tag: int, limit: int) -> bool:
        """Take in one part of a message; whether one was there."""
        part = self.comm.Improbe(source, tag, self._status)
        if part is None:
            return False
        sender, size = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
        line = self._in.setdefault((sender, tag), deque())
        if line and line[-1].left:
            line[-1].receive(part, size)
        else:
            line.append(Incoming.begin(part, sender, size, limit))
        self._received += size
        return True

    def wait(self, done: Callable[[], object], peer: int, phase: str, limit: float = 0.0) -> bool:
        """Sleep until something is done; False after `limit` seconds without a byte, if any.

        `idle` is asked meanwhile and may raise. The sleeps grow: waiting costs no CPU.
        """
        turn, received, since = 0, self._received, monotonic()
        while not done():
            if self._received != received:
                turn, received, since = 0, self._received, monotonic()
            if limit and monotonic() - since > limit:
                return False
            self._idle(peer, phase)
            sleep(min(SHORTEST * 1.5 ** min(turn, 20), LONGEST))
            turn += 1
        return True


class MpiTransport(Transport):
    """Carries the messages of an exchange, over a communicator of its own."""

    def __init__(self, comm: MPI.Intracomm, idle: Idle, limit: int) -> None:
        own, made = MPI.Intracomm(comm).Idup()
        PolledComm(comm, idle).wait(made.Test, -1, "the start")  # Dup would be silent meanwhile
        own = ShrunkComm(own, comm.numbers) if isinstance(comm, ShrunkComm) else own
        self._comm, self.limit = PolledComm(own, idle), limit

    def send(self, to: int, message: Message) -> None:
        """Start sending a message."""
        header = EXCHANGE_HEADER.pack(message.kind, *message.key, message.round)
        self._comm.post(message.data, to, Tag.MESSAGE, header)

    def poll(self) -> list[Message]:
        """Messages that have arrived whole; those of one sender in their order."""
        return [_message(found) for found in self._comm.poll(Tag.MESSAGE, self.limit)]

    def wait(self, done: Callable[[], object], peer: int, phase: str, limit: float = 0.0) -> bool:
        """Sleep until something is done; see `PolledComm.wait`."""
        return self._comm.wait(done, peer, phase, limit)

    def settle(self) -> None:
        """Wait until everything sent has left; `idle` polls the exchange meanwhile."""
        self._comm.settle("the end")


def _message(found: Incoming) -> Message:
    try:
        kind, donor, lesson_round, round_ = EXCHANGE_HEADER.unpack(found.header)
        about = (found.source, MessageKind(kind), (donor, lesson_round), round_)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"agent {found.source} sent no proper message: {error}") from error
    return Message(*about, b"" if found.error else bytes(found.data), found.error)


class MpiPort:
    """One end of a channel between an agent and its env server: whole messages, never blocks."""

    def __init__(
        self, comm: PolledComm, peer: int, receive_tag: int, send_tag: int, limit: int
    ) -> None:
        self.comm, self.peer, self.limit = comm, peer, limit
        self._receive_tag, self._send_tag = receive_tag, send_tag

    def post(self, data: bytes) -> None:
        """Start sending a message."""
        self.comm.post(data, self.peer, self._send_tag)

    def poll(self) -> bytes | None:
        """The next message if it is here; ConnectionError where the peer has died (--ft)."""
        try:
            found = self.comm.next(self.peer, self._receive_tag, self.limit)
        except MPI.Exception as error:
            raise ConnectionError(str(error)) from error
        if found is not None and found.error:
            raise ProtocolError(found.error)
        return None if found is None else bytes(found.data)


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

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Take what is there; the status names its sender by number."""
        status = status or MPI.Status()
        found = super().Improbe(self.ranks[source], tag, status)
        if found is not None:
            status.Set_source(self.numbers[status.Get_source()])
        return found


def shrunk(comm: MPI.Intracomm, numbers: Sequence[int], inner: MPI.Intracomm | None) -> ShrunkComm:
    """The living members of a communicator; all others are made to notice, also in `inner`."""
    for one in (comm, inner):
        if one is not None:
            one.Revoke()
    new = MPI.Intracomm(MPI.Intracomm(comm).Shrink())
    places = MPI.Group.Translate_ranks(new.Get_group(), None, comm.Get_group())
    return ShrunkComm(new, [numbers[place] for place in places])


def split(comm: ShrunkComm, agents: int) -> ShrunkComm:
    """The part of the living on this side of a number: the agents, or the env servers after."""
    is_env_server = comm.Get_rank() >= agents
    part = MPI.Intracomm(comm).Split(int(is_env_server), comm.ranks[comm.Get_rank()])
    numbers = [number for number in comm.numbers if (number >= agents) == is_env_server]
    return ShrunkComm(MPI.Intracomm(part), numbers)
