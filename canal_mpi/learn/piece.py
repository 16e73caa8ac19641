"""A part of the network, its parameters as one vector, with target and optimiser of its own.

A trunk shared by all tasks and the head of one task are pieces; an update moves only the pieces
that its task uses. Here are pieces of arrays, for kernels; `modules` has those of torch.
"""

from math import sqrt
from typing import Any

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.learn import kernels
from canal_mpi.learn.cpu import aligned
from canal_mpi.learn.layers import Layers
from canal_mpi.types import Array, Columns

Vector = Any  # an array, or a tensor of torch where a piece is a module


def array_of(vector: Vector) -> Array:
    """A copy of a vector, as an array."""
    held: Array = vector if isinstance(vector, np.ndarray) else vector.detach().cpu().numpy()
    return held.copy()


class Piece:
    """Layers with flat weights; `step` moves them, in place."""

    def __init__(self, layers: Layers, weights: Array) -> None:
        self.layers, self.steps = layers, 0
        self.weights: Vector = aligned(len(weights))
        self.target_weights: Vector = aligned(len(weights))
        self.grad: Vector = aligned(len(weights))
        self.mean: Vector = aligned(len(weights))
        self.square: Vector = aligned(len(weights))
        self.take(weights)

    def put(self, column: Vector) -> Vector:
        """A column as a vector of this piece's kind."""
        return column

    def follow(self) -> None:
        """Copy the weights to the target."""
        self.target_weights[:] = self.weights

    def take(self, weights: Array) -> None:
        """Go on from other weights, the target too."""
        self.weights[:] = self.put(weights)
        self.follow()

    def blend(self, weights: Array, alpha: float) -> None:
        """Move the weights towards others; the target stays."""
        kernels.blend(self.weights, weights, alpha)

    def step(self, lr: float) -> None:
        """One step of Adam along the gradient."""
        self.steps += 1
        kernels.move(self.weights, self.grad, self.mean, self.square, self.steps, lr)

    def steepness(self) -> float:
        """The length of the gradient."""
        return sqrt(kernels.squares(self.grad))

    def add_squares(self, sums: Vector) -> None:
        """Add the squared gradient to sums."""
        kernels.add_squares(sums, self.grad)

    def pull(self, anchor: Vector, fisher: Vector, strength: float) -> None:
        """Add strength · fisher · (weights − anchor) to the gradient."""
        kernels.add(self.grad, fisher * (self.weights - anchor), strength)

    def _held(self) -> dict[str, Vector]:
        """What a state consists of."""
        held = {"weights": self.weights, "target": self.target_weights}
        return held | {"mean": self.mean, "square": self.square}

    def state(self) -> Columns:
        """Everything needed to go on with the same bits."""
        held = {name: array_of(vector) for name, vector in self._held().items()}
        return held | {"steps": np.array([self.steps], dtype="<i8")}

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        for name, vector in self._held().items():
            if state[name].shape != tuple(vector.shape):
                raise DamagedData(
                    f"saved {name} have the shape {state[name].shape}, not {tuple(vector.shape)}"
                )
            vector[:] = self.put(state[name])
        self.steps = int(state["steps"][0])
