"""Several runs beside each other: the measures between runs, groups of equal jobs, and what one
group gains over another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.interfaces import Array
from canal_mpi.results.measures import (
    Evaluations,
    Scale,
    instant_reward,
    mean,
    mean_where,
    natural_scale,
)
from canal_mpi.results.reader import Run

TOLD = (0.5, 0.8, 1.0)  # the p of TA(p)
FEWER = "× fewer steps to {:.0f} % of the score {}"  # TA(p) in words
NAMES = {"seed", "name", "preset", "report"}  # settings that don't make another experiment


class Measured(Evaluations):
    """A run with its normalised evaluations and learning curves."""

    def __init__(self, run: Run, scale: Scale | None = None) -> None:
        super().__init__(run.agents, run.tasks, run["tasks"], run.score, scale or scale_for([run]))
        self.run = run

    @property
    def final(self) -> Array:
        """[agent, task]: scores at the end; of a run that has none yet, right after tasks."""
        end = self.P[:, -1]
        return self.learnt if np.isnan(end).all() else end

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
        rows = run["tasks"]
        after = (rows["agent"] == run.agents[agent]) & (rows["task"] == run.tasks[task])
        steps = np.concatenate([steps, rows["env_steps"][after]])
        scores = np.concatenate([scores, self.scale(rows["score"][after], task)])
        first = int(self.when[agent, task]) - 1
        if first >= 0 and not np.isnan(self.P[agent, first, task]):
            steps = np.concatenate([[0.0], steps])
            scores = np.concatenate([[self.P[agent, first, task]], scores])
        known = ~np.isnan(scores)
        return steps[known], scores[known]

    def reached(self) -> Array:
        """[after_round]: mean over agents and rounds of the scores right after tasks so far."""
        rounds = np.arange(self.rounds_done + 1)[:, None, None]
        done = (self.when > 0) & (self.when <= rounds)  # [after_round, agent, task]
        total = np.where(done, self.learnt, 0).sum(axis=(1, 2))
        return np.asarray(total / (len(self.when) * self.run.rounds))

    def even_curve(self, agent: int, task: int) -> Array:
        """The same at evenly spaced steps up to the budget of a task."""
        budget = int(self.run.setting("train.steps", 1))
        return resampled(*self.curve(agent, task), budget)


def scale_for(runs: Sequence[Run], experts: Sequence[Measured] = ()) -> Scale:
    """By single-task experts where they are given, else the natural one of these runs."""
    tasks = runs[0].tasks
    if experts:
        best = np.array([mean([e.final_score(task) for e in experts]) for task in tasks])
        about = "part of the score of a single-task expert (one agent, one task, no sharing)"
        return Scale("expert", about, np.zeros(len(tasks)), np.where(best > 0, best, np.nan))
    max_steps = min(int(run.setting("evaluation.max_steps", 0)) for run in runs)
    return natural_scale(tasks, [run.score for run in runs], max_steps)


@dataclass
class Group:
    """Runs of the same job, different only in their seed."""

    label: str
    runs: list[Measured]

    @property
    def shares(self) -> bool:
        """Whether its agents receive each other's offers."""
        return bool(self.runs[0].run.adjacency.any())

    @property
    def agents(self) -> int:
        """Agents of each run."""
        return len(self.runs[0].run.agents)

    @property
    def final(self) -> Array:
        """[agent of any run, task]: scores at the end."""
        return np.concatenate([run.final for run in self.runs])

    def progress(self, whole: bool) -> tuple[Array, Array]:
        """Steps of all agents, and [run, after_round] mean scores over agents and tasks.

        Unless all evaluations are there, by those right after tasks: others count as random play.
        """
        rounds = min(run.P.shape[1] for run in self.runs)
        steps = np.mean([run.steps[:, :rounds].sum(axis=0) for run in self.runs], axis=0)
        scores = [run.P.mean(axis=(0, 2)) if whole else run.reached() for run in self.runs]
        return steps, np.stack([score[:rounds] for score in scores])

    def clock(self) -> tuple[Array, Array]:
        """Steps of the busiest agent, and ICR, averaged over the runs."""
        rounds = min(run.P.shape[1] for run in self.runs)
        steps = np.mean([run.steps[:, :rounds].max(axis=0) for run in self.runs], axis=0)
        return steps, np.mean([instant_reward(run.P[:, :rounds]) for run in self.runs], axis=0)

    def _curves(self, task: int) -> list[Array]:
        return [run.even_curve(a, task) for run in self.runs for a in range(self.agents)]

    def areas(self) -> Array:
        """[task]: mean height of the learning curves of all agents."""
        tasks = range(len(self.runs[0].run.tasks))
        return np.array([mean([area(curve) for curve in self._curves(i)]) for i in tasks])

    def mean_curve(self, task: int) -> Array:
        """The learning curve of a task, averaged over all agents."""
        known = [curve for curve in self._curves(task) if not np.isnan(curve).any()]
        return np.mean(known, axis=0) if known else np.full(101, np.nan)


