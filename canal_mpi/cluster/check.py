"""A program that looks at the host it runs on and prints what it found, as one line of JSON.

python -m canal_mpi.cluster.check FOLDER GAME,GAME
"""

import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

SIGN = "canal-mpi-check "


def look(folder: Path, games: Sequence[str]) -> dict[str, Any]:
    """Everything about this host that a job depends on; what can't be found out is a `trouble`."""
    questions: dict[str, Callable[[], Any]] = {
        "host": socket.gethostname,
        "machine": platform.machine,
        "python": platform.python_version,
        "canal-mpi": _code,
        "torch": lambda: version("torch"),
        "mpi": _mpi,
        "ale-py": lambda: version("ale-py"),
        "games": lambda: _games(games),
        "cuda": _cuda,
        "cores": lambda: len(os.sched_getaffinity(0)),
        "memory": _memory,
        "disk": lambda: _disk(folder),
    }
    return {name: _answer(question) for name, question in questions.items()}


def _answer(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return {"trouble": f"{type(error).__name__}: {first}"[:300]}


def _code() -> str:
    from canal_mpi import __version__
    from canal_mpi.rank.world import code_digest

    return f"{__version__} {code_digest()}"


def _mpi() -> str:
    from canal_mpi.rank.links import mpi_library

    return mpi_library()


def _games(games: Sequence[str]) -> int:
    """How many of the games load, each for real."""
    import numpy as np

    from canal_mpi.job import TaskConfig
    from canal_mpi.tasks import make_game

    for game in games:
        make_game(game, TaskConfig(), np.random.SeedSequence(0)).close()
    return len(games)


def _cuda() -> str:
    """Why CUDA can't be used, or nothing where it can."""
    from canal_mpi.learn.device import cuda_trouble

    return cuda_trouble()


def _memory() -> int:
    """Bytes that are free for programs."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _disk(folder: Path) -> int:
    """Bytes that are free where the run goes."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{there} can't be written to")
    return shutil.disk_usage(there).free


def main() -> None:
    """Look, and say what the time is last: whoever reads it compares clocks."""
    games = [name for name in sys.argv[2].split(",") if name]
    facts = look(Path(sys.argv[1]), games)
    print(f"{SIGN}{json.dumps(facts | {'time': time.time()})}", flush=True)


if __name__ == "__main__":
    main()
