"""A network of one's own: layers with connections that skip them.

canal-mpi train --job smoke --set learn.network=residual:Residual --set learn.widths=[32,32]
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Turns flat observations into features; the heads of the tasks, one layer each, are ours."""

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        self.features = widths[0]  # how many features `forward` gives
        self.first = nn.Linear(prod(shape), self.features)
        norm = nn.LayerNorm if layer_norm else nn.Identity
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(self.features), nn.ReLU(), nn.Linear(self.features, self.features))
            for _ in widths[1:]
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Features [batch, features] of flat observations [batch, numbers]."""
        found: Tensor = self.first(obs)
        for block in self.blocks:
            found = found + block(found)
        return torch.relu(found)
