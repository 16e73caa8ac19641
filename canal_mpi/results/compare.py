"""Several runs beside each other: the measures between runs, groups of equal jobs, and what one
group gains over another."""

from collections.abc import Callable, Sequence
from math import inf, isfinite, isnan, nan
from typing import Any

import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.interfaces import Array
from canal_mpi.results import measures as m
from canal_mpi.results.measures import Interval, Scale, instant_reward, mean, ratio
from canal_mpi.results.reader import Run

TOLD = (0.5, 0.8, 1.0)  # the p of TA(p)
FEWER = "× fewer steps to {:.0f} % of the score {}"  # TA(p) in words
NAMES = {"seed", "name", "preset", "report"}  # settings that don't make another experiment
POINTS = 101  # of a learning curve


class Measured(m.Evaluations):
    """A run with its normalised evaluations and learning curves."""

    def __init__(self, run: Run, scale: Scale | None = None) -> None:
        super().__init__(run.agents, run.tasks, run["tasks"], run.score, scale or scale_for([run]))
        self.run, end = run, self.P[:, -1]
        # [agent, task]: scores at the end; of a run that has none yet, right after tasks.
        self.final = self.learnt if np.isnan(end).all() else end

    def curve(self, agent: int, task: int) -> Array:
        """Scores before, inside and after a task, at evenly spaced own steps up to its budget."""
        run, first = self.run, int(self.when[agent, task]) - 1
        steps = [np.zeros(1)]
        scores = [np.array([nan if first < 0 else self.P[agent, first, task]])]
        for table in (run["curve"], run["tasks"]):
            here = (table["agent"] == run.agents[agent]) & (table["task"] == run.tasks[task])
            steps.append(table["env_steps"][here])
            scores.append(self.scale(table["score"][here], task))
        at, found = np.concatenate(steps), np.concatenate(scores)
        known = ~np.isnan(found)
        return resampled(at[known], found[known], int(run.setting("train.steps", 1)))

    def reached(self) -> Array:
        """[after_round]: mean over agents and rounds of the scores right after tasks so far."""
        rounds = np.arange(self.rounds_done + 1)[:, None, None]
        done = (self.when > 0) & (self.when <= rounds)  # [after_round, agent, task]
        total = np.where(done, self.learnt, 0).sum(axis=(1, 2))
        return np.asarray(total / (len(self.when) * self.run.rounds))


def scale_for(runs: Sequence[Run], experts: Sequence[Run] = ()) -> Scale:
    """By single-task experts where they are given, else the natural one of these runs."""
    tasks = runs[0].tasks
    if experts:
        rows = [run["tasks"] for run in experts]
        own = [[mean(t["score"][t["task"] == task]) for t in rows] for task in tasks]
        best = np.array([mean(scores) for scores in own])
        about = "part of the score of a single-task expert (one agent, one task, no sharing)"
        return Scale("expert", about, np.zeros(len(tasks)), np.where(best > 0, best, nan))
    max_steps = min(int(run.setting("evaluation.max_steps", 0)) for run in runs)
    return m.natural_scale(tasks, [run.score for run in runs], max_steps)


class Group:
    """Runs of the same job, different only in their seed."""

    def __init__(self, label: str, runs: list[Measured]) -> None:
        self.label, self.runs = label, runs
        self.agents = len(runs[0].run.agents)  # of each run
        self.shares = bool(runs[0].run.adjacency.any())  # whether they receive each other's offers
        self.final = np.concatenate([run.final for run in runs])  # [agent of any run, task] scores

    def progress(self, whole: bool) -> tuple[Array, Array]:
        """Steps of all agents, and [run, after_round] mean scores over agents and tasks.

        Unless all evaluations are there, by those right after tasks: others count as random play.
        """
        score = (lambda run: run.P.mean(axis=(0, 2))) if whole else Measured.reached
        return self._by_round(np.sum, score)

    def clock(self) -> tuple[Array, Array]:
        """Steps of the busiest agent, and ICR, averaged over the runs."""
        steps, scores = self._by_round(np.max, lambda run: instant_reward(run.P))
        return steps, scores.mean(axis=0)

    def _by_round(
        self, over_agents: Callable[..., Array], score: Callable[[Measured], Array]
    ) -> tuple[Array, Array]:
        rounds = min(run.P.shape[1] for run in self.runs)
        steps = [over_agents(run.steps[:, :rounds], axis=0) for run in self.runs]
        return np.mean(steps, axis=0), np.stack([score(run)[:rounds] for run in self.runs])

    def mean_curve(self, task: int) -> Array:
        """The learning curve of a task, averaged over all agents."""
        curves = [run.curve(agent, task) for run in self.runs for agent in range(self.agents)]
        known = [curve for curve in curves if not np.isnan(curve).any()]
        return np.mean(known, axis=0) if known else np.full(POINTS, nan)


