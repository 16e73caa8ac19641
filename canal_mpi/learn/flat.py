"""All parameters of a network as one vector: one optimiser step, one copy to the target."""

import torch
from torch import Tensor, nn


def flatten(network: nn.Module) -> Tensor:
    """Move the parameters (and their gradients) into one vector, of which they become views."""
    parts = list(network.parameters())
    flat = torch.cat([part.detach().reshape(-1) for part in parts])
    flat.grad = torch.zeros_like(flat)
    start = 0
    for part in parts:
        end = start + part.numel()
        part.data = flat[start:end].view_as(part)
        part.grad = flat.grad[start:end].view_as(part)
        start = end
    return flat
