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
from canal_mpi.envs import common_spaces, local_env_maker
from canal_mpi.envs.wire import LIMIT, ORDER, Message, Port, Request, StepFormat
from canal_mpi.errors import ProtocolError, RankFailed, log_to_file, logger
from canal_mpi.interfaces import Env, Spaces
from canal_mpi.launcher import Throttle
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import Job

CLOSE = 1e-3  # seconds after a message in which is polled without sleeping
PAUSE = 1e-3  # seconds between two polls otherwise
BEAT = 0.25  # seconds between two signs of life, however busy
START = 60.0  # seconds for a worker to load its libraries
MOST = 64  # environments that a channel may hold open
Maker = Callable[[str, str, int, int, int], Env]  # task, purpose, agent, first game, games


class Worker:
    """A process that plays for one channel, as its server sees it."""

    def __init__(self, job: Job, log_file: Path, speed: float = 1.0) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "canal_mpi.envs.server", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, repr(speed)], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self.pipe.send_bytes(config.to_toml(job).encode())
        self.pipe.send_bytes(str(log_file).encode())

    def ready(self, beat: Callable[[], None]) -> None:
        """Wait until it has loaded its libraries; `beat` shows that the server is alive."""
        deadline = perf_counter() + START
        while not self.pipe.poll(0.2):
            beat()
            if perf_counter() > deadline:
                raise RankFailed(f"no environment could be loaded within {START:.0f} s")
        self.read()

    def read(self) -> bytes:
        """The answer that is here; RankFailed where the process has ended."""
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise RankFailed(self.end_reason()) from error

    def end_reason(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the process of this environment {how}"

    def dismiss(self, hangs: bool) -> None:
        """Let it end by itself, or make it where it hangs; never waits."""
        self.pipe.close()
        if hangs:
            self.process.kill()


class ServerChannel:
    """A channel at the server: the agent's port on one side, a worker on the other."""

    def __init__(self, agent: int, port: Port, worker: Worker) -> None:
        self.agent, self.port, self.worker = agent, port, worker
        self.busy: Message | None = None  # the request that the worker is at

    def hear(self) -> bool:
        """Take in a request if one is here; whether there was one."""
        data = self.port.poll()
        if data is None:
            return False
        request = Message.unpack(data)
        if self.busy is not None:
            raise ProtocolError(f"agent {self.agent} asked again before it had its answer")
        self.busy = request
        if request.request != Request.GOODBYE:
            try:
                self.worker.pipe.send_bytes(data)
            except OSError:
                self.fail(RankFailed(self.worker.end_reason()))
        return True

    def pass_on(self) -> None:
        """Give the agent what its worker has ready."""
        try:
            answer = self.worker.read()
        except RankFailed as error:
            self.fail(error)
            return
        self.busy = None
        self.port.post(answer)

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
        self._left: list[Worker] = []

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
        for worker in self._left:
            worker.process.wait(START)

    def close(self) -> None:
        """End what is left of the workers: nobody will ask any more."""
        for channel in self.channels:
            self._left.append(channel.worker)
            channel.worker.dismiss(hangs=True)
        self.channels = []

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
            self._drop(channel, hangs=False)
            return False
        if channel.busy and channel.busy.request == Request.GOODBYE:
            channel.port.post(channel.busy.pack())
            self._drop(channel, hangs=False)
        return heard

    def _drop(self, channel: ServerChannel, hangs: bool) -> None:
        """Close the environments of a channel."""
        self.channels.remove(channel)
        self._left.append(channel.worker)
        channel.worker.dismiss(hangs)

    def _answer(self, pause: float) -> bool:
        """Pass on the answers that come within a pause; whether there was one."""
        busy = {channel.worker.pipe: channel for channel in self.channels if channel.busy}
        ready, _, _ = select.select(list(busy), [], [], pause)
        for pipe in ready:
            busy[pipe].pass_on()
        return bool(ready)


# ── in the worker's process ────────────────────────────────────────────────────────────────────


class WorkerEnvs:
    """The environments of one channel: a request in, an answer out, whatever goes wrong."""

    def __init__(self, job: Job, spaces: Spaces, make: Maker) -> None:
        self.job, self.spaces, self._make = job, spaces, make
        self.envs: dict[int, Env] = {}
        self._formats: dict[int, StepFormat] = {}

    def answer(self, data: bytes) -> bytes:
        """Do what a request says; an error becomes an answer too."""
        request = Message.unpack(data)
        try:
            if request.request != Request.MAKE and request.env not in self.envs:
                raise ProtocolError(f"environment {request.env} does not exist: make it first")
            return request._replace(body=self._do(*request[:2], memoryview(request.body))).pack()
        except Exception as error:
            logger.exception("%s of environment %d", request.request.name, request.env)
            return request.failure(error)

    def _do(self, request: Request, number: int, body: memoryview) -> bytes:
        if request == Request.STEP:
            return self._step(number, body)
        if request == Request.MAKE:
            return self._new(number, body)
        env = self.envs[number]
        if request == Request.RESET:
            return env.reset().tobytes()
        if request == Request.STATE:
            return encode(env.state_dict())
        if request == Request.RESTORE:
            env.load_state_dict(decode(body, LIMIT))
        elif request == Request.CLOSE:
            self.envs.pop(number).close()
        return b""

    def _step(self, number: int, body: memoryview) -> bytes:
        env = self.envs[number]
        if len(body) != 4 * env.count:
            raise ProtocolError(f"{len(body)} bytes of actions for {env.count} games")
        env.send(np.frombuffer(body, "<i4"))
        return self._formats[number].pack(env.recv())

    def _new(self, number: int, body: memoryview) -> bytes:
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
        self._formats[number] = StepFormat(self.spaces, games)
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


def work() -> None:
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
    work()
