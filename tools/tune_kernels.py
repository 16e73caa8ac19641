"""The network of the learner that `tools/tune` tries changes on, its losses and its sampling."""

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numba import njit

Array = Any
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
FAR = np.float32(4)  # largest input
TINY = np.float32(1e-20)
compiled = njit(cache=True, fastmath=True, error_model="numpy")

# ── layers ──────────────────────────────────────────────────────────────────────────────────────


@compiled
def hidden(
    x: Array, w: Array, b: Array, scale: Array, shift: Array, even: Array, spread: Array, y: Array
) -> None:
    """Linear, LayerNorm, ReLU; `even` and `spread` are kept for the way back."""
    np.dot(x, w, even)
    for i in range(len(x)):
        line, out, total, squares = even[i], y[i], ZERO, ZERO
        for j in range(len(line)):
            line[j] += b[j]
            total += line[j]
        mean = total / np.float32(len(line))
        for j in range(len(line)):
            line[j] -= mean
            squares += line[j] * line[j]
        spread[i] = ONE / np.sqrt(squares / np.float32(len(line)) + np.float32(1e-5))
        for j in range(len(line)):
            line[j] *= spread[i]
            out[j] = max(line[j] * scale[j] + shift[j], ZERO)


@compiled
def hidden_back(
    dy: Array, y: Array, even: Array, spread: Array, scale: Array, d_scale: Array, d_shift: Array
) -> None:
    """Take the gradient `dy` from behind the ReLU to before the LayerNorm, in place."""
    d_scale[:] = ZERO
    d_shift[:] = ZERO
    for i in range(len(dy)):
        line, out, hat, total, along = dy[i], y[i], even[i], ZERO, ZERO
        for j in range(len(line)):
            passed = line[j] if out[j] > ZERO else ZERO
            d_scale[j] += passed * hat[j]
            d_shift[j] += passed
            passed *= scale[j]
            total += passed
            along += passed * hat[j]
            line[j] = passed
        total, along = total / np.float32(len(line)), along / np.float32(len(line))
        for j in range(len(line)):
            line[j] = spread[i] * (line[j] - total - hat[j] * along)


@compiled
def linear_back(dy: Array, x: Array, w: Array, dw: Array, db: Array, dx: Array) -> None:
    """Gradients of weights, biases and (unless `dx` is empty) inputs of a hidden layer."""
    np.dot(x.T, dy, dw)
    db[:] = ZERO
    for i in range(len(dy)):
        for j in range(len(db)):
            db[j] += dy[i, j]
    if dx.size:
        np.dot(dy, w.T, dx)


@compiled
def chosen(h: Array, w: Array, b: Array, actions: Array, out: Array) -> None:
    """Outputs of the head for one action per row: [rows, atoms]."""
    n = out.shape[1]
    for i in range(len(h)):
        for k in range(n):
            line, from_, total = w[actions[i] * n + k], h[i], ZERO
            for j in range(len(line)):
                total += line[j] * from_[j]
            out[i, k] = total + b[actions[i] * n + k]


@compiled
def chosen_back(
    grad: Array, h: Array, w: Array, actions: Array, dw: Array, db: Array, dh: Array
) -> None:
    """Gradients of the head, for the gradient of the outputs of one action per row."""
    n = grad.shape[1]
    dw[:] = ZERO
    db[:] = ZERO
    for i in range(len(h)):
        dh[i] = ZERO
        for k in range(n):
            place, g = actions[i] * n + k, grad[i, k]
            db[place] += g
            to, from_ = dw[place], h[i]
            for j in range(len(to)):
                to[j] += g * from_[j]
            to, from_ = dh[i], w[place]
            for j in range(len(to)):
                to[j] += g * from_[j]


@compiled
def adam(
    p: Array, g: Array, m: Array, v: Array, decays: Array, t: int, lr: float, eps: float, wd: float
) -> None:
    """A step of AdamW."""
    stride = np.float32(lr / (1 - 0.9**t))
    correction, tiny = np.float32(1 / np.sqrt(1 - 0.999**t)), np.float32(eps)
    keep = np.float32(lr * wd)
    for j in range(len(p)):
        m[j] += np.float32(0.1) * (g[j] - m[j])
        m[j] = m[j] if abs(m[j]) > TINY else ZERO  # denormal numbers would slow it down tenfold
        v[j] += np.float32(0.001) * (g[j] * g[j] - v[j])
        p[j] -= stride * m[j] / (np.sqrt(v[j]) * correction + tiny) + keep * decays[j] * p[j]


@compiled
def follow(target: Array, p: Array, tau: float) -> None:
    """Move the target a little."""
    for j in range(len(p)):
        target[j] += np.float32(tau) * (p[j] - target[j])


