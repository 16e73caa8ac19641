"""Negative transfer: pairs of agent and task that a lesson made worse than no sharing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import isnan, nan, sqrt
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.results import measures as m
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured
from canal_mpi.types import Array

if TYPE_CHECKING:
    from canal_mpi.study.weigh import Pair, Weighed

CLEARLY = 2.0  # standard errors by which a difference counts
Count = tuple[int, int]  # how many, and of how many


@dataclass(frozen=True)
class Harm:
    """Pairs that learnt from a lesson and ended their task clearly below those without sharing."""

    pairs: Count = (0, 0)  # agent and task, over all seeds: by how much runs differ
    runs: Count = (0, 0)  # agent, task and seed: by how much evaluations of one run differ
    chance: float = nan  # the part of `runs` that differs so without sharing, between two seeds


def harm(arm: "Weighed", base: "Weighed") -> Harm:
    """What an arm did worse than the one without sharing."""
    errors = _evaluation_errors([*arm.runs, *base.runs])
    alone = {(p.seed, p.agent, p.task): p for p in base.pairs}
    both = [
        (pair, alone[key])
        for pair in arm.pairs
        if pair.lesson and (key := (pair.seed, pair.agent, pair.task)) in alone
    ]
    if any(np.isnan(error) for error in errors.values()):
        return Harm(over_seeds(both, base.pairs))  # evaluations of one episode have no error
    runs = [one.learnt < other.learnt - CLEARLY * errors[one.task] for one, other in both]
    equals = list(_other_seeds(base.pairs))
    lower = [one.learnt < other.learnt - CLEARLY * errors[one.task] for one, other in equals]
    return Harm(over_seeds(both, base.pairs), (sum(runs), len(runs)), m.mean(lower))


def over_seeds(both: "Sequence[tuple[Pair, Pair]]", alone: "Sequence[Pair]") -> Count:
    """Agents and tasks whose mean over seeds is lower by more than seeds of an agent scatter."""
    differences: dict[tuple[int, str], list[float]] = {}
    for one, other in both:
        differences.setdefault((one.agent, one.task), []).append(one.learnt - other.learnt)
    worse = total = 0
    for (_, task), found in differences.items():
        ours = _by_agent([one for one, _ in both if one.task == task])
        spread = _spread(*ours, *_by_agent([pair for pair in alone if pair.task == task]))
        if not isnan(spread):
            total += 1
            worse += m.mean(found) < -CLEARLY * spread * sqrt(2 / len(found))
    return worse, total


def _by_agent(pairs: "Sequence[Pair]") -> list[list[float]]:
    """The scores of each agent with every seed: agents may differ, for one by their orders."""
    found: dict[int, list[float]] = {}
    for pair in pairs:
        found.setdefault(pair.agent, []).append(pair.learnt)
    return list(found.values())


def _spread(*groups: Sequence[float]) -> float:
    """Standard deviation inside groups, of all together; NaN where nobody knows."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(np.var(group)) * len(group) for group in groups)
    return sqrt(squares / freedom) if freedom > 0 else nan


def _other_seeds(pairs: "Sequence[Pair]") -> "Iterator[tuple[Pair, Pair]]":
    """Every pair beside the same agent and task of every other seed."""
    same: dict[tuple[int, str], list[Pair]] = {}
    for pair in pairs:
        same.setdefault((pair.agent, pair.task), []).append(pair)
    for seeds in same.values():
        yield from permutations(seeds, 2)


def _evaluation_errors(runs: Sequence[Measured]) -> dict[str, float]:
    """By task: the standard error of a difference of two evaluations, normalised."""
    found = {}
    for i, task in enumerate(runs[0].run.tasks):
        exams = [
            episodes_after(measured.run, a, i)
            for measured in runs
            for a in range(len(measured.run.agents))
        ]
        squares = [float(scores.var(ddof=1)) for scores in exams if len(scores) > 1]
        episodes = m.mean([len(scores) for scores in exams])
        unit = float(runs[0].scale.one[i] - runs[0].scale.zero[i])
        found[task] = float(np.sqrt(2 * m.mean(squares) / max(episodes, 1))) / unit
    return found


def episodes_after(run: Run, agent: int, task: int) -> Array:
    """Scores of the episodes of one agent on a task, right after it learnt it."""
    places = np.flatnonzero(run.order[agent] == run.tasks[task])
    if not len(places):
        return np.zeros(0)
    scores: Array = run.score[agent, places[0] + 1, task]
    return scores[~np.isnan(scores)]
