import numpy as np
from helpers import SPACES, Move, Player, lesson_offer, number_of, observation

from canal_mpi.interfaces import LAST, LIFE, TERMINATED, TRUNCATED, Array, Columns, Spaces, Step
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import pack, unpack


def moves_at(buffer: Buffer, rows: Array) -> list[Move]:
    region = buffer.region
    behind = rows // region * region + (rows + 1) % region
    states, after = buffer.state_rows[rows], buffer.state_rows[behind]
    return [
        Move(
            number_of(states[k]),
            int(buffer.action[row]),
            float(buffer.reward[row]),
            int(buffer.flags[row]),
            number_of(after[k]),
        )
        for k, row in enumerate(rows)
    ]


def drawn(buffer: Buffer, number: int = 3000) -> dict[int, Move]:
    rows = np.unique(buffer.draw(np.random.default_rng(5), number))
    return {move.state: move for move in moves_at(buffer, rows)}


def assert_draws_exactly(buffer: Buffer, moves: list[Move]) -> None:
    found = drawn(buffer)
    assert sorted(found) == sorted(move.state for move in moves)
    for move in moves:
        seen = found[move.state]
        if (
            move.flags & TERMINATED and not move.flags & TRUNCATED
        ):  # never bootstrapped: the state is moot
            seen = Move(seen.state, seen.action, seen.reward, seen.flags, move.after)
        assert seen == move


def open_end(buffer: Buffer, stream: int = 0) -> int:
    return number_of(buffer.state_rows[buffer.base[stream] + buffer.cursor[stream]])


def split_segments(rows: Columns) -> list[list[Move]]:
    segments: list[list[Move]] = [[]]
    numbers = [number_of(state) for state in rows["state"]]
    for k, flags in enumerate(rows["flags"]):
        if flags & LAST:
            segments.append([])
        else:
            values = (int(rows["action"][k]), float(rows["reward"][k]), int(flags))
            segments[-1].append(Move(numbers[k], *values, numbers[k + 1]))
    assert segments.pop() == []
    return segments


def test_each_state_is_stored_once() -> None:
    player = Player(Buffer(SPACES, 50))
    player.play(40, (0, 0, 0.2))
    stored = [number_of(state) for state in player.buffer.state_rows[:41]]
    assert stored == list(range(1, 42))
    assert not player.buffer.state_rows[41:].any()


def test_a_cut_stores_one_state_more_and_an_end_none() -> None:
    player = Player(Buffer(SPACES, 50))
    for flags in (0, TERMINATED, 0, TRUNCATED, 0):
        player.step(flags)
    buffer = player.buffer
    assert buffer.flags[:7].tolist() == [0, TERMINATED, 0, TRUNCATED, LAST, 0, LAST]
    assert [number_of(s) for s in buffer.state_rows[:7]] == [1, 2, 4, 5, 6, 7, 8]


def test_memory_is_taken_once_and_counted_by_the_row() -> None:
    buffer = Buffer(Spaces((128,), "|u1", 18), 1000)
    before = buffer.nbytes
    assert before == 1001 * Spaces((128,), "|u1", 18).row_bytes == 1001 * 134
    buffer.start(np.zeros((1, 128), dtype=np.uint8))
    assert buffer.nbytes == before


def test_a_fresh_buffer_has_nothing_to_draw() -> None:
    player = Player(Buffer(SPACES, 10))
    assert len(player.buffer) == 0
    player.step(0)
    assert len(player.buffer) == 1
    assert_draws_exactly(player.buffer, player.moves[0])


def test_a_full_ring_keeps_the_newest_rows() -> None:
    for steps in [1, 5, 19, 20, 21, 22, 40, 41, 42, 63, 100]:
        player = Player(Buffer(SPACES, 20))
        player.play(steps, (0, 0, 0))
        assert len(player.buffer) == min(steps, 20)
        assert_draws_exactly(player.buffer, player.moves[0][-20:])


def test_draws_match_a_plain_list_of_moves() -> None:
    for seed in range(4):
        for streams in [1, 2, 3]:
            player = Player(Buffer(SPACES, 15 * streams, streams), streams, seed)
            for _ in range(25):
                player.play(3, (0.15, 0.2, 0.1))
                kept = [move for stream in range(streams) for move in player.kept(stream, 15)]
                assert_draws_exactly(player.buffer, kept)


def test_the_smallest_rings_survive_cuts_at_every_step() -> None:
    for capacity in [2, 3, 4]:
        player = Player(Buffer(SPACES, capacity))
        for k in range(30):
            player.step(TRUNCATED if k % 5 else TRUNCATED | LIFE)
            assert_draws_exactly(player.buffer, player.kept(0, capacity))


def test_a_cut_episode_leads_to_its_last_state() -> None:
    player = Player(Buffer(SPACES, 20))
    for flags in (0, TRUNCATED, 0, 0):
        player.step(flags)
    found = drawn(player.buffer)
    assert found[2].after == 3
    assert found[4].after == 5
    assert len(found) == 4


