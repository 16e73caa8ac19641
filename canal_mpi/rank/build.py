"""Puts an agent together; the one place that knows every room."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from canal_mpi import pick, seeding
from canal_mpi.agent import Agent
from canal_mpi.job import Job
from canal_mpi.learn import ALGORITHMS
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.memory import Memory
from canal_mpi.membuf.replay import Replay, Sampler
from canal_mpi.membuf.share import POLICIES
from canal_mpi.membuf.similarity import play_embedding
from canal_mpi.membuf.targets import Recipe
from canal_mpi.record import Recorder
from canal_mpi.sharing import Sharing
from canal_mpi.tasks import common_spaces, make_game
from canal_mpi.tasks.local import LocalEnvs
from canal_mpi.types import (
    Array,
    Beat,
    Columns,
    Embed,
    Env,
    EnvMaker,
    Learner,
    Link,
    Saver,
    Sink,
    Spaces,
)


def games_maker(job: Job, spaces: Spaces) -> Callable[[str, str, int, int, int], Env]:
    """Makes games `first` to `first + games` of a task, each seeded by its number too."""

    def make(task: str, purpose: str, agent: int, first: int, games: int) -> Env:
        config = job.task
        if purpose != "train":
            most = min(config.max_steps, job.evaluation.max_steps)
            config = replace(config, max_steps=most)
        names = [f"env-{purpose}" + f"-{k}" * bool(k) for k in range(first, first + games)]
        seeds = [seeding.sequence(job.seed, agent, task, name) for name in names]
        return LocalEnvs(task, [make_game(task, config, seed) for seed in seeds], spaces)

    return make


def games_for(job: Job, purpose: str) -> int:
    """How many games are played at once: several while training, one otherwise."""
    return job.train.envs if purpose == "train" else 1


def env_maker(job: Job, spaces: Spaces) -> EnvMaker:
    """Environments of this process, seeded by agent, task and purpose."""
    make = games_maker(job, spaces)
    return lambda task, purpose, agent: make(task, purpose, agent, 0, games_for(job, purpose))


def learner(job: Job, agent: int, spaces: Spaces, first_task: str) -> Learner:
    """The learner that the job names, with this agent's first weights."""
    make = pick.pick("algorithm", job.learn.algorithm, ALGORITHMS)
    made: Learner = make(spaces, job, partial(seeding.integer, job.seed, agent, ""))
    made.begin(first_task)
    made.act(np.zeros((1, *spaces.shape), dtype=spaces.dtype))  # what can't work fails here
    return made


def recipe(job: Job) -> Recipe:
    """How the job turns rows into targets."""
    c = job.learn
    return Recipe(c.batch, c.gamma, c.n_step, c.reward, c.life_ends)


def embedder(job: Job, spaces: Spaces) -> Embed:
    """How the policy turns play into an embedding."""
    if job.share.policy == "wasserstein":
        return lambda rows, rng: play_embedding(rows, spaces.actions)

    sampler = Sampler(spaces, replace(recipe(job), gamma=0.0, n_step=1))

    def simnet(rows: Columns, rng: np.random.Generator) -> Array:
        from canal_mpi.learn.simnet import train_simnet

        parts = [(Buffer.of_lesson(spaces, rows), job.learn.batch)]
        return train_simnet(spaces, job, lambda: sampler.sample(parts, rng))

    return simnet


def agent(
    job: Job,
    number: int,
    order: Sequence[str],
    link: Link,
    sink: Sink,
    beat: Beat,
    peers: Callable[[int, str], Sequence[int]] = lambda round_, task: (),
    packs: bool = True,
    saver: Saver | None = None,
    envs: Callable[[Job, Spaces], EnvMaker] = env_maker,
) -> Agent:
    """An agent with everything it needs; `envs` says who plays its environments."""
    spaces = common_spaces(job.tasks, job.task)
    replay = Replay(spaces, job.replay.capacity, recipe(job), job.train.envs)
    record = Recorder(sink, beat, number, spaces.row_bytes)
    policy = pick.pick("policy", job.share.policy, POLICIES)
    return Agent(
        job,
        number,
        order,
        envs=envs(job, spaces),
        learner=learner(job, number, spaces, order[0]),
        replay=replay,
        memory=Memory(spaces, job.memory.rows, replay.sampler),
        sharing=Sharing(job, number, link, policy, record, embedder(job, spaces), peers, packs),
        record=record,
        saver=saver,
    )
