"""Networks: a trunk turns observations into features, a head turns features into action values."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Fully connected layers, each followed by LayerNorm (if asked for) and ReLU."""

    linears: list[nn.Linear]
    norms: list[nn.LayerNorm]

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        sizes = [prod(shape), *widths]
        self.linears = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.norms = [nn.LayerNorm(b) for b in sizes[1:] if layer_norm]
        self.parts = nn.ModuleList([*self.linears, *self.norms])
        self.features = sizes[-1]

    def part(self, layers: slice) -> "Mlp":
        """Some of the layers, as a network of their own."""
        linears = self.linears[layers]
        part = Mlp((linears[0].in_features,), (), False)
        part.linears, part.norms = linears, self.norms[layers]
        part.parts = nn.ModuleList([*part.linears, *part.norms])
        part.features = linears[-1].out_features
        return part

    def forward(self, obs: Tensor) -> Tensor:
        """Features of flat observations [batch, numbers]."""
        for k, linear in enumerate(self.linears):
            obs = linear(obs)
            obs = torch.relu(self.norms[k](obs) if self.norms else obs)
        return obs


SMALLEST_FRAME = 36  # what the three convolutions can digest


class Cnn(nn.Module):
    """Three convolutions over stacked frames, then the layers of an Mlp."""

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < SMALLEST_FRAME:
            raise ValueError(f"the network 'cnn' needs frames, not observations of shape {shape}")
        self.shape = shape
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            seen = self.convolutions(torch.zeros(1, *shape)).shape[1]
        self.dense = Mlp((seen,), widths, layer_norm)
        self.features = self.dense.features

    def forward(self, obs: Tensor) -> Tensor:
        """Features of flat observations [batch, frames * height * width]."""
        features: Tensor = self.dense(self.convolutions(obs.view(-1, *self.shape)))
        return features


class Dueling(nn.Module):
    """A head that adds the value of the state and the advantage of each action."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.value = nn.Linear(features, 1)
        self.advantage = nn.Linear(features, actions)

    def forward(self, features: Tensor) -> Tensor:
        """Action values."""
        advantage: Tensor = self.advantage(features)
        values: Tensor = self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)
        return values
