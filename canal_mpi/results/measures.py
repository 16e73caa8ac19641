"""The measures of lifelong and shared learning: functions of arrays, and all those of one run.

`P[a, t, i]` is the mean evaluation score of agent a on task i after a's t-th task (t = 0: before
any), normalised. `when[a, i]` is the t right after which agent a had learnt task i (0: never).
What the evaluations don't determine is NaN.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN
from canal_mpi.interfaces import Array
from canal_mpi.results.reader import Run

# Dimensions of measures: of pairs of tasks both are in the agent's own order.
BOTH, PAIRS, ROUNDS = ("agent", "task"), ("agent", "i", "j"), ("after_round",)
WITH_INTERVAL = ("value", "low", "high")
WHOLE_GAME = 3000  # steps after which most games are over

TRIM = 0.25  # part that the interquartile mean leaves out on each side
RESAMPLES = 2000
CHUNK = 100  # samples that are drawn at once


def mean(values: Any) -> float:
    """The mean of what is known; NaN where nothing is."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


def average_performance(P: Array) -> Array:
    """Of each agent: its mean score over all tasks at the end."""
    return np.asarray(P[:, -1, :].mean(axis=1))


def just_after(P: Array, when: Array) -> Array:
    """[agent, task]: the score right after the task was learnt."""
    agents, tasks = np.indices(when.shape)
    return np.where(when > 0, P[agents, when, tasks], np.nan)


def forgetting(P: Array, when: Array) -> Array:
    """[agent, task] (Continual World): score just after the task minus score at the end."""
    return just_after(P, when) - P[:, -1, :]


def isolated(P: Array, when: Array) -> tuple[Array, Array]:
    """[agent, i, j] in the agent's own order (CORA): forgetting of task i, transfer to task i by j.

    Forgetting is defined for j after i, zero-shot transfer for j before i; the rest is NaN.
    """
    agents, tasks = when.shape
    rounds = P.shape[1] - 1
    order = np.argsort(np.where(when > 0, when, rounds + 1), axis=1, kind="stable")
    drops = np.full((agents, tasks, rounds), np.nan)
    for a in range(agents):
        drops[a] = -np.diff(P[a], axis=0).T[order[a]]
    i, j = np.indices((tasks, rounds))
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


def total_reward(P: Array) -> Array:
    """TPOT(t) of ShELL: the sum of ICR up to t."""
    return np.cumsum(instant_reward(P))


def resampled(steps: Array, scores: Array, budget: int, points: int = 101) -> Array:
    """A learning curve at evenly spaced steps from 0 to the budget; its ends are held."""
    if not len(steps):
        return np.full(points, np.nan)
    order = np.argsort(steps, kind="stable")
    return np.interp(np.linspace(0, budget, points), steps[order], scores[order])


def area(curve: Array) -> float:
    """The mean height of an evenly spaced curve (trapezoids)."""
    return float((curve[1:] + curve[:-1]).mean() / 2)


