from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan
from time import monotonic, sleep

import numpy as np
import pytest

from canal_mpi.columns import encode
from canal_mpi.topology.desk import LESSON, OFFERS, WANT, Desk, Letter, Terms
from canal_mpi.topology.graphs import Edges, edges
from canal_mpi.topology.link import SoloLink, ThreadLink
from canal_mpi.topology.offers import pack_offers
from canal_mpi.types import SWAPS, Key, Link, Moved, Offer

CHAIN: Edges = {(0, 1), (1, 2), (2, 3)}


def offer(donor: int, round_: int) -> Offer:
    return Offer(donor, round_, f"task-{round_}", float(donor), 10, 5)


def lesson(donor: int, round_: int) -> bytes:
    return encode({"key": np.array([donor, round_])})


def publish(link: Link, round_: int, offers: bool = True) -> None:
    link.begin(round_)
    mine = offer(link.agent, round_) if offers else None
    link.publish(mine, lesson(link.agent, round_) if offers else b"")


def together(links: Sequence[Link], work: Callable[[Link], object]) -> list[object]:
    with ThreadPoolExecutor(len(links)) as pool:
        done = [pool.submit(work, link) for link in links]
        return [future.result(timeout=30) for future in done]


def hops(joined: Edges, size: int) -> dict[tuple[int, int], int]:
    found = {(a, a): 0 for a in range(size)}
    for step in range(1, size):
        fresh = {(a, c) for a, b in found for x, c in joined if x == b} - found.keys()
        found |= dict.fromkeys(fresh, step)
    return found


# ── an agent alone ─────────────────────────────────────────────────────────────────────────────


def test_a_solo_link_shares_with_nobody() -> None:
    link: Link = SoloLink(3)
    publish(link, 1)
    assert (link.agent, list(link.audience), link.offers()) == (3, [], [])
    (parcel,) = link.fetch([offer(0, 1)])
    assert parcel.refusal == "nobody offered it"
    assert link.trade([], b"rows", SWAPS) == []
    assert SoloLink().agent == 0


def test_lessons_from_before_are_there_without_anybody() -> None:
    link = SoloLink()
    link.stock([offer(2, -1)], {(2, -1): lesson(2, -1)}, holder=0)
    assert link.offers() == [offer(2, -1)]
    (parcel,) = link.fetch(link.offers())
    assert parcel.data == lesson(2, -1)


def test_a_mesh_of_one_is_a_real_case() -> None:
    (link,) = ThreadLink.mesh(1, edges("full", 1))
    publish(link, 1)
    assert link.offers() == []
    assert link.fetch([]) == []


# ── rounds ─────────────────────────────────────────────────────────────────────────────────────

GRAPHS = ["none", "full", "ring", "star"]
FILES: dict[str, Edges] = {"chain": CHAIN, "fork": {(0, 1), (0, 2), (2, 3), (3, 4), (4, 2)}}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", [*GRAPHS, *FILES])
def test_an_offer_travels_one_hop_a_round_and_its_lesson_follows(name: str, size: int) -> None:
    joined = {e for e in FILES.get(name) or edges(name, size) if max(e) < size}
    far = hops(joined, size)

    def live(link: Link) -> None:
        for round_ in range(1, 6):
            publish(link, round_)
            expected = {
                (a, r)
                for a in range(size)
                for r in range(1, round_ + 1)
                if 0 < far.get((a, link.agent), 99) <= round_ + 1 - r
            }
            assert {one.key for one in link.offers()} == expected
            for parcel in link.fetch(link.offers()):
                assert parcel.refusal == ""
                assert parcel.data == lesson(*parcel.offer.key)

    together(ThreadLink.mesh(size, joined), live)


def test_without_relay_only_neighbours_are_heard() -> None:
    links = ThreadLink.mesh(4, CHAIN, Terms(relay=False))
    for round_ in (1, 2, 3):
        together(links, lambda link, r=round_: publish(link, r))  # type: ignore[misc]
    assert [{o.donor for o in link.offers()} for link in links] == [set(), {0}, {1}, {2}]


def test_a_lesson_crosses_each_edge_once_however_many_want_it() -> None:
    joined = {(0, 1), (1, 2), (1, 3), (1, 4)}
    moved: list[Moved] = []
    links = ThreadLink.mesh(5, joined)
    for link in links:
        link.note = moved.append
    for round_ in (1, 2):
        together(links, lambda link, r=round_: publish(link, r, link.agent == 0 and r == 1))  # type: ignore[misc]
    for _ in range(2):  # again: it is held already
        together(links[1:], lambda link: link.fetch(link.offers()))
    crossed = [(m.sender, m.receiver) for m in moved if m.kind == "transfer"]
    assert sorted(crossed) == sorted(joined)
    assert {m.offer.donor for m in moved if m.kind == "transfer"} == {0}


