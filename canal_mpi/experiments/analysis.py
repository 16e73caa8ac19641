"""What the runs of a study tell: scores, costs and comparisons of arms at budgets.

The unit of resampling is the seed; scores of a seed are means over its agents. What can't be told
is NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, nan
from typing import Any

import numpy as np

from canal_mpi.experiments.design import RANDOM, Study
from canal_mpi.experiments.points import Point
from canal_mpi.games import RANDOM_AND_HUMAN
from canal_mpi.interfaces import Array
from canal_mpi.results import compare
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Measured, costs, mean_score, percent, times
from canal_mpi.results.measures import UNKNOWN, Interval, Scale, bootstrap, ratio
from canal_mpi.results.reader import Run


@dataclass(frozen=True, eq=False)
class Cell:
    """An arm at one budget; the first dimension of every array is the seed."""

    arm: str
    budget: int  # steps per task
    seeds: tuple[int, ...]
    final: Array  # [seed, agent, task] normalised score at the end
    learnt: Array  # [seed, agent, task] normalised score right after the task
    points: Array  # [seed, agent, task] score at the end in game points
    taught: Array  # [seed, agent, task] whether a lesson alone taught it, without own steps
    costs: Mapping[str, Array]  # [seed] each, as `costs` names them
    forgets: bool = True  # whether tasks share weights, and were also evaluated right after them

    @classmethod
    def of(cls, arm: str, budget: int, runs: Sequence[Run], scale: Scale) -> "Cell":
        """From the runs of an arm at one budget, one per seed."""
        measured, spent = [Measured(run, scale) for run in runs], [costs(run) for run in runs]
        return cls(
            arm,
            budget,
            tuple(int(run.attributes["seed"]) for run in runs),
            np.stack([run.P[:, -1] for run in measured]),
            np.stack([run.learnt for run in measured]),
            np.stack([run.raw[:, run.rounds_done] for run in measured]),
            np.stack([_taught(run) for run in runs]),
            {name: np.array([one[name] for one in spent]) for name in spent[0]},
            runs[0].setting("learn.heads") != "separate"
            and runs[0].setting("evaluation.tasks") != "final",
        )

    @property
    def label(self) -> str:
        """The arm at its budget, in words."""
        return f"{self.arm} at {self.budget:,}"

    @property
    def scores(self) -> Array:
        """[seed, task]: the mean over agents at the end."""
        return np.asarray(self.final.mean(axis=1))

    @property
    def by_seed(self) -> Array:
        """[seed]: the mean over agents and tasks at the end."""
        return np.asarray(self.final.mean(axis=(1, 2)))

    @property
    def mean(self) -> Interval:
        """Mean score at the end."""
        return bootstrap(mean_score, self.scores)

    @property
    def iqm(self) -> Interval:
        """Interquartile mean over seeds and tasks at the end."""
        return bootstrap(m.interquartile_mean, self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds of the mean score."""
        return float(self.by_seed.std(ddof=1)) if len(self.seeds) > 1 else nan

    def forgetting(self, random: Array) -> Interval:
        """What was lost since tasks were learnt, as part of the score above random play then."""

        def lost(learnt: Array, final: Array) -> Any:
            return ratio(mean_score(learnt - final), mean_score(learnt - random))

        return bootstrap(lost, self.learnt.mean(axis=1), self.scores)

    def passed_on(self, random: Array, error: Array) -> tuple[Interval, int]:
        """What part of the players' score above random play their students have; on how many games.

        Games count alike: those on which players are above it by two standard errors over seeds.
        """
        both = (self.taught.any(axis=1) & ~self.taught.all(axis=1)).all(axis=0)
        sides = (np.where(who, self.points, nan)[..., both] for who in (self.taught, ~self.taught))
        students, players = (np.nanmean(side, axis=1) - random[both] for side in sides)
        above, spread = players.mean(axis=0), [m.standard_error(seeds) for seeds in players.T]
        clear = above > 2 * np.hypot(spread, error[both])  # one seed does not tell: NaN

        def part(ours: Array, theirs: Array) -> Any:
            return ratio(mean_score(ours / above[clear]), mean_score(theirs / above[clear]))

        if not clear.any():
            return UNKNOWN, 0
        return bootstrap(part, students[:, clear], players[:, clear]), int(clear.sum())

    def points_by_task(self) -> list[tuple[float, float]]:
        """The mean over seeds of the game points on each task, and its standard error."""
        return [(m.mean(seeds), m.standard_error(seeds)) for seeds in self.points.mean(axis=1).T]

    def on(self, seeds: Sequence[int]) -> "Cell":
        """The same on these seeds alone, in their order."""
        rows = [self.seeds.index(seed) for seed in seeds]
        names = ("final", "learnt", "points", "taught")
        scores = {name: getattr(self, name)[rows] for name in names}
        spent = {name: values[rows] for name, values in self.costs.items()}
        return replace(self, seeds=tuple(seeds), costs=spent, **scores)


