"""Tasks: Atari games on the emulator itself, and any gymnasium environment that fits.

Every task is played through `LocalEnvs`, a batch of one or more games stepped together.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, Protocol, cast

import ale_py
import ale_py.roms
import gymnasium
import numpy as np

from canal_mpi import pick, seeding
from canal_mpi.config import Job, TaskConfig, with_tasks
from canal_mpi.errors import DamagedData, RankFailed, UsageError
from canal_mpi.types import CUT, ENDED, LIFE, Array, Columns, Spaces, Step

TWO_PLAYERS = {"combat", "joust", "maze_craze", "warlords"}
PIXELS = (4, 84, 84)


class Game(Protocol):
    """One environment of one task."""

    spaces: Spaces

    def reset(self) -> Array: ...
    def step(self, action: int) -> tuple[Array, float, int]: ...
    def state(self) -> Columns: ...
    def restore(self, state: Columns) -> None: ...
    def close(self) -> None: ...


@cache
def atari_games() -> dict[str, str]:
    """Every Atari game that one player can play, with the id of its ROM."""
    roms = [rom for rom in ale_py.roms.get_all_rom_ids() if rom not in TWO_PLAYERS]
    names = {"".join(word.capitalize() for word in rom.split("_")): rom for rom in roms}
    names["TicTacToe3D"] = names.pop("TicTacToe3d")
    return names


def known() -> list[str]:
    """Every Atari game, then every gymnasium id."""
    own = [name for name in gymnasium.registry if not name.startswith("ALE/")]
    return [*sorted(atari_games()), *sorted(own)]


def canonical(name: str) -> str:
    """The one name of a task: `RoadRunner` also for `ALE/RoadRunner-v5`; refuses unknown ones."""
    game = name.removeprefix("ALE/").removesuffix("-v5")
    if game in atari_games() and name in (game, f"ALE/{game}-v5"):
        return game
    if len(name.encode()) > 64:
        raise UsageError(f"task name '{name[:20]}…' is over 64 bytes long.")
    module, _, short = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(short)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        hint = pick.suggestion(game, known()) or ";"
        raise UsageError(
            f"unknown task '{name}'{hint} `canal-mpi config --list-tasks` lists them."
        ) from error
    return name


def named(job: Job) -> Job:
    """The job with every task under its one name; refuses unknown tasks."""
    return with_tasks(job, [canonical(task) for task in job.tasks])


class AtariGame:
    """One game on the Arcade Learning Environment, seen as RAM or as stacked grey frames."""

    def __init__(self, task: str, config: TaskConfig, seed: np.random.SeedSequence) -> None:
        self.config = config
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._load(task, int(self.rng.integers(1 << 31)))
        self.actions = [int(action.value) for action in self.ale.getLegalActionSet()]
        pixels = config.obs == "pixels"
        self.spaces = Spaces(PIXELS if pixels else (128,), "|u1", len(self.actions))
        self._ram = np.zeros(128, dtype=np.uint8)
        self._screen = Screen(self.ale) if pixels else None
        self._steps = self._lives = self._last_action = 0

    def _load(self, task: str, seed: int) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", 0.0)  # see _act
        rom = ale_py.roms.get_rom_path(atari_games()[task])
        if rom is None:
            raise UsageError(f"ale-py has no ROM for '{task}'; install ale-py from PyPI.")
        self.ale.loadROM(rom)

    def reset(self) -> Array:
        """Start an episode, after a random number of no-ops."""
        self.ale.reset_game()
        self._last_action = 0
        for _ in range(int(self.rng.integers(self.config.noop_max + 1))):
            self._act(0)
            if self.ale.game_over():
                self.ale.reset_game()
        self._steps, self._lives = 0, self.ale.lives()
        if self._screen:
            self._screen.clear()
        return self._look()

    def step(self, action: int) -> tuple[Array, float, int]:
        """Repeat the action for `frame_skip` frames; the observation, the reward, the flags."""
        config, reward = self.config, 0.0
        if config.random_action and self.rng.random() < config.random_action:
            action = int(self.rng.integers(len(self.actions)))
        for frame in range(config.frame_skip):
            reward += self._act(self.actions[action])
            if self.ale.game_over():
                break
            if self._screen and frame == config.frame_skip - 2:
                self._screen.note()
        self._steps += 1
        return self._look(), reward, self._flags()

    def _act(self, action: int) -> float:
        """One frame. Sticky actions are done here: the emulator's state leaves its own out."""
        if not self.config.sticky or self.rng.random() >= self.config.sticky:
            self._last_action = action
        return float(self.ale.act(self._last_action))

    def _flags(self) -> int:
        lives, before = self.ale.lives(), self._lives
        self._lives = lives
        if self.ale.game_over():
            return ENDED
        flags = LIFE if lives < before else 0
        return flags | CUT if self._steps >= self.config.max_steps else flags

    def _look(self) -> Array:
        if self._screen:
            return self._screen.look()
        self.ale.getRAM(self._ram)
        return self._ram.copy()

    def state(self) -> Columns:
        """The emulator and all around it, so that the episode can go on elsewhere."""
        counters = [self._steps, self._lives, self._last_action]
        emulator = self.ale.cloneState(include_rng=True).serialize()
        held = {
            "emulator": np.frombuffer(emulator, dtype=np.uint8),
            "counters": np.array(counters, dtype="<i8"),
            "rng": seeding.snapshot(self.rng),
        }
        return held | (self._screen.state() if self._screen else {})

    def restore(self, state: Columns) -> None:
        """Go on where `state` was taken."""
        self._steps, self._lives, self._last_action = (int(c) for c in state["counters"])
        seeding.rewind(self.rng, state["rng"])
        self.ale.restoreState(ale_py.ALEState(state["emulator"].tobytes()))
        if self._screen:
            self._screen.restore(state)

    def close(self) -> None:
        """Nothing to give back."""


