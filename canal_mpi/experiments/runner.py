"""Runs points, one after the other or as many at once as fit, and resumes where it was stopped.

A finished point is left alone, one that was stopped or broke is resumed, one whose checkpoints are
damaged is repeated from its start. Each is a process of its own, `canal-mpi launch`.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean
from time import monotonic, sleep
from typing import Any

from rich.console import Console
from rich.markup import escape

from canal_mpi.errors import CanalError, DamagedData, Stopped
from canal_mpi.experiments.points import FINISHED, Point, check_same_job, job_file
from canal_mpi.launch.mpirun import program, saving_if_killed
from canal_mpi.launch.supervise import signals_to
from canal_mpi.rank.plan import Workload, devices, plan_of
from canal_mpi.results.compare import Measured, costs
from canal_mpi.results.measures import mean
from canal_mpi.results.progress import clean, digits, duration, remaining
from canal_mpi.results.reader import load
from canal_mpi.results.status import locked, status_of

POLL_SECONDS = 0.2
WAITING, RUNNING, STOPPED, BROKEN = "waiting", "running", "stopped", "broken"
LOW_PRIORITY = "10"  # as `nice` counts
PUBLISHED = {"run.h5", "job.toml"}  # what a report needs of a run


class PointRun:
    """A point of the experiment in `home`, its run directory, and how far it is."""

    def __init__(self, point: Point, home: Path, of_study: bool = False) -> None:
        self.point, self.home = point, home
        self.folder, self.log = home / point.name, home / "logs" / f"{point.name}.log"
        self.group = point.group  # what all seeds of its setting have in common
        self.of_study = of_study  # runs at low priority, and only what a report needs is kept
        self.status, self.reason = WAITING, ""  # why it broke
        self.seconds = self.started = 0.0  # of this start: how long, and since when
        self.log_offset = 0  # what the log had before it
        self.resumes = False  # whether it was started from its checkpoints
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def change(self) -> str:
        """What has happened to it last."""
        started = "resumed" if self.resumes else "started"
        return {RUNNING: started, WAITING: "repeated"}.get(self.status, self.status)

    @cached_property
    def expected(self) -> float:
        """Seconds that it should take."""
        return guess(self.point)

    def check(self) -> None:
        """See how the run directory is, before anything is started."""
        self.status = WAITING
        if check_same_job(self.folder, self.point) == FINISHED:
            self.status = FINISHED
            with suppress(CanalError):
                self.seconds = load(self.folder).seconds

    def signal(self, number: int) -> None:
        """Pass a signal on; the first one lets its ranks save and stop, SIGTERM then ends them."""
        if self.process is not None:
            self.process.send_signal(number)

    def start(self) -> None:
        """Start it, or resume it from its checkpoints."""
        self.resumes = any((self.folder / "checkpoints").glob("agent-*/round-*"))
        command = command_of(self.point, self.home, self.resumes)
        command = ["nice", "-n", LOW_PRIORITY, *command] if self.of_study else command
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.log_offset = log.tell()
            self.process = subprocess.Popen(
                saving_if_killed(command),
                env={k: v for k, v in os.environ.items() if not k.startswith("CANAL_")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches it only as we pass it on
            )
        self.started, self.status = monotonic(), RUNNING

    def poll(self, stopping: bool) -> bool:
        """Whether it has ended; its run.h5 and its exit code tell how."""
        assert self.process is not None
        self.seconds = monotonic() - self.started
        if (code := self.process.poll()) is None:
            return False
        if status_of(self.folder) == FINISHED:
            self.status = FINISHED
            keep_published(self.folder) if self.of_study else None
        elif stopping or code == Stopped.code:
            self.status = STOPPED
        elif code == DamagedData.code and self.resumes:  # repeat it from its start
            shutil.rmtree(self.folder / "checkpoints")
            self.status = WAITING
        else:
            self.status, self.reason = BROKEN, last_error(self.log, self.log_offset)
        return True


def command_of(point: Point, folder: Path, resumes: bool) -> list[str]:
    """What starts the run of a point, or resumes it; only its own job counts."""
    words = [*program(), "launch", "-n", str(point.ranks)]
    words += ["--hostfile", point.hostfile] if point.hostfile else []
    words += ["--network", point.network] if point.network else []
    words += ["--", "train", "--resume" if resumes else "--out", str(folder / point.name)]
    words += [] if resumes else ["--force", "--job", str(job_file(folder, point.name))]
    return [*words, "--env-servers", str(point.servers)] if point.servers else words


def keep_published(run: Path) -> None:
    """Remove all of a finished run that a report does not need."""
    for item in run.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        elif item.name not in PUBLISHED:
            item.unlink()


def last_error(log: Path, offset: int) -> str:
    """The last error in a log behind so many bytes, or where to look."""
    lines = log.read_bytes()[offset:][-(1 << 16) :].decode(errors="replace").splitlines()
    mark = "canal-mpi: "
    said = [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]
    said = [words for words in said if not words.startswith("warning:")]
    return said[-1] if said else f"see {log}"


class Runner:
    """Runs points within so many slots; a rank takes one."""

    def __init__(
        self, folder: Path, points: Sequence[Point], slots: int, of_study: bool = False
    ) -> None:
        self.slots, self.stop_reason = slots, ""
        self.runs = [PointRun(point, folder, of_study) for point in points]
        for run in self.runs:
            run.check()

    def run(self, limit: float = inf) -> Generator[PointRun | None, None, None]:
        """Run what is not finished yet: each point when it has changed, and None at every poll.

        After `limit` seconds the ranks save and stop.
        """
        end = monotonic() + limit
        with signals_to(self._on_signal):
            try:
                while self.having(RUNNING) or (self.having(WAITING) and not self.stop_reason):
                    if monotonic() > end and not self.stop_reason:
                        self._stop("its time is over (--max-time)")
                    yield from self._start_what_fits()
                    yield from (r for r in self.having(RUNNING) if r.poll(bool(self.stop_reason)))
                    yield None
                    sleep(POLL_SECONDS)
            finally:
                for run in self.having(RUNNING):  # only where something went wrong here
                    run.signal(signal.SIGTERM)

    def having(self, *status: str) -> list[PointRun]:
        """The points with one of these statuses."""
        return [run for run in self.runs if run.status in status]

    def _start_what_fits(self) -> Iterator[PointRun]:
        for run in self.having(WAITING):
            if self.stop_reason or (self.having(RUNNING) and not self._fits(run)):
                return
            if locked(run.folder):  # by ranks of a runner that was killed
                continue
            run.check()  # they may have finished it
            if run.status == WAITING:
                run.start()
                if self.stop_reason:  # the signal came while it was being started
                    run.signal(signal.SIGUSR1)
                yield run

    def _fits(self, run: PointRun) -> bool:
        running = [other.point for other in self.having(RUNNING)]
        if run.point.hostfile or any(point.hostfile for point in running):
            return False  # other hosts do one thing at a time
        return sum(point.ranks for point in running) + run.point.ranks <= self.slots

    def _on_signal(self, number: int, frame: Any) -> None:
        """The first signal lets the ranks save and stop, the second one ends them."""
        if not self.stop_reason:
            self._stop(signal.Signals(number).name)
        elif number != signal.SIGUSR1:
            for run in self.having(RUNNING):
                run.signal(signal.SIGTERM)

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        for run in self.having(RUNNING):
            run.signal(signal.SIGUSR1)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


# ── what is shown ──────────────────────────────────────────────────────────────────────────────


def show(runner: Runner, limit: float = inf) -> None:
    """Run it: a line for each change, and on a terminal one more that keeps changing."""
    console = Console(highlight=False)
    with console.status("") as status, closing(runner.run(limit)) as changes:
        for run in changes:
            if run is not None:
                words = f"{run.change:<8} {run.point.name}"
                if run.status == FINISHED:
                    words += f" in {duration(run.seconds)} · {summary(runner)}"
                words += f": {clean(run.reason)}" * bool(run.reason)
                console.print(words, markup=False, soft_wrap=True)
            names = ", ".join(other.point.name for other in runner.having(RUNNING))
            status.update(escape(f"{summary(runner)} · {names}"))


def table(runner: Runner) -> list[str]:
    """One line per point, with steps, time and mean score where it is finished."""
    width = max(5, *(len(run.point.name) for run in runner.runs))
    lines = [f" {'point':<{width}}  {'status':<9}  {'steps':>9}  {'time':<12} score at the end"]
    for run in runner.runs:
        facts = clean(run.reason)[:60]
        if run.status == FINISHED:
            with suppress(CanalError):
                found = Measured(load(run.folder))
                spent, human = costs(found.run), found.scale.name == "HNS"
                score = mean(100 * found.final if human else found.raw[:, found.rounds_done])
                facts = f"{spent['steps']:>9,.0f}  {duration(spent['seconds']):<12} "
                facts += f"{digits(score, 1)}{' % HNS' * human}"
        lines.append(f" {run.point.name:<{width}}  {run.status:<9}  {facts}".rstrip())
    return [*lines, f" {summary(runner)} · time: slowest agent, measuring left out"]


def summary(runner: Runner) -> str:
    """How many are finished, and how long the rest will take."""
    done, count = len(runner.having(FINISHED)), len(runner.runs)
    words = f"{done} of {count} points are finished"
    return words if done == count else f"{words} · {remaining(seconds_left(runner))}"


def seconds_left(runner: Runner) -> float:
    """Seconds until all are finished, with as many at once as fit."""
    total = longest = 0.0
    each = times(runner)
    for run in runner.having(WAITING, RUNNING, STOPPED):
        seconds = max(each[run.group] - run.seconds, 0.0)
        part = 1.0 if run.point.hostfile else min(run.point.ranks / runner.slots, 1.0)
        total, longest = total + seconds * part, max(longest, seconds)
    return max(total, longest)


def times(runner: Runner) -> dict[str, float]:
    """Seconds of a run of each group: as its finished ones took, else a guess put right by all."""
    known = [run for run in runner.having(FINISHED) if run.seconds]
    pace = sum(r.seconds for r in known) / sum(r.expected for r in known) if known else 1.0
    taken: dict[str, list[float]] = {}
    for run in known:
        taken.setdefault(run.group, []).append(run.seconds)
    guesses = {run.group: pace * run.expected for run in runner.runs}
    return guesses | {group: fmean(seconds) for group, seconds in taken.items()}


def dry_run(runner: Runner, folder: Path) -> list[str]:
    """The groups of points that differ only in their seed, with runs and times, as a table."""
    groups: dict[str, list[PointRun]] = {}
    for run in runner.runs:
        groups.setdefault(run.group, []).append(run)
    width, each = max(5, *map(len, groups)), times(runner)
    lines = [f" {'what':<{width}}  ranks  runs  finished  each"]
    for name, runs in groups.items():
        done = sum(run.status == FINISHED for run in runs)
        facts = f"{runs[0].point.ranks:>5}  {len(runs):>4}  {done:>8}"
        how = "" if done else ", a guess"
        lines.append(f" {name:<{width}}  {facts}  about {duration(each[name])}{how}")
    words = f"{len(runner.runs)} points, {len(runner.having(FINISHED))} finished"
    left = f"with {runner.slots} slots about {duration(seconds_left(runner))} to go"
    return [*lines, f" {words} · {left} · {folder}"]


def guess(point: Point) -> float:
    """About so many seconds, before anything is known."""
    hosts = ["here"] * point.agents
    plan = plan_of(point.job, Path(), "", 0, hosts)
    speeds = [device.speed for device in devices(point.job, hosts)]
    return Workload(plan).seconds(point.ranks if point.hostfile else cores(), speeds)
