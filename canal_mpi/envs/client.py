"""Environments that an env server plays, the same from outside as local ones.

A channel joins an agent to one worker process of a server. It carries one request at a time and
its answer: a fixed head, then a body of a known size.
"""

import os
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from math import isfinite
from time import monotonic, sleep
from typing import NamedTuple, Protocol

import numpy as np

from canal_mpi.envs import empty_step, envs_for
from canal_mpi.errors import (
    CanalError,
    DamagedData,
    NotRepeatable,
    ProtocolError,
    RankFailed,
    UsageError,
    described,
)
from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Array, Columns, Env, Spaces, Step
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import Job

HEAD = struct.Struct("<4sB?H")  # magic, request, whether it failed, environment
MAGIC = b"CENV"
ORDER = struct.Struct("<64s64siii")  # task, purpose, agent, first game, number of games
WORDS = 2000  # bytes of an error's kind and text
KINDS = {kind.__name__: kind for kind in (DamagedData, NotRepeatable, ProtocolError, UsageError)}
LIMIT = 1 << 28  # bytes of a message; only saved environments come near it
OVER = TERMINATED | TRUNCATED
Body = bytes | memoryview
Idle = Callable[[int, str], None]
Order = tuple[str, str, int, int]  # task, purpose, agent, number of games
CLOSE = 3e-3  # seconds around the usual time in which is polled without sleeping
SLACK = 100e-6  # seconds by which a sleep may be too long
EARLY = 0.7  # of the usual time is slept: who spins longer slows down the other half of its core
LONGEST = 2e-3  # seconds between two polls otherwise


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
    body: Body = b""
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
        """The answer to this request that tells of an error: its kind and its words."""
        kind, words = "RankFailed", f"{described(error)}; the env server's log has more"
        if isinstance(error, CanalError):
            kind, words = type(error).__name__, str(error)
        return self._replace(body=f"{kind}\n{words}".encode()[:WORDS], failed=True).pack()

    def error(self, where: str) -> CanalError:
        """The error that this answer tells of."""
        kind, _, words = bytes(self.body[:WORDS]).decode(errors="replace").partition("\n")
        return KINDS.get(kind, RankFailed)(f"{where}: {words}")


def pack_step(step: Step) -> bytes:
    """The body of an answer, little-endian: rewards, flags, observations of all games.

    Where an episode ended the next starts follow; otherwise they equal the observations.
    """
    flags = step.flags.tobytes()
    parts = [step.reward.astype("<f8", copy=False).tobytes(), flags, step.obs.tobytes()]
    if any(flag & OVER for flag in flags):
        parts.append(step.start.tobytes())
    return b"".join(parts)


def unpack_step(body: Body, step: Step) -> None:
    """Copy the body of an answer to a step, checked."""
    games, obs = len(step.flags), 9 * len(step.flags)
    start = obs + step.obs.nbytes
    if len(body) not in (start, start + step.start.nbytes):
        raise ProtocolError(f"a step of {games} games was answered by {len(body)} bytes")
    rewards, flags = np.frombuffer(body, "<f8", games), body[8 * games : obs]
    ended = any(flag & OVER for flag in flags)
    if ended != (len(body) > start) or max(flags) > (OVER | LIFE):
        raise ProtocolError("an env server sent flags that don't fit the answer")
    if not all(map(isfinite, rewards)):
        raise ProtocolError("an env server sent a reward that is not finite")
    step.reward[:], step.flags[:] = rewards, memoryview(flags)
    for column, offset in ((step.obs, obs), (step.start, start if ended else obs)):
        column.reshape(-1)[:] = np.frombuffer(body, column.dtype, column.size, offset)


class Channel:
    """A channel as an agent sees it; its waits sleep, have a deadline and name the server."""

    def __init__(self, port: Port, name: str, idle: Idle, timeout: float) -> None:
        self.port, self.name, self._idle, self._timeout = port, name, idle, timeout
        self._usual = 0.0  # seconds that a quick answer takes

    def answer(self, what: str) -> bytes:
        """Wait for the answer: asleep, but for a moment around the time when it usually comes."""
        start, found, waited = monotonic(), self.port.poll(), 0.0
        while found is None:
            self._rest(waited)
            if waited > 0.01:
                self._idle(self.port.peer, what)
            if waited > self._timeout:
                raise ProtocolError(
                    f"{self.name} has not answered for {waited:.0f} s (timeout "
                    f"{self._timeout:.0f} s): {what}"
                )
            found, waited = self.port.poll(), monotonic() - start
        self._usual += (0.02 if waited > self._usual else 1) * (min(waited, 0.1) - self._usual)
        return found

    def _rest(self, waited: float) -> None:
        early = EARLY * self._usual
        if waited < early - SLACK:
            sleep(min(early - SLACK - waited, LONGEST))
        elif waited < early + CLOSE:
            os.sched_yield()
        else:
            sleep(min(waited / 10, LONGEST))


