"""Elastic weight consolidation: weights that mattered to old tasks are held in place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from canal_mpi.interfaces import Columns
from canal_mpi.learn.fast_mlp import ParamBlock, Vector, array_of
from canal_mpi.state import strip_prefix, with_prefix


class EWC:
    """A running Fisher information, F ← α·F + (1 − α)·F_new, and the weights it belongs to."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.fisher: dict[str, Vector] = {}
        self.anchor: dict[str, Vector] = {}

    @contextmanager
    def measuring(self, blocks: Mapping[str, ParamBlock]) -> Iterator[Callable[[], None]]:
        """Measure the Fisher information of a task: call the yielded function after each
        backward pass; the blocks' gradients of each batch are squared and averaged."""
        zeros = {name: np.zeros(len(b.grad), np.float32) for name, b in blocks.items()}
        sums = {name: block.put(zeros[name].copy()) for name, block in blocks.items()}
        count = 0

        def measure() -> None:
            nonlocal count
            count += 1
            for name, block in blocks.items():
                sums[name] += block.grad * block.grad

        yield measure
        for name, block in blocks.items():
            old = block.put(self.fisher.get(name, zeros[name]))
            self.fisher[name] = self.alpha * old + (1 - self.alpha) * sums[name] / max(count, 1)
            self.anchor[name] = block.put(array_of(block.params))

    def add_penalty(self, blocks: Mapping[str, ParamBlock], strength: float) -> None:
        """Add the gradient of strength / 2 · Σ F · (w − anchor)² to the blocks' gradients."""
        for name, block in blocks.items():
            if name in self.fisher:
                for held in (self.fisher, self.anchor):
                    held[name] = block.put(held[name])  # arrays, after `load_state_dict`
                distance = block.params - self.anchor[name]
                block.grad += strength * (self.fisher[name] * distance)

    def state_dict(self) -> Columns:
        """Fisher information and anchors."""
        fisher, anchor = (_arrays(held) for held in (self.fisher, self.anchor))
        return with_prefix("fisher", fisher) | with_prefix("anchor", anchor)

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""
        self.fisher, self.anchor = (_arrays(strip_prefix(n, state)) for n in ("fisher", "anchor"))


def _arrays(vectors: Mapping[str, Vector]) -> Columns:
    return {name: array_of(vector) for name, vector in vectors.items()}
