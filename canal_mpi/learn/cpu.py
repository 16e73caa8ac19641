"""The CPU as kernels need it, without torch: its BLAS, threads, tiny numbers, aligned memory."""

import ctypes
import platform
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.interfaces import Array

ALIGNED = 64  # bytes; BLAS gives other bits for memory that starts elsewhere
ENVIRONMENT = 256  # bytes, more than any fenv_t has
# Where a fenv_t of Linux has the word that rules tiny numbers, and the bits to set in it.
TINY_IS_ZERO = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}


@cache
def _library() -> ctypes.CDLL | None:
    """Torch's library, which carries BLAS: to load it takes a sixth of importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = str(Path(spec.origin).parent / "lib" / "libtorch_cpu.so")
    with suppress(OSError):
        return ctypes.CDLL(path)
    import_module("torch")  # it finds other libraries that its own needs
    with suppress(OSError):
        return ctypes.CDLL(path)
    return None


@cache
def product() -> int:
    """The address of BLAS' matrix product; 0: there is none."""
    found = getattr(_library(), "sgemm_", None)
    return (ctypes.cast(found, ctypes.c_void_p).value or 0) if found else 0


def use_threads(number: int) -> int:
    """Compute products of this thread by so many threads; returns how many they are."""
    library: Any = _library()
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local", "openblas_set_num_threads"):
        if hasattr(library, name):
            getattr(library, name)(ctypes.c_int(number))
    if hasattr(library, "MKL_Set_Dynamic"):
        library.MKL_Set_Dynamic(0)  # so many, not fewer where cores are short
    asked = getattr(library, "MKL_Get_Max_Threads", None)
    return int(asked()) if asked else number


def flush_tiny() -> bool:
    """Take numbers below 1e-38 for 0 in this thread; they would slow Adam down tenfold."""
    if platform.system() == "Linux" and platform.machine() in TINY_IS_ZERO:
        start, bits = TINY_IS_ZERO[platform.machine()]
        libm, held = ctypes.CDLL("libm.so.6"), ctypes.create_string_buffer(ENVIRONMENT)
        libm.fegetenv(held)
        word = ctypes.c_uint32.from_buffer(held, start)
        word.value |= bits
        libm.fesetenv(held)
    return bool(np.float32(1e-30) * np.float32(1e-10) == 0)


def aligned(*shape: int) -> Array:
    """Zeros of single precision."""
    size = 4 * prod(shape)
    room = np.zeros(size + ALIGNED, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNED
    return room[start : start + size].view(np.float32).reshape(shape)
