"""Heartbeats: rank 0 hears everybody and everybody hears rank 0, so timeouts name the rank."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from canal_mpi.errors import ProtocolError, Stopped, logger
from canal_mpi.interfaces import Progress
from canal_mpi.topology import Tag

if TYPE_CHECKING:
    from mpi4py import MPI

BEAT = struct.Struct("<16s64siiqqqdddiB")
BYTES = "B"  # MPI's name for plain bytes
EVERY = 0.5  # seconds between two beats
WARN = 30.0  # seconds of silence after which rank 0 says so
HELD_UP = 5.0  # seconds between two beats after which this rank was stopped, or busy, itself


class Heartbeat:
    """Sends this rank's progress, listens for the others', and ends a wait that has no end.

    Stop requests ride on heartbeats: ranks ask, rank 0 decides. `stop_requested` names the signal
    that this process got, if any; `on_alive` hears twice a second what this rank is doing.
    """

    def __init__(
        self,
        comm: "MPI.Intracomm | None",
        timeout: float,
        stop_requested: Callable[[], str] = lambda: "",
        on_alive: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.timeout, self._stop_requested, self._on_alive = timeout, stop_requested, on_alive
        self.stop_reason = ""  # why this rank would like the run to stop; rank 0 decides
        self._past: list[object] = []  # beats on communicators that are gone
        ranks = range(comm.Get_size() if comm else 1)
        self.restart(comm, ranks, [f"rank {rank}" for rank in ranks])

    def restart(
        self, comm: "MPI.Intracomm | None", alive: Sequence[int], names: Sequence[str] = ()
    ) -> None:
        """Go on over another communicator, with the ranks that are alive, maybe of new names."""
        if names:
            self.names, self.size = [*names], len(names)
            self.progress = [Progress() for _ in names]
        self.comm, self.rank = comm, comm.Get_rank() if comm else 0
        self.is_root = self.rank == alive[0]  # the first rank that lives hears all others
        self.heard = dict.fromkeys(alive[1:] if self.is_root else alive[:1], monotonic())
        for rank in set(range(self.size)) - set(alive):
            self.progress[rank] = replace(self.progress[rank], phase="died")
        self._sent: dict[int, tuple[Any, bytes]] = {}
        self._past.append(self._sent)
        self._last, self._news = monotonic(), ("", "")  # what the last beat told
        self.stopping = False  # whether the run stops, at the next step of every rank
        self.silence = ""  # who has been silent for too long, if that is why
        self.may_stop, self.end_by = False, inf
        self.detach()

    def attach(self, poll: Callable[[], None], on_beat: Callable[[], None]) -> None:
        """Call `poll` at every step, to answer other agents, and `on_beat` twice a second."""
        self._poll, self._on_beat = poll, on_beat

    def detach(self) -> None:
        """Call nobody any more."""
        self._poll = self._on_beat = lambda: None

    def allow_stop(self, end_by: float = inf) -> None:
        """There is something that can be stopped; at the time `end_by` it will be."""
        self.may_stop, self.end_by = True, end_by

    @property
    def mine(self) -> Progress:
        """This rank's own progress."""
        return self.progress[self.rank]

    def beat(self, progress: Progress, waits_for: int = -1) -> None:
        """Called at every step: answers other agents, and twice a second tells how far it is."""
        self._poll()
        now = monotonic()
        news = (progress.phase, self._stop_requested())
        if now < self._last + EVERY and news == self._news:
            return
        if (gap := now - self._last) > HELD_UP:  # nobody else was silent, as far as we know
            logger.warning("this rank itself did not move for %.0f s in %s", gap, self._news[0])
            self.heard = {peer: heard + gap for peer, heard in self.heard.items()}
        self._last, self._news = now, news
        progress.waits_for = waits_for
        self.progress[self.rank] = progress
        self._on_alive(f"{progress.phase} {progress.task}".rstrip())
        self._decide(now)
        stop = self.stopping if self.is_root else bool(self.stop_reason)
        for peer in self.heard:
            self._send(peer, _pack(progress, stop))
        self._listen(now)
        self._on_beat()

    def _decide(self, now: float) -> None:
        """Rank 0 says when the run stops; silence is noticed by whoever hears it."""
        if (signal := self._stop_requested()) and not self.stop_reason:
            self.stop_reason = f"{self.names[self.rank]} got {signal}"
        if self.is_root and now > self.end_by and not self.stop_reason:
            self.stop_reason = "its time is over (--max-time)"
        if self.may_stop and not self.stopping:
            self.silence = self._too_silent()
            self.stopping = bool(self.silence) or (self.is_root and bool(self.stop_reason))

    def _too_silent(self) -> str:
        for other, seconds in self.silent(self.timeout):
            return (
                f"{self.names[other]} has been silent for {seconds:.0f} s in "
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
        if not self.may_stop and (silence := self._too_silent()):
            raise ProtocolError(f"{silence} while {self.names[self.rank]} waited in {phase}")

    def others_work(self) -> bool:
        """Whether somebody who can be heard may still be saving; only rank 0 hears that."""
        mute = dict(self.silent(self.timeout))
        working = [peer for peer in self.heard if self.progress[peer].phase != "stopped"]
        return not self.is_root or any(peer not in mute for peer in working)

    def silent(self, limit: float = WARN) -> list[tuple[int, float]]:
        """Ranks that have not been heard for longer than `limit`, with the seconds."""
        now = monotonic()
        return [(peer, now - heard) for peer, heard in self.heard.items() if now - heard > limit]

    def _send(self, peer: int, message: bytes) -> None:
        before = self._sent.get(peer)
        if self.comm is None or (before and not before[0].Test()):
            return  # the last beat has not left yet
        self._sent[peer] = (self.comm.Isend([message, BYTES], peer, Tag.HEARTBEAT), message)

    def _listen(self, now: float) -> None:
        if self.comm is None:
            return
        buffer = bytearray(BEAT.size)
        for peer in self.heard:
            while part := self.comm.Improbe(peer, Tag.HEARTBEAT):
                part.Recv([buffer, BYTES])
                self.heard[peer] = now
                self.progress[peer], stop = _unpack(buffer)
                if stop and self.is_root:
                    self.stop_reason = self.stop_reason or f"{self.names[peer]} was asked to"
                self.stopping |= stop and not self.is_root


def _pack(p: Progress, stop: bool) -> bytes:
    numbers = (p.round, p.source, p.step, p.steps, p.total_steps, p.mean_return, p.loss)
    return BEAT.pack(
        p.phase.encode()[:16], p.task.encode()[:64], *numbers, p.wait_share, p.waits_for, stop
    )


def _unpack(data: bytearray) -> tuple[Progress, bool]:
    phase, task, round_, *numbers, stop = BEAT.unpack(data)
    names = [raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, task)]
    return Progress(names[0], round_, names[1], *numbers), bool(stop)
