"""The CPU without torch: aligned memory, threads of BLAS, tiny numbers."""

import subprocess
import sys
from time import perf_counter

import numpy as np
import pytest

from canal_mpi.learn import cpu, kernels


@pytest.mark.parametrize("shape", [(1,), (17,), (3, 5), (128, 128)])
def test_memory_starts_where_blas_wants_it(shape: tuple[int, ...]) -> None:
    for _ in range(5):
        made = cpu.aligned(*shape)
        assert made.ctypes.data % 64 == 0
        assert made.shape == shape and made.flags.c_contiguous
        assert made.dtype == np.float32
        assert not made.any()


THREADS = """
import os, sys
import numpy as np
from canal_mpi.learn import cpu, kernels
from canal_mpi.learn.fast_mlp import Layers
from canal_mpi.learn.fast_mlp import FastQNetwork
asked = int(sys.argv[1])
assert cpu.use_threads(asked) == asked
layers = Layers((1024, 1024))
net = FastQNetwork([(layers, cpu.aligned(layers.length), None)])
before = len(os.listdir("/proc/self/task"))
net.q_values(np.ones((1024, 1024), dtype=np.float32))
assert "torch" not in sys.modules
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_products_use_the_threads_that_are_asked_for(threads: int) -> None:
    """Whatever the environment says, one is the thread that asks."""
    program = [sys.executable, "-c", THREADS, str(threads)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(threads - 1)), done.stderr


def test_tiny_numbers_are_zero_in_kernels_and_cost_nothing() -> None:
    assert cpu.flush_tiny()
    weights, grad, mean, square = (cpu.aligned(100_000) for _ in range(4))
    grad[:] = 1e-20  # its square can't be told from zero without denormal numbers
    kernels.move(weights, grad, mean, square, 1, 0.0)
    assert not square.any()
    times = []
    for size in (1.0, 1e-37):
        tries = []
        for _ in range(7):
            mean[:], square[:], grad[:] = size, size, 0
            start = perf_counter()
            for step in range(1, 41):
                kernels.move(weights, grad, mean, square, step, 0.0)
            tries.append(perf_counter() - start)
        times.append(min(tries))
    assert times[1] < 3 * times[0]
