"""What the runs of a study tell: scores, costs and comparisons. Pure functions over results.

The unit of resampling is the seed: agents of one run share what they learnt. Scores of a seed are
means over its agents. What can't be told is NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN
from canal_mpi.interfaces import Array
from canal_mpi.results import compare
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Measured, steps_to
from canal_mpi.results.measures import Scale
from canal_mpi.results.reader import Run

RESAMPLES = 2000
Interval = tuple[Any, Any, Any]  # a value with its 95 % interval
UNKNOWN: Interval = (nan, nan, nan)


@dataclass(frozen=True, eq=False)
class ArmStats:
    """An arm at one budget; the first dimension of every array is the seed."""

    arm: str
    budget: int  # steps per task
    seeds: tuple[int, ...]
    final: Array  # [seed, agent, task] normalised score at the end
    learnt: Array  # [seed, agent, task] normalised score right after the task
    points: Array  # [seed, agent, task] score at the end in game points
    train_steps: Array  # [seed] own training steps of all agents
    decision_steps: Array  # [seed] steps that decided something
    eval_cost: Array  # [seed] steps that only measured; NaN where they were not counted
    seconds: Array  # [seed] wall time of the slowest agent, evaluation left out
    waiting: Array  # [seed] part of that time which agents waited for others
    can_forget: bool  # whether tasks share any weight

    @classmethod
    def of(cls, arm: str, budget: int, runs: Sequence[Run], scale: Scale) -> "ArmStats":
        """From the runs of an arm at one budget, one per seed."""
        measured = [Measured(run, scale) for run in runs]
        seeds = tuple(int(run.attributes["seed"]) for run in runs)
        scores = (
            np.stack([run.P[:, -1] for run in measured]),
            np.stack([run.learnt for run in measured]),
            np.stack([run.raw[:, run.rounds_done] for run in measured]),
        )
        trained, decided, evaluated, seconds, waited = np.array([_costs(run) for run in runs]).T
        costs = (trained, decided, evaluated, seconds, waited)
        can_forget = runs[0].setting("learn.heads") != "separate"
        return cls(arm, budget, seeds, *scores, *costs, can_forget)

    @property
    def steps(self) -> Array:
        """[seed]: all steps, training and decisions."""
        return self.train_steps + self.decision_steps

    @property
    def scores(self) -> Array:
        """[seed, task]: the mean over agents at the end."""
        found: Array = self.final.mean(axis=1)
        return found

    @property
    def by_seed(self) -> Array:
        """[seed]: the mean over agents and tasks at the end."""
        found: Array = self.final.mean(axis=(1, 2))
        return found

    def on(self, seeds: Sequence[int]) -> "ArmStats":
        """The same on these seeds alone, in their order."""
        rows = [self.seeds.index(seed) for seed in seeds]
        arrays: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, seeds=tuple(seeds), **arrays)


def _costs(run: Run) -> list[float]:
    """Steps of training, decisions and measuring; seconds without measuring; part of waiting."""
    tasks, names = run["tasks"], ("env_steps", "probe_steps", "evaluation_steps")
    steps = [float(tasks[name].sum()) if name in tasks else nan for name in names]
    busy = tasks["seconds"] - tasks["evaluate_seconds"]
    each = [float(busy[tasks["agent"] == agent].sum()) for agent in run.agents]
    return [*steps, max(each), float(tasks["wait_seconds"].sum()) / max(sum(each), 1e-9)]


def scale_of(tasks: Sequence[str], random: Array, baseline: Sequence[Run]) -> Scale:
    """Human-normalised scores where all tasks have them, else from random play to the baseline."""
    if all(task in RANDOM_AND_HUMAN for task in tasks):
        zero, one = np.array([RANDOM_AND_HUMAN[task] for task in tasks]).T
        return Scale("HNS", "human-normalised: 0 is random play, 1 a human", zero, one)
    best = np.full(len(tasks), -inf)
    for run in baseline:
        table = run["tasks"]
        means = [m.mean(table["score"][table["task"] == task]) for task in tasks]
        best = np.fmax(best, means)
    about = "0 is random play, 1 the best mean score of a run of the baseline"
    return Scale("score", about, random, np.where(best > random, best, random + 1))


def matched(*cells: ArmStats) -> list[ArmStats]:
    """The same cells on the seeds that all of them have."""
    common = [seed for seed in cells[0].seeds if all(seed in cell.seeds for cell in cells)]
    return [cell.on(common) for cell in cells]


# ── resampling ─────────────────────────────────────────────────────────────────────────────────


def bootstrap(statistic: Callable[..., Any], *samples: Array) -> Interval:
    """A statistic with its 95 % interval: seeds, the first dimension, are drawn anew.

    Samples have the same seeds. The statistic takes them with or without a dimension of draws in
    front. With one seed nothing is known of the interval.
    """
    count = len(samples[0])
    if not count or any(np.isnan(sample).any() for sample in samples):
        return UNKNOWN
    value = statistic(*samples)
    if count == 1 or np.isnan(value).all():
        return value, np.full_like(value, nan)[()], np.full_like(value, nan)[()]
    draws = np.random.Generator(np.random.PCG64(0)).integers(count, size=(RESAMPLES, count))
    found = statistic(*(sample[draws] for sample in samples))
    low, high = np.nanpercentile(found, [2.5, 97.5], axis=0, method="nearest")
    return value, low, high


def _over(part: Any, whole: Any) -> Any:
    """A ratio; NaN where the whole is not above 0, so that it would mean nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.greater(whole, 0), np.divide(part, whole), nan)[()]


