"""One arm of a study, and everything that is told of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isnan, nan
from typing import Any

import numpy as np

from canal_mpi.results import measures as m
from canal_mpi.results.compare import Group
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured
from canal_mpi.study.exams import exams_of
from canal_mpi.study.pairs import Pair, seed_of
from canal_mpi.study.transfer import Harm, harm
from canal_mpi.types import Array

RESAMPLES = 400
Interval = tuple[float, float, float]  # a value, and from where to where it may be
UNKNOWN: Interval = (nan, nan, nan)


@dataclass
class Weighed:
    """An arm. It is compared with the arm without sharing on the seeds that both have."""

    label: str
    group: Group
    pairs: list[Pair]
    base: "Weighed | None" = None  # the arm without sharing and with as many agents
    part: bool = False  # whether these are only some agents of runs with more
    lengths: dict[str, float] = field(default_factory=dict)  # steps of an episode, by task
    _advantages: dict[float, Interval] = field(default_factory=dict)

    @property
    def runs(self) -> list[Measured]:
        """Its runs, on the scale of the study."""
        return self.group.runs

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return sorted({seed_of(run.run) for run in self.runs})

    def on(self, seeds: Iterable[int]) -> "Weighed":
        """The same arm, and what it is compared with, on these seeds alone."""
        wanted = set(seeds)
        if wanted >= set(self.seeds):
            return self
        runs = [run for run in self.runs if seed_of(run.run) in wanted]
        pairs = [pair for pair in self.pairs if pair.seed in wanted]
        base = self.base.on(wanted) if self.base else None
        return replace(self, group=Group(self.label, runs), pairs=pairs, base=base, _advantages={})

    @cached_property
    def matched(self) -> "tuple[Weighed, Weighed] | None":
        """This arm and the one without sharing, on the seeds that both have."""
        common = set(self.seeds) & set(self.base.seeds) if self.base else set()
        return (self.on(common), self.base.on(common)) if self.base and common else None

    # ── what it cost ───────────────────────────────────────────────────────────────────────────

    @cached_property
    def steps(self) -> float:
        """Environment steps of all agents of a run, training alone."""
        return m.mean([run.steps[:, -1].sum() for run in self.runs])

    @cached_property
    def seconds(self) -> float:
        """Wall time of a run, inside tasks."""
        return nan if self.part else m.mean([run.run.seconds for run in self.runs])

    @cached_property
    def exams(self) -> tuple[float, float]:
        """Evaluations of a run that steered its agents, and their steps, estimated."""
        found = [exams_of(run, self.lengths) for run in self.runs]
        return m.mean([n for n, _ in found]), m.mean([steps[:, -1].sum() for _, steps in found])

    @cached_property
    def megabytes(self) -> float:
        """Of lessons that moved in a run, those included that agents passed on."""
        return m.mean([_bytes_moved(run.run) / 1e6 for run in self.runs])

    @cached_property
    def megabytes_that_count(self) -> float:
        """The same for the tasks that count."""
        return m.mean([_bytes_moved(run.run, run.run.tasks) / 1e6 for run in self.runs])

    # ── what it reached ────────────────────────────────────────────────────────────────────────

    @cached_property
    def average(self) -> Interval:
        """Mean score over agents and tasks at the end, with its interval."""
        return (m.mean(self.group.final), *self._interval(m.overall_mean, self.group.final))

    @cached_property
    def iqm(self) -> Interval:
        """Interquartile mean at the end, with its interval."""
        final = self.group.final
        return (m.interquartile_mean(final), *self._interval(m.interquartile_mean, final))

    @cached_property
    def forgetting(self) -> Interval:
        """Score just after the task minus score at the end, with its interval."""
        lost = np.concatenate([m.forgetting(run.P, run.when) for run in self.runs])
        return (m.mean(lost), *self._interval(m.overall_mean, lost))

    @cached_property
    def icr(self) -> float:
        """Sum over tasks of the best agent's score at the end."""
        return m.mean([m.instant_reward(run.P)[-1] for run in self.runs])

    @cached_property
    def hns(self) -> float:
        """Human-normalised score gained by pairs that took a lesson, all of a run together."""
        gained = [pair.gained for pair in self.pairs if pair.lesson]
        return sum(gained) / len(self.runs) if gained else nan

    @cached_property
    def dropped(self) -> int:
        """Tasks whose lessons the admission refused."""
        return sum(_dropped(run.run) for run in self.runs)

    def reached(self, k: int) -> tuple[int, float, float]:
        """How many pairs reached PARTS[k] of the expert's score; median own steps and seconds."""
        steps = np.array([pair.steps_to[k] for pair in self.pairs])
        seconds = np.array([pair.seconds_to[k] for pair in self.pairs])
        there = int((~np.isnan(steps)).sum())
        halves = [float(np.median(np.where(np.isnan(x), inf, x))) for x in (steps, seconds)]
        return there, halves[0], halves[1]

    def ended_at(self, part: float) -> int:
        """How many pairs ended their task with such a part of the expert's score."""
        return sum(pair.learnt >= part for pair in self.pairs)

    # ── against the arm without sharing ────────────────────────────────────────────────────────

    @cached_property
    def improvement(self) -> Interval:
        """Probability that a score at the end is better than without sharing."""
        if self.matched is None:
            return UNKNOWN
        ours, theirs = (arm.group.final for arm in self.matched)
        return (m.improvement(ours, theirs), *self._interval(m.improvement, ours, theirs))

    @cached_property
    def worse(self) -> Harm:
        """Pairs with a lesson that are clearly worse than without sharing."""
        return Harm() if self.base is None else harm(self, self.base)

    def advantage(self, part: float) -> Interval:
        """TA_mean(p) over the arm without sharing, 0 where agents that share never get there."""
        if part not in self._advantages:
            self._advantages[part] = self._advantage_at(part)
        return self._advantages[part]

    def _advantage_at(self, part: float) -> Interval:
        """The same with its interval, for which seeds are drawn anew, then agents of each."""
        if self.matched is None:
            return UNKNOWN
        ours, theirs = (_by_agent(arm.group) for arm in self.matched)
        crowd, rng = self.group.agents, np.random.Generator(np.random.PCG64(0))
        drawn = [
            _advantage(part, _draw(ours, crowd, rng), _draw(theirs, crowd, rng))
            for _ in range(RESAMPLES)
        ]
        known = [value for value in drawn if not isnan(value)]
        with np.errstate(invalid="ignore"):  # who needs no step at all is infinitely ahead
            low, high = np.percentile(known, [2.5, 97.5]) if known else (nan, nan)
        return _advantage(part, ours, theirs), float(low), float(high)

    def advantage_with_exams(self, part: float) -> float:
        """TA_mean(p) if evaluations that steer counted as steps, too."""
        if self.matched is None:
            return nan
        ours, theirs = self.matched
        steps, scores = _by_agent(ours.group)
        more = [exams_of(run, self.lengths)[1][:, : steps.shape[1]] for run in ours.runs]
        return _advantage(part, (steps + np.concatenate(more), scores), _by_agent(theirs.group))

    @cached_property
    def learning_advantage(self) -> tuple[float, float]:
        """ILA and TLA at the end, over single agents: those of the arm without sharing, each."""
        ours, theirs = self.matched or (self, self)
        if theirs.group.shares:
            return nan, nan
        instant, total = [], []
        for run in ours.runs:
            for alone in theirs.runs:
                for agent in range(len(alone.P)):
                    one, all_ = m.learning_advantage(run.P, alone.P[agent : agent + 1])
                    instant.append(one[-1])
                    total.append(all_[-1])
        return m.mean(instant), m.mean(total)

    def _interval(self, measure: Callable[..., Any], *scores: Array) -> tuple[float, float]:
        """Seeds are drawn anew, then agents of each."""
        return m.interval(measure, *scores, crowd=self.group.agents)


