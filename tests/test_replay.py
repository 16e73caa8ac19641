from collections.abc import Sequence
from math import isclose

import numpy as np
import pytest
from helpers import SPACES, Move, Player, learning, number_of, observation

from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Array, Batch, Columns, Spaces, Step
from canal_mpi.membuf.buffer import Buffer, observations
from canal_mpi.membuf.replay import Replay
from canal_mpi.settings import LearnConfig

GAMMA = 0.9
Target = tuple[float, float, int]  # return, discount, next state


def slow_target(moves: Sequence[Move], at: int, recipe: LearnConfig) -> Target:
    """Return, discount and next state of the move at a place, by walking."""
    total, discount = 0.0, 1.0
    for move in moves[at : at + recipe.n_step]:
        sign = (move.reward > 0) - (move.reward < 0)
        worth = {"clip": sign, "none": move.reward}
        total += discount * worth[recipe.reward]
        discount *= recipe.gamma
        if move.flags & TERMINATED or (move.flags & LIFE and recipe.terminal_on_life_loss):
            return total, 0.0, move.after
        if move.flags & TRUNCATED:
            return total, discount, move.after
    return total, discount, moves[min(at + recipe.n_step, len(moves)) - 1].after


def targets(
    streams: Sequence[Sequence[Move]], recipe: LearnConfig
) -> dict[int, tuple[Move, Target]]:
    return {
        move.state: (move, slow_target(moves, at, recipe))
        for moves in streams
        for at, move in enumerate(moves)
    }


def assert_agrees(batch: Batch, expected: dict[int, tuple[Move, Target]]) -> set[int]:
    seen = set()
    for k in range(len(batch.actions)):
        move, target = expected[number_of(batch.states[k])]
        total, discount, after = target
        assert batch.actions[k] == move.action
        assert isclose(batch.returns[k], total, rel_tol=1e-5, abs_tol=1e-6)
        assert isclose(batch.discounts[k], discount, rel_tol=1e-5)
        if discount:
            assert number_of(batch.next_states[k]) == after
        seen.add(move.state)
    return seen


def played(seed: int, streams: int = 1, steps: int = 60) -> Player:
    player = Player(Buffer(SPACES, 25 * streams, streams), streams, seed)
    player.play(steps, (0.08, 0.1, 0.1))
    player.step(*[0] * streams)
    return player


def lesson(seed: int, steps: int = 20) -> tuple[Columns, list[Move]]:
    """The rows of a lesson whose states no other seed has, and its moves."""
    player = Player(Buffer(SPACES, 100), 1, seed)
    player.states = 1000 * seed
    player.moves, player.now = [[]], [player._new_state()]
    player.buffer.clear()
    player.buffer.start(np.stack([observation(player.now[0])]))
    player.play(steps, (0.1, 0.1, 0.1))
    player.step(0)
    return player.buffer.export(1000), player.moves[0]


@pytest.mark.parametrize("reward", ["clip", "none"])
@pytest.mark.parametrize("terminal_on_life_loss", [True, False])
@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize("streams", [1, 2])
def test_targets_match_a_slow_walk_over_the_moves(
    streams: int, n_step: int, terminal_on_life_loss: bool, reward: str
) -> None:
    recipe = learning(64, GAMMA, n_step, reward, terminal_on_life_loss)
    replay = Replay(SPACES, 25 * streams, recipe, streams)
    player = Player(replay.own, streams, n_step)
    rng = np.random.default_rng(2)
    for _ in range(12):
        player.play(8, (0.08, 0.12, 0.12))
        kept = [player.kept(stream, 25) for stream in range(streams)]
        expected = targets(kept, recipe)
        seen: set[int] = set()
        for _ in range(12):
            seen |= assert_agrees(replay.sample(rng), expected)
        assert seen == set(expected)


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_lessons_give_the_same_targets_as_the_play_they_hold(n_step: int) -> None:
    recipe = learning(64, GAMMA, n_step)
    player = played(5, streams=2)
    replay = Replay(SPACES, 10, recipe)
    replay.begin([player.buffer.export(1000)])
    expected = targets([player.kept(stream, 25) for stream in range(2)], recipe)
    rng = np.random.default_rng(3)
    seen = set().union(*(assert_agrees(replay.sample(rng), expected) for _ in range(20)))
    assert seen == set(expected)


def single(
    flags: Sequence[int], recipe: LearnConfig
) -> tuple[Player, dict[int, tuple[float, int]]]:
    replay = Replay(SPACES, 50, recipe)
    player = Player(replay.own)
    for flag in flags:
        player.step(flag)
    batch = replay.sample(np.random.default_rng(0))
    found = {
        number_of(state): (float(batch.discounts[k]), number_of(batch.next_states[k]))
        for k, state in enumerate(batch.states)
    }
    return player, found


