"""The process that plays: `python -m canal_mpi.envs.worker FD SPEED`, started by an env server.

It holds the environments of one channel, does what one request after the other says, and ends when
its pipe closes. Being a process of its own, it can hang or crash without harm to other agents.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection  # only for bytes: its objects are pickled
from pathlib import Path

import numpy as np

from canal_mpi import config
from canal_mpi.envs import common_spaces, local_env_maker, wire
from canal_mpi.errors import ProtocolError, log_to_file, logger
from canal_mpi.interfaces import Env, Spaces
from canal_mpi.launcher import Throttle
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import Job

Maker = Callable[[str, str, int, int, int], Env]  # task, purpose, agent, first game, games
MOST = 64  # environments that a channel may hold open


class WorkerEnvs:
    """The environments of one channel: a request in, an answer out, whatever goes wrong."""

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
            return encode(env.state_dict())
        if head.kind == wire.RESTORE:
            env.load_state_dict(decode(body, wire.STATE_LIMIT))
        elif head.kind == wire.CLOSE:
            self.envs.pop(head.env).close()
        return b""

    def _step(self, number: int, body: memoryview) -> bytes:
        env = self.envs[number]
        if len(body) != 4 * env.count:
            raise ProtocolError(f"{len(body)} bytes of actions for {env.count} games")
        env.send(np.frombuffer(body, "<i4"))
        return self._layouts[number].pack(env.recv())

    def _new(self, number: int, body: memoryview) -> bytes:
        if len(body) != wire.ORDER.size or number in self.envs or len(self.envs) >= MOST:
            raise ProtocolError(f"environment {number} can't be made: {len(self.envs)} are open")
        raw_task, raw_purpose, agent, first, games = wire.ORDER.unpack(body)
        task, purpose = (raw.rstrip(b"\0").decode() for raw in (raw_task, raw_purpose))
        if task not in self.job.tasks:
            raise ProtocolError(f"'{task}' is no task of this job: {', '.join(self.job.tasks)}")
        most = self.job.train.num_envs
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


def die_with_the_parent() -> None:
    """Also a process that hangs in an environment ends with its server."""
    with suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def main() -> None:
    """Read the job and the log's name, say that games can be made, answer until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_the_parent()
    with Connection(int(sys.argv[1])) as pipe, suppress(EOFError, ConnectionError):
        job, log_file = config.from_toml(pipe.recv_bytes().decode()), pipe.recv_bytes().decode()
        log_to_file(Path(log_file), verbose=False)
        spaces = common_spaces(job.tasks, job.task)
        envs = WorkerEnvs(job, spaces, local_env_maker(job, spaces))
        throttle = Throttle(float(sys.argv[2]))
        pipe.send_bytes(b"ready")
        with suppress(EOFError):
            while True:
                answer = envs.answer(pipe.recv_bytes())
                throttle.tick()
                pipe.send_bytes(answer)
        envs.close()


if __name__ == "__main__":
    main()
