"""Small helpers that draw SVG as text; every word that goes in is escaped."""

from collections.abc import Sequence
from html import escape
from math import ceil, cos, floor, isfinite, isnan, log10, pi, sin
from typing import NamedTuple

COLOURS = 8  # var(--a0) … var(--a7), one for each agent or group


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element; `cls` is class and `stroke_width` is stroke-width."""
    words = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{''.join(inside)}</{name}>" if inside else f"<{name}{words}/>"


def _value(value: object) -> str:
    return (
        f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
    )


def text(x: float, y: float, words: str, anchor: str = "start", **more: object) -> str:
    """Words at a place."""
    return tag("text", escape(words), x=x, y=y, text_anchor=anchor, **more)


def picture(width: float, height: float, title: str, alt: str, *inside: str) -> str:
    """A whole drawing with its title and a text for those who can't see it."""
    return tag(
        "svg",
        tag("title", escape(title)),
        tag("desc", escape(alt)),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        role="img",
        aria_label=f"{title}. {alt}",
    )


def colour(number: int) -> str:
    """The colour of an agent or a group."""
    return f"var(--a{number % COLOURS})"


def path(points: Sequence[tuple[float, float]], **more: object) -> str:
    """A line through points."""
    words = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag("path", d=f"M{words}", **({"fill": "none"} | more)) if len(points) > 1 else ""


def number(value: float) -> str:
    """A number as people read it."""
    if not isfinite(value):
        return "–" if isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size < 5e-4:
        return "0"
    digits = 0 if size >= 100 or value == int(value) else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", "−")


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers between two ends."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10 ** floor(log10(raw))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= raw)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


class Axes(NamedTuple):
    """The frame of a plot: where numbers lie on the paper."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = (x - x0) / (x1 - x0 or 1)
        up = (y - y0) / (y1 - y0 or 1)
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def frame(self, x_label: str = "", y_label: str = "") -> str:
        """Grid lines, numbers and names of the axes."""
        right, bottom = self.left + self.width, self.top + self.height
        parts = []
        for value in ticks(*self.y):
            y = self.at(self.x[0], value)[1]
            parts.append(tag("line", x1=self.left, x2=right, y1=y, y2=y, cls="grid"))
            parts.append(text(self.left - 5, y + 3.5, number(value), "end", cls="small"))
        for value in ticks(*self.x, 4):
            x = self.at(value, self.y[0])[0]
            parts.append(text(x, bottom + 14, _short(value), "middle", cls="small"))
        middle = self.left + self.width / 2
        parts.append(text(middle, bottom + 28, x_label, "middle", cls="small") if x_label else "")
        parts.append(text(2, self.top - 7, y_label, cls="small") if y_label else "")
        return "".join(parts)


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


def span(values: Sequence[float], pad: float = 0.06) -> tuple[float, float]:
    """The range of values, with some room."""
    known = [value for value in values if isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    room = (high - low) * pad or max(abs(high) * pad, 0.5)
    return low - room, high + room


def circle_places(count: int, size: float, margin: float) -> list[tuple[float, float]]:
    """Places on a circle, the first on top."""
    radius, middle = (size / 2 - margin) * (count > 1), size / 2
    turns = [2 * pi * k / max(count, 1) for k in range(count)]
    return [(middle + radius * sin(turn), middle - radius * cos(turn)) for turn in turns]


def graph(names: Sequence[str], edges: Sequence[tuple[int, int]], title: str, alt: str) -> str:
    """Nodes on a circle and arrows between them; an edge both ways is one line."""
    size = 260 if len(names) <= 12 else 420
    dot = 15 if len(names) <= 12 else 10
    places, both = circle_places(len(names), size, 26), set(edges)
    parts = [_arrow_head()]
    for a, b in sorted(both):
        if (b, a) in both and a > b:
            continue
        (x1, y1), (x2, y2) = places[a], places[b]
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
        ux, uy = (x2 - x1) / length * (dot + 3), (y2 - y1) / length * (dot + 3)
        one_way = (b, a) not in both
        ends = {"x1": x1 + ux, "y1": y1 + uy, "x2": x2 - ux, "y2": y2 - uy}
        parts.append(tag("line", **ends, cls="edge", marker_end="url(#to)" if one_way else None))
    for k, (x, y) in enumerate(places):
        parts.append(tag("circle", cx=x, cy=y, r=dot, fill=colour(k), cls="node"))
        parts.append(text(x, y + 4, names[k], "middle", cls="on"))
    return picture(size, size, title, alt, *parts)


def _arrow_head() -> str:
    tip = tag("path", d="M0 0L8 4L0 8z", cls="tip")
    box = {"refX": "7", "refY": "4", "markerWidth": "8", "markerHeight": "8", "orient": "auto"}
    return tag("defs", tag("marker", tip, id="to", **box))


def stand_alone(drawing: str, colours: dict[str, str], style: str) -> str:
    """A drawing as a file of its own: colours by value, styles inside."""
    for name, value in colours.items():
        drawing = drawing.replace(f"var(--{name})", value)
        style = style.replace(f"var(--{name})", value)
    return drawing.replace("<title>", f"<style>{style}</style><title>", 1)
