"""Who started this process, told by the environment alone; no MPI is loaded for it."""

import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from canal_mpi.errors import UsageError

STARTED = monotonic()  # this module is among the first that are loaded


@dataclass(frozen=True)
class Launcher:
    """What a launcher says about the process it started."""

    name: str
    rank: int
    size: int


SIGNS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH's mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
PROGRAMS = ("mpirun", "prterun", "mpiexec", "mpiexec.hydra", "orterun", "srun")


def detect(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """The launcher of this process, or None where there was none."""
    environ = os.environ if environ is None else environ
    for name, rank, size in SIGNS:
        if environ.get(rank, "").isdecimal() and environ.get(size, "").isdecimal():
            return Launcher(name, int(environ[rank]), int(environ[size]))
    return None


def refuse_mpirun(command: str) -> None:
    """For a command that calls mpirun itself: UsageError where it was started by a launcher.

    An interactive shell of Slurm is a step of one task: that is no launcher.
    """
    launcher = detect()
    if launcher is not None and (launcher.name, launcher.size) != ("srun", 1):
        raise UsageError(f"{command} calls mpirun itself: start it without mpirun in front.")


def terminal() -> str | None:
    """The terminal that what we print ends up on, through the launcher if there is one.

    A launcher may give its ranks pipes on a terminal, or terminals of its own into a pipe, so
    only the launcher's own output tells.
    """
    process, parent = _mpirun()
    if process:
        shown_by = parent if _is_launch(parent) else process  # it passes on what mpirun says
        return _tty(f"/proc/{shown_by}/fd/1")
    return _tty("/proc/self/fd/1") if detect() is None else None


def nobody_reads() -> bool:
    """Whether what mpirun prints goes into a pipe whose reader has gone, as in `mpirun … | head`.

    Ranks are not told; Open MPI's mpirun ends the job after ten such lines.
    """
    link = f"/proc/{_mpirun()[0]}/fd/1"
    try:
        if not os.readlink(link).startswith("pipe:"):
            return False
        pipe = os.open(link, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(pipe, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    finally:
        os.close(pipe)


def _mpirun() -> tuple[int, int]:
    """The processes of the launcher on this host and of who started it; zeros where none is."""
    process = os.getpid()
    for _ in range(8):
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            break
        parent = int(status[status.rindex(")") + 2 :].split()[1])
        if status[status.index("(") + 1 : status.rindex(")")] in PROGRAMS:
            return process, parent
        process = parent
    return 0, 0


def _is_launch(process: int) -> bool:
    """Whether a process is `canal-mpi launch`."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    at = words.index(b"launch") if b"launch" in words else 0
    return at > 0 and words[at - 1].endswith((b"canal-mpi", b"canal_mpi"))


def _tty(link: str) -> str | None:
    try:
        target = os.readlink(link)
    except OSError:
        return None
    return target if target.startswith(("/dev/pts/", "/dev/tty")) else None
