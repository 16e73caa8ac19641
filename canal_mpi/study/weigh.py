"""What a study measures: arms on the scale from random play to single-task experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, nan
from typing import Any

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Comparison, Group
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured, Scale
from canal_mpi.study.arms import DEFAULT, NONE
from canal_mpi.study.transfer import CLEARLY, Harm, episodes_after, harm
from canal_mpi.types import Array

PARTS = (0.5, 0.75, 0.9)  # of the expert's score, and of what agents reach without sharing
RESAMPLES = 400


@dataclass(frozen=True)
class Level:
    """Mean score of every task and its standard error, over all episodes there were."""

    mean: Array
    error: Array
    spread: Array  # standard deviation of an episode
    episodes: int

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Level":
        """Of agents right after they learnt each task."""
        means, errors, spreads, count = [], [], [], 0
        for i in range(len(runs[0].tasks)):
            scores = np.concatenate([episodes_after(run, 0, i) for run in runs])
            means.append(m.mean(scores))
            errors.append(float(scores.std() / np.sqrt(max(len(scores) - 1, 1))))
            spreads.append(float(scores.std()))
            count = max(count, len(scores))
        return cls(np.array(means), np.array(errors), np.array(spreads), count)


@dataclass(frozen=True)
class Pair:
    """One agent and one task of one run of an arm; scores are normalised."""

    arm: str
    seed: int
    agent: int
    task: str
    lesson: bool  # whether it was learnt from a lesson
    own_steps: int
    before: float  # before the lesson; NaN where there was none
    learnt: float  # right after the task
    final: float  # at the end of the run
    gained: float  # human-normalised score since before the lesson; 0 where there was none
    steps_to: tuple[float, ...]  # own steps to each of PARTS of the expert's score
    seconds_to: tuple[float, ...]


@dataclass
class Weighed:
    """One arm: its runs, and everything that is told of it."""

    label: str
    group: Group
    pairs: list[Pair]
    base: "Weighed | None" = None  # the arm without sharing and with as many agents
    part: bool = False  # whether these are only some agents of runs with more
    _advantages: dict[float, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def runs(self) -> list[Measured]:
        """Its runs, on the scale of the study."""
        return self.group.runs

    @cached_property
    def steps(self) -> float:
        """Environment steps of all agents of a run."""
        return m.mean([run.steps[:, -1].sum() for run in self.runs])

    @cached_property
    def seconds(self) -> float:
        """Wall time of a run, inside tasks."""
        return nan if self.part else m.mean([run.run.seconds for run in self.runs])

    @cached_property
    def worse(self) -> Harm:
        """Pairs with a lesson that are clearly worse than without sharing."""
        return Harm() if self.base is None else harm(self, self.base)

    @cached_property
    def dropped(self) -> int:
        """Tasks whose lessons the admission refused."""
        return sum(_dropped(run.run) for run in self.runs)

    @cached_property
    def megabytes(self) -> float:
        """Of lessons that moved in a run, those included that agents passed on."""
        return m.mean([_bytes_moved(run.run) / 1e6 for run in self.runs])

    @cached_property
    def hns(self) -> float:
        """Human-normalised score gained by pairs that took a lesson, all of a run together."""
        return sum(pair.gained for pair in self.pairs) / len(self.runs)

    @cached_property
    def forgetting(self) -> tuple[float, float, float]:
        """Score just after the task minus score at the end, with its interval."""
        lost = np.concatenate([m.forgetting(run.P, run.when) for run in self.runs])
        return (m.mean(lost), *self._interval(m.overall_mean, lost))

    @cached_property
    def average(self) -> tuple[float, float, float]:
        """Mean score over agents and tasks at the end, with its interval."""
        return (m.mean(self.group.final), *self._interval(m.overall_mean, self.group.final))

    @cached_property
    def iqm(self) -> tuple[float, float, float]:
        """Interquartile mean at the end, with its interval."""
        final = self.group.final
        return (m.interquartile_mean(final), *self._interval(m.interquartile_mean, final))

    @cached_property
    def improvement(self) -> tuple[float, float, float]:
        """Probability that a score at the end is better than without sharing."""
        if self.base is None:
            return nan, nan, nan
        ours, theirs = self.group.final, self.base.group.final
        return (m.improvement(ours, theirs), *self._interval(m.improvement, ours, theirs))

    def _interval(self, measure: Callable[..., Any], *scores: Array) -> tuple[float, float]:
        """Seeds are drawn anew, then agents of each."""
        return m.interval(measure, *scores, crowd=self.group.agents)

    def advantage(self, part: float) -> tuple[float, float, float]:
        """TA_mean(p) over the arm without sharing, 0 where agents that share never get there."""
        if part not in self._advantages:
            self._advantages[part] = self._advantage_at(part)
        return self._advantages[part]

    def _advantage_at(self, part: float) -> tuple[float, float, float]:
        """The same with its interval, for which seeds are drawn anew, then agents of each."""
        if self.base is None:
            return nan, nan, nan
        ours, theirs, crowd = _by_agent(self.group), _by_agent(self.base.group), self.group.agents
        rng = np.random.Generator(np.random.PCG64(0))
        drawn = [
            _advantage(part, _draw(ours, crowd, rng), _draw(theirs, crowd, rng))
            for _ in range(RESAMPLES)
        ]
        known = [value for value in drawn if not np.isnan(value)]
        low, high = np.percentile(known, [2.5, 97.5]) if known else (nan, nan)
        return _advantage(part, ours, theirs), float(low), float(high)

    @cached_property
    def icr(self) -> float:
        """Sum over tasks of the best agent's score at the end."""
        return m.mean([m.instant_reward(run.P)[-1] for run in self.runs])

    @cached_property
    def learning_advantage(self) -> tuple[float, float]:
        """ILA and TLA at the end, over single agents: those of the arm without sharing, each."""
        if self.base is None:
            return nan, nan
        instant, total = [], []
        for run in self.runs:
            for alone in self.base.runs:
                for agent in range(len(alone.P)):
                    one, all_ = m.learning_advantage(run.P, alone.P[agent : agent + 1])
                    instant.append(one[-1])
                    total.append(all_[-1])
        return m.mean(instant), m.mean(total)

    def reached(self, k: int) -> tuple[int, float, float]:
        """How many pairs reached PARTS[k] of the expert's score; median own steps and seconds."""
        steps = np.array([pair.steps_to[k] for pair in self.pairs])
        seconds = np.array([pair.seconds_to[k] for pair in self.pairs])
        there = int((~np.isnan(steps)).sum())
        halves = [float(np.median(np.where(np.isnan(x), inf, x))) for x in (steps, seconds)]
        return there, halves[0], halves[1]


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
    found = m.mean_time_advantage(part, steps, scores, base_steps, base_scores)
    never = np.isnan(found) and base_scores[-1] > 0  # sharing agents don't get there: 0
    return 0.0 if never else found


