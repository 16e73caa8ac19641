"""Forward and backward through trunk and head: by autograd, or by hand where that is faster.

Losses hand back the gradient with respect to the action values, so both ways are used alike.
What `forward` and `values` return may be overwritten by their next call.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from canal_mpi.learn.nets import Mlp
from canal_mpi.types import Array

Views = tuple[Tensor, Tensor, Tensor, Tensor]  # weight, bias and the gradients of both
RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input
NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
ALL_THREE = [True, True, True]  # gradients of input, scale and shift


class Passes(Protocol):
    """Values for a batch, kept for `backward`; values without that; values of few states."""

    def forward(self, obs: Tensor) -> Tensor: ...
    def backward(self, gradient: Tensor) -> None: ...
    def values(self, obs: Tensor) -> Tensor: ...
    def act(self, obs: Array) -> Array: ...


class Plain:
    """Any modules in a row, by autograd; observations are multiplied by a factor first."""

    def __init__(self, body: Sequence[nn.Module], head: nn.Module, factor: float = 1.0) -> None:
        self.trunk, self.head, self.factor = nn.Sequential(*body), head, factor
        self._values = torch.zeros(0)

    def forward(self, obs: Tensor) -> Tensor:
        """Values, remembered for `backward`."""
        with torch.enable_grad():
            self._values = self.head(self.trunk(obs * self.factor))
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
        found: Tensor = self.head(self.trunk(obs * self.factor))
        return found

    def act(self, obs: Array) -> Array:
        """Values of a few states."""
        device = next(self.head.parameters()).device
        found: Array = self.values(torch.from_numpy(obs).to(device)).cpu().numpy()
        return found


class ByHand:
    """Mlps in a row and a linear head on the CPU: the same numbers, without autograd.

    Every call of torch or NumPy costs some microseconds here, most of all between two steps of an
    emulator, when the caches are cold: what can be made once is made in the constructor.
    """

    def __init__(self, body: Sequence[Mlp], head: nn.Linear, factor: float = 1.0) -> None:
        linears = [*(linear for part in body for linear in part.linears), head]
        self.linears = [_views(linear) for linear in linears]
        self.norms = [(*_views(norm), norm.eps) for part in body for norm in part.norms]
        self.factors = [factor, *(1.0 for _ in linears[1:])]  # on what a layer is given
        self.turned = [weight.t() for weight, *_ in self.linears]
        self.shapes = [[len(scale)] for scale, *_ in self.norms]
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self._room: list[Tensor] = []
        self._scratch: list[Tensor] = []
        # NumPy views of the same memory: for one state NumPy is several times faster than torch.
        self._arrays = [(weight.numpy().T, bias.numpy()) for weight, bias, *_ in self.linears]
        self._norms = [(scale.numpy(), shift.numpy(), eps) for scale, shift, *_, eps in self.norms]

    def forward(self, obs: Tensor) -> Tensor:
        """Values, remembered for `backward`."""
        if not self._room or len(self._room[0]) != len(obs):
            self._room = self._memory(len(obs), False)
        self._kept.clear()
        for k, (_, bias, _, _) in enumerate(self.linears):
            inside = torch.addmm(
                bias, obs, self.turned[k], alpha=self.factors[k], out=self._room[k]
            )
            after, mean, rstd = inside, bias, bias
            if k < len(self.norms):
                scale, shift, _, _, eps = self.norms[k]
                after, mean, rstd = torch.native_layer_norm(
                    inside, self.shapes[k], scale, shift, eps
                )
            self._kept.append((obs, inside, mean, rstd, after))
            obs = after.relu_() if k < len(self.linears) - 1 else after
        return obs

    def backward(self, gradient: Tensor) -> None:
        """Replace the gradients of the weights; what `forward` remembered is used up."""
        for k in range(len(self.linears) - 1, -1, -1):
            obs, inside, mean, rstd, after = self._kept.pop()
            if k < len(self.linears) - 1:
                RELU_BACKWARD(gradient, after, 0, grad_input=gradient)
            if k < len(self.norms):
                scale, shift, to_scale, to_shift, _ = self.norms[k]
                gradient, scales, shifts = NORM_BACKWARD(
                    gradient, inside, self.shapes[k], mean, rstd, scale, shift, ALL_THREE
                )
                to_scale.copy_(scales)
                to_shift.copy_(shifts)
            weight, _, to_weight, to_bias = self.linears[k]
            turned = gradient.t()
            torch.addmm(to_weight, turned, obs, beta=0, alpha=self.factors[k], out=to_weight)
            torch.sum(gradient, 0, out=to_bias)
            if k:  # `after` was needed for the last time; its memory is still in the cache
                deeper = after if after.shape == obs.shape else torch.empty_like(obs)
                gradient = torch.mm(gradient, weight, out=deeper)

    def values(self, obs: Tensor) -> Tensor:
        """Values alone."""
        if not self._scratch or len(self._scratch[0]) != len(obs):
            self._scratch = self._memory(len(obs), bool(self.norms))
        for k, (_, bias, _, _) in enumerate(self.linears):
            room = self._scratch[k]
            obs = torch.addmm(bias, obs, self.turned[k], alpha=self.factors[k], out=room)
            if k < len(self.norms):
                scale, shift, _, _, eps = self.norms[k]
                obs = torch.native_layer_norm(obs, self.shapes[k], scale, shift, eps)[0]
            obs = obs.relu_() if k < len(self.linears) - 1 else obs
        return obs

    def _memory(self, rows: int, share: bool) -> list[Tensor]:
        """Room for what each layer gives; layers of one width may share it: that fits the cache."""
        shared: dict[int, Tensor] = {}
        room = []
        for _, bias, *_ in self.linears[:-1]:
            fresh = torch.empty(rows, len(bias))
            room.append(shared.setdefault(len(bias), fresh) if share else fresh)
        return [*room, torch.empty(rows, len(self.linears[-1][1]))]

    def act(self, obs: Array) -> Array:
        """Values of a few states."""
        if len(obs) > 1:
            aligned = torch.from_numpy(obs).clone()  # always in the same way, for the same bits
            many: Array = self.values(aligned).numpy().copy()
            return many
        state = obs[0] * np.float32(self.factors[0])
        for k, (weight, bias) in enumerate(self._arrays):
            state = state @ weight
            state += bias
            if k < len(self._norms):
                scale, shift, eps = self._norms[k]
                state -= np.add.reduce(state) / len(state)
                state *= scale / np.float32(sqrt(state.dot(state) / len(state) + eps))
                state += shift
            if k < len(self._arrays) - 1:
                np.maximum(state, 0, out=state)
        found: Array = state[None]
        return found


def _views(part: nn.Linear | nn.LayerNorm) -> Views:
    """The memory of a layer's parameters and gradients, out of autograd's sight."""
    assert part.weight.grad is not None and part.bias.grad is not None
    return part.weight.detach(), part.bias.detach(), part.weight.grad, part.bias.grad


def passes(body: Sequence[nn.Module], head: nn.Module, factor: float = 1.0) -> Passes:
    """By hand where that is possible, else by autograd."""
    on_cpu = all(part.device.type == "cpu" for part in head.parameters())
    mlps = [part for part in body if isinstance(part, Mlp)]
    if len(mlps) == len(body) and isinstance(head, nn.Linear) and on_cpu:
        return ByHand(mlps, head, factor)
    return Plain(body, head, factor)
