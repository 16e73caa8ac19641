"""The n-step target of every row, known before the row is drawn.

A row's target is the sum of the next rewards and a place further on from which to bootstrap. Both
are worked out once, when the rows after it are stored, instead of every time it is drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from canal_mpi.interfaces import LAST, LIFE, TERMINATED, TRUNCATED, Array, Columns, Spaces, Step

TARGET_BYTES = 5  # of a row
ENDS = TERMINATED | LAST  # flags of a row that the next one does not follow


@dataclass(frozen=True)
class Recipe:
    """How rows become learning targets."""

    batch: int
    gamma: float
    n_step: int = 1
    reward: str = "clip"
    terminal_on_life_loss: bool = True

    @property
    def stops(self) -> int:
        """Flags that stop bootstrapping."""
        return TERMINATED | LIFE if self.terminal_on_life_loss else TERMINATED

    def powers(self) -> Array:
        """The discounts of 0, 1, … n steps."""
        factors = np.full(self.n_step + 1, self.gamma, dtype=np.float32)
        factors[0] = 1
        found: Array = np.multiply.accumulate(factors)
        return found


class Targets:
    """Sums of rewards and how far they reach, for rows that are added one after the other."""

    def __init__(self, rows: int, recipe: Recipe, streams: int = 1) -> None:
        self.recipe, self._stops = recipe, recipe.stops
        self.total = np.zeros(rows, dtype=np.float32)
        self.reach = np.zeros(rows, dtype=np.uint8)  # twice the steps, and 1 if it bootstraps
        self._powers = recipe.powers().tolist()
        bootstraps = np.tile(np.array([0, 1], dtype=np.float32), len(self._powers))
        self.discounts = np.repeat(recipe.powers(), 2) * bootstraps  # by reach
        self._growing: list[list[int]] = [[] for _ in range(streams)]  # newest first

    def add(self, stream: int, row: int, reward: float, flags: int) -> None:
        """A row was stored: its own target begins, those of the rows before it grow."""
        if self.recipe.reward == "clip":
            reward = (reward > 0) - (reward < 0)
        goes_on = (flags & self._stops) == 0
        growing = self._growing[stream]
        growing.insert(0, row)
        self.total[row] = 0
        for steps, earlier in enumerate(growing):
            if reward:
                self.total[earlier] += np.float32(self._powers[steps]) * np.float32(reward)
            self.reach[earlier] = 2 * (steps + 1) + goes_on
        if not goes_on or flags & TRUNCATED:
            growing.clear()
        else:
            del growing[self.recipe.n_step - 1 :]

    def close(self, stream: int) -> None:
        """What follows has nothing to do with the rows before."""
        self._growing[stream].clear()

    def find(
        self, rows: Array, after: Callable[[Array], Array], reward: Array, flags: Array
    ) -> None:
        """Work out the targets of these rows from the columns; `after` gives the row behind."""
        last, going = rows, np.ones(len(rows), dtype=bool)
        total, steps = self._worth(reward[rows]), np.ones(len(rows), dtype=np.uint8)
        for power in self._powers[1:-1]:
            following = after(last)
            going &= (flags[last] & (self._stops | TRUNCATED)) == 0
            going &= (flags[following] & LAST) == 0
            last = np.where(going, following, last)
            total += np.where(going, np.float32(power) * self._worth(reward[last]), np.float32(0))
            steps += going
        self.total[rows] = total
        self.reach[rows] = 2 * steps + ((flags[last] & self._stops) == 0)

    def _worth(self, reward: Array) -> Array:
        return np.sign(reward) if self.recipe.reward == "clip" else reward

    def grow_from(self, stream: int, rows: list[int], flags: Array) -> None:
        """Go on after a restore; `rows` are the stream's, newest first."""
        growing = self._growing[stream]
        growing.clear()
        for row in rows[: self.recipe.n_step - 1]:
            if flags[row] & (self._stops | TRUNCATED | LAST):
                return
            growing.append(row)


