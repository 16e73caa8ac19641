"""Offers on the wire: what goes in comes out, and nothing malformed does."""

from collections.abc import Callable, Sequence
from math import isnan, nan

import numpy as np
import pytest

from canal_mpi.columns import encode
from canal_mpi.errors import DamagedData
from canal_mpi.topology.offers import (
    SMALL,
    columns_to_offers,
    offers_to_columns,
    pack_offers,
    unpack_offers,
)
from canal_mpi.types import Array, Columns, Offer


def offer(donor: int = 1, width: int = 0, task: str = "Krull", round_: int = 2) -> Offer:
    embedding = np.arange(width, dtype="<f4") + donor
    return Offer(donor, round_, task, 7.5, 40, 600, embedding)


def same(found: Sequence[Offer], sent: Sequence[Offer]) -> bool:
    """Equal, embeddings too (which `==` of offers leaves out)."""
    vectors = [[o.embedding.tolist() for o in offers] for offers in (found, sent)]
    return list(found) == list(sent) and vectors[0] == vectors[1]


# ── round trip ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("widths", [[], [0], [3], [0, 0], [5, 0, 2], [0, 7], [1, 512, 3, 0]])
def test_offers_come_out_as_they_went_in_whatever_the_width_of_their_embeddings(
    widths: list[int],
) -> None:
    sent = [offer(donor, width) for donor, width in enumerate(widths)]
    found = unpack_offers(pack_offers(sent))
    assert same(found, sent)
    assert {o.embedding.dtype.str for o in found} <= {"<f4"}
    assert same(columns_to_offers(offers_to_columns(sent)), sent)


@pytest.mark.parametrize("task", ["Ms. Pac-Man", "Pokémon", "é" * 32, "x" * 64])
def test_the_task_is_utf8(task: str) -> None:
    assert unpack_offers(pack_offers([offer(task=task)]))[0].task == task


def test_a_score_that_is_not_known_and_large_numbers_survive() -> None:
    big = Offer(2**31 - 1, -3, "Krull", nan, 2**40, 2**50)
    (found,) = unpack_offers(pack_offers([big]))
    assert isnan(found.score)
    assert (found.key, found.rows, found.bytes) == (big.key, 2**40, 2**50)


def test_doubles_of_the_embedding_become_floats_of_four_bytes() -> None:
    sent = Offer(1, 1, "Krull", 0.0, 2, 1, np.array([0.1, 0.2]))
    (found,) = unpack_offers(pack_offers([sent]))
    assert found.embedding.tolist() == np.array([0.1, 0.2], dtype="<f4").tolist()


def test_an_offer_without_an_embedding_takes_a_few_hundred_bytes() -> None:
    assert len(pack_offers([offer()])) < 500


# ── refused ────────────────────────────────────────────────────────────────────────────────────


def other(name: str, value: Array) -> Callable[[Columns], Columns]:
    return lambda columns: columns | {name: value}


def without(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {n: c for n, c in columns.items() if n != name}


NAMES = ["donor", "round", "score", "rows", "bytes", "task", "width", "embedding"]


@pytest.mark.parametrize("name", NAMES)
def test_an_offer_without_one_of_its_columns_is_refused(name: str) -> None:
    columns = without(name)(offers_to_columns([offer(1, 2), offer(2, 3)]))
    with pytest.raises(DamagedData, match="offer has the columns"):
        unpack_offers(encode(columns))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "embedding"])
@pytest.mark.parametrize("form", ["longer", "shorter", "square"])
def test_columns_of_different_lengths_are_refused(name: str, form: str) -> None:
    columns = offers_to_columns([offer(1, 2), offer(2, 3)])
    column = columns[name]
    shapes = {
        "longer": np.concatenate([column, column[:1]]),
        "shorter": column[:1],
        "square": column.reshape(1, 2),
    }
    with pytest.raises(DamagedData, match="offer"):
        unpack_offers(encode(columns | {name: np.asarray(shapes[form], dtype=column.dtype)}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other("more", np.zeros(2)), "offer has the columns"),
        (other("donor", np.array([1, 2], dtype="<i8")), "offer has the columns"),
        (other("score", np.array([1, 2], dtype="<f4")), "offer has the columns"),
        (other("task", np.array([b"x", b"y"], dtype="S8")), "offer has the columns"),
        (other("embedding", np.zeros(5)), "offer has the columns"),
        (other("embedding", np.zeros((1, 5), dtype="<f4")), "differ in length"),
        (other("embedding", np.zeros(4, dtype="<f4")), "differ from their widths"),
        (other("embedding", np.zeros(6, dtype="<f4")), "differ from their widths"),
        (other("width", np.array([-1, 6], dtype="<i4")), "differ from their widths"),
        (other("width", np.array([2**31 - 1] * 2, dtype="<i4")), "differ from their widths"),
        (other("embedding", np.array([0, 1, nan, 3, 4], dtype="<f4")), "finite"),
        (other("embedding", np.array([0, 1, np.inf, 3, 4], dtype="<f4")), "finite"),
        (other("rows", np.array([40, 1], dtype="<i8")), "empty lesson"),
        (other("rows", np.array([40, -5], dtype="<i8")), "empty lesson"),
        (other("bytes", np.array([0, 9], dtype="<i8")), "empty lesson"),
        (other("bytes", np.array([-9, 9], dtype="<i8")), "empty lesson"),
        (other("round", np.array([0, 1], dtype="<i4")), "empty lesson"),
        (other("task", np.array([b"\xff", b"y"], dtype="S64")), "UTF-8"),
    ],
)
def test_a_malformed_offer_is_refused(change: Callable[[Columns], Columns], words: str) -> None:
    columns = offers_to_columns([offer(1, 2), offer(2, 3)])
    assert len(unpack_offers(encode(columns))) == 2
    with pytest.raises(DamagedData, match=words):
        unpack_offers(encode(change(columns)))


def test_widths_that_overflow_to_the_right_sum_are_refused() -> None:
    """In 32 bits these add up to 4."""
    sent = [offer(k) for k in range(3)]
    width = np.array([2**31 - 1, 2**31 - 1, 6], dtype="<i4")
    held = {"width": width, "embedding": np.zeros(4, dtype="<f4")}
    with pytest.raises(DamagedData, match="differ from their widths"):
        unpack_offers(encode(offers_to_columns(sent) | held))


@pytest.mark.parametrize("data", [b"", b"nonsense", pack_offers([offer()])[:-1]])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedData):
        unpack_offers(data)


def test_every_flipped_byte_of_a_message_is_found() -> None:
    data = pack_offers([offer(1, 2)])
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(DamagedData):
            unpack_offers(bytes(flipped))


def test_a_message_of_offers_over_the_limit_is_refused() -> None:
    with pytest.raises(DamagedData, match="limit"):
        unpack_offers(pack_offers([offer(1, SMALL // 4)]))
