"""How figures are drawn with matplotlib: SVG inside a page; PDF, SVG and PNG as files.

A figure is one column of a paper wide and says itself what its lines mean. Its colours are those of
LIGHT: inside a page they become CSS variables, so that dark mode and paper have their own.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from canal_mpi.interfaces import Array

SERIES = ["#0072b2", "#d55e00", "#00855f", "#b4559a", "#a67c00", "#3a9ad0", "#6a4fb3", "#5b6570"]
FG, MUTED, CARD, PLAYED = "#1b1f24", "#56606b", "#ffffff", "#c8ced6"
GOOD, BAD = "#087f5b", "#b4451f"
LIGHT = {"fg": FG, "muted": MUTED, "card": CARD, "played": PLAYED, "good": GOOD, "bad": BAD}
LIGHT |= {"bg": "#f6f7f9", "line": "#d9dee4"} | {f"a{k}": name for k, name in enumerate(SERIES)}
CSS_NAMES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)), (0, (8, 2, 2, 2))]
MARKERS = "osv^PXp*"
GLYPHS = dict(zip(MARKERS, "●■▼▲✚✖⬟★", strict=True))  # the same in a text
COLUMN = 3.4  # inches: a column of a paper
FEW = 8  # columns that have room for numbers
TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("pdf", "svg", "png")
NO_DATES = {  # the same runs give the same bytes
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@contextmanager
def styled() -> Iterator[None]:
    """How figures look, whatever the user's own matplotlib is set to; also a decorator."""
    import matplotlib.style

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    style = matplotlib.style.context(TEMPLATES / "figures.mplstyle", after_reset=True)
    with style, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks and the browser has
        yield


def number(value: float) -> str:
    """A number as people read it."""
    if not isfinite(value):
        return "–" if isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size < 5e-4:
        return "0"
    if size >= 1e12:
        return f"{value:.2e}".replace("-", "−")
    digits = 0 if size >= 100 or value == int(value) else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", "−")


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


def series_style(k: int, **more: Any) -> dict[str, Any]:
    """The k-th series: later ones are thinner and smaller, so that equal ones show each other."""
    style = {"color": SERIES[k % 8], "linestyle": DASHES[k % 5], "marker": MARKERS[k % 8]}
    size = {"linewidth": max(2.2 - 0.3 * k, 1.0), "markersize": max(5.4 - 0.7 * k, 2.8)}
    return style | size | {"markeredgecolor": CARD} | more


