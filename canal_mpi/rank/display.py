"""What rank 0 shows: a table that refreshes on a terminal, sparse plain lines elsewhere."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isfinite, isinf, nan
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np

from canal_mpi import __version__
from canal_mpi.errors import StorageError, logger
from canal_mpi.games import human_normalised, win_return_of
from canal_mpi.interfaces import Progress
from canal_mpi.launcher import nobody_reads, start_command, terminal
from canal_mpi.rank.plan import Plan, Workload, core_speed
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import last_saved
from canal_mpi.results.files import write_whole
from canal_mpi.results.measures import mean
from canal_mpi.results.progress import coloured, duration, progress_lines, remaining, short_path
from canal_mpi.results.store import Store, decoded
from canal_mpi.results.summary import Took, compared, count, summary
from canal_mpi.topology.graphs import warnings

LINE_EVERY = 30.0  # seconds between two plain lines
STATUS_EVERY = 2.0
RATE_EVERY = 1.0


class Display:
    """Shows the progress of all agents; `status.json` and `events.jsonl` tell programs."""

    def __init__(
        self, world: World, plan: Plan, store: Store, verbosity: int, before: float = 0.0
    ) -> None:
        self.heartbeat, self.folder, self.job = world.heartbeat, plan.folder, plan.job
        self.hosts = [device.host for device in world.devices[: world.agents]]
        self.rounds, self.before = len(plan.orders[0]), before  # seconds of earlier sittings
        self.began = self.agents_done = monotonic()
        self.store, self.verbosity = store, verbosity
        self.workload = Workload(plan)
        self.done_before = 0.0  # the fraction of it that was done before this start of the run
        self._terminal = terminal() if verbosity >= 0 else None
        self._drawn = 0  # lines of the table on the terminal
        self._start = self._last_line = monotonic()
        self._last_status = 0.0
        self._rates: list[float | None] = [None for _ in self.hosts]  # steps per second
        self._counted = (self._start, [0 for _ in self.hosts])  # steps of the agents at a time
        self._mean_hns, self._note, self._writing = nan, "", 0.0
        self._warned: set[int] = set()

    @property
    def _progress(self) -> list[Progress]:
        """Where the agents are; ranks behind them run environments."""
        return self.heartbeat.progress[: len(self.hosts)]

    def say(self, text: str) -> None:
        """Lines that stay."""
        if self._terminal:
            self._print(coloured(text.split("\n"), _width(self._terminal), wrap=True))
        elif self.verbosity >= 0:
            self._print(text)

    def _print(self, text: str, stays: bool = True) -> None:
        """Replace the table, if any, by a text that may stay, or be replaced by the next one.

        Where nobody reads any more, the run goes on in silence.
        """
        erase = f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""
        try:
            if nobody_reads():
                raise BrokenPipeError("nobody reads what mpirun prints")
            print(f"{erase}{text}", flush=True)
            self._drawn = 0 if stays else text.count("\n") + 1
        except OSError as error:
            logger.warning("output is closed (%s): going on without it", error)
            self.verbosity, self._terminal = -1, None
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def event(self, kind: str, **facts: Any) -> None:
        """One line of events.jsonl."""
        line = json.dumps({"time": round(time(), 3), "event": kind} | facts, ensure_ascii=False)
        path = self.folder / "events.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StorageError(f"can't write {path}: {error.strerror}.") from error

    def refresh(self) -> None:
        """Called at every heartbeat of rank 0."""
        now = monotonic()
        self._measure(now)
        self._warn_of_silence()
        status = "stopped" if self.heartbeat.stop_reason else "running"
        if now - self._last_status >= STATUS_EVERY or status == "stopped":  # we may be killed soon
            self._last_status = now
            self.write_status(status)
        if self._terminal:
            facts = self.facts("running")
            lines, width = progress_lines(facts, time()), _width(self._terminal)
            self._print(coloured(lines, width, facts["done"]), stays=False)
        elif now - self._last_line >= LINE_EVERY:
            self._last_line = now
            self.say(self._summary())

    def _measure(self, now: float) -> None:
        """How fast the agents are."""
        since, before = self._counted
        if now - since >= RATE_EVERY:
            steps = [p.total_steps for p in self._progress]
            self._rates = [(b - a) / (now - since) for a, b in zip(before, steps, strict=True)]
            self._counted = (now, steps)

    def _warn_of_silence(self) -> None:
        heartbeat, silent = self.heartbeat, dict(self.heartbeat.silent())
        for rank in sorted(silent.keys() - self._warned):
            left = max(heartbeat.timeout - silent[rank], 0)
            self.say(
                f"{heartbeat.names[rank]} has been silent for {silent[rank]:.0f} s in "
                f"{heartbeat.progress[rank].phase}; the job ends in {left:.0f} s unless it answers"
            )
        self._warned = set(silent)

    def _summary(self) -> str:
        parts = [f"{agent}: {_doing(p)}" for agent, p in enumerate(self._progress[:8])]
        more = f" · and {len(self._progress) - 8} more" if len(self._progress) > 8 else ""
        rate = sum(rate or 0 for rate in self._rates)
        first = min(p.round for p in self._progress if p.phase != "died")
        return (
            f"round {first}/{self.rounds} · {' · '.join(parts)}{more}"
            f"{f' · {rate:.0f} steps/s' if rate >= 1 else ''} · {remaining(self._left())}"
        )

    def _left(self) -> float:
        """Seconds that the run will still take, NaN at first."""
        done = self.workload.done(self._progress)
        if done <= self.done_before:
            self._start = monotonic()  # starting and compiling tell nothing of what comes
        if done - self.done_before < 0.02:
            return nan
        return (monotonic() - self._start) * (1 - done) / (done - self.done_before)

    def resumed_in(self, round_: int) -> None:
        """The rounds before this one were over before this start of the run."""
        there = [Progress(round=round_) for _ in self.hosts]
        self.done_before = self.workload.done(there)

    def round_done(self, round_: int, seconds: float = 0.0) -> None:
        """Say what came of a round; with the free clock, of all tasks that are done.

        Writing it took so many seconds: after the last round no row of a task counts them.
        """
        self._writing = seconds
        if not round_:
            return
        self._score()
        free = self.job.share.free
        ledger, tasks = self.store.table("exchange"), self.store.table("tasks")
        here, now = (free | (table["round"] == round_) for table in (ledger, tasks))
        lessons, refused = (here & (ledger["kind"] == kind) for kind in (b"lesson", b"refusal"))
        played, taught = (int((now & (tasks["source"] == s)).sum()) for s in (b"env", b"lesson"))
        count = int(lessons.sum())
        size, raw = (int(ledger[n][lessons].sum()) for n in ("bytes", "raw_bytes"))
        where = f"{len(now)} of {self.rounds * len(self.hosts)} tasks" if free else ""
        where = where or f"round {round_}/{self.rounds}"
        self._note = f"{where}: {round_words(played, taught, count, size, raw, free)}"
        for k in np.flatnonzero(refused & (ledger["round"] == round_)):
            reason = ledger["reason"][k].decode()
            self.say(
                f"agent {ledger['to'][k]} refused a lesson of agent {ledger['donor'][k]}: {reason}"
            )
        self.event("round", round=round_, played=played, lessons=count, bytes=size)
        if not self._terminal:
            self.say(f"{self._note} · {remaining(self._left())}")

    def _score(self) -> None:
        """The mean of the tasks' scores so far, of those that can be compared with humans'."""
        tasks = self.store.table("tasks")
        pairs = zip(decoded(tasks["task"]), tasks["score"], strict=True)
        known = [human_normalised(t, s) for t, s in pairs if compared(self.job, t)]
        self._mean_hns = mean(known)

    def facts(self, status: str) -> dict[str, Any]:
        """What status.json tells, and what the table is drawn from."""
        over = status in ("finished", "degraded")
        agents = [
            {"agent": agent, "host": host, "steps_per_second": rate}
            | {name: _json_value(value) for name, value in vars(p).items()}
            | ({"phase": "done", "round": self.rounds} if over and p.phase != "died" else {})
            for agent, (host, rate, p) in enumerate(
                zip(self.hosts, self._rates, self._progress, strict=True)
            )
        ]
        return {
            "status": status,
            "time": time(),
            "rounds": self.rounds,
            "note": self._note,
            "done": 1.0 if over else self.workload.done(self._progress),
            "left": _json_value(self._left()) if status == "running" else 0.0,
            "saved": _json_value(last_saved(self.folder)),
            "mean_hns": _json_value(self._mean_hns),
            "agents": agents,
        }

    def write_status(self, status: str) -> None:
        """Replace status.json."""
        facts = self.facts(status)
        try:
            write_whole(self.folder / "status.json", json.dumps(facts).encode())
        except StorageError as error:
            logger.warning("%s", error)  # only for programs that watch; the run goes on

    def end(self, status: str, **facts: str) -> None:
        """Let the small files say how the run ended."""
        if self.job.share.free and status == self.store.end:
            self.round_done(
                self.rounds, self._writing
            )  # rows of others came after rank 0's own last round
        self._score()  # evaluations may come after the last round
        self.write_status(status)
        self.event(status, **facts)

    def summarise(self, started: float) -> None:
        """How well the tasks were learnt, by whom, and where the time since the start went."""
        run = self.before + self.agents_done - self.began - self._writing
        end = monotonic() - self.agents_done + self._writing
        took = Took(self.began - started, run, end)
        self.say("\n".join(summary(self.job, self.store, took)))


class Trackers:
    """Processes beside the run that feed trackers; `warn` is told once of each that fails.

    They read the files of the run only: nothing that happens to them can hurt it.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self._warn = folder, warn
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, names: Sequence[str]) -> None:
        """Start those that can be started."""
        for name in dict.fromkeys(names):
            words = ["canal_mpi.trackers", str(self.folder), name]
            if name == "prometheus":
                file = str(self.folder / "metrics.prom")
                words = ["canal_mpi", "watch", str(self.folder), "--prometheus", file]
            try:
                with self._log(name).open("wb") as log:
                    self._processes[name] = subprocess.Popen(
                        [sys.executable, "-m", *words],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        process_group=0,
                    )
            except OSError as error:
                self._warn(f"--track {name} can't be started: {error}.")

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"track-{name}.log"

    def check(self, patience: float = 0.0) -> None:
        """Say it, once, where a process has failed; at the end of a run, wait for them.

        One that takes longer than `patience` is killed, together with its own processes.
        """
        deadline = monotonic() + patience
        for name, process in list(self._processes.items()):
            try:
                failed = process.wait(max(deadline - monotonic(), 0)) != 0
            except subprocess.TimeoutExpired:
                if not patience:
                    continue
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._warn(f"--track {name} did not end within {patience:.0f} s and was killed.")
                failed = False
            del self._processes[name]
            if failed:
                self._warn(f"--track {name} has failed, the run goes on: {self._why(name)}")

    def _why(self, name: str) -> str:
        with suppress(OSError):
            lines = self._log(name).read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line), "it was killed")
        return "its log is gone"


