"""A topology as a picture: in the terminal, and as SVG; with what a lesson costs on it."""

from collections.abc import Sequence
from itertools import combinations
from math import hypot
from xml.sax.saxutils import escape

from canal_mpi.errors import UsageError
from canal_mpi.topology.graphs import AGENT, Edges
from canal_mpi.topology.layout import Point, hidden, places
from canal_mpi.topology.reach import degrees, diameter, neighbours, unheard, warnings, worst_spread

MOST_AGENTS = 256
MOST_BENT = 1000  # edges among which those that run over an agent are looked for
MOST_DRAWN = 32  # agents in a terminal's picture
MOST_LISTED = 64  # agents whose neighbours are listed
WIDE, HIGH, TEXT = 64, 26, 96  # characters of the picture, and of a line of text
BRAILLE = 0x2800  # two by four dots in a character
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def host_of_each(text: str, size: int | None) -> list[str]:
    """The host of each agent from `nano-1:2,xavier` (an agent each, or so many)."""
    hosts: list[str] = []
    for item in text.split(","):
        name, colon, number = item.strip().partition(":")
        if not name or (colon and not AGENT.fullmatch(number)):
            raise UsageError(f"--hosts {text}: expected names, as in nano-1:2,xavier.")
        hosts += [name] * min(int(number or 1) if colon else 1, MOST_AGENTS + 1)
    if size not in (None, len(hosts)):
        raise UsageError(f"--hosts {text} has room for {len(hosts)} agents, but -n says {size}.")
    return hosts


def checked(size: int, seed: int, lesson: float) -> int:
    """The number of agents, if there is something to draw."""
    if not 1 <= size <= MOST_AGENTS:
        raise UsageError(f"-n {size}: expected 1 to {MOST_AGENTS} agents.")
    if seed < 0:
        raise UsageError(f"--seed {seed}: expected at least 0.")
    if not 0 < lesson < 1e9:
        raise UsageError(f"--lesson-mb {lesson}: expected a positive number of megabytes.")
    return size


def summary(name: str, edges: Edges, size: int, lesson: float) -> list[str]:
    """Degree, diameter, and what a lesson of so many MB costs, in lines."""
    number, way = degrees(edges, size), worst_spread(edges, size)
    least, most = min(number), max(number)
    lines = [
        f"{name} · {size} agent{'s' * (size > 1)} · {joins(edges)}",
        f"  neighbours  {least if least == most else f'{least} to {most}'} an agent",
        f"  diameter    {diameter(edges, size)}",
    ]
    if way.transfers:
        whom = "some" if unheard(edges, size) else "all"
        lines += [
            f"  a lesson    of {lesson:g} MB reaches {whom} others within {way.rounds} exchange"
            f"{'s' * (way.rounds > 1)}: {way.transfers} transfers, {way.transfers * lesson:g} MB;",
            f"              one agent sends at most {way.busiest * lesson:g} MB of it",
        ]
    return lines + [f"  warning     {words}" for words in warnings(edges, size)]


def joins(edges: Edges) -> str:
    """How many agents are joined both ways, and how many one way."""
    oneway = len([1 for a, b in edges if (b, a) not in edges])
    both = (len(edges) - oneway) // 2
    words = [f"{both} edge{'s' * (both > 1)} both ways"] * bool(both)
    return ", ".join(words + [f"{oneway} one way"] * bool(oneway)) or "no edges"


# ── in the terminal ────────────────────────────────────────────────────────────────────────────


def picture(name: str, edges: Edges, size: int, hosts: Sequence[str] = ()) -> list[str]:
    """The agents and their edges in characters; from 33 agents on only in words."""
    lines = _canvas(name, edges, size, hosts) if size <= MOST_DRAWN else []
    return [*lines, "", *_neighbours(edges, size)]


