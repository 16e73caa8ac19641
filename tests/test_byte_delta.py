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


def rows_of(number: int, width: int, seed: int, busy: float = 0.2) -> tuple[Array, Array]:
    """Rows that change a little, where a half of the planes follows the actions."""
    rng = np.random.default_rng(seed)
    action = rng.integers(0, 6, number).astype(np.uint8)
    moves = np.where(rng.random((number, width)) < busy, rng.integers(-3, 4, (number, width)), 0)
    moves[1:, ::2] += 7 * action[:-1, None]
    return (np.cumsum(moves, axis=0) % 256).astype(np.uint8), action


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 99), st.integers(0, 10))
def test_rows_come_back_as_they_were(number: int, width: int, seed: int, busy: int) -> None:
    rows, action = rows_of(number, width, seed, busy / 10)
    packed = pack_bytedelta(rows, action)
    assert np.array_equal(unpack_bytedelta(packed, rows.shape, action), rows)


def test_noise_and_constants_come_back_too() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5000, 9), dtype=np.uint8)
    for rows in (noise, np.zeros_like(noise), np.full_like(noise, 255)):
        action = noise[:, 0].copy()
        assert np.array_equal(
            unpack_bytedelta(pack_bytedelta(rows, action), rows.shape, action), rows
        )


def test_planes_that_follow_the_actions_are_grouped_by_them() -> None:
    rows, action = rows_of(20000, 8, 1, busy=0.0)
    constant = np.zeros_like(action)
    assert len(pack_bytedelta(rows, action)) < 0.2 * len(pack_bytedelta(rows, constant))


def test_a_message_uses_actions_only_where_they_come_first_and_fit() -> None:
    rows, action = rows_of(3000, 16, 2, busy=0.0)
    first = encode({"action": action, "state": rows}, pack=True)
    last = encode({"state": rows, "action": action}, pack=True)
    other = encode({"action": action[:-1], "state": rows}, pack=True)
    assert len(first) < len(last)
    for message in (first, last, other):
        assert np.array_equal(decode(message, LIMIT)["state"], rows)


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
        (b"", "would unpack to 0 bytes; 3 to 19 can be"),
        (bytes(2), "would unpack to 2 bytes"),
        (bytes(20), "would unpack to 20 bytes"),
        (bytes(4), "1 changes too many"),
        (b"\0\xff\0", "more often than changes are given"),
        (b"\0\xff\0\1\1", "more often than changes are given"),
    ]:
        with pytest.raises(DamagedData, match=reason):
            unpack_bytedelta(compressed(plain), (8, 2), np.zeros(8, dtype=np.uint8))


def test_what_zstd_cannot_read_is_refused() -> None:
    whole = compressed(bytes(3))
    for data in (b"", b"noise" * 9, whole[:-1], whole + b"x"):
        with pytest.raises(DamagedData):
            unpack_bytedelta(data, (8, 2), np.zeros(8, dtype=np.uint8))
    assert not unpack_bytedelta(whole, (8, 2), np.zeros(8, dtype=np.uint8)).any()


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(DamagedData, match="would unpack to 100000000 bytes"):
        unpack_bytedelta(compressed(bytes(10**8)), (8, 2), np.zeros(8, dtype=np.uint8))
