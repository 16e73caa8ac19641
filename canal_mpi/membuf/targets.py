"""The n-step target of every row, known before the row is drawn.

A row's target is the sum of the next rewards and a place further on from which to bootstrap. Both
are worked out once, when the rows after it are stored, instead of every time it is drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from canal_mpi.types import CUT, ENDED, LAST, LIFE, Array

TARGET_BYTES = 5  # of a row


@dataclass(frozen=True)
class Recipe:
    """How rows become learning targets."""

    batch: int
    gamma: float
    n_step: int = 1
    reward: str = "clip"
    life_ends: bool = True

    @property
    def stops(self) -> int:
        """Flags that stop bootstrapping."""
        return ENDED | LIFE if self.life_ends else ENDED

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
        if not goes_on or flags & CUT:
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
            going &= (flags[last] & (self._stops | CUT)) == 0
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
            if flags[row] & (self._stops | CUT | LAST):
                return
            growing.append(row)
