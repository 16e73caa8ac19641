"""What an agent writes down: the rows of the results, and the progress that others see."""

from collections.abc import Callable, Sequence
from math import nan, sqrt
from time import perf_counter

import numpy as np

from canal_mpi.interfaces import (
    TERMINATED,
    TRUNCATED,
    Beat,
    Columns,
    FetchResult,
    Offer,
    Progress,
    Sink,
    Step,
    TransferEvent,
)
from canal_mpi.state import record_from_columns, record_to_columns, strip_prefix, with_prefix

OVER = TERMINATED | TRUNCATED
LATE = 0.75  # of the own steps: later episodes tell how good an agent became
FEWEST = 3  # such episodes, or the score is unknown


class Recorder:
    """Counts and times one task after the other and writes rows to a sink."""

    def __init__(
        self,
        sink: Sink,
        beat: Beat,
        agent: int,
        row_bytes: int,
        throttle: Callable[[], None] = lambda: None,
    ) -> None:
        self.sink, self.agent, self._beat, self._row_bytes = sink, agent, beat, row_bytes
        self._throttle = throttle  # called after each piece of work, to emulate slow devices
        self.progress = Progress()
        self._began = self._phase_began = perf_counter()
        self._spent: dict[str, float] = {}
        self.late = 0.0  # seconds waited between two rounds; counts for the next one
        self._waited_before = self.wait_seconds = 0.0
        self.begin("", 0)

    def begin(self, task: str, round_: int) -> None:
        """A new task: all counts start again."""
        self.task, self.round, self._start = task, round_, perf_counter()
        self.env_steps = self.probe_steps = self.updates = 0
        self._turns = 0
        self.unwritten = False  # turns that no row of /train tells of yet
        self._fetched: dict[tuple[int, int], FetchResult] = {}
        self._exam: list[tuple[float, int]] = []
        self.env_seconds = self.learn_seconds = 0.0
        self._task_wait, self.late = self.late, 0.0
        self._spent.clear()
        self._losses: list[float] = []
        self._ended: list[tuple[int, float]] = []  # own steps and return of every episode
        self._returns: list[float] = []  # of the running episode of every environment
        self._lengths: list[int] = []
        progress = self.progress
        progress.round, progress.task, progress.source = round_, task, -1
        progress.step = progress.steps = 0
        progress.loss = progress.mean_return = nan

    def break_off(self) -> None:
        """The running episodes are lost: they count for nothing."""
        self._returns.clear()
        self._lengths.clear()

    def state_dict(self) -> Columns:
        """All counts of the running task."""
        counts = [self.env_steps, self.probe_steps, self.updates, self._turns]
        times = [self.env_seconds, self.learn_seconds, self.wait_seconds, self._task_wait]
        fetched = [(*key, f.seconds, f.wait_seconds, f.sender) for key, f in self._fetched.items()]
        return with_prefix("progress", record_to_columns(self.progress)) | {
            "counts": np.array([*counts, self.unwritten], dtype="<i8"),
            "times": np.array([*times, perf_counter() - self._start]),
            "fetched": np.array(fetched, dtype="<f8").reshape(-1, 5),
            "losses": np.array(self._losses, dtype="<f8"),
            "ended": np.array(self._ended, dtype="<f8").reshape(-1, 2),
            "exam": np.array(self._exam, dtype="<f8").reshape(-1, 2),
            "returns": np.array(self._returns, dtype="<f8"),
            "lengths": np.array(self._lengths, dtype="<i8"),
        }

    def load_state_dict(self, state: Columns, offers: Sequence[Offer]) -> None:
        """Go on counting where `state` was taken; the offers are those of the lessons held."""
        *counts, unwritten = (int(count) for count in state["counts"])
        self.env_steps, self.probe_steps, self.updates, self._turns = counts
        *times, elapsed = (float(seconds) for seconds in state["times"])
        self.env_seconds, self.learn_seconds, self.wait_seconds, self._task_wait = times
        self.unwritten, self._start = bool(unwritten), perf_counter() - elapsed
        known = {offer.key: offer for offer in offers}
        for donor, round_, seconds, waited, sender in state["fetched"].tolist():
            key = (int(donor), int(round_))
            self._fetched[key] = FetchResult(known[key], b"", seconds, waited, sender=int(sender))
        self._losses = state["losses"].tolist()
        self._ended = [(int(step), total) for step, total in state["ended"].tolist()]
        self._exam = [(score, int(length)) for score, length in state["exam"].tolist()]
        self._returns, self._lengths = state["returns"].tolist(), state["lengths"].tolist()
        vars(self.progress).update(
            vars(record_from_columns(Progress, strip_prefix("progress", state)))
        )

    def plan(self, turns: int) -> None:
        """The training loop is about to turn at most that often."""
        self.progress.step, self.progress.steps = 0, turns

    def turn(self, steps: int, every: int) -> bool:
        """So many more turns of the training loop; whether a row of /train is due."""
        before, progress = self._turns, self.progress
        self._turns = turns = before + steps
        self.unwritten = True
        progress.step += steps
        progress.total_steps += steps
        return before // every != turns // every

    def phase(self, name: str) -> None:
        """Say what the agent is about to do; the time is noted for what it did before."""
        now, before = perf_counter(), self.progress.phase
        self._spent[before] = self.spent(before) + now - self._phase_began
        self.progress.phase, self._phase_began = name, now
        self.beat()

    def spent(self, phase: str) -> float:
        """Seconds of this task in a phase that is over, without waiting."""
        return self._spent.get(phase, 0.0)

    def beat(self) -> None:
        """Show that the agent is alive."""
        self._throttle()
        self._beat(self.progress)

    def waited(self, seconds: float) -> None:
        """Time lost to others."""
        self.wait_seconds += seconds
        self._task_wait += seconds
        self._phase_began += seconds
        self._waited_before += seconds
        self.progress.wait_share = self._waited_before / (perf_counter() - self._began)

    def update(self, loss: float) -> None:
        """One update of the network."""
        self._throttle()
        self.updates += 1
        self._losses.append(loss)
        self.progress.loss = loss

    def step(self, step: Step) -> None:
        """One training step in every environment; ended episodes become rows."""
        self._throttle()
        rewards, flags = step.reward.tolist(), step.flags.tolist()
        returns, lengths = self._returns, self._lengths
        if not returns:
            returns[:], lengths[:] = [0.0] * len(rewards), [0] * len(rewards)
        self.env_steps += len(rewards)
        for k, reward in enumerate(rewards):  # of few environments: faster than arrays
            returns[k] += reward
            lengths[k] += 1
            if flags[k] & OVER:
                self._episode(returns[k], lengths[k])
                returns[k], lengths[k] = 0.0, 0

    def _episode(self, total: float, length: int) -> None:
        self._ended.append((self.env_steps, total))
        self.progress.mean_return = self._recent_return()
        self.sink.add(
            "episodes",
            agent=self.agent,
            round=self.round,
            task=self.task,
            episode=len(self._ended),
            step=self.env_steps,
            length=length,
            **{"return": total},
        )

    def _recent_return(self) -> float:
        """Mean return of the last 100 episodes."""
        return float(np.mean([total for _, total in self._ended[-100:]])) if self._ended else nan

    def late_returns(self) -> tuple[float, float, int]:
        """Mean return, its standard error, and number of the episodes that tell how good play is.

        They are those that ended in the last quarter of the agent's own steps on the task; with
        fewer than three of them the mean is unknown (NaN).
        """
        late = [total for step, total in self._ended if step > LATE * self.env_steps]
        if len(late) < FEWEST:
            return nan, 0.0, len(late)
        return float(np.mean(late)), float(np.std(late, ddof=1)) / sqrt(len(late)), len(late)

    def training(self, epsilon: float) -> None:
        """A row of /train; its times and losses count since the row before."""
        loss = float(np.mean(self._losses)) if self._losses else nan
        self.sink.add(
            "train",
            agent=self.agent,
            round=self.round,
            task=self.task,
            step=self._turns,
            loss=loss,
            epsilon=epsilon,
            return_mean=self._recent_return(),
            env_seconds=self.env_seconds,
            learn_seconds=self.learn_seconds,
            wait_seconds=self.wait_seconds,
        )
        self.unwritten = False
        self._losses.clear()
        self.env_seconds = self.learn_seconds = self.wait_seconds = 0.0

    def evaluated(self, episodes: list[tuple[float, int]]) -> None:
        """Scores and lengths of an evaluation; the last one of a task counts for the task."""
        self._exam = episodes
        self.sink.add(
            "curve",
            agent=self.agent,
            round=self.round,
            task=self.task,
            env_steps=self.env_steps,
            score=float(np.mean([score for score, _ in episodes])),
            seconds=perf_counter() - self._start,
        )

    def result(self, task: str, episodes: list[tuple[float, int]]) -> None:
        """How the agent does on a task after this round."""
        for episode, (score, length) in enumerate(episodes):
            self.sink.add(
                "evaluation",
                agent=self.agent,
                after_round=self.round,
                task=task,
                episode=episode,
                score=score,
                length=length,
            )

    def moved(self, moved: TransferEvent) -> None:
        """An offer, a request or a lesson that crossed an edge, or was refused on its way."""
        if moved.kind == "relay":
            self._relayed(moved)
            return
        times = (moved.seconds, 0.0)
        ends = (moved.sender, moved.receiver, moved.bytes)
        self._exchange(moved.kind, moved.offer, *ends, *times, moved.reason, round_=moved.round)

    def _relayed(self, moved: TransferEvent) -> None:
        self.sink.add(
            "relays",
            agent=self.agent,
            round=moved.round,
            donor=moved.offer.donor,
            task=moved.offer.task,
            bytes=moved.bytes,
            seconds=moved.seconds,
            reason=moved.reason,
            **{"from": moved.sender},
        )

    def received(self, fetched: FetchResult) -> None:
        """A lesson that arrived whole; `used` writes its row."""
        self._fetched[fetched.offer.key] = fetched

    def used(self, offer: Offer, kl: float = nan, agreement: float = nan) -> None:
        """A lesson that was learnt from; of the teacher's, how well the student agrees with it."""
        fetched = self._fetched[offer.key]
        times = (fetched.seconds, fetched.wait_seconds)
        size = len(fetched.data) or offer.bytes  # the packed rows are gone after a resume
        sides = (fetched.sender, self.agent)
        self._exchange("lesson", offer, *sides, size, *times, "", kl, agreement)

    def swapped(self, offer: Offer) -> None:
        """Rows that a neighbour on the same task sent while it was learning."""
        self._exchange("swap", offer, offer.donor, self.agent, offer.bytes, 0.0, 0.0, "")

    def refused(self, fetched: FetchResult, reason: str) -> None:
        """A lesson that did not arrive whole, or was not asked for."""
        offer, times = fetched.offer, (fetched.seconds, fetched.wait_seconds)
        size = len(fetched.data)
        self._exchange("refusal", offer, fetched.sender, self.agent, size, *times, reason)

    def _exchange(
        self,
        kind: str,
        offer: Offer,
        sender: int,
        receiver: int,
        size: int,
        seconds: float,
        wait_seconds: float,
        reason: str,
        kl: float = nan,
        agreement: float = nan,
        round_: int = 0,
    ) -> None:
        self.sink.add(
            "exchange",
            kind=kind,
            round=round_ or self.round,
            donor=offer.donor,
            to=receiver,
            task=offer.task,
            rows=max(offer.rows, 0),
            bytes=size,
            raw_bytes=max(offer.rows, 0) * self._row_bytes,
            seconds=seconds,
            wait_seconds=wait_seconds,
            score=offer.score,
            kl=kl,
            agreement=agreement,
            reason=reason,
            **{"from": sender},
        )

    def learnt(self, donors: list[str], score: float) -> None:
        """The task is done; its last evaluation counts."""
        self.phase("between rounds")
        self.result(self.task, self._exam)
        self.sink.add(
            "tasks",
            agent=self.agent,
            round=self.round,
            task=self.task,
            source="lesson" if donors else "env",
            donors=",".join(donors),
            env_steps=self.env_steps,
            probe_steps=self.probe_steps,
            updates=self.updates,
            score=score,
            seconds=perf_counter() - self._start,
            wait_seconds=self._task_wait,
            evaluate_seconds=self.spent("evaluating"),
            exchange_seconds=self.spent("exchanging"),
            save_seconds=self.spent("saving"),
        )