FOUND_AT_ONCE = 65536  # rows whose targets are worked out together


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
        self.frame_size = prod(spaces.frame_shape)
        self.state_rows: Array = np.zeros((rows, self.frame_size), dtype=spaces.dtype)
        self.action = np.zeros(rows, dtype=np.uint8)
        self.reward = np.zeros(rows, dtype=np.float32)
        self.flags = np.full(rows, LAST, dtype=np.uint8)  # nothing leads to what was never stored
        self.cursor = np.zeros(streams, dtype=np.int64)  # the open row, counted in its region
        self.count = np.zeros(streams, dtype=np.int64)  # rows before it that can be drawn
        self.base = np.arange(streams, dtype=np.int64) * self.region
        self._used = 0  # rows from the first on that were ever written
        self._squares = np.zeros(2)  # sum and number of squared rewards that are not zero
        self._length = 0  # of all streams
        self.targets: Targets | None = None
        self.q_values: Array | None = None  # of each row, to be distilled

    def __len__(self) -> int:
        """Rows that can be drawn."""
        return self._length

    def track(self, recipe: Recipe) -> "Buffer":
        """Know the targets of all rows by this recipe from now on."""
        self.targets = Targets(len(self.flags), recipe, len(self.base))
        self._find_targets()
        return self

    def _find_targets(self) -> None:
        if self.targets is None:
            return
        for start in range(0, self._used, FOUND_AT_ONCE):
            rows = np.arange(start, min(start + FOUND_AT_ONCE, self._used))
            self.targets.find(rows, self.after, self.reward, self.flags)
        for stream in range(len(self.base)):
            self.targets.grow_from(stream, self._newest(stream, 300)[-2::-1].tolist(), self.flags)

    @property
    def nbytes(self) -> int:
        """Memory of a full buffer."""
        columns = [self.state_rows, self.action, self.reward, self.flags]
        if self.targets is not None:
            columns += [self.targets.total, self.targets.reach]
        if self.q_values is not None:
            columns.append(self.q_values)
        return sum(column.nbytes for column in columns)

    @classmethod
    def of_lesson(cls, spaces: Spaces, rows: Columns) -> "Buffer":
        """A buffer that holds exactly the rows of a lesson (whose last row is a LAST row), with
        their Q-values if it has them."""
        total = len(rows["action"])
        buffer = cls(spaces, max(total - 1, 2))
        buffer.state_rows[:total] = rows["state"].reshape(total, -1)
        for name in ("action", "reward", "flags"):
            getattr(buffer, name)[:total] = rows[name]
        buffer.cursor[0] = buffer.count[0] = buffer._length = total - 1
        buffer._used = total
        rewards = rows["reward"][rows["reward"] != 0].astype(np.float64)
        buffer._squares[:] = np.square(rewards).sum(), len(rewards)
        buffer.q_values = rows.get("q_values")
        return buffer

    @property
    def reward_scale(self) -> np.float32:
        """Root mean square of all rewards so far that were not zero; 1 before the first."""
        total, number = self._squares
        return np.float32(np.sqrt(total / number)) if number else np.float32(1)

    def clear(self) -> None:
        """Forget all rows."""
        self.cursor[:] = 0
        self.count[:] = 0
        self.flags[:] = LAST
        self._used = self._length = 0
        self._squares[:] = 0
        self._break_targets()

    def start(self, obs: Array) -> None:
        """Begin with the first states, one a stream."""
        for stream in range(len(self.base)):
            self._open(stream, obs[stream])

    def break_off(self, obs: Array) -> None:
        """Play stops in the middle and begins anew elsewhere."""
        self._break_targets()
        for stream in range(len(self.base)):
            if self.count[stream]:
                self._advance(stream)  # what was seen last stays as the end of its episode
            self._open(stream, obs[stream])

    def _break_targets(self) -> None:
        if self.targets is not None:
            for stream in range(len(self.base)):
                self.targets.close(stream)

    def add(self, actions: Array, step: Step) -> None:
        """Store one step of every stream and open the row of the state it led to."""
        for stream in range(len(self.base)):
            row = int(self.base[stream] + self.cursor[stream])
            flags = int(step.flags[stream])
            self.action[row] = actions[stream]
            reward = float(step.reward[stream])
            self.reward[row] = reward
            if reward:
                self._squares += reward * reward, 1
            self.flags[row] = flags
            if self.targets is not None:
                self.targets.add(stream, row, reward, flags)
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

    def after(self, rows: Array) -> Array:
        """The row behind each row, inside its region."""
        following: Array = rows + 1
        following[following % self.region == 0] -= self.region
        return following

    def export_all(self) -> Columns:
        """All rows, oldest first, every stream closed by a LAST row."""
        return self.export(len(self.flags))

    def export(self, most: int) -> Columns:
        """The newest rows, at most `most`, oldest first, every stream closed by a LAST row."""
        each = most // len(self.base)
        picks = [self._newest(stream, each) for stream in range(len(self.base))]
        return self._columns(np.concatenate(picks))

    def export_streams(self) -> list[Columns]:
        """All rows of each stream apart, oldest first, closed by a LAST row."""
        return [self._columns(self._newest(k, len(self.flags))) for k in range(len(self.base))]

    def _columns(self, rows: Array) -> Columns:
        return {
            "state": self.state_rows[rows].reshape(-1, *self.spaces.frame_shape),
            "action": self.action[rows],
            "reward": self.reward[rows],
            "flags": self.flags[rows],
        } | ({} if self.q_values is None else {"q_values": self.q_values[rows]})

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
        used = self._used
        return {
            "state": self.state_rows[:used],
            "action": self.action[:used],
            "reward": self.reward[:used],
            "flags": self.flags[:used],
            "cursor": self.cursor.copy(),
            "count": self.count.copy(),
            "squares": self._squares.copy(),
        }

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state` gave."""
        used = self._used = len(state["action"])
        self.state_rows[:used] = state["state"]
        for name in ("action", "reward", "flags"):
            getattr(self, name)[:used] = state[name]
        self.cursor[:], self.count[:] = state["cursor"], state["count"]
        self._squares[:] = state["squares"]
        self._length = int(self.count.sum())
        self._find_targets()
