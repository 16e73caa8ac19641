"""Forward, backward and Adam for layers in a row, as machine code that Numba compiles once.

Between two steps of an emulator every call from Python into a library starts cold and costs more
than what it computes; here a pass is one call. A pass is described by a table with a row for each
layer: addresses of its numbers, and its widths (the columns are named below).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from canal_mpi.machine import compiled, inlined

# Columns of a table. A layer takes INPUT [rows, INPUTS] and gives OUTPUT [rows, OUTPUTS].
(WEIGHT, BIAS, SCALE, SHIFT, TO_WEIGHT, TO_BIAS, TO_SCALE, TO_SHIFT) = range(8)  # SCALE 0: no norm
GRADIENT = 4  # columns from a parameter to its gradient
(INPUT, NORMED, SPREAD, OUTPUT, SLOPE, INPUTS, OUTPUTS) = range(8, 15)
COLUMNS = 15

NORM_EPSILON = np.float32(1e-5)  # of torch's LayerNorm
BETA1, BETA2, ADAM_EPSILON = 0.9, 0.999, 1e-8
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)


def instruction(function: Callable[..., Any]) -> Any:
    """What compiled functions may call; it writes its machine code itself."""
    return intrinsic(function)


@instruction
def floats(typingctx: Any, address: Any) -> Any:
    """The numbers at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), code


