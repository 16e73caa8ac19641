"""The process that plays: `python -m canal_mpi.rank.envworker FD`, started by an env server.

It holds the environments of one lane, does what one request after the other says, and ends when
its socket closes. Being a process of its own, it can hang or crash without harm to other lanes.
"""

import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from canal_mpi import config, log
from canal_mpi.columns import decode, encode
from canal_mpi.errors import ProtocolError
from canal_mpi.job import Job
from canal_mpi.log import logger
from canal_mpi.rank import envwire as wire
from canal_mpi.types import Env, Spaces

Maker = Callable[[str, str, int, int, int], Env]  # task, purpose, agent, first game, games
MOST = 64  # environments that a lane may hold open


class Host:
    """The environments of one lane: a request in, an answer out, whatever goes wrong."""

    def __init__(self, job: Job, spaces: Spaces, make: Maker) -> None:
        self.job, self.spaces, self._make = job, spaces, make
        self.envs: dict[int, Env] = {}
        self._layouts: dict[int, wire.Layout] = {}

    def answer(self, request: wire.Bytes) -> bytes:
        """Do what a request says; an error becomes an answer too."""
        head = wire.read_head(request)
        body = memoryview(request)[wire.HEAD.size :]
        try:
            if head.kind != wire.MAKE and head.env not in self.envs:
                raise ProtocolError(f"environment {head.env} does not exist: make it first")
            return wire.message(head.kind, head.env, self._do(head, body))
        except Exception as error:
            logger.exception("%s of environment %d", wire.NAMES[head.kind], head.env)
            return wire.pack_failure(head.kind, head.env, error)

    def _do(self, head: wire.Head, body: memoryview) -> bytes:
        if head.kind == wire.STEP:
            return self._step(head.env, body)
        if head.kind == wire.MAKE:
            return self._new(head.env, body)
        env = self.envs[head.env]
        if head.kind == wire.RESET:
            return env.reset().tobytes()
        if head.kind == wire.STATE:
            return encode(env.state())
        if head.kind == wire.RESTORE:
            env.restore(decode(body, wire.STATE_LIMIT))
        elif head.kind == wire.CLOSE:
            self.envs.pop(head.env).close()
        return b""

    def _step(self, number: int, body: memoryview) -> bytes:
        env = self.envs[number]
        if len(body) != 4 * env.count:
            raise ProtocolError(f"{len(body)} bytes of actions for {env.count} games")
        env.send(np.frombuffer(body, "<i4"))
        return self._layouts[number].pack(env.receive())

    def _new(self, number: int, body: memoryview) -> bytes:
        if len(body) != wire.ORDER.size or number in self.envs or len(self.envs) >= MOST:
            raise ProtocolError(f"environment {number} can't be made: {len(self.envs)} are open")
        raw_task, raw_purpose, agent, first, games = wire.ORDER.unpack(body)
        task, purpose = (raw.rstrip(b"\0").decode() for raw in (raw_task, raw_purpose))
        if task not in self.job.tasks:
            raise ProtocolError(f"'{task}' is no task of this job: {', '.join(self.job.tasks)}")
        most = self.job.train.envs
        if not (first >= 0 and 0 < games <= most - first and agent >= 0):
            raise ProtocolError(f"games {first} to {first + games} of {most} for agent {agent}")
        self.envs[number] = self._make(task, purpose, agent, first, games)
        self._layouts[number] = wire.Layout(self.spaces, games)
        return b""

    def close(self) -> None:
        """Close what is open."""
        for env in self.envs.values():
            env.close()
        self.envs.clear()


def receive(sock: socket.socket) -> bytearray | None:
    """The next message, or None where the other end has closed."""
    head = bytearray(wire.HEAD.size)
    if not _fill(sock, memoryview(head)):
        return None
    whole = head + bytearray(wire.read_head(head).size)
    return whole if _fill(sock, memoryview(whole)[wire.HEAD.size :]) else None


def _fill(sock: socket.socket, into: memoryview) -> bool:
    while into:
        if not (count := sock.recv_into(into)):
            return False
        into = into[count:]
    return True


def die_with_the_parent() -> None:
    """Also a process that hangs in an environment ends with its server."""
    with suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def serve(sock: socket.socket, host: Host) -> None:
    """Answer until the other end closes."""
    while (request := receive(sock)) is not None:
        sock.sendall(host.answer(request))
    host.close()


def first_words(job: Job, log_file: Path) -> bytes:
    """What a server tells a new worker."""
    texts = [config.to_toml(job).encode(), str(log_file).encode()]
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def main() -> None:
    """Hear what the job is, say that the games can be made, serve."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_the_parent()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        job, log_file = (_text(sock) for _ in range(2))
        log.to_file(Path(log_file), verbose=False)
        from canal_mpi.rank.build import games_maker
        from canal_mpi.tasks import common_spaces

        parsed = config.from_toml(job)
        spaces = common_spaces(parsed.tasks, parsed.task)
        sock.sendall(wire.message(wire.MAKE, 0))
        serve(sock, Host(parsed, spaces, games_maker(parsed, spaces)))


def _text(sock: socket.socket) -> str:
    size = bytearray(8)
    if not _fill(sock, memoryview(size)):
        sys.exit(0)  # the server is gone already
    text = bytearray(struct.unpack("<Q", size)[0])
    _fill(sock, memoryview(text))
    return text.decode()


if __name__ == "__main__":
    main()
