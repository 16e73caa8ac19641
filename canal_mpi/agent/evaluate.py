"""An evaluation: greedy episodes of one task, for training and for `canal-mpi evaluate`."""

from collections.abc import Callable

import numpy as np

from canal_mpi.interfaces import TERMINATED, TRUNCATED, Array, Env, Step
from canal_mpi.settings import EvaluationConfig

Seen = Callable[[Array, Step], None]  # is shown every action and what followed


def episodes(
    env: Env,
    act: Callable[[Array], Array],
    rng: np.random.Generator,
    settings: EvaluationConfig,
    beat: Callable[[], None],
    seen: Seen | None = None,
) -> list[tuple[float, int]]:
    """Return and length of each episode; now and then an action is drawn from `rng`."""
    found = []
    for _ in range(settings.episodes):
        obs, total, length, over = env.reset(), 0.0, 0, False
        while not over and length < settings.max_steps:
            actions = act(obs)
            if rng.random() < settings.epsilon:
                actions[0] = rng.integers(env.spaces.actions)
            env.send(actions)
            step = env.recv()
            if seen is not None:
                seen(actions, step)
            obs, total, length = step.start, total + float(step.reward[0]), length + 1
            over = bool(step.flags[0] & (TERMINATED | TRUNCATED))
            beat()
        found.append((total, length))
    return found
