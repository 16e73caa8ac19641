"""An agent's desk in the exchange: offers first, then only what is wanted, relayed where needed.

No MPI here: letters leave and arrive through a `Carrier`, so ranks, threads and an agent alone
share one desk. `poll` answers letters and never waits; it is called at every step of the agent.

In rounds an offer travels one hop an exchange and counts from the next round on, whenever its
letter came; with the free clock it counts, and is passed on, as soon as it is there.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from time import monotonic
from typing import NamedTuple, Protocol

import numpy as np

from canal_mpi.columns import check
from canal_mpi.errors import DamagedData
from canal_mpi.log import logger
from canal_mpi.state import inside, under
from canal_mpi.topology.graphs import Edges
from canal_mpi.topology.offers import (
    columns_to_offers,
    offers_to_columns,
    pack_offers,
    unpack_offers,
)
from canal_mpi.topology.reach import first_tellers
from canal_mpi.types import GRADIENTS, SWAPS, WEIGHTS, Columns, Key, Moved, Offer, Parcel

OFFERS, WANT, LESSON = 1, 2, 3  # kinds of letters, beside what is traded
BROKEN = b"broken"  # stands for a traded message that did not arrive whole
KINDS = (OFFERS, WANT, LESSON, SWAPS, WEIGHTS, GRADIENTS)


class Letter(NamedTuple):
    """What one agent writes to another."""

    sender: int
    kind: int
    key: Key  # the lesson it is about
    round: int  # of the sender
    data: bytes = b""
    trouble: str = ""  # why the data did not arrive whole


class Carrier(Protocol):
    """Brings letters, in order for each pair of agents, and never blocks but in `pause`."""

    received: int  # bytes so far

    def send(self, to: int, letter: Letter) -> None:
        """Start sending."""

    def poll(self) -> list[Letter]:
        """What has arrived whole."""

    def settle(self) -> None:
        """Wait until everything sent has left."""

    def pause(self, turn: int, peer: int, phase: str) -> None:
        """Sleep, the longer the more turns; may raise where waiting is hopeless."""


@dataclass(frozen=True)
class Terms:
    """The rules of the exchange."""

    free: bool = False  # nobody waits for anybody's round
    relay: bool = True  # pass on others' offers and lessons
    patience: float = 60.0  # seconds without a byte after which a lesson is given up
    hold: int = 1 << 30  # bytes of lessons that are kept for others
    tasks: Collection[str] = ()  # offers of other tasks are refused; empty: any


IN_ROUNDS = Terms()


class Heard(NamedTuple):
    """An offer and the neighbour that told of it."""

    offer: Offer
    via: int


@dataclass
class Asked:
    """A lesson on its way."""

    round: int
    start: float = field(default_factory=monotonic)


class Desk:
    """Meets `Link`."""

    def __init__(
        self, agent: int, edges: Edges, carrier: Carrier, terms: Terms = IN_ROUNDS
    ) -> None:
        self.agent, self.carrier, self.terms = agent, carrier, terms
        self.sources: Sequence[int] = sorted(a for a, b in edges if b == agent)
        self.audience: Sequence[int] = sorted(b for a, b in edges if a == agent)
        self.note: Callable[[Moved], None] = lambda moved: None
        self.round, self.waited = 0, 0.0
        self._edges, self._heirs = edges, dict[int, list[int]]()
        self._agents = {agent for edge in edges for agent in edge}
        self._shelf: dict[Key, bytes] = {}  # lessons held, the oldest first
        self._heard: dict[Key, Heard] = {}
        self._own: list[Offer] = []  # of this agent
        self._news: list[Offer] = []  # offers to pass on
        self._early: dict[tuple[int, int], Letter] = {}  # news by sender and round
        self._asked: dict[Key, Asked] = {}
        self._owed: dict[Key, list[tuple[int, int]]] = {}  # who waits for a relayed lesson
        self._failed: dict[Key, str] = {}
        self._taken: set[Key] = set()  # lessons that this agent itself asked for
        self._wanted: set[Key] = set()  # lessons that are being fetched: they stay until then
        self._traded: dict[tuple[int, int], deque[Letter]] = {}
        self._lock = RLock()  # threads share a carrier

    # ── the agent's side ───────────────────────────────────────────────────────────────────────

    def begin(self, round_: int) -> None:
        """A new round of this agent; what was traded in rounds before is void."""
        with self._lock:
            self.round = round_
            for letters in self._traded.values():
                fresh = [letter for letter in letters if letter.round >= round_]
                letters.clear()
                letters.extend(fresh)

    def stock(self, offers: Sequence[Offer], lessons: dict[Key, bytes], holder: int) -> None:
        """Lessons from before this run: everybody knows of them, `holder` has them."""
        for offer in offers:
            self._heard[offer.key] = Heard(offer, holder)
        self._shelf |= lessons

    def publish(self, offer: Offer | None, data: bytes) -> None:
        """Offer this round's lesson and pass on others'; in rounds, hear the neighbours' too."""
        with self._lock:
            if offer is not None:
                self._keep(offer.key, data)
                self._own.append(offer)
                self._news.append(offer)
            self._tell()
        if not self.terms.free:
            start = monotonic()
            for agent in self.sources:
                phase = "the exchange of offers"
                self._until(partial(self._early.get, (agent, self.round)), agent, phase)
            self.waited += monotonic() - start
            with self._lock:
                for agent in self.sources:
                    self._listen(self._early.pop((agent, self.round)))

    def offers(self) -> list[Offer]:
        """Everything heard so far, in an order that does not depend on arrival."""
        self.poll()
        with self._lock:
            return [self._heard[key].offer for key in sorted(self._heard)]

    def fetch(self, wanted: Sequence[Offer]) -> list[Parcel]:
        """The wanted lessons, or why they did not come; waits for the bytes alone."""
        start = monotonic()
        with self._lock:
            self._wanted = {offer.key for offer in wanted}
            known = [offer for offer in wanted if offer.key in self._heard]
            missing = [offer.key for offer in known if offer.key not in self._shelf]
            for offer in known:
                if offer.key not in self._taken:
                    via = self._heard[offer.key].via
                    self.note(Moved("request", offer, self.agent, via, self.round))
            for key in missing:
                self._failed.pop(key, None)
                self._ask(key, self.round)
        for key in missing:
            via = self._heard[key].via
            phase = "the exchange of lessons"
            patience = self.terms.patience if self.terms.free else 0.0  # rounds wait for bits
            if not self._until(partial(self._settled, key), via, phase, patience):
                self._give_up(key, via)
        with self._lock:
            self._wanted = set()
            return [self._parcel(offer, start, offer.key in missing) for offer in wanted]

    def _parcel(self, offer: Offer, start: float, moved: bool) -> Parcel:
        """What came of a wanted lesson; its arrival is told of once, also if it was relayed."""
        key, seconds = offer.key, monotonic() - start
        data, refusal = self._shelf.get(key, b""), self._failed.get(key, "")
        via = self._heard[key].via if key in self._heard else self.agent
        if not data and not refusal:
            refusal = "there was no room for it" if key in self._heard else "nobody offered it"
        if data and key not in self._taken:
            self._taken.add(key)
            size = len(data) if moved else 0
            self.note(Moved("transfer", offer, via, self.agent, self.round, size, seconds))
        return Parcel(offer, data, seconds, 0.0, "" if data else refusal, via)

    def trade(self, peers: Sequence[int], data: bytes, kind: int) -> list[tuple[int, bytes]]:
        """Swap messages with neighbours on the same task: one each in rounds, else what came."""
        with self._lock:
            for agent in peers:
                self._send(agent, kind, (self.agent, self.round), self.round, data)
        if self.terms.free:
            self.poll()
            with self._lock:
                return self._arrived(peers, kind)
        start = monotonic()
        for agent in peers:
            phase = "sharing inside a task"
            self._until(partial(self._traded.get, (kind, agent)), agent, phase)
        self.waited += monotonic() - start
        with self._lock:
            return [(agent, self._traded[kind, agent].popleft().data) for agent in peers]

    def part(self, peers: Sequence[int], kind: int) -> None:
        """Say to neighbours on the same task that no more comes, without waiting for theirs."""
        with self._lock:
            for agent in peers:
                self._send(agent, kind, (self.agent, self.round), self.round)

    def settle(self) -> None:
        """Wait until everything sent has left, before the agents part."""
        self.carrier.settle()

    def poll(self) -> None:
        """Take in letters and answer them; never waits."""
        with self._lock:
            for letter in self.carrier.poll():
                self._answer(letter)

    def _until(
        self, done: Callable[[], object], peer: int, phase: str, patience: float = 0.0
    ) -> bool:
        """Poll until something is there; False after so many seconds without a byte."""
        turn, heard, since = 0, self.carrier.received, monotonic()
        while True:
            self.poll()
            if done():
                return True
            if self.carrier.received != heard:
                turn, heard, since = 0, self.carrier.received, monotonic()
            if patience and monotonic() - since > patience:
                return False
            self.carrier.pause(turn, peer, phase)
            turn += 1

    def _arrived(self, peers: Sequence[int], kind: int) -> list[tuple[int, bytes]]:
        """With the free clock: everything that peers sent in this agent's round."""
        letters = [letter for agent in peers for letter in self._traded.pop((kind, agent), ())]
        return [(x.sender, x.data) for x in letters if x.round == self.round]

    def _settled(self, key: Key) -> bool:
        return key not in self._asked

    def _give_up(self, key: Key, via: int) -> None:
        with self._lock:
            reason = f"agent {via} offered it and did not deliver in {self.terms.patience:g} s"
            self._fail(key, reason)

    # ── letters ────────────────────────────────────────────────────────────────────────────────

    def _answer(self, letter: Letter) -> None:
        if letter.kind == OFFERS:
            if self.terms.free:
                self._listen(letter)
                self._tell()
            else:
                self._early[letter.sender, letter.round] = letter
        elif letter.kind == WANT:
            self._serve(letter)
        elif letter.kind == LESSON:
            self._accept(letter)
        else:
            self._take_traded(letter)

    def _take_traded(self, letter: Letter) -> None:
        """Keep what a neighbour traded; with the free clock only its newest weights."""
        if letter.trouble:
            logger.warning("what agent %d sent is refused: %s", letter.sender, letter.trouble)
            letter = letter._replace(data=BROKEN)  # an empty one would be a goodbye
        line = self._traded.setdefault((letter.kind, letter.sender), deque())
        if self.terms.free and letter.kind == WEIGHTS:
            line.clear()
        line.append(letter)

    def _tell(self) -> None:
        """Send the news to the audience; in rounds also when there is none."""
        news, self._news = self._news, []
        for agent in self.audience:
            fresh = [offer for offer in news if agent in self._tells(offer.donor)]
            for offer in fresh:
                self.note(Moved("offer", offer, self.agent, agent, self.round, offer.bytes))
            if fresh or not self.terms.free:
                self._send(agent, OFFERS, (0, 0), self.round, pack_offers(fresh))

    def _tells(self, donor: int) -> list[int]:
        """The neighbours that hear of a donor's lessons from this agent; nobody hears twice."""
        if donor not in self._heirs:
            tellers = first_tellers(self._edges, donor)
            self._heirs[donor] = [b for b, a in tellers.items() if a == self.agent]
        return self._heirs[donor]

    def _listen(self, letter: Letter) -> None:
        """Note the offers of a neighbour; what is wrong is refused."""
        try:
            if letter.trouble:
                raise DamagedData(letter.trouble)
            for offer in unpack_offers(letter.data):
                self._check(offer, letter.sender)
                if offer.key not in self._heard and offer.donor != self.agent:
                    self._heard[offer.key] = Heard(offer, letter.sender)
                    self._news += [offer] if self.terms.relay else []
        except DamagedData as error:
            logger.warning("an offer of agent %d is refused: %s", letter.sender, error)
            odd = Offer(letter.sender, self.round, "", float("nan"), 0, 0)
            ends = (letter.sender, self.agent, self.round)
            self.note(Moved("refusal", odd, *ends, reason=str(error)))

    def _check(self, offer: Offer, sender: int) -> None:
        if offer.donor not in self._agents:
            raise DamagedData(f"offer of agent {offer.donor}, which does not exist")
        if self.terms.tasks and offer.task not in self.terms.tasks:
            raise DamagedData(f"offer of the task '{offer.task}', which this job does not have")
        if not self.terms.relay and offer.donor != sender:
            raise DamagedData(f"offer of agent {offer.donor}, passed on though share.relay is off")

    def _ask(self, key: Key, round_: int) -> None:
        """Ask the neighbour that told of a lesson for it, once."""
        if key not in self._asked:
            self._asked[key] = Asked(round_)
            self._send(self._heard[key].via, WANT, key, round_)

    def _serve(self, letter: Letter) -> None:
        """Send a lesson, or get it first where this agent only passes it on."""
        key, known = letter.key, self._heard.get(letter.key)
        if key in self._shelf:
            self._send(letter.sender, LESSON, key, letter.round, self._shelf[key])
        elif known and self.terms.relay and known.via not in (self.agent, letter.sender):
            self._owed.setdefault(key, []).append((letter.sender, letter.round))
            self._ask(key, letter.round)
        else:
            self._send(letter.sender, LESSON, key, letter.round)

    def _accept(self, letter: Letter) -> None:
        """A lesson arrived: keep it, and pass it on to those who wait for it."""
        key, asked = letter.key, self._asked.get(letter.key)
        if asked is None or letter.sender != self._heard[key].via:
            logger.warning("agent %d sent a lesson that nobody asked for", letter.sender)
            return
        offer = self._heard[key].offer
        reason = letter.trouble or self._flaw(letter)
        if reason:
            self._fail(key, reason)
            return
        del self._asked[key]
        self._keep(key, letter.data)
        owed = self._owed.pop(key, ())
        for agent, round_ in owed:
            self._send(agent, LESSON, key, round_, letter.data)
        if owed:
            ends = (letter.sender, self.agent, asked.round)
            self.note(Moved("relay", offer, *ends, len(letter.data), monotonic() - asked.start))

    def _flaw(self, letter: Letter) -> str:
        if not letter.data:
            return f"agent {letter.sender} no longer has it"
        try:
            check(letter.data)
        except DamagedData as error:
            return str(error)
        return ""

    def _fail(self, key: Key, reason: str) -> None:
        """A lesson did not come: say so here and to those who wait for it."""
        asked = self._asked.pop(key, None)
        self._failed[key] = reason
        for agent, round_ in self._owed.pop(key, ()):
            offer, via = self._heard[key]
            logger.warning("agent %d's lesson can't be passed on: %s", offer.donor, reason)
            round_ = asked.round if asked else round_
            self.note(Moved("relay", offer, via, self.agent, round_, reason=reason))
            self._send(agent, LESSON, key, round_)

    def _send(self, to: int, kind: int, key: Key, round_: int, data: bytes = b"") -> None:
        self.carrier.send(to, Letter(self.agent, kind, key, round_, data))

    def _keep(self, key: Key, data: bytes) -> None:
        """Hold a lesson for others; the oldest make room, passed-on ones before own ones."""
        self._shelf[key] = data
        while sum(map(len, self._shelf.values())) > self.terms.hold and len(self._shelf) > 1:
            stay = {key, *self._wanted}
            own = [k for k in self._shelf if k[1] > 0 and k not in stay]  # those from before stay
            foreign = [k for k in own if k[0] != self.agent]
            if not (foreign or own):
                break
            del self._shelf[(foreign or own)[0]]

    # ── going on with others than before ───────────────────────────────────────────────────────

    def known(self) -> tuple[list[Offer], list[Key]]:
        """Every offer that this agent made or heard of, and the lessons that it holds."""
        offers = [*self._own, *(heard.offer for heard in self._heard.values())]
        return offers, list(self._shelf)

    def regroup(self, known: Sequence[Heard]) -> None:
        """Know these lessons, each held by the agent that it is named with, and nothing else."""
        ways = {holder: first_tellers(self._edges, holder) for _, holder in known}
        self._heard, self._news = {}, []
        for offer, holder in known:
            via = self.agent if holder == self.agent else ways[holder].get(self.agent)
            near = self.terms.relay or via in (holder, self.agent)
            if via is not None and near and offer.donor != self.agent:
                self._heard[offer.key] = Heard(offer, via)

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def state(self) -> Columns:
        """Offers and lessons, for a checkpoint at the end of a round."""
        heard = list(self._heard.values())
        held = under("heard", offers_to_columns([h.offer for h in heard]))
        held |= under("news", offers_to_columns(self._news))
        held |= under("own", offers_to_columns(self._own))
        for (donor, round_), data in self._shelf.items():
            held[f"shelf/{donor}/{round_}"] = np.frombuffer(data, dtype=np.uint8)
        taken = np.array(sorted(self._taken), dtype="<i4").reshape(-1, 2)
        return held | {"via": np.array([h.via for h in heard], dtype="<i4"), "taken": taken}

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        offers, via = columns_to_offers(inside("heard", state)), state["via"].tolist()
        before = {key: heard for key, heard in self._heard.items() if key[1] < 0}
        self._heard = before | {o.key: Heard(o, v) for o, v in zip(offers, via, strict=True)}
        self._news = columns_to_offers(inside("news", state))
        self._own = columns_to_offers(inside("own", state))
        self._taken = {(donor, round_) for donor, round_ in state["taken"].tolist()}
        self._shelf = {key: data for key, data in self._shelf.items() if key[1] < 0}
        for name, data in inside("shelf", state).items():
            donor, round_ = name.split("/")
            self._shelf[int(donor), int(round_)] = data.tobytes()
