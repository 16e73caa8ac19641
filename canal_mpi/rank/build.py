"""Puts an agent together; the one place that knows every room."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from canal_mpi import pick, seeding
from canal_mpi.agent import Agent
from canal_mpi.config import Job
from canal_mpi.learn import ALGORITHMS
from canal_mpi.membuf.replay import Recipe, Replay
from canal_mpi.membuf.share import POLICIES
from canal_mpi.record import Recorder
from canal_mpi.tasks import LocalEnvs, common_spaces, make_game
from canal_mpi.types import Beat, Env, EnvMaker, Learner, Link, Sink, Spaces


def env_maker(job: Job, spaces: Spaces) -> EnvMaker:
    """Environments of this process, seeded by agent, task and purpose."""

    def make(task: str, purpose: str, agent: int) -> Env:
        config = job.task
        if purpose != "train":
            most = min(config.max_steps, job.evaluation.max_steps)
            config = replace(config, max_steps=most)
        seed = seeding.sequence(job.seed, agent, task, f"env-{purpose}")
        return LocalEnvs(task, [make_game(task, config, seed)], spaces)

    return make


def learner(job: Job, agent: int, spaces: Spaces) -> Learner:
    """The learner that the job names, with this agent's first weights."""
    seed = seeding.integer(job.seed, agent, "", "weights")
    made: Learner = pick.pick("algorithm", job.learn.algorithm, ALGORITHMS)(spaces, job.learn, seed)
    made.act(np.zeros((1, *spaces.shape), dtype=spaces.dtype))  # what can't work fails here
    return made


def recipe(job: Job) -> Recipe:
    """How the job turns rows into targets."""
    c = job.learn
    return Recipe(c.batch, c.gamma, c.n_step, c.clip_reward, c.life_ends)


def agent(job: Job, number: int, order: Sequence[str], link: Link, sink: Sink, beat: Beat) -> Agent:
    """An agent with everything it needs."""
    spaces = common_spaces(job.tasks, job.task)
    return Agent(
        job,
        number,
        order,
        envs=env_maker(job, spaces),
        learner=learner(job, number, spaces),
        replay=Replay(spaces, job.replay.capacity, recipe(job)),
        link=link,
        policy=pick.pick("policy", job.share.policy, POLICIES),
        record=Recorder(sink, beat, number, spaces.row_bytes),
    )