def test_a_cut_episode_bootstraps_from_its_last_state() -> None:
    _, found = single([0, TRUNCATED, 0, 0], learning(200, GAMMA, 3))
    assert found[2] == pytest.approx((GAMMA, 3))
    assert found[1] == pytest.approx((GAMMA**2, 3))


def test_an_ended_episode_does_not_bootstrap() -> None:
    _, found = single([0, TERMINATED, 0, 0], learning(200, GAMMA, 3))
    assert found[1][0] == found[2][0] == 0


def test_an_end_that_is_also_a_cut_does_not_bootstrap() -> None:
    _, found = single([0, TERMINATED | TRUNCATED, 0], learning(200, GAMMA))
    assert found[2][0] == 0


@pytest.mark.parametrize(("terminal_on_life_loss", "discount"), [(True, 0.0), (False, GAMMA)])
def test_a_setting_decides_whether_a_lost_life_stops_bootstrapping(
    terminal_on_life_loss: bool, discount: float
) -> None:
    _, found = single([0, LIFE, 0], learning(200, GAMMA, lives=terminal_on_life_loss))
    assert found[2] == pytest.approx((discount, 3))


def test_the_newest_rows_sum_what_there_is_and_bootstrap_from_the_open_state() -> None:
    _, found = single([0, 0, 0], learning(200, GAMMA, 5))
    assert found == {
        1: pytest.approx((GAMMA**3, 4)),
        2: pytest.approx((GAMMA**2, 4)),
        3: pytest.approx((GAMMA, 4)),
    }


def test_sums_of_rewards_never_cross_the_end_of_a_segment() -> None:
    recipe = learning(100, 1.0, 5, reward="none")
    (left, first), (right, second) = lesson(1, 4), lesson(2, 4)
    both = {name: np.concatenate([left[name], right[name]]) for name in left}
    replay = Replay(SPACES, 10, recipe)
    replay.begin([both])
    expected = targets([first, second], recipe)
    assert assert_agrees(replay.sample(np.random.default_rng(0)), expected) == set(expected)


def test_a_clipped_reward_is_its_sign() -> None:
    replay = Replay(SPACES, 50, learning(300, GAMMA))
    player = Player(replay.own)
    player.play(40)
    assert set(replay.sample(np.random.default_rng(0)).returns.tolist()) == {-1.0, 0.0, 1.0}
    assert {abs(move.reward) for move in player.moves[0]} == {0.0, 1.0, 2.0, 3.0}


def test_the_arrays_of_a_batch_have_the_types_that_learners_take() -> None:
    replay = Replay(SPACES, 50, learning(7, GAMMA, 3))
    Player(replay.own).play(20)
    batch = replay.sample(np.random.default_rng(0))
    assert batch.states.shape == batch.next_states.shape == (7, 4)
    assert batch.states.dtype == batch.next_states.dtype == np.dtype(SPACES.dtype)
    assert batch.actions.dtype == np.int64
    assert batch.returns.dtype == batch.discounts.dtype == np.float32


def test_the_next_call_uses_the_same_arrays_again() -> None:
    replay = Replay(SPACES, 50, learning(7, GAMMA))
    Player(replay.own).play(20)
    rng = np.random.default_rng(0)
    assert replay.sample(rng) is replay.sample(rng)


def test_a_sample_leaves_the_stored_rewards_as_they_are() -> None:
    replay = Replay(SPACES, 50, learning(64, GAMMA, 5, reward="none"))
    Player(replay.own).play(30)
    before = replay.own.reward.copy()
    for seed in range(5):
        replay.sample(np.random.default_rng(seed))
    assert np.array_equal(replay.own.reward, before)


def test_the_replay_is_ready_with_a_batch_of_rows_of_any_origin() -> None:
    replay = Replay(SPACES, 50, learning(10, GAMMA))
    player = Player(replay.own)
    assert not replay.ready
    player.play(9, (0, 0, 0))
    assert not replay.ready
    player.step(0)
    assert replay.ready
    rows, _ = lesson(1, 20)
    replay.begin([rows])
    assert replay.ready
    assert len(replay.own) == 0


def test_beginning_a_task_forgets_own_rows_and_former_lessons() -> None:
    replay = Replay(SPACES, 50, learning(10, GAMMA))
    Player(replay.own).play(30)
    rows, _ = lesson(1)
    replay.begin([rows])
    assert len(replay.own) == 0
    assert len(replay.lessons) == 1
    replay.begin([])
    assert not replay.lessons
    assert not replay.ready


