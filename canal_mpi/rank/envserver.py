"""A rank that runs environments for agents elsewhere: a switchboard and a process for each lane.

The switchboard plays nothing itself. It hands requests to worker processes in the order of their
arrival and their answers back, so a slow, hanging or crashing environment harms its agent alone.
"""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from canal_mpi.errors import ProtocolError, RankFailed
from canal_mpi.job import Job
from canal_mpi.log import logger
from canal_mpi.rank import envwire as wire
from canal_mpi.rank.envworker import first_words

if TYPE_CHECKING:
    from canal_mpi.rank.envport import Port

CLOSE = 1e-3  # seconds after a message in which the next one is looked for without a sleep
PAUSE = 1e-3  # seconds between two looks for a request otherwise
BEAT = 0.25  # seconds between two signs of life, however busy
START = 60.0  # seconds for a worker to load its libraries


class Worker:
    """A process that plays for one lane, as its server sees it."""

    def __init__(self, job: Job, log_file: Path) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "canal_mpi.rank.envworker", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self.sock.sendall(first_words(job, log_file))
        self._held, self._piece = bytearray(), bytearray(1 << 16)

    def ready(self, beat: Callable[[], None]) -> None:
        """Wait until it has loaded its libraries; `beat` shows that the server is alive."""
        deadline = perf_counter() + START
        while not select.select([self.sock], [], [], 0.2)[0]:
            beat()
            if perf_counter() > deadline:
                raise RankFailed(f"no environment could be loaded within {START:.0f} s")
        if not self.sock.recv(wire.HEAD.size):
            raise RankFailed(self.obituary())

    def read(self) -> bytearray | None:
        """A whole answer if it is here; RankFailed where the process has ended."""
        count = self.sock.recv_into(self._piece)
        if not count:
            raise RankFailed(self.obituary())
        self._held += memoryview(self._piece)[:count]
        if len(self._held) < wire.HEAD.size:
            return None
        if len(self._held) < wire.HEAD.size + wire.read_head(self._held).size:
            return None
        whole, self._held = self._held, bytearray()
        return whole

    def obituary(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the process of this environment {how}"

    def leave(self, hangs: bool) -> None:
        """Let it end by itself, or make it where it hangs; never waits."""
        self.sock.close()
        if hangs:
            self.process.kill()


class Seat:
    """A lane at the server: the agent's port on one side, a worker on the other."""

    def __init__(self, agent: int, port: "Port", worker: Worker, room: int) -> None:
        self.agent, self.port, self.worker, self._room = agent, port, worker, room
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
                self.worker.sock.sendall(request)
            except OSError:
                self.fail(RankFailed(self.worker.obituary()))
        return True

    def pass_on(self) -> None:
        """Give the agent what its worker has ready."""
        try:
            answer = self.worker.read()
        except (RankFailed, OSError) as error:
            self.fail(error)
            return
        if answer is not None:
            self.busy = None
            self.port.post(answer, self._room)

    def fail(self, error: Exception) -> None:
        """Tell the agent that its environment is lost."""
        head, self.busy = self.busy or wire.Head(wire.BYE, 0, 0, 0), None
        logger.error("agent %d: %s", self.agent, error)
        self.port.post(wire.pack_failure(head.kind, head.env, error), self._room)


class EnvServer:
    """Answers the agents that were dealt to it until all have said goodbye."""

    def __init__(self, seats: Sequence[Seat], idle: Callable[[], None]) -> None:
        self.seats, self._idle = list(seats), idle
        self._cores = len(os.sched_getaffinity(0))
        self._left: list[Worker] = []

    def serve(self) -> None:
        """The switchboard: requests to workers, answers to agents; it sleeps in between."""
        last = beat = perf_counter()
        while self.seats:
            now = perf_counter()
            if now - beat > BEAT:
                beat = now
                self._idle()
            heard = [self._hear(seat) for seat in list(self.seats)]
            if self._answer(0.0 if any(heard) else self._pause(now - last)) or any(heard):
                last = perf_counter()
        for worker in self._left:
            worker.process.wait(START)

    def close(self) -> None:
        """End what is left of the workers: nobody will ask any more."""
        for seat in self.seats:
            self._left.append(seat.worker)
            seat.worker.leave(hangs=True)
        self.seats = []

    def _pause(self, waited: float) -> float:
        """How long to sleep; not at all for a moment, unless a worker needs this core."""
        if waited < CLOSE and sum(seat.busy is not None for seat in self.seats) < self._cores:
            os.sched_yield()
            return 0.0
        return PAUSE

    def _hear(self, seat: Seat) -> bool:
        """Whether an agent had something to say; one that breaks the rules is left alone."""
        try:
            heard = seat.hear()
        except wire.Vanished as error:
            logger.warning("agent %d has vanished: %s", seat.agent, error)
            self._drop(seat)
            return False
        except ProtocolError as error:
            seat.fail(error)
            self._drop(seat)
            return False
        if seat.busy is not None and seat.busy.kind == wire.BYE:
            seat.port.post(wire.message(wire.BYE, 0), wire.HEAD.size)
            self._drop(seat)
        return heard

    def _drop(self, seat: Seat) -> None:
        """Close the environments of a lane."""
        self.seats.remove(seat)
        seat.port.close()
        self._left.append(seat.worker)
        seat.worker.leave(hangs=seat.busy is not None and seat.busy.kind != wire.BYE)

    def _answer(self, pause: float) -> bool:
        """Pass on the answers that come within a pause; whether there was one."""
        busy = {seat.worker.sock: seat for seat in self.seats if seat.busy is not None}
        ready, _, _ = select.select(list(busy), [], [], pause)
        for sock in ready:
            busy[sock].pass_on()
        return bool(ready)
