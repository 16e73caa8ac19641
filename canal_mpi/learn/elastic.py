"""Elastic weight consolidation: weights that mattered to old tasks are held in place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from canal_mpi.learn.piece import Piece
from canal_mpi.state import inside, under
from canal_mpi.types import Columns


class Elastic:
    """A running Fisher information, F ← α·F + (1 − α)·F_new, and the weights it belongs to."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.fisher: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}

    @contextmanager
    def measuring(self, pieces: Mapping[str, Piece]) -> Iterator[Callable[[], None]]:
        """Measure the Fisher information of a task: call the yielded function after each
        backward pass; the pieces' gradients of each batch are squared and averaged."""
        sums = {name: torch.zeros_like(piece.grad) for name, piece in pieces.items()}
        count = 0

        def measure() -> None:
            nonlocal count
            count += 1
            for name, piece in pieces.items():
                sums[name].addcmul_(piece.grad, piece.grad)

        yield measure
        for name, piece in pieces.items():
            new = sums[name] / max(count, 1)
            old = self.fisher.get(name, torch.zeros_like(new))
            self.fisher[name] = self.alpha * old + (1 - self.alpha) * new
            self.anchor[name] = piece.weights.detach().clone()

    def pull(self, pieces: Mapping[str, Piece], strength: float) -> None:
        """Add the gradient of strength / 2 · Σ F · (w − anchor)² to the pieces' gradients."""
        for name, piece in pieces.items():
            if name in self.fisher:
                distance = piece.weights.detach() - self.anchor[name]
                piece.grad.add_(self.fisher[name] * distance, alpha=strength)

    def state(self) -> Columns:
        """Fisher information and anchors."""
        return under("fisher", _arrays(self.fisher)) | under("anchor", _arrays(self.anchor))

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        self.fisher, self.anchor = (_tensors(inside(n, state)) for n in ("fisher", "anchor"))


def _arrays(tensors: Mapping[str, Tensor]) -> Columns:
    return {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}


def _tensors(columns: Columns) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column.copy()) for name, column in columns.items()}
