"""A rank that runs environments for agents elsewhere, with a worker process for each channel.

The server plays nothing itself. It hands requests to workers in the order of their arrival and
their answers back, so a slow, hanging or crashing environment harms its agent alone.
"""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from time import perf_counter

from canal_mpi import config
from canal_mpi.envs import wire
from canal_mpi.errors import ProtocolError, RankFailed, logger
from canal_mpi.settings import Job

CLOSE = 1e-3  # seconds after a message in which is polled without sleeping
PAUSE = 1e-3  # seconds between two polls otherwise
BEAT = 0.25  # seconds between two signs of life, however busy
START = 60.0  # seconds for a worker to load its libraries


class Worker:
    """A process that plays for one channel, as its server sees it."""

    def __init__(self, job: Job, log_file: Path, speed: float = 1.0) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "canal_mpi.envs.worker", str(theirs.fileno())]
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

    def __init__(self, agent: int, port: wire.Port, worker: Worker) -> None:
        self.agent, self.port, self.worker = agent, port, worker
        self.busy: wire.Head | None = None  # the request that the worker is at

    def hear(self) -> bool:
        """Take in a request if one is here; whether there was one."""
        request = self.port.poll()
        if request is None:
            return False
        head = wire.read_head(request)
        if self.busy is not None:
            raise ProtocolError(f"agent {self.agent} asked again before it had its answer")
        self.busy = head
        if head.kind != wire.BYE:
            try:
                self.worker.pipe.send_bytes(request)
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
        head, self.busy = self.busy or wire.Head(wire.BYE, 0, 0, 0), None
        logger.error("agent %d: %s", self.agent, error)
        self.port.post(wire.pack_failure(head.kind, head.env, error))


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
            self._drop(channel)
            return False
        except ProtocolError as error:
            channel.fail(error)
            self._drop(channel)
            return False
        if channel.busy and channel.busy.kind == wire.BYE:
            channel.port.post(wire.message(wire.BYE, 0))
            self._drop(channel)
        return heard

    def _drop(self, channel: ServerChannel) -> None:
        """Close the environments of a channel."""
        self.channels.remove(channel)
        self._left.append(channel.worker)
        channel.worker.dismiss(hangs=channel.busy is not None and channel.busy.kind != wire.BYE)

    def _answer(self, pause: float) -> bool:
        """Pass on the answers that come within a pause; whether there was one."""
        busy = {channel.worker.pipe: channel for channel in self.channels if channel.busy}
        ready, _, _ = select.select(list(busy), [], [], pause)
        for pipe in ready:
            busy[pipe].pass_on()
        return bool(ready)
