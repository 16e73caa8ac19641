"""How far lessons get: hops, rounds, transfers and bytes on a set of edges. Pure functions.

A lesson that is published in round q is known d hops away from round q + d on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

from canal_mpi.topology.graphs import Edges, columns, lonely

Distances = list[list[int]]
UNREACHED = -1
MOST_WARNINGS = 5


def neighbours(edges: Edges, size: int) -> list[list[int]]:
    """Whom each agent tells, lowest number first."""
    near: list[list[int]] = [[] for _ in range(size)]
    for a, b in sorted(edges):
        near[a].append(b)
    return near


def distances(edges: Edges, size: int) -> Distances:
    """Hops from each agent (row) to each other; UNREACHED where no path leads."""
    near = neighbours(edges, size)
    return [_hops(_tellers(near, agent), agent, size) for agent in range(size)]


def first_tellers(edges: Edges, donor: int) -> dict[int, int]:
    """Who tells each agent of a donor's lessons first: the lowest one that knew a hop earlier."""
    return _tellers(neighbours(edges, 1 + max(map(max, edges), default=donor)), donor)


def _tellers(near: Sequence[Sequence[int]], donor: int) -> dict[int, int]:
    """The same, from each agent's neighbours; nearer agents come first."""
    told, front = {donor: donor}, [donor]
    while front and len(told) < len(near):
        heard = []
        for a in front:
            for b in near[a]:
                if b not in told:
                    told[b] = a
                    heard.append(b)
        front = sorted(heard)
    del told[donor]
    return told


def _hops(tellers: Mapping[int, int], donor: int, size: int) -> list[int]:
    """How far each agent is from the donor, along those who tell."""
    found = [UNREACHED] * size
    found[donor] = 0
    for agent, teller in tellers.items():
        found[agent] = found[teller] + 1
    return found


def diameter(edges: Edges, size: int) -> int:
    """The longest way that a lesson takes, where a path leads at all."""
    return max(map(max, distances(edges, size)))


def degrees(edges: Edges, size: int) -> list[int]:
    """How many agents each one tells."""
    return [len(near) for near in neighbours(edges, size)]


def known(edges: Edges, size: int, agent: int, round_: int) -> set[tuple[int, int]]:
    """Lessons (donor, round) that an agent can know of when it begins a round."""
    hops = distances(edges, size)
    return {
        (donor, published)
        for donor in range(size)
        for published in range(1, round_)
        if donor != agent and 0 < hops[donor][agent] <= round_ - published
    }


def unheard(edges: Edges, size: int) -> dict[int, list[int]]:
    """For each agent that some lessons never reach: the agents whose lessons those are."""
    hops = distances(edges, size)
    missing = {b: [a for a in range(size) if hops[a][b] == UNREACHED] for b in range(size)}
    return {agent: donors for agent, donors in missing.items() if donors}


def warnings(edges: Edges, size: int) -> list[str]:
    """What is odd about a topology, naming the agents: alone, or never reached by others."""
    alone = lonely(edges, size) if size > 1 else []
    words = [f"no edge touches {agents(alone)}."] if alone else []
    groups: dict[tuple[int, ...], list[int]] = {}
    for agent, donors in unheard(edges, size).items():
        rest = tuple(donor for donor in donors if donor not in alone)
        if rest and agent not in alone:
            groups.setdefault(rest, []).append(agent)
    for rest, deaf in list(groups.items())[:MOST_WARNINGS]:
        verb = "hear" if len(deaf) > 1 else "hears"
        words.append(f"{agents(deaf)} never {verb} of {agents(rest)}: no path leads there.")
    if len(groups) > MOST_WARNINGS:
        more = sorted(a for deaf in list(groups.values())[MOST_WARNINGS:] for a in deaf)
        words.append(f"nor do all lessons reach {agents(more)}.")
    return words


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


@dataclass(frozen=True)
class Spread:
    """What it takes until a lesson is everywhere that a path leads."""

    rounds: int  # exchanges, one hop each
    transfers: int  # each agent that it reaches receives it once
    busiest: int  # transfers that one agent serves, at most


def spread(edges: Edges, size: int, donor: int) -> Spread:
    """The way of one donor's lesson; who can choose takes it from the lowest-numbered agent."""
    return _spread(neighbours(edges, size), donor)


def _spread(near: Sequence[Sequence[int]], donor: int) -> Spread:
    tellers = _tellers(near, donor)
    served = Counter(tellers.values())
    return Spread(
        max(_hops(tellers, donor, len(near))), served.total(), max(served.values(), default=0)
    )


def worst_spread(edges: Edges, size: int) -> Spread:
    """The largest figures over all donors."""
    near = neighbours(edges, size)
    ways = [_spread(near, donor) for donor in range(size)]
    return Spread(
        max(way.rounds for way in ways),
        max(way.transfers for way in ways),
        max(way.busiest for way in ways),
    )


def _tree_hops(size: int) -> int:
    depth = size.bit_length() - 1
    return 2 * depth - (size < 3 << depth - 1) if depth else 0


def _rows(size: int) -> int:
    return ceil(size / columns(size))


@dataclass(frozen=True)
class Law:
    """Most neighbours of an agent and the diameter, in words, and the diameter at N agents."""

    degree: str
    diameter: str
    hops: Callable[[int], int]


LAWS: Mapping[str, Law] = {
    "none": Law("0", "0", lambda n: 0),
    "full": Law("N − 1", "1", lambda n: min(n - 1, 1)),
    "ring": Law("2", "⌊N / 2⌋", lambda n: n // 2),
    "line": Law("2", "N − 1", lambda n: n - 1),
    "star": Law("N − 1", "2", lambda n: min(n - 1, 2)),
    "tree": Law("3", "2 ⌊log₂ N⌋, or one less", _tree_hops),
    "grid": Law("4", "rows + columns − 2, about 2 √N", lambda n: _rows(n) + columns(n) - 2),
    "hypercube": Law("⌈log₂ N⌉", "⌈log₂ N⌉", lambda n: ceil(log2(n))),
}
