"""How figures are drawn with matplotlib: SVG inside a page; PDF, SVG and PNG as files.

A figure is one column of a paper wide and says itself what its lines mean. Its colours are those of
LIGHT: inside a page they become CSS variables, so that dark mode and paper have their own.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Drawing

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
KINDS = {  # of files, without dates: the same runs give the same bytes
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@contextmanager
def styled() -> Iterator[None]:
    """How figures look, whatever the user's own matplotlib is set to; also a decorator."""
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
    """A drawing with one pair of axes, a column of a paper wide.

    `needs` says what would fill a figure that has nothing to show.
    """

    def __init__(
        self,
        key: str,
        title: str,
        caption: str = "",
        height: float = 2.2,
        needs: str = "",
        **names: str,
    ) -> None:
        self.key, self.title, self.caption, self.needs = key, title, caption, needs
        self._drawing = Drawing((COLUMN, height), layout="constrained")
        self.axes: Any = self._drawing.add_subplot(**names)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
        self.axes.locator_params(axis="x", nbins=6)

    @property
    def keys(self) -> tuple[tuple[str, str, str], ...]:
        """Label, glyph and colour of each series: a page has them once for all that share them."""
        found = []
        for handle, label in zip(*self.axes.get_legend_handles_labels(), strict=True):
            bar = isinstance(handle, tuple)
            colour = to_hex(handle[0].get_facecolor() if bar else handle.get_color())
            glyph = "■" if bar else GLYPHS.get(handle.get_marker(), "━")
            glyph = "○" if not bar and handle.get_markerfacecolor() == "none" else glyph
            found.append((label, glyph, CSS_NAMES.get(colour, colour)))
        return tuple(found)

    def fit(self, axis: str = "y") -> None:
        """Limits with some room; what was never negative begins at zero, its marks unclipped."""
        low, high = getattr(self.axes.dataLim, f"interval{axis}")
        if not np.isfinite(high - low):
            return
        room = 0.06 * (high - low) or max(0.06 * abs(high), 0.5)
        floor = -0.04 * (high or room) if 0 <= low <= max(0.5 * high, room) else low - room
        getattr(self.axes, f"set_{axis}lim")(floor, high + room)

    def spread(self) -> None:
        """Fit the x axis; logarithmic beyond 0.1 where one row would press all others flat."""
        self.fit("x")
        values = np.abs([x for line in self.axes.lines for x in line.get_xdata()])
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
        self.name_rows(names, max(0.19, 0.08 * of))

    def name_rows(self, names: Sequence[str], height: float = 0.19) -> None:
        """Names along the left side, the first on top; rows of so many inches."""
        self.axes.set_yticks(range(len(names)), [plain(name, 34) for name in names])
        self.axes.set_ylim(len(names) - 0.5, -0.5)
        self._drawing.set_figheight(0.6 + height * len(names))

    def bars(self, values: Mapping[tuple[str, str], float], series: Sequence[str] = ("",)) -> None:
        """Horizontal bars with their numbers; values by row and series."""
        rows, of = list(dict.fromkeys(row for row, _ in values)), len(series)
        near: dict[str, Any] = {"xytext": (2, 0), "textcoords": "offset points", "va": "center"}
        for k, label in enumerate(series):
            own = {rows.index(row): x for (row, which), x in values.items() if which == label}
            y = [row + ((k + 0.5) / of - 0.5) * 0.8 for row in own]
            style = {"color": SERIES[k], "hatch": "////" * k, "edgecolor": CARD, "linewidth": 0}
            self.axes.barh(y, list(own.values()), 0.74 / of, label=label, **style)
            for place, value in zip(y, own.values(), strict=True):  # beside names there is no room
                told = "–" if isnan(value) else short(float(f"{round(value, 3):.3g}"))
                self.axes.annotate(told, (np.fmax(value, 0), place), fontsize=7, **near)
        self.axes.margins(x=0.16)
        self.axes.grid(False, axis="y")
        self.name_rows(rows, 0.2 * of)

    def files(self) -> dict[str, bytes]:
        """The figure in every format, from now on with its legend above the plot."""
        found = {}
        with styled():
            if self.keys:
                longest = max(len(label) for label, *_ in self.keys)
                columns = max(int(244 / (27 + 4.2 * longest)), 1)
                room = 0.15 * -(-len(self.keys) // columns)
                self._drawing.set_figheight(self._drawing.get_figheight() + room)
                self._drawing.legend(loc="outside upper left", ncols=columns)
            for kind, metadata in KINDS.items():
                held = io.BytesIO()
                self._drawing.savefig(held, format=kind, metadata=metadata)
                found[kind] = held.getvalue()
        return found

    def inline(self, prefix: str, words: str) -> Markup:
        """SVG for the inside of a page: ids of its own, colours by name, no background.

        matplotlib has escaped every word; nothing that is done here makes markup of one.
        """
        held = io.StringIO()
        self._drawing.patch.set_visible(False)
        with styled():  # savefig would draw everything once more, to no purpose
            FigureCanvasSVG(self._drawing).print_svg(held, metadata=KINDS["svg"])
        self._drawing.patch.set_visible(True)
        text = held.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}{self.key}-", text)
        text = re.sub(r"#[0-9a-f]{6}\b", lambda found: CSS_NAMES.get(found[0], found[0]), text)
        text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
        _, box, rest = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
        label = Markup('role="img" aria-label="{}"').format(f"{self.title}. {words}")
        return Markup(f"<svg {box} {label}>{rest}")


Section = tuple[str, str, list[Figure]]  # of a page: its title, a line of words, its figures


def files_of(sections: Sequence[Section], folder: Path, prefix: str = "") -> dict[Path, bytes]:
    """Every figure that has something to show, in every format, by the file that it goes to."""
    return {
        folder / f"{prefix}{figure.key}.{kind}": data
        for *_, figures in sections
        for figure in figures
        if not figure.needs
        for kind, data in figure.files().items()
    }
