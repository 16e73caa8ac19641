"""Rows of bytes, packed: every bit comes back, and what cannot be is refused."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array
from canal_mpi.membuf.wire import decode, encode, pack_bytedelta, unpack_bytedelta

LIMIT = 1 << 24


def rows_of(number: int, width: int, seed: int, busy: float = 0.2) -> Array:
    """Rows that change a little."""
    rng = np.random.default_rng(seed)
    moves = np.where(rng.random((number, width)) < busy, rng.integers(-3, 4, (number, width)), 0)
    return (np.cumsum(moves, axis=0) % 256).astype(np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 99), st.integers(0, 10))
def test_rows_come_back_as_they_were(number: int, width: int, seed: int, busy: int) -> None:
    rows = rows_of(number, width, seed, busy / 10)
    assert np.array_equal(unpack_bytedelta(pack_bytedelta(rows), rows.shape), rows)


def test_noise_and_constants_come_back_too() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5000, 9), dtype=np.uint8)
    for rows in (noise, np.zeros_like(noise), np.full_like(noise, 255)):
        assert np.array_equal(unpack_bytedelta(pack_bytedelta(rows), rows.shape), rows)


def test_frames_of_pixels_are_packed_by_planes_too() -> None:
    frames = np.random.default_rng(0).integers(0, 2, (30, 4, 6, 6), dtype=np.uint8)
    frames[10:20] = frames[9]
    message = encode({"state": frames}, pack=True)
    assert len(message) < frames.nbytes / 3
    assert np.array_equal(decode(message, LIMIT)["state"], frames)


def compressed(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


def test_packed_rows_that_contradict_themselves_are_refused() -> None:
    for plain, reason in [
        (b"", "would unpack to 0 bytes; 2 to 18 can be"),
        (bytes(1), "would unpack to 1 bytes"),
        (bytes(19), "would unpack to 19 bytes"),
        (bytes(3), "1 changes too many"),
        (b"\xff\0", "more often than changes are given"),
        (b"\xff\0\1\1", "more often than changes are given"),
    ]:
        with pytest.raises(DamagedData, match=reason):
            unpack_bytedelta(compressed(plain), (8, 2))


def test_what_zstd_cannot_read_is_refused() -> None:
    whole = compressed(bytes(2))
    for data in (b"", b"noise" * 9, whole[:-1], whole + b"x"):
        with pytest.raises(DamagedData):
            unpack_bytedelta(data, (8, 2))
    assert not unpack_bytedelta(whole, (8, 2)).any()


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(DamagedData, match="would unpack to 100000000 bytes"):
        unpack_bytedelta(compressed(bytes(10**8)), (8, 2))
