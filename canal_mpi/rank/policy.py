"""An agent's policy from its checkpoint: what acting needs, and nothing that training does."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canal_mpi import config
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.job import Job
from canal_mpi.rank import build
from canal_mpi.results.reading import Run, checked_arrays
from canal_mpi.tasks import common_spaces
from canal_mpi.types import Array, Learner, Spaces


@dataclass
class Policy:
    """Acts greedily for any task of the run."""

    agent: int
    job: Job
    spaces: Spaces
    learner: Learner

    def act(self, task: str, observation: Array) -> int:
        """The action for one observation of a task, given as the environment gives it."""
        if task not in self.job.tasks:
            known = ", ".join(self.job.tasks)
            raise UsageError(f"the run has no task '{task}'; its tasks: {known}.")
        flat = np.asarray(observation, dtype=self.spaces.dtype).reshape(-1)
        full = np.zeros(self.spaces.shape, dtype=self.spaces.dtype)
        full.reshape(-1)[: flat.size] = flat
        self.learner.begin(task)
        return int(self.learner.act(full[None])[0])


def checkpoint(folder: Path, agent: int) -> Path:
    """The file of an agent's newest network."""
    return folder / "checkpoints" / f"agent-{agent}" / "learner.h5"


def job_of(run: Run, trust: bool) -> Job:
    """The job of a run; modules that it names are not imported unless it is trusted."""
    job = config.from_toml(str(run.attributes["job"]))
    outside = [name for name in (*job.tasks, job.learn.algorithm, job.learn.network) if ":" in name]
    if outside and not trust:
        raise UsageError(
            f"{run.folder} wants to import {', '.join(outside)}; "
            "--trust (trust=True) allows that, for runs of your own."
        )
    return job


def load_policy(run: Run, agent: int, trust: bool = False) -> Policy:
    """An agent of a run, able to act."""
    if agent not in run.agents:
        known = ", ".join(map(str, run.agents))
        raise UsageError(f"{run.folder} has no agent {agent}; its agents: {known}.")
    job = job_of(run, trust)
    path = checkpoint(run.folder, agent)
    if not path.is_file():
        raise UsageError(f"{path} is missing: agent {agent} has finished no task on this host.")
    return policy_from(path, job, agent)


def policy_from(path: Path, job: Job, agent: int) -> Policy:
    """An agent as a file of its learner has it."""
    spaces = common_spaces(job.tasks, job.task)
    learner = build.learner(job, agent, spaces, job.tasks[0])
    try:
        learner.restore(checked_arrays(path))
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise DamagedData(f"{path} does not fit the run's job: {error}.") from error
    return Policy(agent, job, spaces, learner)