@dataclass
class Comparison:
    """Groups on one scale; `baseline` doesn't share, `single` is one agent, `experts` one task."""

    groups: list[Group]
    scale: Scale
    baseline: Group | None = None
    single: Group | None = None
    experts: list[Measured] = field(default_factory=list)

    @property
    def runs(self) -> list[Measured]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def tasks(self) -> list[str]:
        """The tasks of all runs."""
        return self.groups[0].runs[0].run.tasks

    @property
    def whole(self) -> bool:
        """Whether every run has all evaluations."""
        return all(run.whole for run in self.runs)

    def versus(self, group: Group) -> dict[str, float]:
        """What a group gains over the baseline, the single agent and the experts."""
        found: dict[str, float] = {}
        if self.baseline is not None and group is not self.baseline:
            found |= self._versus_baseline(group, self.baseline)
        if self.single is not None and group is not self.single:
            found |= self._versus_single(group, self.single)
        return found | (self._versus_experts(group) if self.experts else {})

    def _versus_baseline(self, group: Group, base: Group) -> dict[str, float]:
        return {
            "forward transfer": mean(forward_transfer(group.areas(), base.areas())),
            "probability of improvement": improvement(group.final, base.final),
            **{FEWER.format(100 * p, "without sharing"): self.advantage(group, p) for p in TOLD},
        }

    def advantage(self, group: Group, part: float) -> float:
        """TA_mean(p): steps of all agents to p of what the baseline reaches; without / with."""
        base = self.baseline
        if base is None:
            return float("nan")
        (steps, scores), (base_steps, base_scores) = (g.progress(self.whole) for g in (group, base))
        ours, theirs = scores.mean(axis=0), base_scores.mean(axis=0)
        return time_advantage(part * theirs[-1], steps, ours, base_steps, theirs)

    def _versus_single(self, group: Group, single: Group) -> dict[str, float]:
        instant, total = learning_advantage(group.runs[0].P, single.runs[0].P)
        found = {"ILA": float(instant[-1]), "TLA": float(total[-1])}
        clock, alone = group.clock(), single.clock()
        whole = all(run.whole for run in (*group.runs, *single.runs))
        for part in TOLD:
            level = part * alone[1].max() if whole else float("nan")
            found[FEWER.format(100 * part, "of one agent")] = time_advantage(level, *clock, *alone)
        return found

    def _versus_experts(self, group: Group) -> dict[str, float]:
        pairs = [
            (group.mean_curve(i), expert.even_curve(0, expert.run.tasks.index(task)))
            for i, task in enumerate(self.tasks)
            for expert in self.experts
            if task in expert.run.tasks
        ]
        found = mean([relative_performance(*pair) for pair in pairs])
        return {"relative performance (RP)": found}


def compare(runs: Sequence[Run], experts: Sequence[Run] = ()) -> Comparison:
    """Runs of the same tasks, in groups that differ only in the seed."""
    tasks = runs[0].tasks
    for run in runs[1:]:
        if run.tasks != tasks:
            same = sorted(run.tasks) == sorted(tasks)
            what = "lists its tasks in another order" if same else "has other tasks"
            raise UsageError(
                f"{run.folder} {what} than {runs[0].folder}; compare runs of the same."
            )
    scale = scale_for(runs, [Measured(run) for run in experts])
    scaled = [Measured(run, _part(scale, tasks, run.tasks)) for run in experts]
    groups = _groups([Measured(run, scale) for run in runs])
    alone = [group for group in groups if group.agents == 1]
    several = [group for group in groups if group.agents > 1 and not group.shares]
    baseline = several[0] if several and len(groups) > 1 else None
    single = alone[0] if alone and len(groups) > 1 else None
    return Comparison(groups, scale, baseline, single, scaled)


