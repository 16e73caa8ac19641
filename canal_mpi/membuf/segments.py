"""Choosing parts of play: contiguous segments, so that targets and next states stay whole."""

from collections.abc import Callable, Mapping

import numpy as np

from canal_mpi.types import LAST, Array, Columns

LENGTH = 50  # moves in a segment, at most

Piece = tuple[int, int]  # first move and the row behind the last move


def cut(flags: Array, length: int = LENGTH) -> list[Piece]:
    """Segments of at most `length` moves; none crosses a LAST row."""
    pieces, start = [], 0
    for end in np.flatnonzero(flags & LAST).tolist():
        pieces += [(a, min(a + length, end)) for a in range(start, end, length)]
        start = end + 1
    return pieces


def join(rows: Columns, pieces: list[Piece]) -> Columns:
    """The rows of the segments, in their order, each closed by a LAST row."""
    if not pieces:
        return {name: column[:0] for name, column in rows.items()}
    places = np.concatenate([np.arange(a, b + 1) for a, b in pieces])
    joined = {name: column[places] for name, column in rows.items()}
    closing = np.cumsum([b - a + 1 for a, b in pieces]) - 1
    joined["flags"][closing] = LAST
    return joined


def one_after_another(parts: list[Columns]) -> Columns:
    """Rows of several lessons as one; each ends with a LAST row, so nothing crosses."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _within(order: Array, pieces: list[Piece], most: int) -> list[Piece]:
    """The first pieces in that order that fit into `most` rows, oldest first again."""
    sizes = np.array([b - a + 1 for a, b in pieces], dtype=np.int64)[order]
    fitting = order[np.cumsum(sizes) <= most]
    return [pieces[k] for k in sorted(fitting.tolist())]


def uniform(pieces: list[Piece], worth: Array, rng: np.random.Generator) -> Array:
    """At random: all play is equally likely to be kept, as in a reservoir."""
    return rng.permutation(len(pieces))


def recent(pieces: list[Piece], worth: Array, rng: np.random.Generator) -> Array:
    """The newest first."""
    return np.arange(len(pieces))[::-1]


def td(pieces: list[Piece], worth: Array, rng: np.random.Generator) -> Array:
    """Where the temporal differences are largest first."""
    means = np.array([worth[a:b].mean() for a, b in pieces])
    return np.argsort(-means, kind="stable")


Chooser = Callable[[list[Piece], Array, np.random.Generator], Array]
CHOOSERS: Mapping[str, Chooser] = {
    "uniform": uniform,
    "reservoir": uniform,
    "recent": recent,
    "td": td,
}


def choose(
    rows: Columns, most: int, how: Chooser, worth: Array, rng: np.random.Generator
) -> Columns:
    """At most `most` of the rows, in segments, chosen by `how`."""
    if len(rows["flags"]) <= most:
        return rows
    pieces = cut(rows["flags"], min(LENGTH, most - 1)) if most > 1 else []
    return join(rows, _within(how(pieces, worth, rng), pieces, most))
