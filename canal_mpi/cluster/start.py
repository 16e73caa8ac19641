"""`canal-mpi launch`: start a job, follow it to its end, and say how it ended."""

import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from canal_mpi.cluster.asking import hear
from canal_mpi.cluster.hostfile import Host, total
from canal_mpi.cluster.launch import Launch, plan_launch
from canal_mpi.cluster.marker import SIGN, status_of
from canal_mpi.cluster.supervise import Ended, supervise
from canal_mpi.errors import RankFailed, Stopped, UsageError
from canal_mpi.rank.launcher import refuse_mpirun

OURS = {0, 2, 65, 70, 73, 74, 75, 76, 78, 130}  # codes that mean what the README says
INTERRUPTED = 130
REACH = 60.0  # seconds to ask another host
DONE = ("finished", "degraded")  # the latter: with --ft, without those that died


@dataclass(frozen=True)
class Wish:
    """What `launch` was asked for; `folder` is where the run goes, if it is a run."""

    arguments: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    env_servers: int = 0
    ft: bool = False
    network: str | None = None
    folder: Path | None = None
    again: str = ""  # the options of launch, to type again


def command_of(wish: Wish) -> Launch:
    """The command that does it."""
    refuse_mpirun("launch")
    ranks = total(wish.hosts) if wish.ranks is None else wish.ranks
    if wish.ranks is None and not wish.hosts:
        raise UsageError("how many ranks? Give -n 5, or a --hostfile.")
    serving = total(wish.hosts, serving=True)
    _check(wish, ranks, serving)
    servers = wish.env_servers or serving
    return plan_launch(ranks, wish.arguments, wish.hosts, servers, wish.ft, network=wish.network)


def _check(wish: Wish, ranks: int, serving: int) -> None:
    """What is asked for must go together; `serving` ranks of the hosts run environments."""
    if wish.arguments[0] != "train":
        if wish.ft or wish.env_servers:
            raise UsageError(f"--ft and --env-server are for train, not for {wish.arguments[0]}.")
    elif serving and ranks < total(wish.hosts):
        raise UsageError(
            f"-n {ranks}, but the hosts have {total(wish.hosts)} ranks, and the last {serving} of "
            "them run environments: leave out -n, or give hosts fewer ranks in the hostfile."
        )


def start(wish: Wish, launch: Launch, say: Callable[[str], None]) -> int:
    """Run the command; the exit code of `launch`."""
    ended = supervise(launch, say)
    if ended.left and not ended.noise.diagnosis():
        say(f"{ended.left} processes that the job left behind were ended.")
    if ended.code == 0:
        return _really_done(wish, say)
    return _ended_badly(wish, ended, say)


def _really_done(wish: Wish, say: Callable[[str], None]) -> int:
    """mpirun also ends with 0 when it has lost a host: only the files tell."""
    if wish.folder is None:
        return 0
    status = _status(wish, wish.folder)
    if status in DONE:
        return 0
    say(
        f"mpirun ended without an error, but {wish.folder}/run.h5 is {status}, not finished: "
        f"a rank or a host was lost without a word.{_go_on(wish)}"
    )
    return RankFailed.code


def _status(wish: Wish, folder: Path) -> str:
    """What run.h5 says; rank 0 wrote it, perhaps on another host's disk."""
    here = status_of(folder)
    first = wish.hosts[0].name if wish.hosts else "localhost"
    if here in DONE or first in ("localhost", socket.gethostname()):
        return here
    ask = [sys.executable, "-m", "canal_mpi.cluster.marker"]
    there = plan_launch(1, [str(folder)], [Host(first)], network=wish.network, command=ask)
    facts = hear(there, SIGN, REACH).facts or {}
    return str(facts.get("status", "out of reach"))


def _ended_badly(wish: Wish, ended: Ended, say: Callable[[str], None]) -> int:
    noise = ended.noise
    if ended.code == Stopped.code:
        if wish.hosts:
            say(_go_on(wish).strip())
        return ended.code
    if ended.asked:
        if not noise.spoken:
            say(f"interrupted ({ended.asked}); what was saved is safe.{_go_on(wish)}")
        return ended.code if ended.code in OURS else INTERRUPTED
    diagnosis = noise.diagnosis()
    if diagnosis and (noise.hopeless or not noise.spoken):
        say(diagnosis)
    elif not noise.spoken:
        sys.stderr.writelines(noise.lines)
        say(f"mpirun ended with {_code(ended.code)}.{_go_on(wish)}")
    return ended.code if ended.code in OURS else RankFailed.code


def _code(code: int) -> str:
    if code == -signal.SIGSEGV:  # seen with Open MPI 5.0.11
        return "a crash; it does that where two interfaces of this machine are in one --network"
    return f"signal {-code}" if code < 0 else f"code {code}"


def _go_on(wish: Wish) -> str:
    """How to take the run up again, as one would type it."""
    if wish.folder is None:
        return ""
    return f" To go on: canal-mpi launch {wish.again}-- train --resume {shlex.quote(_short(wish))}"


def _short(wish: Wish) -> str:
    folder = wish.folder or Path()
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def words_of(options: Sequence[tuple[str, object]]) -> str:
    """Options as one types them, each followed by a space; those without a value are left out."""
    given = [(name, value) for name, value in options if value not in (None, False, 0)]
    return "".join(
        f"{name} " if value is True else f"{name} {shlex.quote(str(value))} "
        for name, value in given
    )
