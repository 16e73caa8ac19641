import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from helpers import head, message, seal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns
from canal_mpi.membuf.wire import HEADER, MAGIC, MOST_DIMENSIONS, WIRE_VERSION, ZSTD, decode, encode

LIMIT = 1 << 20
DTYPES = [
    "|u1",
    "|i1",
    "|b1",
    "<u2",
    "<u4",
    "<u8",
    "<i2",
    "<i4",
    "<i8",
    "<f2",
    "<f4",
    "<f8",
    "|S1",
    "|S7",
    "|S64",
    "|S9999",
]
SHAPES = [(1,), (5,), (0,), (3, 4), (7, 0, 2), (2, 3, 4, 5), (1,) * MOST_DIMENSIONS]


def sample_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind == "f":
        return rng.normal(size=shape).astype(kind)
    data = rng.integers(1, 127, (*shape, kind.itemsize)).astype(np.uint8)
    return np.frombuffer(data.tobytes(), dtype=kind).reshape(shape)


def same(left: Columns, right: Columns) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )


def real_message(pack: bool) -> bytes:
    return encode(
        {
            "state": np.arange(400, dtype="<i4").reshape(100, 4),
            "flags": np.zeros(100, dtype=np.uint8),
            "score": np.array([np.nan, 1.5]),
            "task": np.array([b"Krull"], dtype="S64"),
        },
        pack,
    )


def test_every_type_and_shape_comes_back_the_same() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for pack in [False, True]:
                columns = {"it": sample_array(dtype, shape)}
                assert same(decode(encode(columns, pack), 10 * LIMIT), columns)


def test_columns_keep_their_names_and_their_order() -> None:
    names = ["z", "a", "own/state", "lesson-10/flags", "A_b.c", "x" * 120]
    columns = {name: np.full(3, k, dtype="<i8") for k, name in enumerate(names)}
    assert same(decode(encode(columns), LIMIT), columns)


def test_a_message_without_columns_is_a_message() -> None:
    assert decode(encode({}), 0) == {}


def test_nan_and_infinity_keep_their_bits() -> None:
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0])
    assert decode(encode({"odd": odd}, pack=True), LIMIT)["odd"].tobytes() == odd.tobytes()


def test_big_endian_numbers_travel_as_little_endian() -> None:
    found = decode(encode({"n": np.arange(9, dtype=">i4")}, pack=True), LIMIT)["n"]
    assert found.dtype.str == "<i4"
    assert np.array_equal(found, np.arange(9))


def test_views_with_gaps_are_sent_as_what_they_show() -> None:
    for pack in [False, True]:
        array = np.arange(600, dtype="<u2").reshape(20, 30)[::3, ::-2].T
        assert np.array_equal(decode(encode({"n": array}, pack), LIMIT)["n"], array)


def test_decoded_arrays_own_their_memory_and_can_be_written() -> None:
    for pack in (False, True):
        message = bytearray(encode({"n": np.zeros(1000, dtype="<i4")}, pack))
        found = decode(message, LIMIT)["n"]
        message[:] = b"\xff" * len(message)
        found += 1
        assert found.tolist() == [1] * 1000


def test_a_message_may_be_bytes_a_bytearray_or_a_view() -> None:
    message = real_message(True)
    plain = decode(message, LIMIT)
    assert same(decode(bytearray(message), LIMIT), plain)
    assert same(decode(memoryview(message), LIMIT), plain)


def test_packing_shrinks_regular_rows_and_leaves_noise_alone() -> None:
    regular = {"state": np.tile(np.arange(128, dtype=np.uint8), (1000, 1))}
    assert len(encode(regular, pack=True)) < len(encode(regular)) / 10
    noise = {"state": np.random.default_rng(1).integers(0, 256, (500, 8)).astype(np.uint8)}
    assert len(encode(noise, pack=True)) == len(encode(noise))


def test_the_same_columns_give_the_same_bytes() -> None:
    assert real_message(True) == real_message(True)


