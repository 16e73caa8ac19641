"""Small stand-ins for what an agent is given: environments and learners; small.py has the rest."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from small import Sink, job_with
from thread_links import given

from canal_mpi.agent.lessons import Sharing
from canal_mpi.agent.loop import Agent
from canal_mpi.agent.recorder import Recorder
from canal_mpi.interfaces import (
    TERMINATED,
    TRUNCATED,
    Array,
    Batch,
    Columns,
    Embed,
    Env,
    FetchResult,
    Learner,
    Link,
    Offer,
    Progress,
    Spaces,
    Step,
)
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import pack
from canal_mpi.membuf.rehearsal import Rehearsal
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.selection import Policy, exact
from canal_mpi.settings import Job
from canal_mpi.topology.exchange import alone

CHAIN = Spaces((6,), "<f4", 2)


class Chain:
    """Six places in a row; action 1 goes right, 0 left; the right end pays 1 and ends."""

    def __init__(self, cut_after: int = 0, log: list[str] | None = None) -> None:
        self.spaces, self.count = CHAIN, 1
        self.cut_after, self.log = cut_after, log if log is not None else []
        self.place = self.steps = 0
        self.actions: list[int] = []

    def reset(self) -> Array:
        self.place = self.steps = 0
        return self._look()

    def send(self, actions: Array) -> None:
        self.log.append("send")
        self.actions.append(int(actions[0]))

    def recv(self) -> Step:
        self.log.append("receive")
        self.place = max(self.place + (1 if self.actions[-1] == 1 else -1), 0)
        self.steps += 1
        ended = self.place == CHAIN.shape[0] - 1
        cut = self.cut_after > 0 and self.steps >= self.cut_after
        flags = TERMINATED if ended else TRUNCATED if cut else 0
        obs = self._look()
        start = self.reset() if flags else obs
        return Step(obs, np.array([float(ended)]), np.array([flags], dtype=np.uint8), start)

    def _look(self) -> Array:
        return np.eye(CHAIN.shape[0], dtype=np.float32)[[self.place]]

    def state_dict(self) -> Columns:
        return {"place": np.array([self.place])}

    def load_state_dict(self, state: Columns) -> None:
        self.place = int(state["place"][0])

    def close(self) -> None:
        self.log.append("close")


class Chains:
    """An EnvMaker of chains that remembers what it was asked for."""

    def __init__(self, cut_after: int = 40, log: list[str] | None = None) -> None:
        self.cut_after, self.log = cut_after, log
        self.made: list[tuple[str, str, int]] = []
        self.envs: list[Chain] = []

    def __call__(self, task: str, purpose: str, agent: int) -> Env:
        self.made.append((task, purpose, agent))
        self.envs.append(Chain(self.cut_after, self.log))
        return self.envs[-1]


class FakeLearner(Learner):
    """Always takes the same action and notes what it was asked to do."""

    def __init__(self, log: list[str] | None = None, action: int = 0) -> None:
        self.log, self.action = log if log is not None else [], action

    def set_task(self, task: str) -> None:
        self.log.append(f"begin {task}")

    def act(self, obs: Array) -> Array:
        return np.full(len(obs), self.action, dtype=np.int64)

    def update(self, batch: Batch) -> float:
        self.log.append("update")
        return 0.5

    def q_values(self, obs: Array) -> Array:
        return np.eye(CHAIN.actions, dtype=np.float32)[self.act(obs)]

    def consolidate(self, sample: Callable[[], Batch]) -> None:
        self.log.append("consolidate")

    def get_weights(self) -> Columns:
        return {"trunk": np.zeros(1, dtype=np.float32), "head": np.zeros(1, dtype=np.float32)}

    def set_teacher(self, network: Columns) -> None:
        self.log.append("teach")

    def set_weights(self, network: Columns) -> None:
        self.log.append("adopt")

    def state_dict(self) -> Columns:
        return {"weights": np.zeros(1, dtype=np.float32)}

    def load_state_dict(self, state: Columns) -> None:
        self.log.append("restore")


def tiny_job(**settings: Any) -> Job:
    """A job for chains; `learn__batch_size=4` sets learn.batch_size.

    Nothing is rehearsed, and a lesson is only replayed, unless the settings say so.
    """
    flags: dict[str, Any] = {
        "tasks": ["left", "right"],
        "train.steps": 20,
        "train.log_interval": 10,
        "replay.buffer_size": 1000,
        "learn.widths": [16],
        "learn.batch_size": 1,
        "learn.learning_starts": 1,
        "learn.target_update_interval": 20,
        "learn.n_step": 1,
        "rehearsal.rows": 0,
        "reuse.mode": "replay",
        "reuse.network": False,
        "explore.eps_decay": 100.0,
        "evaluation.episodes": 1,
        "evaluation.max_steps": 30,
    }
    return job_with(flags, settings)


def tiny_agent(
    job: Job,
    order: Sequence[str] = ("left",),
    number: int = 0,
    envs: Chains | None = None,
    learner: Learner | None = None,
    link: Link | None = None,
    sink: Sink | None = None,
    policy: Policy = exact,
    embed: Embed = lambda rows, rng: np.zeros(0, dtype="<f4"),
    peers: Callable[[int, str], Sequence[int]] = lambda round_, task: (),
) -> Agent:
    """An agent on chains; whatever is not given is a fake that does nothing remarkable."""

    def beat(progress: Progress) -> None:
        pass

    replay = Replay(CHAIN, job.replay.buffer_size, job.learn)
    record = Recorder(sink or Sink(), beat, number, CHAIN.row_bytes)
    connect = given(link) if link else alone
    return Agent(
        job,
        number,
        order,
        envs=envs or Chains(),
        learner=learner or FakeLearner(),
        replay=replay,
        rehearsal=Rehearsal(CHAIN, job.rehearsal.rows, replay.sampler),
        sharing=Sharing(job, number, connect(record.moved), policy, record, embed, peers),
        record=record,
    )


def chain_parcel(
    task: str,
    steps: int,
    donor: int = 1,
    actions: Sequence[int] = (1,),
    network: Columns | None = None,
) -> FetchResult:
    """A lesson of that many steps on a chain, as a donor would send it."""
    env, buffer = Chain(), Buffer(CHAIN, steps)
    buffer.start(env.reset())
    for step in range(steps):
        action = np.array([actions[step % len(actions)]])
        env.send(action)
        buffer.add(action, env.recv())
    rows = buffer.export(steps + 1)
    data = pack(donor, 1, task, rows, network or {})
    return FetchResult(Offer(donor, 1, task, 1.0, len(rows["action"]), len(data)), data, 0.1)
