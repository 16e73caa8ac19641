"""The figures of runs; those that have nothing to show say what would fill them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from canal_mpi.interfaces import Array
from canal_mpi.report import drawing as d
from canal_mpi.report.drawing import COLUMN, FEW, SERIES, Figure, LeftOut, bounded, look, plain
from canal_mpi.report.tables import PARTS, Mix, between, number, seconds, wall_seconds
from canal_mpi.results import measures as m
from canal_mpi.results.compare import PARTS as LEVELS
from canal_mpi.results.compare import Comparison, Measured, rows_of_runs
from canal_mpi.results.measures import Scale
from canal_mpi.results.reader import Run

Shown = Figure | LeftOut
PART_COLOURS = [SERIES[k] for k in (0, 2, 4, 3, 1, 6, 7)]
EVALUATE_ALL = "it needs evaluations on all tasks: --set evaluation.tasks=all"
EVALUATE = "it needs evaluations: --set evaluation.episodes=30"
DRAWS = 400


def score_name(scale: Scale) -> str:
    """What an axis of normalised scores is called."""
    return "normalised score" if scale.name == "range" else f"score ({scale.name})"


# ── one run ────────────────────────────────────────────────────────────────────────────────────


def timeline(run: Run) -> Figure:
    """Every agent's tasks in order, coloured by the agent whose lesson was used."""
    table, agents = run["tasks"], run.agents
    rows = zip(table["agent"], table["round"], table["task"], table["donors"], strict=True)
    done = {(int(agent), int(round_)): (str(task), str(d)) for agent, round_, task, d in rows}
    words = "Grey: played from scratch; pale: still to come. A colour: from a lesson of that agent."
    title, width = "Who learnt what, when, from whom", max(COLUMN, 0.4 + 0.36 * len(agents))
    figure = Figure("timeline", title, words, 0.5 + 0.3 * run.rounds, width, ylabel="round")
    room, cells = round(16 * (width - 0.4) / len(agents)), []
    for k, agent in enumerate(agents):
        for r in range(run.rounds):
            task, donors = done.get((agent, r + 1), (str(run.order[k, r]), ""))
            first = donors.split(",")[0]
            known = first.isdecimal() and int(first) in agents
            colour = SERIES[agents.index(int(first)) % 8] if known else d.PLAYED
            text = plain(task, room) + (f"\n← {plain(donors, room - 2)}" if donors else "")
            cells.append((r, k, colour, 0.5 if (agent, r + 1) in done else 0.12, text))
    rounds = [str(r + 1) for r in range(run.rounds)]
    figure.cells(rounds, [f"agent {agent}" for agent in agents], cells)
    return figure


def topology(run: Run) -> Shown:
    """Who hears whom."""
    title, sends = "Who hears whom", run.adjacency.astype(bool)
    if not sends.any():
        return LeftOut(title, "agents did not share; --share exact makes them")
    words = f"{sends.sum()} directed edges; an arrow shows who sends to whom, a line both ways."
    figure, count = Figure("topology", title, words, 2.4), len(run.agents)
    turn = 2 * np.pi * np.arange(count) / count
    x, y = np.sin(turn), np.cos(turn)
    figure.axes.set(aspect="equal", xlim=(-1.3, 1.3), ylim=(-1.2, 1.2))
    figure.axes.set_axis_off()
    for a, b in zip(*np.nonzero(np.triu(sends & sends.T)), strict=True):
        figure.axes.plot(x[[a, b]], y[[a, b]], color=d.MUTED, lw=1, alpha=0.6, zorder=1)
    a, b = np.nonzero(sends & ~sends.T)
    part = 1 - 0.16 / np.maximum(np.hypot(x[b] - x[a], y[b] - y[a]), 0.2)  # not under the agent
    style: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.008}
    figure.axes.quiver(
        x[a], y[a], part * (x[b] - x[a]), part * (y[b] - y[a]), color=d.MUTED, **style
    )
    colours = [SERIES[k % 8] for k in range(count)]
    figure.axes.scatter(x, y, 260 if count <= 12 else 80, colours, zorder=2)
    for k, agent in enumerate(run.agents):
        figure.axes.text(x[k], y[k], agent, ha="center", va="center_baseline", color=d.CARD)
    return figure


def between_agents(run: Run, key: str, title: str, values: Array, words: str) -> Shown:
    """Something that went from agents (rows) to agents (columns)."""
    if not values.sum():
        return LeftOut(title, "nothing was sent")
    shown = np.where((run.adjacency > 0) | (values > 0), values, np.nan)
    rows, columns = ([f"{word} {agent}" for agent in run.agents] for word in ("agent", "to"))
    figure = Figure(key, title, words, 0.5 + 0.22 * len(rows))
    return d.heat(figure, shown, rows, columns)


