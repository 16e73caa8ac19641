"""The words and the doors of the house: what the rooms hand to each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Columns = dict[str, Array]
SWAPS, WEIGHTS, GRADIENTS = 4, 5, 6  # what neighbours on the same task trade
Key = tuple[int, int]  # names a lesson: its donor and the donor's round

ENDED = 1  # the episode is over: no bootstrapping
CUT = 2  # the episode was cut short by a limit: bootstrapping goes on
LIFE = 4  # a life was lost; a setting decides whether bootstrapping stops
LAST = 8  # a row that holds only the state after the row before it
KNOWN_FLAGS = ENDED | CUT | LIFE | LAST


@dataclass(frozen=True)
class Spaces:
    """What observations look like and how many actions there are."""

    shape: tuple[int, ...]
    dtype: str
    actions: int

    @property
    def row_bytes(self) -> int:
        """Bytes that one replay row takes: state, action, reward, flags."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize + 1 + 4 + 1


class Step(NamedTuple):
    """The answer to a batch of actions, one entry an environment."""

    obs: Array  # what followed the action, also where the episode is over
    reward: Array
    flags: Array  # ENDED, CUT, LIFE
    start: Array  # where the next action starts: obs, or the first state of a new episode


class Batch(NamedTuple):
    """Rows drawn for one update: the target is returns + discounts * Q(next_states)."""

    states: Array
    actions: Array
    returns: Array
    next_states: Array
    discounts: Array
    task: str = ""
    stored: Array | None = None  # action values that the agent once gave these states
    imitate: float = 0.0  # weight of imitating the teacher
    weight: float = 1.0  # of its gradient
    rate: float = 1.0  # part of the learning rate; a learner that ignores it never settles


@dataclass(frozen=True)
class Offer:
    """What a donor says about a lesson before anybody asks for its rows."""

    donor: int
    round: int
    task: str
    score: float
    rows: int
    bytes: int
    embedding: Array = field(default_factory=lambda: np.zeros(0, dtype="<f4"), compare=False)

    @property
    def source(self) -> str:
        """Whose lesson it is, for people."""
        return str(self.donor) if self.round > 0 else f"{self.donor} before"

    @property
    def key(self) -> Key:
        """Names the lesson: an agent learns one task a round; rounds before this run are < 0."""
        return (self.donor, self.round)


@dataclass(frozen=True)
class Parcel:
    """A lesson as it arrived, still packed, or why it did not."""

    offer: Offer
    data: bytes
    seconds: float
    wait_seconds: float
    refusal: str = ""
    sender: int = -1  # the neighbour that sent it


class Moved(NamedTuple):
    """Something that crossed an edge, or did not, for the ledger."""

    kind: str
    offer: Offer
    sender: int
    receiver: int
    round: int
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass
class Progress:
    """Where an agent is, for the terminal and for the heartbeat."""

    phase: str = "starting"
    round: int = 0
    task: str = ""
    source: int = -1  # the donor, or -1 when the agent plays
    step: int = 0
    steps: int = 0
    total_steps: int = 0  # ticks of the loop since the start, over all tasks
    mean_return: float = float("nan")
    loss: float = float("nan")
    wait_share: float = 0.0
    waits_for: int = -1  # the rank that this one waits for, or -1


class Env(Protocol):
    """A batch of environments of one task; `send` and `receive` may be apart."""

    spaces: Spaces
    count: int

    def reset(self) -> Array: ...
    def send(self, actions: Array) -> None: ...
    def receive(self) -> Step: ...
    def state(self) -> Columns: ...
    def restore(self, state: Columns) -> None: ...
    def close(self) -> None: ...


class EnvMaker(Protocol):
    """Makes the environments of a task for one purpose (train or evaluate)."""

    def __call__(self, task: str, purpose: str, agent: int) -> Env: ...


class Learner(Protocol):
    """Acts greedily, improves from batches, gives and takes networks of a task.

    Made as `Class(spaces, job, seed)`; `seed(name)` is this agent's seed for one purpose.
    `combine`, if set, turns the gradient of an update into the one that agents share.
    """

    combine: "Callable[[Array], Array] | None"

    def begin(self, task: str) -> None: ...
    def act(self, obs: Array) -> Array: ...
    def values(self, obs: Array) -> Array: ...
    def learn(self, batch: Batch) -> float: ...
    def errors(self, batch: Batch) -> Array: ...
    def consolidate(self, sample: Callable[[], Batch]) -> None: ...
    def network(self) -> Columns: ...
    def teach(self, network: Columns) -> None: ...
    def adopt(self, network: Columns) -> None: ...
    def blend(self, network: Columns, alpha: float) -> None: ...
    def twin(self) -> Columns: ...
    def become(self, twin: Columns) -> None: ...
    def state(self) -> Columns: ...
    def restore(self, state: Columns) -> None: ...


class Link(Protocol):
    """An agent's edges to the others: offers first, then only what is wanted."""

    agent: int
    audience: Sequence[int]  # the agents that hear this one's offers
    note: "Callable[[Moved], None]"  # told of everything that crosses an edge
    waited: float  # seconds spent waiting for others so far

    def begin(self, round_: int) -> None: ...
    def publish(self, offer: Offer | None, data: bytes) -> None: ...
    def offers(self) -> list[Offer]: ...
    def fetch(self, wanted: Sequence[Offer]) -> list[Parcel]: ...
    def trade(self, peers: Sequence[int], data: bytes, kind: int) -> list[tuple[int, bytes]]: ...
    def part(self, peers: Sequence[int], kind: int) -> None: ...
    def poll(self) -> None: ...
    def settle(self) -> None: ...
    def state(self) -> Columns: ...
    def restore(self, state: Columns) -> None: ...


class Sink(Protocol):
    """Takes the rows of the results; `flush` hands on what a round produced."""

    def add(self, table: str, **values: float | int | str) -> None: ...
    def save(self, kind: str, name: str, columns: Columns) -> None: ...
    def flush(self, round_: int) -> None: ...
    def state(self) -> Columns: ...
    def restore(self, state: Columns) -> None: ...


class Saver(Protocol):
    """Keeps checkpoints; it calls `state` only when one is due. No state: none is possible."""

    def start(self, state: Callable[[], Columns]) -> None: ...
    def turn(self, steps: int, state: Callable[[], Columns] | None) -> None: ...
    def end(self, state: Callable[[], Columns] | None) -> None: ...


Embed = Callable[[Columns, np.random.Generator], Array]  # what a task is like, from its rows
Beat = Callable[[Progress], None]
