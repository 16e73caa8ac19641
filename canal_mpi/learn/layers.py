"""Fully connected layers as numbers: where each has its parameters in one flat vector.

The vector has the weights and the bias of every layer, then scale and shift of every LayerNorm:
the order in which the module `Mlp` has its parameters.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np

from canal_mpi.job import LearnConfig
from canal_mpi.types import Array

DRAWN = 1 << 16  # numbers at once, so that wide layers need no memory of other types


class Place(NamedTuple):
    """Where the parameters of a layer start."""

    weight: int
    bias: int
    scale: int = -1  # no LayerNorm
    shift: int = -1


@dataclass(frozen=True)
class Layers:
    """Layers in a row: how many numbers go in, and how many come out of each."""

    sizes: tuple[int, ...]
    norm: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each."""
        return list(pairwise(self.sizes))

    def places(self) -> list[Place]:
        """Where each has its parameters."""
        found, start = [], 0
        for inputs, outputs in self.shapes:
            found.append(Place(start, start + inputs * outputs))
            start += (inputs + 1) * outputs
        for k, (_, outputs) in enumerate(self.shapes if self.norm else ()):
            found[k] = found[k]._replace(scale=start, shift=start + outputs)
            start += 2 * outputs
        return found

    @property
    def length(self) -> int:
        """How many parameters they have."""
        each = 3 if self.norm else 1
        return sum((inputs + each) * outputs for inputs, outputs in self.shapes)

    def part(self, layers: slice) -> "Layers":
        """Some of them."""
        start, stop, _ = layers.indices(len(self.shapes))
        return Layers(self.sizes[start : stop + 1], self.norm)

    def first_weights(self, seed: int, layers: slice = slice(None)) -> Array:
        """What modules of torch start with after `manual_seed`, of all layers or of some."""
        stream = np.random.RandomState(seed & 0xFFFFFFFF)  # torch's: mt19937
        drawn = [
            _uniform(stream, (inputs + 1) * outputs, 1 / sqrt(inputs))
            for inputs, outputs in self.shapes
        ][layers]
        for _, outputs in self.shapes[layers] if self.norm else ():
            drawn += [np.ones(outputs, np.float32), np.zeros(outputs, np.float32)]
        return np.concatenate([np.zeros(0, np.float32), *drawn])


def _uniform(stream: np.random.RandomState, count: int, bound: float) -> Array:
    """Numbers between -bound and bound, by the 24 low bits of each draw, as torch makes them."""
    found, bound = np.empty(count, np.float32), float(np.float32(bound))
    for start in range(0, count, DRAWN):
        part = found[start : start + DRAWN]
        bits = stream.randint(0, 1 << 32, len(part), np.uint32) & 0xFFFFFF
        part[:] = bits * 2.0**-24 * (2 * bound) - bound
    return found


def splits(config: LearnConfig) -> bool:
    """Whether every task has an input layer of its own in front of the shared trunk."""
    heads = config.own_input and config.identity == "heads"
    return heads and config.network == "mlp" and len(config.widths) > 1


def cut(config: LearnConfig, part: str) -> slice:
    """The layers of a whole trunk that an input or a trunk has."""
    if not splits(config):
        return slice(None)
    return slice(0, 1) if part == "input" else slice(1, None)
