"""The measures of lifelong and shared learning, as plain functions of NumPy arrays.

`P[a, t, i]` is the mean evaluation score of agent a on task i after a's t-th task (t = 0: before
any), normalised. `when[a, i]` is the t right after which agent a had learnt task i (0: never).
What can't be told from the evaluations there are is NaN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from canal_mpi.types import Array

TRIM = 0.25  # part that the interquartile mean leaves out on each side
RESAMPLES = 2000
CHUNK = 100  # samples that are drawn at once


def mean(values: Any) -> float:
    """The mean of what is known; NaN where nothing is."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


# ── one run ────────────────────────────────────────────────────────────────────────────────────


def average_performance(P: Array) -> Array:
    """Of each agent: its mean score over all tasks at the end."""
    found: Array = P[:, -1, :].mean(axis=1)
    return found


def just_after(P: Array, when: Array) -> Array:
    """[agent, task]: the score right after the task was learnt."""
    agents, tasks = np.indices(when.shape)
    return np.where(when > 0, P[agents, when, tasks], np.nan)


def forgetting(P: Array, when: Array) -> Array:
    """[agent, task] (Continual World): score just after the task minus score at the end."""
    return just_after(P, when) - P[:, -1, :]


def isolated(P: Array, when: Array) -> tuple[Array, Array]:
    """[agent, i, j] in the agent's own order (CORA): forgetting of task i, transfer to task i by j.

    Forgetting is told for j after i, zero-shot transfer for j before i; the rest is NaN.
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
    agents, tasks = when.shape
    found = np.full(when.shape, np.nan)
    for a in range(agents):
        for i in range(tasks):
            later = P[a, when[a, i] + 1 :, i]
            if when[a, i] and len(later):
                found[a, i] = mean(later - P[a, when[a, i], i])
    return found


def instant_reward(P: Array) -> Array:
    """ICR(t) of ShELL: the sum over tasks of the best agent's score, for every t."""
    found: Array = P.max(axis=0).sum(axis=1)
    return found


def total_reward(P: Array) -> Array:
    """TPOT(t) of ShELL: the sum of ICR up to t."""
    found: Array = np.cumsum(instant_reward(P))
    return found


# ── curves ─────────────────────────────────────────────────────────────────────────────────────


def resampled(steps: Array, scores: Array, budget: int, points: int = 101) -> Array:
    """A learning curve at evenly spaced steps from 0 to the budget; its ends are held."""
    if not len(steps):
        return np.full(points, np.nan)
    places = np.argsort(steps, kind="stable")
    found: Array = np.interp(np.linspace(0, budget, points), steps[places], scores[places])
    return found


def area(curve: Array) -> float:
    """The mean height of an evenly spaced curve (trapezoids)."""
    return float((curve[1:] + curve[:-1]).mean() / 2)


def forward_transfer(area_: Array, baseline: Array) -> Array:
    """Of each task: (AUC - AUC of the baseline) / (1 - AUC of the baseline), all in [0, 1]."""
    ours, base = np.clip(area_, 0, 1), np.clip(baseline, 0, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(base < 1, (ours - base) / (1 - base), np.nan)
    return found


def relative_performance(curve: Array, expert: Array) -> float:
    """l2metrics RP: the sum of the curve over the sum of the expert's, over the steps of both."""
    both = min(len(curve), len(expert))
    return _ratio(np.nansum(curve[:both]), np.nansum(expert[:both]))


def smoothed(curve: Array) -> Array:
    """A moving average over a fifth of the curve (at most 100 points), reflected at its ends."""
    window = min(int(len(curve) * 0.2), 100)
    if window < 3:
        return curve
    wide = np.concatenate([curve[window - 1 : 0 : -1], curve, curve[-2 : -window - 1 : -1]])
    found = np.convolve(np.full(window, 1 / window), wide, mode="valid")
    start = window // 2 - 1
    return found[start : start + len(curve)]


def saturation(curve: Array) -> tuple[float, int]:
    """The maximum of the smoothed curve, and the place where it is first reached."""
    smooth = smoothed(curve)
    return float(smooth.max()), int(smooth.argmax())


def sample_efficiency(curve: Array, expert: Array) -> float:
    """l2metrics SE: (sat / sat of the expert) * (n of the expert / n); NaN where an n is 0."""
    (high, n), (expert_high, expert_n) = saturation(curve), saturation(expert)
    return _ratio(high, expert_high) * _ratio(expert_n, n) if expert_n else float("nan")


def _ratio(above: float, below: float) -> float:
    return float(above) / float(below) if below else float("nan")


# ── two runs ───────────────────────────────────────────────────────────────────────────────────


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


# ── many runs ──────────────────────────────────────────────────────────────────────────────────


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
        places = rows_of_runs(rows, crowd, rng, (samples, tasks)).swapaxes(1, 2)
    else:
        places = rng.integers(rows, size=(samples, rows, tasks))
    found: Array = scores[places, np.arange(tasks)]
    return found


def rows_of_runs(
    rows: int, crowd: int, rng: np.random.Generator, shape: tuple[int, ...] = ()
) -> Array:
    """[*shape, row]: runs drawn with replacement, and of each of them as many of its agents."""
    runs = rng.integers(rows // crowd, size=(*shape[:1], *(1,) * len(shape[1:]), rows // crowd))
    agents = rng.integers(crowd, size=(*shape, rows // crowd, crowd))
    found: Array = (runs[..., None] * crowd + agents).reshape(*shape, rows)
    return found
