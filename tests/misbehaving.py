"""Environments that misbehave in fifteen ways; jobs name them as `misbehaving:StepHangs-v0`."""

import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat

import gymnasium
import numpy as np

from canal_mpi.interfaces import Array

FOR_EVER = 600


def _raise() -> None:
    raise ZeroDivisionError("on purpose")


def _sleep() -> None:
    time.sleep(FOR_EVER)


def _spin() -> None:
    end = time.monotonic() + FOR_EVER
    while time.monotonic() < end:
        pass


def _hold_the_interpreter() -> None:
    deque(repeat(None), maxlen=0)  # a loop in C that looks at no signal


def _exit() -> None:
    sys.exit(3)


def _leave() -> None:
    os._exit(3)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash() -> None:
    ctypes.string_at(0)


WAYS: dict[str, tuple[str, Callable[[], None] | None]] = {
    "StepHangs": ("step", _sleep),
    "StepSpins": ("step", _spin),
    "StepHolds": ("step", _hold_the_interpreter),
    "ResetHangs": ("reset", _sleep),
    "MakeHangs": ("make", _sleep),
    "CloseHangs": ("close", _sleep),
    "StepRaises": ("step", _raise),
    "ResetRaises": ("reset", _raise),
    "MakeRaises": ("make", _raise),
    "StepExits": ("step", _exit),
    "StepLeaves": ("step", _leave),
    "StepKilled": ("step", _kill),
    "StepCrashes": ("step", _crash),
    "StepShort": ("step", None),  # an answer of too few parts
    "StepNan": ("step", None),  # an observation that is no number
}
HANG = tuple(kind for kind in WAYS if kind.endswith(("Hangs", "Spins", "Holds")))


class Misbehaving(gymnasium.Env[Array, np.int64]):
    """Does as its kind says at its 20th step, or wherever that is."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.kind, self.steps = kind, 0
        self._do("make")
        if os.environ.get("MAKE_RAISES"):
            _raise()

    def _do(self, where: str) -> None:
        place, act = WAYS[self.kind]
        if place == where and act is not None:
            act()

    def reset(self, **_: object) -> tuple[Array, dict[str, object]]:
        self._do("reset")
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        self.steps += 1
        obs = np.zeros(2, dtype=np.float32)
        if self.steps == 20:
            self._do("step")
            if self.kind == "StepShort":
                return obs, 0.0  # type: ignore[return-value]
            obs[0] = np.nan if self.kind == "StepNan" else 0
        return obs, 0.0, False, self.steps % 50 == 0, {}

    def close(self) -> None:
        self._do("close")


for _kind in WAYS:
    gymnasium.register(f"{_kind}-v0", "misbehaving:Misbehaving", kwargs={"kind": _kind})