class RemoteEnvs:
    """A batch of games of one task, dealt over the channels of an agent."""

    def __init__(
        self, channels: Sequence[Channel], number: int, order: Order, spaces: Spaces
    ) -> None:
        task, purpose, agent, self.count = order
        self.task, self.spaces, self._number = task, spaces, number
        self.channels = list(channels[: self.count])
        bounds = np.linspace(0, self.count, len(self.channels) + 1).astype(int).tolist()
        self._parts = [slice(a, b) for a, b in pairwise(bounds)]
        self._step = empty_step(self.count, spaces)
        self._channel_steps = [Step(*(a[p] for a in self._step)) for p in self._parts]
        self._actions = np.zeros(self.count, dtype="<i4")
        names = (task.encode(), purpose.encode(), agent)
        orders = [ORDER.pack(*names, p.start, p.stop - p.start) for p in self._parts]
        self._call(Request.MAKE, orders)

    def _ask(self, request: Request, bodies: Sequence[bytes] = ()) -> None:
        for k, channel in enumerate(self.channels):
            message = Message(request, self._number, bodies[k] if bodies else b"")
            channel.port.post(message.pack())

    def _answers(self, request: Request) -> list[Body]:
        """One body per channel; every channel is heard before the first error is raised."""
        what = f"{request.name.lower()} of {self.task}"
        answers = [(channel, channel.answer(what)) for channel in self.channels]
        bodies = []
        for channel, data in answers:
            answer = Message.unpack(data)
            if (answer.request, answer.env) != (request, self._number):
                raise ProtocolError(f"{channel.name} answered something else than {what}")
            if answer.failed:
                raise answer.error(channel.name)
            bodies.append(answer.body)
        return bodies

    def _call(self, request: Request, bodies: Sequence[bytes] = ()) -> list[Body]:
        self._ask(request, bodies)
        return self._answers(request)

    def reset(self) -> Array:
        """Start an episode in every game."""
        answers = self._call(Request.RESET)
        for step, body in zip(self._channel_steps, answers, strict=True):
            if len(body) != step.start.nbytes:
                raise ProtocolError(f"a reset was answered by {len(body)} bytes")
            step.start.reshape(-1)[:] = np.frombuffer(body, step.start.dtype)
        return self._step.start

    def send(self, actions: Array) -> None:
        """Hand over one action per game; the server plays while the agent does something else."""
        self._actions[:] = actions
        self._ask(Request.STEP, [self._actions[part].tobytes() for part in self._parts])

    def recv(self) -> Step:
        """What the actions led to; games that ended start again."""
        for step, body in zip(self._channel_steps, self._answers(Request.STEP), strict=True):
            unpack_step(body, step)
        return self._step

    def state_dict(self) -> Columns:
        """The state of every game, under the names that local environments give it."""
        answers = [decode(body, LIMIT) for body in self._call(Request.STATE)]
        return {name: column for state in answers for name, column in state.items()}

    def load_state_dict(self, state: Columns) -> None:
        """Go on where `state` was taken, there or locally."""
        numbers = [tuple(f"game-{k}/" for k in range(p.start, p.stop)) for p in self._parts]
        parts = [{n: c for n, c in state.items() if n.startswith(mine)} for mine in numbers]
        self._call(Request.RESTORE, [encode(part) for part in parts])

    def close(self) -> None:
        """Close every game."""
        self._call(Request.CLOSE)


class RemoteMaker:
    """An EnvMaker whose environments are played by an env server."""

    def __init__(self, channels: Sequence[Channel], job: Job, spaces: Spaces) -> None:
        self.channels, self.job, self.spaces = channels, job, spaces
        self._made = 0

    def __call__(self, task: str, purpose: str, agent: int) -> Env:
        """The environments of a task for one purpose."""
        self._made = (self._made + 1) % (1 << 16)
        order = (task, purpose, agent, envs_for(self.job, purpose))
        return RemoteEnvs(self.channels, self._made, order, self.spaces)

    def close(self) -> None:
        """Say goodbye: whatever is still open there may be closed."""
        for channel in self.channels:
            channel.port.post(Message(Request.GOODBYE, 0).pack())
        for channel in self.channels:
            channel.answer("goodbye")
