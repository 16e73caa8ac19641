"""Any gymnasium environment whose observations and actions gymnasium can flatten.

Observations end up as one Box, actions as one Discrete; what can't is refused.
"""

from collections.abc import Iterator
from functools import partial
from math import isfinite, prod
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten_space
from gymnasium.wrappers import FlattenObservation, TransformAction

from canal_mpi.errors import NotRepeatable, RankFailed, UsageError
from canal_mpi.interfaces import TERMINATED, TRUNCATED, Array, Columns, Spaces
from canal_mpi.settings import TaskConfig
from canal_mpi.state import rng_state, set_rng_state

MOST_ACTIONS = 256
MOST = float(np.finfo(np.float32).max)  # of a number in a buffer


def _combination(sizes: Array, first: Array | int, action: int) -> Array:
    """One of all combinations of several choices, by its number."""
    return first + np.array(np.unravel_index(action, sizes.ravel())).reshape(sizes.shape)


def _unflattenable(space: Any, name: str = "") -> Iterator[str]:
    """The parts of a space that gymnasium can't make a Box of: `['mission'] MissionSpace`."""
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _unflattenable(part, f"{name}[{key!r}]")
        return
    try:
        flat = isinstance(flatten_space(space), Box)
    except (NotImplementedError, ValueError):  # a class of its own; a choice among such
        flat = False
    if not flat:
        yield f"{name} {type(space).__name__}".strip()


class GymGame:
    """One such environment; its observations and rewards are checked where they enter, here."""

    def __init__(self, task: str, config: TaskConfig, seed: np.random.SeedSequence) -> None:
        self.config, self.task = config, task
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.env = self._make()
        self.spaces = self._spaces()
        self._first = int(self.env.action_space.start)
        self._start = rng_state(self.rng)
        self._played: list[int] = []  # actions since the start of the episode
        self._seen: Array = np.zeros(0)
        self._zeros = np.zeros(self.spaces.shape, dtype=self.spaces.dtype)

    def _make(self, **options: Any) -> Any:
        """Dict, Tuple, Discrete … observations as one vector, combined actions as one number."""
        env: Any = gymnasium.make(self.task, disable_env_checker=True, **options)  # ours is silent
        space, actions = env.observation_space, env.action_space
        if found := list(_unflattenable(space)):
            raise UsageError(
                f"task '{self.task}' observes {', '.join(found)}, which has no fixed size that "
                "gymnasium knows: register the environment in a module of your own, in a wrapper "
                "that observes a Box, as minigrid.wrappers.ImgObsWrapper (docs/extending.md)."
            )
        if not isinstance(space, Box):
            env = FlattenObservation(env)
        if isinstance(actions, MultiDiscrete | MultiBinary):
            sizes = getattr(actions, "nvec", np.full(actions.shape, 2))
            first = getattr(actions, "start", 0)
            one = Discrete(min(prod(sizes.ravel().tolist()), MOST_ACTIONS + 1))
            env = TransformAction(env, partial(_combination, sizes, first), one)
        return env

    def _spaces(self) -> Spaces:
        box, actions = self.env.observation_space, self.env.action_space
        if not isinstance(actions, Discrete) or actions.n > MOST_ACTIONS:
            found = self.env.unwrapped.action_space
            raise UsageError(
                f"task '{self.task}' has the actions {found}; Discrete, MultiDiscrete or "
                f"MultiBinary with at most {MOST_ACTIONS} of them in all is needed: wrap the "
                "environment in one that chooses among fewer."
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
        """An observation as buffers hold it; RankFailed where they can't."""
        try:
            found = np.asarray(obs)
            if found.dtype == self._zeros.dtype and found.shape == self.spaces.shape:
                self._seen = found.copy()
                if isfinite(np.vdot(self._zeros, found)):  # 0 · x: quick; NaN where x is not finite
                    return self._seen
            with np.errstate(over="ignore", invalid="ignore"):
                self._seen = found.astype(self.spaces.dtype)
            whole = self._seen == found if self.spaces.dtype == "|u1" else np.isfinite(self._seen)
            fits = found.shape == self.spaces.shape and found.dtype.kind in "biuf" and whole.all()
        except (TypeError, ValueError):
            fits = False
        if not fits:
            numbers = "numbers from 0 to 255" if self.spaces.dtype == "|u1" else "finite numbers"
            raise self._unusable("observation", obs, f"{numbers}, of the shape {self.spaces.shape}")
        return self._seen

    def _unusable(self, what: str, value: object, expected: str) -> RankFailed:
        step, found = len(self._played), " ".join(repr(value).split())[:80]
        return RankFailed(
            f"task '{self.task}' gave the {what} {found} at step {step} of an episode; "
            f"expected {expected}."
        )

    def step(self, action: int) -> tuple[Array, float, int]:
        """One step; actions beyond the environment's own count again from the first."""
        action = action % self.spaces.actions
        if self.config.random_action and self.rng.random() < self.config.random_action:
            action = int(self.rng.integers(self.spaces.actions))
        obs, reward, terminated, truncated, _ = self.env.step(self._first + action)
        self._played.append(action)
        cut = truncated or len(self._played) >= self.config.max_steps
        flags = TERMINATED if terminated else TRUNCATED if cut else 0
        try:
            fits = abs(value := float(reward)) <= MOST
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise self._unusable("reward", reward, "a finite number of 32 bits")
        return self._look(obs), value, flags

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

    def film(self) -> int:
        """Let `picture` work from the next reset on; pictures per second."""
        if "rgb_array" not in self.env.metadata.get("render_modes", ()):
            raise UsageError(f"task '{self.task}' can't be filmed: it does not render rgb_array.")
        self.env.close()
        self.env = self._make(render_mode="rgb_array")
        return int(self.env.metadata.get("render_fps", 30))

    def picture(self) -> Array:
        """What one would see now: [row, column, colour]."""
        try:
            return np.asarray(self.env.render(), dtype=np.uint8)
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise UsageError(f"task '{self.task}' can't be filmed: {error}") from error

    def close(self) -> None:
        """Free what the environment holds."""
        self.env.close()
