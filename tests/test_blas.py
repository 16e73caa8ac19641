"""Products of compiled passes: threads, bits, and numbers too small for their precision."""

import os
import subprocess
import sys
from time import process_time

import numpy as np
import pytest

from canal_mpi.interfaces import Array
from canal_mpi.learn.fast_mlp import FastQNetwork, Inputs, Layers, adam_step

THREADS = """
import os, sys
import numpy as np
from canal_mpi.interfaces import Spaces
from canal_mpi.learn.fast_mlp import FastBackend
from canal_mpi.settings import LearnConfig

config = LearnConfig(widths=(), threads=int(sys.argv[1]))
backend = FastBackend(Spaces((1024,), "<f4", 1024), config)
net = backend.q_network([backend.block("head", 0)], 1.0)
net.q_values(np.ones((1, 1024), dtype=np.float32))  # loads BLAS, which makes its threads
before = len(os.listdir("/proc/self/task"))
net.q_values(np.ones((1024, 1024), dtype=np.float32))
assert "torch" not in sys.modules
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="BLAS takes no more threads than cores")
def test_products_use_the_threads_that_are_asked_for() -> None:
    """Whatever the environment says; one is the thread that asks."""
    found = []
    for threads in (1, 2):
        program = [sys.executable, "-c", THREADS, str(threads)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        before, after = map(int, done.stdout.split())
        assert before == after
        found.append(after)
    assert found[1] - found[0] == 1


def _shifted(array: Array, offset: int) -> Array:
    """The same numbers, `offset` bytes behind the start of a cache line."""
    room = np.zeros(array.nbytes + 128, dtype=np.uint8)
    start = -room.ctypes.data % 64 + offset
    found = room[start : start + array.nbytes].view(np.float32)
    found[:] = array
    return found


@pytest.mark.parametrize("rows", [1, 2, 33, 128])
def test_bits_do_not_depend_on_where_memory_starts(rows: int) -> None:
    layers, found = Layers((40, 24, 18), norm=True), []
    params = layers.initial_params(3)
    obs = np.random.default_rng(rows).normal(size=(rows, 40)).astype(np.float32)
    for offset in (0, 4, 16, 36):
        grad = _shifted(np.zeros_like(params), offset)
        split = (layers.split(_shifted(params, offset)), layers.split(grad))
        net = FastQNetwork(*split, Inputs(1.0, 40))
        q = net.forward(_shifted(obs.reshape(-1), offset).reshape(obs.shape)).copy()
        net.backward(q / 7)
        found.append(q.tobytes() + grad.tobytes())
    assert len(set(found)) == 1


def test_adam_takes_tiny_numbers_for_zero_and_is_not_slowed_by_them() -> None:
    params, grad, mean, square = (np.zeros(100_000, dtype=np.float32) for _ in range(4))
    grad[:] = 1e-20
    adam_step(params, grad, mean, square, 1, 0.1)
    assert not params.any() and not mean.any() and not square.any()
    mean[:], square[:], grad[:] = 1e-3, 1e-20, 0
    for step in range(1, 1000):
        adam_step(params, grad, mean, square, step, 0.0)
    assert not mean.any() and square.any()
    times = []
    for size in (1.0, 1e-37, 1e-42):
        tries = []
        for _ in range(7):
            mean[:], square[:], grad[:] = size, size, size
            start = process_time()
            for step in range(1, 41):
                adam_step(params, grad, mean, square, step, 0.0)
            tries.append(process_time() - start)
        times.append(min(tries))
    assert max(times) < 3 * times[0]
