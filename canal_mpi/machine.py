"""Functions over arrays as machine code: Numba compiles them at their first call, ever."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


FAST = {"reassoc", "contract", "nsz"}


def compiled(function: Function) -> Function:
    """Machine code of a function, kept on disk; its sums may be taken in another order.

    It may call only `inlined` functions: of another compiled one it would have other machine code,
    hence other bits, in the process that compiles it than in those that load it from disk.
    """
    made: Function = njit(cache=True, error_model="numpy", fastmath=FAST)(function)
    return made


def inlined(function: Function) -> Function:
    """A part of a compiled function."""
    made: Function = njit(inline="always", error_model="numpy", fastmath=FAST)(function)
    return made
