"""What several test files share: messages made by hand, and play that remembers itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Array, Offer, Spaces, Step
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.wire import HEADER, MAGIC, RAW, WIRE_VERSION
from canal_mpi.settings import LearnConfig

SPACES = Spaces((2, 2), "<i4", 5)


def seal(body: bytes, heads: int, version: int = WIRE_VERSION) -> bytes:
    """A message with a right length and a right checksum around any body."""
    return HEADER.pack(MAGIC, version, heads, len(body), sha256(body).digest()) + body


def message(heads: Sequence[object], data: bytes = b"", version: int = WIRE_VERSION) -> bytes:
    """A message of columns, whatever their heads claim."""
    text = json.dumps(heads).encode()
    return seal(text + data, len(text), version)


def head(
    name: object = "a",
    dtype: object = "|u1",
    shape: object = (1,),
    codec: object = RAW,
    stored: object = 1,
) -> Sequence[object]:
    """The description of one column, whatever it claims."""
    return [name, dtype, shape, codec, stored]


def learning(
    batch: int, gamma: float, n_step: int = 1, reward: str = "clip", lives: bool = True
) -> LearnConfig:
    """How rows become targets."""
    plain = LearnConfig(batch_size=batch, gamma=gamma, n_step=n_step, reward=reward)
    return replace(plain, terminal_on_life_loss=lives)


def observation(number: int) -> Array:
    """A state that can be told from every other."""
    return np.array([[number, -number], [number * 3, 7]], dtype=SPACES.dtype)


def number_of(state: Array) -> int:
    """Which state it is, checked to be whole."""
    found: list[int] = state.reshape(-1).tolist()
    assert found == [found[0], -found[0], found[0] * 3, 7]
    return found[0]


@dataclass(frozen=True)
class Move:
    """One transition as it happened."""

    state: int
    action: int
    reward: float
    flags: int
    after: int


class Player:
    """Plays made-up episodes into a buffer and remembers every move in a plain list."""

    def __init__(self, buffer: Buffer, streams: int = 1, seed: int = 0) -> None:
        self.buffer, self.rng = buffer, np.random.default_rng(seed)
        self.states = 0
        self.moves: list[list[Move]] = [[] for _ in range(streams)]
        self.now = [self._new_state() for _ in range(streams)]
        buffer.start(np.stack([observation(state) for state in self.now]))

    def _new_state(self) -> int:
        self.states += 1
        return self.states

    def step(self, *flags: int) -> None:
        """One move in every stream, with the given flags."""
        actions = self.rng.integers(0, SPACES.actions, len(self.moves))
        rewards = self.rng.integers(-3, 4, len(self.moves)).astype(np.float32)
        after = [self._new_state() for _ in self.moves]
        start = [
            self._new_state() if flag & (TERMINATED | TRUNCATED) else state
            for flag, state in zip(flags, after, strict=True)
        ]
        for stream, moves in enumerate(self.moves):
            moves.append(
                Move(
                    self.now[stream],
                    int(actions[stream]),
                    float(rewards[stream]),
                    flags[stream],
                    after[stream],
                )
            )
        self.buffer.add(
            actions,
            Step(
                obs=np.stack([observation(state) for state in after]),
                reward=rewards,
                flags=np.array(flags, dtype=np.uint8),
                start=np.stack([observation(state) for state in start]),
            ),
        )
        self.now = start

    def play(self, steps: int, odds: tuple[float, float, float] = (0.1, 0.1, 0.1)) -> None:
        """Random play; `odds` are those of ENDED, CUT and LIFE."""
        kinds = (TERMINATED, TRUNCATED, LIFE, 0)
        weights = [*odds, 1 - sum(odds)]
        for _ in range(steps):
            self.step(*(int(k) for k in self.rng.choice(kinds, len(self.moves), p=weights)))

    def kept(self, stream: int, slots: int) -> list[Move]:
        """The moves that fit into the newest `slots` rows; a cut takes a row more."""
        found: list[Move] = []
        for move in reversed(self.moves[stream]):
            slots -= 2 if move.flags & TRUNCATED else 1
            if slots < 0:
                break
            found.append(move)
        return found[::-1]


def lesson_offer(rows: int, donor: int = 3, round_: int = 2, task: str = "Krull") -> Offer:
    """An offer of a lesson with that many rows."""
    return Offer(donor, round_, task, 10.0, rows, 1000)
