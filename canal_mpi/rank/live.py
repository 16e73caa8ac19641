"""What rank 0 shows: a table that refreshes on a terminal, sparse plain lines elsewhere."""

import json
import os
import shutil
import sys
from math import isfinite, isnan, nan
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np

from canal_mpi.errors import StorageError
from canal_mpi.games import human_normalised
from canal_mpi.log import logger
from canal_mpi.rank.launcher import terminal
from canal_mpi.rank.watch import Watch
from canal_mpi.results.files import write_whole
from canal_mpi.results.store import Store
from canal_mpi.types import Progress

LINE_EVERY = 10.0  # seconds between two plain lines
STATUS_EVERY = 2.0
WHOLE_GAME = 3000  # steps after which most games are over
HEADER = " agent{host}  round  task         source    steps        steps/s   return    loss waits"


class View:
    """Draws the progress of all agents; `status.json` and `events.jsonl` tell programs."""

    def __init__(
        self, watch: Watch, folder: Path, hosts: list[str], rounds: int, frames: int, verbosity: int
    ) -> None:
        self.watch, self.folder, self.hosts = watch, folder, hosts
        self.rounds, self.frames, self.verbosity = rounds, frames, verbosity
        self._terminal = terminal() if verbosity >= 0 else None
        self._drawn = 0
        self._start = self._last_line = monotonic()
        self._last_status = 0.0
        self._last_steps: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, float] = {}
        self._note = ""
        self._warned: set[int] = set()
        self.done_before = 0  # tasks that were over before this start of the run

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.verbosity >= 0:
            self._erase()
            self._print(text)

    def _print(self, text: str) -> None:
        """Show something; where nobody reads any more, the run goes on in silence."""
        try:
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
        for agent, progress in enumerate(self.watch.progress):
            before, steps = self._last_steps.get(agent, (self._start, 0))
            if now - before >= 1.0:
                self._rates[agent] = (progress.total_steps - steps) / (now - before)
                self._last_steps[agent] = (now, progress.total_steps)

    def _warn_of_silence(self) -> None:
        silent = self.watch.silent()
        for rank, seconds in silent:
            if rank not in self._warned:
                phase = self.watch.progress[rank].phase
                left = max(self.watch.timeout - seconds, 0)
                self.say(
                    f"agent {rank} ({self.hosts[rank]}) has been silent for {seconds:.0f} s in "
                    f"{phase}; the job ends in {left:.0f} s unless it answers"
                )
        self._warned = {rank for rank, _ in silent}

    def _draw(self) -> None:
        width = _width(self._terminal)
        host = "  host     " if len(set(self.hosts)) > 1 else ""
        rows = [self._row(agent, progress) for agent, progress in enumerate(self.watch.progress)]
        lines = [HEADER.format(host=host), *rows]
        lines += [f" {text}" for text in (self._note, self._remaining()) if text]
        self._erase()
        self._print("\n".join(line[: width - 1] for line in lines))
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            sys.stdout.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _row(self, agent: int, p: Progress) -> str:
        rate = self._rates.get(agent, 0.0)
        what = f"{p.step}/{p.steps}" if p.phase == "training" else p.phase
        return (
            f" {agent:>4} {self._host(agent)}  {p.round:>2}/{self.rounds:<3} {p.task:<12.12} "
            f"{_source(p.source):<9} {what:<12.12} {rate:>7.0f} {_number(p.mean_return, 1):>8} "
            f"{_number(p.loss, 4):>7} {p.wait_share:>5.0%}"
        )

    def _host(self, agent: int) -> str:
        """The host's column, where there are several."""
        several = len(set(self.hosts)) > 1
        return f" {self.hosts[agent]:<10.10}" if several else ""

    def _summary(self) -> str:
        parts = [
            f"{agent}: {p.task} {p.step}/{p.steps}"
            if p.phase == "training"
            else f"{agent}: {p.phase}"
            for agent, p in enumerate(self.watch.progress[:8])
        ]
        more = f" · and {len(self.watch.progress) - 8} more" if len(self.watch.progress) > 8 else ""
        rates = sum(self._rates.values())
        rounds = min(p.round for p in self.watch.progress)
        return (
            f"round {rounds}/{self.rounds} · {' · '.join(parts)}{more} · {rates:.0f} steps/s"
            f" · {self._remaining()}"
        )

    def _remaining(self) -> str:
        total = self.rounds * len(self.watch.progress) - self.done_before
        done = sum(max(p.round - 1, 0) + p.step / max(p.steps, 1) for p in self.watch.progress)
        done = max(done - self.done_before, 0)
        if done < 0.02 * total:
            return "time left: not known yet"
        left = max(total - done, 0) / done
        return f"about {_duration((monotonic() - self._start) * left)} left"

    def round_done(self, round_: int, store: Store) -> None:
        """Say what the exchange of a round moved."""
        if not round_:
            return
        ledger, tasks = store.table("exchange"), store.table("tasks")
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
            self.say(f"{self._note} · {self._remaining()}")

    def write_status(self, status: str) -> None:
        """Replace status.json."""
        agents = [
            {"agent": agent, "host": self.hosts[agent], "steps_per_second": self._rates.get(agent)}
            | {name: _json_value(value) for name, value in vars(p).items()}
            for agent, p in enumerate(self.watch.progress)
        ]
        facts = {"status": status, "time": time(), "rounds": self.rounds, "agents": agents}
        try:
            write_whole(self.folder / "status.json", json.dumps(facts).encode())
        except StorageError as error:
            logger.warning("%s", error)  # only for programs that watch; the run goes on

    def ending(self, store: Store, frames: int, cap: int) -> None:
        """The table of what was learnt from whom, and what to type next."""
        self._erase()
        tasks, ledger = store.table("tasks"), store.table("exchange")
        for line in ending_lines(tasks, whole_games=cap >= WHOLE_GAME):
            self.say(line)
        if cap < WHOLE_GAME:
            self.say(
                f" No human-normalised scores: evaluation episodes were cut after {cap} steps."
            )
        played, turns = int(tasks["env_steps"].sum()), frames * len(tasks["agent"])
        lessons = ledger["kind"] == b"lesson"
        count = int(lessons.sum())
        self.say(
            f"\n{played:,} environment steps played, {turns - played:,} saved by lessons · "
            f"{count} lesson{'s' * (count != 1)}, {ledger['bytes'][lessons].sum() / 1e6:.2f} MB "
            f"moved · {_duration(monotonic() - self._start)}"
        )


