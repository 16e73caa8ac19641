"""An environment of one's own: a corridor, at one end of which lies a reward.

canal-mpi train --tasks corridor:CorridorRight-v0,corridor:CorridorLeft-v0 --steps 2000
"""

from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

LENGTH = 7
Vector: TypeAlias = NDArray[np.float32]


class Corridor(gymnasium.Env[Vector, np.int64]):
    """Start in the middle; action 0 goes left, 1 goes right; the goal pays 1 and ends."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, goal: int = LENGTH - 1, render_mode: str | None = None) -> None:
        self.goal, self.place, self.render_mode = goal, LENGTH // 2, render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        """Begin an episode; all randomness has to come from the seed (`self.np_random`)."""
        super().reset(seed=seed)
        self.place = LENGTH // 2
        return self.look(), {}

    def step(self, action: np.int64) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        """Go one place; each step costs a little."""
        self.place = min(max(self.place + (1 if action else -1), 0), LENGTH - 1)
        over = self.place == self.goal
        return self.look(), 1.0 if over else -0.01, over, False, {}

    def look(self) -> Vector:
        """1 where one is, 0 elsewhere."""
        seen = np.zeros(LENGTH, np.float32)
        seen[self.place] = 1
        return seen

    def render(self) -> NDArray[np.uint8]:
        """A picture for films (`canal-mpi evaluate --video`)."""
        picture = np.zeros((1, LENGTH, 3), dtype=np.uint8)
        picture[0, self.place], picture[0, self.goal, 1] = 255, 200
        return picture.repeat(32, axis=0).repeat(32, axis=1)


# Importing this module registers its tasks: `corridor:CorridorRight-v0` does both.
for name, goal in (("CorridorRight-v0", LENGTH - 1), ("CorridorLeft-v0", 0)):
    gymnasium.register(name, "corridor:Corridor", max_episode_steps=50, kwargs={"goal": goal})