class Network:
    """Hidden layers with LayerNorm and a linear head; parameters are one vector."""

    def __init__(self, sizes: list[int], rng: np.random.Generator) -> None:
        self.sizes = sizes
        self.params = self.initial(rng)
        self.head_start = len(self.params) - (sizes[-2] + 1) * sizes[-1]
        self.rooms: dict[int, list[Array]] = {}
        self.decays = np.zeros_like(self.params)
        for w, *_ in self.views(self.decays):
            w[:] = 1

    def initial(self, rng: np.random.Generator) -> Array:
        """As torch's: uniform between ± 1 / sqrt(inputs)."""
        parts = []
        for k, (wide, high) in enumerate(pairwise(self.sizes)):
            parts.append(rng.uniform(-1, 1, (wide + 1) * high) / wide**0.5)
            if k < len(self.sizes) - 2:
                parts += [np.ones(high), np.zeros(high)]
        return np.concatenate(parts).astype(np.float32)

    def views(self, vector: Array) -> list[list[Array]]:
        """Weight, bias, scale, shift of each layer (the head: the first two)."""
        found, start = [], 0
        for k, (wide, high) in enumerate(pairwise(self.sizes)):
            shapes = [(wide, high), (high,), (high,), (high,)]
            if k == len(self.sizes) - 2:
                shapes = [(high, wide), (high,)]  # a line per output
            layer = []
            for shape in shapes:
                layer.append(vector[start : start + prod(shape)].reshape(shape))
                start += prod(shape)
            found.append(layer)
        return found

    def room(self, rows: int) -> list[Array]:
        """For each hidden layer: output, normalised, spread, gradient of the output."""
        if rows not in self.rooms:
            self.rooms[rows] = [
                [np.zeros(shape, np.float32) for shape in ((rows, w), (rows, w), rows, (rows, w))]
                for w in self.sizes[1:-1]
            ]
        return self.rooms[rows]

    def forward(self, layers: list[list[Array]], x: Array) -> Array:
        """What the hidden layers give; the next call overwrites it."""
        for layer, (y, even, spread, _) in zip(layers[:-1], self.room(len(x)), strict=True):
            hidden(x, *layer, even, spread, y)
            x = y
        return x

    def backward(self, layers: list[list[Array]], grads: list[list[Array]], x: Array) -> None:
        """Gradients of the hidden layers from `room(...)[-1][3]`, that of their output."""
        room = self.room(len(x))
        for k in range(len(room) - 1, -1, -1):
            y, even, spread, dy = room[k]
            hidden_back(dy, y, even, spread, layers[k][2], grads[k][2], grads[k][3])
            below = room[k - 1][0] if k else x
            dx = room[k - 1][3] if k else np.zeros((0, 0), np.float32)
            linear_back(dy, below, layers[k][0], grads[k][0], grads[k][1], dx)


# ── losses: each writes the gradient of the outputs and the absolute TD errors ─────────────────


@compiled
def softmax(logits: Array, p: Array) -> None:
    """By exp(x) = exp(x / 256) ** 256, which compilers vectorise."""
    high = logits[0]
    for j in range(1, len(logits)):
        high = max(high, logits[j])
    total = ZERO
    for j in range(len(logits)):
        x = max(logits[j] - high, np.float32(-60)) / np.float32(256)
        e = ONE + x * (ONE + x * (HALF + x / np.float32(6)))
        for _ in range(8):
            e *= e
        p[j] = e
        total += e
    for j in range(len(logits)):
        p[j] /= total


@compiled
def values(h: Array, w: Array, b: Array, kind: int, support: Array, q: Array) -> None:
    """Q-values [rows, actions] of a head."""
    n = len(support)
    if kind == 1:
        out, p = np.dot(h, w.T), np.empty(n, np.float32)
        for i in range(len(q)):
            for a in range(q.shape[1]):
                line, total = out[i, a * n : (a + 1) * n], ZERO
                for k in range(n):
                    line[k] += b[a * n + k]
                softmax(line, p)
                for k in range(n):
                    total += p[k] * support[k]
                q[i, a] = total
        return
    mean, bias = np.zeros((q.shape[1], h.shape[1]), np.float32), np.zeros(q.shape[1], np.float32)
    for a in range(q.shape[1]):
        for k in range(n):
            bias[a] += b[a * n + k] / np.float32(n)
            line, from_ = mean[a], w[a * n + k]
            for j in range(len(line)):
                line[j] += from_[j] / np.float32(n)
    np.dot(h, mean.T, q)
    for i in range(len(q)):
        for a in range(q.shape[1]):
            q[i, a] += bias[a]


@compiled
def scalar_loss(out: Array, targets: Array, weights: Array, grad: Array, errors: Array) -> None:
    """Huber."""
    for i in range(len(targets)):
        error = out[i, 0] - targets[i]
        errors[i] = abs(error)
        grad[i, 0] = weights[i] * min(max(error, -ONE), ONE) / np.float32(len(targets))


