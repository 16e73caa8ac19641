"""Forward and backward through trunk and head: by autograd, or by kernels where that is possible.

Losses hand back the gradient with respect to the action values, so both ways are used alike.
What `forward` and `values` return may be overwritten by their next call.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from canal_mpi.learn import kernels
from canal_mpi.learn.nets import Mlp
from canal_mpi.types import Array

MOST_ROWS = 1024  # that pass at once when nothing is to be learnt from them


class Passes(Protocol):
    """Values for a batch of flat observations, kept for `backward`; values without that."""

    def forward(self, obs: Array) -> Array: ...
    def backward(self, gradient: Array) -> None: ...
    def values(self, obs: Array) -> Array: ...


class Plain:
    """Any modules in a row, by autograd; observations are multiplied by a factor first."""

    def __init__(self, body: Sequence[nn.Module], head: nn.Module, factor: float = 1.0) -> None:
        self.trunk, self.head, self.factor = nn.Sequential(*body), head, factor
        self.device = next(head.parameters()).device
        self._values = torch.zeros(0)

    def _through(self, obs: Array) -> Tensor:
        numbers = torch.from_numpy(obs).to(self.device, torch.float32)
        found: Tensor = self.head(self.trunk(numbers * self.factor))
        return found

    def forward(self, obs: Array) -> Array:
        """Values, remembered for `backward`."""
        with torch.enable_grad():
            self._values = self._through(obs)
        found: Array = self._values.detach().cpu().numpy()
        return found

    def backward(self, gradient: Array) -> None:
        """Replace the gradients of the weights."""
        for part in (*self.trunk.parameters(), *self.head.parameters()):
            assert part.grad is not None
            part.grad.zero_()
        slope = torch.from_numpy(gradient).to(self.device)
        self._values.backward(slope)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def values(self, obs: Array) -> Array:
        """Values alone."""
        found: Array = self._through(obs).cpu().numpy()
        return found


class Compiled:
    """Mlps in a row and a linear head on the CPU: the same numbers, by kernels of our own."""

    def __init__(self, body: Sequence[Mlp], head: nn.Linear, factor: float = 1.0) -> None:
        linears = [*(linear for part in body for linear in part.linears), head]
        norms = [norm for part in body for norm in part.norms]
        self._factor, self._rows = factor, 0
        self._held: list[Tensor] = []  # what the table points to
        self._table = np.zeros((len(linears), kernels.COLUMNS), dtype=np.int64)
        for row, linear in zip(self._table, linears, strict=True):
            row[kernels.INPUTS], row[kernels.OUTPUTS] = linear.in_features, linear.out_features
            self._point(row, (kernels.WEIGHT, kernels.BIAS), linear)
        for row, norm in zip(self._table, norms, strict=False):  # the head has none
            self._point(row, (kernels.SCALE, kernels.SHIFT), norm)

    def _point(self, row: Array, columns: tuple[int, int], part: nn.Linear | nn.LayerNorm) -> None:
        """Write where the parameters of a layer and their gradients are."""
        for column, parameter in zip(columns, (part.weight, part.bias), strict=True):
            assert parameter.grad is not None
            row[column], row[column + kernels.GRADIENT] = (
                parameter.data_ptr(),
                parameter.grad.data_ptr(),
            )
            self._held += [parameter, parameter.grad]

    def _make_room(self, rows: int) -> None:
        """Memory for what each layer takes and gives, for at most so many rows."""
        inputs, widths = int(self._table[0, kernels.INPUTS]), self._table[:, kernels.OUTPUTS]
        outputs = [torch.empty(rows, int(width)) for width in (inputs, *widths)]
        normed, slopes = ([torch.empty(rows, int(width)) for width in widths] for _ in range(2))
        spreads = [torch.empty(rows) for _ in widths]
        columns = {kernels.INPUT: outputs[:-1], kernels.OUTPUT: outputs[1:]}
        columns |= {kernels.NORMED: normed, kernels.SLOPE: slopes, kernels.SPREAD: spreads}
        for column, rooms in columns.items():
            self._table[:, column] = [room.data_ptr() for room in rooms]
        self._rooms, self._rows = (outputs, normed, slopes, spreads), rows
        self._values: Array = outputs[-1].numpy()

    def forward(self, obs: Array) -> Array:
        """Values, remembered for `backward`."""
        if len(obs) > self._rows:
            self._make_room(len(obs))
        kernels.forward(PRODUCT, self._table, obs, self._factor)
        return self._values[: len(obs)]

    def backward(self, gradient: Array) -> None:
        """Replace the gradients of the weights."""
        kernels.backward(PRODUCT, self._table, gradient, self._factor)

    def values(self, obs: Array) -> Array:
        """Values alone."""
        if len(obs) <= MOST_ROWS:
            return self.forward(obs)
        parts = range(0, len(obs), MOST_ROWS)
        return np.concatenate([self.forward(obs[k : k + MOST_ROWS]).copy() for k in parts])


def _address_of_product() -> int:
    """Where torch's library has the matrix product of BLAS; 0: it shows none."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = ctypes.CDLL(str(folder / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


PRODUCT = _address_of_product()


def passes(body: Sequence[nn.Module], head: nn.Module, factor: float = 1.0) -> Passes:
    """By compiled kernels where that is possible, else by autograd."""
    on_cpu = all(part.device.type == "cpu" for part in head.parameters())
    mlps = [part for part in body if isinstance(part, Mlp)]
    if PRODUCT and on_cpu and len(mlps) == len(body) and isinstance(head, nn.Linear):
        return Compiled(mlps, head, factor)
    return Plain(body, head, factor)
