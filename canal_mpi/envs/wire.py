"""Messages between agents and env servers: a fixed head, then a body of a known size.

A channel joins an agent to one worker process of a server; it carries one request at a time and
its answer.
"""

import struct
from enum import IntEnum
from math import isfinite, prod
from typing import NamedTuple, Protocol

import numpy as np

from canal_mpi.errors import (
    CanalError,
    DamagedData,
    ProtocolError,
    RankFailed,
    UsageError,
    described,
)
from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Array, Spaces, Step

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
        words = f"{described(error)}; the env server's log has more"
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


class StepFormat:
    """A step of so many games as bytes: rewards, flags, observations.

    Where an episode ended the next starts follow; otherwise they equal the observations.
    """

    def __init__(self, spaces: Spaces, games: int) -> None:
        self.spaces, self.games, self.numbers = spaces, games, games * prod(spaces.shape)
        self.obs = 9 * games
        self.start = self.obs + self.numbers * np.dtype(spaces.dtype).itemsize
        self.end = 2 * self.start - self.obs

    def pack(self, step: Step) -> bytes:
        """The body of an answer; arrays on the wire are little-endian."""
        flags = step.flags.tobytes()
        parts = [step.reward.astype("<f8", copy=False).tobytes(), flags, step.obs.tobytes()]
        if any(flag & (TERMINATED | TRUNCATED) for flag in flags):
            parts.append(step.start.tobytes())
        return b"".join(parts)

    def unpack(self, body: memoryview, step: Step) -> None:
        """Copy the body of an answer to a step, checked."""
        if len(body) not in (self.start, self.end):
            raise ProtocolError(f"a step of {self.games} games was answered by {len(body)} bytes")
        rewards, flags = np.frombuffer(body, "<f8", self.games), body[8 * self.games : self.obs]
        ended = any(flag & (TERMINATED | TRUNCATED) for flag in flags)
        if ended != (len(body) == self.end) or max(flags) > (TERMINATED | TRUNCATED | LIFE):
            raise ProtocolError("an env server sent flags that don't fit the answer")
        if not all(map(isfinite, rewards)):
            raise ProtocolError("an env server sent a reward that is not finite")
        step.reward[:], step.flags[:] = rewards, flags
        step.obs.reshape(-1)[:] = np.frombuffer(body, self.spaces.dtype, self.numbers, self.obs)
        offset = self.start if ended else self.obs
        step.start.reshape(-1)[:] = np.frombuffer(body, self.spaces.dtype, self.numbers, offset)

    def unpack_start(self, body: memoryview, start: Array) -> None:
        """Copy the body of an answer to a reset."""
        if len(body) != self.start - self.obs:
            raise ProtocolError(f"a reset was answered by {len(body)} bytes")
        start.reshape(-1)[:] = np.frombuffer(body, self.spaces.dtype)
