"""The figures of one run: each is a drawing with a title, a text for those who can't see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from canal_mpi.report import svg
from canal_mpi.report.svg import Axes, colour, number, path, picture, tag, text
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured
from canal_mpi.types import Array

STRONG = 0.62  # opacity of the strongest colour behind words


@dataclass(frozen=True)
class Figure:
    """A drawing; `wide` ones keep their size and scroll on a phone."""

    key: str
    title: str
    drawing: str
    caption: str = ""
    wide: bool = False


def topology(run: Run) -> Figure:
    """Who hears whom."""
    edges = [(int(a), int(b)) for a, b in zip(*np.nonzero(run.adjacency), strict=True)]
    names = [str(agent) for agent in run.agents]
    alt = f"{len(names)} agents, {len(edges)} directed edges" + (
        ": " + ", ".join(f"{names[a]} to {names[b]}" for a, b in edges[:30]) if edges else ""
    )
    drawing = svg.graph(names, edges, "Topology", alt)
    words = (
        f"{len(edges)} directed edges; an arrow shows who sends to whom, a plain line both ways."
    )
    return Figure("topology", "Who hears whom", drawing, words if edges else "Nobody shares.")


def timeline(run: Run) -> Figure:
    """Every agent's tasks in order, coloured by the agent whose lesson was used."""
    table, agents = run["tasks"], run.agents
    left, cell, height = 76, 86, 30
    parts = [
        text(left + cell * (k + 0.5), 14, f"round {k + 1}", "middle", cls="small")
        for k in range(run.rounds)
    ]
    lessons = 0
    for row, agent in enumerate(agents):
        y = 22 + row * height
        parts.append(tag("circle", cx=9, cy=y + 13, r=6, fill=colour(row)))
        parts.append(text(20, y + 17, f"agent {agent}"))
        for k in np.flatnonzero(table["agent"] == agent):
            x, donors = left + cell * (int(table["round"][k]) - 1), str(table["donors"][k])
            lessons += bool(donors)
            parts.append(_task_cell(run, x, y, cell, height, str(table["task"][k]), donors))
    alt = f"{len(table['agent'])} tasks learnt, {lessons} of them from a lesson"
    drawing = picture(
        left + cell * run.rounds + 4, 28 + height * len(agents), "Rounds", alt, *parts
    )
    words = "Grey: played from scratch. A colour: learnt from a lesson of the agent of that colour."
    return Figure("timeline", "Who learnt what, when, from whom", drawing, words, wide=True)


def _task_cell(
    run: Run, x: float, y: float, width: float, height: float, task: str, donors: str
) -> str:
    first = donors.split(",")[0]
    place = run.agents.index(int(first)) if first.isdecimal() and int(first) in run.agents else -1
    fill = colour(place) if place >= 0 else "var(--played)"
    box = {"x": x, "y": y, "width": width, "height": height - 4, "rx": 4}
    how = f"from agent {donors}" if donors else "played"
    return tag(
        "g",
        tag("title", escape(f"{task}: {how}")),
        tag("rect", **box, fill=fill, fill_opacity=0.45, cls="cell"),
        text(x + width / 2, y + 17, task[:13], "middle", cls="tiny"),
    )


def curves(measured: Measured) -> list[Figure]:
    """For each task: scores of every agent over its own steps; a diamond is a lesson taken in."""
    return [_curve(measured, i) for i in range(len(measured.run.tasks))]


def _curve(measured: Measured, i: int) -> Figure:
    run, task = measured.run, measured.run.tasks[i]
    table, episodes = run["curve"], run["episodes"]
    here, there = table["task"] == task, episodes["task"] == task
    budget = max(int(run.setting("train.frames", 1)), 1)
    begins = measured.raw[:, : measured.P.shape[1], i]
    heights = [*table["score"][here], *_smooth(episodes["return"][there]), *begins[:, 0]]
    low, high = svg.span(heights)
    axes = Axes(46, 22, 250, 120, (0, budget), (low, high))
    parts, told = [axes.frame("own steps on the task", "score")], []
    for row, agent in enumerate(run.agents):
        own = there & (episodes["agent"] == agent)
        points = zip(episodes["step"][own], _smooth(episodes["return"][own]), strict=True)
        drawn = [axes.at(float(x), float(y)) for x, y in points if np.isfinite(y)]
        parts.append(path(drawn, stroke=colour(row), stroke_width=1.2, opacity=0.55))
        seen = here & (table["agent"] == agent)
        exams = list(zip(table["env_steps"][seen], table["score"][seen], strict=True))
        started = int(measured.when[row, i]) - 1
        if started >= 0 and exams and not any(x == 0 for x, _ in exams):
            exams.insert(0, (0, measured.raw[row, started, i]))
        places = [axes.at(float(x), float(y)) for x, y in exams if np.isfinite(y)]
        parts.append(path(places, stroke=colour(row), stroke_width=2))
        parts += [tag("circle", cx=x, cy=y, r=3.2, fill=colour(row), cls="mark") for x, y in places]
        donor = _donor(run, agent, task)
        if donor:
            x, y = places[0] if places else axes.at(0, low)
            parts.append(_diamond(x, y, colour(row)))
        if exams:
            how = f"from agent {donor}" if donor else "played"
            told.append(f"agent {agent} ({how}) {number(float(exams[-1][1]))}")
    alt = "; ".join(told) or "nobody has learnt it yet"
    drawing = picture(316, 178, f"Learning curve of {task}", f"Last scores: {alt}", *parts)
    return Figure(f"curve-{i}", task, drawing)


