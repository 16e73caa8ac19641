"""The figures of runs; those that have nothing to show say what would fill them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from canal_mpi.interfaces import Array
from canal_mpi.report import drawing as d
from canal_mpi.report.drawing import FEW, SERIES, Figure, bounded
from canal_mpi.results import measures as m
from canal_mpi.results.compare import (
    Comparison,
    Group,
    Measured,
    busy_seconds,
    costs,
    kind_of,
    mix,
)
from canal_mpi.results.measures import Scale
from canal_mpi.results.reader import Run
from canal_mpi.results.store import TIME_PARTS
from canal_mpi.results.summary import CORE, seconds_by_part

TONES = (*(SERIES[k] for k in (0, 2, 4, 3, 1, 6)), d.MUTED, SERIES[7])
PARTS = dict(zip((*TIME_PARTS, CORE, "other"), TONES, strict=True))  # what time goes to, coloured
EVALUATE = "it needs evaluations: --set evaluation.episodes=30"
KEPT_NEEDS = "it needs scores right after tasks and at the end: --set evaluation.tasks=after"
TWO_ROUNDS = "it needs at least two rounds"
TRANSFER_NEEDS = "it needs scores of tasks before they are learnt: --set evaluation.tasks=all"


def score_name(scale: Scale) -> str:
    """What an axis of normalised scores is called."""
    return "normalised score" if scale.name == "range" else f"score ({scale.name})"


# ── one run ────────────────────────────────────────────────────────────────────────────────────


def curve(measured: Measured, i: int) -> Figure:
    """Scores on a task round by round: evaluations, and training inside the round it was learnt."""
    run, task, table = measured.run, measured.run.tasks[i], measured.run["tasks"]
    figure = Figure(f"curve-{i}", task, height=2.0, xlabel="round", ylabel="score")
    for row, agent in enumerate(run.agents):
        style, seen = d.series_style(row), bounded(measured.raw[row, : measured.P.shape[1], i])
        known = np.flatnonzero(np.isfinite(seen))
        known = known[: None if len(known) > 1 else 0]  # the end alone is told by the large mark
        dots = {"marker": "o", "markersize": 2.4}
        dots |= {"linewidth": 1.0} if len(known) > 2 else {"linestyle": "none"}
        figure.axes.plot(known, seen[known], **style | dots)
        label = f"agent {agent}" if len(run.agents) <= FEW else ""
        figure.axes.plot([], [], "o", color=style["color"], ms=4, label=label)
        for k in np.flatnonzero((table["agent"] == agent) & (table["task"] == task)):
            x, y = _episodes(run, agent, int(table["round"][k]))
            if len(x) > 2:  # two episodes are no curve
                figure.axes.plot(x, y, color=style["color"], lw=1.4, alpha=0.5)
            ends = bounded([table["score"][k], *y[::-1]])
            last = next((value for value in ends if np.isfinite(value)), np.nan)
            mark = {"marker": "D" if table["donors"][k] else "o"}
            size = {"markersize": max(7.5 - row, 4.0), "clip_on": False}
            figure.axes.plot(int(table["round"][k]), last, **style | mark | size)
    if not np.isfinite(figure.axes.dataLim.intervaly).all():
        figure.needs = "nobody has learnt it or was evaluated on it yet"
    if measured.scale.name == "HNS":  # random play and, where agents come near, a human
        for name, value in (("random", measured.scale.zero[i]), ("human", measured.scale.one[i])):
            if name == "random" or value <= 1.3 * figure.axes.dataLim.y1:
                figure.axes.axhline(value, color=d.MUTED, lw=0.9, ls=":")
                where = {"ha": "right", "va": "bottom", "fontsize": 6, "color": d.MUTED}
                figure.axes.text(run.rounds + 0.2, value, name, **where)
    figure.fit()
    figure.axes.set_xlim(-0.15, run.rounds + 0.25)
    ticks = np.linspace(0, run.rounds, min(run.rounds, 10) + 1).astype(int)
    figure.axes.set_xticks(np.unique(ticks))
    return figure


def _episodes(run: Run, agent: int, round_: int) -> tuple[Array, Array]:
    """Running means of ten training episodes of an agent's round, spread over that round."""
    table = run["episodes"]
    own = (table["agent"] == agent) & (table["round"] == round_)
    steps, returns = table["step"][own], np.nan_to_num(bounded(table["return"][own]))
    ends = np.arange(1, len(steps) + 1)
    total, starts = np.cumsum([0.0, *returns]), np.maximum(ends - 10, 0)
    place = round_ - 1 + steps / max(steps.max(initial=1), 1)
    return place, (total[ends] - total[starts]) / (ends - starts)


