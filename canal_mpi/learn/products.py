"""The matrix products of one update and nothing else: the floor that an update is held against."""

from collections.abc import Callable
from itertools import pairwise
from math import prod

import torch

from canal_mpi.job import LearnConfig
from canal_mpi.types import Spaces


def bare_products(spaces: Spaces, config: LearnConfig) -> Callable[[], None]:
    """Does the products of an update of an mlp: every pass that the loss needs, and back."""
    torch.set_num_threads(config.threads)
    sizes = [prod(spaces.shape), *config.widths, spaces.actions]
    rows, layers = config.batch, list(pairwise(sizes))
    weights, targets, slopes = ([torch.rand(b, a) for a, b in layers] for _ in range(3))
    obs, later = torch.rand(rows, sizes[0]), torch.rand(rows, sizes[0])
    outs, scratch, back = ([torch.empty(rows, b) for b in sizes[1:]] for _ in range(3))
    passes = [(later, targets if config.target_every else weights, scratch)]
    if config.double and config.target_every:
        passes.append((later, weights, scratch))
    passes.append((obs, weights, outs))
    inputs = [obs, *outs[:-1]]

    def products() -> None:
        for given, layer, rooms in passes:
            for weight, room in zip(layer, rooms, strict=True):
                given = torch.mm(given, weight.t(), out=room)
        for k in range(len(layers) - 1, -1, -1):
            torch.mm(back[k].t(), inputs[k], out=slopes[k])
            if k:
                torch.mm(back[k], weights[k], out=back[k - 1])

    return products
