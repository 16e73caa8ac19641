"""A study: arms at several budgets on the same seeds, as one TOML file says, and what they show."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.experiments import analysis
from canal_mpi.experiments.analysis import ArmStats, Interval
from canal_mpi.experiments.points import Point, check_names, finished_runs, name_of, resolved
from canal_mpi.interfaces import Array
from canal_mpi.launch.hostfile import MOST_RANKS
from canal_mpi.results.measures import Scale, interquartile_mean
from canal_mpi.results.reader import Run
from canal_mpi.settings import Layer

FILE = "study.toml"  # the definition, in the folder of a study
RANDOM = "random"
RANDOM_PLAY: Layer = {"share.policy": "none", "learn.heads": "separate", "rehearsal.rows": 0}
RANDOM_PLAY |= {"evaluation.interval": 0, "evaluation.epsilon": 1.0, "evaluation.tasks": "current"}


@dataclass(frozen=True)
class Arm:
    """A way to share at several budgets."""

    name: str
    steps: Sequence[int]  # budgets: steps per task
    seeds: int  # how many of the study's
    agents: int
    about: str = ""
    settings: Layer = field(default_factory=dict)


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
        """Every run: random play first, then seed by seed, arms with fewer seeds last."""
        chance = RANDOM_PLAY | {"evaluation.episodes": self.random_episodes}
        found = [self._point(Arm(RANDOM, [1], 1, 1, settings=chance), 1, self.seeds[0])]
        for count in sorted({arm.seeds for arm in self.arms.values()}, reverse=True):
            arms = [arm for arm in self.arms.values() if arm.seeds == count]
            runs = ((arm, s, k) for k in self.seeds[:count] for arm in arms for s in arm.steps)
            found += [self._point(*run) for run in runs]
        check_names(found)
        return found

    def _point(self, arm: Arm, steps: int, seed: int) -> Point:
        labels = {"arm": arm.name, "steps": str(steps), "seed": str(seed)}
        flags = self.settings | {"train.steps": steps} | arm.settings | {"seed": seed}
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
    cells: list[ArmStats]  # arms at budgets, in the order of the study
    missing: list[str]  # points that are not finished

    def of(self, arm: str, budget: int | None = None) -> list[ArmStats]:
        """The cells of an arm, or the one at a budget."""
        return [c for c in self.cells if c.arm == arm and budget in (None, c.budget)]

    def equal_steps(self) -> list[tuple[ArmStats, ArmStats]]:
        """Arms beside the baseline where the study compares them at equal total steps."""
        base = self.study.baseline
        return [
            (ours, theirs)
            for pair in self.study.equal_steps
            for ours in self.of(pair["arm"], pair["steps"])
            for theirs in self.of(base, pair["baseline"])
        ]


def gather(folder: Path, study: Study, points: Sequence[Point]) -> tuple[Results | None, list[str]]:
    """What the finished runs tell, and why some don't count; None where it is too little."""
    runs, notes = finished_runs(folder, points)
    found: dict[tuple[str, int], list[Run]] = {}
    for point in points:
        if point.name in runs:
            cell = (point.settings["arm"], int(point.settings["steps"]))
            found.setdefault(cell, []).append(runs[point.name])
    chance = found.pop((RANDOM, 1), [])
    if not chance or not found:
        return None, [*notes, "Nothing to compare yet: that takes random play and one arm."]
    tasks = chance[0].tasks
    played = [chance[0].score[..., k, :] for k in range(len(tasks))]
    played = [scores[~np.isnan(scores)] for scores in played]
    random = np.array([scores.mean() for scores in played])
    error = np.array([scores.std() / np.sqrt(max(len(scores) - 1, 1)) for scores in played])
    alone = [run for (arm, _), group in found.items() if arm == study.baseline for run in group]
    scale = analysis.scale_of(tasks, random, alone)
    order = [(arm.name, steps) for arm in study.arms.values() for steps in sorted(arm.steps)]
    cells = [ArmStats.of(*cell, found[cell], scale) for cell in order if cell in found]
    missing = [point.name for point in points if point.name not in runs]
    return Results(study, tasks, scale, random, error, cells, missing), notes


