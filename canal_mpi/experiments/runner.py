"""Runs points, one after the other or as many at once as fit, and resumes where it was stopped.

A finished point is left alone, one that was stopped or broke is resumed, one whose checkpoints are
damaged is repeated from its start. Also here: progress, estimates of time, and Slurm arrays.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from shutil import get_terminal_size
from statistics import fmean
from time import monotonic, sleep
from typing import Any

from canal_mpi import config
from canal_mpi.errors import (
    CanalError,
    DamagedData,
    DirectoryInUse,
    Stopped,
    UsageError,
)
from canal_mpi.experiments.points import FINISHED, Point, check_same_job, job_file
from canal_mpi.games import order_of
from canal_mpi.launch.mpirun import (
    Command,
    Process,
    build_command,
    clean_up,
    end_at_once,
    start_process,
    temporary_folder,
)
from canal_mpi.launch.supervise import STOP_SIGNALS
from canal_mpi.rank.plan import devices
from canal_mpi.results.compare import Measured
from canal_mpi.results.measures import mean
from canal_mpi.results.progress import clean, duration, remaining
from canal_mpi.results.reader import Run, load
from canal_mpi.results.status import locked, run_status, status_of

POLL_SECONDS = 0.2
RETRY_SECONDS = 10.0  # until a point that another host has is tried again
COMPARABLE = 10  # points with a tenth of the steps of others, or less, tell nothing of their time
WAITING, RUNNING, ELSEWHERE = "waiting", "running", "elsewhere"  # elsewhere: by another process
STOPPED, BROKEN = "stopped", "broken"
TEMPLATE = "sweep-array.sbatch"
CLEAR_LINE = "\r\x1b[K"
START_SECONDS = 4.0  # until the first step of a run
STEPS_PER_SECOND = 600.0  # of one agent that has a core of a PC, with the default network
LESSON_COST = 0.5  # time of a task with a lesson as part of one that is played


@dataclass
class PointRun:
    """A point, its run directory, and how far it is."""

    point: Point
    folder: Path
    log: Path
    status: str = WAITING
    reason: str = ""  # why it broke
    seconds: float = 0.0  # since it was started this time
    started: float = 0.0
    retry_at: float = 0.0
    log_offset: int = 0  # what the log had before this start
    resumes: bool = False  # whether it was started from its checkpoints
    from_scratch: bool = False  # whether it must be repeated: its checkpoints are damaged
    process: Process | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def size(self) -> int:
        """Steps per task, by which the times of points are compared."""
        return self.point.job.train.steps

    def check(self) -> None:
        """See how the run directory is, before anything is started."""
        done = check_same_job(self.folder, self.point) == FINISHED
        self.status = FINISHED if done else ELSEWHERE if locked(self.folder) else WAITING

    def describe(self) -> None:
        """For a report that starts nothing: also see how a run that is not finished was left."""
        self.check()
        seen = run_status(self.folder).status
        if self.status == WAITING and seen != "unknown":
            damaged = status_of(self.folder) == "damaged"
            self.status = "damaged" if damaged else ELSEWHERE if seen == RUNNING else seen

    def ask_to_stop(self) -> None:
        """Let its ranks save and stop."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)

    def start(self, folder: Path) -> None:
        """Start it, or resume it from its checkpoints."""
        begun = any((self.folder / "checkpoints").glob("agent-*/round-*"))
        self.resumes, self.from_scratch = begun and not self.from_scratch, False
        launch = launch_of(self.point, folder, self.resumes)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.resources.enter_context(temporary_folder())
        self.resources.callback(clean_up, temporary)
        log = self.resources.enter_context(self.log.open("ab"))
        self.log_offset = self.log.stat().st_size
        log.write(f"{launch}\n".encode())
        log.flush()
        self.process = start_process(launch, temporary, log, log)
        self.started, self.status = monotonic(), RUNNING

    def poll(self, stopping: bool) -> bool:
        """Whether it has ended; its run.h5 and its exit code tell how."""
        assert self.process is not None
        self.seconds = monotonic() - self.started
        if self.process.poll() is None:
            return False
        self.resources.close()
        code = self.process.returncode
        if status_of(self.folder) == FINISHED:
            self.status = FINISHED
        elif stopping or code == Stopped.code:
            self.status = STOPPED
        elif code == DirectoryInUse.code:
            self.status, self.retry_at = ELSEWHERE, monotonic() + RETRY_SECONDS
        elif code == DamagedData.code and self.resumes:
            self.status, self.from_scratch = WAITING, True
        else:
            self.status, self.reason = BROKEN, last_error(self.log, self.log_offset)
        return True

    def end(self) -> None:
        """End it at once."""
        if self.process is not None:
            end_at_once(self.process)
            self.process.wait()
        self.resources.close()


def launch_of(point: Point, folder: Path, resumes: bool) -> Command:
    """What starts the run of a point, or resumes it; only its own job counts."""
    run = folder / point.name
    what = ["--resume", str(run)]
    if not resumes:
        what = ["--job", str(job_file(folder, point)), "--out", str(run), "--force"]
    arguments = (point.ranks, ["train", *what], point.hosts, point.servers)
    return build_command(*arguments, network=point.network or None, settings=False)


