"""Draws batches: from the agent's own rows, from lessons, or from both."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from canal_mpi.interfaces import Array, Batch, Columns, Spaces
from canal_mpi.membuf.buffer import ENDS, Buffer, Recipe
from canal_mpi.state import compiled, inlined

ONE = np.float32(1)


@inlined
def _copy_stack(state: Any, flags: Any, region: int, row: int, into: Any) -> None:
    """Copy the frames of a state, newest last; an episode's first frame stands for those before."""
    size = state.shape[1]
    for start in range(len(into) - size, -1, -size):
        for j in range(size):
            into[start + j] = state[row, j]
        before = row - 1 if row % region else row + region - 1
        if flags[before] & ENDS == 0:
            row = before


@compiled
def _copy_rows(
    rows: Any,
    state: Any,
    flags: Any,
    action: Any,
    total: Any,
    reach: Any,
    discounts: Any,
    scale: np.float32,
    region: int,
    into: Any,
    start: int,
) -> None:
    """Copy rows with their targets to a batch, from its row `start` on."""
    states, actions, returns, next_states, factors = into
    for k in range(len(rows)):
        row, place = rows[k], start + k
        following = row + (reach[row] >> 1)
        if following // region != row // region:  # rows go on at the start of their region
            following -= region
        _copy_stack(state, flags, region, row, states[place])
        _copy_stack(state, flags, region, following, next_states[place])
        actions[place], factors[place] = action[row], discounts[reach[row]]
        returns[place] = total[row] / scale


class Sampler:
    """Fills one preallocated batch; its arrays are used again by the next call."""

    def __init__(self, spaces: Spaces, recipe: Recipe) -> None:
        self.recipe = recipe
        shape = (recipe.batch, prod(spaces.shape))
        self._batch = Batch(
            states=np.zeros(shape, dtype=spaces.dtype),
            actions=np.zeros(recipe.batch, dtype=np.int64),
            returns=np.zeros(recipe.batch, dtype=np.float32),
            next_states=np.zeros(shape, dtype=spaces.dtype),
            discounts=np.zeros(recipe.batch, dtype=np.float32),
        )
        self._columns = tuple(self._batch)[:5]

    def sample(self, parts: Sequence[tuple[Buffer, int]], rng: np.random.Generator) -> Batch:
        """A batch with so many rows of each buffer; with Q-values where all buffers have them."""
        start, q_values = 0, []
        for buffer, number in parts:
            rows = buffer.draw(rng, number)
            self.fill(buffer, rows, slice(start, start + number))
            start += number
            if buffer.q_values is not None:
                q_values.append(buffer.q_values[rows])
        if len(q_values) < len(parts):
            return self._batch
        return self._batch._replace(stored_q=np.concatenate(q_values))

    def fill(self, buffer: Buffer, rows: Array, where: slice) -> Batch:
        """Write the n-step transitions that start at `rows` into a part of the batch."""
        targets = buffer.targets
        if targets is None or targets.recipe != self.recipe:
            raise ValueError("the buffer does not keep track of the targets that are asked for")
        scale = buffer.reward_scale if self.recipe.reward == "scale" else ONE
        known = (targets.total, targets.reach, targets.discounts)
        played = (buffer.state_rows, buffer.flags, buffer.action)
        _copy_rows(rows, *played, *known, scale, buffer.region, self._columns, where.start)
        return self._batch


class Replay:
    """The rows an agent learns its current task from."""

    def __init__(self, spaces: Spaces, capacity: int, recipe: Recipe, streams: int = 1) -> None:
        self.spaces, self.recipe = spaces, recipe
        self.own = Buffer(spaces, capacity, streams).track(recipe)
        self.lessons: list[Buffer] = []
        self.others: dict[str, Buffer] = {}  # lessons of other tasks
        self.lesson_fraction = 1.0  # part of a batch that comes from lessons
        self.sampler = Sampler(spaces, recipe)

    @property
    def nbytes(self) -> int:
        """Memory of the full replay, lessons held now included."""
        lessons = [*self.lessons, *self.others.values()]
        return self.own.nbytes + sum(lesson.nbytes for lesson in lessons)

    def begin(self, lessons: Sequence[Columns], others: Mapping[str, Columns] = {}) -> None:
        """Start a task: own rows are forgotten, lessons of it and of other tasks taken in."""
        self.own.clear()
        self.lessons = [self._lesson(rows) for rows in lessons]
        self.others = {task: self._lesson(rows) for task, rows in others.items()}
        self.lesson_fraction = 1.0

    def join(self, rows: Columns) -> None:
        """Take in rows that another agent played meanwhile; all rows count alike."""
        self.lessons.append(self._lesson(rows))
        others = sum(map(len, self.lessons))
        self.lesson_fraction = others / (others + len(self.own))

    def _lesson(self, rows: Columns) -> Buffer:
        return Buffer.of_lesson(self.spaces, rows).track(self.recipe)

    @property
    def ready(self) -> bool:
        """Whether there is a lesson, or at least a batch of own rows, to learn from."""
        return bool(self.lessons) or len(self.own) >= self.recipe.batch

    def sample(self, rng: np.random.Generator) -> Batch:
        """One batch of the current task."""
        return self.sampler.sample(self._parts(rng), rng)

    def sample_other(self, rng: np.random.Generator) -> Batch:
        """One batch of a lesson of another task."""
        names = sorted(self.others)
        task = names[int(rng.integers(len(names)))]
        parts = [(self.others[task], self.recipe.batch)]
        return self.sampler.sample(parts, rng)._replace(task=task)

    def _parts(self, rng: np.random.Generator) -> list[tuple[Buffer, int]]:
        """How many rows of each source: lessons get their share, among them by their rows."""
        batch = self.recipe.batch
        if not self.lessons:
            return [(self.own, batch)]
        own = round(batch * (1 - self.lesson_fraction)) if len(self.own) else 0
        rows = np.array([len(lesson) for lesson in self.lessons], dtype=np.float64)
        numbers = [batch - own]
        if len(self.lessons) > 1:
            numbers = rng.multinomial(batch - own, rows / rows.sum()).tolist()
        parts = [(self.own, own), *zip(self.lessons, numbers, strict=True)]
        return [(buffer, number) for buffer, number in parts if number]
