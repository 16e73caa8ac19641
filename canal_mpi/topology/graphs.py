"""Topologies: sets of directed edges (from, to) among agents. Pure functions, no MPI."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from math import isqrt
from operator import index
from pathlib import Path
from typing import Any

from canal_mpi import pick, seeding
from canal_mpi.errors import UsageError

Edges = set[tuple[int, int]]
AGENT = re.compile(r"[0-9]{1,9}")


def none(size: int) -> Edges:
    """Nobody hears anybody."""
    return set()


def full(size: int) -> Edges:
    """Everybody hears everybody."""
    return {(a, b) for a in range(size) for b in range(size) if a != b}


def line(size: int) -> Edges:
    """Everybody hears the agents next to it; the first and the last have one neighbour."""
    return both_ways(pairwise(range(size)))


def ring(size: int) -> Edges:
    """Everybody hears the agents next to it, in a circle."""
    return {(a, (a + d) % size) for a in range(size) for d in (1, -1) if size > 1}


def star(size: int) -> Edges:
    """Agent 0 hears everybody and everybody hears agent 0."""
    return both_ways((0, a) for a in range(1, size))


def tree(size: int) -> Edges:
    """Agent 0 is the root; agent a has the children 2 a + 1 and 2 a + 2."""
    return both_ways(((a - 1) // 2, a) for a in range(1, size))


def columns(size: int) -> int:
    """Agents in a row of the grid that is nearest to a square; its last row may be shorter."""
    return isqrt(size - 1) + 1


def grid(size: int) -> Edges:
    """Rows and columns, as near to a square as can be; everybody hears up to four around it."""
    width = columns(size)
    beside = ((a, a + 1) for a in range(size - 1) if (a + 1) % width)
    return both_ways([*beside, *((a, a + width) for a in range(size - width))])


def torus(size: int) -> Edges:
    """A grid in which the ends of every row and of every column are joined too."""
    width = columns(size)
    rows = [range(a, min(a + width, size)) for a in range(0, size, width)]
    ends = [(lane[0], lane[-1]) for lane in [*rows, *(range(a, size, width) for a in range(width))]]
    return grid(size) | both_ways((a, b) for a, b in ends if a != b)


def hypercube(size: int) -> Edges:
    """Agents whose numbers differ in one bit; at other sizes than 2, 4, 8, … a part of it."""
    bits = [1 << k for k in range(size.bit_length())]
    return {(a, a ^ bit) for a in range(size) for bit in bits if a ^ bit < size}


def random(size: int, neighbours: int, seed: int) -> Edges:
    """A random ring, and random edges until everybody has that many neighbours (if N allows)."""
    rng = seeding.stream(seed, 0, "", "topology")
    shuffled = rng.permutation(size).tolist()
    near: list[set[int]] = [set() for _ in range(size)]
    for place, agent in enumerate(shuffled):
        near[agent] = {shuffled[place - 1], shuffled[(place + 1) % size]} - {agent}
    for agent in rng.permutation(size).tolist():
        others = rng.permutation(size).tolist()
        strangers = [other for other in others if other not in near[agent] | {agent}]
        strangers.sort(key=lambda b: len(near[b]))  # who has few comes first: degrees stay even
        for other in strangers[: max(neighbours - len(near[agent]), 0)]:
            near[agent].add(other)
            near[other].add(agent)
    return {(a, b) for a in range(size) for b in near[a]}


def by_host(hosts: Sequence[str]) -> Edges:
    """Everybody hears everybody on its host; one bridge, both ways, joins each two hosts."""
    members: dict[str, list[int]] = {}
    for agent, host in enumerate(hosts):
        members.setdefault(host, []).append(agent)
    inside = [pair for agents in members.values() for pair in combinations(agents, 2)]
    groups = list(members.values())
    bridges = [  # spread over the agents of a host
        (groups[i][(j - 1) % len(groups[i])], groups[j][i % len(groups[j])])
        for i, j in combinations(range(len(groups)), 2)
    ]
    return both_ways([*inside, *bridges])


def both_ways(pairs: Iterable[tuple[int, int]]) -> Edges:
    """Every pair as two directed edges."""
    return {edge for a, b in pairs for edge in ((a, b), (b, a))}


TOPOLOGIES: Mapping[str, Callable[[int], Edges]] = {
    "none": none,
    "full": full,
    "ring": ring,
    "line": line,
    "star": star,
    "tree": tree,
    "grid": grid,
    "torus": torus,
    "hypercube": hypercube,
}
NAMES = (*TOPOLOGIES, "random:K", "hosts")


def is_file(name: str) -> bool:
    """Whether a topology's name means a file of edges."""
    if name in NAMES or _is_random(name):
        return False
    try:
        return "/" in name or name.endswith(".txt") or Path(name).is_file()
    except (OSError, ValueError):  # no name of a file at all
        return False