def test_nobody_hears_of_a_lesson_twice() -> None:
    for name in ("full", "ring", "hypercube", "torus"):
        links, told = ThreadLink.mesh(8, edges(name, 8)), list[Moved]()
        for link in links:
            link.note = told.append
        for round_ in range(1, 6):
            together(links, lambda link, r=round_: publish(link, r, r == 1))  # type: ignore[misc]
        heard = [(m.offer.donor, m.receiver) for m in told if m.kind == "offer"]
        assert sorted(heard) == [(a, b) for a in range(8) for b in range(8) if a != b]


def test_only_what_is_wanted_moves_in_the_order_wanted() -> None:
    left, right = ThreadLink.mesh(2, {(0, 1)})
    moved: list[Moved] = []
    right.note = moved.append
    for round_ in (1, 2, 3):
        publish(left, round_)
        publish(right, round_, False)
    parcels = right.fetch([offer(0, 3), offer(0, 1)])
    assert [parcel.data for parcel in parcels] == [lesson(0, 3), lesson(0, 1)]
    assert {m.offer.round for m in moved if m.kind == "transfer"} == {1, 3}
    assert [parcel.sender for parcel in parcels] == [0, 0]


def test_news_of_a_faster_agent_does_not_count_before_its_round() -> None:
    left, right = ThreadLink.mesh(2, {(0, 1)})
    publish(left, 1)
    publish(left, 2)
    publish(right, 1, False)
    assert right.offers() == [offer(0, 1)]
    publish(right, 2, False)
    assert right.offers() == [offer(0, 1), offer(0, 2)]


def test_traded_messages_reach_each_peer_in_the_order_of_the_peers() -> None:
    links = ThreadLink.mesh(3, edges("full", 3))

    def trade(link: Link) -> list[tuple[int, bytes]]:
        peers = [k for k in (2, 1, 0) if k != link.agent]
        return link.trade(peers, b"from %d" % link.agent, SWAPS)

    for agent, found in enumerate(together(links, trade)):
        assert found == [(k, b"from %d" % k) for k in (2, 1, 0) if k != agent]


# ── the free clock ─────────────────────────────────────────────────────────────────────────────


def test_with_the_free_clock_nobody_waits_and_news_travel_at_once() -> None:
    links = ThreadLink.mesh(4, CHAIN, Terms(free=True))
    publish(links[0], 1)
    for link in links[1:]:
        link.poll()  # each passes it on
    assert links[3].offers() == [offer(0, 1)]
    (parcel,) = links[3].fetch(links[3].offers())
    assert parcel.data == lesson(0, 1)
    assert links[0].waited == 0.0


def test_with_the_free_clock_a_trade_takes_what_came_in_the_same_round() -> None:
    left, right = ThreadLink.mesh(2, edges("full", 2), Terms(free=True))
    for link, round_ in ((left, 1), (right, 2)):
        link.begin(round_)
    assert left.trade([1], b"old", SWAPS) == []
    left.begin(2)
    left.trade([1], b"new", SWAPS)
    left.trade([1], b"newer", SWAPS)
    assert right.trade([0], b"mine", SWAPS) == [(0, b"new"), (0, b"newer")]


# ── bad neighbours ─────────────────────────────────────────────────────────────────────────────


class Scripted:
    """A carrier whose neighbour answers as it is told."""

    def __init__(self, answers: Callable[[Letter], list[Letter]]) -> None:
        self.answers, self.inbox, self.received = answers, list[Letter](), 0
        self.sent: list[tuple[int, Letter]] = []

    def send(self, to: int, letter: Letter) -> None:
        self.sent.append((to, letter))
        self.inbox += self.answers(letter)

    def poll(self) -> list[Letter]:
        letters, self.inbox = self.inbox, []
        return letters

    def settle(self) -> None: ...

    def pause(self, turn: int, peer: int, phase: str) -> None:
        assert turn < 10_000
        sleep(0.001)


def desk(
    answers: Callable[[Letter], list[Letter]] = lambda letter: [], patience: float = 0.05
) -> tuple[Desk, Scripted, list[Moved]]:
    carrier, moved = Scripted(answers), list[Moved]()
    made = Desk(0, {(1, 0), (0, 1)}, carrier, Terms(True, patience=patience, tasks=("task-1",)))
    made.note = moved.append
    made.begin(2)
    return made, carrier, moved


def news(*offers: Offer) -> Letter:
    return Letter(1, OFFERS, (0, 0), 1, pack_offers(offers))


def test_an_agent_that_offers_and_never_delivers_is_given_up() -> None:
    made, carrier, moved = desk()
    carrier.inbox.append(news(offer(1, 1)))
    start = monotonic()
    (parcel,) = made.fetch(made.offers())
    assert "agent 1 offered it and did not deliver" in parcel.refusal
    assert monotonic() - start < 10
    late = Letter(1, LESSON, (1, 1), 2, lesson(1, 1))
    carrier.inbox.append(late)  # too late: nobody asks for it any more
    made.poll()
    assert "transfer" not in [m.kind for m in moved]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "no longer has it"), (b"junk", "shorter"), (lesson(1, 1)[:-1], "announces")],
)
def test_a_lesson_that_is_not_whole_is_refused(data: bytes, words: str) -> None:
    made, carrier, _ = desk(lambda x: [Letter(1, LESSON, x.key, x.round, data)])
    carrier.inbox.append(news(offer(1, 1)))
    (parcel,) = made.fetch(made.offers())
    assert words in parcel.refusal
    assert parcel.data == b""


