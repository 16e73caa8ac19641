"""Elastic weight consolidation: weights that mattered to old tasks are held in place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from canal_mpi.learn.piece import Piece, Vector, array_of
from canal_mpi.state import inside, under
from canal_mpi.types import Columns


class Elastic:
    """A running Fisher information, F ← α·F + (1 − α)·F_new, and the weights it belongs to."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.fisher: dict[str, Vector] = {}
        self.anchor: dict[str, Vector] = {}

    @contextmanager
    def measuring(self, pieces: Mapping[str, Piece]) -> Iterator[Callable[[], None]]:
        """Measure the Fisher information of a task: call the yielded function after each
        backward pass; the pieces' gradients of each batch are squared and averaged."""
        sums = {name: _zeros(piece) for name, piece in pieces.items()}
        count = 0

        def measure() -> None:
            nonlocal count
            count += 1
            for name, piece in pieces.items():
                piece.add_squares(sums[name])

        yield measure
        for name, piece in pieces.items():
            new, old = sums[name] / max(count, 1), self.fisher.get(name, _zeros(piece))
            self.fisher[name] = self.alpha * piece.put(old) + (1 - self.alpha) * new
            self.anchor[name] = piece.put(array_of(piece.weights))

    def pull(self, pieces: Mapping[str, Piece], strength: float) -> None:
        """Add the gradient of strength / 2 · Σ F · (w − anchor)² to the pieces' gradients."""
        for name, piece in pieces.items():
            if name in self.fisher:
                for held in (self.fisher, self.anchor):
                    held[name] = piece.put(held[name])  # arrays, after a restore
                piece.pull(self.anchor[name], self.fisher[name], strength)

    def state(self) -> Columns:
        """Fisher information and anchors."""
        return under("fisher", _arrays(self.fisher)) | under("anchor", _arrays(self.anchor))

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        self.fisher, self.anchor = (_arrays(inside(n, state)) for n in ("fisher", "anchor"))


def _zeros(piece: Piece) -> Vector:
    return piece.put(np.zeros(len(piece.weights), dtype=np.float32))


def _arrays(vectors: Mapping[str, Vector]) -> Columns:
    return {name: array_of(vector) for name, vector in vectors.items()}