def forward_transfer(area_: Array, baseline: Array) -> Array:
    """Of each task: (AUC - AUC of the baseline) / (1 - AUC of the baseline), all in [0, 1]."""
    ours, base = np.clip(area_, 0, 1), np.clip(baseline, 0, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(base < 1, (ours - base) / (1 - base), np.nan)


def relative_performance(curve: Array, expert: Array) -> float:
    """l2metrics RP: the sum of the curve over the sum of the expert's, over the steps of both."""
    both = min(len(curve), len(expert))
    return _ratio(np.nansum(curve[:both]), np.nansum(expert[:both]))


def smoothed(curve: Array) -> Array:
    """A moving average over a fifth of the curve (at most 100 points), mirrored at its ends."""
    window = min(int(len(curve) * 0.2), 100)
    if window < 3:
        return curve
    wide = np.concatenate([curve[window - 1 : 0 : -1], curve, curve[-2 : -window - 1 : -1]])
    found = np.convolve(np.full(window, 1 / window), wide, mode="valid")
    start = window // 2 - 1
    return found[start : start + len(curve)]


def saturation(curve: Array) -> tuple[float, int]:
    """The maximum of the smoothed curve, and the index where it is first reached."""
    smooth = smoothed(curve)
    return float(smooth.max()), int(smooth.argmax())


def sample_efficiency(curve: Array, expert: Array) -> float:
    """l2metrics SE: (sat / sat of the expert) * (n of the expert / n); NaN where an n is 0."""
    (high, n), (expert_high, expert_n) = saturation(curve), saturation(expert)
    return _ratio(high, expert_high) * _ratio(expert_n, n) if expert_n else float("nan")


def _ratio(above: float, below: float) -> float:
    return float(above) / float(below) if below else float("nan")


def learning_advantage(P: Array, single: Array) -> tuple[Array, Array]:
    """ILA(t) and TLA(t) of ShELL: ICR and TPOT of N agents over those of a single one."""
    both = min(P.shape[1], single.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        instant = instant_reward(P)[:both] / instant_reward(single)[:both]
        total = total_reward(P)[:both] / total_reward(single)[:both]
    return instant, total


def steps_to(level: float, steps: Array, scores: Array) -> float:
    """Steps at which the scores first reach the level, between evaluations in a straight line."""
    reached = np.flatnonzero(scores >= level)
    if not len(reached):
        return float("nan")
    k = int(reached[0])
    if k == 0:
        return float(steps[0])
    part = (level - scores[k - 1]) / (scores[k] - scores[k - 1])
    return float(steps[k - 1] + part * (steps[k] - steps[k - 1]))


def time_advantage(
    part: float, steps: Array, rewards: Array, single_steps: Array, single_rewards: Array
) -> float:
    """TA(p) of ShELL: steps of a single agent to p of its best ICR / steps of N to the same."""
    level = part * _above_zero(np.max(single_rewards))
    alone = steps_to(level, single_steps, single_rewards)
    return _ratio(alone, steps_to(level, steps, rewards))


def _above_zero(score: float) -> float:
    """A part of a score means something only above zero."""
    return float(score) if score > 0 else float("nan")


def mean_time_advantage(
    part: float, steps: Array, scores: Array, base_steps: Array, base_scores: Array
) -> float:
    """TA_mean(p): steps of all agents to p of what those without sharing reach; without / with."""
    return _ratio(*steps_to_part(part, steps, scores, base_steps, base_scores))


def steps_to_part(
    part: float, steps: Array, scores: Array, base_steps: Array, base_scores: Array
) -> tuple[float, float]:
    """The steps of TA_mean(p), without sharing and with it; NaN where it is never reached."""
    level = part * _above_zero(base_scores[-1])
    return steps_to(level, base_steps, base_scores), steps_to(level, steps, scores)


def interquartile_mean(scores: Array) -> Any:
    """The mean without the lowest and the highest quarter of the values (IQM), over [run, task].

    Like `improvement` it also takes many samples at once, along dimensions in front.
    """
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)  # NaN comes last
    count = (~np.isnan(flat)).sum(axis=-1, keepdims=True)
    cut = (TRIM * count).astype(int)
    place = np.arange(flat.shape[-1])
    return _mean_where(flat, (place >= cut) & (place < count - cut))


def improvement(x: Array, y: Array) -> Any:
    """P(X > Y) for scores [run, task]: over tasks, how often a run of X beats one of Y."""
    a, b = x[..., :, None, :], y[..., None, :, :]
    wins = (a > b) + (a == b) / 2
    known = ~np.isnan(a) & ~np.isnan(b)
    pairs = known.sum(axis=(-3, -2))
    won = np.where(known, wins, 0).sum(axis=(-3, -2)) / np.maximum(pairs, 1)
    return _mean_where(won, pairs > 0)


def _mean_where(values: Array, counts: Array) -> Any:
    """The mean over the last dimension of the values that count; NaN where none does."""
    many = counts.sum(axis=-1)
    total = np.where(counts, values, 0).sum(axis=-1) / np.maximum(many, 1)
    found = np.where(many > 0, total, np.nan)
    return float(found) if found.ndim == 0 else found


def overall_mean(scores: Array) -> Any:
    """The mean over [run, task], for `interval`."""
    flat = scores.reshape(*scores.shape[:-2], -1)
    return _mean_where(flat, ~np.isnan(flat))


def interval(
    measure: Callable[..., Any],
    *groups: Array,
    crowd: int = 0,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """95 % interval by a stratified bootstrap: for every task the runs are drawn anew.

    With a `crowd` each group has so many agents of a run after those of another: runs are drawn
    first, then agents of each, since agents that share are not independent.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    parts = [
        measure(*(_drawn(group, rng, CHUNK, crowd) for group in groups))
        for _ in range(resamples // CHUNK)
    ]
    found = np.concatenate(parts)
    found = found[~np.isnan(found)]
    if not len(found):
        return float("nan"), float("nan")
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _drawn(scores: Array, rng: np.random.Generator, samples: int, crowd: int) -> Array:
    """[sample, run, task]: for every task as many runs as there are, drawn with replacement."""
    rows, tasks = scores.shape
    if crowd:
        drawn = rows_of_runs(rows, crowd, rng, (samples, tasks)).swapaxes(1, 2)
    else:
        drawn = rng.integers(rows, size=(samples, rows, tasks))
    return np.asarray(scores[drawn, np.arange(tasks)])


def rows_of_runs(
    rows: int, crowd: int, rng: np.random.Generator, shape: tuple[int, ...] = ()
) -> Array:
    """[*shape, row]: runs drawn with replacement, and of each of them as many of its agents."""
    runs = rng.integers(rows // crowd, size=(*shape[:1], *(1,) * len(shape[1:]), rows // crowd))
    agents = rng.integers(crowd, size=(*shape, rows // crowd, crowd))
    return np.reshape(runs[..., None] * crowd + agents, (*shape, rows))


# ── all measures of a run ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measure:
    """A value or an array with its meaning; `sign`: +1 where more is better, -1 where less is."""

    value: Array
    about: str
    dims: tuple[str, ...] = ()
    sign: int = 0

    @property
    def overall(self) -> float:
        """The mean of what is known."""
        return mean(self.value)

    @property
    def single(self) -> float:
        """One number: the last round's, the value without its interval, or the mean."""
        if self.dims == ROUNDS:
            return float(self.value[-1])
        return float(self.value[0]) if self.dims == WITH_INTERVAL else self.overall


@dataclass(frozen=True)
class Scale:
    """How scores become comparable: (score - zero) / (one - zero), task by task."""

    name: str
    about: str
    zero: Array
    one: Array
    unseen: float = float("nan")  # of a task that was neither learnt nor evaluated yet

    def __call__(self, scores: Array, task: Array | int | slice = slice(None)) -> Array:
        """Scores whose last dimension is the task (or of one task), normalised."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (scores - self.zero[task]) / (self.one[task] - self.zero[task])
        return np.where(np.isfinite(found), found, np.nan)


def scale_for(runs: Sequence[Run], experts: Sequence["Measured"] = ()) -> Scale:
    """By single-task experts where they are given, else by human scores, else by what was seen.

    Human scores are of whole games: evaluations that are cut short are not measured by them.
    """
    tasks = runs[0].tasks
    if experts:
        best = np.array([mean([e.final_score(task) for e in experts]) for task in tasks])
        about = "part of the score of a single-task expert (one agent, one task, no sharing)"
        return Scale("expert", about, np.zeros(len(tasks)), np.where(best > 0, best, np.nan))
    whole = all(int(run.setting("evaluation.max_steps", 0)) >= WHOLE_GAME for run in runs)
    if whole and all(task in RANDOM_AND_HUMAN for task in tasks):
        zero, one = np.array([RANDOM_AND_HUMAN[task] for task in tasks]).reshape(-1, 2).T
        return Scale("HNS", "human-normalised: 0 is random play, 1 is a human", zero, one)
    means = [_episode_means(run.score) for run in runs]
    return _seen_scale(
        np.concatenate([scores[:, 0] for scores in means]),
        np.concatenate([scores.reshape(-1, len(tasks)) for scores in means]),
    )


def _seen_scale(first: Array, scores: Array) -> Scale:
    """From the scores [.., task] before any task, and from all of them."""
    tasks = scores.shape[-1]
    zero, one = np.full(tasks, np.nan), np.full(tasks, np.nan)
    for i in range(tasks):
        seen, before = (column[~np.isnan(column)] for column in (scores[:, i], first[:, i]))
        if len(seen):
            zero[i] = before.mean() if len(before) else seen.min()
            one[i] = zero[i] + (seen.max() - zero[i] or zero[i] - seen.min() or 1.0)
    about = "0 is the mean score before the first task, 1 the best evaluation in these runs"
    return Scale("range", about, zero, one)


class Measured:
    """A run with its normalised evaluations `P[agent, after_round, task]` and all that follows."""

    def __init__(self, run: Run, scale: Scale | None = None) -> None:
        self.run = run
        self.scale = scale or scale_for([run])
        self.raw = _episode_means(run.score)  # the same in game points
        self.when = self._when()
        self.P = self.scale(self.raw)[:, : self.rounds_done + 1]
        later = np.arange(self.rounds_done + 1)[None, :, None] < self.when[:, None, :]
        unknown = np.isnan(self.P) & (later | (self.when[:, None, :] == 0))
        self.P = np.where(unknown, self.scale.unseen, self.P)

    @property
    def rounds_done(self) -> int:
        """Rounds that every agent has finished."""
        table = self.run["tasks"]
        done = [table["round"][table["agent"] == agent].max(initial=0) for agent in self.run.agents]
        return int(min(done, default=0))

    def _rows(self) -> Iterator[tuple[dict[str, Any], int, int | None]]:
        """The rows of /tasks, each with the indices of its agent and of its task in the arrays."""
        agents = {agent: k for k, agent in enumerate(self.run.agents)}
        tasks = {task: k for k, task in enumerate(self.run.tasks)}
        table = self.run["tasks"]
        for values in zip(*(column.tolist() for column in table.values()), strict=True):
            row = dict(zip(table, values, strict=True))
            yield row, agents[row["agent"]], tasks.get(row["task"])

    def _when(self) -> Array:
        """[agent, task]: the round in which the agent learnt the task, 0 where it has not."""
        found = np.zeros((len(self.run.agents), len(self.run.tasks)), dtype=int)
        for row, agent, task in self._rows():
            if task is not None and row["round"] <= self.rounds_done:
                found[agent, task] = row["round"]
        return found

    @cached_property
    def steps(self) -> Array:
        """[agent, after_round]: own and probing steps of an agent so far."""
        found = np.zeros((len(self.run.agents), self.rounds_done + 1))
        for row, agent, _ in self._rows():
            if row["round"] <= self.rounds_done:
                found[agent, row["round"]] += row["env_steps"] + row["probe_steps"]
        return np.cumsum(found, axis=1)

    @cached_property
    def learnt(self) -> Array:
        """[agent, task]: the normalised score right after the task, from /tasks."""
        found = np.full(self.when.shape, np.nan)
        for row, agent, task in self._rows():
            if task is not None:
                found[agent, task] = row["score"]
        return self.scale(found)

    @property
    def whole(self) -> bool:
        """Whether every agent was evaluated on every task, before and after every task."""
        return bool(self.rounds_done) and not np.isnan(self.P).any()

    def final_score(self, task: str) -> float:
        """Mean score on a task right after it was learnt, in game points."""
        table = self.run["tasks"]
        return mean(table["score"][table["task"] == task])

    def curve(self, agent: int, task: int) -> tuple[Array, Array]:
        """Own steps on a task and normalised scores: evaluations before, inside and after it."""
        table, run = self.run["curve"], self.run
        here = (table["agent"] == run.agents[agent]) & (table["task"] == run.tasks[task])
        steps = table["env_steps"][here].astype(float)
        scores = self.scale(table["score"][here], task)
        first = int(self.when[agent, task]) - 1
        if first >= 0 and not np.isnan(self.P[agent, first, task]):
            steps = np.concatenate([[0.0], steps])
            scores = np.concatenate([[self.P[agent, first, task]], scores])
        known = ~np.isnan(scores)
        return steps[known], scores[known]

    def even_curve(self, agent: int, task: int) -> Array:
        """The same at evenly spaced steps up to the budget of a task."""
        budget = int(self.run.setting("train.steps", 1))
        return resampled(*self.curve(agent, task), budget)

    def measures(self) -> dict[str, Measure]:
        """Every measure of a single run, as `family/name`."""
        P, when = self.P, self.when
        lost, gained = isolated(P, when)
        at_end = P[:, -1, :]
        known = not np.isnan(at_end).any()
        spread = interval(interquartile_mean, at_end) if known else (np.nan, np.nan)
        iqm = np.array([interquartile_mean(at_end) if known else np.nan, *spread])
        return {
            "performance/learnt": Measure(self.learnt, "score right after each task", BOTH, +1),
            "performance/average": Measure(
                average_performance(P), "mean score over all tasks at the end", ("agent",), +1
            ),
            "performance/iqm": Measure(
                iqm, "interquartile mean at the end, 95 % interval", WITH_INTERVAL, +1
            ),
            "forgetting/continual_world": Measure(
                forgetting(P, when), "score just after the task minus score at the end", BOTH, -1
            ),
            "forgetting/isolated": Measure(
                lost, "CORA: what learning task j took from task i, in order", PAIRS, -1
            ),
            "forgetting/maintenance": Measure(
                maintenance(P, when), "l2metrics PM: later evaluations minus the first", BOTH, +1
            ),
            "transfer/zero_shot": Measure(
                gained, "CORA: what task j gave to task i before i was learnt", PAIRS, +1
            ),
            "shell/icr": Measure(
                instant_reward(P), "sum over tasks of the best agent's score", ROUNDS, +1
            ),
            "shell/tpot": Measure(total_reward(P), "sum of ICR up to this round", ROUNDS, +1),
        }


def _episode_means(score: Array) -> Array:
    """The mean over the episodes there were; NaN where there was none."""
    count = (~np.isnan(score)).sum(axis=3)
    return np.where(count > 0, np.nansum(score, axis=3) / np.maximum(count, 1), np.nan)