def ending_lines(tasks: dict[str, Any], whole_games: bool) -> list[str]:
    """One line an agent and task: its source, score and, of whole games, the HNS."""
    hns_head = "     HNS" if whole_games else ""
    lines = ["", f" agent  round  task            source         {'score':>9}{hns_head}"]
    for k in np.lexsort((tasks["round"], tasks["agent"])):
        task, score = tasks["task"][k].decode(), float(tasks["score"][k])
        donors = tasks["donors"][k].decode()
        source = f"from agent {donors}" if donors else "played"
        hns = human_normalised(task, score) if whole_games else nan
        lines.append(
            f" {tasks['agent'][k]:>4}   {tasks['round'][k]:>4}   {task:<15.15} {source:<14} "
            f"{_number(score, 1):>9}  {'' if isnan(hns) else f'{hns:>6.1%}'}".rstrip()
        )
    return lines


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _source(donor: int) -> str:
    return f"agent {donor}" if donor >= 0 else "plays"


def _number(value: float, digits: int) -> str:
    return "–" if isnan(value) else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _width(tty: str | None) -> int:
    """Columns of the terminal the user looks at, which may be the launcher's."""
    try:
        descriptor = os.open(tty or "", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return shutil.get_terminal_size().columns
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:
        return 80
    finally:
        os.close(descriptor)
