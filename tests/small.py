"""A tiny world for tests: a corridor to walk along, lessons of it, links and sinks in memory."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from thread_links import given

from canal_mpi.agent.loop import Agent
from canal_mpi.config import resolve
from canal_mpi.interfaces import (
    LAST,
    TERMINATED,
    TRUNCATED,
    Array,
    Batch,
    Columns,
    FetchResult,
    Link,
    Offer,
    OnTransfer,
    Progress,
    Spaces,
    Step,
)
from canal_mpi.learn.dqn import DQN
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import pack
from canal_mpi.rank.build import make_agent
from canal_mpi.results.store import Rows
from canal_mpi.settings import Job
from canal_mpi.topology.exchange import alone, ignore

PLACES = 5
WALK = Spaces((PLACES,), "<f4", 2)
RIGHT, LEFT = "SmallRight-v0", "SmallLeft-v0"
WAY = {RIGHT: 1, LEFT: 0}  # the action that leads to the goal


class Walk(gymnasium.Env[Array, np.int64]):
    """Places in a row; one action goes on, the other back; the far end pays 2 and ends."""

    observation_space = gymnasium.spaces.Box(0, 1, (PLACES,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, way: int = 1) -> None:
        self.way, self.place = way, 0

    def reset(self, **_: object) -> tuple[Array, dict[str, object]]:
        self.place = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        self.place = max(self.place + (1 if action == self.way else -1), 0)
        over = self.place == PLACES - 1
        return self._look(), 2.0 if over else 0.0, over, False, {}

    def _look(self) -> Array:
        look: Array = np.eye(PLACES, dtype=np.float32)[self.place]
        return look


for task, way in WAY.items():
    gymnasium.register(task, "small:Walk", disable_env_checker=True, kwargs={"way": way})


class Sink(Rows):
    """Keeps rows, and the arrays that were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.saved: dict[tuple[str, str], Columns] = {}
        self.flushed: list[int] = []

    def add(self, table: str, **values: float | int | str) -> None:
        super().add(table, **values)
        self.rows.setdefault(table, []).append(values)

    def save(self, kind: str, name: str, columns: Columns) -> None:
        self.saved[kind, name] = {name: column.copy() for name, column in columns.items()}

    def flush(self, round_: int) -> None:
        self.flushed.append(round_)

    def kinds(self) -> list[str]:
        """The kinds of the ledger's rows, in their order."""
        return [str(row["kind"]) for row in self.rows.get("exchange", [])]


class Donors:
    """A link that offers the given parcels and notes what is fetched, published and traded.

    It does not sleep: with every lesson published, the count of waited seconds grows by `wait`.
    """

    def __init__(
        self,
        parcels: Sequence[FetchResult] = (),
        answers: Sequence[bytes] = (),
        wait: float = 0.0,
    ) -> None:
        self.agent, self.waited, self.wait = 0, 0.0, wait
        self.on_transfer: OnTransfer = ignore
        self.out_neighbors: Sequence[int] = (1,)
        self.parcels, self.answers = list(parcels), list(answers)
        self.fetched: list[tuple[int, int]] = []
        self.published: list[tuple[Offer | None, bytes]] = []
        self.traded: list[bytes] = []

    def begin(self, round_: int) -> None: ...

    def poll(self) -> None: ...

    def settle(self) -> None: ...

    def leave(self, peers: Sequence[int]) -> None:
        self.traded += [b""] * bool(peers)

    def publish(self, offer: Offer | None, data: bytes) -> None:
        self.waited += self.wait
        self.published.append((offer, data))

    def offers(self) -> list[Offer]:
        return [parcel.offer for parcel in self.parcels]

    def fetch(self, wanted: Sequence[Offer]) -> list[FetchResult]:
        keys = [offer.key for offer in wanted]
        self.fetched += keys
        return [parcel for parcel in self.parcels if parcel.offer.key in keys]

    def trade(self, peers: Sequence[int], data: bytes) -> list[tuple[int, bytes]]:
        self.traded.append(data)
        return [(agent, self.answers.pop(0) if self.answers else b"") for agent in peers]

    def state_dict(self) -> Columns:
        return {}

    def load_state_dict(self, state: Columns) -> None: ...


def job_with(flags: dict[str, Any], settings: dict[str, Any]) -> Job:
    """A job of some flags and, on top, of settings with `__` in place of the dot."""
    return resolve(flags | {k.replace("__", "."): v for k, v in settings.items()}, environ={})


def small_job(**settings: Any) -> Job:
    """A job of two walks; `learn__batch_size=4` sets learn.batch_size."""
    flags: dict[str, Any] = {
        "tasks": [RIGHT, LEFT],
        "order": "same",
        "train.steps": 40,
        "train.log_interval": 10,
        "replay.buffer_size": 500,
        "learn.widths": [8],
        "learn.batch_size": 4,
        "learn.learning_starts": 4,
        "learn.target_update_interval": 10,
        "explore.eps_decay": 20.0,
        "rehearsal.rows": 200,
        "reuse.steps": 0.2,
        "reuse.pretrain_updates": 0.3,
        "share.probe": 30,
        "simnet.updates": 5,
        "evaluation.episodes": 1,
        "evaluation.max_steps": 12,
        "evaluation.epsilon": 0.0,
    }
    return job_with(flags, settings)