def round_words(
    played: int, taught: int, lessons: int, size: int, raw: int, tasks: bool = False
) -> str:
    """What agents did in a round: `2 agents played, 3 agents learnt from 9 lessons, 1.1 MB …`.

    Where tasks are counted, `2 played, 3 learnt …`: agents have several.
    """
    who = [str(number) if tasks else count(number, "agent") for number in (played, taught)]
    parts = [f"{who[0]} played"] if played or not taught else []
    if taught:
        parts.append(f"{who[1]} learnt from {count(lessons, 'lesson')}")
        packed = f" packed from {_bytes(raw)}" if size < raw else ""
        parts.append(f"{_bytes(size)}{packed}")
    return ", ".join(parts)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"


def _doing(p: Progress) -> str:
    if p.phase not in ("training", "evaluating"):
        return p.phase
    return f"{p.task if p.phase == 'training' else p.phase} {p.step}/{p.steps}"


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _width(tty: str) -> int:
    """Columns of the terminal the user looks at, which may be the launcher's."""
    try:
        with open(tty, opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)) as file:
            return os.get_terminal_size(file.fileno()).columns or 80
    except OSError:
        return shutil.get_terminal_size().columns


def greeting(
    world: World, plan: Plan, replay_bytes: int, rehearsal_bytes: int, before: int
) -> Iterator[str]:
    """What runs, where, what it costs, and what to know first; so many `before` are lessons."""
    job, size, hosts = plan.job, world.agents, len({device.host for device in world.devices})
    speeds = Counter(device.speed for device in world.devices if device.speed < 1)
    words = ", ".join(f"{count} at {speed:g}" for speed, count in sorted(speeds.items()))
    slow = f" ({words} of full speed)" if words else ""
    servers = " and ".join(f"rank {k} on {world.hosts[k]}" for k in range(size, world.size))
    sharing = "no sharing"
    if plan.edges or before:
        sharing = f"{job.share.policy} over {job.share.topology}, {job.share.exchange}"
    sharing += f", {before} lessons of {job.share.lessons}" if before else ""
    yield (
        f"canal-mpi {__version__} · job {job.name} · {count(size, 'agent')} on {hosts} "
        f"{'emulated ' * bool(job.emulate)}host{'s' * (hosts > 1)}{slow}"
        f"{f' · environments on {servers}' if servers else ''} · {sharing} · "
        f"seed {job.seed} · {count(len(plan.orders[0]), 'task')} × {job.train.steps:,} steps · "
        f"replay {replay_bytes / 1e6:.0f} MB and rehearsal {rehearsal_bytes / 1e6:.0f} MB per agent"
        f" · {_guess(world, plan)}{short_path(plan.folder)}"
    )
    if world.launcher is None:
        yield (
            f"One agent (agent {world.agent}), no sharing; five that share: "
            "mpirun -np 5 canal-mpi train with the same options"
        )
    if wins := job.train.win_return:
        others = [task for task in job.tasks if isinf(win_return_of(wins, task))]
        never = f"; none is known for {', '.join(others)}" if others else ""
        yield f"Tasks end early at a mean return of {', '.join(wins)}{never}"
    if "none" not in (job.share.policy, job.share.topology):
        yield from (f"warning: {words}" for words in warnings(set(plan.edges), size))


