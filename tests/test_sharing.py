"""Choosing, opening and swapping through `Sharing`, with fake and with threaded links."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small import (
    LEFT,
    RIGHT,
    WALK,
    Donors,
    Sink,
    moves,
    parcel,
    play_into,
    played,
    small_dqn,
    small_job,
)
from thread_links import ThreadLink

from canal_mpi.agent.lessons import Sharing
from canal_mpi.agent.recorder import Recorder
from canal_mpi.errors import UsageError, lookup
from canal_mpi.interfaces import TERMINATED, TRUNCATED, Array, FetchResult, Link
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.selection import POLICIES
from canal_mpi.rank.build import embedder
from canal_mpi.topology.graphs import full


class _Side:
    """One agent's side of the exchange, with a replay to play into."""

    def __init__(
        self, link: Link, number: int = 0, peers: Sequence[int] = (), **settings: Any
    ) -> None:
        job = small_job(**settings)
        self.sink, self.played = Sink(), 0
        self.learner = small_dqn(job)
        policy = lookup("policy", job.share.policy, POLICIES)
        record = Recorder(self.sink, lambda progress: None, number, WALK.row_bytes)
        record.begin(RIGHT, 3)
        self.sharing = Sharing(
            job, number, link, policy, record, embedder(job, WALK), lambda round_, task: peers
        )
        self.sharing.begin(RIGHT, 3)
        self.replay = Replay(WALK, job.replay.buffer_size, job.learn)
        self.begin()

    def begin(self) -> None:
        self.replay.begin([])
        self.played = 0
        self.replay.own.start(np.zeros((1, 5), dtype=np.float32))

    def take(self, embedding: Array | None = None) -> list[int]:
        held = np.zeros(0, dtype="<f4") if embedding is None else embedding
        lessons = self.sharing.take(self.replay, held)
        return [lesson.offer.donor for lesson in lessons]

    def play(self, steps: int, marks: dict[int, int] | None = None) -> None:
        for _ in range(steps):
            play_into(self.replay.own, self.played, (marks or {}).get(self.played, 0))
            self.played += 1
            self.sharing.swap(self.replay, self.played)

    def arrived_in_all(self) -> list[int]:
        return [number for numbers in self.arrived() for number in numbers]

    def arrived(self) -> list[list[int]]:
        return [moves(lesson.export()) for lesson in self.replay.lessons]


def _offers() -> list[FetchResult]:
    return [
        parcel(RIGHT, donor=1, round_=1, score=5.0, embedding=np.array([1, 0], "<f4")),
        parcel(LEFT, donor=2, round_=2, score=1.0, embedding=np.array([0, 1], "<f4")),
        parcel(RIGHT, donor=3, round_=2, score=9.0, embedding=np.array([3, 3], "<f4")),
    ]


@pytest.mark.parametrize(
    ("policy", "donors"),
    [("none", []), ("exact", [3, 1]), ("previous", [2, 3]), ("all", [1, 2, 3])],
)
def test_a_policy_fetches_what_it_names_and_nothing_else(policy: str, donors: list[int]) -> None:
    link = Donors(_offers())
    assert _Side(link, share__policy=policy).take() == sorted(donors)
    assert [donor for donor, _ in link.fetched] == donors


def give_nothing(need: Any, offers: Any) -> None:
    """A policy that forgets to return something."""


def give_a_number(need: Any, offers: Any) -> list[int]:
    """A policy that returns no offers."""
    return [1]


@pytest.mark.parametrize("name", ["give_nothing", "give_a_number"])
def test_a_policy_that_gives_no_offers_is_told_so(name: str) -> None:
    side = _Side(Donors(_offers()), share__policy=f"test_sharing:{name}")
    with pytest.raises(UsageError, match=f"policy 'test_sharing:{name}' gave .*expected a list"):
        side.take()


def test_the_nearest_by_the_policys_own_measure_are_taken() -> None:
    for policy, kind, order in [
        # to (1, 0.4): Euclid 0.4, 1.17, 3.28; sorted outputs 0.2 and 0.2 (the better score wins)
        # and 2.3; cosine 0.07, 0.63, 0.08
        ("simnet", "weights", [1, 2, 3]),
        ("simnet", "outputs", [1, 2, 3]),
        ("wasserstein", "weights", [1, 3, 2]),
    ]:
        own = np.array([1, 0.4], dtype="<f4")
        for nearest in (1, 2, 3):
            link = Donors(_offers())
            side = _Side(link, share__policy=policy, simnet__distance=kind, share__nearest=nearest)
            assert side.take(own) == sorted(order[:nearest])
            assert [donor for donor, _ in link.fetched] == order[:nearest]


def test_offers_with_another_kind_of_embedding_are_not_compared() -> None:
    offers = [*_offers(), parcel(RIGHT, donor=4, embedding=np.zeros(7, "<f4"))]
    side = _Side(Donors(offers), share__policy="wasserstein", share__nearest=9)
    assert side.take(np.array([1, 0.4], dtype="<f4")) == [1, 2, 3]


