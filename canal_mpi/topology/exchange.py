"""An agent's exchange with its neighbours: offers first, then only what is wanted, relayed.

No MPI here: messages leave and arrive through a `Transport`. `poll` answers messages and never
waits; it is called at every step of the agent.

In rounds an offer travels one hop per exchange and counts from the next round on, whenever its
message came; with the free clock it counts, and is passed on, as soon as it is there.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from canal_mpi.errors import DamagedData, logger
from canal_mpi.interfaces import (
    Columns,
    FetchResult,
    Key,
    MessageKind,
    Offer,
    OnTransfer,
    TransferEvent,
)
from canal_mpi.membuf.lesson import pack_offers, unpack_offers
from canal_mpi.membuf.wire import check
from canal_mpi.settings import ShareConfig
from canal_mpi.state import strip_prefix, with_prefix
from canal_mpi.topology.graphs import Edges, bfs_parents, out_neighbors

MOST_KNOWN = 1 << 32  # bytes of all offers that an agent knows of
BROKEN = b"broken"  # stands for a traded message that did not arrive whole: none is a goodbye


class Message(NamedTuple):
    """What one agent sends to another."""

    sender: int
    kind: MessageKind
    key: Key  # the lesson it is about
    round: int  # of the sender
    data: bytes = b""
    error: str = ""  # why the data did not arrive whole


class Transport:
    """Carries messages, in order for each pair of agents; this one has nobody to carry them to."""

    def send(self, to: int, message: Message) -> None:
        """Start sending."""

    def poll(self) -> list[Message]:
        """What has arrived whole; never waits."""
        return []

    def wait(self, done: Callable[[], object], peer: int, phase: str, limit: float = 0.0) -> bool:
        """Sleep until something is done; False after `limit` seconds without a byte, if any.

        May raise where waiting for that peer is hopeless.
        """
        return bool(done())

    def settle(self) -> None:
        """Wait until everything sent has left."""


@dataclass
class KnownLesson:
    """What an agent knows of a lesson."""

    offer: Offer
    via: int  # the neighbour that told of it; the agent itself, where it is its own
    data: bytes = b""  # while it is held
    asked: bool = False  # whether it is on its way
    waiting: list[int] = field(default_factory=list)  # whom it will be passed on to
    failure: str = ""  # why it did not come
    fetched: bool = False  # whether this agent itself took it


def ignore(event: TransferEvent) -> None:
    """Nobody is told of transfers."""


class Exchange:
    """Implements `Link`; `on_transfer` is told of everything that crosses an edge, or does not.

    Offers of other tasks than the job's are refused; without `tasks`, none.
    """

    def __init__(
        self,
        agent: int,
        edges: Edges,
        transport: Transport,
        share: ShareConfig,
        tasks: Collection[str] = (),
        on_transfer: OnTransfer = ignore,
    ) -> None:
        self.agent, self.transport, self.share, self.tasks = agent, transport, share, tasks
        self.cache_bytes = share.cache_mb << 20
        self.on_transfer = on_transfer
        self.in_neighbors: Sequence[int] = sorted(a for a, b in edges if b == agent)
        self.out_neighbors: Sequence[int] = sorted(b for a, b in edges if a == agent)
        self.round, self.waited = 0, 0.0
        self._near = out_neighbors(edges)
        self._children = {  # who hears of a donor's lessons from this agent; nobody hears twice
            donor: [b for b, a in bfs_parents(self._near, donor).items() if a == agent]
            for donor in self._near
        }
        self._lessons: dict[Key, KnownLesson] = {}
        self._unsent: list[Offer] = []  # own and others' offers to tell the neighbours of
        self._inbox: dict[tuple[MessageKind, int], deque[Message]] = {}  # by kind and sender
        self._wanted: set[Key] = set()  # lessons that are being fetched: they stay until then

    # ── the agent's side ───────────────────────────────────────────────────────────────────────

    def begin(self, round_: int) -> None:
        """A new round of this agent; what is left of rounds before is void."""
        self.round = round_
        for line, messages in self._inbox.items():
            self._inbox[line] = deque(m for m in messages if m.round >= round_)

    def stock(self, offers: Sequence[Offer], lessons: dict[Key, bytes], holder: int) -> None:
        """Lessons from before this run: every agent knows of them, `holder` has them."""
        for offer in offers:
            self._lessons[offer.key] = KnownLesson(offer, holder, lessons.get(offer.key, b""))

    def publish(self, offer: Offer | None, data: bytes) -> None:
        """Offer this round's lesson and pass on others'; in rounds, hear the neighbours' too."""
        if offer is not None:
            self._keep(KnownLesson(offer, self.agent), data)
            self._unsent.append(offer)
        self._send_offers()
        if not self.share.free:
            kind, phase = MessageKind.OFFERS, "the exchange of offers"
            for message in self._await_each(kind, self.in_neighbors, phase):
                self._take_offers(message)

    def offers(self) -> list[Offer]:
        """Everything heard so far, in an order that does not depend on arrival."""
        self.poll()
        return [one.offer for key, one in sorted(self._lessons.items()) if not self._is_own(key)]

    def _is_own(self, key: Key) -> bool:
        """Whether this agent played a lesson, in this run."""
        return key[0] == self.agent and key[1] > 0

    def fetch(self, wanted: Sequence[Offer]) -> list[FetchResult]:
        """The wanted lessons, or why they did not come; waits for the bytes alone."""
        start = monotonic()
        self._wanted = {offer.key for offer in wanted}
        known = [self._lessons[offer.key] for offer in wanted if offer.key in self._lessons]
        missing = [one for one in known if not one.data]
        for one in known:
            if not one.fetched:
                self._log("request", one.offer, self.agent, one.via)
        for one in missing:
            one.failure = ""
            self._request(one)
        for one in missing:
            self._await_lesson(one)
        self._wanted = set()
        came = {one.offer.key for one in missing}
        return [self._result(offer, start, offer.key in came) for offer in wanted]

    def _await_lesson(self, one: KnownLesson) -> None:
        timeout = self.share.timeout
        limit = timeout if self.share.free else 0.0  # rounds wait: bits must not depend on time
        if not self._wait(lambda: not one.asked, one.via, "the exchange of lessons", limit):
            self._fail(one, f"agent {one.via} offered it and did not deliver in {timeout:g} s")

    def _result(self, offer: Offer, start: float, moved: bool) -> FetchResult:
        """What came of a wanted lesson; its arrival is told of once, also if it was relayed."""
        one, seconds = self._lessons.get(offer.key), monotonic() - start
        if one is None:
            return FetchResult(offer, b"", seconds, "nobody offered it", self.agent)
        if one.data and not one.fetched:
            one.fetched, size = True, len(one.data) if moved else 0
            self._log("transfer", offer, one.via, self.agent, bytes=size, seconds=seconds)
        refusal = "" if one.data else one.failure or "there was no room for it"
        return FetchResult(offer, one.data, seconds, refusal, one.via)

    def trade(self, peers: Sequence[int], data: bytes) -> list[tuple[int, bytes]]:
        """Swap rows with neighbours on the same task: one message each in rounds, else what came.

        An empty answer is a goodbye.
        """
        kind = MessageKind.SWAPS
        for agent in peers:
            self._send(agent, kind, (self.agent, self.round), data)
        if self.share.free:
            self.poll()
            came = [m for agent in peers for m in self._inbox.pop((kind, agent), ())]
            came = [m for m in came if m.round == self.round]
        else:
            came = self._await_each(kind, peers, "sharing inside a task")
        for agent, error in ((m.sender, m.error) for m in came if m.error):
            logger.warning("what agent %d sent is refused: %s", agent, error)
        return [(m.sender, BROKEN if m.error else m.data) for m in came]

    def _await_each(self, kind: MessageKind, agents: Sequence[int], phase: str) -> list[Message]:
        """The next message of each of these agents: in rounds each sends one at a time."""
        start = monotonic()
        for agent in agents:
            self._wait(partial(self._inbox.get, (kind, agent)), agent, phase)
        self.waited += monotonic() - start
        return [self._inbox[kind, agent].popleft() for agent in agents]

    def _wait(self, done: Callable[[], object], peer: int, phase: str, limit: float = 0.0) -> bool:
        def polled() -> object:
            self.poll()
            return done()

        return self.transport.wait(polled, peer, phase, limit)

    def leave(self, peers: Sequence[int]) -> None:
        """Tell neighbours on the same task that no more comes, without waiting for theirs."""
        for agent in peers:
            self._send(agent, MessageKind.SWAPS, (self.agent, self.round))

    def settle(self) -> None:
        """Wait until everything sent has left, before the agents part."""
        self.transport.settle()

    def poll(self) -> None:
        """Take in messages and answer them; never waits."""
        for message in self.transport.poll():
            self._handle(message)

    # ── messages ───────────────────────────────────────────────────────────────────────────────

    def _send(self, to: int, kind: MessageKind, key: Key, data: bytes = b"") -> None:
        self.transport.send(to, Message(self.agent, kind, key, self.round, data))

    def _log(self, kind: str, offer: Offer, sender: int, receiver: int, **more: Any) -> None:
        self.on_transfer(TransferEvent(kind, offer, sender, receiver, self.round, **more))

    def _handle(self, message: Message) -> None:
        if message.kind == MessageKind.REQUEST:
            self._serve(message)
        elif message.kind == MessageKind.LESSON:
            self._take_lesson(message)
        elif self.share.free and message.kind == MessageKind.OFFERS:
            self._take_offers(message)
            self._send_offers()
        else:
            self._inbox.setdefault((message.kind, message.sender), deque()).append(message)

    def _send_offers(self) -> None:
        """Tell the neighbours of new offers; in rounds also that there are none."""
        offers, self._unsent = self._unsent, []
        for agent in self.out_neighbors:
            fresh = [offer for offer in offers if agent in self._children.get(offer.donor, ())]
            for offer in fresh:
                self._log("offer", offer, self.agent, agent, bytes=offer.bytes)
            if fresh or not self.share.free:
                self._send(agent, MessageKind.OFFERS, (0, 0), pack_offers(fresh))

    def _take_offers(self, message: Message) -> None:
        """Note the offers of a neighbour; what is wrong is refused."""
        try:
            if message.error:
                raise DamagedData(message.error)
            for offer in unpack_offers(message.data):
                self._check(offer)
                if offer.key not in self._lessons and not self._is_own(offer.key):
                    self._lessons[offer.key] = KnownLesson(offer, message.sender)
                    self._unsent.append(offer)
        except DamagedData as error:
            logger.warning("an offer of agent %d is refused: %s", message.sender, error)
            odd = Offer(message.sender, self.round, "", float("nan"), 0, 0)
            self._log("refusal", odd, message.sender, self.agent, reason=str(error))

    def _check(self, offer: Offer) -> None:
        if offer.donor not in self._near:
            raise DamagedData(f"offer of agent {offer.donor}, to which no edge leads")
        if self.tasks and offer.task not in self.tasks:
            raise DamagedData(f"offer of the task '{offer.task}', which this job does not have")

    def _request(self, one: KnownLesson) -> None:
        """Ask the neighbour that told of a lesson for it, once."""
        if not one.asked:
            one.asked = True
            self._send(one.via, MessageKind.REQUEST, one.offer.key)

    def _serve(self, message: Message) -> None:
        """Send a lesson, or get it first where this agent only passes it on."""
        one = self._lessons.get(message.key)
        if one and not one.data and one.via not in (self.agent, message.sender):
            one.waiting.append(message.sender)
            self._request(one)
        else:  # empty if no longer held
            self._send(message.sender, MessageKind.LESSON, message.key, one.data if one else b"")

    def _take_lesson(self, message: Message) -> None:
        """A lesson arrived: keep it, and pass it on to those who wait for it."""
        one = self._lessons.get(message.key)
        if one is None or not one.asked or message.sender != one.via:
            logger.warning("agent %d sent a lesson that nobody asked for", message.sender)
            return
        try:
            if message.error or not message.data:
                raise DamagedData(message.error or f"agent {message.sender} no longer has it")
            check(message.data)
        except DamagedData as error:
            self._fail(one, str(error))
            return
        self._keep(one, message.data)
        waiting, one.waiting, one.asked = one.waiting, [], False
        for agent in waiting:
            self._send(agent, MessageKind.LESSON, message.key, message.data)

    def _fail(self, one: KnownLesson, reason: str) -> None:
        """A lesson did not come: say so here and to those who wait for it."""
        waiting, one.waiting, one.asked, one.failure = one.waiting, [], False, reason
        for agent in waiting:
            logger.warning("agent %d's lesson can't be passed on: %s", one.offer.donor, reason)
            self._send(agent, MessageKind.LESSON, one.offer.key)

    def _keep(self, one: KnownLesson, data: bytes) -> None:
        """Hold a lesson for others; the oldest make room, passed-on ones before own ones."""
        one.data = data
        self._lessons[one.offer.key] = one
        held = [key for key, known in self._lessons.items() if known.data and key[1] > 0]
        held.sort(key=self._is_own)  # stable: the oldest first
        for key in held:  # not those from before this run
            if sum(len(known.data) for known in self._lessons.values()) <= self.cache_bytes:
                break
            if key not in {one.offer.key, *self._wanted}:
                self._lessons[key].data = b""

    # ── going on with others than before, and from a checkpoint ────────────────────────────────

    def known(self) -> tuple[list[Offer], list[Key]]:
        """Every offer that this agent made or heard of, and the lessons that it holds."""
        held = [key for key, one in self._lessons.items() if one.data]
        return [one.offer for one in self._lessons.values()], held

    def recover(self, holders: Sequence[tuple[Offer, int]]) -> None:
        """Know these lessons, each held by the agent that it is named with, and own ones."""
        parents = {holder: bfs_parents(self._near, holder) for _, holder in holders}
        before, self._unsent = self._lessons, []
        self._lessons = {key: one for key, one in before.items() if self._is_own(key)}
        for offer, holder in holders:
            mine = before.get(offer.key) or KnownLesson(offer, -1)
            via = self.agent if holder == self.agent else parents[holder].get(self.agent)
            if (via is not None or mine.data) and not self._is_own(offer.key):
                via = self.agent if via is None else via
                self._lessons[offer.key] = KnownLesson(offer, via, mine.data, fetched=mine.fetched)

    def state_dict(self) -> Columns:
        """Offers and lessons, for a checkpoint."""
        known = list(self._lessons.values())
        state = {
            "known": np.frombuffer(pack_offers([one.offer for one in known]), "|u1"),
            "unsent": np.frombuffer(pack_offers(self._unsent), "|u1"),
            "via": np.array([one.via for one in known], "<i4"),
            "fetched": np.array([one.fetched for one in known], "|u1"),
        }
        held = {f"{k}": np.frombuffer(one.data, "|u1") for k, one in enumerate(known) if one.data}
        return state | with_prefix("held", held)

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave; lessons from before this run stay."""
        self._lessons = {key: one for key, one in self._lessons.items() if key[1] < 0}
        self._unsent = unpack_offers(state["unsent"].tobytes(), MOST_KNOWN)
        held = strip_prefix("held", state)
        for k, offer in enumerate(unpack_offers(state["known"].tobytes(), MOST_KNOWN)):
            data = held[f"{k}"].tobytes() if f"{k}" in held else b""
            via, fetched = int(state["via"][k]), bool(state["fetched"][k])
            self._lessons[offer.key] = KnownLesson(offer, via, data, fetched=fetched)


def alone(on_transfer: OnTransfer = ignore, agent: int = 0) -> Exchange:
    """The exchange of an agent that shares with nobody."""
    return Exchange(agent, set(), Transport(), ShareConfig(), on_transfer=on_transfer)
