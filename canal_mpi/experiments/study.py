"""A study: arms at several budgets on the same seeds, as one TOML file says, and what they show."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.experiments import analysis
from canal_mpi.experiments.analysis import Cell, compared, difference, ratio_of
from canal_mpi.experiments.points import Point, check_names, finished_runs, name_of, resolved
from canal_mpi.experiments.runner import guess
from canal_mpi.interfaces import Array
from canal_mpi.launch.hostfile import MOST_RANKS
from canal_mpi.report.statistics import UNKNOWN, Interval, mean_score, percent, times
from canal_mpi.results.measures import Scale, interquartile_mean, mean, standard_error
from canal_mpi.results.reader import Run
from canal_mpi.settings import Layer

FILE = "study.toml"  # the definition, in the folder of a study
RANDOM = "random"
RANDOM_PLAY: Layer = {"share.policy": "none", "learn.heads": "separate", "rehearsal.rows": 0}
RANDOM_PLAY |= {"evaluation.interval": 0, "evaluation.epsilon": 1.0, "evaluation.tasks": "final"}


@dataclass(frozen=True)
class Arm:
    """A way to share at several budgets."""

    name: str
    steps: Sequence[int]  # budgets: steps per task
    seeds: int  # how many of the study's
    agents: int
    about: str = ""
    settings: Layer = field(default_factory=dict)
    forgetting: Sequence[int] = ()  # budgets at which it is measured, right after each task


@dataclass(frozen=True)
class Study:
    """What is run and compared."""

    seeds: Sequence[int]
    baseline: str
    main: str
    arms: Mapping[str, Arm]
    title: str = "Does sharing pay?"
    random_episodes: int = 100
    settings: Layer = field(default_factory=dict)
    equal_steps: Sequence[Mapping[str, Any]] = ()  # arm, steps; baseline: its steps

    def points(self) -> list[Point]:
        """Every run: random play, then all arms of one seed before the next, cheap ones first."""
        chance = RANDOM_PLAY | {"evaluation.episodes": self.random_episodes}
        found = [self._point(Arm(RANDOM, [1], 1, 1, settings=chance), 1, self.seeds[0])]
        for k, seed in enumerate(self.seeds):
            arms = [arm for arm in self.arms.values() if k < arm.seeds]
            runs = [self._point(arm, steps, seed) for arm in arms for steps in arm.steps]
            found += sorted(runs, key=guess)
        check_names(found)
        return found

    def _point(self, arm: Arm, steps: int, seed: int) -> Point:
        labels = {"arm": arm.name, "steps": str(steps), "seed": str(seed)}
        flags = self.settings | {"train.steps": steps} | arm.settings | {"seed": seed}
        if steps in arm.forgetting:
            flags["evaluation.tasks"] = "after"
        return Point(name_of(labels), resolved(flags, environ={}), arm.agents, labels)


def find(name: str) -> Path:
    """The file of a study that comes with the package, or the user's own."""
    known = {p.stem: p for f in config.job_folders() for p in sorted(f.glob("studies/*.toml"))}
    path = known.get(name, Path(name))
    if not path.is_file():
        names = ", ".join(sorted(known))
        raise UsageError(f"there is no study '{name}': expected {names}, or path/to/my.toml.")
    return path


def read(path: Path) -> Study:
    """The study that a file defines; UsageError says what is wrong with it."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = {"agents": tree.pop("agents", 5), "seeds": len(tree["seeds"])}
        arms = {name: Arm(name, **(defaults | arm)) for name, arm in tree.pop("arms").items()}
        study = Study(arms=arms, **tree)
        named = [study.baseline, study.main, *(pair["arm"] for pair in study.equal_steps)]
        if odd := [name for name in named if name not in arms]:
            raise ValueError(f"it has no arm '{odd[0]}'")
        for pair in study.equal_steps:
            budgets = (arms[pair["arm"]].steps, arms[study.baseline].steps)
            if pair["steps"] not in budgets[0] or pair["baseline"] not in budgets[1]:
                raise ValueError(f"equal_steps names a budget that no arm has: {dict(pair)}")
        if not study.seeds or not all(1 <= arm.agents <= MOST_RANKS for arm in arms.values()):
            raise ValueError(f"expected seeds, and 1 to {MOST_RANKS} agents in each arm")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} does not define a study: {error}.") from error
    return study


# ── what it shows ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Results:
    """The finished runs of a study on one scale."""

    study: Study
    tasks: list[str]
    scale: Scale
    random: Array  # [task] mean game points of random play
    random_error: Array  # [task] its standard error
    cells: list[Cell]  # arms at budgets, in the order of the study
    missing: list[str]  # points that are not finished

    def of(self, arm: str, budget: int | None = None) -> list[Cell]:
        """The cells of an arm, or the one at a budget."""
        return [c for c in self.cells if c.arm == arm and budget in (None, c.budget)]

    @property
    def full(self) -> list[Cell]:
        """The cells of arms that the study runs on all of its seeds."""
        whole = len(self.study.seeds)
        return [cell for cell in self.cells if self.study.arms[cell.arm].seeds == whole]

    def lost(self, cell: Cell) -> Interval:
        """What a cell forgot of its score above random play; not where it can't forget."""
        return cell.forgetting(self.scale(self.random)) if cell.can_forget else UNKNOWN

    def pairs(self, other: str) -> list[tuple[Cell, Cell]]:
        """Each cell beside that of another arm at the same budget."""
        found = ((cell, base) for cell in self.cells for base in self.of(other, cell.budget))
        return [(cell, base) for cell, base in found if cell.arm != other]

    def equal_steps(self) -> list[tuple[Cell, Cell]]:
        """Arms beside the baseline where the study compares them at equal total steps."""
        return [
            (ours, theirs)
            for pair in self.study.equal_steps
            for ours in self.of(pair["arm"], pair["steps"])
            for theirs in self.of(self.study.baseline, pair["baseline"])
        ]