@compiled
def c51_loss(
    out: Array,
    following: Array,
    returns: Array,
    discounts: Array,
    weights: Array,
    support: Array,
    grad: Array,
    errors: Array,
) -> None:
    """Cross-entropy with the projected distribution of the best next action."""
    n = len(support)
    low, width = support[0], support[1] - support[0]
    p, m = np.empty(n, np.float32), np.empty(n, np.float32)
    for i in range(len(out)):
        softmax(following[i], p)
        m[:] = ZERO
        for k in range(n):
            z = min(max(returns[i] + discounts[i] * support[k], low), support[n - 1])
            place = (z - low) / width
            j = min(int(place), n - 2)
            part = place - np.float32(j)
            m[j] += p[k] * (ONE - part)
            m[j + 1] += p[k] * part
        softmax(out[i], p)
        loss = ZERO
        for k in range(n):
            loss -= m[k] * np.log(p[k] + np.float32(1e-8))
            grad[i, k] = weights[i] * (p[k] - m[k]) / np.float32(len(out))
        errors[i] = loss


@compiled
def qr_loss(
    out: Array,
    following: Array,
    returns: Array,
    discounts: Array,
    weights: Array,
    grad: Array,
    errors: Array,
) -> None:
    """Quantile Huber loss over all pairs of quantiles."""
    n = out.shape[1]
    for i in range(len(out)):
        total = ZERO
        for k in range(n):
            mine, slope = out[i, k], ZERO
            level = (np.float32(k) + HALF) / np.float32(n)
            for j in range(n):
                error = returns[i] + discounts[i] * following[i, j] - mine
                side = level if error >= ZERO else ONE - level
                cut = min(max(error, -ONE), ONE)
                slope -= side * cut
                total += side * cut * (error - HALF * cut)
            grad[i, k] = weights[i] * slope / np.float32(n * len(out))
        errors[i] = total / np.float32(n)


# ── replay ──────────────────────────────────────────────────────────────────────────────────────


@compiled
def features(
    rows: Array,
    obs: Array,
    before: Array,
    mean: Array,
    factor: Array,
    change: Array,
    bits: Array,
    nibbles: bool,
    steps: Array,
    x: Array,
) -> None:
    """Inputs of the network: bytes, their change since the step before, single bits."""
    wide = obs.shape[1]
    if nibbles:
        for i in range(len(rows)):
            state, old, line = obs[rows[i]], obs[before[rows[i]]], x[i]
            for j in range(wide):
                line[j] = np.float32(state[j] >> 4) / np.float32(15)
                line[wide + j] = np.float32(state[j] & 15) / np.float32(15)
                if len(steps):
                    line[2 * wide + j] = steps[255 + np.int64(state[j]) - np.int64(old[j])]
        return
    for i in range(len(rows)):
        state, old, line = obs[rows[i]], obs[before[rows[i]]], x[i]
        for j in range(wide):
            line[j] = min(max((np.float32(state[j]) - mean[j]) * factor[j], -FAR), FAR)
        for j in range(len(change)):
            moved = (np.float32(state[j]) - np.float32(old[j])) * change[j]
            line[wide + j] = min(max(moved, -FAR), FAR)
        if len(steps):
            for j in range(wide):
                line[wide + j] = steps[255 + np.int64(state[j]) - np.int64(old[j])]
        start = wide + len(change)
        for j in range(len(bits)):
            line[start + j] = np.float32((state[bits[j] >> 3] >> (bits[j] & 7)) & 1) - HALF


@compiled
def n_step_returns(
    rows: Array,
    reward: Array,
    flags: Array,
    newest: int,
    n: int,
    gamma: float,
    returns: Array,
    discounts: Array,
    following: Array,
) -> None:
    """Discounted rewards of up to n steps, and the row to bootstrap from."""
    for i in range(len(rows)):
        row, total, discount = rows[i], 0.0, 1.0
        for _ in range(n):
            total += discount * reward[row]
            discount *= gamma
            flag = flags[row]
            row += 1
            if flag & 5:  # TERMINATED or LIFE
                discount = 0.0
            if flag or row == newest:
                break
        returns[i], discounts[i], following[i] = total, discount, row


@compiled
def tree_set(tree: Array, places: Array, priorities: Array) -> None:
    """Write priorities into the leaves of a sum tree."""
    half = len(tree) // 2
    for i in range(len(places)):
        node = half + places[i]
        change = priorities[i] - tree[node]
        while node:
            tree[node] += change
            node //= 2


@compiled
def tree_draw(tree: Array, draws: Array, places: Array, size: int) -> None:
    """Leaves, each with a probability by its priority; `draws` are in [0, 1), stratified."""
    half, n = len(tree) // 2, len(draws)
    for i in range(n):
        mass, node = (i + draws[i]) / n * tree[1], 1
        while node < half:
            node *= 2
            if mass >= tree[node]:
                mass -= tree[node]
                node += 1
        places[i] = min(node - half, size - 1)
