"""How figures are drawn with matplotlib: SVG inside the page; PDF, SVG and PNG as files.

A figure is one column of a paper wide and says itself what its lines mean. Its colours are those of
LIGHT: inside the page they become CSS variables, so that dark mode and paper have their own.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from canal_mpi.interfaces import Array
from canal_mpi.report.tables import number

SERIES = ["#0072b2", "#d55e00", "#00855f", "#b4559a", "#a67c00", "#3a9ad0", "#6a4fb3", "#5b6570"]
FG, MUTED, CARD, PLAYED = "#1b1f24", "#56606b", "#ffffff", "#c8ced6"
GOOD, BAD = "#087f5b", "#b4451f"
LIGHT = {"fg": FG, "muted": MUTED, "card": CARD, "played": PLAYED, "good": GOOD, "bad": BAD}
LIGHT |= {"bg": "#f6f7f9", "line": "#d9dee4"} | {f"a{k}": name for k, name in enumerate(SERIES)}
DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)), (0, (8, 2, 2, 2))]
MARKERS = "osv^PXp*"
COLUMN = 3.4  # inches: a column of a paper
FEW = 8  # columns that have room for numbers
TEMPLATES = Path(__file__).parent / "templates"
NO_DATES = {  # the same runs give the same bytes
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@contextmanager
def styled() -> Iterator[None]:
    """How figures look, whatever the user's own matplotlib is set to."""
    import matplotlib.style

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    style = matplotlib.style.context(TEMPLATES / "figures.mplstyle", after_reset=True)
    with style, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks and the browser has
        yield


@dataclass(frozen=True)
class LeftOut:
    """A figure that has nothing to show, and what would fill it."""

    title: str
    words: str


class Figure:
    """A drawing with one pair of axes; wider than two columns it takes a row of its own."""

    def __init__(
        self, key: str, title: str, caption: str, height: float, width: float = COLUMN, **names: str
    ) -> None:
        from matplotlib.figure import Figure as Drawing

        self.key, self.title, self.caption, self.wide = key, title, caption, width > COLUMN
        self._drawing = Drawing((width, height), layout="constrained")
        self.axes: Any = self._drawing.add_subplot(**names)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))

    def legend(self) -> None:
        """What the series mean, above the plot, which keeps its height."""
        handles, labels = self.axes.get_legend_handles_labels()
        if not handles:
            return
        columns = min(max(64 // (max(map(len, labels)) + 6), 1), 4, len(handles))
        self._drawing.legend(handles, labels, loc="outside upper left", ncols=columns)
        rows = -(-len(handles) // columns)
        self._drawing.set_figheight(self._drawing.get_figheight() + 0.15 * rows)

    def fit(self, axis: str = "y") -> None:
        """Limits with some room; what was never negative begins at zero, its marks unclipped."""
        low, high = getattr(self.axes.dataLim, f"interval{axis}")
        if not np.isfinite(high - low):
            return
        room = 0.06 * (high - low) or max(0.06 * abs(high), 0.5)
        floor = -0.04 * (high or room) if 0 <= low <= max(0.5 * high, room) else low - room
        getattr(self.axes, f"set_{axis}lim")(floor, high + room)

    def name_rows(self, names: Sequence[str]) -> None:
        """Names along the left side, the first on top."""
        self.axes.set_yticks(range(len(names)), [plain(name) for name in names])
        self.axes.set_ylim(len(names) - 0.5, -0.5)

    def cells(
        self,
        rows: Sequence[str],
        columns: Sequence[str],
        cells: Sequence[tuple[int, int, str, float, str]],
    ) -> None:
        """A grid of boxes: row, column, colour, opacity and words of each."""
        from matplotlib.collections import PolyCollection

        self.name_rows(rows)
        self.axes.set_xticks(range(len(columns)), [plain(name, 8) for name in columns])
        self.axes.set_xlim(-0.5, len(columns) - 0.5)
        self.axes.tick_params(length=0)
        self.axes.xaxis.tick_top()
        self.axes.xaxis.set_label_position("top")
        self.axes.grid(False)
        self.axes.spines[:].set_visible(False)
        box = np.array([(-0.475, -0.46), (0.475, -0.46), (0.475, 0.46), (-0.475, 0.46)])
        boxes = [box + np.array([j, i]) for i, j, *_ in cells]
        colours = [(colour, shade) for _, _, colour, shade, _ in cells]
        self.axes.add_collection(PolyCollection(boxes, facecolors=colours, linewidths=0))
        middle: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
        for i, j, _, _, words in cells:
            self.axes.text(j, i, words, fontsize=6, linespacing=1.1, **middle)

    def file(self, kind: str) -> bytes:
        """The figure as a file: pdf, svg or png."""
        held = io.BytesIO()
        with styled():
            self._drawing.savefig(held, format=kind, metadata=NO_DATES[kind])
        return held.getvalue()

    def inline(self, prefix: str, words: str) -> Markup:
        """SVG for the inside of a page: ids of its own, colours by name, no background.

        matplotlib has escaped every word; nothing that is done here makes markup of one.
        """
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        held = io.StringIO()
        self._drawing.patch.set_visible(False)
        with styled():  # savefig would draw everything once more, to no purpose
            FigureCanvasSVG(self._drawing).print_svg(held, metadata=NO_DATES["svg"])
        self._drawing.patch.set_visible(True)
        text = held.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}{self.key}-", text)
        text = re.sub(r"#[0-9a-f]{6}\b", lambda found: NAMES.get(found[0], found[0]), text)
        text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
        _, box, rest = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
        label = Markup('role="img" aria-label="{}"').format(f"{self.title}. {words}")
        return Markup(f"<svg {box} {label}>{rest}")


NAMES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}


def heat(
    figure: Figure,
    values: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    framed: Sequence[tuple[int, int]] = (),
) -> Figure:
    """A heat map; blue above zero, orange below, nothing where nothing is known."""
    values = bounded(values)
    most = float(np.nanmax(np.abs(values))) or 1.0
    cells = []
    for i, j in zip(*np.nonzero(np.isfinite(values)), strict=True):
        value = float(values[i, j])
        words = number(value) if len(columns) <= FEW else ""
        cells.append((i, j, SERIES[int(value < 0)], 0.05 + 0.6 * abs(value) / most, words))
    figure.cells(rows, columns, cells)
    for i, j in framed:
        figure.axes.bar(j, 0.92, 0.95, bottom=i - 0.46, fill=False, edgecolor=FG, linewidth=0.9)
    return figure


def short(value: float) -> str:
    """A number at an axis."""
    size = abs(value)
    if 1e4 <= size < 1e9:
        return f"{value / 1e6:g}M" if size >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:g}".replace("-", "−")


def plain(text: object, most: int = 24) -> str:
    """A name from a file as it may be drawn: printable, and not longer than there is room."""
    found = "".join(c if c.isprintable() else "\ufffd" for c in str(text))
    return found if len(found) <= most else f"{found[: most - 1]}…"


def bounded(values: Any) -> Array:
    """Numbers that can be drawn; NaN for what is not known or beyond any axis."""
    found = np.asarray(values, dtype=float)
    return np.where(np.abs(found) < 1e100, found, np.nan)


def look(k: int, **more: Any) -> dict[str, Any]:
    """The k-th series: later ones are thinner and smaller, so that equal ones show each other."""
    style = {"color": SERIES[k % 8], "linestyle": DASHES[k % 5], "marker": MARKERS[k % 8]}
    size = {"linewidth": max(2.2 - 0.3 * k, 1.0), "markersize": max(5.4 - 0.7 * k, 2.8)}
    return style | size | {"markeredgecolor": CARD} | more
