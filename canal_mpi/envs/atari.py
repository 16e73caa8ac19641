"""Atari games on the emulator itself, seen as stacked frames: RAM or grey pictures."""

from functools import cache
from typing import ClassVar, cast

import ale_py
import ale_py.roms
import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Array, Columns, Spaces
from canal_mpi.settings import TaskConfig
from canal_mpi.state import rng_state, set_rng_state

TWO_PLAYERS = {"combat", "joust", "maze_craze", "warlords"}
SIDE = 84  # of a grey frame


@cache
def atari_games() -> dict[str, str]:
    """Every Atari game that one player can play, with the id of its ROM."""
    roms = [rom for rom in ale_py.roms.get_all_rom_ids() if rom not in TWO_PLAYERS]
    names = {"".join(word.capitalize() for word in rom.split("_")): rom for rom in roms}
    names["TicTacToe3D"] = names.pop("TicTacToe3d")
    return names


MOST_IDLE = 16  # emulators that are kept for the next game


class Emulator(ale_py.ALEInterface):
    """A loaded game. Loading takes a quarter of a second, so emulators are used again.

    Set back to its first state a used one plays like a new one: without sticky actions of its own,
    the emulator draws no random numbers.
    """

    idle: ClassVar[list["Emulator"]] = []

    def __init__(self, task: str) -> None:
        self.setLoggerMode(ale_py.LoggerMode.Error)
        super().__init__()
        self.task = task
        self.setInt("random_seed", 0)
        self.setFloat("repeat_action_probability", 0.0)  # see AtariGame._act
        rom = ale_py.roms.get_rom_path(atari_games()[task])
        if rom is None:
            raise UsageError(f"ale-py has no ROM for '{task}'; install ale-py from PyPI.")
        self.loadROM(rom)
        self.reset_game()
        self.opening = self.getScreenRGB()
        self._start = self.cloneState(include_rng=True)

    @classmethod
    def of(cls, task: str) -> "Emulator":
        """One that is as new."""
        found = next((one for one in cls.idle if one.task == task), None)
        if found is None:
            return cls(task)
        cls.idle.remove(found)
        found.restart()
        return found

    def restart(self) -> None:
        """Be at the start of a game. The emulator's own reset plays a second of the game for it,
        a hundred times as long; this leaves only the screen as it was until the next frame."""
        self.restoreState(self._start)

    def give_back(self) -> None:
        """Keep it for the next game; the longest idle one makes room."""
        self.idle.append(self)
        del self.idle[:-MOST_IDLE]


def atari_spaces(config: TaskConfig) -> Spaces:
    """What every game looks like: the newest `frame_stack` frames, oldest first."""
    stack, actions = config.frame_stack, 18
    if config.obs == "pixels":
        return Spaces((stack, SIDE, SIDE), "|u1", actions, stack)
    return Spaces((128 * stack,), "|u1", actions, stack)


