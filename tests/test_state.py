"""Random streams: independent of each other, the same on every machine, and rewindable."""

from itertools import product

import numpy as np
import pytest

from canal_mpi.state import (
    from_json,
    random_stream,
    rng_state,
    seed_integer,
    seed_sequence,
    set_rng_state,
)

SEEDS = (0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1)
PINNED = [2532049249, 3206283441, 1703989750]
PLACES = list(product(SEEDS, range(4), ("", "Krull", "Alien"), ("explore", "sample", "order")))


def test_the_same_purpose_gives_the_same_numbers() -> None:
    for place in PLACES[::7]:
        assert random_stream(*place).random(5).tolist() == random_stream(*place).random(5).tolist()
        assert seed_integer(*place) == seed_integer(*place)


def test_every_seed_agent_task_and_purpose_has_a_stream_of_its_own() -> None:
    first = {random_stream(*place).bytes(16) for place in PLACES}
    assert len(first) == len(PLACES)


def test_a_seed_and_an_agent_never_trade_places() -> None:
    assert random_stream(1, 2, "a", "b").bytes(16) != random_stream(2, 1, "a", "b").bytes(16)
    assert random_stream(1, 2, "a", "b").bytes(16) != random_stream(1, 2, "b", "a").bytes(16)
    assert random_stream(1 + (2 << 32), 3, "a", "b").bytes(16) != random_stream(
        1, 2, "a", "b"
    ).bytes(16)


def test_neighbouring_streams_are_not_correlated() -> None:
    places = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    draws = np.array(
        [random_stream(*place, "Krull", "explore").normal(size=20_000) for place in places]
    )
    apart = np.corrcoef(draws) - np.eye(len(places))
    assert np.abs(apart).max() < 0.04


def test_drawing_from_one_stream_leaves_the_others_alone() -> None:
    random_stream(1, 0, "Krull", "explore").random(1000)
    np.random.default_rng(0).random(3)
    first = random_stream(1, 0, "Krull", "sample").random(3)
    assert np.array_equal(first, random_stream(1, 0, "Krull", "sample").random(3))


def test_streams_are_the_same_bits_on_every_machine_and_version() -> None:
    assert random_stream(1, 0, "Krull", "explore").integers(0, 2**32, 3).tolist() == PINNED


def test_plain_numbers_have_31_bits_and_differ() -> None:
    found = [seed_integer(*place) for place in PLACES]
    assert all(0 <= number < 2**31 for number in found)
    assert len(set(found)) == len(PLACES)
    assert max(found) > 2**30


def test_names_may_hold_any_character() -> None:
    assert (
        random_stream(1, 0, "Straße/Ω", "é").random()
        != random_stream(1, 0, "Strasse/O", "e").random()
    )


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        seed_sequence(-1, 0, "Krull", "explore")


def test_a_rewound_generator_gives_the_same_numbers_again() -> None:
    for drawn in (0, 1, 2, 7, 1000):
        rng = random_stream(3, 1, "Krull", "explore")
        rng.integers(0, 100, drawn, dtype=np.uint32)
        words = rng_state(rng)
        expected = (rng.random(3).tolist(), rng.integers(0, 9, 5).tolist(), rng.normal())
        for other in (rng, random_stream(9, 9, "", ""), np.random.Generator(np.random.PCG64(5))):
            set_rng_state(other, words)
            again = (other.random(3).tolist(), other.integers(0, 9, 5).tolist(), other.normal())
            assert again == expected


def test_half_used_numbers_are_kept() -> None:
    rng = random_stream(3, 1, "Krull", "explore")
    rng.integers(0, 2**32, 1, dtype=np.uint32)
    words = rng_state(rng)
    assert from_json(words)["has_uint32"] == 1
    expected = rng.integers(0, 2**32, 3, dtype=np.uint32).tolist()
    other = random_stream(4, 0, "", "")
    set_rng_state(other, words)
    assert other.integers(0, 2**32, 3, dtype=np.uint32).tolist() == expected


def test_a_snapshot_does_not_move() -> None:
    rng = random_stream(3, 1, "Krull", "explore")
    words = rng_state(rng)
    before = words.tolist()
    rng.random(10)
    assert words.tolist() == before
    assert rng_state(rng).tolist() != before
