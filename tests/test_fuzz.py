"""Thousands of mutated real lessons and offers: refused, or exactly what was sent; never a crash.

CANAL_FUZZ=100 makes it a hundred times longer.
"""

import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import zstandard
from helpers import head, message, seal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canal_mpi.envs import LocalEnvs, make_game
from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Columns, Offer, Spaces
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import ROWS, pack, pack_offers, unpack, unpack_offers
from canal_mpi.membuf.wire import BYTE_DELTA, HEADER, RAW, ZSTD, decode, encode
from canal_mpi.settings import TaskConfig
from canal_mpi.state import seed_sequence

pytestmark = pytest.mark.atari
TIMES = int(os.environ.get("CANAL_FUZZ", "1"))
SPACES = Spaces((256,), "|u1", 18, stack=2)
LIMIT = 1 << 20
SMALL = 1 << 16
STEPS = 300
FUZZ = settings(
    max_examples=100 * TIMES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@cache
def lesson(network: bool = True) -> tuple[bytes, Offer, Columns]:
    """A real lesson: random play of a real game, and a network."""
    spaces, rng = SPACES, np.random.default_rng(1)
    game = make_game("Krull", TaskConfig(), seed_sequence(1, 0, "Krull", "fuzz"))
    env, buffer = LocalEnvs("Krull", [game], spaces), Buffer(spaces, STEPS)
    buffer.start(env.reset())
    for _ in range(STEPS):
        actions = rng.integers(spaces.actions, size=1)
        env.send(actions)
        buffer.add(actions, env.recv())
    env.close()
    rows = buffer.export()
    brain = {"trunk": rng.normal(size=50).astype("<f4"), "head": rng.normal(size=9).astype("<f4")}
    data = pack(3, 2, "Krull", rows, brain if network else {})
    return data, Offer(3, 2, "Krull", 1.0, len(rows["action"]), len(data)), rows


def offers() -> bytes:
    """A real message of offers."""
    rng = np.random.default_rng(2)
    some = [
        Offer(1, k + 1, f"Game{k}", float(k), 100 + k, 5000, rng.normal(size=20).astype("<f4"))
        for k in range(3)
    ]
    return pack_offers(some)


def read_offers(data: bytes) -> object:
    return unpack_offers(data, SMALL)


def read_lesson(data: bytes) -> object:
    return unpack(data, lesson()[1], SPACES, LIMIT)


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """The bytes with one to three small or large changes."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at, length = int(rng.integers(len(changed) + 1)), int(rng.integers(1, 40))
        other = int(rng.integers(len(changed) + 1))
        kind = int(rng.integers(7))
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = rng.bytes(length)
        elif kind == 4:
            changed[at : at + length] = rng.bytes(length)
        elif kind == 5:
            changed[at : at + length] = changed[other : other + length]
        else:
            edge = (0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)[int(rng.integers(6))]
            changed[at : at + 8] = struct.pack("<Q", edge)
    return bytes(changed)


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    """Fails if more than that many bytes are taken at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak} bytes were taken"


@pytest.mark.parametrize(
    ("data", "read"),
    [(lambda: lesson()[0], read_lesson), (offers, read_offers)],
    ids=["lesson", "offers"],
)
def test_thousands_of_mutations_are_all_refused(
    data: Callable[[], bytes], read: Callable[[bytes], object]
) -> None:
    whole, rng = data(), np.random.default_rng(3)
    read(whole)
    for _ in range(4000 * TIMES):
        changed = mutated(whole, rng)
        if changed != whole:
            with pytest.raises(DamagedData):
                read(changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "read", "most"),
    [(lambda: lesson()[0], read_lesson, 8 * LIMIT), (offers, read_offers, 8 * LIMIT)],
    ids=["lesson", "offers"],
)
def test_mutations_with_a_right_checksum_neither_crash_nor_take_memory(
    data: Callable[[], bytes], read: Callable[[bytes], object], most: int
) -> None:
    whole, rng = data(), np.random.default_rng(4)
    count = HEADER.unpack_from(whole)[2]
    accepted = 0
    with little_memory(most):
        for _ in range(1500 * TIMES):
            body = mutated(whole[HEADER.size :], rng)
            try:
                read(seal(body, max(count + int(rng.integers(-1, 2)), 0)))
                accepted += 1
            except DamagedData:
                pass
    assert accepted < 750 * TIMES  # what is accepted kept to the rules of rows or offers


def test_every_forged_lesson_that_is_accepted_obeys_the_rules() -> None:
    whole, offer, rows = lesson()
    rng, count = np.random.default_rng(5), HEADER.unpack_from(whole)[2]
    for _ in range(400 * TIMES):
        body = bytearray(whole[HEADER.size :])
        body[int(rng.integers(len(body)))] ^= 1 << int(rng.integers(8))
        try:
            found = unpack(seal(bytes(body), count), offer, SPACES, LIMIT)
        except DamagedData:
            continue
        assert [found.rows[name].shape for name in ROWS] == [rows[name].shape for name in ROWS]
        assert found.rows["action"].max() < SPACES.actions
        assert np.isfinite(found.rows["reward"]).all()
        assert all(np.isfinite(part).all() for part in found.network.values())


SIDES = st.sampled_from([0, 1, 2, 7, 128, 1 << 16, 1 << 20, 1 << 32, 1 << 47, 1 << 63, 2**64 - 1])
DTYPES = st.sampled_from(["|u1", "<f4", "<f8", "<i8", "|b1", "|S64", "|S9999", "|O", ">i4", "|V8"])


@FUZZ
@given(
    DTYPES,
    st.lists(SIDES, max_size=9).map(tuple),
    st.sampled_from([RAW, ZSTD, BYTE_DELTA, 3, 255]),
    st.one_of(
        st.binary(max_size=64),
        st.sampled_from([100, 10**6, 10**8]).map(lambda n: zstandard.compress(bytes(n))),
    ),
)
def test_huge_shapes_wrong_types_and_bombs_are_refused_within_the_limit(
    dtype: str, shape: tuple[int, ...], codec: int, data: bytes
) -> None:
    forged = message([head("state", dtype, shape, codec, len(data))], data)
    with little_memory(8 * LIMIT):
        try:
            found = decode(forged, LIMIT)
        except DamagedData:
            return
    assert found["state"].nbytes <= LIMIT


def test_a_bomb_that_lies_about_its_size_is_refused_within_the_limit() -> None:
    chunk = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = chunk.compress(bytes(10**8)) + chunk.flush()  # no size in front
    for codec in (ZSTD, BYTE_DELTA):
        forged = message([head("state", "|u1", (1000, 128), codec, len(bomb))], bomb)
        with little_memory(8 * LIMIT), pytest.raises(DamagedData):
            decode(forged, LIMIT)


@pytest.mark.parametrize("name", ["reward", "network/trunk"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused_with_a_right_checksum(name: str, value: float) -> None:
    data, offer, _ = lesson()
    columns = decode(data, LIMIT)
    columns[name][7] = value
    with pytest.raises(DamagedData, match="holds"):
        unpack(encode(columns, pack=True), offer, SPACES, LIMIT)


@FUZZ
@given(st.binary(max_size=300), st.integers(0, 5))
def test_noise_with_a_right_checksum_is_refused_or_empty(body: bytes, count: int) -> None:
    try:
        found = decode(seal(body, count), SMALL)
    except DamagedData:
        return
    assert sum(column.nbytes for column in found.values()) <= SMALL