class AtariGame:
    """One game on the Arcade Learning Environment."""

    def __init__(self, task: str, config: TaskConfig, seed: np.random.SeedSequence) -> None:
        self.config = config
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.rng.integers(1 << 31)  # once the emulator's seed: streams stay as they were
        self.ale, self._open = Emulator.of(task), True
        self.actions = [int(action.value) for action in self.ale.getLegalActionSet()]
        self.spaces = atari_spaces(config)
        self._frames = np.zeros((config.frame_stack, *self.spaces.frame_shape), dtype=np.uint8)
        self._screen = Screen(self.ale) if config.obs == "pixels" else None
        self._steps = self._lives = self._last_action = 0
        self._shown = False  # whether the screen shows this game already

    def reset(self) -> Array:
        """Start an episode, after a random number of no-ops."""
        self._restart()
        self._last_action = 0
        for _ in range(int(self.rng.integers(self.config.noop_max + 1))):
            self._act(0)
            if self.ale.game_over():
                self._restart()
        self._steps, self._lives = 0, self.ale.lives()
        if self._screen:
            self._screen.before[:] = 0  # the first frame is merged with none before it
        self._look()
        self._frames[:] = self._frames[-1]  # the first frame fills the stack
        return self._frames.reshape(self.spaces.shape).copy()

    def _restart(self) -> None:
        self._shown = bool(self._screen)
        if self._screen:
            self.ale.reset_game()  # many games begin otherwise after it than after a restart
        else:
            self.ale.restart()

    def step(self, action: int) -> tuple[Array, float, int]:
        """Repeat the action for `frame_skip` frames; the observation, the reward, the flags."""
        config, reward = self.config, 0.0
        if config.random_action and self.rng.random() < config.random_action:
            action = int(self.rng.integers(len(self.actions)))
        chosen = self.actions[action % len(self.actions)]  # Skiing has fewer than 18
        for frame in range(config.frame_skip):
            reward += self._act(chosen)
            if self.ale.game_over():
                break
            if self._screen and frame == config.frame_skip - 2:
                self._screen.note()
        self._steps += 1
        return self._look(), reward, self._flags()

    def _act(self, action: int) -> float:
        """One frame. Sticky actions are done here: the emulator's state leaves its own out."""
        if (
            not self.config.repeat_action_probability
            or self.rng.random() >= self.config.repeat_action_probability
        ):
            self._last_action = action
        self._shown = True
        return float(self.ale.act(self._last_action))

    def _flags(self) -> int:
        lives, before = self.ale.lives(), self._lives
        self._lives = lives
        if self.ale.game_over():
            return TERMINATED
        flags = LIFE if lives < before else 0
        return flags | TRUNCATED if self._steps >= self.config.max_steps else flags

    def _look(self) -> Array:
        """Take in the current frame and give the stack."""
        self._frames[:-1] = self._frames[1:]
        if self._screen:
            self._frames[-1] = self._screen.look()
        else:
            self.ale.getRAM(self._frames[-1])
        return self._frames.reshape(self.spaces.shape).copy()

    def state_dict(self) -> Columns:
        """The emulator and all around it, so that the episode can go on elsewhere."""
        counters = [self._steps, self._lives, self._last_action]
        emulator = self.ale.cloneState(include_rng=True).serialize()
        held = {
            "emulator": np.frombuffer(emulator, dtype=np.uint8),
            "counters": np.array(counters, dtype="<i8"),
            "rng": rng_state(self.rng),
            "frames": self._frames.copy(),
        }
        return held | ({"before": self._screen.before.copy()} if self._screen else {})

    def load_state_dict(self, state: Columns) -> None:
        """Go on where `state` was taken."""
        self._steps, self._lives, self._last_action = (int(c) for c in state["counters"])
        set_rng_state(self.rng, state["rng"])
        self._frames[:] = state["frames"]
        self.ale.restoreState(ale_py.ALEState(state["emulator"].tobytes()))
        if self._screen:
            self._screen.before[:] = state["before"]

    def film(self) -> int:
        """Pictures per second, where one is taken at every step."""
        return 15

    def picture(self) -> Array:
        """The screen in colour, as people see it."""
        screen: Array = self.ale.getScreenRGB() if self._shown else self.ale.opening
        return screen

    def close(self) -> None:
        """Leave the emulator to the next game."""
        if self._open:
            self._open = False
            self.ale.give_back()


class Screen:
    """Grey frames of 84 x 84 by area averaging, of two merged ones: sprites flicker."""

    def __init__(self, ale: Emulator) -> None:
        self.ale = ale
        height, width = ale.getScreenDims()
        self._now = np.zeros((height, width), dtype=np.uint8)
        self.before = np.zeros_like(self._now)  # what the next one is merged with
        self._rows, self._columns = _averaging(height, SIDE), _averaging(width, SIDE).T.copy()

    def note(self) -> None:
        """Keep the frame before the last one."""
        self.ale.getScreenGrayscale(self.before)

    def look(self) -> Array:
        """The current screen."""
        self.ale.getScreenGrayscale(self._now)
        merged = np.maximum(self._now, self.before)
        small = self._rows @ merged.astype(np.float32) @ self._columns
        self.before[:] = self._now  # without frame skip the next look merges with this one
        frame: Array = np.rint(small).astype(np.uint8)
        return frame


def _averaging(size: int, target: int) -> Array:
    """The matrix that averages `size` pixels into `target` equal parts."""
    edges = np.linspace(0, size, target + 1)
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    weights = np.clip(overlap, 0, None)
    return cast(Array, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))
