from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from canal_mpi.topology.graphs import edges
from canal_mpi.topology.link import SoloLink, ThreadLink
from canal_mpi.types import Link, Offer, Parcel


def offer(donor: int, round_: int) -> Offer:
    return Offer(donor, round_, f"task-{round_}", float(donor), 10, 5)


def lesson(donor: int, round_: int) -> bytes:
    return f"lesson {donor} {round_}".encode()


def test_a_solo_link_shares_with_nobody() -> None:
    link: Link = SoloLink(3)
    assert link.agent == 3
    assert list(link.audience) == []
    assert link.publish(offer(3, 1), b"rows") == []
    assert link.offers() == []
    assert link.fetch([offer(0, 1)]) == []
    assert link.trade([], b"rows") == []
    assert link.waited == 0.0


def test_a_solo_link_is_agent_0_unless_told() -> None:
    assert SoloLink().agent == 0


def test_a_mesh_of_one_is_a_real_case() -> None:
    (link,) = ThreadLink.mesh(1, edges("full", 1))
    assert link.publish(offer(0, 1), b"rows") == []
    assert link.offers() == []
    assert link.fetch([]) == []


def test_every_agent_knows_who_hears_it() -> None:
    links: list[Link] = list(ThreadLink.mesh(4, {(0, 3), (0, 1), (2, 0)}))
    assert [link.agent for link in links] == [0, 1, 2, 3]
    assert [list(link.audience) for link in links] == [[1, 3], [], [0], []]


def live(link: ThreadLink, rounds: int, silent: frozenset[int]) -> list[list[Offer]]:
    heard = []
    for round_ in range(1, rounds + 1):
        mine = None if link.agent in silent else offer(link.agent, round_)
        assert link.publish(mine, lesson(link.agent, round_) if mine else b"") == []
        heard.append(link.offers())
        for parcel in link.fetch(link.offers()):
            assert parcel.data == lesson(*parcel.offer.key)
            assert parcel.refusal == ""
            assert parcel.seconds >= 0
    return heard


def run(name: str, size: int, silent: frozenset[int] = frozenset()) -> list[list[list[Offer]]]:
    links = ThreadLink.mesh(size, edges(name, size))
    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(live, link, 4, silent) for link in links]
        return [future.result(timeout=20) for future in done]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", ["none", "full", "ring", "star"])
def test_threads_hear_their_neighbours_round_by_round(name: str, size: int) -> None:
    joined = edges(name, size)
    for agent, rounds in enumerate(run(name, size)):
        sources = [a for a, b in joined if b == agent]
        for round_, heard in enumerate(rounds, 1):
            expected = {(a, r) for a in sources for r in range(1, round_ + 1)}
            assert {one.key for one in heard} == expected
            assert len(heard) == len(expected)
            assert all(one == offer(*one.key) for one in heard)


def test_an_agent_without_a_lesson_keeps_the_round_going() -> None:
    heard = run("full", 3, silent=frozenset({1}))
    assert {one.donor for one in heard[0][-1]} == {2}
    assert {one.donor for one in heard[1][-1]} == {0, 2}
    assert len(heard[1][-1]) == 8


def test_an_edge_carries_one_way_only() -> None:
    left, right = ThreadLink.mesh(2, {(0, 1)})
    left.publish(offer(0, 1), lesson(0, 1))
    right.publish(offer(1, 1), lesson(1, 1))
    assert left.offers() == []
    assert right.offers() == [offer(0, 1)]


def test_only_what_is_wanted_is_fetched_in_the_order_wanted() -> None:
    left, right = ThreadLink.mesh(2, {(0, 1)})
    for round_ in (1, 2, 3):
        left.publish(offer(0, round_), lesson(0, round_))
        right.publish(None, b"")
    parcels = right.fetch([offer(0, 3), offer(0, 1)])
    assert [parcel.offer.round for parcel in parcels] == [3, 1]
    assert [parcel.data for parcel in parcels] == [lesson(0, 3), lesson(0, 1)]
    assert all(isinstance(parcel, Parcel) for parcel in parcels)


def test_traded_messages_reach_each_peer_in_the_order_of_the_peers() -> None:
    links = ThreadLink.mesh(3, edges("full", 3))
    with ThreadPoolExecutor(3) as pool:
        peers = [[k for k in (2, 1, 0) if k != link.agent] for link in links]
        done = [
            pool.submit(link.trade, others, b"from %d" % link.agent)
            for link, others in zip(links, peers, strict=True)
        ]
        for future, others in zip(done, peers, strict=True):
            assert future.result(timeout=20) == [b"from %d" % k for k in others]


def test_links_joined_by_hand_use_the_queues_they_are_given() -> None:
    box: Queue[tuple[Offer | None, bytes]] = Queue()
    ThreadLink(0, {(0, 1)}, {(0, 1): box}).publish(offer(0, 1), b"x")
    assert box.get_nowait() == (offer(0, 1), b"x")
    assert box.empty()
