"""The measures of one run: its evaluations normalised, and every family of measures over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN
from canal_mpi.results import measures as m
from canal_mpi.results.reading import Run
from canal_mpi.types import Array

WHOLE_GAME = 3000  # steps after which most games are over


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
        return m.mean(self.value)

    @property
    def single(self) -> float:
        """One number: the last round's, the value without its interval, or the mean."""
        if self.dims == ("after_round",):
            return float(self.value[-1])
        return float(self.value[0]) if self.dims == ("value", "low", "high") else self.overall


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
        best = np.array([m.mean([e.final_score(task) for e in experts]) for task in tasks])
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
        self.P = self.scale(self.raw)
        self.when = self._when()
        self.P = self.P[:, : self.rounds_done + 1]
        later = np.arange(self.rounds_done + 1)[None, :, None] < self.when[:, None, :]
        unknown = np.isnan(self.P) & (later | (self.when[:, None, :] == 0))
        self.P = np.where(unknown, self.scale.unseen, self.P)

    @property
    def rounds_done(self) -> int:
        """Rounds that every agent has finished."""
        table = self.run["tasks"]
        done = [table["round"][table["agent"] == agent].max(initial=0) for agent in self.run.agents]
        return int(min(done, default=0))

    def _when(self) -> Array:
        """[agent, task]: the round in which the agent learnt the task, 0 where it has not."""
        run, found = self.run, np.zeros((len(self.run.agents), len(self.run.tasks)), dtype=int)
        table, place = run["tasks"], {task: k for k, task in enumerate(run.tasks)}
        for agent, round_, task in zip(table["agent"], table["round"], table["task"], strict=True):
            if round_ <= self.rounds_done and task in place:
                found[run.agents.index(int(agent)), place[str(task)]] = round_
        return found

    @cached_property
    def steps(self) -> Array:
        """[agent, after_round]: own and probing steps of an agent so far."""
        found = np.zeros((len(self.run.agents), self.rounds_done + 1))
        table = self.run["tasks"]
        for k, agent in enumerate(self.run.agents):
            for round_ in range(1, self.rounds_done + 1):
                here = (table["agent"] == agent) & (table["round"] == round_)
                found[k, round_] = (table["env_steps"] + table["probe_steps"])[here].sum()
        return np.cumsum(found, axis=1)

    @cached_property
    def learnt(self) -> Array:
        """[agent, task]: the normalised score right after the task, from /tasks."""
        table, found = self.run["tasks"], np.full(self.when.shape, np.nan)
        place = {task: k for k, task in enumerate(self.run.tasks)}
        for agent, task, score in zip(table["agent"], table["task"], table["score"], strict=True):
            if task in place:
                found[self.run.agents.index(int(agent)), place[str(task)]] = score
        return self.scale(found)

    @property
    def whole(self) -> bool:
        """Whether every agent was evaluated on every task, before and after every task."""
        return bool(self.rounds_done) and not np.isnan(self.P).any()

    def final_score(self, task: str) -> float:
        """Mean score on a task right after it was learnt, in game points."""
        table = self.run["tasks"]
        return m.mean(table["score"][table["task"] == task])

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
        budget = int(self.run.setting("train.frames", 1))
        return m.resampled(*self.curve(agent, task), budget)

    def measures(self) -> dict[str, Measure]:
        """Every measure of a single run, as `family/name`."""
        P, when = self.P, self.when
        drops, gains = m.isolated(P, when)
        at_end, low_high = P[:, -1, :], ("value", "low", "high")
        return {
            "performance/learnt": Measure(
                self.learnt, "score right after each task", ("agent", "task"), +1
            ),
            "performance/average": Measure(
                m.average_performance(P), "mean score over all tasks at the end", ("agent",), +1
            ),
            "performance/iqm": Measure(
                _with_interval(at_end),
                "interquartile mean over agents and tasks at the end, 95 % interval",
                low_high,
                +1,
            ),
            "forgetting/continual_world": Measure(
                m.forgetting(P, when),
                "score just after the task minus score at the end",
                ("agent", "task"),
                -1,
            ),
            "forgetting/isolated": Measure(
                drops,
                "CORA: what learning task j took from task i, both in the agent's order",
                ("agent", "i", "j"),
                -1,
            ),
            "forgetting/maintenance": Measure(
                m.maintenance(P, when),
                "l2metrics PM: later evaluations minus the first after training",
                ("agent", "task"),
                +1,
            ),
            "transfer/zero_shot": Measure(
                gains,
                "CORA: what learning task j gave to task i before i was learnt",
                ("agent", "i", "j"),
                +1,
            ),
            "shell/icr": Measure(
                m.instant_reward(P),
                "sum over tasks of the best agent's score",
                ("after_round",),
                +1,
            ),
            "shell/tpot": Measure(
                m.total_reward(P), "sum of ICR up to this round", ("after_round",), +1
            ),
        }


def _with_interval(scores: Array) -> Array:
    if np.isnan(scores).any():
        return np.full(3, np.nan)
    return np.array([m.interquartile_mean(scores), *m.interval(m.interquartile_mean, scores)])


def _episode_means(score: Array) -> Array:
    """The mean over the episodes there were; NaN where there was none."""
    count = (~np.isnan(score)).sum(axis=3)
    total = np.nansum(score, axis=3)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