class Comparison:
    """Groups on one scale; `baseline` doesn't share, `single` is one agent, `experts` one task."""

    def __init__(self, groups: list[Group], scale: Scale, experts: Sequence[Measured] = ()) -> None:
        self.groups, self.scale, self.experts = groups, scale, experts
        self.runs = [run for group in groups for run in group.runs]
        self.tasks = self.runs[0].run.tasks  # of all runs
        self.whole = all(run.whole for run in self.runs)  # whether all evaluations are there
        several = groups if len(groups) > 1 else []
        alone = (group for group in several if group.agents == 1)
        apart = (group for group in several if group.agents > 1 and not group.shares)
        self.single, self.baseline = next(alone, None), next(apart, None)

    def versus(self, group: Group) -> dict[str, float]:
        """What a group gains over the baseline, the single agent and the experts."""
        found: dict[str, float] = {}
        if self.baseline is not None and group is not self.baseline:
            found |= self._versus_baseline(group, self.baseline)
        if self.single is not None and group is not self.single:
            instant, total = learning_advantage(group.runs[0].P, self.single.runs[0].P)
            found |= {"ILA": float(instant[-1]), "TLA": float(total[-1])}
            whole = all(run.whole for run in (*group.runs, *self.single.runs))
            alone = self.single.clock()
            top = alone[1].max() if whole else nan
            found |= _fewer_steps(group.clock(), alone, top, "of one agent")
        pairs = [
            (group.mean_curve(i), expert.curve(0, expert.run.tasks.index(task)))
            for i, task in enumerate(self.tasks)
            for expert in self.experts
            if task in expert.run.tasks
        ]
        relative = {"relative performance (RP)": mean([relative_performance(*p) for p in pairs])}
        return found | (relative if self.experts else {})

    def _versus_baseline(self, group: Group, base: Group) -> dict[str, float]:
        """TA_mean(p) counts steps of all agents to p of what the baseline reaches."""
        areas = [
            np.array([area(one.mean_curve(i)) for i in range(len(self.tasks))])
            for one in (group, base)
        ]
        (steps, ours), (base_steps, theirs) = (one.progress(self.whole) for one in (group, base))
        with_, without = (steps, ours.mean(axis=0)), (base_steps, theirs.mean(axis=0))
        return {
            "forward transfer": mean(forward_transfer(*areas)),
            "probability of improvement": improvement(group.final, base.final),
            **_fewer_steps(with_, without, without[1][-1], "without sharing"),
        }


def _fewer_steps(
    ours: tuple[Array, Array], theirs: tuple[Array, Array], top: float, whose: str
) -> dict[str, float]:
    """TA(p) of steps and scores, by parts of the highest score of the others."""
    return {FEWER.format(100 * p, whose): time_advantage(p * top, *ours, *theirs) for p in TOLD}


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
    scale, scaled = scale_for(runs, experts), []
    for run in experts:
        kept = [tasks.index(task) for task in run.tasks if task in tasks]
        part = Scale(scale.name, scale.about, scale.zero[kept], scale.one[kept])
        scaled.append(Measured(run, part))
    return Comparison(_groups([Measured(run, scale) for run in runs]), scale, scaled)


