"""The life of an agent, on one screen: act, store, learn, share, record."""

from collections.abc import Sequence
from math import exp, floor, nan
from time import perf_counter

import numpy as np

from canal_mpi import seeding
from canal_mpi.config import Job
from canal_mpi.errors import DamagedData
from canal_mpi.membuf.lesson import pack, unpack
from canal_mpi.membuf.replay import Replay
from canal_mpi.record import Recorder
from canal_mpi.types import (
    CUT,
    ENDED,
    Array,
    Columns,
    EnvMaker,
    Learner,
    Link,
    Offer,
    Parcel,
    Policy,
)


class Agent:
    """Learns its tasks one after the other, from play or from neighbours' lessons."""

    def __init__(
        self,
        job: Job,
        number: int,
        order: Sequence[str],
        *,
        envs: EnvMaker,
        learner: Learner,
        replay: Replay,
        link: Link,
        policy: Policy,
        record: Recorder,
    ) -> None:
        self.job, self.number, self.order = job, number, order
        self.envs, self.learner, self.replay = envs, learner, replay
        self.link, self.policy, self.record = link, policy, record

    def run(self) -> None:
        """Every task of the order: a round each."""
        for round_, task in enumerate(self.order, 1):
            self.record.begin(task, round_, self.job.train.frames)
            self.learn_task(task, round_)
            self.record.sink.flush(round_)

    def learn_task(self, task: str, round_: int) -> None:
        """One round: take lessons, train, be evaluated, offer what was experienced."""
        donors, lessons = self.take_lessons(task)
        self.learner.begin(task)
        self.replay.begin(lessons)
        self.train(task, plays=not lessons)
        score = self.evaluate(task, round_)
        self.offer_lesson(task, round_, score)
        self.record.learnt(donors, score)
        self.record.sink.save("checkpoints", "learner", self.learner.state())

    def train(self, task: str, plays: bool) -> None:
        """The training loop; without play it learns from lessons alone."""
        self.record.phase("training")
        explore, draws = self.stream(task, "explore"), self.stream(task, "sample")
        env = self.envs(task, "train", self.number) if plays else None
        count = env.count if env else 1
        if env:
            obs = env.reset()
            self.replay.own.start(obs)
        steps, done = self.job.train.frames, 0
        while done < steps:
            before, done = done, min(done + count, steps)
            start = perf_counter()
            if env:
                actions = self.choose_actions(obs, before, explore)
                env.send(actions)
            sent = perf_counter()
            if self.ready:
                for _ in range(self.updates_due(before, done)):
                    self.record.update(self.learner.learn(self.replay.sample(draws)))
            learnt = perf_counter()
            if env:
                step = env.receive()
                self.replay.own.add(actions, step)
                self.record.step(step)
                obs = step.start
            self.note_times(before, done, sent - start, learnt - sent, perf_counter() - learnt)
        if env:
            env.close()

    def choose_actions(self, obs: Array, step: int, rng: np.random.Generator) -> Array:
        """Greedy, or at random with the probability that the schedule gives."""
        random = rng.random(len(obs)) < self.epsilon(step)
        actions = rng.integers(self.replay.spaces.actions, size=len(obs))
        if not random.all():
            actions = np.where(random, actions, self.learner.act(obs))
        return actions

    def epsilon(self, step: int) -> float:
        """Probability of a random action after that many steps of the task."""
        explore = self.job.explore
        return explore.end + (explore.start - explore.end) * exp(-step / explore.decay)

    @property
    def ready(self) -> bool:
        """Whether the replay holds enough to learn from."""
        started = bool(self.replay.lessons) or len(self.replay.own) >= self.job.learn.starts
        return started and self.replay.ready

    def updates_due(self, before: int, done: int) -> int:
        """Updates that belong to the steps from `before` to `done`."""
        ratio = self.job.learn.updates_per_step
        return floor(done * ratio) - floor(before * ratio)

    def note_times(
        self, before: int, done: int, acting: float, learning: float, playing: float
    ) -> None:
        """Add up where the time went; beat; every so often write a row of /train."""
        record, every = self.record, self.job.train.log_every
        record.env_seconds += acting + playing
        record.learn_seconds += learning
        record.progress.step = done
        record.progress.total_steps += done - before
        if before // every != done // every or done == self.job.train.frames:
            record.training(done, self.epsilon(done) if record.env_steps else 0.0)
        record.beat()

    def evaluate(self, task: str, round_: int) -> float:
        """Mean return of the greedy policy, from random streams of its own."""
        settings, scores = self.job.evaluation, []
        if not settings.episodes:
            return nan
        self.record.phase("evaluating")
        rng = self.stream(task, f"evaluate-{round_}")
        env = self.envs(task, f"evaluate-{round_}", self.number)
        for episode in range(settings.episodes):
            obs, total, length, over = env.reset(), 0.0, 0, False
            while not over and length < settings.max_steps:
                actions = self.learner.act(obs)
                if rng.random() < settings.epsilon:
                    actions[0] = rng.integers(self.replay.spaces.actions)
                env.send(actions)
                step = env.receive()
                obs, total, length = step.start, total + float(step.reward[0]), length + 1
                over = bool(step.flags[0] & (ENDED | CUT))
                self.record.beat()
            self.record.evaluation(episode, total, length)
            scores.append(total)
        env.close()
        return float(np.mean(scores))

    def take_lessons(self, task: str) -> tuple[list[int], list[Columns]]:
        """Fetch what the policy wants of the offers; damaged lessons are refused."""
        self.record.phase("exchanging")
        waited = self.link.waited
        parcels = self.link.fetch(self.policy(task, self.link.offers()))
        self.record.waited(self.link.waited - waited)
        opened = [(parcel.offer.donor, self.open_parcel(parcel)) for parcel in parcels]
        taken = [(donor, rows) for donor, rows in opened if rows is not None]
        self.record.progress.source = taken[0][0] if taken else -1
        return [donor for donor, _ in taken], [rows for _, rows in taken]

    def open_parcel(self, parcel: Parcel) -> Columns | None:
        """The rows of a lesson that arrived whole; the ledger notes it either way."""
        rows, refusal = None, parcel.refusal
        if not refusal:
            try:
                limit = self.job.share.limit_mb << 20
                rows = unpack(parcel.data, parcel.offer, self.replay.spaces, limit)
            except DamagedData as error:
                refusal = str(error)
        self.record.received(parcel, refusal)
        return rows

    def offer_lesson(self, task: str, round_: int, score: float) -> None:
        """Tell the audience what this task gave; only own play is offered."""
        self.record.phase("exchanging")
        offer, data, waited = None, b"", self.link.waited
        if len(self.replay.own):
            rows = self.replay.own.export(self.job.share.rows)
            self.record.sink.save("membuf", f"round-{round_:02d}-{task}", rows)
            if self.link.audience:
                data = pack(self.number, round_, task, rows)
                offer = Offer(self.number, round_, task, score, len(rows["action"]), len(data))
                for agent in self.link.audience:
                    self.record.offered(offer, agent)
        for agent, reason in self.link.publish(offer, data):
            self.record.refused_offer(agent, reason)
        self.record.waited(self.link.waited - waited)

    def stream(self, task: str, purpose: str) -> np.random.Generator:
        """A random stream of this agent for one purpose."""
        return seeding.stream(self.job.seed, self.number, task, purpose)
