"""Segments of play: whole, closed, within a budget, and chosen as asked."""

import numpy as np
import pytest
from small import WALK, moves, parcel, play_into, played

from canal_mpi.interfaces import LAST, LIFE, TERMINATED, TRUNCATED, Columns
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import unpack
from canal_mpi.membuf.selection import choose, cut, join

FLAGS = {
    7: TERMINATED,
    20: TRUNCATED,
    33: LIFE,
    61: TRUNCATED,
    62: TRUNCATED,
    90: TERMINATED,
    120: TRUNCATED,
}


def _next_state(rows: Columns, number: int) -> float:
    """The state behind a move of `played`."""
    place = [int(s[0]) for s in rows["state"]].index(number)
    assert not rows["flags"][place] & LAST
    return float(rows["state"][place + 1][0])


def test_cutting_covers_every_move_once_and_never_crosses_a_last_row() -> None:
    rows = played(200, FLAGS)
    pieces = cut(rows["flags"], 30)
    covered = [k for a, b in pieces for k in range(a, b)]
    real = np.flatnonzero((rows["flags"] & LAST) == 0).tolist()
    assert covered == real
    assert all(0 < b - a <= 30 for a, b in pieces)


def test_cutting_by_hand() -> None:
    flags = np.array([0, 0, TRUNCATED, LAST, 0, TERMINATED, 0, 0, LAST], dtype=np.uint8)
    assert cut(flags, 2) == [(0, 2), (2, 3), (4, 6), (6, 8)]
    assert cut(flags, 100) == [(0, 3), (4, 8)]


def test_rows_without_an_end_give_no_segment() -> None:
    assert cut(np.zeros(0, dtype=np.uint8)) == []
    assert cut(np.array([LAST], dtype=np.uint8)) == []


def test_joined_segments_are_closed_and_keep_their_next_states() -> None:
    rows = played(200, FLAGS)
    pieces = cut(rows["flags"], 30)[1::2]
    joined = join(rows, pieces)
    ends = np.cumsum([b - a + 1 for a, b in pieces]) - 1
    assert np.flatnonzero(joined["flags"] & LAST).tolist() == ends.tolist()
    assert (joined["flags"][ends] == LAST).all()
    for number in moves(joined):
        cut_off = FLAGS.get(number, 0) & TRUNCATED
        ended = FLAGS.get(number, 0) & TERMINATED
        if not ended:  # after an end the next state is never looked at
            assert _next_state(joined, number) == (-1 if cut_off else number + 1)


def test_joining_leaves_the_rows_it_took_from_alone() -> None:
    rows = played(50)
    before = {name: column.copy() for name, column in rows.items()}
    join(rows, [(3, 9), (20, 30)])
    for name, column in before.items():
        np.testing.assert_array_equal(rows[name], column)


def test_joining_nothing_gives_no_rows_of_the_same_kind() -> None:
    rows = played(50)
    joined = join(rows, [])
    for name, column in joined.items():
        assert column.dtype == rows[name].dtype
        assert column.shape == (0, *rows[name].shape[1:])


@pytest.mark.parametrize("most", [51, 52, 100, 777, 1500])
def test_a_choice_keeps_to_its_budget_and_is_a_proper_lesson(most: int) -> None:
    rows = played(2000, {k: (TERMINATED, TRUNCATED, LIFE)[k % 3] for k in range(11, 2000, 37)})
    chosen = choose(rows, most, np.random.default_rng(0))
    total = len(chosen["flags"])
    assert max(most - 51, 1) <= total <= most  # at most one segment is missing
    sent = parcel(rows=chosen)
    lesson = unpack(sent.data, sent.offer, WALK, 1 << 24)
    assert moves(lesson.rows) == sorted(moves(lesson.rows))
    assert len(set(moves(lesson.rows))) == len(moves(lesson.rows))


def test_a_budget_of_less_than_a_segment_is_used_too() -> None:
    for most in [3, 10, 40]:
        rows = played(500)
        chosen = choose(rows, most, np.random.default_rng(0))
        assert 2 <= len(chosen["flags"]) <= most


def test_play_that_fits_is_kept_whole() -> None:
    rows = played(100, FLAGS)
    whole = choose(rows, len(rows["flags"]), np.random.default_rng(0))
    assert moves(whole) == list(range(100))


def test_drawing_keeps_every_segment_equally_often() -> None:
    rows, counts = played(1000), np.zeros(20)
    for seed in range(1000):
        chosen = choose(rows, 5 * 51, np.random.default_rng(seed))
        counts[np.array(moves(chosen))[::50] // 50] += 1
    assert counts.sum() == 5000
    chi_squared = float(np.square(counts - 250).sum() / 250)
    assert chi_squared < 43.8  # 19 degrees of freedom: exceeded once in a thousand times


def test_choosing_again_from_a_choice_keeps_segments_whole() -> None:
    rows = played(1000, FLAGS)
    first = choose(rows, 500, np.random.default_rng(1))
    second = choose(first, 200, np.random.default_rng(2))
    assert set(moves(second)) < set(moves(first))
    for number in moves(second):
        if not FLAGS.get(number, 0) & (TRUNCATED | TERMINATED):
            assert _next_state(second, number) == number + 1


def test_a_ring_that_was_overwritten_cuts_properly() -> None:
    buffer = Buffer(WALK, 100)
    buffer.start(np.zeros((1, 5), dtype=np.float32))
    for k in range(333):
        play_into(buffer, k, TRUNCATED if k % 40 == 39 else 0)
    sent = parcel(rows=buffer.export(60))
    lesson = unpack(sent.data, sent.offer, WALK, 1 << 24)
    kept = moves(lesson.rows)
    assert kept[-1] == 332 and kept == list(range(kept[0], 333))
