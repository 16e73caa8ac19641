"""How figures are drawn with matplotlib: SVG for pages; PDF, SVG and PNG as files.

A figure is one column of a paper wide and says itself what its lines mean.
"""

import io
import logging
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure as Drawing

from canal_mpi.interfaces import Array

SERIES = ["#0072b2", "#d55e00", "#00855f", "#b4559a", "#a67c00", "#3a9ad0", "#6a4fb3", "#5b6570"]
MUTED, CARD, GOOD, BAD = "#56606b", "#ffffff", "#087f5b", "#b4451f"
DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)), (0, (8, 2, 2, 2))]
MARKERS = "osv^PXp*"
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
    """A drawing with one pair of axes, a column of a paper wide, its legend above the plot."""

    def __init__(
        self, key: str, title: str, caption: str = "", height: float = 2.2, **names: str
    ) -> None:
        self.key, self.title, self.caption, self._legend = key, title, caption, False
        self._drawing = Drawing((COLUMN, height), layout="constrained")
        self.axes: Any = self._drawing.add_subplot(**names)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
        self.axes.locator_params(axis="x", nbins=6)

    @property
    def empty(self) -> bool:
        """Whether it has nothing to show."""
        limits = self.axes.dataLim
        return not np.isfinite([limits.intervalx, limits.intervaly]).all()

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

    def bars(self, values: Mapping[str, float]) -> None:
        """Horizontal bars with their numbers."""
        drawn = self.axes.barh(range(len(values)), list(values.values()), 0.74, color=SERIES[0])
        told = ["–" if isnan(x) else short(float(f"{round(x, 3):.3g}")) for x in values.values()]
        self.axes.bar_label(drawn, told, padding=2, fontsize=7)
        self.axes.margins(x=0.16)
        self.axes.grid(False, axis="y")
        self.name_rows(list(values), 0.2)

    def saved(self, kind: str) -> bytes:
        """The figure in one of the formats."""
        held = io.BytesIO()
        with styled():
            labels = self.axes.get_legend_handles_labels()[1]
            if labels and not self._legend:
                columns = max(int(244 / (27 + 4.2 * max(map(len, labels)))), 1)
                room = 0.15 * -(-len(labels) // columns)
                self._drawing.set_figheight(self._drawing.get_figheight() + room)
                self._drawing.legend(loc="outside upper left", ncols=columns)
                self._legend = True
            self._drawing.savefig(held, format=kind, metadata=KINDS[kind])
        return held.getvalue()

    @property
    def link(self) -> str:
        """The figure as the address of a picture, for the inside of a page."""
        return f"data:image/svg+xml;base64,{b64encode(self.saved('svg')).decode()}"


Section = tuple[str, str, list[Figure]]  # of a page: its title, a line of words, its figures


def files_of(sections: Sequence[Section], folder: Path, prefix: str = "") -> dict[Path, bytes]:
    """Every figure that has something to show, in every format, by the file that it goes to."""
    return {
        folder / f"{prefix}{figure.key}.{kind}": figure.saved(kind)
        for *_, figures in sections
        for figure in figures
        if not figure.empty
        for kind in KINDS
    }