def lessons(run: Run) -> Shown:
    """How many lessons were kept, from donor to student."""
    table = run["exchange"]
    kept = (table["kind"] == "lesson") & table["kept"].astype(bool)
    counts = between(run, kept, "donor", np.ones(len(kept)))
    words = f"{counts.sum():.0f} lessons were kept. Rows: who played. Columns: who learnt from it."
    return between_agents(run, "flow", "Lessons from donor to student", counts, words)


def megabytes(run: Run) -> Shown:
    """How many bytes crossed each edge."""
    table = run["exchange"]
    crossed = np.isin(table["kind"], ["transfer", "swap"])
    moved = between(run, crossed, "from", table["bytes"] / 1e6)
    raw = float(table["raw_bytes"][np.isin(table["kind"], ["lesson", "drop"])].sum()) / 1e6
    words = f"{number(moved.sum())} MB on the wire, with networks; the rows of play unpacked: "
    return between_agents(run, "bytes", "MB on each edge", moved, f"{words}{number(raw)} MB.")


def curve(measured: Measured, i: int) -> Shown:
    """Scores on a task round by round: evaluations, and training inside the round it was learnt."""
    run, task, table = measured.run, measured.run.tasks[i], measured.run["tasks"]
    figure = Figure(f"curve-{i}", task, "", 2.0, xlabel="round", ylabel="score")
    for row, agent in enumerate(run.agents):
        style, seen = look(row), bounded(measured.raw[row, : measured.P.shape[1], i])
        known = np.flatnonzero(np.isfinite(seen))
        figure.axes.plot(known, seen[known], **style | {"linewidth": 1.0, "markersize": 2.4})
        for k in np.flatnonzero((table["agent"] == agent) & (table["task"] == task)):
            x, y = _episodes(run, agent, int(table["round"][k]))
            figure.axes.plot(x, y, color=style["color"], lw=1.4, alpha=0.5)
            ends = bounded([table["score"][k], *y[::-1]])
            last = next((value for value in ends if np.isfinite(value)), np.nan)
            mark = {"marker": "D" if table["donors"][k] else "o", "label": f"agent {agent}"}
            size = {"markersize": max(7.5 - row, 4.0)}
            figure.axes.plot(int(table["round"][k]), last, **style | mark | size)
    if not np.isfinite(figure.axes.dataLim.intervaly).all():
        return LeftOut(task, "nobody has learnt it or was evaluated on it yet")
    if measured.scale.name == "HNS":  # random play and, where agents come near, a human
        for name, value in (("random", measured.scale.zero[i]), ("human", measured.scale.one[i])):
            if name == "random" or value <= 1.3 * figure.axes.dataLim.y1:
                figure.axes.axhline(value, color=d.MUTED, lw=0.9, ls=":")
                figure.axes.text(-0.1, value, name, fontsize=6, color=d.MUTED, va="bottom")
    figure.fit()
    figure.axes.set_xlim(-0.15, run.rounds + 0.25)
    ticks = np.linspace(0, run.rounds, min(run.rounds, 10) + 1).astype(int)
    figure.axes.set_xticks(np.unique(ticks))
    if len(run.agents) <= FEW:
        figure.legend()
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


def heat_maps(measured: Measured) -> list[Shown]:
    """For each agent: its score on every task after every round; a frame where it learnt it."""
    run, rounds = measured.run, [str(t) for t in range(measured.P.shape[1])]
    if np.isfinite(measured.P).mean() < 0.5:
        return [LeftOut("Scores on every task after every round", EVALUATE_ALL)]
    found: list[Shown] = []
    for row, agent in enumerate(run.agents[: 2 * FEW]):
        framed = [(i, int(t)) for i, t in enumerate(measured.when[row]) if t]
        key, height = f"heat-{agent}", 0.5 + max(0.19 * len(run.tasks), 0.3)
        figure = Figure(key, f"Agent {agent}", "", height, xlabel="after round")
        found.append(d.heat(figure, measured.P[row].T, run.tasks, rounds, framed))
    return found


def forgetting(measured: Measured) -> Shown:
    """For each task: the mean score right after it was learnt, and at the end."""
    title, rounds = "What was kept until the end", measured.rounds_done
    words = "Tasks learnt before the last round, means over agents. Green: kept; orange: forgotten."
    after, end = m.just_after(measured.P, measured.when), measured.P[:, -1, :]
    later = ~np.isnan(after) & ~np.isnan(end) & (measured.when < rounds)
    tasks = np.flatnonzero(later.any(axis=0))
    if not len(tasks):
        return LeftOut(title, EVALUATE_ALL if rounds > 1 else "it needs at least two rounds")
    height, name = 0.6 + 0.19 * len(tasks), score_name(measured.scale)
    figure = Figure("forgetting", title, words, height, xlabel=name)
    pairs = bounded([[x[later[:, i], i].mean() for x in (after, end)] for i in tasks])
    for k, (first, last) in enumerate(pairs):
        tone, label = d.BAD if last < first else d.GOOD, "" if k else "right after"
        figure.axes.plot([first, last], [k, k], color=tone, lw=2.2, alpha=0.6)
        figure.axes.plot(first, k, "o", mfc="none", mec=tone, mew=1, ms=6.5, label=label)
        figure.axes.plot(last, k, "o", color=tone, ms=4, label="" if k else "at the end")
    figure.name_rows([measured.run.tasks[i] for i in tasks])
    figure.fit("x")
    figure.legend()
    return figure


