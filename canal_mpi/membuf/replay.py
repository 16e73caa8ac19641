"""Draws batches: from the agent's own rows, from lessons, or from both."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from canal_mpi.interfaces import LAST, LIFE, TERMINATED, TRUNCATED, Array, Batch, Columns, Spaces
from canal_mpi.membuf.buffer import ENDS, Buffer
from canal_mpi.settings import LearnConfig
from canal_mpi.state import compiled, inlined

ZERO = np.float32(0)


@inlined
def _copy_stack(state: Any, flags: Any, region: int, row: int, into: Any) -> None:
    """Copy the frames of a state, newest last; an episode's first frame stands for those before."""
    size = state.shape[1]
    for start in range(len(into) - size, -1, -size):
        into[start : start + size] = state[row]
        before = row - 1 if row % region else row + region - 1
        if flags[before] & ENDS == 0:
            row = before


@partial(compiled, fastmath=False)  # sums of rewards keep their order and rounding
def _copy_rows(
    rows: Any,
    state: Any,
    flags: Any,
    action: Any,
    reward: Any,
    powers: Any,
    stops: int,
    clips: bool,
    region: int,
    into: Any,
    start: int,
) -> None:
    """Copy rows with their n-step targets to a batch, from its row `start` on.

    `powers` are the discounts of 0, 1, … n steps, `stops` the flags that stop bootstrapping.
    """
    states, actions, returns, next_states, discounts = into
    for k in range(len(rows)):
        row, place, total, steps = rows[k], start + k, ZERO, 0
        last, following, end = row, row, (row // region + 1) * region
        while steps == 0 or (steps < len(powers) - 1 and flags[following] & LAST == 0):
            last = following
            total += powers[steps] * (np.sign(reward[last]) if clips else reward[last])
            steps += 1
            following = last + 1 if last + 1 < end else end - region
            if flags[last] & (stops | TRUNCATED):
                break
        _copy_stack(state, flags, region, row, states[place])
        _copy_stack(state, flags, region, following, next_states[place])
        actions[place], returns[place] = action[row], total
        discounts[place] = ZERO if flags[last] & stops else powers[steps]


class Sampler:
    """Fills one preallocated batch; its arrays are used again by the next call."""

    def __init__(self, spaces: Spaces, learn: LearnConfig) -> None:
        self.learn, batch = learn, learn.batch_size
        self._batch = Batch(
            states=np.zeros((batch, prod(spaces.shape)), dtype=spaces.dtype),
            actions=np.zeros(batch, dtype=np.int64),
            returns=np.zeros(batch, dtype=np.float32),
            next_states=np.zeros((batch, prod(spaces.shape)), dtype=spaces.dtype),
            discounts=np.zeros(batch, dtype=np.float32),
        )
        self._columns = tuple(self._batch)[:5]
        powers = np.full(learn.n_step + 1, learn.gamma, dtype=np.float32)
        powers[0] = 1
        stops = TERMINATED | LIFE if learn.terminal_on_life_loss else TERMINATED
        self._rule = (np.multiply.accumulate(powers), stops, learn.reward == "clip")

    def sample(self, parts: Sequence[tuple[Buffer, int]], rng: np.random.Generator) -> Batch:
        """A batch with so many rows of each buffer; with Q-values where all buffers have them."""
        start, q_values = 0, []
        for buffer, number in parts:
            rows = buffer.draw(rng, number)
            self.fill(buffer, rows, start)
            start += number
            if "q_values" in buffer.columns:
                q_values.append(buffer.columns["q_values"][rows])
        if len(q_values) < len(parts):
            return self._batch
        return self._batch._replace(stored_q=np.concatenate(q_values))

    def sample_one(
        self, tasks: Sequence[str], buffers: Mapping[str, Buffer], rng: np.random.Generator
    ) -> Batch:
        """A batch of one of the tasks, each equally likely."""
        task = tasks[int(rng.integers(len(tasks)))]
        parts = [(buffers[task], self.learn.batch_size)]
        return self.sample(parts, rng)._replace(task=task)

    def fill(self, buffer: Buffer, rows: Array, start: int = 0) -> Batch:
        """Write the n-step transitions that start at `rows` into the batch, from `start` on."""
        played = (buffer.state_rows, buffer.flags, buffer.action, buffer.reward)
        _copy_rows(rows, *played, *self._rule, buffer.region, self._columns, start)
        return self._batch


class Replay:
    """The rows an agent learns its current task from."""

    def __init__(self, spaces: Spaces, capacity: int, learn: LearnConfig, streams: int = 1) -> None:
        self.spaces, self.learn = spaces, learn
        self.own = Buffer(spaces, capacity, streams)
        self.lessons: list[Buffer] = []
        self.others: dict[str, Buffer] = {}  # lessons of other tasks
        self.lesson_fraction = 1.0  # part of a batch that comes from lessons
        self.sampler = Sampler(spaces, learn)

    @property
    def nbytes(self) -> int:
        """Memory of the full replay, lessons held now included."""
        lessons = [*self.lessons, *self.others.values()]
        return self.own.nbytes + sum(lesson.nbytes for lesson in lessons)

    def begin(self, lessons: Sequence[Columns], others: Mapping[str, Columns] = {}) -> None:
        """Start a task: own rows are forgotten, lessons of it and of other tasks taken in."""
        self.own.clear()
        self.lessons = [Buffer.of_lesson(self.spaces, rows) for rows in lessons]
        self.others = {task: Buffer.of_lesson(self.spaces, rows) for task, rows in others.items()}
        self.lesson_fraction = 1.0

    def join(self, rows: Columns) -> None:
        """Take in rows that another agent played meanwhile; all rows count alike."""
        self.lessons.append(Buffer.of_lesson(self.spaces, rows))
        others = sum(map(len, self.lessons))
        self.lesson_fraction = others / (others + len(self.own))

    @property
    def ready(self) -> bool:
        """Whether there is a lesson, or at least a batch of own rows, to learn from."""
        return bool(self.lessons) or len(self.own) >= self.learn.batch_size

    def sample(self, rng: np.random.Generator) -> Batch:
        """One batch of the current task."""
        return self.sampler.sample(self._parts(rng), rng)

    def sample_other(self, rng: np.random.Generator) -> Batch:
        """One batch of a lesson of another task."""
        return self.sampler.sample_one(sorted(self.others), self.others, rng)

    def _parts(self, rng: np.random.Generator) -> list[tuple[Buffer, int]]:
        """How many rows of each source: lessons get their share, among them by their rows."""
        batch = self.learn.batch_size
        if not self.lessons:
            return [(self.own, batch)]
        own = round(batch * (1 - self.lesson_fraction)) if len(self.own) else 0
        rows = np.array([len(lesson) for lesson in self.lessons], dtype=np.float64)
        numbers = [batch - own]
        if len(self.lessons) > 1:
            numbers = rng.multinomial(batch - own, rows / rows.sum()).tolist()
        parts = [(self.own, own), *zip(self.lessons, numbers, strict=True)]
        return [(buffer, number) for buffer, number in parts if number]
