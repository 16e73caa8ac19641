"""Topologies: sets of directed edges (from, to) among agents, by name. Pure functions, no MPI.

The graphs below need no library, so that ranks don't load networkx (20 MB and a third of a second);
it is loaded where one of its own generators is named.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Signature, signature
from itertools import combinations, pairwise
from math import isfinite, isqrt
from operator import index
from pathlib import Path
from typing import Any

from canal_mpi.errors import UsageError, import_name, suggestion
from canal_mpi.state import random_stream

Edges = set[tuple[int, int]]
AGENT = re.compile(r"[0-9]{1,9}")
NOT_NUMBERS = {"create_using", "backend", "backend_kwargs"}  # of networkx's generators
N_IS_NO_SIZE = {  # networkx's generators whose graphs have far more nodes than n: it must be given
    *("dorogovtsev_goltsev_mendes_graph", "hypercube_graph", "kneser_graph", "mycielski_graph"),
    *("navigable_small_world_graph", "sudoku_graph"),
}


def none(size: int) -> Edges:
    """No edges."""
    return set()


def full(size: int) -> Edges:
    """Every agent hears all others."""
    return {(a, b) for a in range(size) for b in range(size) if a != b}


def line(size: int) -> Edges:
    """Every agent hears those next to it; the first and the last have one neighbour."""
    return both_ways(pairwise(range(size)))


def ring(size: int) -> Edges:
    """Every agent hears those next to it, in a circle."""
    return {(a, (a + d) % size) for a in range(size) for d in (1, -1) if size > 1}


def star(size: int) -> Edges:
    """Agent 0 hears all others and they hear agent 0."""
    return both_ways((0, a) for a in range(1, size))


def tree(size: int) -> Edges:
    """Agent 0 is the root; agent a has the children 2 a + 1 and 2 a + 2."""
    return both_ways(((a - 1) // 2, a) for a in range(1, size))


def columns(size: int) -> int:
    """Agents in a row of the grid that is nearest to a square; its last row may be shorter."""
    return isqrt(size - 1) + 1


def grid(size: int) -> Edges:
    """Rows and columns, as near to a square as can be; an agent hears up to four around it."""
    width = columns(size)
    beside = ((a, a + 1) for a in range(size - 1) if (a + 1) % width)
    return both_ways([*beside, *((a, a + width) for a in range(size - width))])


def torus(size: int) -> Edges:
    """A grid in which the ends of every row and of every column are joined too."""
    width = columns(size)
    rows = [range(a, min(a + width, size)) for a in range(0, size, width)]
    ends = [(way[0], way[-1]) for way in [*rows, *(range(a, size, width) for a in range(width))]]
    return grid(size) | both_ways((a, b) for a, b in ends if a != b)


def hypercube(size: int) -> Edges:
    """Agents whose numbers differ in one bit; at other sizes than 2, 4, 8, … a part of it."""
    bits = [1 << k for k in range(size.bit_length())]
    return {(a, a ^ bit) for a in range(size) for bit in bits if a ^ bit < size}


def random(size: int, neighbours: int, seed: int) -> Edges:
    """A random ring, and random edges until all agents have that many neighbours (if N allows)."""
    rng = random_stream(seed, 0, "", "topology")
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
    """Every agent hears all on its host; one bridge, both ways, joins each two hosts."""
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
    build.__name__: build for build in (none, full, ring, line, star, tree, grid, torus, hypercube)
}
NAMES = (*TOPOLOGIES, "random:K", "hosts")
Build = Callable[[int, int, Sequence[str]], Edges]  # of size, seed and the host of each agent


def scales(name: str) -> bool:
    """Whether it is one of our own names, which mean something for any number of agents."""
    return name in NAMES or name.partition(":")[0] == "random"


def is_file(name: str) -> bool:
    """Whether a topology's name means a file of edges."""
    if scales(name):
        return False
    try:
        return "/" in name or name.endswith(".txt") or Path(name).is_file()
    except (OSError, ValueError):  # no name of a file at all
        return False


def parse_topology(name: str, kind: str = "topology") -> Build:
    """What a name means: ours, a file, `module:function` or a generator of networkx; or refuse."""
    head, _, text = name.partition(":")
    if name in TOPOLOGIES:
        return lambda size, seed, hosts: TOPOLOGIES[name](size)
    if name == "hosts":
        return lambda size, seed, hosts: by_host(hosts or ["localhost"] * size)
    if head == "random":
        if not AGENT.fullmatch(text) or int(text) < 1:
            raise UsageError(
                f"topology '{name}': expected the least number of neighbours, as in random:3."
            )
        return lambda size, seed, hosts: random(size, int(text), seed)
    if is_file(name):
        return lambda size, seed, hosts: from_text(_read(name), size, f"topology file {name}")
    if text and "=" not in text:
        return lambda size, seed, hosts: import_name("topology", name)(size)
    return networkx_topology(name, kind)


def edges(name: str, size: int, seed: int = 1, hosts: Sequence[str] = ()) -> Edges:
    """The edges of a named topology, a file of edges, or `module:function`, checked.

    `random:K` and networkx's random graphs depend on the seed; `hosts` needs the host of each
    agent (default: one for all).
    """
    return check(parse_topology(name)(size, seed, hosts), size, f"topology '{name}'")


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"topology file {name} can't be read: {error}.") from error


