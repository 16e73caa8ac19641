"""The MLP on a CPU without torch: parameters in flat blocks, loops and products by Numba.

Between two steps of an emulator every call from Python into a library costs more than what it
computes, so a pass through all layers is one call. `networks` does the same by autograd.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns, Spaces
from canal_mpi.settings import LearnConfig
from canal_mpi.state import compiled, inlined

CHUNK = 1 << 16  # initial weights drawn at once, so that wide layers need little more memory
LAYER_NORM_EPS = np.float32(1e-5)
BETA1, BETA2, ADAM_EPS = 0.9, 0.999, 1e-8
ZERO, ONE, INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)  # single precision
TINY, TINY_SQUARE = np.float32(1e-18), np.float32(1e-36)  # what Adam takes for zero
Vector = Any  # an array, or a tensor of torch where a block belongs to a module
LayerParams = tuple[Array, Array, Array, Array]  # weight, bias, and gain and shift of LayerNorm


@dataclass(frozen=True)
class Layers:
    """Linear layers in a row, by their widths; `norm`: each is followed by a LayerNorm."""

    widths: tuple[int, ...]
    norm: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer."""
        return list(pairwise(self.widths))

    def part(self, layers: slice) -> "Layers":
        """Some of them."""
        start, stop, _ = layers.indices(len(self.shapes))
        return Layers(self.widths[start : stop + 1], self.norm)

    def split(self, flat: Array) -> list[LayerParams]:
        """Each layer's parameters as views of one vector, in the order of torch's modules; gain
        and shift are empty where there is no norm."""
        found, start = [], 0
        for inputs, outputs in self.shapes:
            views = []
            for size in (inputs * outputs, outputs, *(2 * [self.norm * outputs])):
                views.append(flat[start : start + size])
                start += size
            weight, bias, gain, shift = views
            found.append((weight.reshape(outputs, inputs), bias, gain, shift))
        return found

    def initial_params(self, seed: int, layers: slice = slice(None)) -> Array:
        """What modules of torch start with after `manual_seed`, of all layers or of some."""
        rng, drawn = np.random.RandomState(seed & 0xFFFFFFFF), []  # torch's: mt19937
        for inputs, outputs in self.shapes:
            linear = _uniform(rng, (inputs + 1) * outputs, 1 / sqrt(inputs))
            norm = np.repeat(np.array([1, 0], np.float32), self.norm * outputs)
            drawn.append(np.concatenate([linear, norm]))
        return np.concatenate([np.zeros(0, np.float32), *drawn[layers]])


def _uniform(rng: np.random.RandomState, count: int, bound: float) -> Array:
    """Numbers between -bound and bound, by the 24 low bits of each draw, as torch makes them."""
    found, bound = np.empty(count, np.float32), float(np.float32(bound))
    for start in range(0, count, CHUNK):
        part = found[start : start + CHUNK]
        bits = rng.randint(0, 1 << 32, len(part), np.uint32) & 0xFFFFFF
        part[:] = bits * 2.0**-24 * (2 * bound) - bound
    return found


def has_own_input(config: LearnConfig) -> bool:
    """Whether every task has an input layer of its own in front of the shared trunk."""
    return config.heads == "per_task" and config.network == "mlp" and len(config.widths) > 1


def layers_of(config: LearnConfig, part: str) -> slice:
    """The layers of a whole trunk that an input or a trunk has."""
    if not has_own_input(config):
        return slice(None)
    return slice(0, 1) if part == "input" else slice(1, None)


class Inputs(NamedTuple):
    """How observations become inputs of a network."""

    scale: float  # that they are multiplied by
    size: int  # the newest so many numbers; those before are changes from frame to frame


