"""Arrays: states as named columns, random streams whose state can be saved, compiled loops."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from canal_mpi.interfaces import Array, Columns

Function = TypeVar("Function", bound=Callable[..., Any])


def with_prefix(prefix: str, columns: Mapping[str, Array]) -> Columns:
    """The columns with their names under a prefix."""
    return {f"{prefix}/{name}": column for name, column in columns.items()}


def strip_prefix(prefix: str, columns: Mapping[str, Array]) -> Columns:
    """The columns under a prefix, without it."""
    start = f"{prefix}/"
    return {n.removeprefix(start): c for n, c in columns.items() if n.startswith(start)}


def seed_sequence(seed: int, agent: int, task: str, purpose: str) -> np.random.SeedSequence:
    """The seed of one stream: independent of every other agent, task and purpose."""
    return np.random.SeedSequence([seed, agent, crc32(task.encode()), crc32(purpose.encode())])


def random_stream(seed: int, agent: int, task: str, purpose: str) -> np.random.Generator:
    """A generator for one purpose, such as "explore" or "sample"."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, agent, task, purpose)))


def seed_integer(seed: int, agent: int, task: str, purpose: str) -> int:
    """A 31-bit seed for libraries that want a plain number."""
    return int(seed_sequence(seed, agent, task, purpose).generate_state(1)[0] & 0x7FFFFFFF)


def to_json(value: Any) -> Array:
    """What JSON can say, as a column of bytes; numbers keep all their digits."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def from_json(column: Array) -> Any:
    """What `to_json` was given; tuples are lists."""
    return json.loads(column.tobytes())


def rng_state(rng: np.random.Generator) -> Array:
    """The whole state of a generator."""
    return to_json(rng.bit_generator.state)


def set_rng_state(rng: np.random.Generator, state: Array) -> None:
    """Give a generator the state that `rng_state` took."""
    rng.bit_generator.state = from_json(state)


# What Numba may do with sums; NaN and infinity stay what they are.
FASTMATH: set[str] | bool = {"reassoc", "contract", "nsz"}


def compiled(function: Function, fastmath: set[str] | bool = FASTMATH) -> Function:
    """Machine code of a function over arrays, made by Numba at its first call ever.

    It is kept beside the source, as Python keeps its own, or in the user's cache; where neither
    can be written it is compiled anew by every process. It may call only `inlined` functions: of
    another compiled one it would have other machine code, hence other bits, in the process that
    compiles it than in those that load it from disk. With Numba's own NUMBA_DISABLE_JIT=1 the
    function stays as it is, and Numba, which takes longer to import than all else, is left alone.
    """
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        return function
    from numba import njit  # 60 MB: only where something computes

    made: Function
    try:
        made = njit(cache=True, error_model="numpy", fastmath=fastmath)(function)
    except RuntimeError:  # no place to keep it
        made = njit(error_model="numpy", fastmath=fastmath)(function)
    return made


@contextmanager
def while_compiling(call: Callable[[], None]) -> Iterator[None]:
    """Call this now and then while something is compiled, which takes seconds."""
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        yield
        return
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]  # Numba has no types
        def on_start(self, _: Any) -> None:
            call()

        def on_end(self, _: Any) -> None:
            call()

    with event.install_listener("numba:compile", Listener()):
        yield


def inlined(function: Function) -> Function:
    """A part of a compiled function."""
    from numba import njit

    made: Function = njit(inline="always", error_model="numpy", fastmath=FASTMATH)(function)
    return made