def test_memory_counts_lessons() -> None:
    replay = Replay(SPACES, 50, learning(10, GAMMA))
    alone = replay.nbytes
    rows, _ = lesson(1)
    replay.begin([rows])
    assert alone == replay.own.nbytes == 51 * SPACES.row_bytes
    assert replay.nbytes == alone + len(rows["action"]) * SPACES.row_bytes


def test_memory_counts_lessons_of_other_tasks_too() -> None:
    replay = Replay(SPACES, 50, learning(10, GAMMA))
    alone = replay.nbytes
    rows, _ = lesson(1)
    replay.begin([], {"Alien": rows})
    assert replay.nbytes == alone + len(rows["action"]) * SPACES.row_bytes


def test_own_rows_and_joined_rows_are_drawn_by_their_size() -> None:
    (small, few), (large, many) = lesson(1, 15), lesson(2, 60)
    replay = Replay(SPACES, 50, learning(500, GAMMA))
    player = Player(replay.own)
    player.play(30, (0, 0, 0))
    replay.join(small)
    replay.join(large)
    expected = targets([few, many, player.moves[0]], replay.learn)
    rng, counts = np.random.default_rng(1), np.zeros(3)
    for _ in range(40):
        batch = replay.sample(rng)
        assert_agrees(batch, expected)
        counts += np.bincount([number_of(state) // 1000 for state in batch.states], minlength=3)
    rows = np.array([30, len(small["action"]) - 1, len(large["action"]) - 1])
    assert counts.sum() == 20_000
    assert np.allclose(counts / counts.sum(), rows / rows.sum(), atol=0.015)


@pytest.mark.parametrize(("foreign", "own"), [(1.0, 0), (0.5, 100), (0.25, 150), (0.0, 200)])
def test_lessons_get_their_share_of_a_batch_divided_by_their_size(foreign: float, own: int) -> None:
    (small, few), (large, many) = lesson(1, 15), lesson(2, 60)
    replay = Replay(SPACES, 50, learning(200, GAMMA))
    replay.begin([small, large])
    player = Player(replay.own)
    player.play(30, (0, 0, 0))
    replay.lesson_fraction = foreign
    expected = targets([few, many, player.moves[0]], replay.learn)
    rng, counts = np.random.default_rng(1), np.zeros(3)
    for _ in range(60):
        batch = replay.sample(rng)
        assert_agrees(batch, expected)
        drawn = np.bincount([number_of(state) // 1000 for state in batch.states], minlength=3)
        assert drawn[0] == own
        counts += drawn
    if own < 200:
        rows = np.array([len(small["action"]) - 1, len(large["action"]) - 1])
        assert np.allclose(counts[1:] / counts[1:].sum(), rows / rows.sum(), atol=0.02)


def test_without_own_rows_the_whole_batch_comes_from_lessons() -> None:
    rows, moves = lesson(1)
    replay = Replay(SPACES, 50, learning(200, GAMMA))
    replay.begin([rows])
    replay.lesson_fraction = 0.25
    assert_agrees(replay.sample(np.random.default_rng(1)), targets([moves], replay.learn))


def test_lessons_of_other_tasks_are_drawn_apart_and_under_their_names() -> None:
    replay = Replay(SPACES, 50, learning(50, GAMMA))
    (mine, my_moves), (alien, alien_moves), (krull, krull_moves) = (lesson(k) for k in (1, 2, 3))
    replay.begin([mine], {"Krull": krull, "Alien": alien})
    expected = {"Alien": alien_moves, "Krull": krull_moves}
    rng, names = np.random.default_rng(1), set()
    for _ in range(20):
        batch = replay.sample_other(rng)
        assert_agrees(batch, targets([expected[batch.task]], replay.learn))
        names.add(batch.task)
        assert_agrees(replay.sample(rng), targets([my_moves], replay.learn))
    assert names == {"Alien", "Krull"}
    replay.begin([mine])
    assert not replay.others


def test_samples_are_uniform() -> None:
    replay = Replay(SPACES, 40, learning(500, GAMMA, 3))
    Player(replay.own).play(100, (0.1, 0, 0.1))
    rng = np.random.default_rng(4)
    counts: dict[int, int] = {}
    for _ in range(80):
        for state in replay.sample(rng).states:
            counts[number_of(state)] = counts.get(number_of(state), 0) + 1
    assert len(counts) == 40
    assert all(abs(count - 1000) < 160 for count in counts.values())


def test_the_same_stream_draws_the_same_batches() -> None:
    replay = Replay(SPACES, 40, learning(20, GAMMA, 3))
    Player(replay.own).play(100)
    first = replay.sample(np.random.default_rng(4)).states.copy()
    assert np.array_equal(first, replay.sample(np.random.default_rng(4)).states)
    assert not np.array_equal(first, replay.sample(np.random.default_rng(5)).states)


def assert_same_draws(left: Replay, right: Replay) -> None:
    one, two = np.random.default_rng(9), np.random.default_rng(9)
    for _ in range(5):
        mine, theirs = left.sample(one), right.sample(two)
        assert all(np.array_equal(a, b) for a, b in zip(mine[:5], theirs[:5], strict=True))
        assert mine[5:] == theirs[5:]


def restored(replay: Replay, capacity: int) -> Replay:
    """As a checkpoint does it: the lessons are taken in anew, own rows come back."""
    again = Replay(SPACES, capacity, replay.learn)
    others = {task: rows.export() for task, rows in replay.others.items()}
    again.begin([rows.export() for rows in replay.lessons], others)
    again.own.load_state_dict(
        {name: column.copy() for name, column in replay.own.state_dict().items()}
    )
    again.lesson_fraction = replay.lesson_fraction
    return again


@pytest.mark.parametrize("lessons", [0, 1, 3])
def test_a_restored_replay_draws_the_same_batches(lessons: int) -> None:
    replay = Replay(SPACES, 30, learning(50, GAMMA, 3))
    replay.begin([lesson(seed, 10 * seed)[0] for seed in range(1, lessons + 1)])
    Player(replay.own, seed=8).play(77)
    again = restored(replay, 30)
    assert [len(buffer) for buffer in again.lessons] == [len(buffer) for buffer in replay.lessons]
    assert_same_draws(replay, again)


def test_a_restored_replay_has_its_share_and_its_other_tasks() -> None:
    replay = Replay(SPACES, 30, learning(50, GAMMA, 3))
    others = {"ns/Krull-v0": lesson(2)[0], "Alien": lesson(3)[0]}
    replay.begin([lesson(1)[0]], others)
    Player(replay.own, seed=8).play(77)
    replay.lesson_fraction = 0.3
    again = restored(replay, 30)
    assert again.lesson_fraction == 0.3
    assert again.others.keys() == others.keys()
    assert_same_draws(replay, again)
    one, two = np.random.default_rng(9), np.random.default_rng(9)
    for _ in range(5):
        mine, theirs = replay.sample_other(one), again.sample_other(two)
        assert mine.task == theirs.task
        assert all(np.array_equal(a, b) for a, b in zip(mine[:5], theirs[:5], strict=True))


def test_a_replay_of_lessons_alone_can_be_restored() -> None:
    replay = Replay(SPACES, 30, learning(50, GAMMA))
    replay.begin([lesson(1)[0]])
    assert_same_draws(replay, restored(replay, 30))


def test_more_than_ten_lessons_come_back_in_their_order() -> None:
    replay = Replay(SPACES, 30, learning(50, GAMMA))
    replay.begin([lesson(seed, 5 + seed)[0] for seed in range(1, 13)])
    assert_same_draws(replay, restored(replay, 30))


def test_frames_stored_once_are_drawn_as_the_stacks_that_the_agent_saw() -> None:
    spaces, rng = Spaces((6,), "<f4", 2, stack=3), np.random.default_rng(4)
    replay = Replay(spaces, 80, learning(16, 0.9, n_step=2), streams=2)
    seen: dict[float, list[float]] = {}  # by the number of the newest frame: the whole stack
    stacks = [np.zeros(3), np.zeros(3)]

    def show(stream: int, number: float, start: bool) -> Array:
        stack = np.full(3, number) if start else np.append(stacks[stream][1:], number)
        stacks[stream], seen[number] = stack, stack.tolist()
        return np.repeat(stack, 2)

    replay.own.start(np.stack([show(stream, stream + 0.5, True) for stream in range(2)]))
    for k in range(1, 300):
        flags = rng.choice([0, 0, 0, 0, TERMINATED, TRUNCATED, LIFE], size=2).astype(np.uint8)
        obs = np.stack([show(s, 10 * k + s, False) for s in range(2)])
        start = obs.copy()
        for s in np.flatnonzero(flags & (TERMINATED | TRUNCATED)):
            start[s] = show(int(s), 10 * k + s + 0.5, True)
        replay.own.add(np.zeros(2, int), Step(obs, np.zeros(2), flags, start))
        if k < 20:
            continue
        batch = replay.sample(rng)
        streams = replay.own.export_streams()
        edge = {float(frame[0]) for rows in streams for frame in rows["state"][:2]}  # no past left
        drawn = [batch.states, batch.next_states[batch.discounts > 0]]
        for states in (*drawn, *(observations(rows, spaces) for rows in streams)):
            for stack in states[:, ::2].tolist():
                assert stack == seen[stack[-1]] or stack[-1] in edge
