"""The MLP on a CPU: parameters in flat blocks, forward and backward passes by compiled kernels.

Nothing here needs torch. `networks` has the same for any module of torch, by autograd.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns, Spaces
from canal_mpi.learn import cpu, kernels
from canal_mpi.learn.cpu import aligned, product
from canal_mpi.settings import LearnConfig

DRAWN = 1 << 16  # numbers at once, so that wide layers need no memory of other types
MAX_ROWS = 1024  # that pass at once when there is nothing to learn from them
Vector = Any  # an array, or a tensor of torch where a block belongs to a module


class Place(NamedTuple):
    """Where the parameters of a layer start."""

    weight: int
    bias: int
    scale: int = -1  # no LayerNorm
    shift: int = -1


@dataclass(frozen=True)
class Layers:
    """Layers in a row: how many numbers go in, and how many come out of each."""

    sizes: tuple[int, ...]
    norm: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each."""
        return list(pairwise(self.sizes))

    def places(self) -> list[Place]:
        """Where each has its parameters."""
        found, start = [], 0
        for inputs, outputs in self.shapes:
            found.append(Place(start, start + inputs * outputs))
            start += (inputs + 1) * outputs
        for k, (_, outputs) in enumerate(self.shapes if self.norm else ()):
            found[k] = found[k]._replace(scale=start, shift=start + outputs)
            start += 2 * outputs
        return found

    @property
    def length(self) -> int:
        """How many parameters they have."""
        each = 3 if self.norm else 1
        return sum((inputs + each) * outputs for inputs, outputs in self.shapes)

    def part(self, layers: slice) -> "Layers":
        """Some of them."""
        start, stop, _ = layers.indices(len(self.shapes))
        return Layers(self.sizes[start : stop + 1], self.norm)

    def initial_params(self, seed: int, layers: slice = slice(None)) -> Array:
        """What modules of torch start with after `manual_seed`, of all layers or of some."""
        stream = np.random.RandomState(seed & 0xFFFFFFFF)  # torch's: mt19937
        drawn = [
            _uniform(stream, (inputs + 1) * outputs, 1 / sqrt(inputs))
            for inputs, outputs in self.shapes
        ][layers]
        for _, outputs in self.shapes[layers] if self.norm else ():
            drawn += [np.ones(outputs, np.float32), np.zeros(outputs, np.float32)]
        return np.concatenate([np.zeros(0, np.float32), *drawn])


def _uniform(stream: np.random.RandomState, count: int, bound: float) -> Array:
    """Numbers between -bound and bound, by the 24 low bits of each draw, as torch makes them."""
    found, bound = np.empty(count, np.float32), float(np.float32(bound))
    for start in range(0, count, DRAWN):
        part = found[start : start + DRAWN]
        bits = stream.randint(0, 1 << 32, len(part), np.uint32) & 0xFFFFFF
        part[:] = bits * 2.0**-24 * (2 * bound) - bound
    return found


def has_own_input(config: LearnConfig) -> bool:
    """Whether every task has an input layer of its own in front of the shared trunk."""
    heads = config.per_task_input and config.heads == "per_task"
    return heads and config.network == "mlp" and len(config.widths) > 1


def layers_of(config: LearnConfig, part: str) -> slice:
    """The layers of a whole trunk that an input or a trunk has."""
    if not has_own_input(config):
        return slice(None)
    return slice(0, 1) if part == "input" else slice(1, None)


def array_of(vector: Vector) -> Array:
    """A copy of a vector, as an array."""
    held: Array = vector if isinstance(vector, np.ndarray) else vector.detach().cpu().numpy()
    return held.copy()


