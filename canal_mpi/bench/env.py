"""`canal-mpi bench env`: steps through an env server against local ones, a core for each side."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi import config, tasks
from canal_mpi.bench import in_turn, ratio, under_mpirun
from canal_mpi.job import Job
from canal_mpi.rank.launcher import detect
from canal_mpi.types import Env

if TYPE_CHECKING:
    from canal_mpi.rank.world import World

GAMES = (1, 4)  # environments per agent


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    steps: int = 100  # of a block, over all games
    repeats: int = 30


def run(task: str, obs: str, size: Size) -> int:
    """Measure on two ranks, started here where no launcher did."""
    job = tasks.named(config.resolve({"tasks": [task], "task.obs": obs}))
    if detect() is None:
        numbers = ["--steps", str(size.steps), "--repeats", str(size.repeats)]
        return under_mpirun(2, ["bench", "env", "--task", task, "--obs", obs, *numbers])
    from canal_mpi.rank.world import World

    world = World()
    world.open()
    pinned = _pin(world.rank)
    world.handshake(f"bench env {task} {obs} {size}")
    world.seat([1])
    world.watch.timeout = job.timeout
    if world.rank == 0:
        print(f"{task} ({obs}), {size.repeats} × {size.steps} steps, {pinned}", flush=True)
    for games in GAMES:
        _measure(world, replace(job, train=replace(job.train, envs=games)), size)
    world.finish()
    return 0


def _pin(rank: int) -> str:
    """Give the agent one core and the server, with its worker, another."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return "one core for both sides: the ratio says little"
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return "agent and server pinned to a core each"


def _measure(world: "World", job: Job, size: Size) -> None:
    from canal_mpi.rank import build, seating
    from canal_mpi.rank.remote import RemoteMaker

    if world.serves:
        with tempfile.TemporaryDirectory() as folder:
            world.together(lambda: seating.server(world, job, Path(folder) / "log")).serve()
        return
    spaces = tasks.common_spaces(job.tasks, job.task)
    world.together(lambda: None)
    remote = RemoteMaker(seating.lanes_of_agent(world, job, spaces), job, spaces)
    envs = [make(job.tasks[0], "train", 0) for make in (build.env_maker(job, spaces), remote)]
    beat = partial(world.watch.beat, world.watch.mine)
    turns = max(size.steps // job.train.envs, 1)
    plain = in_turn([_player(env, turns) for env in envs], size.repeats, beat)
    learn, some = _learning(job), max(turns // 4, 1)
    hidden = [_player(env, some, learn, wait) for env in envs for wait in (True, False)]
    loop = in_turn(hidden, size.repeats, beat)
    remote.close()
    _tell(job.train.envs, turns, plain, loop)


def _player(
    env: Env, turns: int, learn: Callable[[], None] | None = None, wait: bool = False
) -> Callable[[], None]:
    """Plays so many turns at random; learns while the games are played, or `wait`s for them."""
    rng = np.random.default_rng(1)
    env.reset()

    def play() -> None:
        for _ in range(turns):
            env.send(rng.integers(env.spaces.actions, size=env.count))
            if learn and not wait:
                learn()
            env.receive()
            if learn and wait:
                learn()

    return play


def _learning(job: Job) -> Callable[[], None]:
    """One update a game, as in training."""
    from canal_mpi.membuf.replay import Replay
    from canal_mpi.rank import build

    spaces = tasks.common_spaces(job.tasks, job.task)
    learner = build.learner(job, 0, spaces, job.tasks[0])
    replay = Replay(spaces, 1000, build.recipe(job), job.train.envs)
    env, rng = build.env_maker(job, spaces)(job.tasks[0], "train", 0), np.random.default_rng(1)
    replay.own.start(env.reset())
    while not replay.ready:
        actions = rng.integers(spaces.actions, size=env.count)
        env.send(actions)
        replay.own.add(actions, env.receive())

    def learn() -> None:
        for _ in range(env.count):
            learner.learn(replay.sample(rng)._replace(task=job.tasks[0]))

    return learn


def _tell(games: int, turns: int, plain: list[list[float]], loop: list[list[float]]) -> None:
    steps = [games * turns / median(times) for times in plain]
    print(
        f"{games} environment{'s' * (games > 1)} per agent: local {steps[0]:.0f} steps/s, server "
        f"{steps[1]:.0f} steps/s, server/local {ratio(plain[0], plain[1]):.2f}\n"
        f"  with an update a step: learning while the server plays {ratio(loop[2], loop[3]):.2f} × "
        f"learning afterwards, {ratio(loop[0], loop[3]):.2f} × local",
        flush=True,
    )
