"""What rank 0 shows: a table that refreshes on a terminal, sparse plain lines elsewhere."""

import json
import os
import shlex
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np

from canal_mpi import __version__
from canal_mpi.errors import StorageError, logger
from canal_mpi.games import human_normalised
from canal_mpi.interfaces import Progress
from canal_mpi.launcher import nobody_reads, terminal
from canal_mpi.rank.heartbeat import Heartbeat
from canal_mpi.rank.plan import Device, Plan, Request, crowded
from canal_mpi.rank.world import World
from canal_mpi.results.files import write_whole
from canal_mpi.results.progress import digits, duration, progress_lines, remaining
from canal_mpi.results.store import Store
from canal_mpi.topology.graphs import warnings

LINE_EVERY = 10.0  # seconds between two plain lines
STATUS_EVERY = 2.0
WHOLE_GAME = 3000  # steps after which most games are over


class Display:
    """Draws the progress of all agents; `status.json` and `events.jsonl` tell programs."""

    def __init__(
        self, heartbeat: Heartbeat, folder: Path, hosts: list[str], rounds: int, verbosity: int
    ) -> None:
        self.heartbeat, self.folder, self.hosts = heartbeat, folder, hosts
        self.rounds, self.verbosity = rounds, verbosity
        self._terminal = terminal() if verbosity >= 0 else None
        self._drawn = 0
        self._start = self._last_line = monotonic()
        self._last_status = 0.0
        self._last_steps: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, float] = {}
        self._returns: dict[int, deque[float]] = {}
        self._rounds: dict[int, int] = {}
        self._saved = self._mean_hns = nan
        self._note = ""
        self._warned: set[int] = set()
        self.done_before = 0  # tasks that were over before this start of the run

    @property
    def _progress(self) -> list[Progress]:
        """Where the agents are; ranks behind them run environments."""
        return self.heartbeat.progress[: len(self.hosts)]

    @property
    def _living(self) -> list[Progress]:
        return [p for p in self._progress if p.phase != "died"]

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.verbosity >= 0:
            self._erase()
            self._print(text)

    def _print(self, text: str) -> None:
        """Show something; where nobody reads any more, the run goes on in silence."""
        try:
            if nobody_reads():
                raise BrokenPipeError("nobody reads what mpirun prints")
            print(text, flush=True)
        except OSError as error:
            logger.warning("output is closed (%s): going on without it", error)
            self.verbosity, self._terminal = -1, None
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def event(self, kind: str, **facts: Any) -> None:
        """One line of events.jsonl."""
        line = json.dumps({"time": round(time(), 3), "event": kind} | facts, ensure_ascii=False)
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def refresh(self) -> None:
        """Called at every heartbeat of rank 0."""
        now = monotonic()
        self._measure_rates(now)
        self._warn_of_silence()
        if now - self._last_status >= STATUS_EVERY:
            self._last_status = now
            self.write_status("running")
        if self._terminal:
            self._draw()
        elif now - self._last_line >= LINE_EVERY:
            self._last_line = now
            self.say(self._summary())

    def _measure_rates(self, now: float) -> None:
        """Steps per second, and the last few different returns of the task."""
        for agent, p in enumerate(self._progress):
            before, steps = self._last_steps.get(agent, (self._start, 0))
            if now - before < 1.0:
                continue
            self._rates[agent] = (p.total_steps - steps) / (now - before)
            self._last_steps[agent] = (now, p.total_steps)
            if self._rounds.get(agent) != p.round:
                self._rounds[agent], self._returns[agent] = p.round, deque(maxlen=6)
            if isfinite(p.mean_return) and p.mean_return not in list(self._returns[agent])[-1:]:
                self._returns[agent].append(p.mean_return)

    def _warn_of_silence(self) -> None:
        silent = self.heartbeat.silent()
        for rank, seconds in silent:
            if rank not in self._warned:
                phase = self.heartbeat.progress[rank].phase
                left = max(self.heartbeat.timeout - seconds, 0)
                agent = rank < len(self.hosts)
                who = f"agent {rank} ({self.hosts[rank]})" if agent else self.heartbeat.names[rank]
                self.say(
                    f"{who} has been silent for {seconds:.0f} s in "
                    f"{phase}; the job ends in {left:.0f} s unless it answers"
                )
        self._warned = {rank for rank, _ in silent}

    def _draw(self) -> None:
        width = _width(self._terminal)
        lines = progress_lines(self.facts("running"), time())
        self._erase()
        self._print("\n".join(line[: width - 1] for line in lines))
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            sys.stdout.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _summary(self) -> str:
        parts = [
            f"{agent}: " + (f"{p.task} {p.step}/{p.steps}" if p.phase == "training" else p.phase)
            for agent, p in enumerate(self._progress[:8])
        ]
        more = f" · and {len(self._progress) - 8} more" if len(self._progress) > 8 else ""
        rates = sum(self._rates.values())
        rounds = min(p.round for p in self._living)
        return (
            f"round {rounds}/{self.rounds} · {' · '.join(parts)}{more} · {rates:.0f} steps/s"
            f" · {remaining(self._left())}"
        )

    def _left(self) -> float:
        """Seconds that the run will still take, NaN at first."""
        total = self.rounds * len(self._living) - self.done_before
        done = sum(max(p.round - 1, 0) + p.step / max(p.steps, 1) for p in self._living)
        done = max(done - self.done_before, 0)
        if done < 0.02 * total:
            return nan
        return (monotonic() - self._start) * max(total - done, 0) / done

    def round_done(self, round_: int, store: Store) -> None:
        """Say what the exchange of a round moved."""
        self._saved = time()
        if not round_:
            return
        ledger, tasks = store.table("exchange"), store.table("tasks")
        pairs = zip(tasks["task"], tasks["score"], strict=True)
        self._mean_hns = float(np.mean([human_normalised(t.decode(), s) for t, s in pairs]))
        here = ledger["round"] == round_
        lessons, refused = (here & (ledger["kind"] == kind) for kind in (b"lesson", b"refusal"))
        played = int(((tasks["round"] == round_) & (tasks["source"] == b"env")).sum())
        packed, raw = (int(ledger[name][lessons].sum()) for name in ("bytes", "raw_bytes"))
        self._note = f"round {round_}/{self.rounds}: {played} played, {int(lessons.sum())} learnt"
        if packed:
            self._note += f" from lessons ({packed / 1e6:.2f} MB, raw {raw / 1e6:.2f} MB)"
        for k in np.flatnonzero(refused):
            reason = ledger["reason"][k].decode()
            self.say(
                f"agent {ledger['to'][k]} refused a lesson of agent {ledger['donor'][k]}: {reason}"
            )
        self.event("round", round=round_, played=played, lessons=int(lessons.sum()), bytes=packed)
        if not self._terminal:
            self.say(f"{self._note} · {remaining(self._left())}")

    def facts(self, status: str) -> dict[str, Any]:
        """What status.json tells, and what the table is drawn from."""
        agents = [
            {"agent": agent, "host": self.hosts[agent], "steps_per_second": self._rates.get(agent)}
            | {name: _json_value(value) for name, value in vars(p).items()}
            | {"returns": list(self._returns.get(agent, ()))}
            for agent, p in enumerate(self._progress)
        ]
        return {
            "status": status,
            "time": time(),
            "rounds": self.rounds,
            "note": self._note,
            "left": _json_value(self._left()) if status == "running" else 0.0,
            "saved": _json_value(self._saved),
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

    def summarise(self, store: Store, steps: int, cap: int) -> None:
        """The table of what was learnt from whom, and what to type next."""
        self._erase()
        tasks, ledger = store.table("tasks"), store.table("exchange")
        for line in summary_lines(tasks, whole_games=cap >= WHOLE_GAME):
            self.say(line)
        if cap < WHOLE_GAME:
            words = f"evaluation episodes were cut after {cap} steps"
            self.say(f" No human-normalised scores: {words}.")
        played, budget = int(tasks["env_steps"].sum()), steps * len(tasks["agent"])
        lessons = ledger["kind"] == b"lesson"
        count = int(lessons.sum())
        self.say(
            f"\n{played:,} environment steps played, {budget - played:,} saved by lessons · "
            f"{count} lesson{'s' * (count != 1)}, {ledger['bytes'][lessons].sum() / 1e6:.2f} MB "
            f"moved · {duration(monotonic() - self._start)}"
        )
        self.say(time_line(tasks))


def summary_lines(tasks: dict[str, Any], whole_games: bool) -> list[str]:
    """One line per agent and task: its source, score and, of whole games, the HNS."""
    hns_head = "     HNS" if whole_games else ""
    lines = ["", f" agent  round  task            source             {'score':>9}{hns_head}"]
    for k in np.lexsort((tasks["round"], tasks["agent"])):
        task, score = tasks["task"][k].decode(), float(tasks["score"][k])
        donors = tasks["donors"][k].decode()
        source = f"from agent {donors}" if donors else "played"
        hns = human_normalised(task, score) if whole_games else nan
        lines.append(
            f" {tasks['agent'][k]:>4}   {tasks['round'][k]:>4}   {task:<15.15} {source:<18} "
            f"{digits(score, 1):>9}  {'' if isnan(hns) else f'{hns:>6.1%}'}".rstrip()
        )
    return lines


def time_line(tasks: dict[str, Any]) -> str:
    """Where the time of the agents went."""
    total = max(float(tasks["seconds"].sum()), 1e-9)
    parts = {
        "environment": tasks["env_seconds"] + tasks["probe_seconds"],
        "learning": tasks["learn_seconds"] + tasks["pretrain_seconds"] + tasks["remember_seconds"],
        "exchange": tasks["exchange_seconds"],
        "files": tasks["save_seconds"],
        "evaluation": tasks["evaluate_seconds"],
        "waiting for others": tasks["wait_seconds"],
    }
    words = [f"{name} {float(part.sum()) / total:.1%}" for name, part in parts.items()]
    return f"Time of the agents: {', '.join(words)}."


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _width(tty: str | None) -> int:
    """Columns of the terminal the user looks at, which may be the launcher's."""
    try:
        with open(tty or "", opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)) as file:
            return os.get_terminal_size(file.fileno()).columns or 80
    except OSError:
        return shutil.get_terminal_size().columns