def gather(folder: Path, study: Study, points: Sequence[Point]) -> Results | None:
    """What the finished runs tell; None where it is too little."""
    runs = finished_runs(folder, points)
    found: dict[tuple[str, int], list[Run]] = {}
    for point in points:
        if point.name in runs:
            cell = (point.settings["arm"], int(point.settings["steps"]))
            found.setdefault(cell, []).append(runs[point.name])
    chance = found.pop((RANDOM, 1), [])
    if not chance or not found:
        return None
    tasks = chance[0].tasks
    played = [chance[0].score[..., k, :] for k in range(len(tasks))]
    random, error = (np.array([one(x.ravel()) for x in played]) for one in (mean, standard_error))
    alone = [run for (arm, _), group in found.items() if arm == study.baseline for run in group]
    scale = analysis.scale_of(tasks, random, alone)
    order = [(arm.name, steps) for arm in study.arms.values() for steps in sorted(arm.steps)]
    cells = [Cell.of(*cell, found[cell], scale) for cell in order if cell in found]
    missing = [point.name for point in points if point.name not in runs]
    return Results(study, tasks, scale, random, error, cells, missing)


def findings(results: Results) -> Iterator[str]:
    """What the study shows, as far as there are runs for it: sentences with 95 % intervals."""
    base, main = (
        [cell for cell in results.of(arm) if not np.isnan(cell.final).any()]
        for arm in (results.study.baseline, results.study.main)
    )
    if base and main:
        best = analysis.best_budget(base)
        steps, seconds = (analysis.saving(main, best, cost) for cost in ("steps", "seconds"))
        yield (
            f"To the score of {best.label}, its best budget ({percent(best.mean)}), {main[0].arm} "
            f"gets with {times(steps, 'fewer steps', 'more steps')} and "
            f"{times(seconds, 'less wall time', 'more wall time')}."
            if steps[0]
            else f"{main[0].arm} does not reach the score of {best.label} at any budget."
        )
    yield from (_higher(results.tasks, *pair) for pair in results.equal_steps())
    known = [(cell, found) for cell in main if not isnan((found := results.lost(cell))[0])]
    if known:
        parts = ", ".join(f"{percent(lost)} at {cell.budget:,}" for cell, lost in known)
        yield f"Of its score above random play {main[0].arm} forgets {parts}."
    passed = [(c, *c.passed_on(results.random, results.random_error)) for c in main]
    if told := [f"{percent(p)} at {c.budget:,} ({n} games)" for c, p, n in passed if n]:
        yield (
            f"Students of {main[0].arm} have, without own steps, {', '.join(told)} of their "
            "players' score above random play, on games where players are clearly above it."
        )
    if main:
        decided = sum(float(cell.costs["decisions"].sum()) for cell in main)
        yield f"{main[0].arm} takes {decided:,.0f} steps for decisions."
    for cell, other in (analysis.matched(*pair) for pair in results.pairs(results.study.baseline)):
        if cell.arm == results.study.main and len(cell.seeds) > 1:
            points = [f"{100 * one.spread:.1f} for {one.label}" for one in (cell, other)]
            yield f"Spread over seeds (standard deviation, points): {' and '.join(points)}."
    for cell, other in results.pairs(results.study.main):
        if cell not in results.full and not isnan((change := compared(difference, cell, other))[0]):
            ours, theirs = (one.costs for one in analysis.matched(cell, other))
            slower = float(ours["seconds"].mean() / theirs["seconds"].mean())
            yield (
                f"{cell.label} against {other.arm}: score {percent(change, '+')} in points of "
                f"{results.scale.name}, {slower:.1f} × the wall time, "
                f"{100 * ours['waiting'].mean():.0f} % of it waiting."
            )


def _higher(tasks: Sequence[str], ours: Cell, theirs: Cell) -> str:
    """How much higher an arm ends at equal total steps, and on which games it is lower."""
    statistics = (mean_score, interquartile_mean)
    means, iqms = (times(compared(ratio_of(one), ours, theirs)) for one in statistics)
    lower = np.array(tasks)[analysis.clearly_lower(ours, theirs)].tolist()
    total = " and ".join(f"{one.costs['steps'].mean():,.0f}" for one in (ours, theirs))
    return (
        f"At equal total steps ({total}) {ours.label} ends {means} as high as {theirs.label} in "
        f"the mean and {iqms} in the IQM; lower by more than two standard errors on {len(lower)} "
        f"of {len(tasks)} games{': ' * bool(lower)}{', '.join(lower)}."
    )
