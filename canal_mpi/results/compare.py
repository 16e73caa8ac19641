"""Several runs beside each other: groups of equal jobs, and what one group gains over another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.interfaces import Array
from canal_mpi.results import measures as m
from canal_mpi.results.measures import Measured, Scale, scale_for
from canal_mpi.results.reader import Run

PARTS = tuple(k / 20 for k in range(2, 21))  # the p of TA(p) in figures
TOLD = (0.5, 0.8, 1.0)  # and in tables
NAMES = {"seed", "name", "preset"}  # settings that don't make another experiment


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
    def learnt(self) -> Array:
        """[agent of any run, task]: scores right after each task."""
        return np.concatenate([run.learnt for run in self.runs])

    @property
    def final(self) -> Array:
        """[agent of any run, task]: scores at the end."""
        return np.concatenate([run.P[:, -1, :] for run in self.runs])

    @property
    def whole(self) -> bool:
        """Whether every run has all evaluations."""
        return all(run.whole for run in self.runs)

    def progress(self) -> tuple[Array, Array]:
        """Steps of all agents, and [agent of any run, after_round] mean scores over tasks."""
        rounds = min(run.P.shape[1] for run in self.runs)
        steps = np.mean([run.steps[:, :rounds].sum(axis=0) for run in self.runs], axis=0)
        return steps, np.concatenate([run.P[:, :rounds].mean(axis=2) for run in self.runs])

    def clock(self) -> tuple[Array, Array]:
        """Steps of the busiest agent, and ICR, averaged over the runs."""
        rounds = min(run.P.shape[1] for run in self.runs)
        steps = np.mean([run.steps[:, :rounds].max(axis=0) for run in self.runs], axis=0)
        return steps, np.mean([m.instant_reward(run.P[:, :rounds]) for run in self.runs], axis=0)

    def _curves(self, task: int) -> list[Array]:
        return [run.even_curve(a, task) for run in self.runs for a in range(self.agents)]

    def areas(self) -> Array:
        """[task]: mean height of the learning curves of all agents."""
        tasks = range(len(self.runs[0].run.tasks))
        return np.array([m.mean([m.area(curve) for curve in self._curves(i)]) for i in tasks])

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
    def tasks(self) -> list[str]:
        """The tasks of all runs."""
        return self.groups[0].runs[0].run.tasks

    def versus(self, group: Group) -> dict[str, float]:
        """What a group gains over the baseline, the single agent and the experts."""
        found: dict[str, float] = {}
        if self.baseline is not None and group is not self.baseline:
            found |= self._versus_baseline(group, self.baseline)
        if self.single is not None and group is not self.single:
            found |= self._versus_single(group, self.single)
        return found | (self._versus_experts(group) if self.experts else {})

    def _versus_baseline(self, group: Group, base: Group) -> dict[str, float]:
        low, high = m.interval(m.improvement, group.learnt, base.learnt)
        return {
            "forward transfer": m.mean(m.forward_transfer(group.areas(), base.areas())),
            "probability of improvement": m.improvement(group.learnt, base.learnt),
            "probability of improvement, low": low,
            "probability of improvement, high": high,
            **{f"TA_mean({part:.0%})": self.advantage(group, part) for part in TOLD},
        }

    def advantage(self, group: Group, part: float) -> float:
        """TA_mean(p) of a group over the baseline."""
        base = self.baseline
        if base is None or not (group.whole and base.whole):
            return float("nan")
        (steps, scores), (base_steps, base_scores) = group.progress(), base.progress()
        ours, theirs = scores.mean(axis=0), base_scores.mean(axis=0)
        return m.mean_time_advantage(part, steps, ours, base_steps, theirs)

    def _versus_single(self, group: Group, single: Group) -> dict[str, float]:
        instant, total = m.learning_advantage(group.runs[0].P, single.runs[0].P)
        found = {"ILA": float(instant[-1]), "TLA": float(total[-1])}
        whole = group.whole and single.whole
        clocks = (*group.clock(), *single.clock()) if whole else None
        for part in TOLD:
            found[f"TA({part:.0%})"] = m.time_advantage(part, *clocks) if clocks else float("nan")
        return found

    def _versus_experts(self, group: Group) -> dict[str, float]:
        pairs = [
            (group.mean_curve(i), expert.even_curve(0, expert.run.tasks.index(task)))
            for i, task in enumerate(self.tasks)
            for expert in self.experts
            if task in expert.run.tasks
        ]
        return {
            "relative performance (RP)": m.mean([m.relative_performance(*pair) for pair in pairs]),
            "sample efficiency (SE)": m.mean([m.sample_efficiency(*pair) for pair in pairs]),
        }


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
    """Emulated hosts in few words, those of a kind counted: `4 nano, 1 xavier`."""
    kinds = [str(host).partition("@")[0].rstrip("0123456789").rstrip("-") for host in emulated]
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    return ", ".join(counts) or "not emulated"


def _word(key: str, value: Any) -> str:
    if key == "agents":
        return f"{value} agent{'s' * (value != 1)}"
    if key == "emulate":
        return mix(value or [])
    if (key, value) == ("share.policy", "none"):
        return "no sharing"
    name = "share" if key == "share.policy" else key.rpartition(".")[2]
    return f"{name} {value}"
