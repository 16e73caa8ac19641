"""What an agent does with others: choose lessons, offer its own, swap rows inside a task."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.job import Job
from canal_mpi.membuf.lesson import Lesson, pack, unpack
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.segments import CHOOSERS, choose, cut, join, one_after_another
from canal_mpi.membuf.share import Need, Policy, better
from canal_mpi.record import Recorder
from canal_mpi.types import LAST, Array, Columns, Embed, Learner, Link, Offer, Parcel

EMBEDDED = ("simnet", "wasserstein")


class Sharing:
    """An agent's side of the exchange."""

    def __init__(
        self,
        job: Job,
        number: int,
        link: Link,
        policy: Policy,
        record: Recorder,
        embed: Embed,
        peers: Callable[[int, str], Sequence[int]],
    ) -> None:
        self.job, self.number, self.link = job, number, link
        self.policy, self.record, self._embed, self._peers = policy, record, embed, peers
        self.compares = job.share.policy in EMBEDDED
        self.measure = "cosine" if job.share.policy == "wasserstein" else job.simnet.distance
        self._active: list[int] = []
        self._sent = 0

    def begin(self, task: str, round_: int) -> None:
        """A new task: neighbours that learn it in this round too may swap rows."""
        self.task, self.round, self._sent = task, round_, 0
        self._active = list(self._peers(round_, task)) if self.job.lsc.save else []

    # ── taking ─────────────────────────────────────────────────────────────────────────────────

    def take(self, replay: Replay, embedding: Array, own_score: float) -> list[Lesson]:
        """Fetch what the policy wants of the offers; damaged lessons are refused."""
        self.record.phase("exchanging")
        offers, waited = self.link.offers(), self.link.waited
        if self.job.share.gate == "better":
            offers = better(self.task, own_score, offers)
        nearest = self.job.share.nearest
        need = Need(self.task, self.round, nearest, self.measure, embedding)
        parcels = self.link.fetch(self.policy(need, offers))
        self.record.waited(self.link.waited - waited)
        return [lesson for parcel in parcels if (lesson := self._open(parcel, replay))]

    def _open(self, parcel: Parcel, replay: Replay) -> Lesson | None:
        """A lesson that arrived whole; the ledger notes one that did not."""
        if parcel.refusal:
            self.record.refused(parcel, parcel.refusal)
            return None
        try:
            limit = self.job.share.limit_mb << 20
            lesson = unpack(parcel.data, parcel.offer, replay.spaces, limit)
        except DamagedData as error:
            self.record.refused(parcel, str(error))
            return None
        self.record.received(parcel)
        return lesson

    def embedding(self, rows: Columns, rng: np.random.Generator) -> Array:
        """What the policy compares tasks by; empty where it does not."""
        return self._embed(rows, rng) if self.compares else np.zeros(0, dtype="<f4")

    # ── offering ───────────────────────────────────────────────────────────────────────────────

    def offer(
        self, score: float, replay: Replay, learner: Learner, rng: np.random.Generator
    ) -> None:
        """Tell the audience what this task gave; only own play is offered."""
        self.record.phase("exchanging")
        offer, data, waited = None, b"", self.link.waited
        if len(replay.own):
            rows = self._chosen(replay, learner, rng)
            self.record.sink.save("membuf", f"round-{self.round:02d}-{self.task}", rows)
            if self.link.audience and len(rows["action"]):
                network = learner.network() if self.job.reuse.network else {}
                data = pack(self.number, self.round, self.task, rows, network)
                embedding = self.embedding(rows, rng)
                size = (len(rows["action"]), len(data))
                offer = Offer(self.number, self.round, self.task, score, *size, embedding)
                for agent in self.link.audience:
                    self.record.offered(offer, agent)
        for agent, reason in self.link.publish(offer, data):
            self.record.refused_offer(agent, reason)
        self.record.waited(self.link.waited - waited)

    def _chosen(self, replay: Replay, learner: Learner, rng: np.random.Generator) -> Columns:
        """The segments of own play that go into the lesson."""
        rows, most = replay.own.export_all(), self.job.share.rows
        name = self.job.share.segments
        worth = rows["reward"]
        if name == "td" and len(worth) > most:
            worth = replay.errors(rows, learner.errors, self.task)
        return choose(rows, most, CHOOSERS[name], worth, rng)

    # ── inside a task ──────────────────────────────────────────────────────────────────────────

    def swap(self, replay: Replay, done: int) -> None:
        """Every `lsc.load` steps: give new rows to neighbours on this task, take in theirs."""
        settings, envs = self.job.lsc, self.job.train.envs
        if not self._active or done % settings.load >= envs:
            return
        ready = done // settings.save * settings.save // envs * envs
        ages = ((done - self._sent) // envs, (done - ready) // envs)
        fresh = one_after_another([_moves(rows, *ages) for rows in replay.own.export_streams()])
        self._sent = ready
        if len(fresh["flags"]):
            self._trade(replay, pack(self.number, self.round, self.task, fresh, {}))

    def restart(self) -> None:
        """Play begins: nothing of it has been swapped yet."""
        self._sent = 0

    def finish_swaps(self, replay: Replay) -> None:
        """Say to those who still swap that this agent is done with the task."""
        if self._active:
            self._trade(replay, b"")
        self._active = []

    def _trade(self, replay: Replay, data: bytes) -> None:
        waited, peers = self.link.waited, self._active
        answers = zip(peers, self.link.trade(peers, data), strict=True)
        self.record.waited(self.link.waited - waited)
        self._active = []
        for agent, answer in answers:
            if answer and data:
                self._active.append(agent)
            if answer:
                offer = Offer(agent, self.round, self.task, nan, -1, len(answer))
                lesson = self._open(Parcel(offer, answer, 0.0, 0.0), replay)
                if lesson:
                    replay.join(lesson.rows)
                    whole = replace(offer, rows=len(lesson.rows["action"]))
                    self.record.swapped(whole)


def _moves(rows: Columns, first: int, last: int) -> Columns:
    """The moves from the `first`-newest on, without the `last` newest ones."""
    places = np.flatnonzero((rows["flags"] & LAST) == 0)
    here = places[max(len(places) - first, 0) : len(places) - last]
    if not len(here):
        return join(rows, [])
    start, end = int(here[0]), int(here[-1]) + 1
    pieces = cut(rows["flags"], len(rows["flags"]))
    return join(rows, [(max(a, start), min(b, end)) for a, b in pieces if a < end and b > start])
