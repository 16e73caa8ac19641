"""Rows of play, each frame stored once."""

from collections.abc import Iterable
from math import prod

import numpy as np

from canal_mpi.interfaces import LAST, TERMINATED, TRUNCATED, Array, Columns, Spaces, Step

ENDS = TERMINATED | LAST  # flags of a row that the next one does not follow


def observations(rows: Columns, spaces: Spaces) -> Array:
    """What the agent saw at each row of a lesson: the frames of its observation, stacked."""
    first = np.ones(len(rows["flags"]), dtype=bool)
    first[1:] = (rows["flags"][:-1] & ENDS) != 0
    places = [np.arange(len(first))]
    for _ in range(spaces.stack - 1):
        places.insert(0, places[0] - ~first[places[0]])
    stacked = np.stack([rows["state"][place] for place in places], axis=1)
    return stacked.reshape(-1, *spaces.shape)


class Buffer:
    """A ring of rows, split into one region per environment so that rows stay contiguous.

    A row holds the newest frame of its state; the frames before it are those of the rows before,
    back to the start of the episode.
    """

    def __init__(self, spaces: Spaces, capacity: int, streams: int = 1) -> None:
        self.spaces = spaces
        self.region = max(capacity // streams, 2) + 1  # one row more for the open end
        rows = self.region * streams
        self.columns: Columns = {
            "state": np.zeros((rows, *spaces.frame_shape), dtype=spaces.dtype),
            "action": np.zeros(rows, dtype=np.uint8),
            "reward": np.zeros(rows, dtype=np.float32),
            "flags": np.full(rows, LAST, dtype=np.uint8),  # nothing leads to what was never stored
        }  # and q_values of each row, if they are to be distilled
        state, self.action, self.reward, self.flags = self.columns.values()
        self.frame_size = prod(spaces.frame_shape)
        self.state_rows = state.reshape(rows, self.frame_size)
        self.cursor = np.zeros(streams, dtype=np.int64)  # the open row, counted in its region
        self.count = np.zeros(streams, dtype=np.int64)  # rows before it that can be drawn
        self.base = np.arange(streams, dtype=np.int64) * self.region
        self._used = 0  # rows from the first on that were ever written
        self._length = 0  # of all streams

    def __len__(self) -> int:
        """Rows that can be drawn."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Memory of a full buffer."""
        return sum(column.nbytes for column in self.columns.values())

    @classmethod
    def of_lesson(cls, spaces: Spaces, rows: Columns) -> "Buffer":
        """A buffer that holds exactly the rows of a lesson (whose last row is a LAST row), with
        their Q-values if it has them."""
        total = len(rows["action"])
        buffer = cls(spaces, max(total - 1, 2))
        for name, column in buffer.columns.items():
            column[:total] = rows[name]
        if "q_values" in rows:
            buffer.columns["q_values"] = rows["q_values"]
        buffer.cursor[0] = buffer.count[0] = buffer._length = total - 1
        buffer._used = total
        return buffer

    def clear(self) -> None:
        """Forget all rows."""
        self.cursor[:] = 0
        self.count[:] = 0
        self.flags[:] = LAST
        self._used = self._length = 0

    def start(self, obs: Array) -> None:
        """Begin with the first states, one a stream, or anew in the middle of play."""
        for stream in range(len(self.base)):
            if self.count[stream]:
                self._advance(stream)  # what was seen last stays as the end of its episode
            self._open(stream, obs[stream])

    def add(self, actions: Array, step: Step) -> None:
        """Store one step of every stream and open the row of the state it led to."""
        for stream in range(len(self.base)):
            row = int(self.base[stream] + self.cursor[stream])
            flags = int(step.flags[stream])
            self.action[row] = actions[stream]
            self.reward[row] = step.reward[stream]
            self.flags[row] = flags
            self._advance(stream)
            self._open(stream, step.obs[stream])
            if flags & TRUNCATED:
                self._advance(stream)  # the state after a cut stays: its value is bootstrapped
            if flags & (TRUNCATED | TERMINATED):
                self._open(stream, step.start[stream])

    def _open(self, stream: int, obs: Array) -> None:
        row = int(self.base[stream] + self.cursor[stream])
        self.state_rows[row] = obs.reshape(-1)[-self.frame_size :]
        self.action[row] = self.reward[row] = 0
        self.flags[row] = LAST
        self._used = max(self._used, row + 1)

    def _advance(self, stream: int) -> None:
        cursor = (int(self.cursor[stream]) + 1) % self.region
        count = min(int(self.count[stream]) + 1, self.region - 1)
        oldest = int(self.base[stream]) + (cursor - count) % self.region
        if self.flags[oldest] & LAST:
            count -= 1  # the rows that led to this state were overwritten
        self._length += count - int(self.count[stream])
        self.cursor[stream], self.count[stream] = cursor, count

    def draw(self, rng: np.random.Generator, number: int) -> Array:
        """Uniformly drawn rows (indices) from which learning can start."""
        rows = self._rows_at((rng.random(number) * self._length).astype(np.int64))
        while self.flags.take(rows).max() >= LAST:
            closing = self.flags[rows] >= LAST
            again = rng.random(int(closing.sum())) * self._length
            rows[closing] = self._rows_at(again.astype(np.int64))
        return rows

    def _rows_at(self, drawn: Array) -> Array:
        """Rows by their place among all rows of all streams, oldest first."""
        if len(self.base) == 1:
            if self.cursor[0] == self.count[0]:
                return drawn
            stream: Array | int = 0
            place = drawn
        else:
            stream = np.searchsorted(np.cumsum(self.count), drawn, side="right")
            place = drawn - (np.cumsum(self.count) - self.count)[stream]
        oldest = self.cursor[stream] - self.count[stream]
        rows: Array = self.base[stream] + (oldest + place) % self.region
        return rows

    def export(self, most: int | None = None) -> Columns:
        """The newest rows, at most `most`, oldest first, every stream closed by a LAST row."""
        each = len(self.flags) if most is None else most // len(self.base)
        return self._export(range(len(self.base)), each)

    def export_streams(self) -> list[Columns]:
        """All rows of each stream apart, oldest first, closed by a LAST row."""
        return [self._export([stream], len(self.flags)) for stream in range(len(self.base))]

    def _export(self, streams: Iterable[int], most: int) -> Columns:
        rows = np.concatenate([self._newest(stream, most) for stream in streams])
        return {name: column[rows] for name, column in self.columns.items()}

    def _newest(self, stream: int, most: int) -> Array:
        count = min(int(self.count[stream]), max(most - 1, 0))
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        places = np.arange(int(self.cursor[stream]) - count, int(self.cursor[stream]) + 1)
        rows: Array = self.base[stream] + places % self.region
        if self.flags[rows[-2]] & LAST:
            rows = rows[:-1]  # straight after a cut: nothing leads to the open row
        if self.flags[rows[0]] & LAST:
            rows = rows[1:]
        return rows if len(rows) > 1 else rows[:0]

    def state_dict(self) -> Columns:
        """Everything needed to go on with the same bits."""
        held = {name: column[: self._used] for name, column in self.columns.items()}
        return held | {"cursor": self.cursor.copy(), "count": self.count.copy()}

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""
        self._used = len(state["action"])
        for name, column in self.columns.items():
            column[: self._used] = state[name]
        self.cursor[:], self.count[:] = state["cursor"], state["count"]
        self._length = int(self.count.sum())
