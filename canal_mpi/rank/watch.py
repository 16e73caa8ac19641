"""Heartbeats: rank 0 hears everybody and everybody hears rank 0, so silence has a name."""

import struct
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from canal_mpi.errors import ProtocolError
from canal_mpi.types import Progress

if TYPE_CHECKING:
    from mpi4py import MPI

BEAT = struct.Struct("<16s64siiqqqdddi")
TAG = 21
EVERY = 0.5  # seconds between two beats
WARN = 30.0  # seconds of silence after which rank 0 says so


class Watch:
    """Sends this rank's progress, listens for the others', and ends a wait that has no end."""

    def __init__(self, comm: "MPI.Intracomm | None", timeout: float) -> None:
        self.comm, self.timeout = comm, timeout
        self.rank = comm.Get_rank() if comm else 0
        self.size = comm.Get_size() if comm else 1
        peers = range(1, self.size) if self.rank == 0 else range(min(self.size, 1))
        self.heard = dict.fromkeys(peers, monotonic())
        self.names = [f"rank {rank}" for rank in range(self.size)]
        self.progress = [Progress() for _ in range(self.size)]
        self.on_beat: Callable[[], None] = lambda: None
        self._sent: dict[int, tuple[Any, bytes]] = {}
        self._next = 0.0

    @property
    def mine(self) -> Progress:
        """This rank's own progress."""
        return self.progress[self.rank]

    def beat(self, progress: Progress, waits_for: int = -1) -> None:
        """Called at every step; does something twice a second."""
        now = monotonic()
        if now < self._next:
            return
        progress.waits_for = waits_for
        self._next = now + EVERY
        self.progress[self.rank] = progress
        for peer in self.heard:
            self._send(peer, _pack(progress))
        self._listen(now)
        self.on_beat()

    def idle(self, peer: int, phase: str) -> None:
        """Called while this rank waits for another; raises when the silence is too long."""
        self.beat(self.mine, peer)
        now = monotonic()
        for other, heard in self.heard.items():
            if now - heard > self.timeout:
                what = self.progress[other].phase
                raise ProtocolError(
                    f"{self.names[other]} has been silent for {now - heard:.0f} s in {what} "
                    f"(timeout {self.timeout:.0f} s) while {self.names[self.rank]} waited in "
                    f"{phase}"
                )

    def silent(self) -> list[tuple[int, float]]:
        """Ranks that have not been heard for a while, with the seconds."""
        now = monotonic()
        return [(peer, now - heard) for peer, heard in self.heard.items() if now - heard > WARN]

    def _send(self, peer: int, message: bytes) -> None:
        before = self._sent.get(peer)
        if self.comm is None or (before and not before[0].Test()):
            return  # the last beat has not left yet
        self._sent[peer] = (self.comm.Isend([message, BYTES], peer, TAG), message)

    def _listen(self, now: float) -> None:
        if self.comm is None:
            return
        buffer = bytearray(BEAT.size)
        for peer in self.heard:
            while self.comm.Iprobe(peer, TAG):
                self.comm.Recv([buffer, BYTES], peer, TAG)
                self.heard[peer] = now
                self.progress[peer] = _unpack(buffer)


BYTES = "B"  # MPI's name for plain bytes


def _pack(p: Progress) -> bytes:
    numbers = (p.round, p.source, p.step, p.steps, p.total_steps, p.mean_return, p.loss)
    return BEAT.pack(
        p.phase.encode()[:16], p.task.encode()[:64], *numbers, p.wait_share, p.waits_for
    )


def _unpack(data: bytearray) -> Progress:
    phase, task, *numbers = BEAT.unpack(data)
    names = [raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, task)]
    round_, *rest = numbers
    return Progress(names[0], round_, names[1], *rest)