def _groups(runs: list[Measured]) -> list[Group]:
    """Runs with the same settings and agents; they are named by the settings that differ."""
    found: dict[str, list[Measured]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for one in runs:
        settings = {key: value for key, value in one.run.job.items() if key not in NAMES}
        settings |= {"agents": len(one.run.agents)}
        flat[key := repr(sorted(settings.items()))] = settings
        found.setdefault(key, []).append(one)
    every = {name for own in flat.values() for name in own}
    odd = sorted(k for k in every if len({repr(own.get(k)) for own in flat.values()}) > 1)
    labels = [", ".join(_word(key, own.get(key)) for key in odd[:2]) for own in flat.values()]
    if not 1 <= len(odd) <= 2 or len(set(labels)) < len(labels):
        labels = [members[0].run.name for members in found.values()]
    return [Group(label, members) for label, members in zip(labels, found.values(), strict=True)]


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


# ── what runs cost, and how it is told ───────────────────────────────────────────────────────────


def busy_seconds(run: Run) -> Array:
    """The seconds of each row of /tasks, measuring left out."""
    return run["tasks"]["seconds"] - run["tasks"]["evaluate_seconds"]


def costs(run: Run) -> dict[str, float]:
    """What a run spent; measuring is left out of `steps`, `seconds` and `waiting`."""
    tasks = run["tasks"]
    found = {
        "training": float(tasks["env_steps"].sum()),
        "decisions": float(tasks["probe_steps"].sum()),
        "evaluation": float(tasks["evaluation_steps"].sum()),
    }
    busy = busy_seconds(run)
    each = [float(busy[tasks["agent"] == agent].sum()) for agent in run.agents]
    waiting = float(tasks["wait_seconds"].sum()) / max(sum(each), 1e-9)
    steps = found["training"] + found["decisions"]
    return found | {"steps": steps, "seconds": max(each), "waiting": waiting}


def times(value: Interval, more: str = "", less: str = "") -> str:
    """A ratio with its interval: `2.8 × fewer steps (2.1 to 3.5)`; `less` is told below 1."""
    if less and 0 < value[0] < 1:
        middle, high, low = ratio(1, np.array(value))
        return times((middle, low, np.where(np.isnan(high), inf, high)), less)
    if more and f"{value[0]:.1f}" == "1.0":
        more = f"the {more.partition(' ')[2]}"  # neither fewer nor more
    return _worded(value, 1, f" × {more}".rstrip())


def percent(value: Interval, sign: str = "") -> str:
    """A part with its interval, in percent; `+` for differences."""
    return _worded(value, 100, " %", sign)


def _worded(value: Interval, factor: float, unit: str, sign: str = "") -> str:
    middle, low, high = (
        f"{factor * x:{sign}.1f}".replace("-", "−") if isfinite(x) else "∞" for x in value
    )
    if isnan(value[0]):
        return "not known"
    return f"{middle}{unit}" if isnan(value[1]) else f"{middle}{unit} ({low} to {high})"


# ── functions of arrays ────────────────────────────────────────────────────────────────────────


def resampled(steps: Array, scores: Array, budget: int) -> Array:
    """A learning curve at evenly spaced steps from 0 to the budget; its ends are held."""
    if not len(steps):
        return np.full(POINTS, nan)
    order = np.argsort(steps, kind="stable")
    return np.interp(np.linspace(0, budget, POINTS), steps[order], scores[order])


def area(curve: Array) -> float:
    """The mean height of an evenly spaced curve (trapezoids)."""
    return float((curve[1:] + curve[:-1]).mean() / 2)


def forward_transfer(area_: Array, baseline: Array) -> Array:
    """Of each task: (AUC - AUC of the baseline) / (1 - AUC of the baseline), all in [0, 1]."""
    ours, base = np.clip(area_, 0, 1), np.clip(baseline, 0, 1)
    return np.asarray(ratio(ours - base, 1 - base))


def relative_performance(curve: Array, expert: Array) -> float:
    """l2metrics RP: the sum of the curve over the sum of the expert's, over the steps of both."""
    both = min(len(curve), len(expert))
    return float(ratio(np.nansum(curve[:both]), np.nansum(expert[:both])))


def learning_advantage(P: Array, single: Array) -> tuple[Array, Array]:
    """ILA(t) and TLA(t) of ShELL: ICR and TPOT of N agents over those of a single one."""
    both = min(P.shape[1], single.shape[1])
    ours, theirs = instant_reward(P)[:both], instant_reward(single)[:both]
    return ratio(ours, theirs), ratio(np.cumsum(ours), np.cumsum(theirs))


def steps_to(level: float, steps: Array, scores: Array) -> float:
    """Steps at which the scores first reach the level, between evaluations in a straight line."""
    reached = np.flatnonzero(scores >= level)
    if not len(reached):
        return nan
    near = slice(max(reached[0] - 1, 0), reached[0] + 1)
    return float(np.interp(level, scores[near], steps[near]))


def time_advantage(
    level: float, steps: Array, scores: Array, base_steps: Array, base_scores: Array
) -> float:
    """TA of ShELL: steps of the baseline to a level / our steps to it; NaN for none above 0."""
    if not level > 0:
        return nan
    return float(ratio(steps_to(level, base_steps, base_scores), steps_to(level, steps, scores)))


def improvement(x: Array, y: Array) -> Any:
    """P(X > Y) for scores [run, task]: over tasks, how often a run of X beats one of Y."""
    a, b = x[..., :, None, :], y[..., None, :, :]
    wins = (a > b) + (a == b) / 2
    known = ~np.isnan(a) & ~np.isnan(b)
    pairs = known.sum(axis=(-3, -2))
    won = np.where(known, wins, 0).sum(axis=(-3, -2)) / np.maximum(pairs, 1)
    return m.mean_where(won, pairs > 0)


def mean_score(scores: Array) -> Any:
    """The mean over [seed, task]."""
    return scores.mean(axis=(-2, -1))
