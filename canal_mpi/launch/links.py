"""A program for a few ranks: how fast pairs of them talk. Prints one line of JSON on rank 0."""

import json
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from canal_mpi.launch.supervise import ANSWER
from canal_mpi.rank.shutdown import run_guarded
from canal_mpi.rank.world import World
from canal_mpi.topology import Tag

FIRST, LARGEST = 1 << 16, 1 << 22  # bytes
PINGS, PROBES = 20, 3
SECONDS = 1.0  # about so long is a pair probed


def measure(comm: Any, pairs: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """For each pair that begins with this rank: seconds of one way, bytes per second."""
    mine, found = comm.Get_rank(), {}
    for one, two in pairs:  # in the same order everywhere, so nobody waits for ever
        if mine == one:
            found[f"{one}-{two}"] = _probe(comm, two)
        elif mine == two:
            while _echo(comm, one):
                pass
    return found


def _probe(comm: Any, peer: int) -> list[float]:
    """Seconds of one way, bytes per second; a slow link carries less, so it takes no longer."""
    _ping(comm, peer, 1)  # the first one opens the connection
    latency = median(_ping(comm, peer, 1) for _ in range(PINGS)) / 2
    rate = FIRST / _ping(comm, peer, FIRST)
    size = min(int(rate * SECONDS / (PROBES + 1)), LARGEST)
    if size >= FIRST:  # else the first one tells enough
        _ping(comm, peer, size)
        rate = size / median(_ping(comm, peer, size) for _ in range(PROBES))
    comm.Send(np.zeros(1, np.int64), peer, Tag.PING)
    return [latency, rate]


def _ping(comm: Any, peer: int, size: int) -> float:
    """Seconds until a message has been answered by one byte."""
    data, echo = np.zeros(size, np.uint8), np.empty(1, np.uint8)
    comm.Send(np.array([size], np.int64), peer, Tag.PING)
    comm.Recv(echo, peer, Tag.PING)
    start = perf_counter()
    comm.Send(data, peer, Tag.PING)
    comm.Recv(echo, peer, Tag.PING)
    return perf_counter() - start


def _echo(comm: Any, peer: int) -> bool:
    """The other end of `_ping`; False once there are no more."""
    size, echo = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    comm.Recv(size, peer, Tag.PING)
    if size[0]:
        data = np.empty(int(size[0]), np.uint8)
        comm.Send(echo, peer, Tag.PING)
        comm.Recv(data, peer, Tag.PING)
        comm.Send(echo, peer, Tag.PING)
    return bool(size[0])


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
    words = [pair.split("-") for pair in sys.argv[1].split(",")]  # as in 0-1,1-2
    sys.exit(
        run_guarded(lambda shutdown: tell(shutdown.world, [(int(a), int(b)) for a, b in words]))
    )
