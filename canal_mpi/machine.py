"""Functions over arrays as machine code: Numba compiles them at their first call, ever."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])
SUMS = {"reassoc", "contract", "nsz"}  # what may be done with them; NaN and infinity stay


def compiled(function: Function) -> Function:
    """Machine code of a function; its sums may be taken in another order.

    It is kept beside the source, as Python keeps its own, or in the user's cache; where neither
    can be written it is compiled anew by every process. It may call only `inlined` functions: of
    another compiled one it would have other machine code, hence other bits, in the process that
    compiles it than in those that load it from disk.
    """
    made: Function
    try:
        made = njit(cache=True, error_model="numpy", fastmath=SUMS)(function)
    except RuntimeError:  # no place to keep it
        made = njit(error_model="numpy", fastmath=SUMS)(function)
    return made


def inlined(function: Function) -> Function:
    """A part of a compiled function."""
    made: Function = njit(inline="always", error_model="numpy", fastmath=SUMS)(function)
    return made
