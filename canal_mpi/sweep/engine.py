"""Runs points one after the other, or as many at once as fit; goes on where it was stopped.

A point that is finished is left alone, one that was stopped or broke is resumed, one whose
checkpoints are damaged is repeated from its start. `Engine.run` returns when nothing is left to do
or a signal asked for it.
"""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from canal_mpi.cluster.launch import Launch, plan_launch
from canal_mpi.cluster.marker import status_of
from canal_mpi.cluster.supervise import ASKING, Process, begin, clean_up, end_at_once, scratch
from canal_mpi.errors import DamagedData, DirectoryInUse, Stopped
from canal_mpi.results.runs import SIGN_OF_LIFE, glance, locked
from canal_mpi.sweep.folder import check_same_job, job_file
from canal_mpi.sweep.grid import Point

EVERY = 0.2  # seconds between two looks
LATER = 10.0  # seconds until a point that another host has is tried again
SAYS = "canal-mpi:"  # before what a rank complains of
WAITING, RUNNING, ELSEWHERE = "waiting", "running", "elsewhere"  # elsewhere: another process does
FINISHED, STOPPED, BROKEN = "finished", "stopped", "broken"
DAMAGED, DEGRADED = "damaged", "degraded"  # only looked at: its file is torn; --ft lost agents


@dataclass
class Work:
    """A point, its run directory, and how far it is."""

    point: Point
    folder: Path
    log: Path
    status: str = WAITING
    why: str = ""  # it broke
    seconds: float = 0.0  # that it took this time
    begun: float = 0.0
    heard: int = 0  # bytes of its log that are older
    later: float = 0.0  # when it is looked at again
    resumes: bool = False  # whether it was started from its checkpoints
    anew: bool = False  # whether it must begin anew: its checkpoints are damaged
    process: Process | None = None
    kept: ExitStack = field(default_factory=ExitStack)

    def look(self) -> None:
        """See how the run directory is, before anything is started."""
        done = check_same_job(self.folder, self.point) == FINISHED
        self.status = FINISHED if done else ELSEWHERE if locked(self.folder) else WAITING

    def found(self) -> str:
        """How a run that is not finished was left, for who only looks."""
        left = status_of(self.folder)
        if left in (STOPPED, DAMAGED, DEGRADED):
            return left
        if glance(self.folder).alive or self._speaks():
            return ELSEWHERE  # on another node, whose locks are not seen here
        return WAITING if left == "missing" and not self.log.exists() else BROKEN

    def _speaks(self) -> bool:
        """Whether its log is so young that its ranks may be about to begin."""
        try:
            return time() - self.log.stat().st_mtime < SIGN_OF_LIFE
        except OSError:
            return False