def changes(before: Array, after: Array) -> tuple[Array, Array, Array, Array]:
    """[task] means over agents of two scores [agent, task], of the tasks that have both; how sure
    the change is (1: higher, -1: lower by more than its standard error); and which tasks these are.
    """
    both = ~np.isnan(before) & ~np.isnan(after)
    tasks = np.flatnonzero(both.any(axis=0))
    pairs = [[x[both[:, i], i].mean() for x in (before, after)] for i in tasks]
    first, last = np.array(pairs).reshape(-1, 2).T
    each = [(after - before)[both[:, i], i] for i in tasks]
    sure = [int(m.clearly_above(one)) - int(m.clearly_above(-one)) for one in each]
    return first, last, np.array(sure, dtype=int), tasks


def kept_scores(measured: Measured) -> tuple[Array, Array, Array, Array]:
    """`changes` from right after tasks to the end; nothing came after those of the last round."""
    after = m.just_after(measured.P, measured.when)
    earlier = measured.when < measured.rounds_done
    return changes(np.where(earlier, after, np.nan), measured.P[:, -1, :])


def kept_needs(measured: Measured) -> str:
    """What is missing where no task has both scores."""
    return KEPT_NEEDS if measured.rounds_done > 1 else TWO_ROUNDS


def forgetting(measured: Measured) -> Figure:
    """For each task: the mean score right after it was learnt, and at the end."""
    first, last, sure, tasks = kept_scores(measured)
    words = "Tasks learnt before the last round, means over agents. Green: higher at the end, "
    words += "orange: lower, by more than the standard error; grey: no clear change."
    needs, name = "" if len(tasks) else kept_needs(measured), score_name(measured.scale)
    figure = Figure("forgetting", "What was kept until the end", words, needs=needs, xlabel=name)
    for k, (then, now) in enumerate(zip(bounded(first), bounded(last), strict=True)):
        tone, label = (d.MUTED, d.GOOD, d.BAD)[sure[k]], "" if k else "right after"
        figure.axes.plot([then, now], [k, k], color=tone, lw=2.2, alpha=0.6)
        figure.axes.plot(then, k, "o", color=tone, mfc="none", mew=1, ms=6.5, label=label)
        figure.axes.plot(now, k, "o", color=tone, ms=4, label="" if k else "at the end")
    figure.name_rows([measured.run.tasks[i] for i in tasks])
    figure.spread()
    return figure


def zero_shot(measured: Measured) -> tuple[str, list[Figure]]:
    """What learning other tasks did to tasks still to come, in a sentence, or what that needs."""
    change = measured.measures()["transfer/zero_shot"].single
    if np.isnan(change):
        needs = TRANSFER_NEEDS if measured.rounds_done > 1 else TWO_ROUNDS
        return "", [Figure("transfer", "Zero-shot transfer", needs=needs)]
    words = "Zero-shot transfer: the mean score on tasks still to come changed by "
    words += f"{'+' * (change >= 5e-4)}{d.number(change)} ({measured.scale.name}) a round."
    return words, []


def time_bars(run: Run) -> Figure:
    """A bar for every agent: what it spent its time on."""
    parts = seconds_by_part(run["tasks"], run.agents)
    spent = np.array([parts[name] for name in PARTS]).T  # [agent, part]
    words = "Start-up is left out; waiting includes that for run.h5 after a round."
    needs, name = "" if spent.sum() else "no task is finished yet", "seconds inside tasks"
    figure = Figure("time", "Where the time went", words, needs=needs, xlabel=name)
    starts, rows = np.cumsum(spent, axis=1) - spent, range(len(spent))
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": d.CARD, "fontsize": 7}
    for k, (name, colour) in enumerate(PARTS.items()):
        if not spent[:, k].any():
            continue
        figure.axes.barh(rows, spent[:, k], 0.8, starts[:, k], color=colour, label=name)
        for row in np.flatnonzero(spent[:, k] > 0.11 * spent.sum(axis=1).max()):
            place, share = starts[row, k] + spent[row, k] / 2, spent[row, k] / spent[row].sum()
            figure.axes.text(place, row, f"{100 * share:.0f} %", **style)
    figure.name_rows([f"agent {agent}" for agent in run.agents], 0.24)
    figure.axes.grid(False, axis="y")
    return figure


# ── several runs ───────────────────────────────────────────────────────────────────────────────


def progress(comparison: Comparison) -> Iterator[Figure]:
    """Mean score over agents and tasks against the steps of all agents, and against time."""
    found = [group.progress(comparison.whole) for group in comparison.groups]
    known = [k for k, (_, scores) in enumerate(found) if not np.isnan(scores).any()]
    what = "all tasks" if comparison.whole else "tasks right after learning, others count as 0"
    words = f"Means over agents and {what}; bands: 95 %, bootstrap over seeds."
    for key, title, label in (
        ("steps", "Score against steps", "steps of all agents"),
        ("time", "Score against time", "seconds, slowest agent, measuring left out"),
    ):
        figure = Figure(f"progress-{key}", title, words, needs=EVALUATE * (not known))
        figure.axes.set(xlabel=label, ylabel="mean score")
        for k in known:
            (steps, scores), group = found[k], comparison.groups[k]
            x = steps if key == "steps" else _seconds_after(group, len(steps))
            figure.curve(k, x, m.bootstrap(lambda y: y.mean(axis=-2), scores), group.label)
        figure.fit()
        figure.axes.set_xlim(left=0)
        yield figure


