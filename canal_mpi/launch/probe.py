"""A program for one host, or for several ranks, that prints one line of JSON for `doctor`.

`python -m canal_mpi.launch.probe check FOLDER DEVICE GAME,GAME` tells what a job depends on there,
`status FOLDER` what run.h5 in that folder says, `links 0-1,1-2` how fast pairs of ranks talk.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

import numpy as np
import psutil

from canal_mpi import __version__, envs
from canal_mpi.launch.supervise import ANSWER
from canal_mpi.results.status import status_of
from canal_mpi.settings import TaskConfig
from canal_mpi.topology import Tag

SMALLEST, LARGEST = 1 << 16, 1 << 22  # bytes of a message
LONG_ENOUGH = 0.1  # seconds of a message by which a rate is told


def check_here(folder: Path, device: str, games: Sequence[str]) -> dict[str, Any]:
    """What a job depends on at this host; what can't be found out is under `troubles`."""
    questions: dict[str, Callable[[], Any]] = {
        "machine": platform.machine,
        "python": lambda: ".".join(platform.python_version_tuple()[:2]),
        "canal-mpi": _code,
        "torch": lambda: version("torch"),
        "mpi": _mpi,
        "ale-py": lambda: version("ale-py"),
        "games": lambda: sum(_loads(game) for game in games),
        "device": lambda: _device(device),
        "cores": lambda: len(os.sched_getaffinity(0)),
        "memory": lambda: int(psutil.virtual_memory().available),
        "disk": lambda: _disk(folder),
    }
    facts, troubles = dict[str, Any](), {}
    for name, question in questions.items():
        try:
            facts[name] = question()
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            troubles[name] = f"{type(error).__name__}: {first}"[:300]
    return facts | {"troubles": troubles}


def _code() -> str:
    from canal_mpi.rank.world import code_digest

    return f"{__version__} {code_digest()}"


def _mpi() -> str:
    """The MPI library that this environment loads, as in `Open MPI v5.0.11`; nothing if none."""
    from canal_mpi.rank.world import mpi_library

    with suppress(ImportError, RuntimeError):
        return mpi_library()
    return ""


def _loads(game: str) -> bool:
    envs.make_game(game, TaskConfig(), np.random.SeedSequence(0)).close()
    return True


def _device(name: str) -> str:
    """Where the job computes on this host; raises where that does not work."""
    from canal_mpi.learn.networks import choose_device

    return choose_device(name)


def _disk(folder: Path) -> int:
    """Bytes that are free where the run goes."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{there} can't be written to")
    return shutil.disk_usage(there).free


def measure(comm: Any, pairs: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """For each pair that begins with this rank: seconds of one way, bytes a second."""
    mine, found = comm.Get_rank(), {}
    for one, two in pairs:  # in the same order everywhere, so nobody waits for ever
        if mine == one:
            found[f"{one}-{two}"] = _probe(comm, two)
        elif mine == two:
            data = np.zeros(LARGEST, np.uint8)
            while not data[0]:  # until the last one
                comm.Recv(data, one, Tag.PING)
                comm.Send(data[:1], one, Tag.PING)
    return found


def _probe(comm: Any, peer: int) -> list[float]:
    """Seconds of one way, bytes a second; slow links carry less, so that it takes no longer."""

    def ping(size: int, last: bool = False) -> float:
        """Seconds until a message has been answered by one byte."""
        data, echo = np.full(size, last, np.uint8), np.empty(1, np.uint8)
        start = perf_counter()
        comm.Send(data, peer, Tag.PING)
        comm.Recv(echo, peer, Tag.PING)
        return perf_counter() - start

    ping(1)  # the first one opens the connection
    latency, size = median(ping(1) for _ in range(20)) / 2, SMALLEST
    while size < LARGEST and ping(size) < LONG_ENOUGH:
        size *= 8
    rate = size / median(ping(size) for _ in range(3))
    ping(1, last=True)
    return [latency, rate]


def tell_links(pairs: Sequence[tuple[int, int]]) -> int:
    """On every rank: measure pairs; rank 0 prints what all measured."""
    from canal_mpi.rank.shutdown import Shutdown, run_guarded

    def tell(shutdown: Shutdown) -> None:
        from canal_mpi.topology.transport import deadline  # loads MPI, which is open by now

        world = shutdown.world
        assert world.comm is not None, "start this with mpirun"
        with deadline():
            found = measure(world.comm, pairs)
        reports = world.gather_json(found)
        if world.is_root:
            rates = {pair: rate for report in reports.values() for pair, rate in report.items()}
            print(f"{ANSWER}{json.dumps(rates)}", flush=True)
        world.finish()

    return run_guarded(tell)


def main() -> None:
    """Answer a question about this host; the time comes last, for who compares clocks."""
    question, first, *rest = sys.argv[1:]
    if question == "links":
        ends = [pair.split("-") for pair in first.split(",")]
        sys.exit(tell_links([(int(a), int(b)) for a, b in ends]))
    if question == "status":
        facts: dict[str, Any] = {"status": status_of(Path(first))}
    else:
        device, games = rest
        facts = check_here(Path(first), device, [name for name in games.split(",") if name])
    print(f"{ANSWER}{json.dumps(facts | {'time': time()})}", flush=True)


if __name__ == "__main__":
    main()