class Figure:
    """A drawing with one pair of axes, a column of a paper wide."""

    def __init__(
        self, key: str, title: str, caption: str = "", height: float = 2.2, **names: str
    ) -> None:
        from matplotlib.figure import Figure as Drawing

        self.key, self.title, self.caption = key, title, caption
        self.keys: tuple[tuple[str, str, str], ...] = ()  # label, glyph and colour of each series
        self._drawing = Drawing((COLUMN, height), layout="constrained")
        self.axes: Any = self._drawing.add_subplot(**names)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
        self.axes.locator_params(axis="x", nbins=6)

    def legend(self) -> None:
        """Say what the series mean: a page once for all that share it, a file above the plot."""
        from matplotlib.colors import to_hex

        for handle, label in zip(*self.axes.get_legend_handles_labels(), strict=True):
            bar = isinstance(handle, tuple)
            colour = to_hex(handle[0].get_facecolor() if bar else handle.get_color())
            glyph = "■" if bar else GLYPHS.get(handle.get_marker(), "━")
            glyph = "○" if not bar and handle.get_markerfacecolor() == "none" else glyph
            self.keys += ((label, glyph, CSS_NAMES.get(colour, colour)),)

    def fit(self, axis: str = "y") -> None:
        """Limits with some room; what was never negative begins at zero, its marks unclipped."""
        low, high = getattr(self.axes.dataLim, f"interval{axis}")
        if not np.isfinite(high - low):
            return
        room = 0.06 * (high - low) or max(0.06 * abs(high), 0.5)
        floor = -0.04 * (high or room) if 0 <= low <= max(0.5 * high, room) else low - room
        getattr(self.axes, f"set_{axis}lim")(floor, high + room)

    def spread(self) -> None:
        """A logarithmic x axis beyond 0.1 where one row would press all others flat."""
        values = np.concatenate([np.abs(line.get_xdata()) for line in self.axes.lines])
        known = values[np.isfinite(values)]
        if known.size and known.max() > 5 * max(np.median(known), 0.1):
            self.axes.set_xscale("symlog", linthresh=0.1)
            self.axes.set_xlim(right=1.6 * self.axes.dataLim.x1)
            self.axes.xaxis.set_major_formatter(lambda value, _: short(value))
            self.axes.set_xlabel(f"{self.axes.get_xlabel()}, logarithmic beyond 0.1")

    def curve(self, k: int, x: Array, band: Any, label: str, **style: Any) -> None:
        """The k-th series of a plot: value, low and high at each x; one x alone gets a bar."""
        value, low, high = bounded(band)
        colour = SERIES[k % 8]
        if len(x) == 1:
            self.axes.vlines(x, low, high, color=colour, lw=1.2, alpha=0.6)
        self.axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        self.axes.plot(x, value, **series_style(k, label=plain(label, 40), **style))

    def intervals(
        self, names: Sequence[str], values: Any, k: int = 0, of: int = 1, label: str = ""
    ) -> None:
        """A dot with its interval in each row: the k-th of so many series; [row, 3] values."""
        value, low, high = bounded(values).reshape(-1, 3).T
        y = np.arange(len(names)) + ((k + 0.5) / of - 0.5) * 0.75
        self.axes.hlines(y, low, high, color=SERIES[k % 8], lw=1.6, alpha=0.6)
        style = series_style(k, linestyle="none", markersize=4, label=plain(label, 40))
        self.axes.plot(value, y, **style)
        self.name_rows(names)
        self._drawing.set_figheight(0.6 + max(0.19, 0.08 * of) * len(names))

    def name_rows(self, names: Sequence[str]) -> None:
        """Names along the left side, the first on top."""
        self.axes.set_yticks(range(len(names)), [plain(name, 34) for name in names])
        self.axes.set_ylim(len(names) - 0.5, -0.5)

    def bars(
        self, rows: Sequence[int], values: Sequence[float], k: int, of: int, label: str
    ) -> None:
        """Horizontal bars with their numbers: the k-th of so many series."""
        y = [row + ((k + 0.5) / of - 0.5) * 0.8 for row in rows]
        style = {"color": SERIES[k % 8], "hatch": "////" * k, "edgecolor": CARD, "linewidth": 0}
        self.axes.barh(y, values, 0.74 / of, label=label, **style)
        near: dict[str, Any] = {"xytext": (2, 0), "textcoords": "offset points", "va": "center"}
        for place, value in zip(y, values, strict=True):  # beside names there is no room
            told = "–" if isnan(value) else short(float(f"{round(value, 3):.3g}"))
            self.axes.annotate(told, (np.fmax(value, 0), place), fontsize=7, **near)
        self.axes.margins(x=0.16)
        self.axes.grid(False, axis="y")

    def file(self, kind: str) -> bytes:
        """The figure as a file: pdf, svg or png, with room for its legend above the plot."""
        held, drawing, height = io.BytesIO(), self._drawing, self._drawing.get_figheight()
        with styled():
            if self.keys:
                longest = max(len(label) for label, *_ in self.keys)
                columns = max(int(244 / (27 + 4.2 * longest)), 1)
                drawing.legend(loc="outside upper left", ncols=columns)
                drawing.set_figheight(height + 0.15 * -(-len(self.keys) // columns))
            drawing.savefig(held, format=kind, metadata=NO_DATES[kind])
        for legend in drawing.legends:
            legend.remove()
        drawing.set_figheight(height)
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
        text = re.sub(r"#[0-9a-f]{6}\b", lambda found: CSS_NAMES.get(found[0], found[0]), text)
        text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
        _, box, rest = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
        label = Markup('role="img" aria-label="{}"').format(f"{self.title}. {words}")
        return Markup(f"<svg {box} {label}>{rest}")


@dataclass(frozen=True)
class LeftOut:
    """A figure that has nothing to show, and what would fill it."""

    title: str
    words: str


@dataclass
class Pictures:
    """Figures in sections, each with a title and a line of words; and why others were left out."""

    sections: list[tuple[str, str, list[Figure]]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def add(self, title: str, words: str, shown: Iterable[Figure | LeftOut]) -> None:
        """Add a section of those that have something to show."""
        found: list[Figure] = []
        for one in shown:
            if isinstance(one, Figure):
                found.append(one)
            else:
                self.left_out.setdefault(one.words, []).append(one.title)
        self.sections += [(title, words, found)] if found else []

    def files(self, folder: Path, prefix: str = "") -> dict[Path, bytes]:
        """Every figure in every format, by the file that it goes to."""
        shown = [figure for *_, found in self.sections for figure in found]
        return {
            folder / f"{prefix}{one.key}.{kind}": one.file(kind) for one in shown for kind in KINDS
        }
