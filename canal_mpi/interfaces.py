"""What the packages hand to each other: arrays, flags, records, and protocols."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import nan
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from canal_mpi.errors import DamagedData

Array = npt.NDArray[Any]
Columns = dict[str, Array]
Key = tuple[int, int]  # names a lesson: its donor and the donor's round

TERMINATED = 1  # the episode is over: no bootstrapping
TRUNCATED = 2  # the episode was cut short by a limit: bootstrapping continues
LIFE = 4  # a life was lost; a setting decides whether bootstrapping stops
LAST = 8  # a row that holds only the state after the row before it
KNOWN_FLAGS = TERMINATED | TRUNCATED | LIFE | LAST


class MessageKind(IntEnum):
    """What agents send to each other."""

    OFFERS = 1
    REQUEST = 2
    LESSON = 3
    SWAPS = 4  # rows, among neighbours on the same task


@dataclass(frozen=True)
class Spaces:
    """What observations look like and how many actions there are.

    An observation stacks `stack` frames along its first axis, oldest first; replay rows and lessons
    hold only the newest one of each (`frame_shape`).
    """

    shape: tuple[int, ...]
    dtype: str
    actions: int
    stack: int = 1

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of one frame of an observation."""
        return (self.shape[0] // self.stack, *self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes that one replay row takes: state, action, reward, flags."""
        return int(np.prod(self.frame_shape)) * np.dtype(self.dtype).itemsize + 1 + 4 + 1


class Step(NamedTuple):
    """The answer to a batch of actions, one entry per environment."""

    obs: Array  # what followed the action, also where the episode is over
    reward: Array
    flags: Array  # TERMINATED, TRUNCATED, LIFE
    start: Array  # where the next action starts: obs, or the first state of a new episode


class Batch(NamedTuple):
    """Rows drawn for one update: the target is returns + discounts * Q(next_states)."""

    states: Array
    actions: Array
    returns: Array
    next_states: Array
    discounts: Array
    task: str = ""
    stored_q: Array | None = None  # Q-values of the states, by an older network or a donor's
    distill: float = 0.0  # coefficient of playing as they say, instead of the TD loss
    imitation: float = 0.0  # coefficient of imitating the teacher
    lr_scale: float = 1.0  # part of the learning rate; it falls to 0 towards the end of a task


@dataclass(frozen=True)
class Offer:
    """What a donor announces about a lesson before anyone requests its rows."""

    donor: int
    round: int
    task: str
    score: float  # mean return of the donor's late training episodes; NaN: too few of them
    rows: int
    bytes: int
    embedding: Array = field(default_factory=lambda: np.zeros(0, dtype="<f4"), compare=False)
    std_error: float = 0.0  # of the score
    episodes: int = 0  # that the score is the mean of

    @property
    def source(self) -> str:
        """Whose lesson it is, for people."""
        return str(self.donor) if self.round > 0 else f"{self.donor} before"

    @property
    def key(self) -> Key:
        """Names the lesson: an agent learns one task per round; rounds before this run are < 0."""
        return (self.donor, self.round)


@dataclass(frozen=True)
class FetchResult:
    """A lesson as it arrived, still encoded, or why it did not."""

    offer: Offer
    data: bytes
    seconds: float
    refusal: str = ""
    sender: int = -1  # the neighbour that sent it


class TransferEvent(NamedTuple):
    """Something that crossed an edge, or did not, for the ledger."""

    kind: str
    offer: Offer
    sender: int
    receiver: int
    round: int
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


OnTransfer = Callable[[TransferEvent], None]


@dataclass
class Progress:
    """Where an agent is, for the terminal and for the heartbeat."""

    phase: str = "starting"
    round: int = 0
    task: str = ""
    source: int = -1  # the donor, or -1 when the agent plays
    step: int = 0
    steps: int = 0
    total_steps: int = 0  # iterations of the loop since the start, over all tasks
    mean_return: float = nan
    loss: float = nan
    wait_share: float = 0.0
    waits_for: int = -1  # the rank that this one waits for, or -1


class Stateful(Protocol):
    """What a checkpoint can hold: `load_state_dict` takes back what `state_dict` gave."""

    def state_dict(self) -> Columns: ...
    def load_state_dict(self, state: Columns) -> None: ...


class Env(Stateful, Protocol):
    """A batch of environments of one task; work may be done between `send` and `recv`."""

    spaces: Spaces
    count: int

    def reset(self) -> Array: ...
    def send(self, actions: Array) -> None: ...
    def recv(self) -> Step: ...
    def close(self) -> None: ...


EnvMaker = Callable[[str, str, int], Env]  # of a task, for one purpose (train …), for an agent


class Learner(ABC):
    """An algorithm: acts greedily and learns from batches.

    Made as `Class(spaces, job, seed)`; `seed(name)` is this agent's seed for one purpose. The five
    abstract methods are enough to train. The others have defaults, and what a default can't do
    (teach, be taught) is not used or refused.
    """

    @abstractmethod
    def set_task(self, task: str) -> None:
        """Act and learn for this task from now on."""

    @abstractmethod
    def act(self, obs: Array) -> Array:
        """The greedy action for each observation of the current task."""

    @abstractmethod
    def update(self, batch: Batch) -> float:
        """Learn from a batch of one task and return the loss."""

    @abstractmethod
    def state_dict(self) -> Columns:
        """Everything that a checkpoint needs."""

    @abstractmethod
    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""

    def is_finite(self) -> bool:
        """Whether all its numbers are finite: a network that is not knows nothing any more."""
        columns = self.state_dict().values()
        return all(np.isfinite(column).all() for column in columns if column.dtype.kind == "f")

    def policy_state_dict(self) -> Columns:
        """What playing needs, for the files of a finished run; `load_state_dict` takes it too."""
        return self.state_dict()

    def q_values(self, obs: Array) -> Array:
        """What rehearsal stores with an old task's rows, as `Batch.stored_q`: Q-values, if any."""
        return np.zeros((len(obs), 0), dtype=np.float32)

    def consolidate(self, sample: Callable[[], Batch]) -> None:  # noqa: B027 - optional
        """The current task is over; `sample` draws batches of it (EWC)."""

    def get_weights(self) -> Columns:
        """The network of the current task, for a lesson; empty: lessons carry none."""
        return {}

    def set_weights(self, weights: Columns) -> None:
        """Start from a donor's network; DamagedData where it does not fit."""
        raise DamagedData("this algorithm takes no weights")

    def set_teacher(self, weights: Columns) -> None:
        """Imitate a donor's network from now on; DamagedData where it does not fit."""
        raise DamagedData("this algorithm has no teacher")

    def teacher_q_values(self, obs: Array) -> Array:
        """What the teacher says of observations; empty: nothing that could be distilled."""
        return np.zeros((len(obs), 0), dtype=np.float32)

    def agreement(self, obs: Array) -> tuple[float, float]:
        """KL(teacher ‖ own policy) and the fraction of equal greedy actions; NaN: no teacher."""
        return nan, nan


class Link(Stateful, Protocol):
    """An agent's edges to the others: offers first, then only what is wanted."""

    agent: int
    out_neighbors: Sequence[int]  # the agents that receive this one's offers
    waited: float  # seconds spent waiting for others so far

    def begin(self, round_: int) -> None: ...
    def publish(self, offer: Offer | None, data: bytes) -> None: ...
    def offers(self) -> list[Offer]: ...
    def fetch(self, wanted: Sequence[Offer]) -> list[FetchResult]: ...
    def trade(self, peers: Sequence[int], data: bytes) -> list[tuple[int, bytes]]: ...
    def leave(self, peers: Sequence[int]) -> None: ...
    def poll(self) -> None: ...
    def settle(self) -> None: ...


class Sink(Stateful, Protocol):
    """Takes the rows of the results; `flush` hands on what a round produced."""

    def add(self, table: str, **values: float | int | str) -> None: ...
    def save(self, kind: str, name: str, columns: Columns) -> None: ...
    def flush(self, round_: int) -> None: ...


class Saver(Protocol):
    """Keeps checkpoints; it calls `state` only when one is due. No state: none is possible."""

    def start(self, state: Callable[[], Columns]) -> None: ...
    def turn(self, steps: int, state: Callable[[], Columns] | None) -> None: ...
    def end(self, state: Callable[[], Columns] | None) -> None: ...


Embed = Callable[[Columns, np.random.Generator], Array]  # what a task is like, from its rows
Beat = Callable[[Progress], None]