def _smooth(values: Array) -> list[float]:
    """A running mean over ten episodes."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - 10, 0)
    return [float(v) for v in (total[ends] - total[starts]) / (ends - starts)] if len(ends) else []


def _donor(run: Run, agent: int, task: str) -> str:
    table = run["tasks"]
    here = np.flatnonzero((table["agent"] == agent) & (table["task"] == task))
    return str(table["donors"][here[0]]) if len(here) else ""


def _diamond(x: float, y: float, fill: str) -> str:
    corners = f"M{x:.1f} {y - 6.5:.1f}l6.5 6.5l-6.5 6.5l-6.5 -6.5z"
    return tag("path", d=corners, fill=fill, cls="mark")


def heat_maps(measured: Measured) -> list[Figure]:
    """For each agent: its score on every task after every round; a frame where it learnt it."""
    run = measured.run
    found = []
    for row, agent in enumerate(run.agents):
        values = measured.P[row].T  # [task, after_round]
        framed = {(i, int(t)) for i, t in enumerate(measured.when[row]) if t}
        ends = (number(_first(values)), number(_last(values)))
        alt = f"Mean over tasks {ends[0]} before any, {ends[1]} at the end"
        drawing = matrix(
            f"Evaluations of agent {agent}",
            alt,
            values,
            run.tasks,
            [str(t) for t in range(values.shape[1])],
            framed,
            "after round",
        )
        found.append(Figure(f"heat-{agent}", f"Agent {agent}", drawing))
    return found


def _first(values: Array) -> float:
    return float(np.nanmean(values[:, 0])) if not np.isnan(values[:, 0]).all() else float("nan")


def _last(values: Array) -> float:
    return float(np.nanmean(values[:, -1])) if not np.isnan(values[:, -1]).all() else float("nan")


def matrix(
    title: str,
    alt: str,
    values: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    framed: set[tuple[int, int]] = frozenset(),  # type: ignore[assignment]
    x_label: str = "",
    write: bool = False,
    width: float = 330,
) -> str:
    """A heat map; blue above zero, orange below, nothing where nothing is known."""
    left, top, high = 84.0, 28.0, 18.0
    cell = (width - left - 4) / max(len(columns), 1)
    most = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    parts = [text(left, 10, x_label, cls="small")] if x_label else []
    for j, name in enumerate(columns):
        parts.append(text(left + cell * (j + 0.5), 24, name, "middle", cls="small"))
    for i, name in enumerate(rows):
        y = top + high * i
        parts.append(text(left - 5, y + 13, name[:13], "end", cls="small"))
        for j in range(len(columns)):
            value = float(values[i, j])
            parts.append(_heat_cell(left + cell * j, y, cell, high, value, most, write))
    for i, j in framed:
        box = {"x": left + cell * j + 1, "y": top + high * i + 1}
        parts.append(tag("rect", **box, width=cell - 2, height=high - 2, rx=3, cls="learnt"))
    return picture(width, top + high * len(rows) + 6, title, alt, *parts)


def _heat_cell(
    x: float, y: float, width: float, height: float, value: float, most: float, write: bool
) -> str:
    if not np.isfinite(value):
        return ""
    shade = 0.04 + (STRONG - 0.04) * min(abs(value) / (most or 1), 1)
    fill = "var(--heat)" if value >= 0 else "var(--cold)"
    box = {"x": x, "y": y, "width": width, "height": height, "rx": 3}
    words = text(x + width / 2, y + 13, number(value), "middle", cls="tiny") if write else ""
    rect = tag(
        "rect", tag("title", number(value)), **box, fill=fill, fill_opacity=shade, cls="cell"
    )
    return rect + words


def flow(run: Run) -> Figure:
    """Bands from donors to students, as thick as the number of lessons that were kept."""
    table, agents = run["exchange"], run.agents
    kept = (table["kind"] == "lesson") & table["kept"].astype(bool)
    counts = np.zeros((len(agents), len(agents)), dtype=int)
    for donor, to in zip(table["donor"][kept], table["to"][kept], strict=True):
        if int(donor) in agents and int(to) in agents:
            counts[agents.index(int(donor)), agents.index(int(to))] += 1
    total = int(counts.sum())
    pairs = [
        f"{agents[a]} to {agents[b]}: {counts[a, b]}"
        for a, b in zip(*np.nonzero(counts), strict=True)
    ]
    alt = f"{total} lessons" + (f" ({', '.join(pairs[:40])})" if pairs else "")
    words = f"{total} lessons were kept. Left: who played. Right: who learnt from it."
    return Figure("flow", "Lessons from donor to student", _flow(agents, counts, alt), words)


def _flow(agents: Sequence[int], counts: Array, alt: str) -> str:
    unit = 190 / max(int(counts.sum()), 1)
    gap, parts = 12.0, []
    ends: list[list[float]] = []
    for side, sums in enumerate((counts.sum(axis=1), counts.sum(axis=0))):
        x, y, starts = 66 + side * 244, 14.0, []
        for k, agent in enumerate(agents):
            size = float(sums[k]) * unit
            starts.append(y)
            box = {"x": x - 5, "y": y, "width": 10, "height": max(size, 2), "rx": 2}
            parts.append(tag("rect", **box, fill=colour(k)))
            place = (x - 10, "end") if side == 0 else (x + 10, "start")
            parts.append(text(place[0], y + max(size, 2) / 2 + 4, f"agent {agent}", place[1]))
            y += max(size, 2) + gap
        ends.append(starts)
    for a, b in zip(*np.nonzero(counts), strict=True):
        size = float(counts[a, b]) * unit
        y1, y2 = ends[0][a] + size / 2, ends[1][b] + size / 2
        ends[0][a], ends[1][b] = ends[0][a] + size, ends[1][b] + size
        line = f"M71 {y1:.1f}C188 {y1:.1f} 188 {y2:.1f} 305 {y2:.1f}"
        style = {"stroke": colour(int(a)), "stroke_width": size, "opacity": 0.42}
        parts.append(tag("path", d=line, fill="none", **style))
    return picture(376, 216 + gap * len(agents), "Flow of lessons", alt, *parts)


def forgetting(measured: Measured) -> Figure:
    """For each task: the mean score right after it was learnt, and at the end."""
    from canal_mpi.results.measures import just_after

    run = measured.run
    after, end = just_after(measured.P, measured.when), measured.P[:, -1, :]
    rows = []
    for i, task in enumerate(run.tasks):
        both = ~np.isnan(after[:, i]) & ~np.isnan(end[:, i])
        if both.any():
            rows.append((task, float(after[both, i].mean()), float(end[both, i].mean())))
    low, high = svg.span([value for _, *pair in rows for value in pair])
    axes = Axes(92, 14, 300, 21.0 * max(len(rows), 1), (low, high), (0, 1))
    parts = []
    for value in svg.ticks(low, high):
        x = axes.at(value, 0)[0]
        parts.append(tag("line", x1=x, x2=x, y1=axes.top, y2=axes.top + axes.height, cls="grid"))
        parts.append(text(x, axes.top + axes.height + 14, number(value), "middle", cls="small"))
    for k, (task, first, last) in enumerate(rows):
        y = axes.top + 21 * k + 11
        (x1, _), (x2, _) = axes.at(first, 0), axes.at(last, 0)
        tone = "var(--cold)" if last < first else "var(--good)"
        parts.append(text(86, y + 4, task[:14], "end", cls="small"))
        parts.append(tag("line", x1=x1, x2=x2, y1=y, y2=y, stroke=tone, stroke_width=3))
        parts.append(tag("circle", cx=x1, cy=y, r=4.5, fill="var(--card)", stroke=tone))
        parts.append(tag("circle", cx=x2, cy=y, r=4.5, fill=tone))
    told = "; ".join(f"{task} {number(a)} to {number(b)}" for task, a, b in rows)
    drawing = picture(404, axes.height + 40, "Forgetting", told or "no later evaluations", *parts)
    words = "Hollow: right after the task. Filled: at the end. Means over agents."
    return Figure("forgetting", "What was kept until the end", drawing, words)


def isolated(measured: Measured) -> Figure:
    """Mean over agents of what the j-th task did to the i-th: forgetting and transfer (CORA)."""
    from canal_mpi.results.measures import isolated as both

    drops, gains = both(measured.P, measured.when)
    change = np.where(np.isnan(gains), -drops, gains)
    known = ~np.isnan(change)
    total = np.where(known, change, 0).sum(axis=0)
    values = np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)
    names = [str(k + 1) for k in range(values.shape[0])]
    alt = "Rows are tasks in the agents' own order, columns the task that was learnt"
    columns = [str(k + 1) for k in range(values.shape[1])]
    drawing = matrix("Forgetting and transfer", alt, values, names, columns, x_label="task learnt")
    words = (
        "Change of the score on an agent's i-th task (row) by learning its j-th (column): right of "
        "the diagonal forgetting, left of it zero-shot transfer. Blue: better, orange: worse."
    )
    return Figure("isolated", "What one task did to another", drawing, words)
