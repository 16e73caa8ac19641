"""Messages between agents and env servers: a fixed head, then a body of a known size.

A channel joins an agent to one worker process of a server; it carries one request at a time and
its answer.
"""

import struct
from enum import IntEnum
from math import isfinite, prod
from typing import NamedTuple, Protocol

import numpy as np

from canal_mpi.errors import CanalError, DamagedData, ProtocolError, RankFailed, UsageError
from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Spaces, Step

HEAD = struct.Struct("<4sB?H")  # magic, request, whether it failed, environment
MAGIC = b"CENV"
ORDER = struct.Struct("<64s64siii")  # task, purpose, agent, first game, number of games
WORDS = 2000  # bytes of an error's text
LIMIT = 1 << 28  # bytes of a message; only saved environments come near it


class Request(IntEnum):
    """What an agent asks for; an answer repeats it."""

    MAKE = 1
    RESET = 2
    STEP = 3
    STATE = 4
    RESTORE = 5
    CLOSE = 6
    GOODBYE = 7


class Port(Protocol):
    """One end of a channel: whole messages, and nothing that blocks.

    `poll` raises ConnectionError where the other end no longer exists.
    """

    peer: int

    def post(self, data: bytes) -> None: ...
    def poll(self) -> bytes | None: ...


class Message(NamedTuple):
    """A request or its answer."""

    request: Request
    env: int
    body: bytes | memoryview = b""
    failed: bool = False

    def pack(self) -> bytes:
        """As it goes over a channel."""
        return HEAD.pack(MAGIC, self.request, self.failed, self.env) + self.body

    @classmethod
    def unpack(cls, data: bytes) -> "Message":
        """From a channel; ProtocolError where it is none."""
        try:
            magic, request, failed, env = HEAD.unpack_from(data)
            if magic != MAGIC:
                raise ValueError(f"it begins with {magic!r}")
            return cls(Request(request), env, memoryview(data)[HEAD.size :], failed)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"no message for environments: {error}") from error

    def failure(self, error: Exception) -> bytes:
        """The answer to this request that tells of an error: its exit code and its words."""
        code = error.code if isinstance(error, CanalError) else RankFailed.code
        words = f"{type(error).__name__}: {error}; the traceback is in the env server's log"
        words = str(error) if isinstance(error, CanalError) else words
        text = words.encode()[:WORDS].decode(errors="ignore").encode()
        return self._replace(body=struct.pack("<H", code) + text, failed=True).pack()

    def error(self, where: str) -> CanalError:
        """The error that this answer tells of."""
        if not 2 <= len(self.body) <= 2 + WORDS:
            return ProtocolError(f"{where} sent an error of {len(self.body)} bytes")
        (code,) = struct.unpack_from("<H", self.body)
        kinds = {kind.code: kind for kind in (UsageError, DamagedData, ProtocolError)}
        words = bytes(self.body[2:]).decode(errors="replace")
        return kinds.get(code, RankFailed)(f"{where}: {words}")


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
