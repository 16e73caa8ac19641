"""How far lessons get: hops, rounds, transfers and bytes on a set of edges; in words and drawn.

A lesson that is published in round q is known d hops away from round q + d on. Every rank needs
`bfs_parents`, so the search is ours: networkx would cost each of them 20 MB.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import NamedTuple

from canal_mpi.topology.graphs import Edges

UNREACHED = -1
MOST_WARNINGS = 5
MOST_LISTED = 64  # agents whose neighbours are listed
LINE_WIDTH = 96  # characters
GREY = "#7a869a"  # readable on light and on dark pages


def neighbours(edges: Edges, size: int) -> list[list[int]]:
    """Whom each agent tells, lowest number first."""
    near: list[list[int]] = [[] for _ in range(size)]
    for a, b in sorted(edges):
        near[a].append(b)
    return near


def bfs_parents(edges: Edges, donor: int) -> dict[int, int]:
    """Who tells each agent of a donor's lessons first: the lowest one that knew a hop earlier."""
    return _parents(neighbours(edges, 1 + max(map(max, edges), default=donor)), donor)


def _parents(near: Sequence[Sequence[int]], donor: int) -> dict[int, int]:
    """The same, from each agent's neighbours; nearer agents come first."""
    parents, front = {donor: donor}, [donor]
    while front and len(parents) < len(near):
        reached = []
        for a in front:
            for b in near[a]:
                if b not in parents:
                    parents[b] = a
                    reached.append(b)
        front = sorted(reached)
    del parents[donor]
    return parents


def _hops(parents: Mapping[int, int], donor: int, size: int) -> list[int]:
    """How far each agent is from the donor."""
    found = [UNREACHED] * size
    found[donor] = 0
    for agent, parent in parents.items():
        found[agent] = found[parent] + 1
    return found


def distances(edges: Edges, size: int) -> list[list[int]]:
    """Hops from each agent (row) to each other; UNREACHED where no path leads."""
    near = neighbours(edges, size)
    return [_hops(_parents(near, agent), agent, size) for agent in range(size)]


def unheard(edges: Edges, size: int) -> dict[int, list[int]]:
    """For each agent that some lessons never reach: the agents whose lessons those are."""
    hops = distances(edges, size)
    missing = {b: [a for a in range(size) if hops[a][b] == UNREACHED] for b in range(size)}
    return {agent: donors for agent, donors in missing.items() if donors}


class Spread(NamedTuple):
    """What it takes until a lesson is everywhere that a path leads."""

    rounds: int  # exchanges, one hop each
    transfers: int  # each agent that it reaches receives it once
    busiest: int  # transfers that one agent serves, at most


def spreads(edges: Edges, size: int) -> list[Spread]:
    """The way of each donor's lesson."""
    near, found = neighbours(edges, size), []
    for donor in range(size):
        parents = _parents(near, donor)
        served = Counter(parents.values())
        rounds = max(_hops(parents, donor, size))
        found.append(Spread(rounds, served.total(), max(served.values(), default=0)))
    return found


# ── for people ─────────────────────────────────────────────────────────────────────────────────


