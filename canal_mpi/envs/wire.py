"""Messages between agents and env servers: a fixed head, then a body of a known size.

A channel joins an agent to one worker process of a server; it carries one request at a time and
its answer.
"""

import struct
from math import isfinite, prod
from typing import NamedTuple, Protocol

import numpy as np

from canal_mpi.errors import CanalError, DamagedData, ProtocolError, RankFailed, UsageError
from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Spaces, Step

MAKE, RESET, STEP, STATE, RESTORE, CLOSE, BYE = range(1, 8)
NAMES = ("", "make", "reset", "step", "state", "restore", "close", "goodbye")
DONE, FAILED = 0, 1

HEAD = struct.Struct("<4sBBHQ")  # magic, kind, DONE or FAILED, environment, bytes behind the head
MAGIC = b"CENV"
ORDER = struct.Struct("<64s64siii")  # task, purpose, agent, first game, number of games
WORDS = 2000  # bytes of an error's text
STATE_LIMIT = 1 << 28  # bytes of a saved environment
Bytes = bytes | bytearray | memoryview


class Port(Protocol):
    """One end of a channel: whole messages, and nothing that blocks.

    `poll` raises ConnectionError where the other end no longer exists.
    """

    peer: int

    def post(self, data: bytes) -> None: ...
    def poll(self) -> Bytes | None: ...


class Head(NamedTuple):
    """The checked beginning of a message."""

    kind: int
    failed: int
    env: int
    size: int


def message(kind: int, env: int, body: Bytes = b"", failed: int = DONE) -> bytes:
    """A whole message."""
    return HEAD.pack(MAGIC, kind, failed, env, len(body)) + body


def read_head(data: Bytes) -> Head:
    """The head of a message; ProtocolError where it is none."""
    if len(data) < HEAD.size:
        raise ProtocolError(f"a message of {len(data)} bytes is shorter than its head")
    magic, kind, failed, env, size = HEAD.unpack_from(data)
    if magic != MAGIC or not MAKE <= kind <= BYE or failed > FAILED or size > STATE_LIMIT:
        raise ProtocolError(f"no message for environments: {bytes(data[: HEAD.size])!r}")
    if size != len(data) - HEAD.size:
        raise ProtocolError(f"a message announces {size} bytes and has {len(data) - HEAD.size}")
    return Head(kind, failed, env, size)


def pack_failure(kind: int, env: int, error: Exception) -> bytes:
    """An error as an answer: its exit code and its words."""
    code = error.code if isinstance(error, CanalError) else RankFailed.code
    words = f"{type(error).__name__}: {error}; the traceback is in the env server's log"
    words = str(error) if isinstance(error, CanalError) else words
    text = words.encode()[:WORDS].decode(errors="ignore").encode()
    return message(kind, env, struct.pack("<H", code) + text, FAILED)


def unpack_failure(body: Bytes, where: str) -> CanalError:
    """The error that an answer tells of."""
    if not 2 <= len(body) <= 2 + WORDS:
        return ProtocolError(f"{where} sent an error of {len(body)} bytes")
    (code,) = struct.unpack_from("<H", body)
    kinds = {kind.code: kind for kind in (UsageError, DamagedData, ProtocolError)}
    return kinds.get(code, RankFailed)(f"{where}: {bytes(body[2:]).decode(errors='replace')}")


class Layout:
    """Where a step's arrays lie in the body of an answer.

    `reward, flags, obs`, and `start` only where an episode ended: it equals `obs` otherwise.
    """

    def __init__(self, spaces: Spaces, games: int) -> None:
        self.spaces, self.games = spaces, games
        self.row = prod(spaces.shape) * np.dtype(spaces.dtype).itemsize
        self.obs = 9 * games
        self.short = self.obs + games * self.row
        self.whole = self.short + games * self.row

    def pack(self, step: Step) -> bytes:
        """The body of an answer; arrays on the wire are little-endian."""
        flags = step.flags.tobytes()
        parts = [step.reward.astype("<f8", copy=False).tobytes(), flags, step.obs.tobytes()]
        if any(flag & (TERMINATED | TRUNCATED) for flag in flags):
            parts.append(step.start.tobytes())
        return b"".join(parts)


class StepReader:
    """Copies the answers of a channel to its part of a step."""

    def __init__(self, layout: Layout, step: Step) -> None:
        self.layout, self.rewards = layout, step.reward.data
        self._obs, self._reward, self._flags, self._start = (array.data.cast("B") for array in step)

    def read(self, body: memoryview) -> None:
        """Copy the body of an answer to a step, checked."""
        layout, games = self.layout, self.layout.games
        if len(body) not in (layout.short, layout.whole):
            raise ProtocolError(f"a step of {games} games was answered by {len(body)} bytes")
        flags = bytes(body[8 * games : layout.obs])
        ended = any(flag & (TERMINATED | TRUNCATED) for flag in flags)
        if ended != (len(body) == layout.whole) or max(flags) > (TERMINATED | TRUNCATED | LIFE):
            raise ProtocolError("an env server sent flags that don't fit the answer")
        self._reward[:] = body[: 8 * games]
        if not all(map(isfinite, self.rewards)):
            raise ProtocolError("an env server sent a reward that is not finite")
        self._flags[:] = flags
        self._obs[:] = body[layout.obs : layout.short]
        self._start[:] = body[layout.short :] if ended else self._obs

    def read_start(self, body: memoryview) -> None:
        """Copy the body of an answer to a reset."""
        if len(body) != len(self._start):
            raise ProtocolError(f"a reset was answered by {len(body)} bytes")
        self._start[:] = body