def test_an_ended_episode_is_followed_by_the_first_state_of_the_next() -> None:
    player = Player(Buffer(SPACES, 20))
    for flags in (0, TERMINATED, 0):
        player.step(flags)
    assert drawn(player.buffer)[2].after == 4


def test_an_end_that_is_also_a_cut_keeps_its_last_state() -> None:
    player = Player(Buffer(SPACES, 20))
    for flags in (0, TERMINATED | TRUNCATED, 0):
        player.step(flags)
    assert_draws_exactly(player.buffer, player.moves[0])


def test_a_closing_row_whose_play_was_overwritten_is_never_drawn() -> None:
    player = Player(Buffer(SPACES, 4))
    for flags in (0, TRUNCATED, 0, 0, 0):
        player.step(flags)
    assert len(player.buffer) == 3
    assert_draws_exactly(player.buffer, player.moves[0][2:])


def test_a_lost_life_goes_on_in_the_same_episode() -> None:
    player = Player(Buffer(SPACES, 20))
    for flags in (0, LIFE, 0):
        player.step(flags)
    assert_draws_exactly(player.buffer, player.moves[0])


def test_streams_do_not_write_into_each_other() -> None:
    player = Player(Buffer(SPACES, 12, 3), 3)
    for k in range(40):
        player.step(TRUNCATED if k % 3 == 0 else 0, TERMINATED if k % 4 == 0 else 0, 0)
    kept = [move for stream in range(3) for move in player.kept(stream, 4)]
    assert_draws_exactly(player.buffer, kept)
    assert [open_end(player.buffer, stream) for stream in range(3)] == player.now


def frequencies(buffer: Buffer, number: int) -> dict[int, int]:
    rows, counts = np.unique(buffer.draw(np.random.default_rng(8), number), return_counts=True)
    return {number_of(buffer.state_rows[row]): int(n) for row, n in zip(rows, counts, strict=True)}


def assert_even(counts: dict[int, int], size: int, number: int) -> None:
    mean = number / size
    assert len(counts) == size
    assert max(abs(n - mean) for n in counts.values()) < 5 * mean**0.5


def test_draws_are_uniform() -> None:
    for streams in [1, 3]:
        player = Player(Buffer(SPACES, 20 * streams, streams), streams)
        player.play(57, (0.1, 0, 0.1))
        assert_even(frequencies(player.buffer, 60_000), 20 * streams, 60_000)


def test_draws_are_uniform_where_episodes_are_cut() -> None:
    player = Player(Buffer(SPACES, 40))
    for k in range(24):
        player.step(TRUNCATED if k % 4 == 3 else 0)
    assert_even(frequencies(player.buffer, 60_000), 24, 60_000)


def test_a_cleared_buffer_starts_anew() -> None:
    player = Player(Buffer(SPACES, 10))
    player.play(33, (0.1, 0.3, 0.1))
    player.buffer.clear()
    assert len(player.buffer) == 0
    fresh = Player(player.buffer, seed=4)
    fresh.play(6, (0.1, 0.1, 0.1))
    assert_draws_exactly(player.buffer, fresh.kept(0, 10))


def test_an_export_holds_all_play_and_ends_with_the_open_state() -> None:
    player = Player(Buffer(SPACES, 30))
    for flags in (0, TERMINATED, 0, TRUNCATED, 0, 0):
        player.step(flags)
    rows = player.buffer.export(100)
    assert rows["state"].shape == (8, *SPACES.shape)
    assert rows["flags"].tolist() == [0, TERMINATED, 0, TRUNCATED, LAST, 0, 0, LAST]
    assert split_segments(rows)[0][2:] == player.moves[0][2:4]
    assert split_segments(rows)[1] == player.moves[0][4:]


def test_an_export_takes_the_newest_rows() -> None:
    for most in [2, 3, 7, 12, 13, 14, 100]:
        player = Player(Buffer(SPACES, 12))
        player.play(31, (0, 0, 0.3))
        rows = player.buffer.export(most)
        assert len(rows["action"]) == min(most, 13)
        assert split_segments(rows) == [player.moves[0][-min(most - 1, 12) :]]


def test_an_export_that_would_begin_with_a_closing_row_leaves_it_out() -> None:
    player = Player(Buffer(SPACES, 12))
    for flags in (0, TRUNCATED, 0, 0):
        player.step(flags)
    assert split_segments(player.buffer.export(4)) == [player.moves[0][2:]]


def test_an_export_of_streams_closes_each_of_them() -> None:
    player = Player(Buffer(SPACES, 30, 3), 3)
    player.play(25, (0, 0, 0.2))
    assert split_segments(player.buffer.export(24)) == [moves[-7:] for moves in player.moves]
    assert split_segments(player.buffer.export(1000)) == [moves[-10:] for moves in player.moves]


def test_an_empty_buffer_exports_no_rows_of_the_right_shape() -> None:
    rows = Buffer(SPACES, 10, 2).export(10)
    assert rows["state"].shape == (0, *SPACES.shape)
    assert [len(rows[name]) for name in ("action", "reward", "flags")] == [0, 0, 0]


