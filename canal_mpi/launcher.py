"""This process: who started it, told by the environment alone, and how fast it may run."""

import os
import re
import select
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from math import inf
from pathlib import Path
from time import monotonic, sleep, thread_time

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


def terminal() -> str | None:
    """The terminal that what we print ends up on, through the launcher if there is one.

    A launcher may give its ranks pipes on a terminal, or terminals of its own into a pipe, so
    only the launcher's own output tells.
    """
    process, parent = _mpirun()
    if process:
        shown_by = parent if _launch_of(parent) else process  # it passes on what mpirun says
        return _tty(f"/proc/{shown_by}/fd/1")
    alone = detect() is None and sys.stdout.isatty()  # a notebook's output is no terminal
    return _tty("/proc/self/fd/1") if alone else None


def start_command(ranks: int) -> str:
    """How so many ranks are started, as the user did: `mpirun -np 5 canal-mpi` and the like."""
    if typed := shlex.join(_launch_of(_mpirun()[1])):
        return re.sub(r"(?<= -n)\s*\d+", f" {ranks}", f"canal-mpi {typed} --")
    return f"mpirun -np {ranks} canal-mpi"


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


@cache
def _mpirun() -> tuple[int, int]:
    """The processes of the launcher on this host and of who started it; zeros where none is."""
    import psutil

    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            if process.name() in PROGRAMS:
                return process.pid, process.ppid()
    return 0, 0


def _launch_of(process: int) -> list[str]:
    """`launch` and its options as they were typed, where a process is `canal-mpi launch`."""
    import psutil

    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return []
    at = words.index("launch") if "launch" in words else 0
    if not at or not words[at - 1].endswith(("canal-mpi", "canal_mpi")):
        return []
    return list(takewhile(lambda word: word not in ("--", "train", "evaluate"), words[at:]))


def _tty(link: str) -> str | None:
    try:
        target = os.readlink(link)
    except OSError:
        return None
    return target if target.startswith(("/dev/pts/", "/dev/tty")) else None


SHORTEST, LONGEST = 1e-3, 0.2  # seconds of one sleep: heartbeats are due every half second
SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds with a core, and waiting for one
CREDIT = 0.05  # seconds that sleeping too long, or waiting, may be made up for


class Throttle:
    """Slows this thread to a fraction of its speed by sleeping inside `tick`.

    Each second in which it is busy then takes at least 1 / speed seconds: also where it has to
    wait for a core, else ranks that share cores would all be equally slow. Other waiting is not
    slowed: a slow device waits no longer than a fast one.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._busy = inf  # at the last tick; nothing counts before the first
        self._due = -inf  # when a device of that speed would have got so far

    def tick(self) -> None:
        """Called after every piece of work: sleeps until the slower device would be done."""
        if self.speed == 1:
            return
        busy, now = sum(_core_seconds()), monotonic()
        self._due = max(self._due + max(busy - self._busy, 0.0) / self.speed, now - CREDIT)
        self._busy = busy
        if self._due - now > SHORTEST:
            sleep(min(self._due - now, LONGEST))


def _core_seconds() -> tuple[float, float]:
    """Seconds in which this thread had a core, and in which it was ready to run and had none."""
    try:
        used, waited = Path(SCHEDSTAT).read_text().split()[:2]
    except OSError:  # a kernel without it
        return thread_time(), 0.0
    return int(used) / 1e9, int(waited) / 1e9


def core_wait() -> float:
    """Seconds in which this thread was ready to run and had no core; 0 where nobody knows."""
    return _core_seconds()[1]