def _by_agent(group: Group) -> tuple[Array, Array]:
    """[agent of any run, after_round]: steps of the agent, and its mean score over tasks."""
    rounds = min(run.P.shape[1] for run in group.runs)
    steps = np.concatenate([run.steps[:, :rounds] for run in group.runs])
    return steps, np.concatenate([run.P[:, :rounds].mean(axis=2) for run in group.runs])


def _draw(rows: tuple[Array, Array], crowd: int, rng: np.random.Generator) -> tuple[Array, Array]:
    drawn = m.rows_of_runs(len(rows[0]), crowd, rng)
    return rows[0][drawn], rows[1][drawn]


def _advantage(part: float, ours: tuple[Array, Array], theirs: tuple[Array, Array]) -> float:
    (steps, scores), (base_steps, base_scores) = (
        (rows[0].mean(axis=0), rows[1].mean(axis=0)) for rows in (ours, theirs)
    )
    without, with_it = m.steps_to_part(part, steps, scores, base_steps, base_scores)
    if isnan(without) or np.isnan([*steps, *scores, *base_steps, *base_scores]).any():
        return nan
    if isnan(with_it):
        return 0.0  # they never get there
    return without / with_it if with_it else inf


def _dropped(run: Run) -> int:
    ledger = run["exchange"]
    here = ledger["kind"] == "drop"
    return len(set(zip(ledger["to"][here].tolist(), ledger["round"][here].tolist(), strict=True)))


def _bytes_moved(run: Run, tasks: list[str] | None = None) -> float:
    ledger, relays = run["exchange"], run["relays"]
    moved, passed = ledger["kind"] == "transfer", np.ones(len(relays["bytes"]), dtype=bool)
    if tasks is not None:
        moved, passed = moved & np.isin(ledger["task"], tasks), np.isin(relays["task"], tasks)
    return float(ledger["bytes"][moved].sum() + relays["bytes"][passed].sum())