def test_the_limit_is_the_size_of_the_arrays_to_the_byte() -> None:
    columns = {"a": np.zeros(100, dtype="<i4"), "b": np.zeros(7, dtype=np.uint8)}
    for pack in (False, True):
        message = encode(columns, pack)
        assert same(decode(message, 407), columns)
        with pytest.raises(DamagedData, match="announces 407 bytes of arrays; the limit is 406"):
            decode(message, 406)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([None]),
        np.zeros(2, dtype=complex),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros(2, dtype="M8[s]"),
        np.zeros(2, dtype="S10000"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_types_without_a_wire_form_are_not_sent(array: Array) -> None:
    with pytest.raises(ValueError, match="has no wire form"):
        encode({"a": array})


def test_names_outside_the_alphabet_are_not_sent() -> None:
    for name in ["", "a b", "é", "x" * 121, "a\0", "a:b"]:
        with pytest.raises(ValueError, match="has no wire form"):
            encode({name: np.zeros(1)})


def test_an_array_without_dimensions_comes_back_the_same() -> None:
    columns = {"step": np.array(3.5)}
    assert same(decode(encode(columns), LIMIT), columns)


def test_more_dimensions_than_can_be_read_are_not_sent() -> None:
    with pytest.raises(ValueError, match="no wire form"):
        encode({"a": np.zeros((1,) * (MOST_DIMENSIONS + 1))})


def test_a_name_that_ends_in_a_newline_is_not_sent() -> None:
    with pytest.raises(ValueError, match="no wire form"):
        encode({"a\n": np.zeros(1)})


def test_every_truncation_is_refused() -> None:
    for pack in [False, True]:
        message = real_message(pack)
        for length in range(len(message)):
            with pytest.raises(DamagedData):
                decode(message[:length], LIMIT)


def test_a_flipped_bit_is_refused_wherever_it_is() -> None:
    for pack in [False, True]:
        message = real_message(pack)
        places = [*range(HEADER.size * 8), *range(HEADER.size * 8, len(message) * 8, 13)]
        for place in places:
            damaged = bytearray(message)
            damaged[place // 8] ^= 1 << place % 8
            with pytest.raises(DamagedData):
                decode(damaged, LIMIT)


def test_each_damage_says_what_is_wrong() -> None:
    message = real_message(False)
    with pytest.raises(DamagedData, match="message of 0 bytes is shorter than its header"):
        decode(b"", LIMIT)
    with pytest.raises(DamagedData, match="does not begin with CANALCOL"):
        decode(b"X" + message[1:], LIMIT)
    with pytest.raises(DamagedData, match=r"announces \d+ bytes and has \d+"):
        decode(message + b"\0", LIMIT)
    with pytest.raises(DamagedData, match="fails its checksum"):
        decode(message[:-1] + b"\xaa", LIMIT)


@pytest.mark.parametrize("version", [0, WIRE_VERSION + 1, 65535])
def test_another_wire_version_is_refused_by_number(version: int) -> None:
    with pytest.raises(DamagedData, match=f"wire format {version}; this code reads {WIRE_VERSION}"):
        decode(message([head()], b"x", version), LIMIT)


def test_messages_made_by_hand_are_read_when_they_are_right() -> None:
    assert decode(message([head()], b"x"), LIMIT)["a"].tolist() == [120]
    assert decode(message([head(shape=())], b"x"), LIMIT)["a"].shape == ()


def peak_of_refusal(message: bytes, limit: int, match: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedData, match=match):
            decode(message, limit)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_oversized_announcements_are_refused_before_memory_is_taken() -> None:
    for shape in [(1 << 40,), (1 << 32, 1 << 32), (2**64 - 1,) * 8]:
        for codec in [0, ZSTD]:
            told = message([head(shape=shape, codec=codec)], b"x")
            assert peak_of_refusal(told, 1 << 30, "limit|shape") < 1 << 20


def test_sizes_are_added_up_over_all_columns() -> None:
    heads = [head(name=f"c{k}", shape=(600,), stored=600) for k in range(2)]
    with pytest.raises(DamagedData, match="announces 1200 bytes of arrays; the limit is 1000"):
        decode(message(heads, bytes(1200)), 1000)


def test_a_zstd_bomb_is_refused_before_memory_is_taken() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    told = message([head(shape=(100,), codec=ZSTD, stored=len(bomb))], bomb)
    assert peak_of_refusal(told, LIMIT, "; 100 to 100 can be") < 1 << 20


def test_a_zstd_frame_of_unknown_size_is_refused() -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False)
    frame = packer.compress(bytes(50))
    told = message([head(shape=(50,), codec=ZSTD, stored=len(frame))], frame)
    with pytest.raises(DamagedData, match="; 50 to 50 can be"):
        decode(told, LIMIT)


def test_a_zstd_frame_that_lies_about_its_size_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(50)))
    assert frame[5] == 50
    frame[5] = 60
    told = message([head(shape=(60,), codec=ZSTD, stored=len(frame))], bytes(frame))
    with pytest.raises(DamagedData, match="unpack"):
        decode(told, LIMIT)


def test_what_is_no_zstd_frame_is_refused() -> None:
    told = message([head(shape=(50,), codec=ZSTD, stored=9)], b"not a zst")
    with pytest.raises(DamagedData, match="can't be unpacked"):
        decode(told, LIMIT)


def test_bytes_behind_a_zstd_frame_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(50)) + b"junk"
    told = message([head(shape=(50,), codec=ZSTD, stored=len(frame))], frame)
    with pytest.raises(DamagedData):
        decode(told, LIMIT)


def test_packed_columns_without_bytes_are_refused() -> None:
    for shape in ((0,), ()):
        with pytest.raises(DamagedData, match="has 1 bytes for"):
            decode(message([head(shape=shape, codec=ZSTD)], b"x"), LIMIT)


def test_an_unknown_packing_is_refused() -> None:
    with pytest.raises(DamagedData, match="has 1 bytes for 1"):
        decode(message([head(codec=2)], b"x"), LIMIT)


def test_a_column_that_occurs_twice_is_refused() -> None:
    with pytest.raises(DamagedData, match="column 'a' occurs twice"):
        decode(message([head(), head()], b"xy"), LIMIT)