def _taught(run: Run) -> Array:
    """[agent, task]: whether a lesson taught it and the agent took no step of its own."""
    tasks, names = run["tasks"], {task: k for k, task in enumerate(run.tasks)}
    found = np.zeros((len(run.agents), len(names)), dtype=bool)
    for agent, task, steps in zip(*(tasks[c] for c in ("agent", "task", "env_steps")), strict=True):
        found[run.agents.index(agent), names[task]] = steps == 0
    return found


def scale_of(tasks: Sequence[str], random: Array, baseline: Sequence[Run]) -> Scale:
    """Human-normalised scores where all tasks have them, else from random play to the baseline."""
    if all(task in RANDOM_AND_HUMAN for task in tasks):
        zero, one = np.array([RANDOM_AND_HUMAN[task] for task in tasks]).T
        return Scale("HNS", "human-normalised: 0 is random play, 1 a human", zero, one)
    best = np.full(len(tasks), -inf)
    for table in (run["tasks"] for run in baseline):
        best = np.fmax(best, [m.mean(table["score"][table["task"] == task]) for task in tasks])
    about = "0 is random play, 1 the best mean score of a run of the baseline"
    return Scale("score", about, random, np.where(best > random, best, random + 1))


# ── comparisons, on the seeds that all arms have ───────────────────────────────────────────────


def matched(*cells: Cell) -> list[Cell]:
    """The same cells on the seeds that all of them have."""
    common = [seed for seed in cells[0].seeds if all(seed in cell.seeds for cell in cells)]
    return [cell.on(common) for cell in cells]


def compared(statistic: Callable[[Array, Array], Any], cell: Cell, base: Cell) -> Interval:
    """A statistic of the scores [seed, task] of two cells on the seeds that both have."""
    return bootstrap(statistic, *(one.scores for one in matched(cell, base)))


def difference(x: Array, y: Array) -> Any:
    """Difference of the mean scores."""
    return mean_score(x) - mean_score(y)


def ratio_of(statistic: Callable[[Array], Any]) -> Callable[[Array, Array], Any]:
    """How a statistic of the scores of an arm relates to that of another."""
    return lambda x, y: ratio(statistic(x), statistic(y))


def clearly_lower(cell: Cell, base: Cell) -> Array:
    """[task]: whether the mean over seeds is lower by more than two standard errors."""
    ours, theirs = (one.scores for one in matched(cell, base))
    if len(ours) < 2:
        return np.zeros(ours.shape[1], dtype=bool)
    error = np.sqrt((ours.var(axis=0, ddof=1) + theirs.var(axis=0, ddof=1)) / len(ours))
    return np.asarray(ours.mean(axis=0) < theirs.mean(axis=0) - 2 * error)


def best_budget(cells: Sequence[Cell]) -> Cell:
    """The smallest budget whose mean is within one standard error of the highest."""
    means = [float(cell.by_seed.mean()) for cell in cells]
    error = m.standard_error(cells[int(np.argmax(means))].by_seed)
    pairs = sorted(zip(cells, means, strict=True), key=lambda pair: pair[0].budget)
    return next(cell for cell, mean in pairs if mean >= max(means) - np.nan_to_num(error))


def saving(cells: Sequence[Cell], base: Cell, cost: str) -> Interval:
    """How many times as much the base spent as an arm needs to reach the base's score.

    `cost` is `steps` or `seconds`. Between budgets in a straight line; where the smallest budget
    is above the score already, all that it cost counts; 0 where no budget gets there.
    """
    base, *ours = matched(base, *sorted(cells, key=lambda cell: cell.budget))

    def factor(scores: Array, costs: Array, level: Array, whole: Array) -> Any:
        goal, x, y = level.mean(axis=-1), costs.mean(axis=-2), scores.mean(axis=-2)
        spent = np.vectorize(compare.steps_to, signature="(),(n),(n)->()")(goal, x, y)
        return ratio(whole.mean(axis=-1), np.where(np.isnan(spent), inf, spent))

    scores = np.stack([cell.by_seed for cell in ours], axis=1)  # [seed, budget]
    spent = np.stack([cell.costs[cost] for cell in ours], axis=1)
    return bootstrap(factor, scores, spent, base.by_seed, base.costs[cost])


# ── what a study shows ─────────────────────────────────────────────────────────────────────────