@dataclass(frozen=True)
class Claim:
    """What has to be shown, what was found, and whether it was met (None: not known)."""

    goal: str
    found: str
    met: bool | None


def claims(results: Results) -> Iterator[Claim]:
    """What the study has to show, as far as there are runs for it."""
    base, main = (
        [cell for cell in results.of(arm) if not np.isnan(cell.final).any()]
        for arm in (results.study.baseline, results.study.main)
    )
    if base and main:
        best = analysis.best_budget(base)
        at = f"at the score of {label(best)}, its best budget, {results.study.main} needs"
        steps, seconds = (analysis.cost_ratio(main, best, cost) for cost in ("steps", "seconds"))
        met = steps[0] <= 1 / 4 and steps[2] < 1 / 3
        yield _claim(f"{at} at most a quarter of all steps", times(steps), steps, met)
        met = seconds[0] <= 1 / 3
        yield _claim(f"{at} at most a third of the wall time", times(seconds), seconds, met)
    for ours, theirs in results.equal_steps():
        yield _higher(ours, theirs)
    for cell in main[-1:]:
        if cell.can_forget:  # else it would be zero by construction
            lost = analysis.forgetting_of(cell, results.scale(results.random))
            goal = f"{label(cell)} forgets at most 5 % of its score above random play"
            yield _claim(goal, percent(lost), lost, lost[0] <= 0.05)
        decided = sum(float(cell.decision_steps.sum()) for cell in main)
        goal, found = f"{cell.arm} takes no step for decisions", f"{decided:,.0f} steps"
        yield Claim(goal, found, decided == 0)
    both = [(cell, other) for cell in main for other in base if cell.budget == other.budget]
    for cell, other in both[-1:]:
        spread, without = (analysis.spread_of(one) for one in analysis.matched(cell, other))
        ratio = spread / without if without else nan
        goal = f"seeds of {label(cell)} spread at most 1.5 times as much as those of {other.arm}"
        yield _claim(goal, times((ratio, nan, nan)), (ratio, 0.0, 0.0), ratio <= 1.5)


def _higher(ours: ArmStats, theirs: ArmStats) -> Claim:
    """At equal total steps: mean and IQM at least 1.5 times as high, hardly a game lower."""
    statistics = (analysis.mean_score, interquartile_mean)
    ratios = mean, iqm = [analysis.ratio(statistic, ours, theirs) for statistic in statistics]
    lower, games = int(analysis.clearly_lower(ours, theirs).sum()), ours.final.shape[2]
    met = all(x[0] >= 1.5 and x[1] > 1 for x in ratios) and games - lower >= 0.8 * games
    total = f"{ours.steps.mean():,.0f} and {theirs.steps.mean():,.0f} steps in all"
    goal = f"{label(ours)} ends at least 1.5 times as high as {label(theirs)} ({total})"
    found = f"mean {times(mean)}, IQM {times(iqm)}, clearly lower on {lower} of {games} tasks"
    return _claim(goal, found, mean if isfinite(iqm[0]) else iqm, met)


def _claim(goal: str, found: str, value: Interval, met: Any) -> Claim:
    """Without a value, or with one seed only, nobody knows."""
    return Claim(goal, found, None if isnan(value[0]) or isnan(value[1]) else bool(met))


def label(cell: ArmStats) -> str:
    """An arm at a budget, in words."""
    return f"{cell.arm} at {cell.budget:,}"


def times(value: Interval) -> str:
    """A ratio with its interval."""
    return _worded(value, 1, "×", 2)


def percent(value: Interval) -> str:
    """A part with its interval, in percent."""
    return _worded(value, 100, " %", 1)


def _worded(value: Interval, factor: float, unit: str, places: int) -> str:
    low, middle, high = (
        f"{factor * x:.{places}f}" if isfinite(x) else "∞" for x in (value[1], value[0], value[2])
    )
    if isnan(value[0]):
        return "not known"
    return f"{middle}{unit}" if isnan(value[1]) else f"{middle}{unit} ({low} – {high})"
