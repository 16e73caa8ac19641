"""Heartbeats: rank 0 hears everybody and everybody hears rank 0, so silence has a name."""

import struct
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from canal_mpi.errors import ProtocolError, Stopped
from canal_mpi.rank import signals
from canal_mpi.types import Progress

if TYPE_CHECKING:
    from mpi4py import MPI

BEAT = struct.Struct("<16s64siiqqqdddiB")
TAG = 21
EVERY = 0.5  # seconds between two beats
WARN = 30.0  # seconds of silence after which rank 0 says so


class Watch:
    """Sends this rank's progress, listens for the others', and ends a wait that has no end."""

    def __init__(
        self,
        comm: "MPI.Intracomm | None",
        timeout: float,
        alive: Sequence[int] = (),
        size: int = 0,
    ) -> None:
        self.comm, self.timeout = comm, timeout
        self.rank = comm.Get_rank() if comm else 0
        self.size = size or (comm.Get_size() if comm else 1)
        alive = alive or range(self.size)
        self.leads = self.rank == alive[0]  # the first rank that lives hears all others
        peers = alive[1:] if self.leads else alive[:1]
        self.heard = dict.fromkeys(peers, monotonic())
        self.names = [f"rank {rank}" for rank in range(self.size)]
        self.progress = [Progress() for _ in range(self.size)]
        self.on_beat: Callable[[], None] = lambda: None
        self.serve: Callable[[], None] = lambda: None  # answers other agents' letters
        self._sent: dict[int, tuple[Any, bytes]] = {}
        self._next = 0.0
        self.wish = ""  # why this rank would like the run to stop; rank 0 decides
        self.stopping = False  # whether it stops, at the next step of every rank
        self.silence = ""  # who has been silent for too long, if that is why
        self.may_stop = False  # whether there is something that can be stopped
        self.end_by = inf  # when the time of the run is over

    @property
    def mine(self) -> Progress:
        """This rank's own progress."""
        return self.progress[self.rank]

    def beat(self, progress: Progress, waits_for: int = -1) -> None:
        """Called at every step: answers letters, and twice a second tells how far it is."""
        self.serve()
        now = monotonic()
        if now < self._next:
            return
        progress.waits_for = waits_for
        self._next = now + EVERY
        self.progress[self.rank] = progress
        self._decide(now)
        for peer in self.heard:
            self._send(peer, _pack(progress, self.stopping if self.leads else bool(self.wish)))
        self._listen(now)
        self.on_beat()

    def _decide(self, now: float) -> None:
        """Rank 0 says when the run stops; silence is noticed by whoever hears it."""
        if signals.asked and not self.wish:
            self.wish = f"{self.names[self.rank]} got {signals.asked}"
        if self.leads and now > self.end_by and not self.wish:
            self.wish = "its time is over (--max-time)"
        if self.may_stop and not self.stopping:
            self.silence = self._too_silent(now)
            self.stopping = bool(self.silence) or (self.leads and bool(self.wish))

    def _too_silent(self, now: float) -> str:
        for other, heard in self.heard.items():
            if now - heard > self.timeout:
                return (
                    f"{self.names[other]} has been silent for {now - heard:.0f} s in "
                    f"{self.progress[other].phase} (timeout {self.timeout:.0f} s)"
                )
        return ""

    def idle(self, peer: int, phase: str) -> None:
        """Called while this rank waits for another; raises when it stops, or after silence."""
        self.attend(peer, phase)
        if self.may_stop and self.stopping:
            raise Stopped(f"stopped in {phase}")

    def attend(self, peer: int, phase: str) -> None:
        """Called while this rank waits for its environments: a stop comes after their answer."""
        self.beat(self.mine, peer)
        if not self.may_stop and (silence := self._too_silent(monotonic())):
            raise ProtocolError(f"{silence} while {self.names[self.rank]} waited in {phase}")

    def others_work(self) -> bool:
        """Whether somebody who can be heard may still be saving; only rank 0 hears that."""
        now = monotonic()
        return not self.leads or any(
            self.progress[peer].phase != "stopped" and now - heard <= self.timeout
            for peer, heard in self.heard.items()
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
                self.progress[peer], told = _unpack(buffer)
                if told and self.leads:
                    self.wish = self.wish or f"{self.names[peer]} was asked to"
                self.stopping |= told and not self.leads


BYTES = "B"  # MPI's name for plain bytes


def _pack(p: Progress, stop: bool) -> bytes:
    numbers = (p.round, p.source, p.step, p.steps, p.total_steps, p.mean_return, p.loss)
    return BEAT.pack(
        p.phase.encode()[:16], p.task.encode()[:64], *numbers, p.wait_share, p.waits_for, stop
    )


def _unpack(data: bytearray) -> tuple[Progress, bool]:
    phase, task, round_, *numbers, stop = BEAT.unpack(data)
    names = [raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, task)]
    return Progress(names[0], round_, names[1], *numbers), bool(stop)