def mean_score(scores: Array) -> Any:
    """The mean over [seed, task]."""
    return scores.mean(axis=(-2, -1))


def mean_of(cell: ArmStats) -> Interval:
    """Mean score at the end."""
    return bootstrap(mean_score, cell.scores)


def iqm_of(cell: ArmStats) -> Interval:
    """Interquartile mean over seeds and tasks at the end."""
    return bootstrap(m.interquartile_mean, cell.scores)


def profile_of(cell: ArmStats, levels: Array) -> Interval:
    """Performance profile: the part of seeds and tasks whose score is above each level."""
    return bootstrap(lambda x: (x[..., None] > levels).mean(axis=(-3, -2)), cell.scores)


def forgetting_of(cell: ArmStats, random: Array) -> Interval:
    """What was lost since the task was learnt, as part of the score above random play then."""

    def lost(learnt: Array, final: Array) -> Any:
        return _over(mean_score(learnt - final), mean_score(learnt - random))

    return bootstrap(lost, cell.learnt.mean(axis=1), cell.scores)


def spread_of(cell: ArmStats) -> float:
    """Standard deviation over seeds of the mean score."""
    return float(cell.by_seed.std(ddof=1)) if len(cell.seeds) > 1 else nan


# ── comparisons ────────────────────────────────────────────────────────────────────────────────


def improvement(cell: ArmStats, base: ArmStats) -> Interval:
    """Probability that a seed of the arm scores higher than one of the base, mean over tasks."""
    return bootstrap(compare.improvement, *(one.scores for one in matched(cell, base)))


def difference(cell: ArmStats, base: ArmStats) -> Interval:
    """Difference of the mean scores on the seeds that both have."""
    scores = [one.scores for one in matched(cell, base)]
    return bootstrap(lambda x, y: mean_score(x) - mean_score(y), *scores)


def ratio(statistic: Callable[[Array], Any], cell: ArmStats, base: ArmStats) -> Interval:
    """A statistic of the scores of an arm over that of another, on the seeds that both have."""
    scores = [one.scores for one in matched(cell, base)]
    return bootstrap(lambda x, y: _over(statistic(x), statistic(y)), *scores)


def clearly_lower(cell: ArmStats, base: ArmStats) -> Array:
    """[task]: whether the mean over seeds is lower by more than two standard errors."""
    ours, theirs = (one.scores for one in matched(cell, base))
    if len(ours) < 2:
        return np.zeros(ours.shape[1], dtype=bool)
    error = np.sqrt((ours.var(axis=0, ddof=1) + theirs.var(axis=0, ddof=1)) / len(ours))
    found: Array = ours.mean(axis=0) < theirs.mean(axis=0) - 2 * error
    return found


def best_budget(cells: Sequence[ArmStats]) -> ArmStats:
    """The smallest budget whose mean is within one standard error of the highest."""
    means = [float(cell.by_seed.mean()) for cell in cells]
    top = cells[int(np.argmax(means))]
    error = spread_of(top) / np.sqrt(len(top.seeds)) if len(top.seeds) > 1 else 0.0
    pairs = sorted(zip(cells, means, strict=True), key=lambda pair: pair[0].budget)
    return next(cell for cell, mean in pairs if mean >= max(means) - error)


def cost_ratio(cells: Sequence[ArmStats], base: ArmStats, cost: str) -> Interval:
    """What an arm spends to reach the score of a base, as part of what the base spent.

    `cost` is `steps` or `seconds`. Between budgets in a straight line; where the smallest budget
    is above the score already, all that it cost counts; infinite where no budget gets there.
    """
    base, *ours = matched(base, *sorted(cells, key=lambda cell: cell.budget))

    def spent(scores: Array, costs: Array, level: Array, whole: Array) -> Any:
        goal, x, y = level.mean(axis=-1), costs.mean(axis=-2), scores.mean(axis=-2)
        spent_then = np.vectorize(_cost_at, signature="(),(n),(n)->()")(goal, x, y)
        return _over(spent_then, whole.mean(axis=-1))

    scores = np.stack([cell.by_seed for cell in ours], axis=1)  # [seed, budget]
    costs = np.stack([getattr(cell, cost) for cell in ours], axis=1)
    return bootstrap(spent, scores, costs, base.by_seed, getattr(base, cost))


def _cost_at(level: float, costs: Array, scores: Array) -> float:
    found = steps_to(level, costs, scores)
    return inf if np.isnan(found) else found
