"""Sharing policies and learners that misbehave on purpose; jobs name them as module:name."""

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from canal_mpi.interfaces import Array, Batch, Columns, Learner, Offer, Spaces
from canal_mpi.launcher import detect
from canal_mpi.membuf.selection import Need, exact
from canal_mpi.settings import Job


def _rank() -> int:
    launcher = detect()
    return launcher.rank if launcher else 0


def _late(offers: Sequence[Offer]) -> bool:
    """In the second round or later, on rank 1."""
    return bool(offers) and _rank() == 1


def raises(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        raise ZeroDivisionError("on purpose")
    return exact(need, offers)


def leaves(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        sys.exit(3)
    return exact(need, offers)


def drops_out(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        os._exit(3)
    return exact(need, offers)


def is_killed(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        os.kill(os.getpid(), signal.SIGKILL)
    return exact(need, offers)


def first_is_killed(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if offers and _rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return exact(need, offers)


def hangs(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        time.sleep(600)
    return exact(need, offers)


def stops_at_the_end(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
    return exact(need, offers)


def is_slow(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    if _late(offers):
        time.sleep(6)
    return exact(need, offers)


class Lazy(Learner):
    """A learner that learns nothing, by the five methods that an algorithm has to have."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None: ...

    def set_task(self, task: str) -> None: ...

    def act(self, obs: Array) -> Array:
        return np.zeros(len(obs), dtype=np.int64)

    def update(self, batch: Batch) -> float:
        return float(batch.returns.sum())

    def state_dict(self) -> Columns:
        return {"nothing": np.zeros(1, dtype=np.float32)}

    def load_state_dict(self, state: Columns) -> None: ...


class Linear(Learner):
    """A small Q-learner with a state and without torch: quick to start, and every bit counts."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None:
        rng = np.random.default_rng(seed("weights"))
        size = int(np.prod(spaces.shape))
        self.weights = rng.normal(0, 0.1, (size, spaces.actions)).astype(np.float32)
        self.updates = 0

    def set_task(self, task: str) -> None: ...

    def q_values(self, obs: Array) -> Array:
        found: Array = obs.reshape(len(obs), -1).astype(np.float32) @ self.weights
        return found

    def act(self, obs: Array) -> Array:
        best: Array = self.q_values(obs).argmax(axis=1)
        return best

    def update(self, batch: Batch) -> float:
        wrong = self.td_errors(batch)
        self.updates += 1
        rate = np.float32(1e-3 / (1 + np.abs(wrong).max()))
        np.add.at(self.weights.T, batch.actions, -rate * wrong[:, None] * np.tanh(batch.states))
        return float(np.square(wrong).mean())

    def td_errors(self, batch: Batch) -> Array:
        rows = np.arange(len(batch.actions))
        goal = batch.returns + batch.discounts * self.q_values(batch.next_states).max(axis=1)
        found: Array = self.q_values(batch.states)[rows, batch.actions] - goal
        return found

    def get_weights(self) -> Columns:
        return {"weights": self.weights.reshape(-1).copy()}

    def set_weights(self, network: Columns) -> None:
        self.weights[:] = network["weights"].reshape(self.weights.shape)

    def state_dict(self) -> Columns:
        return {"weights": self.weights.copy(), "updates": np.array([self.updates])}

    def load_state_dict(self, state: Columns) -> None:
        self.weights[:], self.updates = state["weights"], int(state["updates"][0])


BAD_NUMBERS = {  # what environments of these names give at their 20th step
    "NanReward": (np.zeros(2), float("nan")),
    "HugeReward": (np.zeros(2), 1e300),
    "LargeReward": (np.zeros(2), 1e38),  # a buffer can hold it, a network can't learn it
    "NanObs": (np.array([0, float("nan")]), 0.0),
    "NoObs": (None, 0.0),
    "ShortObs": (np.zeros(1), 0.0),
    "ByteObs": (np.array([0, 300]), 0.0),
}


class BadNumbers(gymnasium.Env[Array, np.int64]):
    """Gives an observation or a reward that no buffer can hold."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.bad = BAD_NUMBERS[kind]
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        if kind == "ByteObs":
            self.observation_space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)

    def reset(self, **_: object) -> tuple[Array, dict[str, object]]:
        self.steps = 0
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        self.steps += 1
        obs, reward = self.bad if self.steps == 20 else (np.zeros(2), 0.0)
        return obs, reward, False, False, {}  # type: ignore[return-value]


for _kind in BAD_NUMBERS:
    gymnasium.register(f"{_kind}-v0", "plugins:BadNumbers", kwargs={"kind": _kind})


class Sleepy(gymnasium.Env[Array, np.int64]):
    """Takes 4 ms a step without computing; 24 ms on the rank that SLOW_RANK names."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: object) -> tuple[Array, dict[str, object]]:
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        time.sleep(0.024 if os.environ.get("SLOW_RANK") == str(_rank()) else 0.004)
        return np.zeros(2, dtype=np.float32), 0.0, False, False, {}


gymnasium.register("Sleepy-v0", "plugins:Sleepy")
gymnasium.register("Sleepy-v1", "plugins:Sleepy")


def nothing(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Offers are made and nobody wants them."""
    return []


def fills_the_disk(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Leaves no room where the run goes, from the second round on."""
    if offers and _rank() == 0:
        folder = sys.argv[sys.argv.index("--out") + 1]
        with contextlib.suppress(OSError), open(f"{folder}/filler", "wb") as file:  # noqa: PTH123
            while True:
                file.write(bytes(4096))
                file.flush()
    return exact(need, offers)


class Trouble(gymnasium.Env[Array, np.int64]):
    """Raises, hangs or crashes at its 20th step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, kind: str = "raises") -> None:
        self.kind, self.steps = kind, 0

    def reset(self, **_: object) -> tuple[Array, dict[str, object]]:
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        self.steps += 1
        if self.steps == 20:
            {"raises": self._raise, "hangs": self._hang, "crashes": self._crash}[self.kind]()
        return np.zeros(2, dtype=np.float32), 0.0, False, False, {}

    def _raise(self) -> None:
        raise ZeroDivisionError("on purpose")

    def _hang(self) -> None:
        time.sleep(600)

    def _crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


for _kind in ("raises", "hangs", "crashes"):
    gymnasium.register(f"{_kind.capitalize()}-v0", "plugins:Trouble", kwargs={"kind": _kind})


class Lock(gymnasium.Env[Any, Array]):
    """Shows a door and its number; one of six combinations opens it, within ten steps."""

    observation_space = gymnasium.spaces.Dict(
        door=gymnasium.spaces.Discrete(3), look=gymnasium.spaces.Box(0, 1, (2, 2), np.float32)
    )
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, **_: object) -> tuple[dict[str, object], dict[str, object]]:
        self.steps = 0
        return self._look(), {}

    def step(self, action: Array) -> tuple[dict[str, object], float, bool, bool, dict[str, object]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        opened = action.tolist() == [1, 2]
        return self._look(), float(opened), opened, self.steps == 10, {}

    def _look(self) -> dict[str, object]:
        return {"door": np.int64(2), "look": np.full((2, 2), self.steps / 10, dtype=np.float32)}


gymnasium.register("Lock-v0", "plugins:Lock")
