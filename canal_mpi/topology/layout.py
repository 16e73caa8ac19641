"""Where agents stand when a topology is drawn: points with x to the right and y downward."""

from collections.abc import Callable, Mapping, Sequence
from math import cos, hypot, pi, sin

from canal_mpi.topology.graphs import Edges, columns

Point = tuple[float, float]
LINE_WIDTH = 12  # agents of a line in a row
# Where one step along each dimension of a hypercube leads: cubes beside, below, behind each other.
CUBE_STEPS = [
    (1.0, 0.08),
    (0.1, 1.0),
    (0.44, -0.4),
    (2.2, 0.55),
    (-0.6, 2.3),
    (4.9, -0.9),
    (1.2, 5.2),
]


def circle(size: int, center: Point = (0, 0), radius: float = 1) -> list[Point]:
    """On a circle, the first on top, clockwise."""
    turns = [2 * pi * agent / size for agent in range(size)]
    return [(center[0] + radius * sin(t), center[1] - radius * cos(t)) for t in turns]


def line(size: int) -> list[Point]:
    """In rows, there and back, so that who is joined stands side by side."""
    points = []
    for agent in range(size):
        row, place = divmod(agent, LINE_WIDTH)
        points.append((float(LINE_WIDTH - 1 - place if row % 2 else place), 1.4 * row))
    return points


def star(size: int) -> list[Point]:
    """Agent 0 in the middle of the others."""
    return [(0.0, 0.0), *circle(size - 1)] if size > 1 else [(0.0, 0.0)]


def grid(size: int) -> list[Point]:
    """Rows and columns."""
    width = columns(size)
    return [(float(agent % width), 0.8 * (agent // width)) for agent in range(size)]


def tree(size: int) -> list[Point]:
    """The root on top, each agent above the middle of its children."""
    deepest = (size).bit_length() - 1
    points = []
    for agent in range(size):
        depth = (agent + 1).bit_length() - 1
        place = agent + 1 - (1 << depth)
        points.append(((place + 0.5) * 2 ** (deepest - depth), 1.3 * depth))
    return points


def hypercube(size: int) -> list[Point]:
    """Cubes of cubes."""
    points = []
    for agent in range(size):
        steps = [step for k, step in enumerate(CUBE_STEPS) if agent >> k & 1]
        points.append((sum(x for x, _ in steps), sum(y for _, y in steps)))
    return points if size <= 1 << len(CUBE_STEPS) else circle(size)


def by_host(hosts: Sequence[str]) -> list[Point]:
    """A circle of circles, one a host."""
    names = list(dict.fromkeys(hosts))
    centers = dict(zip(names, circle(len(names)), strict=True)) if len(names) > 1 else {}
    radius = 0.75 * sin(pi / len(names)) if len(names) > 1 else 1.0
    points = []
    for agent, host in enumerate(hosts):
        inside = [k for k, other in enumerate(hosts) if other == host]
        center = centers.get(host, (0.0, 0.0))
        spread = min(radius, 0.5) if len(inside) > 1 else 0.0
        points.append(circle(len(inside), center, spread)[inside.index(agent)])
    return points


LAYOUTS: Mapping[str, Callable[[int], list[Point]]] = {
    "line": line,
    "star": star,
    "grid": grid,
    "torus": grid,
    "tree": tree,
    "hypercube": hypercube,
}


def places(name: str, size: int, hosts: Sequence[str] = ()) -> list[Point]:
    """A point for each agent, in the box from (0, 0) to at most (1, 1), shapes kept."""
    found = by_host(hosts) if name == "hosts" and hosts else LAYOUTS.get(name, circle)(size)
    left, top = (min(point[k] for point in found) for k in (0, 1))
    scale = max(*(x - left for x, _ in found), *(y - top for _, y in found), 1e-9)
    return [((x - left) / scale, (y - top) / scale) for x, y in found]


def hidden(edges: Edges, points: Sequence[Point], gap: float) -> Edges:
    """Edges whose straight line runs over another agent."""
    return {
        (a, b)
        for a, b in edges
        for c, point in enumerate(points)
        if c not in (a, b) and _distance(point, points[a], points[b]) < gap
    }


def _distance(point: Point, start: Point, end: Point) -> float:
    """From a point to a piece of a straight line."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = ((point[0] - start[0]) * dx + (point[1] - start[1]) * dy) / (dx * dx + dy * dy or 1)
    along = min(max(along, 0), 1)
    return hypot(point[0] - start[0] - along * dx, point[1] - start[1] - along * dy)
