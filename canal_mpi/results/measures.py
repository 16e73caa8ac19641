"""The measures of lifelong learning of one run, as `/measures` of run.h5 has them.

`P[a, t, i]` is the mean evaluation score of agent a on task i after a's t-th task (t = 0: before
any), normalised. `when[a, i]` is the t right after which agent a had learnt task i (0: never).
What the evaluations don't determine is NaN. Measures between runs are in `compare`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN, WHOLE_GAME
from canal_mpi.interfaces import Array, Columns

# Dimensions of measures: of pairs of tasks both are in the agent's own order.
BOTH, PAIRS, ROUNDS = ("agent", "task"), ("agent", "i", "j"), ("after_round",)
RANGE = ("value", "low", "high")
MEASURES = {  # in /measures of run.h5: what each of them is, and its dimensions
    "performance/learnt": ("score right after each task", BOTH),
    "performance/average": ("mean score over all tasks at the end", ("agent",)),
    "performance/iqm": ("interquartile mean at the end, 95 % bootstrap over agents", RANGE),
    "forgetting/continual_world": ("score just after the task minus score at the end", BOTH),
    "forgetting/isolated": ("CORA: what learning task j took from task i, in order", PAIRS),
    "forgetting/maintenance": ("l2metrics PM: later evaluations minus the first", BOTH),
    "transfer/zero_shot": ("CORA: what task j gave to task i before i was learnt", PAIRS),
    "shell/icr": ("sum over tasks of the best agent's score", ROUNDS),
    "shell/tpot": ("sum of ICR up to this round", ROUNDS),
}
TRIM = 0.25  # part that the interquartile mean leaves out on each side
RESAMPLES = 2000
Interval = tuple[Any, Any, Any]  # a value with its 95 % interval
UNKNOWN: Interval = (nan, nan, nan)


def mean(values: Any) -> float:
    """The mean of what is known; NaN where nothing is."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


def standard_error(values: Any) -> float:
    """Of the mean of what is known; NaN of fewer than two values."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.std(ddof=1) / np.sqrt(len(known))) if len(known) > 1 else float("nan")


def clearly_above(values: Any) -> bool:
    """Whether the mean is above 0, and by more than its standard error where that is known."""
    return bool(mean(values) > np.nan_to_num(standard_error(values)))


def ratio(part: Any, whole: Any) -> Any:
    """A ratio; NaN where the whole is not above 0, so that it would mean nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.greater(whole, 0), np.divide(part, whole), nan)[()]


def just_after(P: Array, when: Array) -> Array:
    """[agent, task]: the score right after the task was learnt."""
    agents, tasks = np.indices(when.shape)
    return np.where(when > 0, P[agents, when, tasks], np.nan)


def forgetting(P: Array, when: Array) -> Array:
    """[agent, task] (Continual World): score just after the task minus score at the end.

    NaN where only tasks of the last round have both: nothing came after them.
    """
    lost = just_after(P, when) - P[:, -1, :]
    earlier = ~np.isnan(lost) & (when < P.shape[1] - 1)
    return lost if earlier.any() else np.full_like(lost, nan)


def isolated(P: Array, when: Array) -> tuple[Array, Array]:
    """[agent, i, j] in the agent's own order (CORA): forgetting of task i, transfer to task i by j.

    Forgetting is defined for j after i, zero-shot transfer for j before i; the rest is NaN.
    """
    order = np.argsort(np.where(when > 0, when, P.shape[1]), axis=1, kind="stable")
    changes = np.diff(P, axis=1).transpose(0, 2, 1)  # [agent, task, round - 1]
    drops = -np.take_along_axis(changes, order[..., None], axis=1)
    i, j = np.indices(drops.shape[1:])
    return np.where(j > i, drops, np.nan), np.where(j < i, -drops, np.nan)


def maintenance(P: Array, when: Array) -> Array:
    """[agent, task] (l2metrics PM): mean of later evaluations minus the first after training."""
    found = np.full(when.shape, np.nan)
    for (a, i), learnt in np.ndenumerate(when):
        if learnt:
            found[a, i] = mean(P[a, learnt + 1 :, i] - P[a, learnt, i])
    return found


def instant_reward(P: Array) -> Array:
    """ICR(t) of ShELL: the sum over tasks of the best agent's score, for every t."""
    return np.asarray(P.max(axis=0).sum(axis=1))


# ── statistics over [run, task]; they also take many samples at once, along dimensions in front ──