def test_bytes_after_the_last_column_are_refused() -> None:
    with pytest.raises(DamagedData, match="has 3 bytes after its last column"):
        decode(message([head()], b"xyzt"), LIMIT)
    with pytest.raises(DamagedData, match="has 1 bytes after its last column"):
        decode(message([], b"x"), LIMIT)


def test_a_column_that_ends_early_is_refused() -> None:
    with pytest.raises(DamagedData, match="ends after 1 of 5 bytes"):
        decode(message([head(shape=(5,), stored=5)], b"x"), LIMIT)


def test_fewer_or_more_bytes_than_the_shape_needs_are_refused() -> None:
    for shape in ((3,), (0,), (1, 1, 5)):
        with pytest.raises(DamagedData, match="has 2 bytes for"):
            decode(message([head(shape=shape, stored=2)], b"xy"), LIMIT)


def test_descriptions_that_end_early_are_refused() -> None:
    whole = message([head(shape=(1, 1))], b"x")[HEADER.size :]
    for length in range(len(whole) - 1):
        with pytest.raises(DamagedData):
            decode(seal(whole, length), LIMIT)
    for length in (len(whole) + 1, 1 << 31):
        with pytest.raises(DamagedData, match="bytes that describe its columns"):
            decode(seal(whole, length), LIMIT)


def test_descriptions_outside_the_format_are_refused() -> None:
    odd_parts: list[dict[str, Any]] = [
        {"name": ""},
        {"name": "a b"},
        {"name": "\xff"},
        {"name": "x" * 121},
        {"name": 3},
        {"name": None},
        {"dtype": "|O"},
        {"dtype": ">i4"},
        {"dtype": "<U4"},
        {"dtype": "|S0"},
        {"dtype": "|S10000"},
        {"dtype": ""},
        {"dtype": "|V8"},
        {"dtype": "i4,i4"},
        {"dtype": ["<i4"]},
        {"shape": (1,) * (MOST_DIMENSIONS + 1)},
        {"shape": (1,) * 255},
        {"shape": (-1,)},
        {"shape": (1.0,)},
        {"shape": (True,)},
        {"shape": "1"},
        {"shape": 1},
        {"shape": None},
        {"codec": "0"},
        {"codec": -1},
        {"stored": 1.0},
        {"stored": -1},
    ]
    for odd in odd_parts:
        with pytest.raises(DamagedData):
            decode(message([head(**odd)], b"x"), LIMIT)
    odd_heads: list[Any] = [[], ["a", "|u1"], [*head(), 1], 3, None, "abcde"]
    for odd in odd_heads:
        with pytest.raises(DamagedData):
            decode(message([odd], b"x"), LIMIT)
    for text in (b"", b"3", b"{", b"null", b"[" * 100_000, b"1" * 10_000, b"\xff\xfe", b"[NaN]"):
        with pytest.raises(DamagedData):
            decode(seal(text, len(text)), LIMIT)


def test_a_newline_at_the_end_of_a_description_is_refused() -> None:
    for name, dtype in [("a\n", "|u1"), ("a", "|u1\n")]:
        with pytest.raises(DamagedData):
            decode(message([head(name, dtype)], b"x"), LIMIT)


def test_an_empty_column_of_impossible_shape_is_refused() -> None:
    for shape in [(0, 2**64 - 1), (0, 1 << 40, 1 << 40), (1 << 63, 0)]:
        with pytest.raises(DamagedData):
            decode(message([head(shape=shape, stored=0)]), LIMIT)


@st.composite
def messages(draw: Any) -> bytes:
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4))
    columns = {
        name: sample_array(
            draw(st.sampled_from(DTYPES[:-1])),
            tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))),
            draw(st.integers(0, 9)),
        )
        for name in names
    }
    return encode(columns, draw(st.booleans()))


@st.composite
def mutated(draw: Any, data: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        more = draw(st.integers(0, 9))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "insert", "replace", "repeat"]))
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << more % 8]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "drop":
            data = data[:at] + data[at + more :]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(max_size=9)) + data[at:]
        elif kind == "replace":
            data = data[:at] + draw(st.binary(min_size=more, max_size=more)) + data[at + more :]
        else:
            data = data[:at] + data[max(at - more, 0) : at] + data[at:]
    return data


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.data())
def test_no_change_of_a_message_goes_undetected(data: st.DataObject) -> None:
    whole = data.draw(messages())
    changed = data.draw(mutated(whole))
    if changed == whole:
        assert encode(decode(whole, LIMIT)) == encode(decode(changed, LIMIT))
        return
    with pytest.raises(DamagedData):
        decode(changed, LIMIT)


@settings(FUZZ, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_a_forged_message_is_read_within_the_limit_or_refused(data: st.DataObject) -> None:
    whole = data.draw(messages())
    body = data.draw(mutated(whole[HEADER.size :]))
    heads = HEADER.unpack_from(whole)[2]
    try:
        found = decode(seal(body, data.draw(st.sampled_from([heads, heads + 1]))), 5000)
    except DamagedData:
        return
    assert sum(array.nbytes for array in found.values()) <= 5000


@FUZZ
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, MAGIC + noise):
        with pytest.raises(DamagedData):
            decode(data, LIMIT)
