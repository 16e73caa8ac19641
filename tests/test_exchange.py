from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isnan, nan
from time import monotonic, sleep

import numpy as np
import pytest
from thread_links import ThreadLink, known

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns, Link, MessageKind, Offer, TransferEvent
from canal_mpi.membuf.lesson import OFFERS_LIMIT, pack_offers, unpack_offers
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import ShareConfig
from canal_mpi.topology.exchange import Exchange, Message, Transport, alone
from canal_mpi.topology.graphs import Edges, edges

CHAIN: Edges = {(0, 1), (1, 2), (2, 3)}
FORK: Edges = {(0, 1), (0, 2), (2, 3), (3, 4), (4, 2)}


def offer(donor: int, round_: int) -> Offer:
    return Offer(donor, round_, f"task-{round_}", float(donor), 10, 5)


def lesson(donor: int, round_: int) -> bytes:
    return encode({"key": np.array([donor, round_])})


def publish(link: Link, round_: int, offers: bool = True) -> None:
    link.begin(round_)
    mine = offer(link.agent, round_) if offers else None
    link.publish(mine, lesson(link.agent, round_) if offers else b"")


def run_on_all(links: Sequence[Link], work: Callable[[Link], object]) -> list[object]:
    with ThreadPoolExecutor(len(links)) as pool:
        done = [pool.submit(work, link) for link in links]
        return [future.result(timeout=30) for future in done]


# ── an agent alone ─────────────────────────────────────────────────────────────────────────────


def test_a_solo_link_shares_with_nobody() -> None:
    link: Link = alone(agent=3)
    publish(link, 1)
    assert (link.agent, list(link.out_neighbors), link.offers()) == (3, [], [])
    (result,) = link.fetch([offer(0, 1)])
    assert result.refusal == "nobody offered it"
    assert link.trade([], b"rows") == []
    assert alone().agent == 0


def test_lessons_from_before_are_there_without_anybody() -> None:
    link = alone()
    link.stock([offer(2, -1)], {(2, -1): lesson(2, -1)}, holder=0)
    assert link.offers() == [offer(2, -1)]
    (result,) = link.fetch(link.offers())
    assert result.data == lesson(2, -1)


def test_a_mesh_of_one_is_a_real_case() -> None:
    (link,) = ThreadLink.mesh(1, edges("full", 1))
    publish(link, 1)
    assert link.offers() == []
    assert link.fetch([]) == []


# ── rounds ─────────────────────────────────────────────────────────────────────────────────────


def test_an_offer_travels_one_hop_per_round_and_its_lesson_follows() -> None:
    def live(link: Link, joined: Edges, size: int) -> None:
        for round_ in range(1, 6):
            publish(link, round_)
            expected = known(joined, size, link.agent, round_ + 1)
            assert {one.key for one in link.offers()} == expected
            for result in link.fetch(link.offers()):
                assert result.refusal == ""
                assert result.data == lesson(*result.offer.key)

    for size in (2, 3, 5):
        graphs = [*(edges(name, size) for name in ("none", "full", "ring", "star")), CHAIN, FORK]
        for graph in graphs:
            joined = {edge for edge in graph if max(edge) < size}
            run_on_all(ThreadLink.mesh(size, joined), partial(live, joined=joined, size=size))


def test_a_lesson_crosses_each_edge_once_however_many_want_it() -> None:
    joined = {(0, 1), (1, 2), (1, 3), (1, 4)}
    moved: list[TransferEvent] = []
    links = ThreadLink.mesh(5, joined)
    for link in links:
        link.on_transfer = moved.append
    for round_ in (1, 2):
        run_on_all(links, lambda link, r=round_: publish(link, r, link.agent == 0 and r == 1))  # type: ignore[misc]
    for _ in range(2):  # again: it is held already
        run_on_all(links[1:], lambda link: link.fetch(link.offers()))
    crossed = [(m.sender, m.receiver) for m in moved if m.kind == "transfer"]
    assert sorted(crossed) == sorted(joined)
    assert {m.offer.donor for m in moved if m.kind == "transfer"} == {0}


def test_nobody_hears_of_a_lesson_twice() -> None:
    for name in ("full", "ring", "hypercube", "torus"):
        links, told = ThreadLink.mesh(8, edges(name, 8)), list[TransferEvent]()
        for link in links:
            link.on_transfer = told.append
        for round_ in range(1, 6):
            run_on_all(links, lambda link, r=round_: publish(link, r, r == 1))  # type: ignore[misc]
        heard = [(m.offer.donor, m.receiver) for m in told if m.kind == "offer"]
        assert sorted(heard) == [(a, b) for a in range(8) for b in range(8) if a != b]


