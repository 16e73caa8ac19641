"""Where the time and the bytes of a run went."""

from datetime import datetime

import numpy as np

from canal_mpi.report.figures import Figure, matrix
from canal_mpi.report.svg import colour, number, picture, tag, text
from canal_mpi.results.reading import Run
from canal_mpi.types import Array

PARTS = ("environment", "learning", "evaluation", "exchange", "waiting", "checkpoint", "other")


def seconds(run: Run) -> Array:
    """[agent, part]: seconds that each agent spent on each of PARTS."""
    tasks, train = run["tasks"], run["train"]
    found = np.zeros((len(run.agents), len(PARTS)))
    for k, agent in enumerate(run.agents):
        mine, here = tasks["agent"] == agent, train["agent"] == agent
        parts = [
            train["env_seconds"][here],
            train["learn_seconds"][here],
            tasks["evaluate_seconds"][mine],
            tasks["exchange_seconds"][mine],
            tasks["wait_seconds"][mine],
            tasks["save_seconds"][mine],
        ]
        found[k, :-1] = [np.nansum(part) for part in parts]
        found[k, -1] = max(np.nansum(tasks["seconds"][mine]) - found[k, :-1].sum(), 0.0)
    return found


def wall_seconds(run: Run) -> float:
    """From the start of the run to its end; NaN where it has not ended."""
    try:
        ends = [datetime.fromisoformat(str(run.attributes[k])) for k in ("started", "finished")]
    except (KeyError, ValueError):
        return float("nan")
    return (ends[1] - ends[0]).total_seconds()


def time_bars(run: Run) -> Figure:
    """A bar for every agent: what it spent its time on."""
    spent, agents = seconds(run), run.agents
    most = float(spent.sum(axis=1).max(initial=0)) or 1.0
    parts, told = [], []
    for row, agent in enumerate(agents):
        x, y = 66.0, 10.0 + 30 * row
        parts.append(text(60, y + 15, f"agent {agent}", "end"))
        for k, name in enumerate(PARTS):
            width = 330 * float(spent[row, k]) / most
            share = float(spent[row, k]) / (float(spent[row].sum()) or 1.0)
            words = tag("title", f"{name}: {number(float(spent[row, k]))} s ({share:.0%})")
            box = {"x": x, "y": y, "width": width, "height": 22, "fill": part_colour(k)}
            parts.append(tag("rect", words, **box, cls="cell") if width else "")
            if width > 30:
                parts.append(text(x + width / 2, y + 15, f"{share:.0%}", "middle", cls="on"))
            x += width
        shares = spent[row] / (float(spent[row].sum()) or 1.0)
        told.append(f"agent {agent}: " + ", ".join(_told(shares)))
    drawing = picture(404, 20 + 30 * len(agents), "Where the time went", "; ".join(told), *parts)
    wall = wall_seconds(run)
    words = "Seconds inside tasks; start-up and the writing of results between rounds are left out."
    words += f" The run took {number(wall)} s." if wall == wall else ""
    return Figure("time", "Where the time went", drawing, words)


def _told(shares: Array) -> list[str]:
    return [
        f"{name} {share:.0%}" for name, share in zip(PARTS, shares, strict=True) if share > 0.005
    ]


def part_colour(k: int) -> str:
    """The colour of a part of the time."""
    return colour((0, 2, 4, 3, 1, 6, 7)[k])


def edge_bytes(run: Run) -> Array:
    """[from, to]: bytes of lessons and swaps that crossed each edge."""
    table, agents = run["exchange"], run.agents
    found = np.zeros((len(agents), len(agents)))
    moved = (table["kind"] == "transfer") | (table["kind"] == "swap")
    for k in np.flatnonzero(moved):
        a, b = int(table["from"][k]), int(table["to"][k])
        if a in agents and b in agents:
            found[agents.index(a), agents.index(b)] += float(table["bytes"][k])
    return found


def edges(run: Run) -> Figure:
    """How many bytes crossed each edge."""
    moved = edge_bytes(run) / 1e6
    values = np.where((run.adjacency > 0) | (moved > 0), moved, np.nan)
    names = [f"agent {agent}" for agent in run.agents]
    alt = f"{number(float(moved.sum()))} MB in all, from the rows to the columns"
    columns = [f"to {agent}" for agent in run.agents]
    drawing = matrix(
        "Bytes on each edge", alt, values, names, columns, write=len(names) <= 8, width=400
    )
    table = run["exchange"]
    lessons = np.isin(table["kind"], ["lesson", "drop"])
    raw = float(table["raw_bytes"][lessons].sum()) / 1e6
    words = f"{number(float(moved.sum()))} MB on the wire; the lessons unpacked: {number(raw)} MB."
    return Figure("bytes", "MB on each edge", drawing, words)


def key() -> list[tuple[str, str]]:
    """Names and colours of the parts of the time."""
    return [(name, part_colour(k)) for k, name in enumerate(PARTS)]