def isolated(measured: Measured) -> Shown:
    """Mean over agents of what the j-th task did to the i-th: forgetting and transfer (CORA)."""
    title = "What one task did to another"
    words = (
        "Change of the score on an agent's i-th task (row) by learning its j-th (column): right of "
        "the diagonal forgetting, left of it zero-shot transfer. Blue: better, orange: worse."
    )
    drops, gains = m.isolated(measured.P, measured.when)
    change = np.where(np.isnan(gains), -drops, gains)
    known = ~np.isnan(change)
    if not known.any():
        return LeftOut(title, EVALUATE_ALL)
    total = np.where(known, change, 0).sum(axis=0)
    values = np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)
    names, columns = ([str(k + 1) for k in range(count)] for count in values.shape)
    height = 0.5 + 0.19 * len(names)
    return d.heat(
        Figure("isolated", title, words, height, xlabel="task learnt"), values, names, columns
    )


def time_bars(run: Run) -> Shown:
    """A bar for every agent: what it spent its time on."""
    spent, title, wall = seconds(run), "Where the time went", wall_seconds(run)
    if not spent.sum():
        return LeftOut(title, "no task is finished yet")
    words = "Start-up and the writing of results between rounds are left out."
    words += f" The run took {number(wall)} s." if wall == wall else ""
    figure = Figure("time", title, words, 0.6 + 0.24 * len(spent), xlabel="seconds inside tasks")
    starts, rows = np.cumsum(spent, axis=1) - spent, range(len(spent))
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": d.CARD, "fontsize": 7}
    for k, name in enumerate(PARTS):
        figure.axes.barh(rows, spent[:, k], 0.8, starts[:, k], color=PART_COLOURS[k], label=name)
        for row in np.flatnonzero(spent[:, k] > 0.11 * spent.sum(axis=1).max()):
            place, share = starts[row, k] + spent[row, k] / 2, spent[row, k] / spent[row].sum()
            figure.axes.text(place, row, f"{share:.0%}", **style)
    figure.name_rows([f"agent {agent}" for agent in run.agents])
    figure.axes.grid(False, axis="y")
    figure.legend()
    return figure


# ── several runs ───────────────────────────────────────────────────────────────────────────────


def band(scores: Array, agents: int) -> tuple[Array, Array]:
    """95 % interval of the mean over rows, for every column: runs are drawn, then their agents."""
    rng = np.random.Generator(np.random.PCG64(0))
    whole = agents if len(scores) % agents == 0 else 1  # runs of several sizes: agents alone
    draws = rows_of_runs(len(scores), whole, rng, DRAWS)
    low, high = np.percentile(scores[draws].mean(axis=1), [2.5, 97.5], axis=0)
    return low, high


def progress(comparison: Comparison, task: int | None = None) -> Shown:
    """Mean score over agents, and over tasks or on one, against the steps of all agents."""
    title = "How fast agents get better" if task is None else comparison.tasks[task]
    groups = [(k, group) for k, group in enumerate(comparison.groups) if group.whole]
    if not groups:
        return LeftOut(title, EVALUATE_ALL)
    key = "progress" if task is None else f"versus-{task}"
    words = "Means over agents and tasks after each round; 95 % bootstrap bands over runs, agents."
    figure = Figure(key, title, words if task is None else "", 2.2, ylabel="mean score")
    figure.axes.set_xlabel("environment steps of all agents")
    for k, group in groups:
        steps, scores = group.progress()
        if task is not None:
            scores = np.concatenate([run.P[:, : len(steps), task] for run in group.runs])
        low, high = band(bounded(scores), group.agents)
        figure.axes.fill_between(steps, low, high, color=SERIES[k % 8], alpha=0.15, lw=0)
        label = plain(group.label, 40)
        figure.axes.plot(steps, bounded(scores).mean(axis=0), **look(k, label=label))
    figure.fit()
    figure.axes.set_xlim(left=0)
    figure.legend()
    return figure


