"""Forward and backward through trunk and head, by kernels over arrays.

Losses hand back the gradient with respect to the action values, so that this way and the other, by
autograd in `modules`, are used alike. What `forward` and `values` return may be overwritten by
their next call.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from canal_mpi.learn import kernels
from canal_mpi.learn.cpu import aligned, product
from canal_mpi.learn.layers import Layers
from canal_mpi.types import Array

MOST_ROWS = 1024  # that pass at once when nothing is to be learnt from them


class Passes(Protocol):
    """Values for a batch of flat observations, kept for `backward`; values without that."""

    def forward(self, obs: Array) -> Array: ...
    def backward(self, gradient: Array) -> None: ...
    def values(self, obs: Array) -> Array: ...


class Compiled:
    """Layers in a row, the last one the head; `parts` have weights and where gradients go."""

    def __init__(
        self, parts: Sequence[tuple[Layers, Array, Array | None]], factor: float = 1.0
    ) -> None:
        self._product, self._factor, self._rows = product(), factor, 0
        self._parts = parts  # what the table points to
        rows = [_row(*part, k) for part in parts for k in range(len(part[0].shapes))]
        self._table = np.array(rows, dtype=np.int64)

    def _make_room(self, rows: int) -> None:
        """Memory for what each layer takes and gives, for at most so many rows."""
        inputs, widths = int(self._table[0, kernels.INPUTS]), self._table[:, kernels.OUTPUTS]
        outputs = [aligned(rows, int(width)) for width in (inputs, *widths)]
        normed, slopes = ([aligned(rows, int(width)) for width in widths] for _ in range(2))
        spreads = [aligned(rows) for _ in widths]
        columns = {kernels.INPUT: outputs[:-1], kernels.OUTPUT: outputs[1:]}
        columns |= {kernels.NORMED: normed, kernels.SLOPE: slopes, kernels.SPREAD: spreads}
        for column, rooms in columns.items():
            self._table[:, column] = [room.ctypes.data for room in rooms]
        self._rooms, self._rows = (outputs, normed, slopes, spreads), rows
        self._values = outputs[-1]

    def forward(self, obs: Array) -> Array:
        """Values, remembered for `backward`."""
        if len(obs) > self._rows:
            self._make_room(len(obs))
        kernels.forward(self._product, self._table, obs, self._factor)
        return self._values[: len(obs)]

    def backward(self, gradient: Array) -> None:
        """Replace the gradients of the weights."""
        assert self._table[0, kernels.TO_BIAS], "a target has no gradients"
        kernels.backward(self._product, self._table, gradient, self._factor)

    def values(self, obs: Array) -> Array:
        """Values alone."""
        if len(obs) <= MOST_ROWS:
            return self.forward(obs)
        parts = range(0, len(obs), MOST_ROWS)
        return np.concatenate([self.forward(obs[k : k + MOST_ROWS]).copy() for k in parts])


def _row(layers: Layers, weights: Array, grad: Array | None, k: int) -> Array:
    """Layer k in the table of the kernels: its widths, its parameters and their gradients."""
    row = np.zeros(kernels.COLUMNS, dtype=np.int64)
    row[kernels.INPUTS], row[kernels.OUTPUTS] = layers.shapes[k]
    columns = (kernels.WEIGHT, kernels.BIAS, kernels.SCALE, kernels.SHIFT)
    for column, start in zip(columns, layers.places()[k], strict=True):
        if start >= 0:
            row[column] = weights[start:].ctypes.data
            row[column + kernels.GRADIENT] = 0 if grad is None else grad[start:].ctypes.data
    return row