def from_text(text: str, size: int, where: str) -> Edges:
    """Edges from lines `from to`, or `from -> to`; `#` begins a comment."""
    found: Edges = set()
    for number, line in enumerate(text.splitlines(), 1):
        words, place = line.partition("#")[0].replace("->", " ").split(), f"{where}, line {number}"
        if words and (len(words) != 2 or not all(AGENT.fullmatch(word) for word in words)):
            raise UsageError(f"{place}: found '{line.strip()}'; expected two agents, as in '0 1'.")
        found |= check([map(int, words)] if words else [], size, place)
    return found


def check(found: Any, size: int, where: str) -> Edges:
    """Refuse edges that name agents outside the run, or one agent twice."""
    try:
        pairs = {(index(a), index(b)) for a, b in found}
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: found {found!r}; expected pairs of agents.") from error
    for edge in sorted(pairs):
        if unknown := [agent for agent in edge if not 0 <= agent < size]:
            known = "agent 0 only" if size == 1 else f"agents 0 to {size - 1}"
            raise UsageError(
                f"{where}: agent {unknown[0]} does not exist: this run has {known} "
                f"(mpirun -np {size})."
            )
        if edge[0] == edge[1]:
            raise UsageError(f"{where}: agent {edge[0]} can't hear itself; remove the edge.")
    return pairs


# ── networkx ───────────────────────────────────────────────────────────────────────────────────


def networkx_topology(name: str, kind: str) -> Build:
    """What `watts_strogatz_graph:k=2,p=0.1` names: a generator with checked parameters."""
    import networkx

    head, _, text = name.partition(":")
    generators = {
        key: found
        for key, found in vars(networkx).items()
        if callable(found) and str(found.__module__).startswith("networkx.generators")
    }
    if head not in generators:
        hint, known = suggestion(head, [*NAMES, *generators]), ", ".join(sorted(NAMES))
        raise UsageError(
            f"unknown {kind} '{head}'{hint or ';'} known: {known}, or a generator of networkx."
        )
    parameters = signature(generators[head]).parameters
    takes = {key: one for key, one in parameters.items() if key not in NOT_NUMBERS}
    given = dict(_parameter(item, name) for item in text.split(",") if item)

    def arguments(size: int, seed: int) -> dict[str, float]:
        fixed = {"n": size} if head not in N_IS_NO_SIZE else {}
        fixed["seed"] = seed % 2**32  # NumPy's generators take no larger one
        return {key: value for key, value in fixed.items() if key in takes} | given

    try:
        Signature([*takes.values()]).bind(**arguments(1, 1))
    except TypeError as error:
        known = ", ".join(takes) or "nothing"
        raise UsageError(f"topology '{name}': {error}; it takes {known}.") from error

    def build(size: int, seed: int, hosts: Sequence[str]) -> Edges:
        """Loops are left out; undirected edges lead both ways."""
        try:
            made = generators[head](**arguments(size, seed))
            graph = networkx.convert_node_labels_to_integers(made)
        except Exception as error:  # whatever a generator makes of numbers that it does not like
            words = str(error).rstrip(".")
            raise UsageError(f"topology '{name}' with {size} agents: {words}.") from error
        if len(graph) != size:
            raise UsageError(
                f"topology '{name}': found {len(graph)} nodes; expected {size}, one per agent"
                + ("; n may be given: n=…." if "n" in takes else ".")
            )
        pairs = {(a, b) for a, b in graph.edges() if a != b}
        return pairs if graph.is_directed() else both_ways(pairs)

    return build


def _parameter(item: str, name: str) -> tuple[str, float]:
    """One of `k=2,p=0.1`."""
    key, _, text = item.partition("=")
    try:
        value = int(text) if AGENT.fullmatch(text.removeprefix("-")) else float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise UsageError(f"topology '{name}': found '{text}'; expected a number.")
    return key, value


# ── along the edges ────────────────────────────────────────────────────────────────────────────


def out_neighbors(edges: Edges) -> dict[int, list[int]]:
    """Whom each agent that an edge touches tells, lowest number first."""
    near: dict[int, list[int]] = {agent: [] for edge in edges for agent in edge}
    for a, b in sorted(edges):
        near[a].append(b)
    return near


def bfs_parents(near: Mapping[int, Sequence[int]], donor: int) -> dict[int, int]:
    """Who tells each agent of a donor's lessons first: the lowest one that knew a hop earlier.

    `near` are everybody's out-neighbours; nearer agents come first in the answer.
    """
    parents, front = {donor: donor}, [donor]
    while front and len(parents) < len(near):
        reached = []
        for a in front:
            for b in near.get(a, ()):
                if b not in parents:
                    parents[b] = a
                    reached.append(b)
        front = sorted(reached)
    del parents[donor]
    return parents


def warnings(edges: Edges, size: int) -> list[str]:
    """A line that names the agents which some others' lessons never reach, if there are any."""
    near = out_neighbors(edges)
    reached = [{donor, *bfs_parents(near, donor)} for donor in range(size)]
    deaf = [str(agent) for agent in range(size) if any(agent not in them for them in reached)]
    names = f"agent{'s' * (len(deaf) > 1)} {', '.join(deaf)}"
    return [f"some lessons never reach {names}: no path leads there."] if deaf else []
