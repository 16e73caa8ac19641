"""Bytes over MPI in bounded chunks: waits that sleep, have an end and a name, or no wait at all.

Only buffers travel (upper-case calls): the lower-case ones pickle.
"""

import signal
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic, sleep

from mpi4py import MPI

from canal_mpi.errors import DamagedData, ProtocolError
from canal_mpi.topology.desk import KINDS, OFFERS, WANT, Letter
from canal_mpi.topology.offers import SMALL

CHUNK = 1 << 22
HEAD = struct.Struct("<8sQ")
HEAD_MAGIC = b"CANALMSG"
LETTER = struct.Struct("<8sBiiiQ")  # magic, kind, donor, round of the lesson, round, bytes
LETTER_MAGIC = b"CANALLTR"
DRAIN_LIMIT = 1 << 36  # what is read and thrown away to stay in step with a refused message
TAG = 11

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


class Mail:
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
        self._open = [(request, held) for request, held in self._open if not request.Test()]
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
    """A letter whose chunks are arriving."""

    letter: Letter
    data: bytearray
    left: int
    trouble: str
    open: list[MPI.Request] = field(default_factory=list)


class Post:
    """Carries letters for a desk; nothing here waits but `pause`."""

    def __init__(self, comm: MPI.Intracomm, idle: Idle, limit: int) -> None:
        self.comm, self._idle, self.limit = comm, idle, limit
        self.received = 0
        self._out: list[tuple[MPI.Request, object]] = []
        self._in: dict[int, deque[Incoming]] = {}
        self._status = MPI.Status()

    def send(self, to: int, letter: Letter) -> None:
        """Start sending a letter."""
        numbers = (letter.kind, *letter.key, letter.round, len(letter.data))
        head = LETTER.pack(LETTER_MAGIC, *numbers)
        self._out += _send(self.comm, head, letter.data, to, TAG)

    def poll(self) -> list[Letter]:
        """Letters that have arrived whole; those of one sender in their order."""
        self._let_go()
        while (message := self.comm.Improbe(MPI.ANY_SOURCE, TAG, self._status)) is not None:
            source, size = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
            line = self._in.setdefault(source, deque())
            if line and line[-1].left:
                self._chunk(line[-1], message, source, size)
            else:
                line.append(self._head(message, source, size))
        return [letter for line in self._in.values() for letter in _whole(line)] if self._in else []

    def pause(self, turn: int, peer: int, phase: str) -> None:
        """Sleep a little; the watch may end a wait that has no end."""
        self._idle(peer, phase)
        pause(turn)

    def settle(self) -> None:
        """Wait until everything sent has left; the desk is polled by the watch meanwhile."""
        turn = 0
        while self._out:
            self._let_go()
            self.pause(turn, -1, "the end")
            turn += 1

    def _let_go(self) -> None:
        """Forget the sends that are over."""
        if self._out:
            self._out = [(request, held) for request, held in self._out if not request.Test()]

    def _head(self, message: MPI.Message, source: int, size: int) -> Incoming:
        head = bytearray(size)
        message.Recv([head, MPI.BYTE])
        if size != LETTER.size or head[: len(LETTER_MAGIC)] != LETTER_MAGIC:
            raise ProtocolError(f"agent {source} sent no proper letter")
        _, kind, donor, lesson_round, round_, length = LETTER.unpack(head)
        if kind not in KINDS or length > DRAIN_LIMIT:
            raise ProtocolError(f"agent {source} sent a letter of kind {kind}, {length} bytes long")
        limit = SMALL if kind in (OFFERS, WANT) else self.limit
        trouble = f"message of {length} bytes is over the limit of {limit}"
        letter = Letter(source, kind, (donor, lesson_round), round_)
        if length <= limit:
            return Incoming(letter, bytearray(length), length, "")
        return Incoming(letter, bytearray(CHUNK), length, trouble)  # read and thrown away

    def _chunk(self, incoming: Incoming, message: MPI.Message, source: int, size: int) -> None:
        if size != min(CHUNK, incoming.left):
            raise ProtocolError(f"agent {source} sent {size} bytes in the middle of a letter")
        start = 0 if incoming.trouble else len(incoming.data) - incoming.left
        part = memoryview(incoming.data)[start : start + size]
        incoming.open.append(message.Irecv([part, MPI.BYTE]))
        incoming.left -= size
        self.received += size


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


def _whole(line: deque[Incoming]) -> list[Letter]:
    """Take the letters at the front whose last byte has come."""
    done = []
    while line and not line[0].left and all(request.Test() for request in line[0].open):
        incoming = line.popleft()
        data = b"" if incoming.trouble else bytes(incoming.data)
        done.append(incoming.letter._replace(data=data, trouble=incoming.trouble))
    return done
