"""What an agent does with others: choose lessons, offer its own, swap rows inside a task."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan

import numpy as np

from canal_mpi.agent.recorder import Recorder
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.interfaces import LAST, Array, Columns, Embed, FetchResult, Learner, Link, Offer
from canal_mpi.membuf.lesson import Lesson, pack, unpack
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.selection import Need, Policy, cut, join, one_after_another
from canal_mpi.settings import Job
from canal_mpi.state import with_prefix

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
        packs: bool = True,
    ) -> None:
        self.job, self.number, self.link, self.packs = job, number, link, packs
        self.policy, self.record, self._embed, self._peers = policy, record, embed, peers
        self.compares = job.share.policy in EMBEDDED
        self.measure = "cosine" if job.share.policy == "wasserstein" else job.simnet.distance
        self._partners: list[int] = []  # neighbours that swap rows of this task
        self._sent = 0  # own steps whose rows they have
        self.swaps = False  # whether there were any when the task began

    def begin(self, task: str, round_: int) -> None:
        """A new task: neighbours that learn it in this round too may swap rows."""
        self.task, self.round, self._sent = task, round_, 0
        self.link.begin(round_)
        swaps = self.job.row_exchange.save_interval
        self._partners = list(self._peers(round_, task)) if swaps else []
        self.swaps = bool(self._partners)

    # ── taking ─────────────────────────────────────────────────────────────────────────────────

    def take(self, replay: Replay, embedding: Array) -> list[Lesson]:
        """Fetch what the policy wants of the offers; damaged lessons are refused."""
        self.record.phase("exchanging")
        most = (self.job.share.nearest, self.job.share.donors)
        need = Need(self.task, self.round, *most, self.measure, embedding)
        offers = self.link.offers()
        wanted = self.policy(need, offers)
        known = {offer.key for offer in offers}
        good = isinstance(wanted, list | tuple)
        if not good or any(getattr(one, "key", None) not in known for one in wanted):
            name = self.job.share.policy
            raise UsageError(
                f"policy '{name}' gave {wanted!r:.60}; expected a list of offers it was shown."
            )
        found = self.link.fetch(wanted)
        self.note_waiting()
        return [lesson for fetched in found if (lesson := self._open(fetched, replay))]

    def _open(self, fetched: FetchResult, replay: Replay) -> Lesson | None:
        """A lesson that arrived whole; the ledger notes one that did not."""
        if fetched.refusal:
            self.record.refused(fetched, fetched.refusal)
            return None
        try:
            limit = self.job.share.max_message_mb << 20
            lesson = unpack(fetched.data, fetched.offer, replay.spaces, limit)
        except DamagedData as error:
            self.record.refused(fetched, str(error))
            return None
        return replace(lesson, sender=fetched.sender, seconds=fetched.seconds)

    def embedding(self, rows: Columns, rng: np.random.Generator) -> Array:
        """What the policy compares tasks by; empty where it does not."""
        return self._embed(rows, rng) if self.compares else np.zeros(0, dtype="<f4")

    # ── offering ───────────────────────────────────────────────────────────────────────────────

    def offer(self, replay: Replay, learner: Learner, rng: np.random.Generator) -> None:
        """Tell the neighbours what this task gave; only own play is offered."""
        self.record.phase("saving")
        rows, offer, data = replay.own.export(self.job.share.rows), None, b""
        network = learner.get_weights() if self.job.reuse.network else {}
        if len(rows["action"]):
            self._save(rows, network)
        self.record.phase("exchanging")
        if self.link.out_neighbors and len(rows["action"]):
            embedding = self.embedding(rows, rng)
            data = pack(self.number, self.round, self.task, rows, network, self.packs)
            score, std_error, episodes = self.record.late_returns()
            about = (self.number, self.round, self.task, score)
            offer = Offer(*about, len(rows["action"]), len(data), embedding, std_error, episodes)
        self.link.publish(offer, data)
        self.note_waiting()

    def _save(self, rows: Columns, network: Columns) -> None:
        """Keep the lesson on disk, for later runs too."""
        score, std_error, episodes = self.record.late_returns()
        about: Columns = {
            "donor": np.array([self.number], dtype="<i4"),
            "round": np.array([self.round], dtype="<i4"),
            "task": np.array([self.task.encode()], dtype="S64"),
            "score": np.array([score], dtype="<f8"),
            "std_error": np.array([std_error], dtype="<f8"),
            "episodes": np.array([episodes], dtype="<i8"),
        }
        name = f"round-{self.round:02d}-{self.task}"
        self.record.sink.save("membuf", name, rows | with_prefix("network", network) | about)

    # ── inside a task ──────────────────────────────────────────────────────────────────────────

    def swap(self, replay: Replay, done: int) -> None:
        """While playing: give new rows to neighbours on this task, take in theirs."""
        settings, envs = self.job.row_exchange, self.job.train.num_envs
        if not self._partners or done % settings.load_interval >= envs:
            return
        ready = done // settings.save_interval * settings.save_interval // envs * envs
        ages = ((done - self._sent) // envs, (done - ready) // envs)
        fresh = one_after_another([_moves(rows, *ages) for rows in replay.own.export_streams()])
        self._sent = ready
        if len(fresh["flags"]):
            self._trade(replay, pack(self.number, self.round, self.task, fresh, {}))

    def finish_swaps(self) -> None:
        """Say to those who still swap that this agent is done with the task."""
        self.link.leave(self._partners)
        self._partners = []

    def note_waiting(self) -> None:
        """Time that was lost to others belongs to no phase of work."""
        self.record.clock.waited(self.link.waited)

    def _trade(self, replay: Replay, data: bytes) -> None:
        answers = self.link.trade(self._partners, data)
        self.note_waiting()
        for agent, answer in answers:
            if not answer:  # a goodbye
                self._partners = [one for one in self._partners if one != agent]
                continue
            offer = Offer(agent, self.round, self.task, nan, -1, len(answer))
            lesson = self._open(FetchResult(offer, answer, 0.0, sender=agent), replay)
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
