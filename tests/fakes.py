"""Small stand-ins for what an agent is given: environments, learners, links, sinks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from canal_mpi.agent import Agent
from canal_mpi.config import resolve
from canal_mpi.job import Job
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import pack
from canal_mpi.membuf.memory import Memory
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.share import Policy, exact
from canal_mpi.rank.build import recipe
from canal_mpi.record import Recorder
from canal_mpi.schema import Rows
from canal_mpi.sharing import Sharing
from canal_mpi.topology.link import SoloLink
from canal_mpi.types import (
    CUT,
    ENDED,
    Array,
    Batch,
    Columns,
    Embed,
    Env,
    Learner,
    Link,
    Moved,
    Offer,
    Parcel,
    Progress,
    Spaces,
    Step,
)

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

    def receive(self) -> Step:
        self.log.append("receive")
        self.place = max(self.place + (1 if self.actions[-1] == 1 else -1), 0)
        self.steps += 1
        ended = self.place == CHAIN.shape[0] - 1
        cut = self.cut_after > 0 and self.steps >= self.cut_after
        flags = ENDED if ended else CUT if cut else 0
        obs = self._look()
        start = self.reset() if flags else obs
        return Step(obs, np.array([float(ended)]), np.array([flags], dtype=np.uint8), start)

    def _look(self) -> Array:
        return np.eye(CHAIN.shape[0], dtype=np.float32)[[self.place]]

    def state(self) -> Columns:
        return {"place": np.array([self.place])}

    def restore(self, state: Columns) -> None:
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


class FakeLearner:
    """Always takes the same action and notes what it was asked to do."""

    def __init__(self, log: list[str] | None = None, action: int = 0) -> None:
        self.log, self.action = log if log is not None else [], action
        self.combine: Callable[[Array], Array] | None = None

    def begin(self, task: str) -> None:
        self.log.append(f"begin {task}")

    def act(self, obs: Array) -> Array:
        return np.full(len(obs), self.action, dtype=np.int64)

    def learn(self, batch: Batch) -> float:
        self.log.append("learn")
        return 0.5

    def values(self, obs: Array) -> Array:
        return np.eye(CHAIN.actions, dtype=np.float32)[self.act(obs)]

    def errors(self, batch: Batch) -> Array:
        return np.zeros(len(batch.actions), dtype=np.float32)

    def consolidate(self, sample: Callable[[], Batch]) -> None:
        self.log.append("consolidate")

    def network(self) -> Columns:
        return {"trunk": np.zeros(1, dtype=np.float32), "head": np.zeros(1, dtype=np.float32)}

    def teach(self, network: Columns) -> None:
        self.log.append("teach")

    def adopt(self, network: Columns) -> None:
        self.log.append("adopt")

    def blend(self, network: Columns, alpha: float) -> None:
        self.log.append("blend")

    def twin(self) -> Columns:
        return self.state()

    def become(self, twin: Columns) -> None:
        self.log.append("become")

    def state(self) -> Columns:
        return {"weights": np.zeros(1, dtype=np.float32)}

    def restore(self, state: Columns) -> None:
        self.log.append("restore")


class FakeLink:
    """Has the given parcels to offer; every call takes `wait` seconds that others are to blame for.

    Sleeps not at all: only the count of waited seconds grows.
    """

    def __init__(self, parcels: Sequence[Parcel] = (), wait: float = 0.0) -> None:
        self.agent = 0
        self.audience: Sequence[int] = (1,)
        self.waited, self.wait = 0.0, wait
        self.parcels = list(parcels)
        self.note: Callable[[Moved], None] = lambda moved: None
        self.published: list[tuple[Offer | None, bytes]] = []

    def begin(self, round_: int) -> None: ...

    def poll(self) -> None: ...

    def settle(self) -> None: ...

    def part(self, peers: Sequence[int], kind: int) -> None: ...

    def publish(self, offer: Offer | None, data: bytes) -> None:
        self.waited += self.wait
        self.published.append((offer, data))

    def offers(self) -> list[Offer]:
        return [parcel.offer for parcel in self.parcels]

    def fetch(self, wanted: Sequence[Offer]) -> list[Parcel]:
        return [parcel for parcel in self.parcels if parcel.offer in wanted]

    def trade(self, peers: Sequence[int], data: bytes, kind: int) -> list[tuple[int, bytes]]:
        return [(agent, b"") for agent in peers]

    def state(self) -> Columns:
        return {}

    def restore(self, state: Columns) -> None: ...


class MemorySink(Rows):
    """Keeps rows as they come, and the arrays that were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.saved: dict[tuple[str, str], Columns] = {}
        self.flushed: list[int] = []

    def add(self, table: str, **values: float | int | str) -> None:
        super().add(table, **values)
        self.rows.setdefault(table, []).append(values)

    def save(self, kind: str, name: str, columns: Columns) -> None:
        self.saved[kind, name] = columns

    def flush(self, round_: int) -> None:
        self.flushed.append(round_)


def tiny_job(**settings: Any) -> Job:
    """A job for chains; `learn__batch=4` sets learn.batch.

    Nothing is rehearsed, and a lesson is only replayed, unless the settings say so.
    """
    flags: dict[str, Any] = {
        "tasks": ["left", "right"],
        "train.frames": 20,
        "train.log_every": 10,
        "replay.capacity": 1000,
        "learn.widths": [16],
        "learn.batch": 1,
        "learn.starts": 1,
        "learn.target_every": 20,
        "learn.n_step": 1,
        "memory.rows": 0,
        "reuse.mode": "replay",
        "reuse.admission": False,
        "reuse.network": False,
        "explore.decay": 100.0,
        "evaluation.episodes": 1,
        "evaluation.max_steps": 30,
    }
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    return resolve(flags, environ={})


def tiny_agent(
    job: Job,
    order: Sequence[str] = ("left",),
    number: int = 0,
    envs: Chains | None = None,
    learner: Learner | None = None,
    link: Link | None = None,
    sink: MemorySink | None = None,
    policy: Policy = exact,
    embed: Embed = lambda rows, rng: np.zeros(0, dtype="<f4"),
    peers: Callable[[int, str], Sequence[int]] = lambda round_, task: (),
) -> Agent:
    """An agent on chains; whatever is not given is a fake that does nothing remarkable."""

    def beat(progress: Progress) -> None:
        pass

    replay = Replay(CHAIN, job.replay.capacity, recipe(job))
    record = Recorder(sink or MemorySink(), beat, number, CHAIN.row_bytes)
    return Agent(
        job,
        number,
        order,
        envs=envs or Chains(),
        learner=learner or FakeLearner(),
        replay=replay,
        memory=Memory(CHAIN, job.memory.rows, replay.sampler),
        sharing=Sharing(job, number, link or SoloLink(), policy, record, embed, peers),
        record=record,
    )


def chain_parcel(
    task: str,
    steps: int,
    donor: int = 1,
    actions: Sequence[int] = (1,),
    network: Columns | None = None,
) -> Parcel:
    """A lesson of that many steps on a chain, as a donor would send it."""
    env, buffer = Chain(), Buffer(CHAIN, steps)
    buffer.start(env.reset())
    for step in range(steps):
        action = np.array([actions[step % len(actions)]])
        env.send(action)
        buffer.add(action, env.receive())
    rows = buffer.export(steps + 1)
    data = pack(donor, 1, task, rows, network or {})
    return Parcel(Offer(donor, 1, task, 1.0, len(rows["action"]), len(data)), data, 0.1, 0.0)
