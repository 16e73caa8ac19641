"""Any gymnasium environment with a Box observation and Discrete actions."""

from typing import Any

import gymnasium
import numpy as np

from canal_mpi import seeding
from canal_mpi.errors import UsageError
from canal_mpi.job import TaskConfig
from canal_mpi.types import CUT, ENDED, Array, Columns, Spaces


class GymGame:
    """Any gymnasium environment with a Box observation and Discrete actions."""

    def __init__(self, task: str, config: TaskConfig, seed: np.random.SeedSequence) -> None:
        self.config, self.task = config, task
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.env: Any = gymnasium.make(task)
        self.spaces = self._spaces()
        self._steps = 0
        self._start = seeding.snapshot(self.rng)

    def _spaces(self) -> Spaces:
        box, actions = self.env.observation_space, self.env.action_space
        if not isinstance(box, gymnasium.spaces.Box):
            raise UsageError(f"task '{self.task}' observes {box}; a Box is needed.")
        if not isinstance(actions, gymnasium.spaces.Discrete) or actions.n > 256:
            raise UsageError(
                f"task '{self.task}' has the actions {actions}; Discrete(n) with n up to 256 "
                "is needed."
            )
        dtype = "|u1" if box.dtype == np.uint8 else "<f4"
        return Spaces(tuple(box.shape), dtype, int(actions.n))

    def reset(self) -> Array:
        """Start an episode from a seed of its own."""
        self._start = seeding.snapshot(self.rng)
        self._steps = 0
        obs, _ = self.env.reset(seed=int(self.rng.integers(1 << 31)))
        return np.asarray(obs, dtype=self.spaces.dtype)

    def step(self, action: int) -> tuple[Array, float, int]:
        """One step; actions beyond the environment's own count again from the first."""
        action = action % self.spaces.actions
        if self.config.random_action and self.rng.random() < self.config.random_action:
            action = int(self.rng.integers(self.spaces.actions))
        first = int(self.env.action_space.start)
        obs, reward, terminated, truncated, _ = self.env.step(first + action)
        self._steps += 1
        cut = truncated or self._steps >= self.config.max_steps
        flags = ENDED if terminated else CUT if cut else 0
        return np.asarray(obs, dtype=self.spaces.dtype), float(reward), flags

    def state(self) -> Columns:
        """The seed of the running episode: gymnasium can't save what is inside it."""
        return {"episode": self._start}

    def restore(self, state: Columns) -> None:
        """Make the next reset start the episode that was running."""
        seeding.rewind(self.rng, state["episode"])

    def close(self) -> None:
        """Free what the environment holds."""
        self.env.close()
