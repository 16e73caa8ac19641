"""Sharing policies: which of the offered lessons an agent wants for a task. They never see MPI."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from statistics import median

import numpy as np

from canal_mpi.interfaces import LAST, Array, Columns, Offer


@dataclass(frozen=True)
class Need:
    """What an agent knows about the task it is about to learn."""

    task: str
    round: int
    nearest: int = 1  # how many lessons a policy by similarity takes
    donors: int = 1  # how many lessons of the very same task are taken
    measure: str = "weights"  # how embeddings are compared
    embedding: Array = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


def none(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Learn alone: nothing is offered and nothing is taken."""
    return []


def exact(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """The lessons of the very same task, best first."""
    return best_first([offer for offer in offers if offer.task == need.task])[: need.donors]


def previous(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Every lesson of the round before."""
    return [offer for offer in offers if offer.round == need.round - 1]


def everything(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Every lesson there is."""
    return list(offers)


def similar(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """The lessons whose embeddings are nearest to the task's."""
    comparable = [offer for offer in offers if len(offer.embedding) == len(need.embedding)]

    def how_far(offer: Offer) -> float:
        return DISTANCES[need.measure](need.embedding, offer.embedding)

    return sorted(best_first(comparable), key=how_far)[: need.nearest]


def best_first(offers: Sequence[Offer]) -> list[Offer]:
    """Offers by the donors' scores; an unknown score counts as the median of the known ones.

    At equal scores the later round wins, as its donor may have learnt from the earlier ones, then
    known scores, more episodes, the lowest agent.
    """
    known = [offer.score for offer in offers if not isnan(offer.score)]
    middle = median(known) if known else 0.0

    def rank(offer: Offer) -> tuple[float, int, bool, int, int]:
        unknown = isnan(offer.score)
        score = middle if unknown else offer.score
        return (-score, -offer.round, unknown, -offer.episodes, offer.donor)

    return sorted(offers, key=rank)


Policy = Callable[[Need, Sequence[Offer]], list[Offer]]
POLICIES: Mapping[str, Policy] = {
    "none": none,
    "exact": exact,
    "previous": previous,
    "all": everything,
    "simnet": similar,
    "wasserstein": similar,
}


DIRECTIONS, QUANTILES = 64, 16


def weights_distance(a: Array, b: Array) -> float:
    """Euclidean distance of two SimNets' weights; layers are vectors of one concatenation."""
    return float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))


def cosine_distance(a: Array, b: Array) -> float:
    """1 minus the cosine of the angle between two embeddings."""
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float(1 - np.dot(a, b) / length) if length else 1.0


def sorted_distance(a: Array, b: Array) -> float:
    """Wasserstein-1 distance of two equally many numbers, such as outputs on the same states."""
    return float(np.abs(np.sort(a) - np.sort(b)).mean())


DISTANCES: Mapping[str, Callable[[Array, Array], float]] = {
    "weights": weights_distance,
    "outputs": sorted_distance,
    "cosine": cosine_distance,
}


def play_embedding(rows: Columns, actions: int) -> Array:
    """A sliced Wasserstein embedding of (state, action, reward) samples.

    The samples are projected on fixed random directions; the quantiles of each projection, less
    those of a fixed reference, are the embedding. Euclidean distance between two embeddings is the
    sliced Wasserstein-2 distance of the samples.
    """
    moves = (rows["flags"] & LAST) == 0
    state = rows["state"][moves].reshape(int(moves.sum()), -1).astype(np.float32)
    scale = 255.0 if rows["state"].dtype == np.uint8 else 1.0
    chosen = np.eye(actions, dtype=np.float32)[rows["action"][moves]]
    reward = np.sign(rows["reward"][moves]).astype(np.float32)[:, None]
    points = np.concatenate([state / scale, chosen / actions, reward], axis=1)
    rng = np.random.Generator(np.random.PCG64(7))
    directions = rng.normal(size=(points.shape[1], DIRECTIONS)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=0)
    levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
    reference = 0.5 * directions.sum(axis=0)  # all weight on the middle of the unit cube
    quantiles = np.quantile(points @ directions, levels, axis=0) - reference
    embedding: Array = (quantiles / np.sqrt(quantiles.size)).astype("<f4").reshape(-1)
    return embedding


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


def choose(rows: Columns, most: int, rng: np.random.Generator) -> Columns:
    """At most `most` of the rows, in whole segments, drawn by `rng`."""
    if len(rows["flags"]) <= most:
        return rows
    pieces = cut(rows["flags"], min(LENGTH, most - 1)) if most > 1 else []
    order = rng.permutation(len(pieces))
    sizes = np.array([b - a + 1 for a, b in pieces], dtype=np.int64)[order]
    fitting = order[np.cumsum(sizes) <= most]
    return join(rows, [pieces[k] for k in sorted(fitting.tolist())])


def hold_out(
    rows: Columns, fraction: float, most: int, rng: np.random.Generator
) -> tuple[Columns, Columns]:
    """Rows without some segments, and those segments: that fraction, at least one, at most `most`.

    Where there is only one segment nothing is held back: it is in both.
    """
    pieces = cut(rows["flags"])
    if len(pieces) < 2:
        return rows, rows
    number = max(min(round(fraction * len(pieces)), most // LENGTH), 1)
    held = set(rng.permutation(len(pieces))[:number].tolist())
    left: list[Piece] = []
    for k, (start, end) in enumerate(pieces):
        if k not in held and left and left[-1][1] == start:
            left[-1] = (left[-1][0], end)  # play goes on: no target is cut short
        elif k not in held:
            left.append((start, end))
    return join(rows, left), join(rows, [pieces[k] for k in sorted(held)])