def agents(numbers: Sequence[int]) -> str:
    """`agent 3`, or `agents 0 to 4, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"agent{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def warnings(edges: Edges, size: int) -> list[str]:
    """What is odd about a topology, naming the agents: alone, or never reached by others."""
    touched = {agent for edge in edges for agent in edge}
    alone = [agent for agent in range(size) if agent not in touched] if size > 1 else []
    lines = [f"no edge touches {agents(alone)}."] if alone else []
    groups: dict[tuple[int, ...], list[int]] = {}
    for agent, donors in unheard(edges, size).items():
        rest = tuple(donor for donor in donors if donor not in alone)
        if rest and agent not in alone:
            groups.setdefault(rest, []).append(agent)
    for rest, deaf in list(groups.items())[:MOST_WARNINGS]:
        verb = "hear" if len(deaf) > 1 else "hears"
        lines.append(f"{agents(deaf)} never {verb} of {agents(rest)}: no path leads there.")
    if len(groups) > MOST_WARNINGS:
        more = sorted(a for deaf in list(groups.values())[MOST_WARNINGS:] for a in deaf)
        lines.append(f"nor do all lessons reach {agents(more)}.")
    return lines


def summary(name: str, edges: Edges, size: int, lesson_mb: float) -> list[str]:
    """Degree, diameter, and what a lesson of so many MB costs, in lines."""
    degrees = list(map(len, neighbours(edges, size)))
    least, most = min(degrees), max(degrees)
    rounds, transfers, busiest = map(max, zip(*spreads(edges, size), strict=True))
    one_way = len([1 for a, b in edges if (b, a) not in edges])
    both = (len(edges) - one_way) // 2
    kinds = [f"{both} edge{'s' * (both > 1)} both ways"] * bool(both)
    kinds += [f"{one_way} one way"] * bool(one_way)
    lines = [
        f"{name} · {size} agent{'s' * (size > 1)} · {', '.join(kinds) or 'no edges'}",
        f"  neighbours  {least if least == most else f'{least} to {most}'} per agent",
        f"  diameter    {rounds}",
    ]
    if transfers:
        whom = "some" if unheard(edges, size) else "all"
        lines += [
            f"  a lesson    of {lesson_mb:g} MB reaches {whom} others within {rounds} exchange"
            f"{'s' * (rounds > 1)}: {transfers} transfers, {transfers * lesson_mb:g} MB;",
            f"              one agent sends at most {busiest * lesson_mb:g} MB of it",
        ]
    return lines + [f"  warning     {line}" for line in warnings(edges, size)]


def neighbour_table(edges: Edges, size: int) -> list[str]:
    """Whom each agent tells, in columns."""
    if size > 1 and len(edges) == size * (size - 1):
        return ["  every agent → all others"]
    items = []
    for agent, near in enumerate(neighbours(edges, size)[:MOST_LISTED]):
        told = ", ".join(map(str, near)) or "nobody"
        items.append(f"  {agent:>3} → {'all others' if len(near) == size - 1 > 0 else told}")
    width = max(map(len, items)) + 2
    each = max(LINE_WIDTH // width, 1)
    rows = [items[k : k + each] for k in range(0, len(items), each)]
    lines = ["".join(f"{item:<{width}}" for item in row).rstrip() for row in rows]
    return [*lines, f"  … and {size - len(items)} more"] if size > len(items) else lines


def draw_topology(edges: Edges, size: int, hosts: Sequence[str] = (), title: str = "") -> bytes:
    """The graph as SVG: one colour per host, arrows where an edge leads one way only."""
    import networkx
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    graph = networkx.empty_graph(size)
    graph.add_edges_from(edges)
    connected = networkx.is_connected(graph)
    place = (networkx.kamada_kawai_layout if connected else networkx.circular_layout)(graph)
    figure = Figure(figsize=(7, 7))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_title(title, color=GREY)
    for a, b in sorted(edges):
        style = "-" if (b, a) in edges else "-|>"
        if style == "-|>" or a < b:
            arrow = {"arrowstyle": style, "color": GREY, "shrinkB": 9, "shrinkA": 9}
            axes.annotate("", place[b], place[a], arrowprops=arrow)
    names = list(dict.fromkeys(hosts))
    for agent, (x, y) in place.items():
        colour = f"C{names.index(hosts[agent]) % 10}" if hosts else "C0"
        axes.scatter(x, y, s=max(300 - size, 60), color=colour, zorder=2)
        axes.text(x, y, str(agent), color="white", ha="center", va="center", size=8)
    file = BytesIO()
    with rc_context({"svg.hashsalt": "canal-mpi", "svg.fonttype": "none"}):
        about = {"Date": None, "Title": title}
        figure.savefig(file, format="svg", transparent=True, metadata=about)
    return file.getvalue()
