"""What an agent keeps of old tasks: a reservoir each, within one bound, for rehearsal."""

from collections.abc import Callable

import numpy as np

from canal_mpi.interfaces import Array, Batch, Columns, Spaces
from canal_mpi.membuf.buffer import Buffer, observations
from canal_mpi.membuf.replay import Sampler
from canal_mpi.membuf.selection import choose
from canal_mpi.state import from_json, strip_prefix, to_json, with_prefix


class Rehearsal:
    """Balanced rehearsal: every old task has the same room and the same chance.

    Rows are kept with the Q-values that the agent gave them at the end of their task.
    """

    def __init__(self, spaces: Spaces, most: int, sampler: Sampler) -> None:
        self.spaces, self.most, self.sampler = spaces, most, sampler
        self.tasks: dict[str, Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Memory of full reservoirs."""
        return self.most * (self.spaces.row_bytes + 4 * self.spaces.actions)

    def keep(
        self,
        task: str,
        rows: Columns,
        q_values: Callable[[Array], Array],
        rng: np.random.Generator,
    ) -> None:
        """Remember a part of a finished task; the older ones make room."""
        self.tasks.pop(task, None)
        room = self.most // (len(self.tasks) + 1)
        for other, buffer in list(self.tasks.items()):
            self._put(other, choose(buffer.export(), room, rng))
        picked = choose(rows, room, rng)
        if len(picked["flags"]) > 1:
            self._put(task, with_q_values(picked, self.spaces, q_values))

    def _put(self, task: str, rows: Columns) -> None:
        self.tasks.pop(task, None)
        if len(rows["flags"]) > 1:
            self.tasks[task] = Buffer.of_lesson(self.spaces, rows)

    def others(self, current: str) -> list[str]:
        """Old tasks that can be rehearsed."""
        return [task for task in self.tasks if task != current]

    def sample(self, current: str, rng: np.random.Generator) -> Batch:
        """A batch of one old task, each equally likely."""
        return self.sampler.sample_one(self.others(current), self.tasks, rng)

    def state_dict(self) -> Columns:
        """All reservoirs, for a checkpoint."""
        held = {"tasks": to_json([*self.tasks])}
        for k, buffer in enumerate(self.tasks.values()):
            held |= with_prefix(f"{k}", buffer.export())
        return held

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""
        self.tasks.clear()
        for k, task in enumerate(from_json(state["tasks"])):
            self._put(task, strip_prefix(f"{k}", state))


def with_q_values(rows: Columns, spaces: Spaces, q_values: Callable[[Array], Array]) -> Columns:
    """The rows with what a network says of each, to be distilled."""
    states = observations(rows, spaces)
    parts = [q_values(states[k : k + 512]).copy() for k in range(0, len(states), 512)]
    return rows | {"q_values": np.concatenate(parts).astype("<f4")}
