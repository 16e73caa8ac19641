"""What an agent writes down: the rows of the results, and the progress that others see."""

from collections.abc import Callable
from math import nan, sqrt
from time import perf_counter, process_time

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
from canal_mpi.launcher import core_wait
from canal_mpi.membuf.lesson import Lesson
from canal_mpi.state import from_json, to_json

OVER = TERMINATED | TRUNCATED
RECENT = 100  # episodes whose mean return tells how good play is
LATE = 0.75  # of the own steps: later episodes tell how good an agent became
FEWEST = 3  # such episodes, or the score is unknown
PHASES = {  # what time is spent on, and the column of /tasks for it
    "environment": "env_seconds",
    "learning": "learn_seconds",
    "pretraining": "pretrain_seconds",
    "probing": "probe_seconds",
    "exchanging": "exchange_seconds",
    "remembering": "remember_seconds",
    "saving": "save_seconds",
    "evaluating": "evaluate_seconds",
    "waiting": "wait_seconds",
}
COUNTS = (
    *("env_steps", "probe_steps", "evaluation_steps", "updates", "iterations", "unwritten"),
    *("_losses", "_ended", "_returns", "_lengths"),
)


class Clock:
    """Wall time by phase: every second belongs to the phase that runs."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.running, self._since, self._waited = "waiting", perf_counter(), 0.0

    def switch(self, phase: str) -> None:
        """From now on time belongs to this phase."""
        now = perf_counter()
        self.spent[self.running] += now - self._since
        self.running, self._since = phase, now

    def waited(self, total: float) -> None:
        """Seconds that others were waited for so far: their growth was no work of the phase."""
        self.spent[self.running] -= total - self._waited
        self.spent["waiting"] += total - self._waited
        self._waited = total

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Seconds of each phase since its counts were as `before`."""
        self.switch(self.running)
        return {phase: seconds - before[phase] for phase, seconds in self.spent.items()}


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
        self.progress, self._began = Progress(), perf_counter()
        self.start()
        self.begin("", 0)

    def start(self) -> None:
        """The time of the first task begins."""
        self.clock, self._cpu, self._core = Clock(), process_time(), core_wait()
        self._core_before = 0.0  # seconds without a core before this task
        self._at_task, self._at_row = self.clock.spent.copy(), self.clock.spent.copy()

    def begin(self, task: str, round_: int) -> None:
        """A new task: all counts start again; its time began when the task before was over."""
        self.task, self.round = task, round_
        self.env_steps = self.probe_steps = self.evaluation_steps = self.updates = 0
        self.iterations, self.unwritten = 0, 0  # and those that no row of /train tells of yet
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
        counts = {name: getattr(self, name) for name in COUNTS}
        counts["progress"] = vars(self.progress) | {"wait_share": 0.0}  # it depends on time
        times = [self.clock.since(at) for at in (self._at_task, self._at_row)]
        cpu = [process_time() - self._cpu, self.core_waited, self._core_before]
        return {"counts": to_json(counts), "times": to_json([*times, cpu])}

    def load_state_dict(self, state: Columns) -> None:
        """Go on counting where `state` was taken."""
        counts = from_json(state["counts"])
        vars(self.progress).update(counts.pop("progress"))
        vars(self).update(counts)
        self.start()
        self.clock.spent, row, (cpu, core, self._core_before) = from_json(state["times"])
        self._at_row = {phase: self.clock.spent[phase] - row[phase] for phase in PHASES}
        self._cpu -= cpu
        self._core -= core

    # ── progress and time ──────────────────────────────────────────────────────────────────────

    @property
    def core_waited(self) -> float:
        """Seconds of the run in which the agent was ready to work and had no core."""
        return core_wait() - self._core

    def plan(self, iterations: int) -> None:
        """The training loop is about to run at most that many iterations."""
        self.progress.step, self.progress.steps = 0, iterations

    def turn(self, steps: int, every: int) -> bool:
        """So many more iterations of the training loop; whether a row of /train is due."""
        before, progress = self.iterations, self.progress
        self.iterations, self.unwritten = before + steps, 1
        progress.step += steps
        progress.total_steps += steps
        return before // every != self.iterations // every

    def phase(self, name: str, clock: str = "") -> None:
        """Say what the agent is about to do, and on which phase its time is spent."""
        self.clock.switch(clock or name)
        self.progress.phase = name
        self.progress.wait_share = self.clock.spent["waiting"] / (perf_counter() - self._began)
        self.beat()

    def beat(self) -> None:
        """Show that the agent is alive."""
        self._throttle()
        self._beat(self.progress)

    # ── training ───────────────────────────────────────────────────────────────────────────────

    def update(self, loss: float) -> None:
        """One update of the network."""
        self._throttle()
        self.updates += 1
        self.progress.loss = float(loss)  # learners of others give numbers of other kinds
        self._losses.append(self.progress.loss)

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
        about = {"episode": len(self._ended), "step": self.env_steps, "return": total}
        self._add("episodes", **about, length=length)

    def _recent_return(self) -> float:
        """Mean return of the last 100 episodes."""
        return float(np.mean([total for _, total in self._ended[-RECENT:]])) if self._ended else nan

    def has_won(self, win_return: float) -> bool:
        """Whether the last 100 episodes reach a mean return."""
        return len(self._ended) >= RECENT and self.progress.mean_return >= win_return

    def late_returns(self) -> tuple[float, float, int]:
        """Mean return, its standard error, and number of the episodes that tell how good play is.

        They are those that ended in the last quarter of the agent's own steps on the task, or where
        these are fewer than three the last three of the second half; else it is unknown (NaN).
        """
        late = [total for step, total in self._ended if step > LATE * self.env_steps]
        if len(late) < FEWEST:
            half = [total for step, total in self._ended if step > 0.5 * self.env_steps]
            late = half[-FEWEST:]
        if len(late) < FEWEST:
            return nan, 0.0, len(late)
        return float(np.mean(late)), float(np.std(late, ddof=1)) / sqrt(len(late)), len(late)

    def training(self, epsilon: float) -> None:
        """A row of /train; its times and losses count since the row before."""
        seconds = self.clock.since(self._at_row)
        self._add(
            "train",
            step=self.iterations,
            loss=float(np.mean(self._losses)) if self._losses else nan,
            epsilon=epsilon,
            return_mean=self._recent_return(),
            env_seconds=seconds["environment"],
            learn_seconds=seconds["learning"] + seconds["pretraining"],
            wait_seconds=seconds["waiting"],
        )
        self._losses.clear()
        self.unwritten, self._at_row = 0, self.clock.spent.copy()

    def learnt(self, donors: list[str]) -> None:
        """The task is done; what evaluation tells of it is filled in where run.h5 is written."""
        self.phase("between rounds", "waiting")
        seconds = self.clock.since(self._at_task)
        columns = {column: seconds[phase] for phase, column in PHASES.items()}
        self._add(
            "tasks",
            source="lesson" if donors else "env",
            donors=",".join(donors),
            env_steps=self.env_steps,
            probe_steps=self.probe_steps,
            evaluation_steps=self.evaluation_steps,
            updates=self.updates,
            score=nan,
            seconds=sum(seconds.values()),
            cpu_seconds=process_time() - self._cpu,
            core_seconds=self.core_waited - self._core_before,
            **columns,
        )
        self._core_before = self.core_waited
        self._at_task, self._cpu = self.clock.spent.copy(), process_time()

    # ── evaluation ─────────────────────────────────────────────────────────────────────────────

    def curve(self, episodes: list[tuple[float, int]]) -> None:
        """Scores and lengths of an evaluation inside a task."""
        self.evaluation_steps += sum(length for _, length in episodes)
        score = float(np.mean([score for score, _ in episodes]))
        seconds = sum(self.clock.since(self._at_task).values())
        self._add("curve", env_steps=self.env_steps, score=score, seconds=seconds)

    def evaluated(
        self, task: str, after_round: int, episodes: list[tuple[float, int]], seconds: float
    ) -> None:
        """How the agent did on a task after a round: a row for each episode."""
        for episode, (score, length) in enumerate(episodes):
            self.sink.add(
                "evaluation",
                agent=self.agent,
                after_round=after_round,
                task=task,
                episode=episode,
                score=score,
                length=length,
                seconds=seconds / len(episodes),
            )

    # ── the exchange ───────────────────────────────────────────────────────────────────────────

    def used(self, lesson: Lesson, kl: float = nan, agreement: float = nan) -> None:
        """A lesson that was learnt from; of the teacher's, how well the student agrees with it."""
        here, offer = (self.agent, self.round), lesson.offer
        event = TransferEvent("lesson", offer, lesson.sender, *here, offer.bytes, lesson.seconds)
        self.moved(event, kl, agreement)

    def swapped(self, offer: Offer) -> None:
        """Rows that a neighbour on the same task sent while it was learning."""
        here = (self.agent, self.round)
        self.moved(TransferEvent("swap", offer, offer.donor, *here, offer.bytes))

    def refused(self, f: FetchResult, reason: str) -> None:
        """A lesson that did not arrive whole, or was not asked for."""
        ends, size = (f.sender, self.agent), len(f.data)
        self.moved(TransferEvent("refusal", f.offer, *ends, self.round, size, f.seconds, reason))

    def moved(self, event: TransferEvent, kl: float = nan, agreement: float = nan) -> None:
        """Something that crossed an edge, or was refused on its way: a row of /exchange."""
        self.sink.add(
            "exchange",
            kind=event.kind,
            round=event.round,
            donor=event.offer.donor,
            to=event.receiver,
            task=event.offer.task,
            rows=max(event.offer.rows, 0),
            bytes=event.bytes,
            raw_bytes=max(event.offer.rows, 0) * self._row_bytes,
            seconds=event.seconds,
            score=event.offer.score,
            kl=kl,
            agreement=agreement,
            reason=event.reason,
            **{"from": event.sender},
        )

    def _add(self, table: str, **values: float | int | str) -> None:
        """A row of the running task."""
        self.sink.add(table, agent=self.agent, round=self.round, task=self.task, **values)
