"""Random streams that depend on what they are for, never on which rank or host runs them."""

from zlib import crc32

import numpy as np

from canal_mpi.types import Array

MASK = (1 << 64) - 1


def sequence(seed: int, agent: int, task: str, purpose: str) -> np.random.SeedSequence:
    """The seed of one stream: independent of every other agent, task and purpose."""
    return np.random.SeedSequence([seed, agent, crc32(task.encode()), crc32(purpose.encode())])


def stream(seed: int, agent: int, task: str, purpose: str) -> np.random.Generator:
    """A generator for one purpose, such as ("explore") or ("sample")."""
    return np.random.Generator(np.random.PCG64(sequence(seed, agent, task, purpose)))


def integer(seed: int, agent: int, task: str, purpose: str) -> int:
    """A 31-bit seed for libraries that want a plain number."""
    return int(sequence(seed, agent, task, purpose).generate_state(1)[0] & 0x7FFFFFFF)


def snapshot(rng: np.random.Generator) -> Array:
    """The whole state of a generator, as six numbers."""
    state = rng.bit_generator.state
    value, step = state["state"]["state"], state["state"]["inc"]
    words = [value >> 64, value & MASK, step >> 64, step & MASK]
    return np.array([*words, state["has_uint32"], state["uinteger"]], dtype="<u8")


def rewind(rng: np.random.Generator, words: Array) -> None:
    """Give a generator the state that `snapshot` took."""
    w = [int(word) for word in words]
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": w[0] << 64 | w[1], "inc": w[2] << 64 | w[3]},
        "has_uint32": w[4],
        "uinteger": w[5],
    }