class Screen:
    """Grey frames of 84 x 84 by area averaging, the last four stacked, oldest first."""

    def __init__(self, ale: Any) -> None:
        self.ale = ale
        height, width = ale.getScreenDims()
        self._now = np.zeros((height, width), dtype=np.uint8)
        self._before = np.zeros_like(self._now)
        self._rows, self._columns = _averaging(height, 84), _averaging(width, 84).T.copy()
        self.frames = np.zeros(PIXELS, dtype=np.uint8)
        self._fresh = False

    def clear(self) -> None:
        """A new episode: the first frame fills the stack."""
        self._fresh = True

    def note(self) -> None:
        """Keep the frame before the last one: sprites flicker, so two frames are merged."""
        self.ale.getScreenGrayscale(self._before)

    def look(self) -> Array:
        """Take in the current screen and give the stack."""
        self.ale.getScreenGrayscale(self._now)
        merged = self._now if self._fresh else np.maximum(self._now, self._before)
        small = self._rows @ merged.astype(np.float32) @ self._columns
        self.frames[:-1] = self.frames[1:]
        self.frames[-1] = np.rint(small)
        if self._fresh:
            self.frames[:] = self.frames[-1]
        self._fresh = False
        self._before[:] = self._now  # without frame skip the next look merges with this one
        return self.frames.copy()

    def state(self) -> Columns:
        """The stack and the frame that the next look may merge with."""
        return {"frames": self.frames.copy(), "before": self._before.copy()}

    def restore(self, state: Columns) -> None:
        """Go on where `state` was taken."""
        self.frames[:], self._before[:] = state["frames"], state["before"]
        self._fresh = False


def _averaging(size: int, target: int) -> Array:
    """The matrix that averages `size` pixels into `target` equal parts."""
    edges = np.linspace(0, size, target + 1)
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    weights = np.clip(overlap, 0, None)
    return cast(Array, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


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

    def reset(self) -> Array:
        """Start an episode in every game."""
        for k, game in enumerate(self.games):
            self._place(self._start, k, game.reset())
        return self._start

    def send(self, actions: Array) -> None:
        """Hand over one action a game; they are played in `receive`."""
        self._actions[:] = actions

    def receive(self) -> Step:
        """What the actions led to; games that ended start again."""
        for k, game in enumerate(self.games):
            obs, reward, flags = game.step(int(self._actions[k]))
            if not np.isfinite(reward):
                raise RankFailed(f"task '{self.task}' gave the reward {reward}; it must be finite.")
            self._place(self._obs, k, obs)
            self._reward[k], self._flags[k] = reward, flags
            self._place(self._start, k, game.reset() if flags & (ENDED | CUT) else obs)
        return Step(self._obs, self._reward, self._flags, self._start)

    def _place(self, into: Array, k: int, obs: Array) -> None:
        """Copy one observation; a shorter vector leaves zeros behind it."""
        into.reshape(self.count, -1)[k, : obs.size] = obs.reshape(-1)

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

    def close(self) -> None:
        """Close every game."""
        for game in self.games:
            game.close()


def make_game(task: str, config: TaskConfig, seed: np.random.SeedSequence) -> Game:
    """One game of a task, seeded."""
    kind = AtariGame if task in atari_games() else GymGame
    try:
        return kind(task, config, seed)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"task '{task}' can't be made: {error}") from error


def common_spaces(tasks: Sequence[str], config: TaskConfig) -> Spaces:
    """Spaces that fit every task of the job: vectors are filled up with zeros."""
    found = {task: _spaces_of(task, config) for task in tasks}
    first = found[tasks[0]]
    for task, spaces in found.items():
        vectors = len(spaces.shape) == len(first.shape) == 1
        if spaces.dtype != first.dtype or (spaces.shape != first.shape and not vectors):
            raise UsageError(
                f"tasks of one job must look alike: '{tasks[0]}' observes {first.dtype} "
                f"{first.shape}, '{task}' {spaces.dtype} {spaces.shape}."
            )
    shape = max((spaces.shape for spaces in found.values()), key=prod)
    return Spaces(shape, first.dtype, max(spaces.actions for spaces in found.values()))


def _spaces_of(task: str, config: TaskConfig) -> Spaces:
    if task in atari_games():
        return Spaces(PIXELS if config.obs == "pixels" else (128,), "|u1", 18)
    game = make_game(task, config, np.random.SeedSequence(0))
    game.close()
    return game.spaces
