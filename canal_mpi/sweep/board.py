"""What a sweep shows: a table that refreshes on a terminal, a line for each change elsewhere."""

import sys
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from shutil import get_terminal_size
from statistics import fmean
from time import monotonic

from canal_mpi.results.runs import glance, number, whole
from canal_mpi.show import clean, duration, remaining
from canal_mpi.sweep.engine import FINISHED, RUNNING, WAITING, Engine, Work

EVERY = 1.0  # seconds between two drawings
LINE_EVERY = 60.0  # seconds between two plain lines
ALIKE = 10  # points with a tenth of the steps of others, or less, tell nothing of their time
ROWS, AROUND = 30, 5  # of the table on a terminal, and lines that it needs besides


class Board:
    """Follows an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._terminal = sys.stdout.isatty()
        self._drawn, self._next = 0, monotonic() + (EVERY if self._terminal else LINE_EVERY)

    def tell(self, what: str, work: Work) -> None:
        """Something has changed; a line that stays."""
        words = f"{what:<8} {work.point.name}"
        if what == FINISHED:
            words += f" in {duration(work.seconds)} · {self.summary()}"
        elif work.why:
            words += f": {clean(work.why)}"
        self._erase()
        print(words, flush=True)

    def refresh(self) -> None:
        """On a terminal the table, once a second; else now and then how far it is."""
        if monotonic() < self._next:
            return
        self._next = monotonic() + (EVERY if self._terminal else LINE_EVERY)
        if not self._terminal:
            print(self.summary(), flush=True)
        else:
            self._erase()
            lines = [line[: get_terminal_size().columns - 1] for line in self.lines()]
            print("\n".join(lines), flush=True)
            self._drawn = len(lines)

    def close(self) -> None:
        """Show how everything ended."""
        self._erase()
        print("\n".join(self.lines()), flush=True)

    def _erase(self) -> None:
        if self._drawn:
            sys.stdout.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def lines(self) -> list[str]:
        """The table: one line a point, then how long it will still take."""
        works = self.engine.works
        shown = works if not self._terminal else _around_the_running(works)
        width = max(5, *(len(work.point.name) for work in works))
        lines = [f" {'point':<{width}}  {'status':<9}  round    time"]
        lines += [f" {row(work, width)}" for work in shown]
        more = len(works) - len(shown)
        return [*lines, *([f" … and {more} more"] if more else []), f" {self.summary()}"]

    def summary(self) -> str:
        """How many are finished, and how long the rest will take."""
        works = self.engine.works
        done = len(self.engine.of(FINISHED))
        words = f"{done} of {len(works)} points are finished"
        return words if done == len(works) else f"{words} · {remaining(self.left())}"

    def left(self) -> float:
        """Seconds until all are finished; NaN before anything is known."""
        running, waiting = self.engine.of(RUNNING), self.engine.of(WAITING)
        told = [number(glance(work.folder).facts.get("left")) for work in running]
        known = [(work, work.seconds) for work in self.engine.of(FINISHED) if work.seconds]
        known += [(w, w.seconds + t) for w, t in zip(running, told, strict=True) if isfinite(t)]
        least = max((_steps(work) for work in (*running, *waiting)), default=0) / ALIKE
        alike = [seconds for work, seconds in known if _steps(work) >= least]
        if not alike:
            return nan
        each = fmean(alike)
        now = [
            t if isfinite(t) else max(each - w.seconds, 0.0)
            for w, t in zip(running, told, strict=True)
        ]
        return (sum(now) + each * len(waiting)) / max(len(running), 1)


def _steps(work: Work) -> int:
    """Steps of a task, by which points are of one size: random play of a study has just one."""
    return work.point.job.train.frames


def row(work: Work, width: int) -> str:
    """One point."""
    seen = glance(work.folder)
    rounds = whole(seen.facts.get("rounds"))
    here = rounds if work.status == FINISHED else seen.round
    where = f"{here}/{rounds}" if rounds and work.status != WAITING else ""
    time = duration(work.seconds) if work.seconds else ""
    words = f"{work.point.name:<{width}}  {work.status:<9}  {where:<7}  {time:<12} "
    return f"{words}{clean(work.why)[:60]}".rstrip()


def _around_the_running(works: Sequence[Work]) -> list[Work]:
    """As many points as a terminal has room for, from just before the first that is not done."""
    first = next((k for k, work in enumerate(works) if work.status != FINISHED), 0)
    rows = max(min(ROWS, get_terminal_size().lines - AROUND), 1)
    start = max(min(first - 3, len(works) - rows), 0)
    return list(works[start : start + rows])


def going_on(folder: Path, command: str) -> str:
    """The command that goes on with a sweep or a study, as one would type it here."""
    here = Path.cwd()
    short = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"canal-mpi {command} --resume {short}"
