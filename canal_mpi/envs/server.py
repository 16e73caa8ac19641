"""A rank that runs environments for agents elsewhere, with a worker process for each channel.

The server plays nothing itself. It hands requests to workers in the order of their arrival and
their answers back, so a slow, hanging or crashing environment harms its agent alone. A worker is
`python -m canal_mpi.envs.server FD SPEED`; it ends when its pipe closes.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection  # only for bytes: its objects are pickled
from pathlib import Path
from time import perf_counter

import numpy as np

from canal_mpi import config
from canal_mpi.envs import common_spaces, env_maker
from canal_mpi.envs.client import LIMIT, ORDER, Body, Message, Port, Request, pack_step
from canal_mpi.errors import ProtocolError, RankFailed, log_to_file, logger
from canal_mpi.interfaces import Env
from canal_mpi.launcher import Throttle
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import Job

CLOSE = 1e-3  # seconds after a message in which is polled without sleeping
PAUSE = 1e-3  # seconds between two polls otherwise
BEAT = 0.25  # seconds between two signs of life, however busy
START = 60.0  # seconds for a worker to load its libraries
MOST = 64  # environments that a channel may hold open


class ServerChannel:
    """A channel at the server: the agent's port on one side, its worker process on the other."""

    def __init__(
        self, agent: int, port: Port, job: Job, log_file: Path, speed: float = 1.0
    ) -> None:
        self.agent, self.port = agent, port
        self.busy: Message | None = None  # the request that the worker is at
        self.pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "canal_mpi.envs.server", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, repr(speed)], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self.pipe.send_bytes(config.to_toml(job).encode())
        self.pipe.send_bytes(str(log_file).encode())

    def ready(self, beat: Callable[[], None]) -> None:
        """Wait until the worker has loaded its libraries; `beat` shows that we are alive."""
        deadline = perf_counter() + START
        while not self.pipe.poll(0.2):
            beat()
            if perf_counter() > deadline:
                raise RankFailed(f"no environment could be loaded within {START:.0f} s")
        self._read()

    def _read(self) -> bytes:
        """What the worker says; RankFailed where its process has ended."""
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise RankFailed(f"the process of this environment {how}") from error

    def hear(self) -> Message | None:
        """Hand a request to the worker if one is here; the request."""
        data = self.port.poll()
        if data is None:
            return None
        request = Message.unpack(data)
        if self.busy is not None:
            raise ProtocolError(f"agent {self.agent} asked again before it had its answer")
        if request.request == Request.GOODBYE:
            self.port.post(data)
            return request
        self.busy = request
        with suppress(OSError):  # that the worker has ended is told when its answer is read
            self.pipe.send_bytes(data)
        return request

    def pass_on(self) -> None:
        """Give the agent what its worker has ready."""
        try:
            self.port.post(self._read())
            self.busy = None
        except RankFailed as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Tell the agent that its environment is lost."""
        request, self.busy = self.busy or Message(Request.GOODBYE, 0), None
        logger.error("agent %d: %s", self.agent, error)
        self.port.post(request.failure(error))


class EnvServer:
    """Answers the agents that were dealt to it until all have said goodbye."""

    def __init__(self, channels: Sequence[ServerChannel], idle: Callable[[], None]) -> None:
        self.channels, self._idle = list(channels), idle
        self._cores = len(os.sched_getaffinity(0))
        self._left: list[ServerChannel] = []

    def serve(self) -> None:
        """Requests to workers, answers to agents; it sleeps in between."""
        last = beat = perf_counter()
        while self.channels:
            now = perf_counter()
            if now - beat > BEAT:
                beat = now
                self._idle()
            heard = [self._hear(channel) for channel in list(self.channels)]
            if self._answer(0.0 if any(heard) else self._pause(now - last)) or any(heard):
                last = perf_counter()
        for channel in self._left:
            channel.process.wait(START)

    def close(self) -> None:
        """End what is left of the workers: nobody will ask any more."""
        for channel in list(self.channels):
            self._drop(channel, hangs=True)

    def _pause(self, waited: float) -> float:
        """How long to sleep; not at all for a moment, unless a worker needs this core."""
        if waited < CLOSE and sum(bool(c.busy) for c in self.channels) < self._cores:
            os.sched_yield()
            return 0.0
        return PAUSE

    def _hear(self, channel: ServerChannel) -> bool:
        """Whether an agent had something to say; one that breaks the rules is left alone."""
        try:
            heard = channel.hear()
        except ConnectionError as error:
            logger.warning("agent %d is gone: %s", channel.agent, error)
            self._drop(channel, hangs=channel.busy is not None)
            return False
        except ProtocolError as error:
            channel.fail(error)
            self._drop(channel)
            return False
        if heard is not None and heard.request == Request.GOODBYE:
            self._drop(channel)
        return heard is not None

    def _drop(self, channel: ServerChannel, hangs: bool = False) -> None:
        """Let a worker end by itself, or make it where it hangs; never waits."""
        self.channels.remove(channel)
        self._left.append(channel)
        channel.pipe.close()
        if hangs:
            channel.process.kill()

    def _answer(self, pause: float) -> bool:
        """Pass on the answers that come within a pause; whether there was one."""
        busy = {channel.pipe: channel for channel in self.channels if channel.busy}
        ready, _, _ = select.select(list(busy), [], [], pause)
        for pipe in ready:
            busy[pipe].pass_on()
        return bool(ready)


# ── in the worker's process ────────────────────────────────────────────────────────────────────


class WorkerEnvs:
    """The environments of one channel: a request in, an answer out, whatever goes wrong."""

    def __init__(self, job: Job) -> None:
        self.job, self._make = job, env_maker(job, common_spaces(job.tasks, job.task))
        self.envs: dict[int, Env] = {}

    def answer(self, data: bytes) -> bytes:
        """Do what a request says; an error becomes an answer too."""
        request = Message.unpack(data)
        try:
            return request._replace(body=self._do(*request[:3])).pack()
        except Exception as error:
            logger.exception("%s of environment %d", request.request.name, request.env)
            return request.failure(error)

    def _do(self, request: Request, number: int, body: Body) -> bytes:
        if request == Request.MAKE:
            self._new(number, body)
        elif number not in self.envs:
            raise ProtocolError(f"environment {number} does not exist: make it first")
        env = self.envs[number]
        if request == Request.STEP:
            if len(body) != 4 * env.count:
                raise ProtocolError(f"{len(body)} bytes of actions for {env.count} games")
            env.send(np.frombuffer(body, "<i4"))
            return pack_step(env.recv())
        if request == Request.RESET:
            return env.reset().tobytes()
        if request == Request.STATE:
            return encode(env.state_dict())
        if request == Request.RESTORE:
            env.load_state_dict(decode(body, LIMIT))
        elif request == Request.CLOSE:
            self.envs.pop(number).close()
        return b""

    def _new(self, number: int, body: Body) -> None:
        if len(body) != ORDER.size or number in self.envs or len(self.envs) >= MOST:
            raise ProtocolError(f"environment {number} can't be made: {len(self.envs)} are open")
        raw_task, raw_purpose, agent, first, games = ORDER.unpack(body)
        task, purpose = (raw.rstrip(b"\0").decode() for raw in (raw_task, raw_purpose))
        if task not in self.job.tasks:
            raise ProtocolError(f"'{task}' is no task of this job: {', '.join(self.job.tasks)}")
        most = self.job.train.num_envs
        if not (first >= 0 and 0 < games <= most - first and agent >= 0):
            raise ProtocolError(f"games {first} to {first + games} of {most} for agent {agent}")
        self.envs[number] = self._make(task, purpose, agent, first, games)

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


def work() -> None:
    """Read the job and the log's name, say that games can be made, answer until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_the_parent()
    with Connection(int(sys.argv[1])) as pipe, suppress(EOFError, ConnectionError):
        job, log_file = config.from_toml(pipe.recv_bytes().decode()), pipe.recv_bytes().decode()
        log_to_file(Path(log_file), verbose=False)
        envs, throttle = WorkerEnvs(job), Throttle(float(sys.argv[2]))
        pipe.send_bytes(b"ready")
        with suppress(EOFError):
            while True:
                answer = envs.answer(pipe.recv_bytes())
                throttle.tick()
                pipe.send_bytes(answer)
        envs.close()


if __name__ == "__main__":
    work()