def test_only_what_is_wanted_moves_in_the_order_wanted() -> None:
    left, right = ThreadLink.mesh(2, {(0, 1)})
    moved: list[TransferEvent] = []
    right.on_transfer = moved.append
    for round_ in (1, 2, 3):
        publish(left, round_)
        publish(right, round_, False)
    results = right.fetch([offer(0, 3), offer(0, 1)])
    assert [result.data for result in results] == [lesson(0, 3), lesson(0, 1)]
    assert {m.offer.round for m in moved if m.kind == "transfer"} == {1, 3}
    assert [result.sender for result in results] == [0, 0]


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
        return link.trade(peers, b"from %d" % link.agent)

    for agent, found in enumerate(run_on_all(links, trade)):
        assert found == [(k, b"from %d" % k) for k in (2, 1, 0) if k != agent]


# ── the free clock ─────────────────────────────────────────────────────────────────────────────


def test_with_the_free_clock_agents_never_wait_and_offers_travel_at_once() -> None:
    links = ThreadLink.mesh(4, CHAIN, ShareConfig(exchange="free"))
    publish(links[0], 1)
    for link in links[1:]:
        link.poll()  # each passes it on
    assert links[3].offers() == [offer(0, 1)]
    (result,) = links[3].fetch(links[3].offers())
    assert result.data == lesson(0, 1)
    assert links[0].waited == 0.0


def test_with_the_free_clock_a_trade_takes_what_came_in_the_same_round() -> None:
    left, right = ThreadLink.mesh(2, edges("full", 2), ShareConfig(exchange="free"))
    for link, round_ in ((left, 1), (right, 2)):
        link.begin(round_)
    assert left.trade([1], b"old") == []
    left.begin(2)
    left.trade([1], b"new")
    left.trade([1], b"newer")
    assert right.trade([0], b"mine") == [(0, b"new"), (0, b"newer")]


# ── bad neighbours ─────────────────────────────────────────────────────────────────────────────


class Scripted(Transport):
    """A transport whose neighbour answers as it is told."""

    def __init__(self, answers: Callable[[Message], list[Message]]) -> None:
        self.answers, self.inbox = answers, list[Message]()
        self.sent: list[tuple[int, Message]] = []

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))
        self.inbox += self.answers(message)

    def poll(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, done: Callable[[], object], peer: int, phase: str, limit: float = 0.0) -> bool:
        for _ in range(round(limit / 0.001)):
            if done():
                return True
            sleep(0.001)
        return False


def exchange(
    answers: Callable[[Message], list[Message]] = lambda message: [], timeout: float = 0.05
) -> tuple[Exchange, Scripted, list[TransferEvent]]:
    transport, moved = Scripted(answers), list[TransferEvent]()
    share = ShareConfig(exchange="free", timeout=timeout)
    made = Exchange(0, {(1, 0), (0, 1)}, transport, share, ("task-1",), moved.append)
    made.begin(2)
    return made, transport, moved


def news(*offers: Offer) -> Message:
    return Message(1, MessageKind.OFFERS, (0, 0), 1, pack_offers(offers))


def test_an_agent_that_offers_and_never_delivers_is_given_up() -> None:
    made, transport, moved = exchange()
    transport.inbox.append(news(offer(1, 1)))
    start = monotonic()
    (result,) = made.fetch(made.offers())
    assert "agent 1 offered it and did not deliver" in result.refusal
    assert monotonic() - start < 10
    late = Message(1, MessageKind.LESSON, (1, 1), 2, lesson(1, 1))
    transport.inbox.append(late)  # too late: nobody asks for it any more
    made.poll()
    assert "transfer" not in [m.kind for m in moved]


def test_a_lesson_that_is_not_whole_is_refused() -> None:
    flipped = bytearray(lesson(1, 1))
    flipped[-3] ^= 4
    for data, words in {
        b"": "no longer has it",
        b"junk": "shorter",
        lesson(1, 1)[:-1]: "announces",
        bytes(flipped): "checksum",
    }.items():
        sent = Message(1, MessageKind.LESSON, (1, 1), 2, data)
        made, transport, _ = exchange(lambda x, sent=sent: [sent])  # type: ignore[misc]
        transport.inbox.append(news(offer(1, 1)))
        (result,) = made.fetch(made.offers())
        assert words in result.refusal
        assert result.data == b""