def _canvas(name: str, edges: Edges, size: int, hosts: Sequence[str]) -> list[str]:
    points = places(name, size, hosts)
    wide, high = 2 * WIDE - 10, 4 * HIGH - 8
    tall = max(y for _, y in points)
    dots = [(5 + x * wide, 2 + y * high) for x, y in points]
    rows = int(2 + tall * high) // 4 + 1
    cells = [[0] * WIDE for _ in range(rows)]
    behind = hidden(edges, dots, 1.5)
    for a, b in edges:
        for x, y in _stroke(dots[a], dots[b], (a, b) in behind, (b, a) in edges):
            if 0 <= x < 2 * WIDE and 0 <= y < 4 * rows:
                cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    text = [[chr(BRAILLE + cell) if cell else " " for cell in row] for row in cells]
    for agent, place in enumerate(dots):
        label, middle = f" {agent} ", int(place[0]) // 2
        start = min(max(middle - len(label) // 2, 0), WIDE - len(label))
        text[int(place[1]) // 4][start : start + len(label)] = label
    return ["".join(row).rstrip() for row in text]


def _stroke(start: Point, end: Point, behind: bool, both: bool) -> list[tuple[int, int]]:
    """Dots of an edge; a stub that points away where it would run over another agent."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = hypot(dx, dy) or 1.0
    if behind:
        dx, dy, length = -9 * dx / length, -9 * dy / length, 9.0
    steps = int(length) or 1
    shown = range(steps + 1) if both or behind else range(0, steps + 1, 2)
    return [(round(start[0] + dx * k / steps), round(start[1] + dy * k / steps)) for k in shown]


def _neighbours(edges: Edges, size: int) -> list[str]:
    """Whom each agent tells, in columns."""
    near = neighbours(edges, size)
    if size > 1 and len(edges) == size * (size - 1):
        return ["  everybody → all others"]
    lists = [
        "all others" if len(b) == size - 1 > 0 else ", ".join(map(str, b)) or "nobody" for b in near
    ]
    items = [f"  {agent:>3} → {told}" for agent, told in enumerate(lists[:MOST_LISTED])]
    wide = max(map(len, items)) + 2
    each = max(TEXT // wide, 1)
    rows = [items[k : k + each] for k in range(0, len(items), each)]
    lines = ["".join(f"{item:<{wide}}" for item in row).rstrip() for row in rows]
    return [*lines, f"  … and {size - len(items)} more"] if size > len(items) else lines


# ── as SVG ─────────────────────────────────────────────────────────────────────────────────────

STYLE = """
 svg { font: 13px system-ui, sans-serif; }
 .page { fill: #fff; } .edge { stroke: #7a869a; fill: none; }
 .agent { fill: #1f6feb; } .root { fill: #b35900; }
 .number { fill: #fff; text-anchor: middle; font-weight: 600; }
 .words { fill: #24292f; font-family: ui-monospace, monospace; white-space: pre; }
 .tip { fill: #7a869a; }
 @media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; } .edge { stroke: #6e7b8f; } .agent { fill: #4c8dff; }
  .root { fill: #e08a2e; } .number { fill: #0d1117; } .words { fill: #e6edf3; }
  .tip { fill: #6e7b8f; }
 }
"""
SIDE, EDGE, BEND = 640, 44, 28  # pixels: the longer side, around it, and past an agent


def svg(name: str, edges: Edges, size: int, lines: Sequence[str], hosts: Sequence[str] = ()) -> str:
    """The picture with its figures, readable on light and dark, without scripts or fonts."""
    points = [(EDGE + x * SIDE, EDGE + y * SIDE) for x, y in places(name, size, hosts)]
    nearest = min((hypot(x - u, y - v) for (x, y), (u, v) in combinations(points, 2)), default=SIDE)
    radius = min(16.0, 0.38 * nearest)
    height = max(y for _, y in points) + EDGE
    title, width = escape(lines[0]), SIDE + 2 * EDGE
    behind = hidden(edges, points, radius) if len(edges) <= MOST_BENT else set()
    drawn = [_svg_edge(points, a, b, edges, behind, radius) for a, b in sorted(edges)]
    nodes = [_svg_agent(agent, point, radius) for agent, point in enumerate(points)]
    words = [
        f'<text class="words" x="{EDGE}" y="{height + 22 * k + 10:.0f}" xml:space="preserve">'
        f"{escape(line)}</text>"
        for k, line in enumerate(lines)
    ]
    whole = height + 22 * len(lines) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole:.0f}" '
            'role="img" aria-labelledby="title desc">',
            f'<title id="title">{title}</title>',
            f'<desc id="desc">{escape(" ".join(" ".join(lines[1:]).split()))}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto" markerUnits="userSpaceOnUse">'
            '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="page" width="{width}" height="{whole:.0f}"/>',
            f'<g class="edge" stroke-width="{1.6 if len(edges) < 400 else 0.6}">',
            *filter(None, drawn),
            "</g>",
            *nodes,
            *words,
            "</svg>\n",
        ]
    )


def _svg_edge(
    points: Sequence[Point], a: int, b: int, edges: Edges, behind: Edges, radius: float
) -> str:
    both = (b, a) in edges
    if both and a > b:
        return ""
    (x, y), (u, v) = points[a], points[b]
    length = hypot(u - x, v - y) or 1.0
    dx, dy = (u - x) / length, (v - y) / length
    u, v = (u, v) if both else (u - dx * radius, v - dy * radius)
    tip = "" if both else ' marker-end="url(#tip)"'
    bend = 2 * BEND if (a, b) in behind else 0.0
    middle = f"Q{(x + u) / 2 + dy * bend:.1f} {(y + v) / 2 - dx * bend:.1f} " if bend else "L"
    return f'<path d="M{x:.1f} {y:.1f}{middle}{u:.1f} {v:.1f}"{tip}/>'


def _svg_agent(agent: int, point: Point, radius: float) -> str:
    x, y = point
    kind = "root" if agent == 0 else "agent"
    label = (
        f'<text class="number" x="{x:.1f}" y="{y:.1f}" dy="0.35em" '
        f'font-size="{radius * 0.85:.1f}">{agent}</text>'
    )
    label = label if radius >= 7 else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>{label}'
