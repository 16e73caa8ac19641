"""What an agent keeps of old tasks: a reservoir each, within one bound, for rehearsal."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from canal_mpi.interfaces import Array, Batch, Columns, Spaces
from canal_mpi.membuf.buffer import TARGET_BYTES, Buffer, observations
from canal_mpi.membuf.replay import Sampler
from canal_mpi.membuf.selection import choose, uniform


@dataclass
class Past:
    """Rows of one old task and the action values the agent gave them then."""

    rows: Columns
    buffer: Buffer


class Rehearsal:
    """Balanced rehearsal: every old task has the same room and the same chance."""

    def __init__(self, spaces: Spaces, most: int, sampler: Sampler) -> None:
        self.spaces, self.most, self.sampler = spaces, most, sampler
        self.tasks: dict[str, Past] = {}

    @property
    def nbytes(self) -> int:
        """Memory of full reservoirs: rows (kept twice: as rows and to draw from) and values."""
        return self.most * (2 * self.spaces.row_bytes + TARGET_BYTES + 4 * self.spaces.actions)

    def keep(
        self,
        task: str,
        rows: Columns,
        values: Callable[[Array], Array],
        rng: np.random.Generator,
    ) -> None:
        """Remember a part of a finished task; the older ones make room."""
        self.tasks.pop(task, None)
        room = self.most // (len(self.tasks) + 1)
        for other, past in list(self.tasks.items()):
            self._put(other, choose(past.rows, room, uniform, past.rows["reward"], rng))
        picked = choose(rows, room, uniform, rows["reward"], rng)
        if len(picked["flags"]) > 1:
            states = observations(picked, self.spaces)
            parts = [values(states[k : k + 512]) for k in range(0, len(states), 512)]
            self._put(task, picked | {"values": np.concatenate(parts).astype("<f4")})

    def _put(self, task: str, rows: Columns) -> None:
        if len(rows["flags"]) > 1:
            buffer = Buffer.of_lesson(self.spaces, rows).track(self.sampler.recipe)
            self.tasks[task] = Past(rows, buffer)
        else:
            self.tasks.pop(task, None)

    def others(self, current: str) -> list[str]:
        """Old tasks that can be rehearsed."""
        return [task for task in self.tasks if task != current]

    def sample(self, current: str, rng: np.random.Generator) -> Batch:
        """A batch of one old task, each equally likely."""
        others = self.others(current)
        task = others[int(rng.integers(len(others)))]
        past = self.tasks[task]
        picked = past.buffer.draw(rng, self.sampler.recipe.batch)
        batch = self.sampler.fill(past.buffer, picked, slice(0, len(picked)))
        return batch._replace(task=task, stored_q=past.rows["values"][picked])

    def state_dict(self) -> Columns:
        """All reservoirs, for a checkpoint."""
        return {
            f"{k:03d}/{task}/{name}": column
            for k, (task, past) in enumerate(self.tasks.items())
            for name, column in past.rows.items()
        }

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state` gave."""
        groups: dict[str, Columns] = {}
        for key, column in state.items():
            task, _, name = key.partition("/")[2].rpartition("/")
            groups.setdefault(task, {})[name] = column
        self.tasks.clear()
        for task, rows in groups.items():
            self._put(task, rows)