def _part(scale: Scale, tasks: Sequence[str], own: Sequence[str]) -> Scale:
    """The scale of some of the tasks."""
    kept = [tasks.index(task) for task in own if task in tasks]
    return Scale(scale.name, scale.about, scale.zero[kept], scale.one[kept])


def _groups(runs: list[Measured]) -> list[Group]:
    found: dict[str, list[Measured]] = {}
    for run in runs:
        found.setdefault(repr(_experiment(run.run)), []).append(run)
    labels = _labels([members[0].run for members in found.values()])
    return [Group(label, list(r)) for label, r in zip(labels, found.values(), strict=True)]


def _experiment(run: Run) -> dict[str, Any]:
    """What makes two runs the same experiment: all settings but the seed, and the agents."""
    flat = {key: value for key, value in sorted(_flat(run.job).items()) if key not in NAMES}
    return flat | {"agents": len(run.agents)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def _labels(runs: list[Run]) -> list[str]:
    """The settings in which the groups differ, in few words; else the names of the folders."""
    if len(runs) == 1:
        return [runs[0].name]
    flat = [_experiment(run) for run in runs]
    odd = sorted({k for f in flat for k in f if len({repr(g.get(k)) for g in flat}) > 1})
    labels = [", ".join(_word(key, f.get(key)) for key in odd[:2]) for f in flat]
    if len(odd) > 2 or not odd or len(set(labels)) < len(labels):
        return [run.name for run in runs]
    return labels


def mix(emulated: Sequence[str]) -> str:
    """The hosts of agents in few words, those of a kind counted: `4 nano, 1 xavier`."""
    names = [str(host).partition("@")[0] for host in emulated]
    kinds = [kind_of(name) for name in dict.fromkeys(names)]
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    crowd = f" ({len(names)} agents)" if len(names) > len(kinds) else ""
    return ", ".join(counts) + crowd or "not emulated"


def kind_of(host: str) -> str:
    """What hosts of a kind have in common: their name without its number."""
    return host.rstrip("0123456789").rstrip("-")


def _word(key: str, value: Any) -> str:
    if key == "agents":
        return f"{value} agent{'s' * (value != 1)}"
    if key == "emulate":
        return mix(value if isinstance(value, list) else [])
    if (key, value) == ("share.policy", "none"):
        return "no sharing"
    name = "share" if key == "share.policy" else key.rpartition(".")[2]
    return f"{name} {value}"


# ── functions of arrays ────────────────────────────────────────────────────────────────────────


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


def _ratio(above: float, below: float) -> float:
    return float(above) / float(below) if below else float("nan")


def learning_advantage(P: Array, single: Array) -> tuple[Array, Array]:
    """ILA(t) and TLA(t) of ShELL: ICR and TPOT of N agents over those of a single one."""
    both = min(P.shape[1], single.shape[1])
    ours, theirs = instant_reward(P)[:both], instant_reward(single)[:both]
    with np.errstate(divide="ignore", invalid="ignore"):
        return ours / theirs, np.cumsum(ours) / np.cumsum(theirs)


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
    level: float, steps: Array, scores: Array, base_steps: Array, base_scores: Array
) -> float:
    """TA of ShELL: steps of the baseline to a level / our steps to it; NaN for none above 0."""
    if not level > 0:
        return float("nan")
    return _ratio(steps_to(level, base_steps, base_scores), steps_to(level, steps, scores))


def improvement(x: Array, y: Array) -> Any:
    """P(X > Y) for scores [run, task]: over tasks, how often a run of X beats one of Y."""
    a, b = x[..., :, None, :], y[..., None, :, :]
    wins = (a > b) + (a == b) / 2
    known = ~np.isnan(a) & ~np.isnan(b)
    pairs = known.sum(axis=(-3, -2))
    won = np.where(known, wins, 0).sum(axis=(-3, -2)) / np.maximum(pairs, 1)
    return mean_where(won, pairs > 0)