def test_a_bad_offer_is_refused_by_name_and_the_next_one_counts() -> None:
    bad_offers = [
        (news(Offer(1, 1, "Tetris", 0.0, 9, 9)), "Tetris"),
        (news(Offer(7, 1, "task-1", 0.0, 9, 9)), "agent 7"),
        (news(Offer(1, 1, "task-1", 0.0, 1, 9)), "empty"),
        (Message(1, MessageKind.OFFERS, (0, 0), 1, b"nonsense"), "shorter"),
        (
            Message(
                1, MessageKind.OFFERS, (0, 0), 1, b"", "message of 9 bytes is over the limit of 8"
            ),
            "limit",
        ),
    ]
    for bad, words in bad_offers:
        made, transport, moved = exchange()
        transport.inbox += [bad, news(offer(1, 1))]
        assert made.offers() == [offer(1, 1)]
        (refusal,) = [m for m in moved if m.kind == "refusal"]
        assert words in refusal.reason
        assert (refusal.sender, refusal.receiver) == (1, 0)


def test_a_lesson_that_nobody_asked_for_is_thrown_away() -> None:
    made, transport, _ = exchange()
    transport.inbox += [news(offer(1, 1)), Message(1, MessageKind.LESSON, (1, 1), 1, lesson(1, 1))]
    made.poll()
    transport.inbox.append(Message(1, MessageKind.REQUEST, (1, 1), 1))
    made.poll()
    to, answer = transport.sent[-1]
    assert (to, answer.kind, answer.data) == (1, MessageKind.LESSON, b"")


def test_a_request_for_a_lesson_that_is_not_there_is_answered() -> None:
    made, transport, _ = exchange()
    transport.inbox.append(Message(1, MessageKind.REQUEST, (9, 9), 1))
    made.poll()
    assert transport.sent == [(1, Message(0, MessageKind.LESSON, (9, 9), 2))]


def test_who_waits_for_a_relayed_lesson_hears_that_it_will_not_come() -> None:
    transport = Scripted(lambda x: [])
    made = Exchange(1, {(0, 1), (1, 2)}, transport, ShareConfig(exchange="free"))
    transport.inbox += [
        Message(0, MessageKind.OFFERS, (0, 0), 1, pack_offers([offer(0, 1)])),
        Message(2, MessageKind.REQUEST, (0, 1), 2),
        Message(0, MessageKind.LESSON, (0, 1), 2, b"broken"),
    ]
    made.poll()
    assert transport.sent[-1] == (2, Message(1, MessageKind.LESSON, (0, 1), 0))


def test_the_cache_is_bounded_and_drops_others_lessons_first() -> None:
    transport = Scripted(lambda x: [Message(1, MessageKind.LESSON, x.key, 1, lesson(*x.key))])
    size = len(lesson(0, 1))
    made = Exchange(0, {(1, 0), (0, 1)}, transport, ShareConfig(exchange="free"))
    made.cache_bytes = 2 * size
    publish(made, 1)
    transport.inbox += [news(offer(1, 1)), news(offer(1, 2))]
    transport.answers = lambda x: (
        [Message(1, MessageKind.LESSON, x.key, 1, lesson(*x.key))] * (x.kind == MessageKind.REQUEST)
    )
    for wanted in made.offers():
        made.fetch([wanted])
    assert made.known()[1] == [(0, 1), (1, 2)]


def test_an_exchange_resumes_from_its_state() -> None:
    links = ThreadLink.mesh(3, {(0, 1), (1, 2)})
    run_on_all(links, lambda link: publish(link, 1))
    links[1].fetch(links[1].offers())
    state = {name: column.copy() for name, column in links[1].state_dict().items()}
    again = ThreadLink.mesh(3, {(0, 1), (1, 2)})
    again[1].load_state_dict(state)
    assert again[1].offers() == links[1].offers()
    again[1].begin(2)
    assert again[1].fetch(again[1].offers())[0].data == lesson(0, 1)
    assert again[1]._unsent == links[1]._unsent == [offer(0, 1)]


