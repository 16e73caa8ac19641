"""Tasks: their names, their spaces, and batches of games that play them in this process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Protocol

import gymnasium
import numpy as np

from canal_mpi.config import with_tasks
from canal_mpi.envs.atari import AtariGame, atari_games, atari_spaces
from canal_mpi.envs.gym import GymGame
from canal_mpi.errors import (
    CanalError,
    DamagedData,
    RankFailed,
    UsageError,
    described,
    import_module,
    suggestion,
)
from canal_mpi.games import win_return_of
from canal_mpi.interfaces import (
    TERMINATED,
    TRUNCATED,
    Array,
    Columns,
    Env,
    Spaces,
    Step,
)
from canal_mpi.settings import Job, TaskConfig
from canal_mpi.state import seed_sequence, strip_prefix, with_prefix


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
    if module:
        import_module(module, f"task '{name}'")
    try:
        gymnasium.spec(short)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        hint = suggestion(game, known(), cutoff=0.75) or ";"
        words = f"unknown task '{name}'{hint} `canal-mpi config --list-tasks` lists them; "
        words += "one of your own is module:id."
        if module:
            words = f"task '{name}': module '{module}' registers no environment '{short}'; "
            words += f'gymnasium.register(id="{short}", entry_point=...) in it does.'
        raise UsageError(words) from error
    return name


def named(job: Job) -> Job:
    """The job with every task under its one name, and its win returns; refuses unknown tasks."""
    job = with_tasks(job, [canonical(task) for task in job.tasks])
    wins = tuple(_win_returns(job))
    if job.train.win_return and not wins:
        names = ", ".join(job.tasks)
        raise UsageError(
            f"train.win_return: found 'known', and gymnasium knows none of {names}; "
            f"expected numbers, as in {job.tasks[0]}=18."
        )
    return replace(job, train=replace(job.train, win_return=wins))


def _win_returns(job: Job) -> Iterator[str]:
    """Every `task=return`; `known` stands for those that gymnasium's registry has."""
    for win in job.train.win_return:
        task, equals, _ = win.rpartition("=")
        if win == "known":
            others = [task for task in job.tasks if task not in atari_games()]
            limits = {task: gymnasium.spec(task).reward_threshold for task in others}
            yield from (f"{task}={limit}" for task, limit in limits.items() if limit is not None)
        elif not equals or canonical(task) not in job.tasks:
            known = ", ".join(job.tasks)
            raise UsageError(
                f"train.win_return: found '{win}'; expected known, or task=return with one of the "
                f"job's tasks: {known}."
            )
        else:
            win_return_of([win], task)
            yield f"{canonical(task)}={win.rpartition('=')[2]}"


class Game(Protocol):
    """One environment of one task."""

    spaces: Spaces

    def reset(self) -> Array: ...
    def step(self, action: int) -> tuple[Array, float, int]: ...
    def state_dict(self) -> Columns: ...
    def load_state_dict(self, state: Columns) -> None: ...
    def close(self) -> None: ...


class LocalEnvs:
    """A batch of games of one task in this process, the first of which has a number.

    It looks the same from outside as a server.
    """

    def __init__(self, task: str, games: Sequence[Game], spaces: Spaces, first: int = 0) -> None:
        self.task, self.games, self.spaces, self.first = task, list(games), spaces, first
        self.count = len(self.games)
        self._actions: Array = np.zeros(self.count, dtype=np.int64)
        self._step = empty_step(self.count, spaces)
        self._playing = False

    def reset(self) -> Array:
        """Start an episode in every game."""
        for k, game in enumerate(self.games):
            _place(self._step.start[k], game.reset())
        self._playing = True
        return self._step.start

    def send(self, actions: Array) -> None:
        """Hand over one action per game; they are played in `recv`."""
        self._actions[:] = actions

    def recv(self) -> Step:
        """What the actions led to; games that ended start again."""
        if not self._playing:
            raise RankFailed(f"task '{self.task}' was stepped before its first reset.")
        for k, game in enumerate(self.games):
            action = int(self._actions[k])
            if not 0 <= action < self.spaces.actions:
                known = f"0 to {self.spaces.actions - 1}"
                raise RankFailed(f"task '{self.task}' has the actions {known}, not {action}.")
            obs, reward, flags = game.step(action)
            _place(self._step.obs[k], obs)
            self._step.reward[k], self._step.flags[k] = reward, flags
            _place(self._step.start[k], game.reset() if flags & (TERMINATED | TRUNCATED) else obs)
        return self._step

    def state_dict(self) -> Columns:
        """The state of every game."""
        numbered = enumerate(self.games, self.first)
        states = (with_prefix(f"game-{k}", game.state_dict()) for k, game in numbered)
        return {name: column for state in states for name, column in state.items()}

    def load_state_dict(self, state: Columns) -> None:
        """Go on where `state` was taken."""
        for k, game in enumerate(self.games, self.first):
            held = strip_prefix(f"game-{k}", state)
            if not held:
                raise DamagedData(f"saved environments lack game {k}")
            game.load_state_dict(held)
        self._playing = True

    def close(self) -> None:
        """Close every game."""
        for game in self.games:
            game.close()