def _seconds_after(group: Group, rounds: int) -> Array:
    """[after_round]: seconds until the slowest agent was done with each round, mean over runs."""
    found = []
    for run in (measured.run for measured in group.runs):
        table, spent = run["tasks"], np.zeros((max(run.agents) + 1, run.rounds + 1))
        np.add.at(spent, (table["agent"], table["round"]), busy_seconds(run))
        found.append(np.cumsum(spent, axis=1).max(axis=0)[:rounds])
    return np.asarray(np.mean(found, axis=0))


def task_scores(comparison: Comparison) -> Figure:
    """For each task: the mean score at the end, of every group, with its 95 % interval."""
    groups, none = comparison.groups, all(np.isnan(run.final).all() for run in comparison.runs)
    words = "Means over agents and seeds with 95 % intervals, bootstrap over seeds."
    figure = Figure("scores", "Scores on each task at the end", words, needs=EVALUATE * none)
    figure.axes.set_xlabel(score_name(comparison.scale))
    for k, group in enumerate(groups):
        means = np.array([[m.mean(column) for column in run.final.T] for run in group.runs])
        found = [m.bootstrap(lambda x: x.mean(axis=-1), column) for column in means.T]
        figure.intervals(comparison.tasks, found, k, len(groups), group.label)
    figure.spread()
    return figure


class Mix:
    """What runs on one mix of hosts, with one clock, cost and reached: means over those runs."""

    def __init__(self, hosts: str, clock: str, runs: Sequence[Measured]) -> None:
        waited: dict[str, Array] = {}  # seconds waited for agents, for a core, and in all, by kind
        for run in (measured.run for measured in runs):
            tasks, agents, busy = run["tasks"], run["agents"], busy_seconds(run)
            columns = np.nan_to_num([tasks["wait_seconds"], tasks["core_seconds"], busy])
            for agent, host in zip(agents["agent"], agents["host"], strict=True):
                mine = columns[:, tasks["agent"] == agent].sum(axis=1)
                waited[kind_of(str(host))] = waited.get(kind_of(str(host)), np.zeros(3)) + mine
        _, core, total = sum(waited.values(), np.zeros(3))
        spent = [costs(measured.run) for measured in runs]
        self.hosts, self.clock = hosts, clock  # rounds or free
        self.runs, self.agents = len(runs), len(runs[0].run.agents)
        self.wall, self.steps = (m.mean([x[name] for x in spent]) for name in ("seconds", "steps"))
        # % of its time that each kind of host waits for others, and that all wait for a core
        self.waits = {kind: float(100 * w / (own or 1)) for kind, (w, _, own) in waited.items()}
        self.core = float(100 * core / (total or 1))
        self.cpu = m.mean([measured.run["tasks"]["cpu_seconds"].sum() for measured in runs])
        self.score = m.mean([measured.final for measured in runs])  # normalised, at the end

    def __str__(self) -> str:
        """Its hosts and its clock."""
        return f"{self.hosts}, {self.clock}"

    @property
    def waits_told(self) -> str:
        """Which kind of host waits how much."""
        return ", ".join(f"{kind} {part:.0f} %" for kind, part in self.waits.items())


def mixes(comparison: Comparison) -> list[Mix]:
    """The mixes of hosts of a comparison, by clock; none where all runs had the same hosts."""
    found: dict[tuple[str, str], list[Measured]] = {}
    machines = set()
    for measured in comparison.runs:
        hosts = [str(host) for host in measured.run["agents"]["host"]]
        machines.add(frozenset(hosts))
        clock = str(measured.run.setting("share.exchange", "rounds"))
        found.setdefault((mix(hosts), clock), []).append(measured)
    return [Mix(*kind, runs) for kind, runs in found.items()] if len(machines) > 1 else []


def mix_bars(found: Sequence[Mix]) -> Iterator[Figure]:
    """Wall time, waiting, CPU seconds and score of every mix of hosts, by clock."""
    clocks = sorted({one.clock for one in found}, reverse=True)  # rounds, free
    waiting = {
        (f"{kind} of {one.hosts}" if len(one.waits) > 1 else one.hosts, one.clock): part
        for one in found
        for kind, part in one.waits.items()
    }
    for key, title, label in (
        ("wall", "Wall time", "seconds, slowest agent, measuring left out"),
        ("waiting", "Who waits for others", "% of its time, measuring left out"),
        ("cpu", "CPU time", "CPU seconds of all agents"),
        ("score", "Score", "mean score at the end"),
    ):
        if not found:
            return
        values = {(one.hosts, one.clock): getattr(one, key, 0.0) for one in found}
        values = waiting if key == "waiting" else values
        none = not np.isfinite(list(values.values())).any()
        figure = Figure(f"mix-{key}", title, needs=EVALUATE * none, xlabel=label)
        figure.bars(values, clocks)
        yield figure
