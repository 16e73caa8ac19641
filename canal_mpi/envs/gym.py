"""Any gymnasium environment with a Box observation and Discrete actions."""

from typing import Any

import gymnasium
import numpy as np

from canal_mpi.errors import NotRepeatable, UsageError
from canal_mpi.interfaces import TERMINATED, TRUNCATED, Array, Columns, Spaces
from canal_mpi.settings import TaskConfig
from canal_mpi.state import rng_state, set_rng_state


class GymGame:
    """Any gymnasium environment with a Box observation and Discrete actions."""

    def __init__(self, task: str, config: TaskConfig, seed: np.random.SeedSequence) -> None:
        self.config, self.task = config, task
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.env: Any = gymnasium.make(task)
        self.spaces = self._spaces()
        self._start = rng_state(self.rng)
        self._played: list[int] = []  # actions since the start of the episode
        self._seen: Array = np.zeros(0)

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
        self._start = rng_state(self.rng)
        self._played.clear()
        obs, _ = self.env.reset(seed=int(self.rng.integers(1 << 31)))
        return self._look(obs)

    def _look(self, obs: Any) -> Array:
        self._seen = np.array(obs, dtype=self.spaces.dtype)
        return self._seen

    def step(self, action: int) -> tuple[Array, float, int]:
        """One step; actions beyond the environment's own count again from the first."""
        action = action % self.spaces.actions
        if self.config.random_action and self.rng.random() < self.config.random_action:
            action = int(self.rng.integers(self.spaces.actions))
        obs, reward, terminated, truncated, _ = self.env.step(self._first + action)
        self._played.append(action)
        cut = truncated or len(self._played) >= self.config.max_steps
        flags = TERMINATED if terminated else TRUNCATED if cut else 0
        return self._look(obs), float(reward), flags

    @property
    def _first(self) -> int:
        return int(self.env.action_space.start)

    def state_dict(self) -> Columns:
        """The seed of the running episode and its moves: gymnasium can't save what is inside."""
        return {
            "episode": self._start,
            "played": np.array(self._played, dtype=np.uint8),
            "seen": self._seen,
            "rng": rng_state(self.rng),
        }

    def load_state_dict(self, state: Columns) -> None:
        """Play the same moves again; NotRepeatable where they end elsewhere this time."""
        set_rng_state(self.rng, state["episode"])
        self.reset()
        for action in state["played"].tolist():
            self._look(self.env.step(self._first + action)[0])
        self._played = state["played"].tolist()
        if self._seen.tobytes() != state["seen"].tobytes():
            set_rng_state(self.rng, state["episode"])
            raise NotRepeatable(
                f"task '{self.task}' can't be saved inside an episode: the same moves led elsewhere"
            )
        set_rng_state(self.rng, state["rng"])

    def close(self) -> None:
        """Free what the environment holds."""
        self.env.close()