def small_agent(
    job: Job,
    order: Sequence[str] = (RIGHT,),
    link: Link | None = None,
    sink: Sink | None = None,
    number: int = 0,
    peers: Callable[[int, str], Sequence[int]] = lambda round_, task: (),
) -> Agent:
    """An agent as a run builds it, on walks."""

    def beat(progress: Progress) -> None:
        pass

    connect = given(link) if link else alone
    return make_agent(job, number, order, connect, sink or Sink(), beat, peers)


def learner(agent: Agent) -> DQN:
    """The agent's learner, which is a DQN."""
    assert isinstance(agent.learner, DQN)
    return agent.learner


def small_dqn(job: Job, task: str = RIGHT, spaces: Spaces = WALK) -> DQN:
    """A learner that has begun a task."""
    made = DQN(spaces, job, lambda name: 1 + len(name))
    made.set_task(task)
    return made


def random_batch(
    seed: int, size: int = 8, spaces: Spaces = WALK, task: str = RIGHT, scale: float = 1.0
) -> Batch:
    """States, actions and targets that mean nothing."""
    rng = np.random.default_rng(seed)
    width = int(np.prod(spaces.shape))
    return Batch(
        rng.normal(size=(size, width)).astype(np.float32),
        rng.integers(spaces.actions, size=size),
        (scale * rng.normal(size=size)).astype(np.float32),
        rng.normal(size=(size, width)).astype(np.float32),
        np.where(rng.random(size) < 0.2, 0, 0.97).astype(np.float32),
        task,
    )


def played(steps: int, flags: dict[int, int] | None = None, spaces: Spaces = WALK) -> Columns:
    """Rows of play in which move k starts in a state filled with k; `flags` by move."""
    buffer, flags = Buffer(spaces, 2 * steps + 2), flags or {}
    buffer.start(np.zeros((1, *spaces.shape), dtype=spaces.dtype))
    for k in range(steps):
        mark = flags.get(k, 0)
        play_into(buffer, k, mark)
    return buffer.export()


def play_into(buffer: Buffer, k: int, mark: int = 0) -> None:
    """Move k: from a state full of k to one of k + 1 (or of -1 where the episode is over)."""
    shape, dtype = buffer.spaces.shape, buffer.spaces.dtype
    start = np.full((1, *shape), k + 1, dtype=dtype)
    obs = np.full((1, *shape), -1, dtype=dtype) if mark & (TERMINATED | TRUNCATED) else start
    step = Step(obs, np.array([k % 7 - 3.0]), np.array([mark], dtype=np.uint8), start)
    buffer.add(np.array([k % buffer.spaces.actions]), step)


def moves(rows: Columns) -> list[int]:
    """The numbers of the moves in rows that `played` made."""
    real = (rows["flags"] & LAST) == 0
    return [int(number) for number in rows["state"].reshape(len(real), -1)[real, 0]]


def walked(task: str, steps: int, wise: bool = True) -> Columns:
    """Rows of a walk, straight to the goal or the wrong way only."""
    env, buffer = Walk(WAY[task]), Buffer(WALK, steps)
    buffer.start(env.reset()[0][None])
    action = WAY[task] if wise else 1 - WAY[task]
    for _ in range(steps):
        obs, reward, over, _, _ = env.step(np.int64(action))
        start = env.reset()[0] if over else obs
        flags = np.array([TERMINATED if over else 0], dtype=np.uint8)
        buffer.add(np.array([action]), Step(obs[None], np.array([reward]), flags, start[None]))
    return buffer.export()


def parcel(
    task: str = RIGHT,
    rows: Columns | None = None,
    donor: int = 1,
    round_: int = 1,
    score: float = 2.0,
    network: Columns | None = None,
    embedding: Array | None = None,
) -> FetchResult:
    """A lesson as a donor would send it."""
    rows = walked(task, 60) if rows is None else rows
    data = pack(donor, round_, task, rows, network or {})
    held = np.zeros(0, dtype="<f4") if embedding is None else embedding
    offer = Offer(donor, round_, task, score, len(rows["action"]), len(data), held)
    return FetchResult(offer, data, 0.1)


def expert(job: Job, task: str = RIGHT) -> Columns:
    """The network of a donor that knows the way: its head prefers one action everywhere."""
    donor = small_dqn(job, task)
    head = donor.blocks[donor.block_names(task)["head"]]
    head.params[:] = 0.0
    head.params[len(head.params) - WALK.actions + WAY[task]] = 1.0
    return donor.get_weights()