def greeting(
    world: World, plan: Plan, devices: Sequence[Device], room: tuple[int, int], before: int
) -> str:
    """What runs, where, and what it costs: bytes of replay and rehearsal, earlier lessons."""
    job, size, hosts = plan.job, world.agents, len(set(world.host_labels))
    emulated = "emulated " * bool(job.emulate)
    speeds = Counter(device.speed for device in devices if device.speed < 1)
    words = ", ".join(f"{count} at {speed:g}" for speed, count in sorted(speeds.items()))
    slow = f" ({words} of full speed)" if words else ""
    sharing = "no sharing"
    if plan.edges or before:
        sharing = f"{job.share.policy} over {job.share.topology}, {job.share.exchange}"
    sharing += f", {before} lessons of {job.share.lessons}" if before else ""
    replay, rehearsal = (number / 1e6 for number in room)
    return (
        f"canal-mpi {__version__} · job {job.name} · {size} agent{'s' * (size > 1)} on "
        f"{hosts} {emulated}host{'s' * (hosts > 1)}{slow}{_servers_named(world)} · {sharing} · "
        f"seed {job.seed} · {len(plan.orders[0])} tasks × {job.train.steps:,} steps · "
        f"replay {replay:.0f} MB and rehearsal {rehearsal:.0f} MB per agent · {plan.folder}"
    )


