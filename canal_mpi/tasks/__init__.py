"""Tasks: their names, their spaces, and the games that play them."""

import importlib
from collections.abc import Sequence
from math import prod

import gymnasium
import numpy as np

from canal_mpi import pick
from canal_mpi.config import with_tasks
from canal_mpi.errors import UsageError
from canal_mpi.job import Job, TaskConfig
from canal_mpi.tasks.atari import PIXELS, AtariGame, atari_games
from canal_mpi.tasks.gym import GymGame
from canal_mpi.tasks.local import Game
from canal_mpi.types import Spaces


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
