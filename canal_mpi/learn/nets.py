"""Networks: from a batch of observations to one value an action."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Fully connected layers with ReLU between them."""

    def __init__(self, shape: tuple[int, ...], actions: int, widths: Sequence[int]) -> None:
        super().__init__()
        sizes = [prod(shape), *widths]
        layers: list[nn.Module] = []
        for inside, outside in pairwise(sizes):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], actions))

    def forward(self, obs: Tensor) -> Tensor:
        """Values of the actions for flat observations [batch, features]."""
        values: Tensor = self.layers(obs)
        return values


SMALLEST_FRAME = 36  # what the three convolutions can digest


class Cnn(nn.Module):
    """Three convolutions for stacked frames, then the layers of an Mlp."""

    def __init__(self, shape: tuple[int, ...], actions: int, widths: Sequence[int]) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < SMALLEST_FRAME:
            raise ValueError(f"the network 'cnn' needs frames, not observations of shape {shape}")
        self.shape = shape
        self.trunk = nn.Sequential(
            nn.Conv2d(shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            features = self.trunk(torch.zeros(1, *shape)).shape[1]
        self.head = Mlp((features,), actions, widths)

    def forward(self, obs: Tensor) -> Tensor:
        """Values of the actions for flat observations [batch, frames * height * width]."""
        values: Tensor = self.head(self.trunk(obs.view(-1, *self.shape)))
        return values
