"""Steps through an env server against local environments, a core for each side.

mpirun -np 2 python benchmarks/env_server.py [--task RoadRunner] [--obs ram] [--steps 100]

Local and remote blocks take turns, and the ratio is the median over neighbors. Then it plays with
one update per step, learning while the server plays, and learning only afterwards.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from measuring import played

from canal_mpi import config, envs
from canal_mpi.envs import env_maker
from canal_mpi.rank.build import make_learner
from canal_mpi.rank.world import World

NUM_ENVS = (1, 4)  # environments per agent


def in_turn(works, repeats, beat):
    """Seconds of each work, each repetition in another order, so that noise hits all alike."""
    times = [[] for _ in works]
    for repeat in range(repeats):
        for k in range(len(works)):
            beat()
            place = (k + repeat) % len(works)
            start = perf_counter()
            works[place]()
            times[place].append(perf_counter() - start)
    return times


def ratio(above, below):
    return median(a / b for a, b in zip(above, below, strict=True))


def pin(rank):
    """Give the agent one core and the server, with its worker, another."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return "one core for both sides: the ratio says little"
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return "agent and server pinned to a core each"


def player(env, turns, learn=None, wait=False):
    """Plays so many turns at random; learns while the environments work, or `wait`s for them."""
    rng = np.random.default_rng(1)
    env.reset()

    def play():
        for _ in range(turns):
            env.send(rng.integers(env.spaces.actions, size=env.count))
            if learn and not wait:
                learn()
            env.recv()
            if learn and wait:
                learn()

    return play


def learning(job):
    """One update per environment, as in training."""
    replay, rng = (
        played(replace(job, train=replace(job.train, num_envs=1)), 1000),
        np.random.default_rng(1),
    )
    learner = make_learner(job, 0, replay.spaces, job.tasks[0])

    def learn():
        for _ in range(job.train.num_envs):
            learner.update(replay.sample(rng)._replace(task=job.tasks[0]))

    return learn


def measure(world, job, steps, repeats):
    from canal_mpi.rank.build import make_env_server, make_remote_envs

    if world.is_env_server:
        with tempfile.TemporaryDirectory() as folder:
            world.run_on_all(lambda: make_env_server(world, job, Path(folder) / "log")).serve()
        return
    spaces, count = envs.common_spaces(job.tasks, job.task), job.train.num_envs
    world.run_on_all(lambda: None)
    remote = make_remote_envs(world, job, spaces)
    made = [make(job.tasks[0], "train", 0) for make in (env_maker(job, spaces), remote)]
    beat, turns = partial(world.heartbeat.beat, world.heartbeat.mine), max(steps // count, 1)
    plain = in_turn([player(env, turns) for env in made], repeats, beat)
    learn, some = learning(job), max(turns // 4, 1)
    loop = in_turn(
        [player(env, some, learn, wait) for env in made for wait in (True, False)], repeats, beat
    )
    remote.close()
    local, server = (count * turns / median(times) for times in plain)
    print(
        f"{count} environment{'s' * (count > 1)} per agent: local {local:.0f} steps/s, server "
        f"{server:.0f} steps/s, server/local {ratio(plain[0], plain[1]):.2f}\n"
        f"  with an update per step: learning while the server plays {ratio(loop[2], loop[3]):.2f} "
        f"× learning afterwards, {ratio(loop[0], loop[3]):.2f} × local",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="RoadRunner")
    parser.add_argument("--obs", default="ram")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    job = envs.named(config.resolve({"tasks": [options.task], "task.obs": options.obs}))
    world = World.open()
    pinned = pin(world.rank)
    world.handshake(f"env_server {options}")
    world.assign_env_servers(1)
    world.heartbeat.timeout = job.timeout
    if world.rank == 0:
        print(f"{options.task} ({options.obs}), {pinned}", flush=True)
    for count in NUM_ENVS:
        train = replace(job.train, num_envs=count)
        measure(world, replace(job, train=train), options.steps, options.repeats)
    world.finish()


if __name__ == "__main__":
    main()
