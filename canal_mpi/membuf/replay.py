"""Draws batches: from the agent's own rows, from lessons, or from both."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from canal_mpi.membuf.buffer import Buffer
from canal_mpi.types import CUT, ENDED, LAST, LIFE, Array, Batch, Columns, Spaces


@dataclass(frozen=True)
class Recipe:
    """How rows become learning targets."""

    batch: int
    gamma: float
    n_step: int = 1
    clip_reward: bool = True
    life_ends: bool = True


class Replay:
    """The rows an agent learns its current task from."""

    def __init__(self, spaces: Spaces, capacity: int, recipe: Recipe, streams: int = 1) -> None:
        self.spaces, self.recipe = spaces, recipe
        self.own = Buffer(spaces, capacity, streams)
        self.lessons: list[Buffer] = []
        self.stops = ENDED | LIFE if recipe.life_ends else ENDED
        shape = (recipe.batch, prod(spaces.shape))
        self._batch = Batch(
            states=np.zeros(shape, dtype=spaces.dtype),
            actions=np.zeros(recipe.batch, dtype=np.int64),
            returns=np.zeros(recipe.batch, dtype=np.float32),
            next_states=np.zeros(shape, dtype=spaces.dtype),
            discounts=np.zeros(recipe.batch, dtype=np.float32),
        )

    @property
    def nbytes(self) -> int:
        """Memory of the full replay, lessons held now included."""
        return self.own.nbytes + sum(lesson.nbytes for lesson in self.lessons)

    def begin(self, lessons: Sequence[Columns]) -> None:
        """Start a task: own rows are forgotten, the given lessons are taken in."""
        self.own.clear()
        self.lessons = [Buffer.of_lesson(self.spaces, rows) for rows in lessons]

    @property
    def ready(self) -> bool:
        """Whether there is a lesson, or at least a batch of own rows, to learn from."""
        return bool(self.lessons) or len(self.own) >= self.recipe.batch

    def sample(self, rng: np.random.Generator) -> Batch:
        """One batch; its arrays are used again by the next call."""
        start = 0
        for buffer, number in self._split(rng):
            self._fill(buffer, buffer.draw(rng, number), slice(start, start + number))
            start += number
        return self._batch

    def _split(self, rng: np.random.Generator) -> list[tuple[Buffer, int]]:
        sources = [source for source in (self.own, *self.lessons) if len(source)]
        if len(sources) == 1:
            return [(sources[0], self.recipe.batch)]
        rows = np.array([len(source) for source in sources], dtype=np.float64)
        numbers = rng.multinomial(self.recipe.batch, rows / rows.sum())
        return [(source, int(n)) for source, n in zip(sources, numbers, strict=True) if n]

    def _fill(self, buffer: Buffer, rows: Array, where: slice) -> None:
        """Write the n-step transitions that start at `rows` into a part of the batch."""
        batch, recipe = self._batch, self.recipe
        last, flags = rows, buffer.flags[rows]
        returns = self._rewards(buffer, rows)
        discounts = np.full(len(rows), recipe.gamma, dtype=np.float32)
        following = buffer.after(rows)
        for _ in range(recipe.n_step - 1):
            closed = buffer.flags[following] & LAST
            going = ((flags & (self.stops | CUT)) == 0) & (closed == 0)
            last = np.where(going, following, last)
            returns += np.where(going, discounts * self._rewards(buffer, last), 0)
            discounts[going] *= recipe.gamma
            flags, following = buffer.flags[last], buffer.after(last)
        discounts[(flags & self.stops) != 0] = 0
        np.take(buffer.state_rows, rows, axis=0, out=batch.states[where], mode="clip")
        np.take(buffer.state_rows, following, axis=0, out=batch.next_states[where], mode="clip")
        batch.actions[where] = buffer.action[rows]
        batch.returns[where] = returns
        batch.discounts[where] = discounts

    def _rewards(self, buffer: Buffer, rows: Array) -> Array:
        rewards: Array = buffer.reward[rows]
        return np.sign(rewards) if self.recipe.clip_reward else rewards

    def state(self) -> Columns:
        """Own rows and lessons, for a checkpoint."""
        held = {f"own/{name}": column for name, column in self.own.state().items()}
        for k, lesson in enumerate(self.lessons):
            held |= {f"lesson-{k:06d}/{n}": c for n, c in lesson.export(len(lesson) + 1).items()}
        return held

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        groups: dict[str, Columns] = {}
        for name, column in state.items():
            group, _, short = name.partition("/")
            groups.setdefault(group, {})[short] = column
        self.begin([groups[name] for name in sorted(groups) if name != "own"])
        self.own.restore(groups["own"])
