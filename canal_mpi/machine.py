"""Functions over arrays as machine code: Numba compiles them at their first call, ever."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Machine code of a function, kept on disk; its sums may be taken in another order."""
    compile_ = njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
    made: Function = compile_(function)
    return made
