"""Weights blended and gradients averaged by real learners, over links of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from small import RIGHT, WALK, Donors, random_batch, small_job
from thread_links import ThreadLink

from canal_mpi.agent.sync import Group, Sync
from canal_mpi.interfaces import Array, Columns, Link, MessageKind
from canal_mpi.learn.dqn import DQN
from canal_mpi.learn.fast_mlp import array_of
from canal_mpi.membuf.wire import encode
from canal_mpi.topology.exchange import IN_ROUNDS, ExchangeConfig
from canal_mpi.topology.graphs import Edges, full

LINE: Edges = {(0, 1), (1, 0), (1, 2), (2, 1)}


class Side:
    """An agent's learner, unlike all others', and its sync."""

    def __init__(self, number: int, link: Link, peers: Sequence[int], **settings: Any) -> None:
        self.number, self.link = number, link
        job = small_job(**settings)
        self.learner = DQN(WALK, job, lambda name: 100 * number + len(name))
        self.learner.set_task(RIGHT)
        self.sync = Sync(job.sync, number, link)
        link.begin(1)
        self.sync.begin(peers)

    @property
    def weights(self) -> Array:
        return np.concatenate(list(self.learner.get_weights().values()))

    def learn(self, updates: int, first: int = 0) -> None:
        """Updates on batches that no other agent has."""
        for k in range(first, first + updates):
            self.learner.update(random_batch(1000 * self.number + k), self.sync.average_grad)


def sides(
    count: int, joined: Edges | None = None, terms: ExchangeConfig = IN_ROUNDS, **settings: Any
) -> list[Side]:
    joined = full(count) if joined is None else joined
    links = ThreadLink.mesh(count, joined, terms)
    neighbours = [sorted(b for a, b in joined if a == k) for k in range(count)]
    return [Side(k, links[k], neighbours[k], **settings) for k in range(count)]


def run_on_all(made: Sequence[Side], work: Callable[[Side], object]) -> None:
    """The same work in a thread for each side."""
    with ThreadPoolExecutor(len(made)) as pool:
        for future in [pool.submit(work, side) for side in made]:
            future.result(timeout=60)


def rest(learner: DQN) -> Columns:
    """Everything of a learner but its weights."""
    return {n: c for n, c in learner.state_dict().items() if not n.endswith("/params")}


def same_bits(one: Columns, other: Columns) -> bool:
    return one.keys() == other.keys() and all(
        column.tobytes() == other[name].tobytes() for name, column in one.items()
    )


# ── groups ─────────────────────────────────────────────────────────────────────────────────────


def test_who_says_goodbye_is_left_out_from_then_on() -> None:
    links = ThreadLink.mesh(3, full(3))
    groups = [Group(links[k], MessageKind.SWAPS, [p for p in range(3) if p != k]) for k in range(3)]
    says = [[b"a"], [b"b", b"bb", b"bbb"], [b"c", b"cc", b"ccc"]]
    heard: list[list[list[tuple[int, bytes]]]] = [[], [], []]

    def live(k: int) -> None:
        heard[k] = [groups[k].trade(words) for words in says[k]]
        if k == 0:
            groups[k].leave()

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(live, k) for k in range(3)]:
            future.result(timeout=30)
    assert heard[0] == [[(1, b"b"), (2, b"c")]]
    assert heard[1] == [[(0, b"a"), (2, b"c")], [(2, b"cc")], [(2, b"ccc")]]
    assert heard[2] == [[(0, b"a"), (1, b"b")], [(1, b"bb")], [(1, b"bbb")]]
    assert [group.peers for group in groups] == [[], [2], [1]]


def test_groups_of_different_kinds_do_not_mix() -> None:
    left, right = ThreadLink.mesh(2, full(2))
    kinds = (MessageKind.SWAPS, MessageKind.WEIGHTS, MessageKind.GRADIENTS)

    def live(link: Link, order: Sequence[MessageKind]) -> dict[int, bytes]:
        return {k: Group(link, k, [1 - link.agent]).trade(b"%d" % k)[0][1] for k in order}

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(live, left, kinds)
        second = pool.submit(live, right, kinds)
        assert first.result(timeout=30) == second.result(timeout=30)
        assert first.result() == {k: b"%d" % k for k in kinds}


# ── blending weights ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("joined", [full(3), LINE], ids=["full", "line"])
def test_a_blend_moves_the_weights_towards_the_mean_of_the_neighbours(
    alpha: float, joined: Edges
) -> None:
    made = sides(3, joined, sync__mode="weights", sync__interval=1, sync__tau=alpha)
    now = [side.weights.astype(np.float64) for side in made]
    for done in (1, 2, 3):
        expected = []
        for side in made:
            neighbours = [now[b] for a, b in sorted(joined) if a == side.number]
            mean = sum(neighbours) / len(neighbours)
            expected.append(now[side.number] + alpha * (mean - now[side.number]))
        run_on_all(made, lambda side, done=done: side.sync.blend(side.learner, done))  # type: ignore[misc]
        for side, wanted in zip(made, expected, strict=True):
            np.testing.assert_allclose(side.weights, wanted, rtol=1e-5, atol=1e-7)
        now = expected


def test_a_blend_leaves_the_target_and_the_optimiser_alone() -> None:
    made = sides(2, sync__mode="weights", sync__interval=1)
    for side in made:
        side.learn(3)
    before = [(side.weights, rest(side.learner)) for side in made]
    run_on_all(made, lambda side: side.sync.blend(side.learner, 1))
    for side, (weights, others) in zip(made, before, strict=True):
        assert not np.array_equal(side.weights, weights)
        assert same_bits(rest(side.learner), others)
        trunk = side.learner.blocks["trunk"]
        assert not np.array_equal(trunk.params, trunk.target_params)


@pytest.mark.parametrize(("every", "moments"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])])
def test_blends_come_every_so_many_own_steps(every: int, moments: list[int]) -> None:
    made = sides(2, sync__mode="weights", sync__interval=every, sync__tau=0.25)
    moved: list[list[int]] = [[], []]

    def live(side: Side) -> None:
        for done in range(1, 7):
            before = side.weights
            side.sync.blend(side.learner, done)
            if not np.array_equal(side.weights, before):
                moved[side.number].append(done)

    run_on_all(made, live)
    assert moved == [moments, moments]


def test_only_the_network_of_the_current_task_is_blended() -> None:
    made = sides(2, sync__mode="weights", sync__interval=1)
    for side in made:
        side.learner.set_task("SmallLeft-v0")
        side.learner.set_task(RIGHT)
    before = [array_of(side.learner.blocks["head/SmallLeft-v0"].params) for side in made]
    run_on_all(made, lambda side: side.sync.blend(side.learner, 1))
    for side, head in zip(made, before, strict=True):
        np.testing.assert_array_equal(side.learner.blocks["head/SmallLeft-v0"].params, head)


def test_sixteen_bits_on_the_wire_round_the_others_weights_only() -> None:
    made = sides(2, sync__mode="weights", sync__interval=1, sync__tau=0.5, sync__dtype="float16")
    before = [side.weights for side in made]
    run_on_all(made, lambda side: side.sync.blend(side.learner, 1))
    for side in made:
        mine, theirs = before[side.number], before[1 - side.number]
        rounded = theirs.astype(np.float16).astype(np.float32)
        assert not np.array_equal(rounded, theirs)
        np.testing.assert_allclose(side.weights, mine + 0.5 * (rounded - mine), atol=1e-7)


def test_who_leaves_early_blocks_nobody_and_is_blended_with_no_longer() -> None:
    made = sides(3, sync__mode="weights", sync__interval=1, sync__tau=0.5)
    start = [side.weights.astype(np.float64) for side in made]

    def live(side: Side) -> None:
        for done in range(1, 1 if side.number == 0 else 4):
            side.sync.blend(side.learner, done)
        side.sync.leave()

    run_on_all(made, live)
    np.testing.assert_array_equal(made[0].weights, start[0].astype(np.float32))
    middle = (start[1] + start[2]) / 2  # half of the way to the only other one: met at once
    for side in made[1:]:
        np.testing.assert_allclose(side.weights, middle, atol=1e-6)


def test_other_modes_do_not_blend() -> None:
    for mode in ["none", "gradients"]:
        link = Donors()
        side = Side(0, link, [1], sync__mode=mode, sync__interval=1)
        before = side.weights
        side.sync.blend(side.learner, 1)
        assert link.traded == []
        np.testing.assert_array_equal(side.weights, before)


# ── the free clock ─────────────────────────────────────────────────────────────────────────────


def test_with_the_free_clock_the_newest_weights_count_and_nobody_waits() -> None:
    left, right = sides(
        2, terms=ExchangeConfig(free=True), sync__mode="weights", sync__interval=1, sync__tau=0.5
    )
    right.sync.blend(right.learner, 1)
    for done in (2, 3):
        right.learn(5)
        right.sync.blend(right.learner, done)
    mine, newest = left.weights.astype(np.float64), right.weights
    left.sync.blend(left.learner, 1)
    np.testing.assert_allclose(left.weights, (mine + newest) / 2, atol=1e-7)
    before = left.weights
    left.sync.blend(left.learner, 2)  # nothing new
    np.testing.assert_array_equal(left.weights, before)
    assert (left.link.waited, right.link.waited) == (0.0, 0.0)


def test_with_the_free_clock_weights_of_another_round_do_not_count() -> None:
    left, right = sides(2, terms=ExchangeConfig(free=True), sync__mode="weights", sync__interval=1)
    right.sync.blend(right.learner, 1)
    left.link.begin(2)
    left.sync.begin([1])
    before = left.weights
    left.sync.blend(left.learner, 1)
    np.testing.assert_array_equal(left.weights, before)


def test_with_the_free_clock_who_leaves_is_not_waited_for() -> None:
    left, right = sides(2, terms=ExchangeConfig(free=True), sync__mode="weights", sync__interval=1)
    right.sync.leave()
    before = left.weights
    left.sync.blend(left.learner, 1)
    left.sync.leave()
    np.testing.assert_array_equal(left.weights, before)


# ── averaging gradients ────────────────────────────────────────────────────────────────────────


def gradient(learner: DQN, seed: int, **settings: Any) -> Array:
    """The gradient of a batch, without learning from it."""
    probe, found = DQN(WALK, small_job(**settings), lambda name: 0), list[Array]()
    probe.set_task(RIGHT)
    probe.load_state_dict(learner.state_dict())

    def catch(shared: Array) -> Array:
        found.append(shared.copy())
        return shared

    probe.update(random_batch(seed), catch)
    return found[0]


def one_for_all(agents: Sequence[int], updates: int, wire: str = "<f4", **settings: Any) -> DQN:
    """The lowest agent's learner after updates with the mean of all agents' gradients."""
    alone = Side(agents[0], Donors(), [], **settings).learner
    for k in range(updates):
        slopes = [gradient(alone, 1000 * a + k, **settings).astype(wire) for a in agents]
        mean = np.mean([slope.astype("<f4") for slope in slopes], axis=0).astype("<f4")
        alone.update(random_batch(1000 * agents[0] + k), partial(_instead, mean))
    return alone


def _instead(mean: Array, own: Array) -> Array:
    return mean


def averaged(made: Sequence[Side], updates: int) -> None:
    def live(side: Side) -> None:
        side.sync.start(side.learner)
        side.learn(updates)
        side.sync.leave()

    run_on_all(made, live)


def test_averaged_gradients_keep_all_learners_alike_to_the_bit() -> None:
    for size, wire, clip in [(2, "float32", 0.05), (3, "float32", 0.0), (3, "float16", 0.0)]:
        settings: dict[str, Any] = {"sync__mode": "gradients", "learn__max_grad_norm": clip}
        made = sides(size, sync__dtype=wire, **settings)
        assert len({side.weights.tobytes() for side in made}) == size
        averaged(made, 12)  # the target follows after 10
        states = [side.learner.state_dict() for side in made]
        assert all(same_bits(states[0], state) for state in states[1:])
        kind = "<f2" if wire == "float16" else "<f4"
        wanted = one_for_all(range(size), 12, kind, **settings)
        assert same_bits(states[0], wanted.state_dict())


def test_sixteen_bits_give_other_weights_than_thirty_two() -> None:
    found = {}
    for wire in ("float32", "float16"):
        made = sides(2, sync__mode="gradients", sync__dtype=wire)
        averaged(made, 5)
        found[wire] = made[0].weights
    assert not np.array_equal(found["float32"], found["float16"])
    np.testing.assert_allclose(found["float32"], found["float16"], atol=0.02)


def test_play_begins_with_everything_of_the_lowest_agents_learner() -> None:
    made = sides(3, sync__mode="gradients")
    for side in made:
        side.learn(side.number + 3)
    first = made[0].learner.task_state_dict()
    run_on_all(made, lambda side: side.sync.start(side.learner))
    for side in made:
        assert same_bits(side.learner.task_state_dict(), first)
        assert side.sync.average_grad is not None


def test_without_the_lowest_agent_the_next_one_is_followed() -> None:
    made = sides(3, sync__mode="gradients")
    second = made[1].learner.task_state_dict()

    def live(side: Side) -> None:
        if side.number:
            side.sync.start(side.learner)
        else:
            side.sync.leave()

    run_on_all(made, live)
    assert same_bits(made[1].learner.task_state_dict(), second)
    assert same_bits(made[2].learner.task_state_dict(), second)
    assert not same_bits(made[0].learner.task_state_dict(), second)


def test_who_leaves_early_blocks_nobody_and_the_others_stay_alike() -> None:
    made = sides(3, sync__mode="gradients")

    def live(side: Side) -> None:
        side.sync.start(side.learner)
        side.learn(3 if side.number == 1 else 10)
        side.sync.leave()

    run_on_all(made, live)
    assert same_bits(made[0].learner.state_dict(), made[2].learner.state_dict())
    assert not np.array_equal(made[0].weights, made[1].weights)
    assert all(side.sync.average_grad is None for side in made)


def test_the_last_one_there_goes_on_alone() -> None:
    made = sides(2, sync__mode="gradients")

    def live(side: Side) -> None:
        side.sync.start(side.learner)
        if side.number:
            side.sync.leave()
            return
        side.learn(4)

    alone = Side(0, Donors(), [])
    alone.learn(4)
    run_on_all(made, live)
    assert same_bits(made[0].learner.state_dict(), alone.learner.state_dict())


def test_an_update_averages_the_whole_gradient_once() -> None:
    side, asked = Side(0, Donors(), [1], sync__mode="gradients"), list[int]()

    def average(own: Array) -> Array:
        asked.append(len(own))
        return own

    side.learner.update(random_batch(0))
    assert asked == []
    side.learner.update(random_batch(0), average)
    assert asked == [len(side.weights)]


def test_other_modes_do_not_average() -> None:
    for mode in ["none", "weights"]:
        link = Donors()
        side = Side(0, link, [1], sync__mode=mode)
        side.sync.start(side.learner)
        assert side.sync.average_grad is None
        assert link.traded == []


def test_an_agent_without_peers_trades_nothing() -> None:
    for mode in ("none", "weights", "gradients"):
        link = Donors()
        side = Side(0, link, [], sync__mode=mode, sync__interval=1)
        side.sync.start(side.learner)
        side.learn(2)
        side.sync.blend(side.learner, 1)
        side.sync.leave()
        assert link.traded == []


# ── bad neighbours ─────────────────────────────────────────────────────────────────────────────


def spoilt(columns: Columns, name: str, kind: str) -> bytes:
    """A message of these columns with one of them as it should not be."""
    column = columns[name]
    middle = np.arange(len(column)) == len(column) // 2
    changed = {
        "nan": np.where(middle, np.float32(np.nan), column),
        "inf": np.where(middle, np.float32(np.inf), column),
        "short": column[:-1],
        "long": np.append(column, column[:1]),
        "flat": column.reshape(1, -1),
        "scalar": column[0].reshape(()),
        "empty": column[:0],
        "double": column.astype("<f8"),
        "half": column.astype("<f2"),
        "whole": column.astype("<i4"),
        "text": np.full(column.shape, b"x", dtype="S4"),
    }
    data = encode(columns | {name: changed[kind]}) if kind in changed else encode(columns)
    odd = {
        "cut": data[:-1],
        "junk": b"junk",
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "missing": encode({n: c for n, c in columns.items() if n != name}),
        "more": encode(columns | {"more": column}),
        "nothing": encode({}),
    }
    return odd.get(kind, data)


FORMS = ["nan", "inf", "short", "long", "flat", "scalar", "empty", "double", "half", "whole"]
BROKEN = [*FORMS, "text", "cut", "junk", "flipped", "missing", "more", "nothing"]


def blended_with(answers: Sequence[bytes]) -> Side:
    side = Side(0, Donors(answers=answers), [1, 2], sync__mode="weights", sync__interval=1)
    side.sync.blend(side.learner, 1)
    return side


def test_bad_weights_of_a_neighbour_do_not_enter_the_blend() -> None:
    for kind in BROKEN:
        theirs = [Side(k, Donors(), []).learner.get_weights() for k in (1, 2)]
        good, bad = encode(theirs[0]), spoilt(theirs[1], "head", kind)
        fresh, both = Side(0, Donors(), []).weights, blended_with([good, encode(theirs[1])])
        found = blended_with([good, bad])
        other = np.concatenate([theirs[0]["trunk"], theirs[0]["head"]])
        np.testing.assert_allclose(found.weights, (fresh + other) / 2, atol=1e-6)
        assert not np.allclose(both.weights, found.weights)
        np.testing.assert_array_equal(blended_with([bad, bad]).weights, fresh)
        assert found.sync.group.peers == [1, 2]  # it may do better next time


def test_a_bad_gradient_of_a_neighbour_does_not_enter_the_mean() -> None:
    for kind in BROKEN:
        twin = encode(Side(0, Donors(), []).learner.task_state_dict())
        slope = {"gradient": np.full(len(Side(0, Donors(), []).weights), 9.0, dtype="<f4")}
        link = Donors(answers=[twin, spoilt(slope, "gradient", kind)])
        side, alone = Side(0, link, [1], sync__mode="gradients"), Side(0, Donors(), [])
        side.sync.start(side.learner)
        for made in (side, alone):
            made.learn(1)
        assert len(link.traded) == 2
        assert same_bits(side.learner.state_dict(), alone.learner.state_dict())


TWINS = ["short", "long", "flat", "scalar", "empty", "cut", "junk", "flipped", "missing", "nothing"]


def test_a_bad_learner_of_the_lowest_agent_is_not_taken_over() -> None:
    for kind in TWINS:
        other = Side(0, Donors(), [])
        other.learn(3)
        link = Donors(answers=[spoilt(other.learner.task_state_dict(), "trunk/params", kind)])
        side, before = Side(1, link, [0], sync__mode="gradients"), Side(1, Donors(), [])
        side.sync.start(side.learner)
        assert same_bits(side.learner.task_state_dict(), before.learner.task_state_dict())