@dataclass
class Study:
    """All arms on one scale."""

    tasks: list[str]  # all of them
    random: Level
    expert: Level
    arms: list[Weighed]
    comparison: Comparison
    seeds: list[int]

    @property
    def counts(self) -> Array:
        """[task]: whether the experts clearly beat random play; only these tasks are in means."""
        return clearly_above(self.expert, self.random)

    def arm(self, label: str) -> Weighed | None:
        """An arm by its name."""
        return next((arm for arm in self.arms if arm.label == label), None)


def clearly_above(expert: Level, random: Level) -> Array:
    """[task]: whether the difference is larger than two standard errors and than episodes scatter.

    Where it is smaller than that spread, a score of few episodes on the scale is mostly chance.
    """
    error = np.hypot(expert.error, random.error)
    spread = np.hypot(expert.spread, random.spread) / np.sqrt(2)
    found: Array = expert.mean - random.mean > np.maximum(CLEARLY * error, spread)
    return found


def weigh(arms: dict[str, list[Run]], experts: list[Run], random: list[Run]) -> Study | None:
    """Everything about a study; None where no expert clearly beats random play, or nothing ran."""
    if not (arms and experts and random):
        return None
    tasks = experts[0].tasks
    expert, chance = Level.of(experts), Level.of(random)
    kept = [i for i, counts in enumerate(clearly_above(expert, chance)) if counts]
    if not kept:
        return None
    about = "0 is random play, 1 a single-task expert (same steps, no sharing)"
    scale = Scale("expert", about, chance.mean[kept], expert.mean[kept], unseen=0.0)
    less = _fewer_alone(arms)
    groups = [
        Group(label, [Measured(_only(run, kept), scale) for run in runs])
        for label, runs in (arms | less).items()
    ]
    weighed = [Weighed(g.label, g, _pairs(g), part=g.label in less) for g in groups]
    for arm in (arm for arm in weighed if arm.part):  # their times are those of a larger crowd
        arm.pairs = [replace(pair, seconds_to=(nan,) * len(PARTS)) for pair in arm.pairs]
    for arm in weighed:
        arm.base = next(
            (b for b in weighed if not b.group.shares and b.group.agents == arm.group.agents), None
        )
        arm.base = None if arm.base is arm else arm.base
    baseline = next((g for g in groups if g.label == NONE), None)
    stes = [Measured(_only(run, kept), scale) for run in experts]
    many = baseline.agents if baseline else groups[0].agents  # steps of all agents are compared
    alike = [group for group in groups if group.agents == many]
    comparison = Comparison(alike, scale, baseline, None, stes)
    seeds = sorted({int(run.attributes.get("seed", 0)) for runs in arms.values() for run in runs})
    return Study(tasks, chance, expert, weighed, comparison, seeds)