def last_error(log: Path, offset: int) -> str:
    """The last error in a log behind so many bytes, or where to look."""
    try:
        lines = log.read_bytes()[offset:][-(1 << 16) :].decode(errors="replace").splitlines()
    except OSError:
        lines = []
    mark = "canal-mpi: "
    said = [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]
    said = [words for words in said if not words.startswith("warning:")]
    return said[-1] if said else f"see {log}"


class Runner:
    """Runs points within so many slots; a rank takes one."""

    def __init__(self, folder: Path, points: Sequence[Point], slots: int) -> None:
        self.folder, self.slots = folder, slots
        logs = folder / "logs"
        self.runs = [PointRun(p, folder / p.name, logs / f"{p.name}.log") for p in points]
        self.stop_reason = ""

    def run(
        self,
        on_change: Callable[[str, PointRun], None] = lambda what, run: None,
        on_poll: Callable[[], None] = lambda: None,
        limit: float = inf,
    ) -> None:
        """Everything that is not finished yet; after `limit` seconds the ranks save and stop."""
        end = monotonic() + limit
        for run in self.runs:
            run.check()
        handlers = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            while self._unfinished():
                if monotonic() > end and not self.stop_reason:
                    self._stop("its time is over (--max-time)")
                self._start_what_fits(on_change)
                for run in self.having(RUNNING):
                    if run.poll(bool(self.stop_reason)):
                        on_change("repeated" if run.status == WAITING else run.status, run)
                for run in self.having(ELSEWHERE):
                    if monotonic() >= run.retry_at:
                        run.check()
                on_poll()
                sleep(POLL_SECONDS)
        finally:
            for run in self.having(RUNNING):  # only where something went wrong here
                run.end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def having(self, *status: str) -> list[PointRun]:
        """The points with one of these statuses."""
        return [run for run in self.runs if run.status in status]

    def _unfinished(self) -> bool:
        states = (RUNNING,) if self.stop_reason else (RUNNING, WAITING, ELSEWHERE)
        return bool(self.having(*states))

    def _start_what_fits(self, on_change: Callable[[str, PointRun], None]) -> None:
        for run in self.having(WAITING):
            if self.stop_reason or (self.having(RUNNING) and not self._fits(run)):
                return
            run.check()  # another process may have come first
            if run.status == WAITING:
                run.start(self.folder)
                if self.stop_reason:  # the signal came while it was being started
                    run.ask_to_stop()
                on_change("resumed" if run.resumes else "started", run)

    def _fits(self, run: PointRun) -> bool:
        running = [other.point for other in self.having(RUNNING)]
        if run.point.hosts or any(point.hosts for point in running):
            return False  # other hosts do one thing at a time
        return sum(point.ranks for point in running) + run.point.ranks <= self.slots

    def _on_signal(self, number: int, frame: Any) -> None:
        """The first signal lets the ranks save and stop, the second one ends them."""
        if not self.stop_reason:
            self._stop(signal.Signals(number).name)
        elif number != signal.SIGUSR1:
            for run in self.having(RUNNING):
                if run.process is not None:
                    end_at_once(run.process)

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        for run in self.having(RUNNING):
            run.ask_to_stop()