def test_scores_that_are_not_known_cross_the_wire() -> None:
    made, transport, _ = exchange()
    transport.inbox.append(news(Offer(1, 1, "task-1", nan, 9, 9, np.ones(3, dtype="<f4"))))
    (found,) = made.offers()
    assert np.isnan(found.score)
    assert found.embedding.tolist() == [1, 1, 1]


def embedded(donor: int = 1, width: int = 0, task: str = "Krull", round_: int = 2) -> Offer:
    embedding = np.arange(width, dtype="<f4") + donor
    return Offer(donor, round_, task, 7.5, 40, 600, embedding)


def same(found: Sequence[Offer], sent: Sequence[Offer]) -> bool:
    """Equal, embeddings too (which `==` of offers leaves out)."""
    vectors = [[o.embedding.tolist() for o in offers] for offers in (found, sent)]
    return list(found) == list(sent) and vectors[0] == vectors[1]


# ── offers on the wire ────────────────────────────────────────────────────────────────────────


def test_offers_come_out_as_they_went_in_whatever_the_width_of_their_embeddings() -> None:
    for widths in ([], [0], [3], [0, 0], [5, 0, 2], [0, 7], [1, 512, 3, 0]):
        sent = [embedded(donor, width) for donor, width in enumerate(widths)]
        found = unpack_offers(pack_offers(sent))
        assert same(found, sent)
        assert {o.embedding.dtype.str for o in found} <= {"<f4"}
    for task in ("Ms. Pac-Man", "Pokémon", "é" * 32, "x" * 64):
        assert unpack_offers(pack_offers([embedded(task=task)]))[0].task == task


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
    assert len(pack_offers([embedded()])) < 600


# ── refused ────────────────────────────────────────────────────────────────────────────────────


def refuses(columns: Columns, words: str) -> None:
    with pytest.raises(DamagedData, match=words):
        unpack_offers(encode(columns))


def columns_of(*offers: Offer) -> Columns:
    return decode(pack_offers(offers), OFFERS_LIMIT)


def test_columns_that_are_missing_or_of_another_shape_are_refused() -> None:
    columns = columns_of(embedded(1, 2), embedded(2, 3))
    for name, column in columns.items():
        rest = {n: c for n, c in columns.items() if n != name}
        refuses(rest, "offers have the columns")
        refuses(rest | {name: np.stack([column, column])}, "offers have the columns")
        refuses(rest | {name: column[:-1]}, "differ in length")


MALFORMED: list[tuple[str, Array, str]] = [
    ("more", np.zeros(2), "offers have the columns"),
    ("donor", np.array([1, 2]), "offers have the columns"),
    ("score", np.array([1, 2], dtype="<f4"), "offers have the columns"),
    ("task", np.array([b"x" * 65, b"y"]), "offers have the columns"),
    ("task", np.array([b"\xff", b"y"], dtype="S64"), "UTF-8"),
    ("width", np.array([2, 2], dtype="<u4"), "differ in length"),
    ("width", np.array([2**32 - 1, 6], dtype="<u4"), "differ in length"),
    ("embedding", np.zeros(5), "offers have the columns"),
    ("embedding", np.array([0, 1, nan, 0, 0], dtype="<f4"), "finite"),
    ("embedding", np.array([0, 1, 0, 0, np.inf], dtype="<f4"), "finite"),
    ("rows", np.array([9, 1]), "empty lesson"),
    ("rows", np.array([-5, 9]), "empty lesson"),
    ("bytes", np.array([0, 9]), "empty lesson"),
    ("bytes", np.array([9, -9]), "empty lesson"),
    ("round", np.array([1, 0], dtype="<i4"), "empty lesson"),
]


def test_malformed_offers_are_refused() -> None:
    columns = columns_of(embedded(1, 2), embedded(2, 3))
    assert len(unpack_offers(encode(columns))) == 2
    for name, value, words in MALFORMED:
        refuses(columns | {name: value}, words)


def test_what_is_no_message_is_refused_as_is_every_flipped_byte() -> None:
    data = pack_offers([embedded(1, 2)])
    for wrong in (b"", b"nonsense", data[:-1]):
        with pytest.raises(DamagedData):
            unpack_offers(wrong)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(DamagedData):
            unpack_offers(bytes(flipped))


def test_a_message_of_offers_over_the_limit_is_refused() -> None:
    with pytest.raises(DamagedData, match="limit"):
        unpack_offers(pack_offers([embedded(1, OFFERS_LIMIT // 4)]))
