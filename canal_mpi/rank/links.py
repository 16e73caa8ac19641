"""A program for a few ranks: how fast pairs of them talk. Prints one line of JSON on rank 0."""

import json
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.launch.supervise import ANSWER
from canal_mpi.rank.shutdown import run_guarded
from canal_mpi.rank.world import World, mpi_name
from canal_mpi.topology import Tag

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST, LARGEST = 1 << 16, 1 << 22  # bytes
PINGS, PROBES = 20, 3
SECONDS = 1.0  # about so long is a pair probed


def mpi_library() -> str:
    """The MPI library that this environment loads, as in `Open MPI v5.0.11`; nothing if none."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        return mpi_name()
    except (ImportError, RuntimeError):
        return ""


def measure(comm: "MPI.Comm", pairs: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """For each pair that begins with this rank: seconds of one way, bytes a second."""
    mine, found = comm.Get_rank(), {}
    for one, two in pairs:  # in the same order everywhere, so nobody waits for ever
        if mine == one:
            found[f"{one}-{two}"] = _probe(comm, two)
        elif mine == two:
            _echo(comm, one, [1] * (PINGS + 1) + [FIRST])
            size = np.zeros(1, np.int64)
            comm.Recv(size, one, Tag.PING)
            _echo(comm, one, [int(size[0])] * (PROBES + 1) if size[0] else [])
    return found


def _probe(comm: "MPI.Comm", peer: int) -> list[float]:
    """Seconds of one way, bytes a second; a slow link carries less, so that it takes no longer."""
    _ping(comm, peer, 1)  # the first one opens the connection
    latency = median(_ping(comm, peer, 1) for _ in range(PINGS)) / 2
    rate = FIRST / _ping(comm, peer, FIRST)
    size = size_for(rate)
    comm.Send(np.array([size], np.int64), peer, Tag.PING)
    if size:
        _ping(comm, peer, size)
        rate = size / median(_ping(comm, peer, size) for _ in range(PROBES))
    return [latency, rate]


def size_for(rate: float) -> int:
    """How large further probes are at so many bytes a second; 0: the first one tells enough."""
    size = min(int(rate * SECONDS / (PROBES + 1)), LARGEST)
    return size if size >= FIRST else 0


def _echo(comm: "MPI.Comm", peer: int, sizes: Sequence[int]) -> None:
    for size in sizes:
        comm.Recv(np.empty(size, np.uint8), peer, Tag.PING)
        comm.Send(np.zeros(1, np.uint8), peer, Tag.PING)


def _ping(comm: "MPI.Comm", peer: int, size: int) -> float:
    """Seconds until a message has been answered by one byte."""
    data, echo = np.zeros(size, np.uint8), np.empty(1, np.uint8)
    start = perf_counter()
    comm.Send(data, peer, Tag.PING)
    comm.Recv(echo, peer, Tag.PING)
    return perf_counter() - start


def main() -> None:
    """Measure the pairs named on the command line, as in 0-1,1-2."""
    words = [pair.split("-") for pair in sys.argv[1].split(",")]
    pairs = [(int(a), int(b)) for a, b in words]
    sys.exit(run_guarded(lambda shutdown: tell(shutdown.world, pairs)))


def tell(world: World, pairs: Sequence[tuple[int, int]]) -> None:
    """Rank 0 prints what all measured."""
    from canal_mpi.topology.transport import deadline

    assert world.comm is not None, "start this with mpirun"
    with deadline():
        found = measure(world.comm, pairs)
    reports = world.gather_json(found)
    if world.is_root:
        rates = {pair: rate for report in reports.values() for pair, rate in report.items()}
        print(f"{ANSWER}{json.dumps(rates)}", flush=True)
    world.finish()


if __name__ == "__main__":
    main()
