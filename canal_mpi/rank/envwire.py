"""What agents and env servers say to each other: a fixed head, then a body of a known size.

A lane is a pair of one agent and one worker process of a server; it carries one request at a time
and its answer. Both ends work out from the job how large a message can be.
"""

import struct
from dataclasses import dataclass
from math import prod

import numpy as np

from canal_mpi import errors
from canal_mpi.errors import CanalError, ProtocolError, RankFailed
from canal_mpi.types import CUT, ENDED, Array, Spaces, Step

MAKE, RESET, STEP, STATE, RESTORE, CLOSE, BYE = range(1, 8)
NAMES = ("", "make", "reset", "step", "state", "restore", "close", "goodbye")
DONE, FAILED = 0, 1

HEAD = struct.Struct("<4sBBHQ")  # magic, kind, DONE or FAILED, environment, bytes behind the head
MAGIC = b"CENV"
ORDER = struct.Struct("<64s64siii")  # task, purpose, agent, first game, number of games
WORDS = 2000  # bytes of an error's text
STATE_LIMIT = 1 << 28  # bytes of a saved environment
Bytes = bytes | bytearray | memoryview


class Vanished(ProtocolError):
    """The other end of a lane no longer exists."""


@dataclass(frozen=True)
class Head:
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
    return Head(kind, failed, env, size)


def request_size(games: int) -> int:
    """The longest request, but for a state that is handed back."""
    return HEAD.size + max(ORDER.size, 4 * games)


def answer_size(spaces: Spaces, games: int) -> int:
    """The longest answer, but for a saved state."""
    return HEAD.size + max(Layout(spaces, games).whole, 2 + WORDS)


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
    kinds = {kind.code: kind for kind in (errors.UsageError, errors.DamagedData, ProtocolError)}
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
        """The body of an answer."""
        parts = [
            step.reward.astype("<f8", copy=False).tobytes(),
            step.flags.astype("|u1", copy=False).tobytes(),
            step.obs.astype(self.spaces.dtype, copy=False).tobytes(),
        ]
        if (step.flags & (ENDED | CUT)).any():
            parts.append(step.start.astype(self.spaces.dtype, copy=False).tobytes())
        return b"".join(parts)

    def unpack(self, body: Bytes, into: Step) -> None:
        """Copy the body of an answer into this lane's part of a step."""
        if len(body) not in (self.short, self.whole):
            raise ProtocolError(
                f"an env server answered a step with {len(body)} bytes, not {self.short} or "
                f"{self.whole}"
            )
        games = self.games
        into.reward[:] = np.frombuffer(body, "<f8", games)
        into.flags[:] = np.frombuffer(body, "|u1", games, 8 * games)
        self.rows(body, self.obs, into.obs)
        ended = bool((into.flags & (ENDED | CUT)).any())
        if ended != (len(body) == self.whole) or (into.flags & ~np.uint8(7)).any():
            raise ProtocolError("an env server sent flags that don't fit the answer")
        if not np.isfinite(into.reward).all():
            raise ProtocolError("an env server sent a reward that is not finite")
        self.rows(body, self.short if ended else self.obs, into.start)

    def rows(self, body: Bytes, start: int, into: Array) -> None:
        """Copy one observation a game."""
        number = self.games * prod(self.spaces.shape)
        into.reshape(-1)[:] = np.frombuffer(body, self.spaces.dtype, number, start)