def advantage(comparison: Comparison) -> Shown:
    """How many times fewer steps each group needs than the baseline, to parts of its score."""
    title, base = "Time advantage of sharing", comparison.baseline
    words = (
        "Environment steps without sharing over steps with it, until the mean score gets there: "
        "TA_mean(p). Above the dashed line sharing is faster; no point: never reached."
    )
    lines = [(k, group) for k, group in enumerate(comparison.groups) if group is not base]
    if base is None or not lines:
        return LeftOut(title, "it needs a run without sharing beside it: --share none")
    found = {k: bounded([comparison.advantage(group, p) for p in LEVELS]) for k, group in lines}
    known = np.concatenate(list(found.values()))
    if np.isnan(known).all():
        whole = all(group.whole for group in comparison.groups)
        return LeftOut(title, "nothing is learnt without sharing" if whole else EVALUATE_ALL)
    figure = Figure("advantage", title, words, 2.2, ylabel="times fewer steps")
    figure.axes.set_xlabel("% of the score that agents without sharing reach")
    figure.axes.axhline(1, color=d.FG, lw=0.8, ls=(0, (4, 3)))
    figure.axes.update_datalim([(0, 0), (100, 1.5)])
    for k, group in lines:
        style = look(k, label=plain(group.label, 40))
        figure.axes.plot(100 * np.array(LEVELS), found[k], **style)
    figure.fit()
    figure.axes.set_xlim(0, 103)
    figure.legend()
    return figure


def task_scores(comparison: Comparison) -> Shown:
    """For each task: the mean score right after it, of every group, with its 95 % interval."""
    title, groups, tasks = "Scores right after each task", comparison.groups, comparison.tasks
    if all(np.isnan(group.learnt).all() for group in groups):
        return LeftOut(title, EVALUATE)
    found = [
        np.array([[m.mean(x), *m.interval(m.overall_mean, x[:, None])] for x in group.learnt.T]).T
        for group in groups
    ]
    words = "Means over agents and seeds with 95 % bootstrap intervals."
    height, name = 0.6 + max(0.19, 0.08 * len(groups)) * len(tasks), score_name(comparison.scale)
    figure = Figure("scores", title, words, height, xlabel=name)
    for k, (group, ranges) in enumerate(zip(groups, found, strict=True)):
        mean, low, high = bounded(ranges)
        y = np.arange(len(tasks)) + ((k + 0.5) / len(groups) - 0.5) * 0.75
        figure.axes.hlines(y, low, high, color=SERIES[k % 8], lw=1.2, alpha=0.6)
        style = look(k, linestyle="none", markersize=4, label=plain(group.label, 40))
        figure.axes.plot(mean, y, **style)
    figure.name_rows(tasks)
    figure.fit("x")
    figure.legend()
    return figure


def mix_bars(found: Sequence[Mix]) -> list[Shown]:
    """Wall time, waiting, CPU seconds and score of every mix of hosts, by clock."""
    cpu = "/tasks of these runs has no column cpu_seconds"
    wanted = [
        ("Wall time", "s inside tasks, slowest agent", [one.wall for one in found], ""),
        ("Waiting", "% of all agents' time", [100 * one.waiting for one in found], ""),
        ("CPU time", "CPU seconds of all agents", [one.cpu for one in found], cpu),
        ("Score", "mean score right after tasks", [one.score for one in found], EVALUATE),
    ]
    return [
        _bars(found, title, label, values) if np.isfinite(values).any() else LeftOut(title, why)
        for title, label, values, why in wanted
    ]


def _bars(found: Sequence[Mix], title: str, label: str, values: Sequence[float]) -> Figure:
    hosts = list(dict.fromkeys(one.hosts for one in found))
    clocks = sorted({one.clock for one in found}, reverse=True)  # rounds, free
    key, height = f"mix-{title.split()[0].lower()}", 0.6 + 0.2 * len(clocks) * len(hosts)
    figure = Figure(key, title, "", height, xlabel=label)
    for k, clock in enumerate(clocks):
        own = [place for place, one in enumerate(found) if one.clock == clock]
        y = [hosts.index(found[i].hosts) + ((k + 0.5) / len(clocks) - 0.5) * 0.8 for i in own]
        style: dict[str, Any] = {"color": SERIES[k % 8], "hatch": "////" * k, "edgecolor": d.CARD}
        lengths = [values[i] for i in own]
        bars = figure.axes.barh(y, lengths, 0.74 / len(clocks), label=clock, linewidth=0, **style)
        figure.axes.bar_label(bars, [number(value) for value in lengths], padding=2, fontsize=7)
    figure.name_rows(hosts)
    low, high = min(0.0, np.nanmin(values)), max(0.0, np.nanmax(values))
    room = 0.16 * (high - low) or 1.0
    figure.axes.set_xlim(low - room * (low < 0), high + room)
    figure.axes.grid(False, axis="y")
    figure.legend()
    return figure