def test_one_flipped_byte_of_a_lesson_is_found() -> None:
    data = bytearray(lesson(1, 1))
    data[-3] ^= 4
    made, carrier, _ = desk(lambda x: [Letter(1, LESSON, x.key, x.round, bytes(data))])
    carrier.inbox.append(news(offer(1, 1)))
    (parcel,) = made.fetch(made.offers())
    assert "checksum" in parcel.refusal


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (news(Offer(1, 1, "Tetris", 0.0, 9, 9)), "Tetris"),
        (news(Offer(7, 1, "task-1", 0.0, 9, 9)), "agent 7"),
        (news(Offer(1, 1, "task-1", 0.0, 1, 9)), "empty"),
        (Letter(1, OFFERS, (0, 0), 1, b"nonsense"), "shorter"),
        (Letter(1, OFFERS, (0, 0), 1, b"", "message of 9 bytes is over the limit of 8"), "limit"),
    ],
)
def test_a_bad_offer_is_refused_by_name_and_the_next_one_counts(bad: Letter, words: str) -> None:
    made, carrier, moved = desk()
    carrier.inbox += [bad, news(offer(1, 1))]
    assert made.offers() == [offer(1, 1)]
    (refusal,) = [m for m in moved if m.kind == "refusal"]
    assert words in refusal.reason
    assert (refusal.sender, refusal.receiver) == (1, 0)


def test_a_lesson_that_nobody_asked_for_is_thrown_away() -> None:
    made, carrier, _ = desk()
    carrier.inbox += [news(offer(1, 1)), Letter(1, LESSON, (1, 1), 1, lesson(1, 1))]
    made.poll()
    carrier.inbox.append(Letter(1, WANT, (1, 1), 1))
    made.poll()
    to, answer = carrier.sent[-1]
    assert (to, answer.kind, answer.data) == (1, LESSON, b"")


def test_a_request_for_a_lesson_that_is_not_there_is_answered() -> None:
    made, carrier, _ = desk()
    carrier.inbox.append(Letter(1, WANT, (9, 9), 1))
    made.poll()
    assert carrier.sent == [(1, Letter(0, LESSON, (9, 9), 1))]


def test_who_waits_for_a_relayed_lesson_hears_that_it_will_not_come() -> None:
    carrier, moved = Scripted(lambda x: []), list[Moved]()
    made = Desk(1, {(0, 1), (1, 2)}, carrier, Terms(free=True))
    made.note = moved.append
    carrier.inbox += [
        Letter(0, OFFERS, (0, 0), 1, pack_offers([offer(0, 1)])),
        Letter(2, WANT, (0, 1), 2),
        Letter(0, LESSON, (0, 1), 2, b"broken"),
    ]
    made.poll()
    assert carrier.sent[-1] == (2, Letter(1, LESSON, (0, 1), 2))
    (refusal,) = [m for m in moved if m.kind == "relay"]
    assert "shorter" in refusal.reason
    assert (refusal.offer.donor, refusal.sender, refusal.receiver) == (0, 0, 1)


def test_the_shelf_is_bounded_and_drops_others_lessons_first() -> None:
    carrier = Scripted(lambda x: [Letter(1, LESSON, x.key, 1, lesson(*x.key))])
    size = len(lesson(0, 1))
    made = Desk(0, {(1, 0), (0, 1)}, carrier, Terms(free=True, hold=2 * size))
    publish(made, 1)
    carrier.inbox += [news(offer(1, 1)), news(offer(1, 2))]
    carrier.answers = lambda x: [Letter(1, LESSON, x.key, 1, lesson(*x.key))] * (x.kind == WANT)
    for wanted in made.offers():
        made.fetch([wanted])
    held: list[Key] = list(made._shelf)
    assert held == [(0, 1), (1, 2)]


def test_a_desk_goes_on_from_its_state() -> None:
    links = ThreadLink.mesh(3, {(0, 1), (1, 2)})
    together(links, lambda link: publish(link, 1))
    links[1].fetch(links[1].offers())
    state = {name: column.copy() for name, column in links[1].state().items()}
    again = ThreadLink.mesh(3, {(0, 1), (1, 2)})
    again[1].restore(state)
    assert again[1].offers() == links[1].offers()
    again[1].begin(2)
    assert again[1].fetch(again[1].offers())[0].data == lesson(0, 1)
    assert again[1]._news == links[1]._news == [offer(0, 1)]


def test_scores_that_are_not_known_cross_the_wire() -> None:
    made, carrier, _ = desk()
    carrier.inbox.append(news(Offer(1, 1, "task-1", nan, 9, 9, np.ones(3, dtype="<f4"))))
    (found,) = made.offers()
    assert np.isnan(found.score)
    assert found.embedding.tolist() == [1, 1, 1]