class Engine:
    """Runs points within so many slots; a rank takes one."""

    def __init__(
        self,
        folder: Path,
        points: Sequence[Point],
        slots: int,
        tell: Callable[[str, Work], None] = lambda what, work: None,
    ) -> None:
        self.folder, self.slots, self.tell = folder, slots, tell
        logs = folder / "logs"
        self.works = [Work(p, folder / p.name, logs / f"{p.name}.log") for p in points]
        self.asked = ""  # why it stops

    def run(self, refresh: Callable[[], None] = lambda: None, limit: float = inf) -> None:
        """Everything that is not finished yet; `refresh` is called a few times a second.

        After `limit` seconds the ranks save and stop.
        """
        end = monotonic() + limit
        self.look()
        before = {number: signal.signal(number, self._note) for number in ASKING}
        try:
            while self._left():
                if monotonic() > end and not self.asked:
                    self._stop("its time is over (--max-time)")
                self._start_what_fits()
                for work in self.of(RUNNING):
                    self._judge(work)
                for work in self.of(ELSEWHERE):
                    if monotonic() >= work.later:
                        work.look()
                refresh()
                sleep(EVERY)
        finally:
            for work in self.of(RUNNING):  # only where something went wrong here
                self._end(work)
            for number, handler in before.items():
                signal.signal(number, handler)

    def look(self) -> None:
        """See how all run directories are; starts nothing."""
        for work in self.works:
            work.look()

    def of(self, *status: str) -> list[Work]:
        """The points that are so."""
        return [work for work in self.works if work.status in status]

    def _left(self) -> bool:
        return bool(self.of(RUNNING) if self.asked else self.of(RUNNING, WAITING, ELSEWHERE))

    def _start_what_fits(self) -> None:
        for work in self.of(WAITING):
            if self.asked or (self.of(RUNNING) and not self._fits(work)):
                return
            work.look()  # another sweep may have come first
            if work.status == WAITING:
                self._start(work)

    def _fits(self, work: Work) -> bool:
        running = self.of(RUNNING)
        if work.point.hosts or any(other.point.hosts for other in running):
            return False  # other hosts do one thing at a time
        return sum(w.point.ranks for w in running) + work.point.ranks <= self.slots

    def _start(self, work: Work) -> None:
        work.resumes, work.anew = not work.anew and has_begun(work.folder), False
        launch = command_of(work.point, self.folder, work.resumes)
        work.log.parent.mkdir(parents=True, exist_ok=True)
        temporary = work.kept.enter_context(scratch())
        work.kept.callback(clean_up, temporary)
        log = work.kept.enter_context(work.log.open("ab"))
        work.heard = work.log.stat().st_size
        log.write(f"{launch}\n".encode())
        log.flush()
        work.process = begin(launch, temporary, log, log)
        work.begun, work.status = monotonic(), RUNNING
        if self.asked:  # the signal came while it was being started
            self._ask(work)
        self.tell("resumed" if work.resumes else "started", work)

    def _judge(self, work: Work) -> None:
        """Whether it has ended, and how; only its run.h5 tells."""
        assert work.process is not None
        work.seconds = monotonic() - work.begun
        if work.process.poll() is None:
            return
        work.kept.close()
        if status_of(work.folder) == FINISHED:
            work.status = FINISHED
        elif self.asked or work.process.returncode == Stopped.code:
            work.status = STOPPED
        elif work.process.returncode == DirectoryInUse.code:
            work.status, work.later = ELSEWHERE, monotonic() + LATER
        elif work.process.returncode == DamagedData.code and work.resumes:
            work.status, work.anew = WAITING, True
        else:
            work.status, work.why = BROKEN, last_words(work.log, work.heard)
        self.tell(work.status if work.status != WAITING else "repeated", work)

    def _note(self, number: int, frame: Any) -> None:
        """The first signal lets the ranks save and stop, the second one ends them."""
        if not self.asked:
            self._stop(signal.Signals(number).name)
        elif number != signal.SIGUSR1:
            for work in self.of(RUNNING):
                if work.process is not None:
                    end_at_once(work.process)

    def _stop(self, why: str) -> None:
        self.asked = why
        for work in self.of(RUNNING):
            self._ask(work)

    def _ask(self, work: Work) -> None:
        """Let the ranks of a point save and stop."""
        if work.process is not None:
            with suppress(ProcessLookupError):
                work.process.send_signal(signal.SIGUSR1)

    def _end(self, work: Work) -> None:
        if work.process is not None:
            end_at_once(work.process)
            work.process.wait()
        work.kept.close()


def command_of(point: Point, folder: Path, resumes: bool) -> Launch:
    """What starts the run of a point, or goes on with it; only its own job counts."""
    run = folder / point.name
    what = ["--resume", str(run)]
    if not resumes:
        what = ["--job", str(job_file(folder, point)), "--out", str(run), "--force"]
    return plan_launch(
        point.ranks,
        ["train", *what],
        point.hosts,
        point.servers,
        network=point.network or None,
        settings=False,
    )


def has_begun(run: Path) -> bool:
    """Whether there is something to go on with."""
    return any((run / "checkpoints").glob("agent-*/round-*"))


def last_words(log: Path, since: int) -> str:
    """The last complaint in a log behind so many bytes, or where to look."""
    try:
        lines = log.read_bytes()[since:][-(1 << 16) :].decode(errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line.removeprefix(SAYS).strip() for line in lines if line.startswith(SAYS)]
    said = [words for words in said if not words.startswith("warning:")]
    return said[-1] if said else f"see {log}"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
