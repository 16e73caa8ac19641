"""Negative transfer: pairs of agent and task that a lesson made worse than no sharing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import isnan, nan, sqrt
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.results import measures as m
from canal_mpi.results.summary import Measured
from canal_mpi.study.level import CLEARLY, episodes_after
from canal_mpi.study.pairs import Pair

if TYPE_CHECKING:
    from canal_mpi.study.weighed import Weighed

Count = tuple[int, int]  # how many, and of how many


@dataclass(frozen=True)
class Harm:
    """Pairs that learnt from a lesson and ended their task clearly below those without sharing."""

    pairs: Count = (0, 0)  # agent and task, over all seeds: by how much runs differ
    told: int = 0  # of these pairs, where one that plays at random would have been found
    runs: Count = (0, 0)  # agent, task and seed: by how much evaluations of one run differ
    chance: float = nan  # the part of `runs` that differs so without sharing, between two seeds


def harm(arm: "Weighed", base: "Weighed") -> Harm:
    """What an arm did worse than the one without sharing."""
    errors = _evaluation_errors([*arm.runs, *base.runs])
    both = beside(arm.pairs, base.pairs)
    pairs, told = over_seeds(both, base.pairs)
    runs, equals = _lower(both, errors), _lower(list(_other_seeds(base.pairs)), errors)
    return Harm(pairs, told, (sum(runs), len(runs)), m.mean(equals))


def _lower(both: Sequence[tuple[Pair, Pair]], errors: Mapping[str, float]) -> list[bool]:
    """Whether the first of two is clearly lower; evaluations of one episode have no error."""
    return [
        one.learnt < other.learnt - CLEARLY * errors[one.task]
        for one, other in both
        if not isnan(errors[one.task])
    ]


def beside(pairs: Sequence[Pair], alone: Sequence[Pair]) -> list[tuple[Pair, Pair]]:
    """Pairs with a lesson beside the same agent, task and seed without sharing."""
    known = {(p.seed, p.agent, p.task): p for p in alone}
    keys = [(pair, (pair.seed, pair.agent, pair.task)) for pair in pairs if pair.lesson]
    return [(pair, known[key]) for pair, key in keys if key in known]


def over_seeds(both: Sequence[tuple[Pair, Pair]], alone: Sequence[Pair]) -> tuple[Count, int]:
    """Agents and tasks whose mean over seeds is lower by more than seeds of an agent scatter,
    of how many; and how many of these are so good alone that random play would be found lower."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for one, other in both:
        found.setdefault((one.agent, one.task), []).append((one.learnt, other.learnt))
    worse = total = told = 0
    for (_, task), scores in found.items():
        ours = _by_agent([one for one, _ in both if one.task == task])
        spread = _spread(*ours, *_by_agent([pair for pair in alone if pair.task == task]))
        if not isnan(spread):
            least = CLEARLY * spread * sqrt(2 / len(scores))
            with_it, without = (m.mean(column) for column in zip(*scores, strict=True))
            total += 1
            worse += with_it < without - least
            told += without > least
    return (worse, total), told


def _by_agent(pairs: Sequence[Pair]) -> list[list[float]]:
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


def _other_seeds(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Pair]]:
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