def test_an_export_is_a_copy() -> None:
    player = Player(Buffer(SPACES, 5))
    player.play(5, (0, 0, 0))
    rows = player.buffer.export(10)
    before = {name: column.copy() for name, column in rows.items()}
    player.play(9, (0, 0, 0))
    assert all(np.array_equal(rows[name], before[name]) for name in rows)


def test_a_lesson_draws_the_same_moves_as_its_donor() -> None:
    for streams in [1, 2]:
        player = Player(Buffer(SPACES, 20 * streams, streams), streams, 3)
        player.play(70, (0.1, 0.15, 0.1))
        player.step(*[0] * streams)
        lesson = Buffer.of_lesson(SPACES, player.buffer.export(1000))
        kept = [move for stream in range(streams) for move in player.kept(stream, 20)]
        assert_draws_exactly(lesson, kept)


def test_a_lesson_of_two_rows_holds_one_move() -> None:
    player = Player(Buffer(SPACES, 5))
    player.step(0)
    lesson = Buffer.of_lesson(SPACES, player.buffer.export(2))
    assert len(lesson) == 1
    assert_draws_exactly(lesson, player.moves[0])


def accepted(rows: Columns) -> Columns:
    data = pack(3, 2, "Krull", rows, {})
    return unpack(data, lesson_offer(len(rows["action"])), SPACES, 1 << 20).rows


# and unpack refuses the lesson; play that ends on a cut can't be shared.
def test_an_export_right_after_a_cut_is_a_proper_lesson() -> None:
    player = Player(Buffer(SPACES, 20))
    for flags in (0, 0, TRUNCATED):
        player.step(flags)
    rows = accepted(player.buffer.export(100))
    assert split_segments(rows) == [player.moves[0]]


def test_an_export_of_streams_after_a_cut_in_one_is_a_proper_lesson() -> None:
    player = Player(Buffer(SPACES, 20, 2), 2)
    player.step(0, 0)
    player.step(TRUNCATED, 0)
    assert split_segments(accepted(player.buffer.export(100))) == player.moves


# is exported: a segment without a move.
def test_an_export_never_holds_a_segment_without_a_move() -> None:
    player = Player(Buffer(SPACES, 20, 2), 2)
    player.step(0, 0)
    player.step(TRUNCATED, 0)
    segments = split_segments(player.buffer.export(4))
    assert all(segments)


def test_a_restored_buffer_draws_the_same_and_goes_on_the_same() -> None:
    for streams in [1, 3]:
        first = Player(Buffer(SPACES, 12 * streams, streams), streams, 6)
        first.play(30, (0.1, 0.2, 0.1))
        state = {name: column.copy() for name, column in first.buffer.state_dict().items()}
        second = Buffer(SPACES, 12 * streams, streams)
        second.load_state_dict(state)
        for _ in range(10):
            left = first.buffer.draw(np.random.default_rng(1), 50)
            assert np.array_equal(left, second.draw(np.random.default_rng(1), 50))
            assert moves_at(first.buffer, left) == moves_at(second, left)
            actions = np.zeros(streams, dtype=np.int64)
            obs = np.stack([observation(k + 1000) for k in range(streams)])
            flags = np.full(streams, TRUNCATED, dtype=np.uint8)
            step = Step(obs, np.ones(streams, dtype=np.float32), flags, obs + 0)
            first.buffer.add(actions, step)
            second.add(actions, step)


def test_a_buffer_restored_before_its_first_step_knows_its_first_state() -> None:
    first = Player(Buffer(SPACES, 10))
    second = Buffer(SPACES, 10)
    second.load_state_dict(
        {name: column.copy() for name, column in first.buffer.state_dict().items()}
    )
    first.buffer = second
    first.step(0)
    assert_draws_exactly(second, first.moves[0])


def test_an_empty_buffer_can_be_saved_and_restored() -> None:
    buffer = Buffer(SPACES, 10)
    buffer.load_state_dict(Buffer(SPACES, 10).state_dict())
    assert len(buffer) == 0


def test_what_closes_play_keeps_nothing_of_an_older_task() -> None:
    """Two runs must export the same bits, one of which began with an empty buffer."""
    used, fresh = Buffer(SPACES, 20), Buffer(SPACES, 20)
    Player(used, seed=1).play(15, (0.1, 0.2, 0.1))
    used.clear()
    for buffer in (used, fresh):
        Player(buffer, seed=2).play(7, (0.1, 0.3, 0.1))
    one, two = used.export(), fresh.export()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_play_that_breaks_off_keeps_what_was_seen_last() -> None:
    buffer = Buffer(SPACES, 20)
    player = Player(buffer)
    player.play(3, (0, 0, 0))
    buffer.start(np.stack([observation(99)]))
    rows = buffer.export()
    assert [number_of(state) for state in rows["state"]] == [1, 2, 3, 4]
    player.step(0)
    rows = buffer.export()
    assert [number_of(state) for state in rows["state"]][4] == 99
    assert rows["flags"].tolist() == [0, 0, 0, LAST, 0, LAST]