def inputs_of(spaces: Spaces, config: LearnConfig) -> Inputs:
    """Only bytes are scaled, and only stacked ones have changes."""
    size = prod(spaces.shape)
    if spaces.dtype != "|u1" or config.input == "raw":
        return Inputs(1.0, size)
    return Inputs(1 / 255, size // spaces.stack if config.input == "change" else size)


CHANGES = np.arange(-255, 256, dtype=np.float32)  # on a logarithmic scale, 15 is 1
CHANGES = np.sign(CHANGES) * np.log1p(np.abs(CHANGES)) / np.log(np.float32(16))


# ── compiled ───────────────────────────────────────────────────────────────────────────────────


@inlined
def _prepare(obs: Any, inputs: Any, scale: Any, size: int, changes: Any) -> None:
    """Scale observations; of stacked bytes the newest `size` ones, and before them how each one
    changed from frame to frame."""
    stacked = inputs.shape[1] - size
    for i in range(len(obs)):
        row, x = obs[i], inputs[i]
        for j in range(stacked):
            x[j] = changes[255 + np.int64(row[size + j]) - np.int64(row[j])]
        for j in range(stacked, len(x)):
            x[j] = np.float32(row[j]) * scale


@compiled
def forward(layers: Any, obs: Any, more: Any, scale: np.float32, size: int, changes: Any) -> None:
    """Pass observations, and more of them, through all layers; each is (weight, bias, gain, shift,
    x, xhat, rstd, out): its parameters, its input, what LayerNorm keeps for `backward`, and its
    output."""
    rows, last, inputs = len(obs) + len(more), len(layers) - 1, layers[0][4]
    _prepare(obs, inputs, scale, size, changes)
    _prepare(more, inputs[len(obs) :], scale, size, changes)
    for k in range(len(layers)):
        weight, bias, gain, shift, x, xhat, rstd, out = layers[k]
        np.dot(x[:rows], weight.T, out[:rows])
        if k < last and len(gain):
            _layer_norm_relu(out[:rows], bias, gain, shift, xhat, rstd)
        else:
            floor = ZERO if k < last else -INFINITY  # ReLU but for the head
            for i in range(rows):
                for j in range(len(bias)):
                    out[i, j] = max(out[i, j] + bias[j], floor)


@inlined
def _layer_norm_relu(out: Any, bias: Any, gain: Any, shift: Any, xhat: Any, rstd: Any) -> None:
    """Replace each row by ReLU(gain · xhat + shift), xhat = (row + bias − mean) · rstd."""
    width = len(bias)
    part = ONE / np.float32(width)
    for i in range(len(out)):
        row, centered, total, squares = out[i], xhat[i], ZERO, ZERO
        for j in range(width):
            z = row[j] + bias[j]
            centered[j] = z
            total += z
        mean = total * part
        for j in range(width):
            squares += (centered[j] - mean) * (centered[j] - mean)
        scale = ONE / np.sqrt(squares * part + LAYER_NORM_EPS)
        for j in range(width):
            z = (centered[j] - mean) * scale
            centered[j] = z
            row[j] = max(z * gain[j] + shift[j], ZERO)
        rstd[i] = scale


@compiled
def backward(layers: Any, grads: Any, grad_q: Any) -> None:
    """Replace the gradients after a `forward`, for `grad_q` = d loss / d output of the last layer;
    `grads` of a layer are (d_weight, d_bias, d_gain, d_shift, d_out)."""
    rows, last = len(grad_q), len(layers) - 1
    grads[last][4][:rows] = grad_q
    for k in range(last, -1, -1):
        weight, _, gain, _, x, xhat, rstd, out = layers[k]
        d_weight, d_bias, d_gain, d_shift, d_out = grads[k]
        if k < last and len(gain):
            _layer_norm_relu_backward(d_out[:rows], out, gain, xhat, rstd, d_gain, d_shift)
        elif k < last:
            for i in range(rows):
                for j in range(len(d_bias)):
                    d_out[i, j] = d_out[i, j] if out[i, j] > ZERO else ZERO
        d_bias[:] = ZERO
        for i in range(rows):
            for j in range(len(d_bias)):
                d_bias[j] += d_out[i, j]
        np.dot(d_out[:rows].T, x[:rows], d_weight)
        if k:
            np.dot(d_out[:rows], weight, grads[k - 1][4][:rows])


@inlined
def _layer_norm_relu_backward(
    d_out: Any, out: Any, gain: Any, xhat: Any, rstd: Any, d_gain: Any, d_shift: Any
) -> None:
    """Take each row's gradient from behind the ReLU to before the LayerNorm."""
    width = len(gain)
    part = ONE / np.float32(width)
    d_gain[:] = ZERO
    d_shift[:] = ZERO
    for i in range(len(d_out)):
        d_row, row, normed, total, along = d_out[i], out[i], xhat[i], ZERO, ZERO
        for j in range(width):
            d = d_row[j] if row[j] > ZERO else ZERO
            d_gain[j] += d * normed[j]
            d_shift[j] += d
            d *= gain[j]
            d_row[j] = d
            total += d
            along += d * normed[j]
        total, along, scale = total * part, along * part, rstd[i]
        for j in range(width):
            d_row[j] = scale * (d_row[j] - total - normed[j] * along)


@compiled
def adam_step(params: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, step: int, lr: float) -> None:
    """Adam's step number `step`, as torch.optim.Adam; denormal numbers, which would make it ten
    times slower, become zero."""
    weight1, weight2, eps = np.float32(1 - BETA1), np.float32(1 - BETA2), np.float32(ADAM_EPS)
    step_size = np.float32(lr / (1 - BETA1**step))
    correction = np.float32(1 / np.sqrt(1 - BETA2**step))
    for j in range(len(params)):
        g = grad[j] if abs(grad[j]) > TINY else ZERO
        m = exp_avg[j] + weight1 * (g - exp_avg[j])
        v = exp_avg_sq[j] + weight2 * (g * g - exp_avg_sq[j])
        exp_avg[j] = m if abs(m) > TINY else ZERO
        exp_avg_sq[j] = v if v > TINY_SQUARE else ZERO
        params[j] -= step_size * m / (np.sqrt(v) * correction + eps)


# ── blocks and networks ────────────────────────────────────────────────────────────────────────


def aligned_zeros(*shape: int) -> Array:
    """Zeros that start at a cache line: products are faster there, and some BLAS have other bits
    elsewhere."""
    size, line = prod(shape), 16  # numbers
    room = np.zeros(size + line, dtype=np.float32)
    start = -(room.__array_interface__["data"][0] // 4) % line
    return room[start : start + size].reshape(shape)


def array_of(vector: Vector) -> Array:
    """A copy of a vector, as an array."""
    held: Array = vector if isinstance(vector, np.ndarray) else vector.detach().cpu().numpy()
    return held.copy()


class ParamBlock:
    """Layers whose parameters are one vector, with target, gradient and Adam of their own.

    By elastic weight consolidation (EWC) parameters that mattered to old tasks are held in place.
    """

    fisher: Vector = None  # how much each parameter mattered to old tasks, if that was measured
    anchor: Vector = None  # the parameters at the end of the last one

    def __init__(self, layers: Layers, params: Array) -> None:
        self.layers, self.step = layers, 0
        self.params: Vector = aligned_zeros(len(params))
        self.target_params: Vector = aligned_zeros(len(params))
        self.grad: Vector = aligned_zeros(len(params))
        self.exp_avg: Vector = aligned_zeros(len(params))
        self.exp_avg_sq: Vector = aligned_zeros(len(params))
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

    def adam_step(self, lr: float) -> None:
        """One step of Adam along the gradient."""
        self.step += 1
        adam_step(self.params, self.grad, self.exp_avg, self.exp_avg_sq, self.step, lr)

    def grad_norm(self) -> float:
        """The length of the gradient."""
        return sqrt(float((self.grad * self.grad).sum()))

    def consolidate(self, squares: Vector, count: int, alpha: float) -> None:
        """F ← α·F + (1 − α)·F_new, the mean of `count` squared gradients; hold the parameters."""
        old = 0.0 if self.fisher is None else self.fisher
        self.fisher = alpha * old + (1 - alpha) * squares / count
        self.anchor = self.put(array_of(self.params))

    def add_penalty(self, strength: float) -> None:
        """Add the gradient of strength / 2 · Σ F · (w − anchor)² to the gradient."""
        if self.fisher is not None:
            self.grad += strength * (self.fisher * (self.params - self.anchor))

    def _held(self) -> dict[str, Vector]:
        """What a state consists of."""
        held = {"params": self.params, "target": self.target_params}
        held |= {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return held | (
            {} if self.fisher is None else {"fisher": self.fisher, "anchor": self.anchor}
        )

    def state_dict(self) -> Columns:
        """Everything needed to resume bit-identically."""
        held = {name: array_of(vector) for name, vector in self._held().items()}
        return held | {"step": np.array([self.step], dtype="<i8")}

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave; without a target and Adam those are as new."""
        if state.keys() == {"params"}:
            params, none = state["params"], np.zeros_like(state["params"])
            state = state | {"target": params, "exp_avg": none, "exp_avg_sq": none}
            state["step"] = np.zeros(1, dtype="<i8")
        if "fisher" in state:
            self.fisher, self.anchor = (self.put(array_of(self.params)) for _ in range(2))
        for name, vector in self._held().items():
            if state[name].shape != tuple(vector.shape):
                raise DamagedData(
                    f"saved {name} have the shape {state[name].shape}, not {tuple(vector.shape)}"
                )
            vector[:] = self.put(state[name])
        self.step = int(state["step"][0])


class FastQNetwork:
    """Layers in a row, the last one the head; without `grads` it is a target."""

    def __init__(
        self, params: Sequence[LayerParams], grads: Sequence[LayerParams], inputs: Inputs
    ) -> None:
        self._params, self._grad_params = params, grads
        self._inputs = (np.float32(inputs.scale), inputs.size, CHANGES)
        self._allocate(1)

    def _allocate(self, rows: int) -> None:
        """Memory for what `forward` and `backward` work on, for at most so many rows."""

        def zeros(*shape: int) -> Array:
            return aligned_zeros(rows, *shape)

        widths = [len(bias) for _, bias, _, _ in self._params]
        outs = [zeros(width) for width in (self._params[0][0].shape[1], *widths)]
        work = [(outs[k], zeros(width), zeros(), outs[k + 1]) for k, width in enumerate(widths)]
        self._rows, self._q = rows, outs[-1]
        self._layers = tuple((*p, *w) for p, w in zip(self._params, work, strict=True))
        self._grads = tuple((*grads, zeros(len(grads[1]))) for grads in self._grad_params)

    def forward(self, obs: Array) -> Array:
        """Q-values, remembered for `backward`."""
        return self.forward_both(obs, obs[:0])[0]

    def forward_both(self, obs: Array, next_obs: Array) -> tuple[Array, Array]:
        """Q-values of both in one pass, which takes three quarters of the time of two."""
        count, rows = len(obs), len(obs) + len(next_obs)
        if rows > self._rows:
            self._allocate(rows)
        forward(self._layers, obs, next_obs, *self._inputs)
        return self._q[:count], self._q[count:rows]

    def backward(self, grad: Array) -> None:
        """Replace the gradients of the parameters."""
        assert self._grads, "a target has no gradients"
        backward(self._layers, self._grads, grad)

    def q_values(self, obs: Array) -> Array:
        """Q-values alone."""
        return self.forward(obs)


class FastBackend:
    """An mlp with a linear head on the CPU, compiled; starts from torch's initial weights."""

    def __init__(self, spaces: Spaces, config: LearnConfig) -> None:
        # SciPy's BLAS, which Numba calls, reads this when the first product loads it.
        os.environ["OPENBLAS_NUM_THREADS"] = str(config.threads)
        self.config, self.device, self.inputs = config, "cpu", inputs_of(spaces, config)
        self.trunk = Layers((prod(spaces.shape), *config.widths), config.layer_norm)
        self.head = Layers((self.trunk.widths[-1], spaces.actions))

    def block(self, part: str, seed: int) -> ParamBlock:
        """A new block; an input layer is the first layer of what the trunk would be alone."""
        if part == "head":
            return ParamBlock(self.head, self.head.initial_params(seed))
        chosen = layers_of(self.config, part)
        return ParamBlock(self.trunk.part(chosen), self.trunk.initial_params(seed, chosen))

    def q_network(self, blocks: Sequence[ParamBlock], target: bool = False) -> FastQNetwork:
        """The network of these blocks, or of their targets."""
        params = [
            p for b in blocks for p in b.layers.split(b.target_params if target else b.params)
        ]
        grads = [] if target else [g for b in blocks for g in b.layers.split(b.grad)]
        return FastQNetwork(params, grads, self.inputs)