def _only(run: Run, kept: list[int]) -> Run:
    """The run without the tasks that don't count."""
    return replace(run, tasks=[run.tasks[i] for i in kept], score=run.score[:, :, kept])


def _fewer_alone(arms: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """Arms of fewer agents that don't share: agents of `none` are the same at any number."""
    whole, found = arms.get(NONE, []), {}
    for number in sorted({len(run.agents) for runs in arms.values() for run in runs}):
        if whole and number < len(whole[0].agents) and f"{NONE}-{number}" not in arms:
            found[f"{NONE}-{number}"] = [_first(run, number) for run in whole]
    return found


def _first(run: Run, number: int) -> Run:
    """The run with its first agents alone."""
    agents = run.agents[:number]
    tables = {
        name: {key: column[np.isin(table["agent"], agents)] for key, column in table.items()}
        if "agent" in table
        else table
        for name, table in run.tables.items()
    }
    return replace(
        run,
        tables=tables,
        order=run.order[:number],
        adjacency=run.adjacency[:number, :number],
        score=run.score[:number],
    )


def _pairs(group: Group) -> list[Pair]:
    return [
        _pair(group.label, run, a, i)
        for run in group.runs
        for a in range(group.agents)
        for i in range(len(run.run.tasks))
        if run.when[a, i]
    ]


def _pair(label: str, measured: Measured, agent: int, task: int) -> Pair:
    run, name = measured.run, measured.run.tasks[task]
    table = run["tasks"]
    here = (table["agent"] == run.agents[agent]) & (table["task"] == name)
    score, round_ = table["score"][here], int(measured.when[agent, task])
    curve = run["curve"]
    there = (curve["agent"] == run.agents[agent]) & (curve["task"] == name)
    scores = measured.scale(curve["score"][there], task)
    steps, seconds = (curve[name_][there].astype(float) for name_ in ("env_steps", "seconds"))
    ledger = run["exchange"]
    used = ledger["kind"] == "lesson"
    used &= (ledger["to"] == run.agents[agent]) & (ledger["round"] == round_)
    before = ledger["score_before"][used][:1]
    low, high = RANDOM_AND_HUMAN.get(name, (nan, nan))
    return Pair(
        label,
        int(run.attributes.get("seed", 0)),
        run.agents[agent],
        name,
        bool((table["source"][here] == "lesson").any()),
        int(table["env_steps"][here].sum()),
        float(measured.scale(before, task)[0]) if len(before) else nan,
        float(measured.learnt[agent, task]),
        float(measured.P[agent, -1, task]),
        float((score[0] - before[0]) / (high - low)) if len(before) else 0.0,
        tuple(m.steps_to(part, steps, scores) for part in PARTS),
        tuple(m.steps_to(part, seconds, scores) for part in PARTS),
    )


def _dropped(run: Run) -> int:
    ledger = run["exchange"]
    here = ledger["kind"] == "drop"
    return len(set(zip(ledger["to"][here].tolist(), ledger["round"][here].tolist(), strict=True)))


def _bytes_moved(run: Run) -> float:
    ledger = run["exchange"]
    moved = ledger["bytes"][ledger["kind"] == "transfer"].sum()
    return float(moved + run["relays"]["bytes"].sum())


def goals(study: Study) -> list[tuple[str, str, bool | None]]:
    """The goals of a study: what was wanted, what was found, whether it was reached."""
    arm = study.arm(DEFAULT)
    if arm is None or arm.base is None:
        return []
    ta, low, high = arm.advantage(0.9)
    ours, theirs, chance = arm.average[0], arm.base.average[0], arm.improvement
    (lost, least, most), (worse, pairs) = arm.forgetting, arm.worse.pairs
    return [
        (
            "TA_mean(90 %) at least 2.5",
            f"{ta:.2f} ({low:.2f} – {high:.2f})" if ta else "never got there",
            None if np.isnan(ta) else ta >= 2.5,
        ),
        (
            "average performance not below that without sharing, P(improvement) over 0.5",
            f"{ours:.2f} against {theirs:.2f}; P = {chance[0]:.2f} "
            f"({chance[1]:.2f} – {chance[2]:.2f})",
            ours >= theirs and chance[0] > 0.5,
        ),
        (
            "forgetting at most 0.05",
            f"{lost:.3f} ({least:.3f} – {most:.3f})",
            None if np.isnan(lost) else lost <= 0.05,
        ),
        (
            "negative transfer in at most 1 of 20 pairs",
            f"{worse} of {pairs}" if pairs else "one seed can't tell",
            worse * 20 <= pairs if pairs else None,
        ),
    ]