def all_finished(folder: Path, points: Sequence[Point]) -> bool:
    """Whether nothing is left to run."""
    return all(status_of(folder / point.name) == FINISHED for point in points)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Progress:
    """Shows a runner: a line for each change, and now and then how far it is."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self._terminal = runner, sys.stdout.isatty()
        self._every = 1.0 if self._terminal else 60.0
        self._next = monotonic() + self._every

    def changed(self, what: str, run: PointRun) -> None:
        """Print a line that stays."""
        words = f"{what:<8} {run.point.name}"
        if what == FINISHED:
            words += f" in {duration(run.seconds)} · {self.summary()}"
        elif run.reason:
            words += f": {clean(run.reason)}"
        print(CLEAR_LINE * self._terminal + words, flush=True)

    def refresh(self) -> None:
        """On a terminal one line that is replaced every second, else one per minute."""
        if monotonic() < self._next:
            return
        self._next = monotonic() + self._every
        names = ", ".join(run.point.name for run in self.runner.having(RUNNING))
        line = f"{self.summary()} · {names}"
        if self._terminal:
            line = CLEAR_LINE + line[: get_terminal_size().columns - 1]
        print(line, end="" if self._terminal else "\n", flush=True)

    def close(self) -> None:
        """Show how everything ended."""
        print(CLEAR_LINE * self._terminal + "\n".join(self.table()), flush=True)

    def table(self) -> list[str]:
        """One line per point, with steps, time and mean score where it is finished."""
        width = max(5, *(len(run.point.name) for run in self.runner.runs))
        lines = [f" {'point':<{width}}  {'status':<9}  {'steps':>9}  {'time':<12} score"]
        for run in self.runner.runs:
            facts = clean(run.reason)[:60]
            if run.status == FINISHED:
                with suppress(CanalError):
                    facts = _result(load(run.folder))
            lines.append(f" {run.point.name:<{width}}  {run.status:<9}  {facts}".rstrip())
        return [*lines, f" {self.summary()}"]

    def summary(self) -> str:
        """How many are finished, and how long the rest will take."""
        done, count = len(self.runner.having(FINISHED)), len(self.runner.runs)
        words = f"{done} of {count} points are finished"
        return words if done == count else f"{words} · {remaining(self.seconds_left())}"

    def seconds_left(self) -> float:
        """Seconds until all are finished, by the steps of those that are; NaN before any is."""
        running, waiting = self.runner.having(RUNNING), self.runner.having(WAITING)
        sizes = [run.size for run in (*running, *waiting)]
        known = [run for run in self.runner.having(FINISHED) if run.seconds]
        least = max(sizes, default=0) / COMPARABLE
        rates = [run.seconds / run.size for run in known if run.size >= least]
        if not rates:
            return nan
        spent = sum(min(run.seconds, fmean(rates) * run.size) for run in running)
        return (fmean(rates) * sum(sizes) - spent) / max(len(running), 1)


def _result(run: Run) -> str:
    """Steps, time and mean score of a run in a line."""
    tasks, found = run["tasks"], Measured(run)
    human = found.scale.name == "HNS"
    score = f"{100 * mean(found.learnt):.1f} % HNS" if human else f"{mean(tasks['score']):.1f}"
    steps = int((tasks["env_steps"] + tasks["probe_steps"]).sum())
    return f"{steps:>9,}  {duration(run.seconds):<12} {score}"


def slurm_script(kind: str, folder: Path, points: Sequence[Point]) -> str:
    """An array of Slurm jobs, one per point, made from `jobs/sweep-array.sbatch`."""
    if any(point.hosts for point in points):
        raise UsageError("--slurm: Slurm chooses the hosts; leave out --hostfiles, or --emulate.")
    files = [place / TEMPLATE for place in config.job_folders() if (place / TEMPLATE).is_file()]
    if not files:
        raise UsageError(f"{TEMPLATE} is missing from this installation of canal-mpi.")
    text = files[0].read_text(encoding="utf-8")
    values = {
        "#SBATCH --array=": f"0-{len(points) - 1}",
        "#SBATCH --ntasks=": str(max(point.ranks for point in points)),
        "command=": kind,
        "folder=": shlex.quote(str(folder.absolute())),
    }
    if Path(sys.prefix, "bin/activate").is_file():  # not so in every kind of environment
        values["VENV="] = f"${{VENV:-{shlex.quote(sys.prefix)}}}"
    for start, value in values.items():
        line = (start + value).replace("\\", r"\\")
        text = re.sub(f"(?m)^{re.escape(start)}.*$", line, text)
    return text


# ── how long it will take ──────────────────────────────────────────────────────────────────────


def dry_run(folder: Path, points: Sequence[Point], slots: int) -> list[str]:
    """The groups of points that differ only in their seed, with runs and times, as a table."""
    done = {p.name: load(folder / p.name).seconds for p in points if all_finished(folder, [p])}
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    width, times = max(5, *map(len, groups)), dict[str, float]()
    lines = [f" {'what':<{width}}  ranks  runs  finished  each"]
    for name, members in groups.items():
        taken = [done[point.name] for point in members if point.name in done]
        times[name] = START_SECONDS + (fmean(taken) if taken else guess(members[0]))
        facts = f"{members[0].ranks:>5}  {len(members):>4}  {len(taken):>8}"
        how = "" if taken else ", a guess"
        lines.append(f" {name:<{width}}  {facts}  about {duration(times[name])}{how}")
    left = [(p, times[p.group]) for p in points if p.name not in done]
    shares = [seconds * (1.0 if p.hosts else min(p.ranks / slots, 1.0)) for p, seconds in left]
    total = max(sum(shares), *(seconds for _, seconds in left)) if left else 0.0
    runs = f"{len(points)} points, {len(done)} finished"
    return [*lines, f" {runs} · with {slots} slots about {duration(total)} to go · {folder}"]


def guess(point: Point) -> float:
    """About so many seconds: tasks that others have learnt before are taken to come as lessons."""
    job, agents = point.job, point.agents
    rounds = job.train.rounds or len(job.tasks)
    orders = [order_of(job.order, job.tasks, k, job.seed)[:rounds] for k in range(agents)]
    known, taught = set[str](), 0
    for tasks in zip(*orders, strict=True):
        taught += sum(task in known for task in tasks) if job.share.policy != "none" else 0
        known |= set(tasks) if agents > 1 else set()
    part = 1 - (1 - LESSON_COST) * taught / (agents * rounds)
    crowd = max(point.ranks / cores(), 1.0) if not point.hosts else 1.0
    slowest = min(device.speed for device in devices(job, ["here"] * point.ranks))
    return part * rounds * job.train.steps / STEPS_PER_SECOND * max(crowd, 1 / slowest)