def empty_step(count: int, spaces: Spaces) -> Step:
    """The arrays that a batch of so many games writes its steps into."""
    obs, start = (np.zeros((count, *spaces.shape), dtype=spaces.dtype) for _ in range(2))
    return Step(obs, np.zeros(count), np.zeros(count, dtype=np.uint8), start)


def _place(into: Array, obs: Array) -> None:
    """Copy one observation; a shorter vector leaves zeros behind it."""
    into.reshape(-1)[: obs.size] = obs.reshape(-1)


def make_game(task: str, config: TaskConfig, seed: np.random.SeedSequence) -> Game:
    """One game of a task, seeded."""
    kind = AtariGame if task in atari_games() else GymGame
    try:
        return kind(task, config, seed)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"task '{task}' can't be made: {error}") from error
    except (CanalError, MemoryError):
        raise
    except Exception as error:
        words = f"{described(error)}; -v shows the traceback."
        raise RankFailed(f"task '{task}' can't be made: {words}") from error


def common_spaces(tasks: Sequence[str], config: TaskConfig) -> Spaces:
    """Spaces that fit every task of the job: vectors are filled up with zeros."""
    found = {task: _spaces_of(task, config) for task in tasks}
    first = found[tasks[0]]
    for task, spaces in found.items():
        vectors = len(spaces.shape) == len(first.shape) == 1
        alike = (spaces.dtype, spaces.stack) == (first.dtype, first.stack)
        if not alike or (spaces.shape != first.shape and not vectors):
            raise UsageError(
                f"tasks of one job must look alike: '{tasks[0]}' observes {first.dtype} "
                f"{first.shape}, '{task}' {spaces.dtype} {spaces.shape}."
            )
    shape = max((spaces.shape for spaces in found.values()), key=prod)
    return replace(first, shape=shape, actions=max(one.actions for one in found.values()))


def _spaces_of(task: str, config: TaskConfig) -> Spaces:
    if task in atari_games():
        return atari_spaces(config)
    game = make_game(task, config, np.random.SeedSequence(0))
    game.close()
    return game.spaces


def envs_for(job: Job, purpose: str) -> int:
    """How many games are played at once: several while training, one otherwise."""
    return job.train.num_envs if purpose == "train" else 1


def env_maker(job: Job, spaces: Spaces) -> Callable[..., Env]:
    """An EnvMaker of this process. Each game is seeded by agent, task, purpose and its number;
    a worker of an env server plays only some: `games` from the `first` on."""

    def make(task: str, purpose: str, agent: int, first: int = 0, games: int = 0) -> Env:
        config = job.task
        if purpose != "train":
            most = min(config.max_steps, job.evaluation.max_steps)
            config = replace(config, max_steps=most)
        numbers = range(first, first + (games or envs_for(job, purpose)))
        names = [f"env-{purpose}" + f"-{k}" * bool(k) for k in numbers]
        seeds = [seed_sequence(job.seed, agent, task, name) for name in names]
        return LocalEnvs(task, [make_game(task, config, seed) for seed in seeds], spaces, first)

    return make