def _guess(world: World, plan: Plan) -> str:
    """How long the whole run takes, where that can be told before it begins."""
    work = Workload(plan)
    cores = {info["host"]: int(info["cores"]) for info in world.host_info[: world.agents]}
    speed, slowed = core_speed(), [device.speed for device in world.devices[: world.agents]]
    seconds = work.seconds(speed * (sum(cores.values()) or 1), [speed * part for part in slowed])
    minutes = round(seconds / 60)
    words = f"about {duration(60 * minutes).removesuffix(' 0 s')}" if minutes else "under 1 min"
    return f"estimated time {words} · " if work.known else ""


def train_command(world: World, options: str) -> str:
    """The command that starts as many agents and env servers as there are now."""
    start = start_command(len(world.alive)) if world.launcher else "canal-mpi"
    servers = world.size - world.agents
    return f"{start} train {options}{f' --env-servers {servers}' if servers else ''}"


def resume_command(world: World, folder: Path) -> str:
    """What resumes this run."""
    return train_command(world, f"--resume {shlex.quote(short_path(folder))}")


def next_steps(world: World, plan: Plan, report: bool) -> str:
    """Where the results are, and what one may do with them."""
    folder = short_path(plan.folder)
    quoted, again = shlex.quote(folder), f"--job {shlex.quote(f'{folder}/job.toml')}"
    shares = again if plan.job.share.policy != "none" else f"{again} --share exact"
    other = f"{train_command(world, shares)}   (the same with sharing)"
    if world.agents == 1:
        other = f"{start_command(5)} train {shares}   (five that share)"
    if plan.edges:
        alone = train_command(world, f"{again} --share none")
        other = f"{alone}   (without sharing; `canal-mpi report` compares runs)"
    first = f"canal-mpi report {quoted}   (one page about this run)"
    if report:
        trust = " --trust" if plan.job.modules else ""
        first = f"canal-mpi evaluate {quoted}{trust}   (play again; --video)"
    page = f" Report:  {folder}/report.html\n" if report else ""
    return f"{page} Results: {folder}/run.h5\n Next:\n   {first}\n   {other}"