def check_name(name: str, kind: str = "topology") -> None:
    """Refuse what is neither a topology's name, nor a file, nor `module:function`."""
    if _is_random(name):
        neighbours_in(name)
    elif not is_file(name):
        pick.check(kind, name, NAMES)


def _is_random(name: str) -> bool:
    return name.partition(":")[0] == "random"


def neighbours_in(name: str) -> int:
    """K of `random:K`."""
    number = name.partition(":")[2]
    if not AGENT.fullmatch(number) or int(number) < 1:
        raise UsageError(
            f"topology '{name}': expected the least number of neighbours, as in random:3."
        )
    return int(number)


def edges(name: str, size: int, seed: int = 1, hosts: Sequence[str] = ()) -> Edges:
    """The edges of a named topology, a file of edges, or `module:function`, checked.

    `random:K` depends on the seed; `hosts` needs the host of each agent (default: one for all).
    """
    check_name(name)
    if is_file(name):
        return from_text(_read(name), size, f"topology file {name}")
    if _is_random(name):
        return random(size, neighbours_in(name), seed)
    if name == "hosts":
        return by_host(hosts or ["localhost"] * size)
    build = pick.pick("topology", name, TOPOLOGIES)
    return check(build(size), size, f"topology '{name}'")


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"topology file {name} can't be read: {error}.") from error


def from_text(text: str, size: int, where: str) -> Edges:
    """Edges from lines `from to`, or `from -> to`; `#` begins a comment."""
    found: Edges = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace("->", " ").split()
        if not words:
            continue
        place = f"{where}, line {number}"
        if len(words) != 2 or not all(AGENT.fullmatch(word) for word in words):
            raise UsageError(f"{place}: found '{line.strip()}'; expected two agents, as in '0 1'.")
        edge = (int(words[0]), int(words[1]))
        if edge in found:
            raise UsageError(f"{place}: the edge {edge[0]} {edge[1]} is there already; remove one.")
        found |= check({edge}, size, place)
    return found


def check(found: Any, size: int, where: str) -> Edges:
    """Refuse edges that name agents outside the run, or one agent twice."""
    try:
        pairs = {(index(a), index(b)) for a, b in found}
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: found {found!r}; expected pairs of agents.") from error
    for edge in sorted(pairs):
        for agent in edge:
            if not 0 <= agent < size:
                raise UsageError(
                    f"{where}: agent {agent} does not exist: this run has "
                    f"{_agents(size)} (mpirun -np {size})."
                )
        if edge[0] == edge[1]:
            raise UsageError(f"{where}: agent {edge[0]} can't hear itself; remove the edge.")
    return pairs


def _agents(size: int) -> str:
    return "agent 0 only" if size == 1 else f"agents 0 to {size - 1}"


def lonely(found: Edges, size: int) -> list[int]:
    """Agents that no edge touches."""
    touched = {agent for edge in found for agent in edge}
    return [agent for agent in range(size) if agent not in touched]