def remarks(world: World, plan: Plan, request: Request) -> Iterator[str]:
    """What a user may want to know before the run goes on."""
    job, size, file = plan.job, world.agents, request.job_file
    if world.launcher is None:
        job_flag = f" --job {shlex.quote(file)}" if file else ""
        yield (
            f"One agent (agent {world.agent}), no sharing; five that share: "
            f"mpirun -np 5 canal-mpi train{job_flag}"
        )
    if "none" not in (job.share.policy, job.share.topology):
        yield from (f"warning: {words}" for words in warnings(set(plan.edges), size))
    yield from (f"warning: {words}" for words in crowded(job, world.host_info[:size]))


def resume_command(world: World, folder: Path) -> str:
    """What resumes this run."""
    words = shlex.quote(short_path(folder))
    return f"{_launched(world)}canal-mpi train --resume {words}{_server_options(world)}"


def next_steps(world: World, plan: Plan) -> str:
    """Where the results are, and what one may do with them."""
    folder, options, sharing = short_path(plan.folder), _server_options(world), bool(plan.edges)
    again = f"canal-mpi train --job {shlex.quote(f'{folder}/job.toml')}{options}"
    many = max(5, world.size) if options else 5
    five = f"mpirun -np {many} {again} --share exact"
    other = f"{_launched(world)}{again} --share none" if sharing else five
    return (
        f"Results: {folder}/run.h5\nNext:\n"
        f"  canal-mpi report {shlex.quote(folder)}   (one page about this run)\n"
        f"  {other}   ({'the same without sharing' if sharing else 'five that share'})"
    )


def short_path(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _launched(world: World) -> str:
    """What this program was started with, in front of its own name."""
    return f"mpirun -np {world.size} " if world.launcher else ""


def _server_options(world: World) -> str:
    """The options that put env servers where they are now."""
    return "".join(f" --env-server-rank {rank}" for rank in world.ranks[world.agents :])


def _servers_named(world: World) -> str:
    """Where the environments run, if not with the agents."""
    names = [name.removesuffix(" (env server)") for name in world.heartbeat.names]
    there = " and ".join(names[world.agents :])
    return f" · environments on {there}" if there else ""
