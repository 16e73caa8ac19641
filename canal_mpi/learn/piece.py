"""A part of the network, its parameters as one vector, with target and optimiser of its own.

A trunk shared by all tasks and the head of one task are pieces; an update moves only the pieces
that its task uses.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from canal_mpi.errors import DamagedData
from canal_mpi.learn import kernels
from canal_mpi.types import Columns


def flatten(module: nn.Module) -> Tensor:
    """Move the parameters (and their gradients) into one vector, of which they become views."""
    parts = list(module.parameters())
    flat = torch.cat([torch.zeros(0), *(part.detach().reshape(-1).cpu() for part in parts)])
    flat = flat.to(parts[0].device) if parts else flat
    flat.grad = torch.zeros_like(flat)
    start = 0
    for part in parts:
        end = start + part.numel()
        part.data = flat[start:end].view_as(part)
        part.grad = flat.grad[start:end].view_as(part)
        start = end
    return flat


class Piece:
    """A module with flat weights; `adam` moves them, in place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.target = copy.deepcopy(module).requires_grad_(False)
        self.weights, self.target_weights = flatten(module), flatten(self.target)
        assert self.weights.grad is not None
        self.grad = self.weights.grad
        self.mean, self.square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps, on_cpu = 0, self.weights.device.type == "cpu"
        moved = (self.weights, self.grad, self.mean, self.square)
        self.arrays = tuple(tensor.detach().numpy() for tensor in moved) if on_cpu else ()

    def follow(self) -> None:
        """Copy the weights to the target."""
        self.target_weights.copy_(self.weights)

    def state(self) -> Columns:
        """Everything needed to go on with the same bits."""
        held = {n: getattr(self, n).cpu().numpy().copy() for n in ("mean", "square")}
        held |= {"weights": self.weights.detach().cpu().numpy().copy()}
        held |= {"target": self.target_weights.detach().cpu().numpy().copy()}
        return held | {"steps": np.array([self.steps], dtype="<i8")}

    @torch.no_grad()
    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        places = {
            "weights": self.weights,
            "target": self.target_weights,
            "mean": self.mean,
            "square": self.square,
        }
        for name, tensor in places.items():
            if state[name].shape != tuple(tensor.shape):
                raise DamagedData(
                    f"saved {name} have the shape {state[name].shape}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(torch.from_numpy(state[name]))
        self.steps = int(state["steps"][0])


def adam(pieces: Sequence[Piece], lr: float) -> None:
    """One step of Adam along the gradients of all pieces."""
    for piece in pieces:
        piece.steps += 1
        if piece.arrays:
            weights, grad, mean, square = piece.arrays
            kernels.move(weights, grad, mean, square, piece.steps, lr)
        elif len(piece.weights):  # a trunk may have no layers
            _by_torch(piece, lr)


def _by_torch(piece: Piece, lr: float) -> None:
    """The same on an accelerator, by the kernel of torch's fused Adam."""
    count = torch.tensor(float(piece.steps), device=piece.weights.device)
    torch._fused_adam_(
        [piece.weights],
        [piece.grad],
        [piece.mean],
        [piece.square],
        [],
        [count],
        lr=lr,
        beta1=kernels.BETA1,
        beta2=kernels.BETA2,
        weight_decay=0.0,
        eps=kernels.ADAM_EPSILON,
        amsgrad=False,
        maximize=False,
    )