@instruction
def sgemm(
    typingctx: Any,
    product: Any,
    turn_a: Any,
    turn_b: Any,
    m: Any,
    n: Any,
    k: Any,
    alpha: Any,
    a: Any,
    lda: Any,
    b: Any,
    ldb: Any,
    c: Any,
    ldc: Any,
) -> Any:
    """Call BLAS at the address `product`: C ← alpha · op(A) · op(B), columns first."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word, number = ir.IntType(8), ir.IntType(32), ir.FloatType()
        product, turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, c, ldc = arguments

        def spilled(value: Any, kind: Any) -> Any:
            place = cgutils.alloca_once(builder, kind)
            builder.store(value, place)
            return place

        def letter(turned: Any) -> Any:
            return spilled(builder.select(turned, byte(ord("T")), byte(ord("N"))), byte)

        def whole(value: Any) -> Any:
            return spilled(builder.trunc(value, word), word)

        def matrix(address: Any) -> Any:
            return builder.inttoptr(address, number.as_pointer())

        given = [letter(turn_a), letter(turn_b), whole(m), whole(n), whole(k)]
        given += [spilled(alpha, number), matrix(a), whole(lda), matrix(b), whole(ldb)]
        given += [spilled(number(0), number), matrix(c), whole(ldc)]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(builder.inttoptr(product, kind.as_pointer()), given)
        return context.get_dummy_value()

    whole, flag = types.int64, types.boolean
    return (
        types.void(whole, flag, flag, whole, whole, whole, types.float32, *[whole] * 6),
        code,
    )


@compiled
def forward(product: int, table: Any, obs: Any, factor: float) -> None:
    """Fill INPUT of the first layer with `obs`, then OUTPUT of every layer."""
    rows, last = len(obs), len(table) - 1
    numbers = carray(floats(table[0, INPUT]), (rows, table[0, INPUTS]))
    for i in range(rows):
        for j in range(numbers.shape[1]):
            numbers[i, j] = np.float32(obs[i, j])
    for k in range(len(table)):
        wide, high = table[k, INPUTS], table[k, OUTPUTS]
        alpha = np.float32(factor) if k == 0 else ONE
        room = table[k, NORMED] if k < last else table[k, OUTPUT]
        sgemm(
            product, True, False, high, rows, wide, alpha,
            table[k, WEIGHT], wide, table[k, INPUT], wide, room, high,
        )  # fmt: skip
        strip_prefix = carray(floats(room), (rows, high))
        bias = carray(floats(table[k, BIAS]), high)
        after = carray(floats(table[k, OUTPUT]), (rows, high))
        if k == last:
            for i in range(rows):
                for j in range(high):
                    strip_prefix[i, j] += bias[j]
        elif table[k, SCALE] == 0:
            for i in range(rows):
                for j in range(high):
                    after[i, j] = max(strip_prefix[i, j] + bias[j], ZERO)
        else:
            scale = carray(floats(table[k, SCALE]), high)
            shift = carray(floats(table[k, SHIFT]), high)
            spread = carray(floats(table[k, SPREAD]), rows)
            part = ONE / np.float32(high)
            for i in range(rows):
                line, out, total = strip_prefix[i], after[i], ZERO
                for j in range(high):
                    line[j] += bias[j]
                    total += line[j]
                mean, squares = total * part, ZERO
                for j in range(high):
                    squares += (line[j] - mean) * (line[j] - mean)
                steep = ONE / np.sqrt(squares * part + NORM_EPSILON)
                spread[i] = steep
                for j in range(high):
                    line[j] = (line[j] - mean) * steep
                    out[j] = max(line[j] * scale[j] + shift[j], ZERO)


@compiled
def backward(product: int, table: Any, slope: Any, factor: float) -> None:
    """Replace the gradients of the layers, for `slope` = d loss / d OUTPUT of the last."""
    rows, last = len(slope), len(table) - 1
    top = carray(floats(table[last, SLOPE]), slope.shape)
    for i in range(rows):
        for j in range(slope.shape[1]):
            top[i, j] = slope[i, j]
    for k in range(last, -1, -1):
        wide, high = table[k, INPUTS], table[k, OUTPUTS]
        down = carray(floats(table[k, SLOPE]), (rows, high))
        to_bias = carray(floats(table[k, TO_BIAS]), high)
        to_bias[:] = ZERO
        if k < last and table[k, SCALE] != 0:
            _through_norm(table, k, rows)
        elif k < last:
            after = carray(floats(table[k, OUTPUT]), (rows, high))
            for i in range(rows):
                for j in range(high):
                    down[i, j] = down[i, j] if after[i, j] > ZERO else ZERO
        for i in range(rows):
            line = down[i]
            for j in range(high):
                to_bias[j] += line[j]
        alpha = np.float32(factor) if k == 0 else ONE
        sgemm(
            product, False, True, wide, high, rows, alpha,
            table[k, INPUT], wide, table[k, SLOPE], high, table[k, TO_WEIGHT], wide,
        )  # fmt: skip
        if k:
            sgemm(
                product, False, False, wide, rows, high, ONE,
                table[k, WEIGHT], wide, table[k, SLOPE], high, table[k - 1, SLOPE], wide,
            )  # fmt: skip


@inlined
def _through_norm(table: Any, k: int, rows: int) -> None:
    """Take the slope of layer k from behind its ReLU to before its LayerNorm."""
    high = table[k, OUTPUTS]
    down = carray(floats(table[k, SLOPE]), (rows, high))
    after = carray(floats(table[k, OUTPUT]), (rows, high))
    normed = carray(floats(table[k, NORMED]), (rows, high))
    spread, scale = carray(floats(table[k, SPREAD]), rows), carray(floats(table[k, SCALE]), high)
    to_scale = carray(floats(table[k, TO_SCALE]), high)
    to_shift = carray(floats(table[k, TO_SHIFT]), high)
    to_scale[:] = ZERO
    to_shift[:] = ZERO
    part = ONE / np.float32(high)
    for i in range(rows):
        line, out, even, total, along = down[i], after[i], normed[i], ZERO, ZERO
        for j in range(high):
            passed = line[j] if out[j] > ZERO else ZERO
            to_scale[j] += passed * even[j]
            to_shift[j] += passed
            passed *= scale[j]
            total += passed
            along += passed * even[j]
            line[j] = passed
        total, along, steep = total * part, along * part, spread[i]
        for j in range(high):
            line[j] = steep * (line[j] - total - even[j] * along)


@compiled
def move(weights: Any, grad: Any, mean: Any, square: Any, steps: int, lr: float) -> None:
    """One step of Adam along a gradient."""
    fast, slow, tiny = np.float32(1 - BETA1), np.float32(1 - BETA2), np.float32(ADAM_EPSILON)
    stride = np.float32(lr / (1 - BETA1**steps))
    correction = np.float32(1 / np.sqrt(1 - BETA2**steps))
    for j in range(len(weights)):
        m = mean[j] + fast * (grad[j] - mean[j])
        v = square[j] + slow * (grad[j] * grad[j] - square[j])
        mean[j], square[j] = m, v
        weights[j] -= stride * m / (np.sqrt(v) * correction + tiny)


@compiled
def blend(weights: Any, others: Any, alpha: float) -> None:
    """Move weights towards others, as torch's `lerp`: from the nearer end."""
    near, far = np.float32(alpha), np.float32(1) - np.float32(alpha)
    for j in range(len(weights)):
        way = others[j] - weights[j]
        weights[j] = weights[j] + near * way if near < HALF else others[j] - way * far


@compiled
def squares(grad: Any) -> float:
    """The sum of squares."""
    total = 0.0
    for j in range(len(grad)):
        total += np.float64(grad[j]) * np.float64(grad[j])
    return total


@compiled
def add_squares(sums: Any, grad: Any) -> None:
    """Add squares to sums."""
    for j in range(len(sums)):
        sums[j] += grad[j] * grad[j]


@compiled
def add(sums: Any, numbers: Any, factor: float) -> None:
    """Add so many times the numbers."""
    for j in range(len(sums)):
        sums[j] += np.float32(factor) * numbers[j]