def interquartile_mean(scores: Array) -> Any:
    """The mean without the lowest and the highest quarter of the values (IQM)."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)  # NaN comes last
    count = (~np.isnan(flat)).sum(axis=-1, keepdims=True)
    cut = (TRIM * count).astype(int)
    place = np.arange(flat.shape[-1])
    return mean_where(flat, (place >= cut) & (place < count - cut))


def mean_where(values: Array, counts: Array) -> Any:
    """The mean over the last dimension of the values that count; NaN where none does."""
    many = counts.sum(axis=-1)
    total = np.where(counts, values, 0).sum(axis=-1) / np.maximum(many, 1)
    found = np.where(many > 0, total, np.nan)
    return float(found) if found.ndim == 0 else found


def bootstrap(statistic: Callable[..., Any], *samples: Array) -> Interval:
    """A statistic with its 95 % interval: the first dimension (seeds, agents) is drawn anew.

    Samples of as many seeds are of the same seeds. The statistic takes them with or without a
    dimension of draws in front. With one seed nothing is known of the interval.
    """
    counts = [len(sample) for sample in samples]
    if not all(counts) or any(np.isnan(sample).any() for sample in samples):
        return UNKNOWN
    value = statistic(*samples)
    if min(counts) == 1 or np.isnan(value).all():
        return value, np.full_like(value, nan)[()], np.full_like(value, nan)[()]
    rng = np.random.Generator(np.random.PCG64(0))
    draws = {count: rng.integers(count, size=(RESAMPLES, count)) for count in dict.fromkeys(counts)}
    found = statistic(*(sample[draws[len(sample)]] for sample in samples))
    low, high = np.nanpercentile(found, [2.5, 97.5], axis=0, method="nearest")
    return value, low, high


# ── all measures of a run ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measure:
    """A value or an array with its meaning."""

    value: Array
    about: str
    dims: tuple[str, ...] = ()

    @property
    def single(self) -> float:
        """One number: the last round's, the value without its interval, or the mean."""
        if self.dims == ROUNDS:
            return float(self.value[-1])
        return float(self.value[0]) if self.dims == RANGE else mean(self.value)


@dataclass(frozen=True)
class Scale:
    """How scores become comparable: (score - zero) / (one - zero), task by task."""

    name: str
    about: str
    zero: Array
    one: Array

    def __call__(self, scores: Array, task: Array | int | slice = slice(None)) -> Array:
        """Scores whose last dimension is the task (or of one task), normalised."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (scores - self.zero[task]) / (self.one[task] - self.zero[task])
        return np.where(np.isfinite(found), found, np.nan)


def natural_scale(tasks: Sequence[str], scores: Sequence[Array], max_steps: int) -> Scale:
    """By human scores, else by what the evaluations [agent, after_round, task, episode] saw.

    Human scores are of whole games: evaluations that are cut short are not measured by them.
    """
    if max_steps >= WHOLE_GAME and all(task in RANDOM_AND_HUMAN for task in tasks):
        zero, one = np.array([RANDOM_AND_HUMAN[task] for task in tasks]).reshape(-1, 2).T
        return Scale("HNS", "human-normalised: 0 is random play, 1 is a human", zero, one)
    means = [episode_means(score) for score in scores]
    seen = np.concatenate([found.reshape(-1, len(tasks)) for found in means])
    low, high = np.fmin.reduce(seen), np.fmax.reduce(seen)
    zero = np.array([mean(before) for before in np.concatenate([x[:, 0] for x in means]).T])
    zero = np.where(np.isnan(zero), low, zero)
    span = np.where(high != zero, high - zero, np.where(zero != low, zero - low, 1.0))
    about = "0 is the mean score before the first task, 1 the best evaluation in these runs"
    return Scale("range", about, zero, zero + span)


def episode_means(score: Array) -> Array:
    """The mean over the episodes there were; NaN where there was none."""
    count = (~np.isnan(score)).sum(axis=3)
    return np.where(count > 0, np.nansum(score, axis=3) / np.maximum(count, 1), np.nan)


class Evaluations:
    """Normalised evaluations `P[agent, after_round, task]` of one run and all that follows.

    From the agents' numbers, the tasks, /tasks of run.h5 with its texts as str, and the scores of
    all evaluation episodes.
    """

    def __init__(
        self, agents: Sequence[int], tasks: Sequence[str], rows: Columns, score: Array, scale: Scale
    ) -> None:
        self.scale = scale
        done = [rows["round"][rows["agent"] == agent].max(initial=0) for agent in agents]
        self.rounds_done = int(min(done, default=0))  # by every agent
        self.raw = episode_means(score)  # like P, in game points
        self.P = scale(self.raw)[:, : self.rounds_done + 1]
        agent = np.array([list(agents).index(number) for number in rows["agent"]], dtype=int)
        task = np.array([list(tasks).index(name) for name in rows["task"]], dtype=int)
        learnt = np.full((len(agents), len(tasks)), np.nan)
        learnt[agent, task] = rows["score"]
        self.learnt = scale(learnt)  # [agent, task] right after the task
        self.when = np.zeros((len(agents), len(tasks)), dtype=int)
        steps = np.zeros((len(agents), self.rounds_done + 1))
        over = rows["round"] <= self.rounds_done
        self.when[agent[over], task[over]] = rows["round"][over]
        spent = rows["env_steps"] + rows["probe_steps"]
        np.add.at(steps, (agent[over], rows["round"][over]), spent[over])
        self.steps = np.cumsum(steps, axis=1)  # [agent, after_round] own and probing steps so far
        # Whether every agent was evaluated on every task, before and after every task.
        self.whole = bool(self.rounds_done) and not np.isnan(self.P).any()

    def measures(self) -> dict[str, Measure]:
        """Every measure of a single run, as `family/name`."""
        P, when = self.P, self.when
        (lost, gained), end, reward = isolated(P, when), P[:, -1, :], instant_reward(P)
        iqm = np.array(bootstrap(interquartile_mean, end))
        values = [self.learnt, end.mean(axis=1), iqm, forgetting(P, when), lost]
        values += [maintenance(P, when), gained, reward, np.cumsum(reward)]
        both = zip(MEASURES.items(), values, strict=True)
        return {name: Measure(value, *about) for (name, about), value in both}
