"""How far lessons get: hops, rounds, transfers and bytes on a set of edges, in words.

A lesson that is published in round q is known d hops away from round q + d on. Only
`canal-mpi topology` needs this; a run needs no more than `bfs_parents`.
"""

from collections import Counter
from typing import NamedTuple

from canal_mpi.topology.graphs import Edges, bfs_parents, out_neighbors, warnings

MOST_LISTED = 64  # agents whose neighbours are listed
LINE_WIDTH = 96  # characters


class Spread(NamedTuple):
    """What it takes until a lesson is everywhere that a path leads."""

    rounds: int  # exchanges, one hop each
    transfers: int  # each agent that it reaches receives it once
    busiest: int  # transfers that one agent serves, at most


def spreads(edges: Edges, size: int) -> list[Spread]:
    """The way of each donor's lesson."""
    near, found = out_neighbors(edges), []
    for donor in range(size):
        parents, hops = bfs_parents(near, donor), {donor: 0}
        for agent, parent in parents.items():
            hops[agent] = hops[parent] + 1
        served = Counter(parents.values())
        busiest = max(served.values(), default=0)
        found.append(Spread(max(hops.values()), served.total(), busiest))
    return found


# ── for people ─────────────────────────────────────────────────────────────────────────────────


def summary(name: str, edges: Edges, size: int, lesson_mb: float) -> list[str]:
    """Degree, diameter, and what a lesson of so many MB costs, in lines."""
    warned, near = warnings(edges, size), out_neighbors(edges)
    degrees = [len(near.get(agent, ())) for agent in range(size)]
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
        whom = "some" if warned else "all"
        lines += [
            f"  a lesson    of {lesson_mb:g} MB reaches {whom} others within {rounds} exchange"
            f"{'s' * (rounds > 1)}: {transfers} transfers, {transfers * lesson_mb:g} MB;",
            f"              one agent sends at most {busiest * lesson_mb:g} MB of it",
        ]
    return lines + [f"  warning     {line}" for line in warned]


def neighbour_table(edges: Edges, size: int) -> list[str]:
    """Whom each agent tells, in columns."""
    if size > 1 and len(edges) == size * (size - 1):
        return ["  every agent → all others"]
    near, items = out_neighbors(edges), []
    for agent in range(min(size, MOST_LISTED)):
        told = near.get(agent, [])
        whom = "all others" if len(told) == size - 1 > 0 else ", ".join(map(str, told)) or "nobody"
        items.append(f"  {agent:>3} → {whom}")
    width = max(map(len, items)) + 2
    each = max(LINE_WIDTH // width, 1)
    rows = [items[k : k + each] for k in range(0, len(items), each)]
    lines = ["".join(f"{item:<{width}}" for item in row).rstrip() for row in rows]
    return [*lines, f"  … and {size - len(items)} more"] if size > len(items) else lines
