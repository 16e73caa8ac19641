"""Who makes the pieces of a network: arrays for kernels where that is possible, else torch."""

from collections.abc import Sequence
from math import prod
from typing import Protocol

from canal_mpi.job import LearnConfig
from canal_mpi.learn import cpu
from canal_mpi.learn.device import choose
from canal_mpi.learn.layers import Layers, cut
from canal_mpi.learn.passes import Compiled, Passes
from canal_mpi.learn.piece import Piece
from canal_mpi.types import Spaces


class Maker(Protocol):
    """Makes pieces (an input, a trunk, a head) and passes through them, the head last."""

    device: str
    threads: int

    def piece(self, part: str, seed: int) -> Piece:
        """A new piece; an input layer is the first layer of what the trunk would be alone."""
        ...

    def passes(self, pieces: Sequence[Piece], factor: float, target: bool = False) -> Passes:
        """Through the pieces, or through their targets."""
        ...


class Arrays:
    """An mlp with a linear head on the CPU, by kernels; needs no torch, and has its bits."""

    def __init__(self, spaces: Spaces, config: LearnConfig, device: str = "cpu") -> None:
        self.device, self.threads = device, cpu.use_threads(config.threads)
        cpu.flush_tiny()
        self.config = config
        self.trunk = Layers((prod(spaces.shape), *config.widths), config.layer_norm)
        self.head = Layers((self.trunk.sizes[-1], spaces.actions))

    def piece(self, part: str, seed: int) -> Piece:
        """A new piece; an input layer is the first layer of what the trunk would be alone."""
        if part == "head":
            return Piece(self.head, self.head.first_weights(seed))
        chosen = cut(self.config, part)
        return Piece(self.trunk.part(chosen), self.trunk.first_weights(seed, chosen))

    def passes(self, pieces: Sequence[Piece], factor: float, target: bool = False) -> Passes:
        """Through the pieces, or through their targets."""
        if target:
            return Compiled([(p.layers, p.target_weights, None) for p in pieces], factor)
        return Compiled([(p.layers, p.weights, p.grad) for p in pieces], factor)


def maker_of(spaces: Spaces, config: LearnConfig) -> Maker:
    """The maker of the network that is asked for."""
    device = choose(config.device)
    plain = device == "cpu" and config.network == "mlp" and not config.dueling
    if plain and cpu.product():
        return Arrays(spaces, config)
    from canal_mpi.learn.modules import Modules  # loads torch

    return Modules(spaces, config, device)