class Results:
    """What the finished runs of a study tell, random play among them, on one scale."""

    def __init__(self, study: Study, points: Sequence[Point], runs: Mapping[str, Run]) -> None:
        found: dict[tuple[str, int], list[Run]] = {}
        for point in (point for point in points if point.name in runs):
            cell = (point.settings["arm"], int(point.settings["steps"]))
            found.setdefault(cell, []).append(runs[point.name])
        chance = found.pop((RANDOM, 1))[0]
        self.study, self.tasks = study, chance.tasks
        self.missing = [point.name for point in points if point.name not in runs]
        played = [chance.score[..., k, :].ravel() for k in range(len(self.tasks))]
        self.random = np.array([m.mean(scores) for scores in played])  # [task] game points
        self.random_error = np.array([m.standard_error(scores) for scores in played])
        alone = [run for (arm, _), group in found.items() if arm == study.baseline for run in group]
        self.scale = scale_of(self.tasks, self.random, alone)
        order = [(arm.name, steps) for arm in study.arms.values() for steps in sorted(arm.steps)]
        self.cells = [Cell.of(*cell, found[cell], self.scale) for cell in order if cell in found]

    def of(self, arm: str, budget: int | None = None) -> list[Cell]:
        """The cells of an arm, or the one at a budget."""
        return [c for c in self.cells if c.arm == arm and budget in (None, c.budget)]

    @property
    def full(self) -> list[Cell]:
        """The cells of arms that the study runs on all of its seeds."""
        whole = len(self.study.seeds)
        return [cell for cell in self.cells if self.study.arms[cell.arm].seeds == whole]

    def lost(self, cell: Cell) -> Interval:
        """What a cell forgot of its score above random play; not what is 0 by construction."""
        return cell.forgetting(self.scale(self.random)) if cell.forgets else UNKNOWN

    def pairs(self, other: str) -> list[tuple[Cell, Cell]]:
        """Each cell beside that of another arm at the same budget."""
        found = ((cell, base) for cell in self.cells for base in self.of(other, cell.budget))
        return [(cell, base) for cell, base in found if cell.arm != other]

    @property
    def ablations(self) -> list[tuple[Cell, Cell]]:
        """Arms that run on fewer seeds, each beside the main one at the same budget."""
        return [pair for pair in self.pairs(self.study.main) if pair[0] not in self.full]

    def equal_steps(self) -> list[tuple[Cell, Cell]]:
        """Arms beside the baseline where the study compares them at equal total steps."""
        return [
            (ours, theirs)
            for pair in self.study.equal_steps
            for ours in self.of(pair["arm"], pair["steps"])
            for theirs in self.of(self.study.baseline, pair["baseline"])
        ]


def findings(results: Results) -> Iterator[str]:
    """What the study shows, as far as there are runs for it: sentences with 95 % intervals."""
    base, main = (
        [cell for cell in results.of(arm) if not np.isnan(cell.final).any()]
        for arm in (results.study.baseline, results.study.main)
    )
    if base and main:
        best = best_budget(base)
        steps, seconds = (saving(main, best, cost) for cost in ("steps", "seconds"))
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
    for cell, other in (matched(*pair) for pair in results.pairs(results.study.baseline)):
        if cell.arm == results.study.main and len(cell.seeds) > 1:
            points = [f"{100 * one.spread:.1f} for {one.label}" for one in (cell, other)]
            yield f"Spread over seeds (standard deviation, points): {' and '.join(points)}."
    for cell, other in results.ablations:
        if not isnan((change := compared(difference, cell, other))[0]):
            ours, theirs = (one.costs for one in matched(cell, other))
            slower = float(ours["seconds"].mean() / theirs["seconds"].mean())
            yield (
                f"{cell.label} against {other.arm}: score {percent(change, '+')} in points of "
                f"{results.scale.name}, {slower:.1f} × the wall time, "
                f"{100 * ours['waiting'].mean():.0f} % of it waiting."
            )


def _higher(tasks: Sequence[str], ours: Cell, theirs: Cell) -> str:
    """How much higher an arm ends at equal total steps, and on which games it is lower."""
    statistics = (mean_score, m.interquartile_mean)
    means, iqms = (times(compared(ratio_of(one), ours, theirs)) for one in statistics)
    lower = np.array(tasks)[clearly_lower(ours, theirs)].tolist()
    total = " and ".join(f"{one.costs['steps'].mean():,.0f}" for one in (ours, theirs))
    return (
        f"At equal total steps ({total}) {ours.label} ends {means} as high as {theirs.label} in "
        f"the mean and {iqms} in the IQM; lower by more than two standard errors on {len(lower)} "
        f"of {len(tasks)} games{': ' * bool(lower)}{', '.join(lower)}."
    )