class ParamBlock:
    """Layers whose parameters are one vector, with target, gradient and Adam of their own."""

    def __init__(self, layers: Layers, params: Array) -> None:
        self.layers, self.step = layers, 0
        self.params: Vector = aligned(len(params))
        self.target_params: Vector = aligned(len(params))
        self.grad: Vector = aligned(len(params))
        self.exp_avg: Vector = aligned(len(params))
        self.exp_avg_sq: Vector = aligned(len(params))
        self.set(params)

    def put(self, column: Vector) -> Vector:
        """A column as a vector of this block's kind."""
        return column

    def update_target(self) -> None:
        """Copy the parameters to the target."""
        self.target_params[:] = self.params

    def set(self, params: Array) -> None:
        """Go on from other parameters, the target too."""
        self.params[:] = self.put(params)
        self.update_target()

    def polyak_update(self, params: Array, tau: float) -> None:
        """Move the parameters towards others; the target stays."""
        kernels.blend(self.params, params, tau)

    def adam_step(self, lr: float) -> None:
        """One step of Adam along the gradient."""
        self.step += 1
        kernels.move(self.params, self.grad, self.exp_avg, self.exp_avg_sq, self.step, lr)

    def grad_norm(self) -> float:
        """The length of the gradient."""
        return sqrt(kernels.squares(self.grad))

    def add_squares(self, sums: Vector) -> None:
        """Add the squared gradient to sums."""
        kernels.add_squares(sums, self.grad)

    def add_penalty(self, anchor: Vector, fisher: Vector, strength: float) -> None:
        """Add strength · fisher · (params − anchor) to the gradient."""
        kernels.add(self.grad, fisher * (self.params - anchor), strength)

    def _held(self) -> dict[str, Vector]:
        """What a state consists of."""
        held = {"params": self.params, "target": self.target_params}
        return held | {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def state_dict(self) -> Columns:
        """Everything needed to resume bit-identically."""
        held = {name: array_of(vector) for name, vector in self._held().items()}
        return held | {"step": np.array([self.step], dtype="<i8")}

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""
        for name, vector in self._held().items():
            if state[name].shape != tuple(vector.shape):
                raise DamagedData(
                    f"saved {name} have the shape {state[name].shape}, not {tuple(vector.shape)}"
                )
            vector[:] = self.put(state[name])
        self.step = int(state["step"][0])


class FastQNetwork:
    """Layers in a row, the last one the head; `parts` have their parameters and gradients."""

    def __init__(
        self, parts: Sequence[tuple[Layers, Array, Array | None]], input_scale: float = 1.0
    ) -> None:
        self._product, self._input_scale, self._rows = product(), input_scale, 0
        self._parts = parts  # what the table points to
        rows = [_row(*part, k) for part in parts for k in range(len(part[0].shapes))]
        self._table = np.array(rows, dtype=np.int64)

    def _make_room(self, rows: int) -> None:
        """Memory for what each layer takes and gives, for at most so many rows."""
        inputs, widths = int(self._table[0, kernels.INPUTS]), self._table[:, kernels.OUTPUTS]
        outputs = [aligned(rows, int(width)) for width in (inputs, *widths)]
        normed, slopes = ([aligned(rows, int(width)) for width in widths] for _ in range(2))
        spreads = [aligned(rows) for _ in widths]
        columns = {kernels.INPUT: outputs[:-1], kernels.OUTPUT: outputs[1:]}
        columns |= {kernels.NORMED: normed, kernels.SLOPE: slopes, kernels.SPREAD: spreads}
        for column, rooms in columns.items():
            self._table[:, column] = [room.ctypes.data for room in rooms]
        self._rooms, self._rows = (outputs, normed, slopes, spreads), rows
        self._values = outputs[-1]

    def forward(self, obs: Array) -> Array:
        """Q-values, remembered for `backward`."""
        if len(obs) > self._rows:
            self._make_room(len(obs))
        kernels.forward(self._product, self._table, obs, self._input_scale)
        return self._values[: len(obs)]

    def backward(self, grad: Array) -> None:
        """Replace the gradients of the parameters."""
        assert self._table[0, kernels.TO_BIAS], "a target has no gradients"
        kernels.backward(self._product, self._table, grad, self._input_scale)

    def q_values(self, obs: Array) -> Array:
        """Q-values alone."""
        if len(obs) <= MAX_ROWS:
            return self.forward(obs)
        parts = range(0, len(obs), MAX_ROWS)
        return np.concatenate([self.forward(obs[k : k + MAX_ROWS]).copy() for k in parts])


def _row(layers: Layers, params: Array, grad: Array | None, k: int) -> Array:
    """Layer k in the table of the kernels: its widths, its parameters and their gradients."""
    row = np.zeros(kernels.COLUMNS, dtype=np.int64)
    row[kernels.INPUTS], row[kernels.OUTPUTS] = layers.shapes[k]
    columns = (kernels.WEIGHT, kernels.BIAS, kernels.SCALE, kernels.SHIFT)
    for column, start in zip(columns, layers.places()[k], strict=True):
        if start >= 0:
            row[column] = params[start:].ctypes.data
            row[column + kernels.GRADIENT] = 0 if grad is None else grad[start:].ctypes.data
    return row


class FastBackend:
    """An mlp with a linear head on the CPU, compiled; starts from torch's initial weights."""

    def __init__(self, spaces: Spaces, config: LearnConfig, device: str = "cpu") -> None:
        self.device, self.threads = device, cpu.use_threads(config.threads)
        cpu.flush_tiny()
        self.config = config
        self.trunk = Layers((prod(spaces.shape), *config.widths), config.layer_norm)
        self.head = Layers((self.trunk.sizes[-1], spaces.actions))

    def block(self, part: str, seed: int) -> ParamBlock:
        """A new block; an input layer is the first layer of what the trunk would be alone."""
        if part == "head":
            return ParamBlock(self.head, self.head.initial_params(seed))
        chosen = layers_of(self.config, part)
        return ParamBlock(self.trunk.part(chosen), self.trunk.initial_params(seed, chosen))

    def q_network(
        self, blocks: Sequence[ParamBlock], input_scale: float, target: bool = False
    ) -> FastQNetwork:
        """The network of these blocks, or of their targets."""
        if target:
            return FastQNetwork([(b.layers, b.target_params, None) for b in blocks], input_scale)
        return FastQNetwork([(b.layers, b.params, b.grad) for b in blocks], input_scale)
