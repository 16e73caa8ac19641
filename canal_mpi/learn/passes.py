"""Forward and backward through trunk and head: by autograd, or by hand where that is faster.

Losses hand back the gradient with respect to the action values, so both ways are used alike.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from canal_mpi.learn.nets import Mlp
from canal_mpi.types import Array


class Passes(Protocol):
    """Values for a batch, kept for `backward`; values without that; values of few states."""

    def forward(self, obs: Tensor) -> Tensor: ...
    def backward(self, gradient: Tensor) -> None: ...
    def values(self, obs: Tensor) -> Tensor: ...
    def act(self, obs: Array) -> Array: ...


class Plain:
    """Any modules in a row, by autograd."""

    def __init__(self, body: Sequence[nn.Module], head: nn.Module) -> None:
        self.trunk, self.head = nn.Sequential(*body), head
        self._values = torch.zeros(0)

    def forward(self, obs: Tensor) -> Tensor:
        """Values, remembered for `backward`."""
        with torch.enable_grad():
            self._values = self.head(self.trunk(obs))
        return self._values.detach()

    def backward(self, gradient: Tensor) -> None:
        """Replace the gradients of the weights."""
        for part in (*self.trunk.parameters(), *self.head.parameters()):
            assert part.grad is not None
            part.grad.zero_()
        self._values.backward(gradient)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Values alone."""
        found: Tensor = self.head(self.trunk(obs))
        return found

    def act(self, obs: Array) -> Array:
        """Values of a few states."""
        device = next(self.head.parameters()).device
        found: Array = self.values(torch.from_numpy(obs).to(device)).cpu().numpy()
        return found


class ByHand:
    """Mlps in a row and a linear head on the CPU: the same numbers, without autograd."""

    def __init__(self, body: Sequence[Mlp], head: nn.Linear) -> None:
        self.layers = [_views(linear) for part in body for linear in part.linears]
        self.norms = [(*_views(norm), norm.eps) for part in body for norm in part.norms]
        self.head = _views(head)
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self._last = torch.zeros(0)
        # NumPy views of the same memory: for one state NumPy is several times faster than torch.
        self._arrays = [(weight.numpy().T, bias.numpy()) for weight, bias, *_ in self.layers]
        self._norms = [(scale.numpy(), shift.numpy(), eps) for scale, shift, *_, eps in self.norms]
        self._out = (self.head[0].numpy().T, self.head[1].numpy())

    def forward(self, obs: Tensor) -> Tensor:
        """Values, remembered for `backward`."""
        self._kept.clear()
        for k, (weight, bias, _, _) in enumerate(self.layers):
            inside = torch.addmm(bias, obs, weight.t())
            after, mean, rstd = inside, bias, bias
            if self.norms:
                scale, shift, _, _, eps = self.norms[k]
                after, mean, rstd = torch.native_layer_norm(inside, scale.shape, scale, shift, eps)
            after = after.clamp_min_(0)
            self._kept.append((obs, inside, mean, rstd, after))
            obs = after
        self._last = obs
        return torch.addmm(self.head[1], obs, self.head[0].t())

    def backward(self, gradient: Tensor) -> None:
        """Replace the gradients of the weights."""
        gradient = _through(self.head, self._last, gradient, deeper=True)
        for k in reversed(range(len(self.layers))):
            obs, inside, mean, rstd, after = self._kept[k]
            gradient = torch.ops.aten.threshold_backward(gradient, after, 0)
            if self.norms:
                scale, shift, to_scale, to_shift, _ = self.norms[k]
                gradient, scales, shifts = torch.ops.aten.native_layer_norm_backward(
                    gradient, inside, scale.shape, mean, rstd, scale, shift, [True, True, True]
                )
                to_scale.copy_(scales)
                to_shift.copy_(shifts)
            gradient = _through(self.layers[k], obs, gradient, deeper=k > 0)

    def values(self, obs: Tensor) -> Tensor:
        """Values alone."""
        for k, (weight, bias, _, _) in enumerate(self.layers):
            obs = torch.addmm(bias, obs, weight.t())
            if self.norms:
                scale, shift, _, _, eps = self.norms[k]
                obs = torch.native_layer_norm(obs, scale.shape, scale, shift, eps)[0]
            obs = obs.clamp_min_(0)
        return torch.addmm(self.head[1], obs, self.head[0].t())

    def act(self, obs: Array) -> Array:
        """Values of a few states."""
        for k, (weight, bias) in enumerate(self._arrays):
            obs = obs @ weight + bias
            if self._norms:
                scale, shift, eps = self._norms[k]
                obs = obs - obs.mean(axis=1, keepdims=True)
                spread = np.sqrt(np.square(obs).mean(axis=1, keepdims=True) + eps)
                obs = obs / spread * scale + shift
            obs = np.maximum(obs, 0)
        weight, bias = self._out
        found: Array = obs @ weight + bias
        return found


Views = tuple[Tensor, Tensor, Tensor, Tensor]  # weight, bias and the gradients of both


def _views(part: nn.Linear | nn.LayerNorm) -> Views:
    """The memory of a layer's parameters and gradients, out of autograd's sight."""
    assert part.weight.grad is not None and part.bias.grad is not None
    return part.weight.detach(), part.bias.detach(), part.weight.grad, part.bias.grad


def _through(layer: Views, obs: Tensor, gradient: Tensor, deeper: bool) -> Tensor:
    """Set a linear layer's gradients; the gradient of its input, if somebody needs it."""
    weight, _, to_weight, to_bias = layer
    torch.mm(gradient.t(), obs, out=to_weight)
    torch.sum(gradient, 0, out=to_bias)
    return gradient @ weight if deeper else gradient


def passes(body: Sequence[nn.Module], head: nn.Module) -> Passes:
    """By hand where that is possible, else by autograd."""
    on_cpu = all(part.device.type == "cpu" for part in head.parameters())
    mlps = [part for part in body if isinstance(part, Mlp)]
    if len(mlps) == len(body) and isinstance(head, nn.Linear) and on_cpu:
        return ByHand(mlps, head)
    return Plain(body, head)
