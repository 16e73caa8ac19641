"""Topologies: sets of directed edges (from, to) among agents. Pure functions, no MPI."""

import re
from collections.abc import Callable, Mapping
from operator import index
from pathlib import Path
from typing import Any

from canal_mpi import pick
from canal_mpi.errors import UsageError

Edges = set[tuple[int, int]]
AGENT = re.compile(r"[0-9]{1,9}")


def none(size: int) -> Edges:
    """Nobody hears anybody."""
    return set()


def full(size: int) -> Edges:
    """Everybody hears everybody."""
    return {(a, b) for a in range(size) for b in range(size) if a != b}


def ring(size: int) -> Edges:
    """Everybody hears the agents next to it, in a circle."""
    return {(a, (a + d) % size) for a in range(size) for d in (1, -1) if size > 1}


def star(size: int) -> Edges:
    """Agent 0 hears everybody and everybody hears agent 0."""
    return {edge for a in range(1, size) for edge in ((0, a), (a, 0))}


TOPOLOGIES: Mapping[str, Callable[[int], Edges]] = {
    "none": none,
    "full": full,
    "ring": ring,
    "star": star,
}


def is_file(name: str) -> bool:
    """Whether a topology's name means a file of edges."""
    if name in TOPOLOGIES:
        return False
    try:
        return "/" in name or name.endswith(".txt") or Path(name).is_file()
    except (OSError, ValueError):  # no name of a file at all
        return False


def edges(name: str, size: int) -> Edges:
    """The edges of a named topology, a file of edges, or `module:function`, checked."""
    if is_file(name):
        return from_text(_read(name), size, f"topology file {name}")
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