def test_a_damaged_lesson_is_refused_and_the_others_are_taken() -> None:
    offers = _offers()
    damaged = bytearray(offers[1].data)
    damaged[len(damaged) // 2] ^= 1
    offers[1] = replace(offers[1], data=bytes(damaged))
    offers[2] = replace(offers[2], data=b"", refusal="it never came")
    side = _Side(Donors(offers), share__policy="all")
    assert side.take() == [1]
    assert side.sink.kinds() == ["refusal", "refusal"]
    assert side.sink.rows["exchange"][1]["reason"] == "it never came"


# ── swapping inside a task ─────────────────────────────────────────────────────────────────────


def _together(sides: Sequence[_Side], plans: Sequence[tuple[int, dict[int, int]]]) -> None:
    """Every side plays its plan in a thread of its own and then says that it is done."""

    def life(side: _Side, steps: int, marks: dict[int, int]) -> None:
        side.play(steps, marks)
        side.sharing.finish_swaps()

    threads = [
        threading.Thread(target=life, args=(side, *plan), daemon=True)
        for side, plan in zip(sides, plans, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the swaps wait for each other for ever"


def _sides(count: int, **settings: Any) -> list[_Side]:
    links = ThreadLink.mesh(count, full(count))
    everyone = range(count)
    return [
        _Side(link, k, [other for other in everyone if other != k], **settings)
        for k, link in enumerate(links)
    ]


def test_new_rows_reach_every_other_agent_exactly_once() -> None:
    sides = _sides(3, row_exchange__save_interval=20, row_exchange__load_interval=50)
    _together(sides, [(200, {}), (200, {33: TERMINATED}), (200, {})])
    for side in sides:
        swaps = [range(40), range(40, 100), range(100, 140), range(140, 200)]
        assert side.arrived() == [list(numbers) for numbers in swaps for _ in range(2)]
        assert side.sink.kinds() == ["swap"] * 8


def test_nothing_beyond_the_last_multiple_of_save_is_sent() -> None:
    sides = _sides(2, row_exchange__save_interval=20, row_exchange__load_interval=50)
    _together(sides, [(170, {}), (170, {})])
    for side in sides:
        assert side.arrived() == [
            list(range(40)),
            list(range(40, 100)),
            list(range(100, 140)),
        ]


def test_play_that_was_cut_arrives_exactly_once_too() -> None:
    sides = _sides(2, row_exchange__save_interval=25, row_exchange__load_interval=50)
    _together(sides, [(100, {12: TRUNCATED, 30: TRUNCATED, 77: TRUNCATED}), (100, {})])
    assert sorted(sides[1].arrived_in_all()) == list(range(100))
    assert sorted(sides[0].arrived_in_all()) == list(range(100))


def test_a_swap_without_new_rows_is_no_refusal() -> None:
    sides = _sides(
        2, row_exchange__save_interval=60, row_exchange__load_interval=20
    )  # ready rows only at every third swap
    _together(sides, [(120, {}), (120, {})])
    for side in sides:
        assert side.arrived_in_all() == list(range(120))
        assert "refusal" not in side.sink.kinds()


def test_an_agent_that_is_done_early_is_skipped_from_then_on() -> None:
    sides = _sides(3, row_exchange__save_interval=10, row_exchange__load_interval=50)
    _together(sides, [(60, {}), (200, {}), (200, {})])
    for side in sides[1:]:
        arrived = side.arrived()
        assert sum(numbers == list(range(50)) for numbers in arrived) == 2
        assert sorted(side.arrived_in_all()) == sorted([*range(50), *range(200)])
        assert len(side.sink.rows["exchange"]) == 5


def test_an_agent_that_never_plays_lets_the_others_go_on() -> None:
    sides = _sides(2, row_exchange__save_interval=10, row_exchange__load_interval=50)
    _together(sides, [(0, {}), (100, {})])
    assert sides[1].arrived() == []
    assert sides[0].arrived() == []


def test_swaps_are_off_unless_asked_for() -> None:
    link = Donors()
    side = _Side(link, 0, [1], row_exchange__load_interval=5)
    side.play(20)
    side.sharing.finish_swaps()
    assert link.traded == []


def test_damaged_rows_of_a_swap_are_refused_and_the_swapping_goes_on() -> None:
    good = parcel(rows=played(9), donor=1, round_=3).data
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    foreign = parcel(rows=played(9), donor=4, round_=3).data  # sent by agent 1 in 4's name
    other_task = parcel(LEFT, rows=played(9), donor=1, round_=3).data
    link = Donors(answers=[bytes(bad), foreign, other_task, b"nonsense", good])
    side = _Side(link, 0, [1], row_exchange__save_interval=5, row_exchange__load_interval=5)
    side.play(25)
    assert side.sink.kinds() == ["refusal"] * 4 + ["swap"]
    assert side.arrived() == [list(range(9))]


def test_swapped_rows_are_drawn_as_often_as_own_ones() -> None:
    link = Donors(answers=[parcel(rows=played(75), donor=1, round_=3).data])
    side = _Side(
        link,
        0,
        [1],
        row_exchange__save_interval=25,
        row_exchange__load_interval=25,
        learn__batch_size=100,
    )
    side.play(25)
    assert side.replay.lesson_fraction == pytest.approx(0.75)


def test_the_ledger_says_how_many_rows_a_swap_brought() -> None:
    link = Donors(answers=[parcel(rows=played(9), donor=1, round_=3).data])
    side = _Side(link, 0, [1], row_exchange__save_interval=5, row_exchange__load_interval=5)
    side.play(5)
    (row,) = side.sink.rows["exchange"]
    assert row["rows"] == 10
    assert row["raw_bytes"] == 10 * WALK.row_bytes
