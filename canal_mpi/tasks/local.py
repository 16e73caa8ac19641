"""Environments of this process: a batch of one or more games of a task, stepped together."""

from collections.abc import Sequence
from math import isfinite
from typing import Protocol

import numpy as np

from canal_mpi.errors import DamagedData, RankFailed
from canal_mpi.types import CUT, ENDED, Array, Columns, Spaces, Step


class Game(Protocol):
    """One environment of one task."""

    spaces: Spaces

    def reset(self) -> Array: ...
    def step(self, action: int) -> tuple[Array, float, int]: ...
    def state(self) -> Columns: ...
    def restore(self, state: Columns) -> None: ...
    def close(self) -> None: ...


class LocalEnvs:
    """A batch of games of one task in this process; it looks the same from outside as a server."""

    def __init__(self, task: str, games: Sequence[Game], spaces: Spaces) -> None:
        self.task, self.games, self.spaces = task, list(games), spaces
        self.count = len(self.games)
        self._actions: Array = np.zeros(self.count, dtype=np.int64)
        self._reward = np.zeros(self.count, dtype=np.float64)
        self._flags = np.zeros(self.count, dtype=np.uint8)
        shape = (self.count, *spaces.shape)
        self._obs, self._start = (np.zeros(shape, dtype=spaces.dtype) for _ in range(2))
        self._obs_rows, self._start_rows = (
            array.reshape(self.count, -1) for array in (self._obs, self._start)
        )
        self._playing = False

    def reset(self) -> Array:
        """Start an episode in every game."""
        for k, game in enumerate(self.games):
            _place(self._start_rows[k], game.reset())
        self._playing = True
        return self._start

    def send(self, actions: Array) -> None:
        """Hand over one action a game; they are played in `receive`."""
        self._actions[:] = actions

    def receive(self) -> Step:
        """What the actions led to; games that ended start again."""
        if not self._playing:
            raise RankFailed(f"task '{self.task}' was stepped before its first reset.")
        for k, game in enumerate(self.games):
            action = int(self._actions[k])
            if not 0 <= action < self.spaces.actions:
                known = f"0 to {self.spaces.actions - 1}"
                raise RankFailed(f"task '{self.task}' has the actions {known}, not {action}.")
            obs, reward, flags = game.step(action)
            if not isfinite(reward):
                raise RankFailed(f"task '{self.task}' gave the reward {reward}; it must be finite.")
            _place(self._obs_rows[k], obs)
            self._reward[k], self._flags[k] = reward, flags
            _place(self._start_rows[k], game.reset() if flags & (ENDED | CUT) else obs)
        return Step(self._obs, self._reward, self._flags, self._start)

    def state(self) -> Columns:
        """The state of every game."""
        return {
            f"game-{k}/{name}": column
            for k, game in enumerate(self.games)
            for name, column in game.state().items()
        }

    def restore(self, state: Columns) -> None:
        """Go on where `state` was taken."""
        for k, game in enumerate(self.games):
            prefix = f"game-{k}/"
            held = {n.removeprefix(prefix): c for n, c in state.items() if n.startswith(prefix)}
            if not held:
                raise DamagedData(f"saved environments lack game {k} of {self.count}")
            game.restore(held)
        self._playing = True

    def close(self) -> None:
        """Close every game."""
        for game in self.games:
            game.close()


def _place(into: Array, obs: Array) -> None:
    """Copy one observation; a shorter vector leaves zeros behind it."""
    into[: obs.size] = obs.reshape(-1)
