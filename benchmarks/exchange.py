"""How long lessons take among ranks of this machine, by topology and size.

mpirun -np 5 python benchmarks/exchange.py
"""

import sys
from time import perf_counter

import numpy as np
from measuring import Figure, report

from canal_mpi.interfaces import Offer
from canal_mpi.membuf.wire import encode
from canal_mpi.rank.world import World
from canal_mpi.settings import ShareConfig
from canal_mpi.topology import graphs
from canal_mpi.topology.exchange import Exchange

TOPOLOGIES = ("full", "ring", "star", "line")
SIZES = (1_000, 1_000_000)  # bytes of a lesson
LIMIT = 1 << 24
ROUNDS = 7


def measure(world, name, size):
    """Rounds in which everybody offers a lesson and takes all that it hears of."""
    from canal_mpi.topology.transport import MpiTransport

    edges = graphs.edges(name, world.size)
    link = Exchange(
        world.rank, edges, MpiTransport(world.comm, world.heartbeat.idle, LIMIT), ShareConfig()
    )
    world.heartbeat.attach(poll=link.poll, on_beat=lambda: None)
    data = encode({"rows": np.zeros(size, dtype=np.uint8)})
    waits, speeds, done = [], [], set()
    for round_ in range(1, ROUNDS + 1):
        link.begin(round_)
        start = perf_counter()
        link.publish(Offer(world.rank, round_, f"task-{world.rank}", 0.0, 10, len(data)), data)
        wanted = [offer for offer in link.offers() if offer.key not in done]
        done |= {offer.key for offer in wanted}
        found = link.fetch(wanted)
        if refusals := [lesson.refusal for lesson in found if lesson.refusal]:
            sys.exit(f"a lesson of the benchmark was refused: {refusals[0]}")
        taken = sum(len(lesson.data) for lesson in found)
        waits.append(1e3 * (perf_counter() - start))
        speeds.append(taken / (perf_counter() - start) / 1e6)
    world.barrier()
    link.settle()
    title = f"{name}, {size // 1000} kB"
    return {
        title: Figure.of(waits, "ms per round"),
        f"{title}:": Figure.of(speeds, "MB/s per rank"),
    }


def main():
    world = World.open()
    world.handshake("benchmarks/exchange.py")
    world.heartbeat.timeout = 60.0
    figures = {}
    for name in TOPOLOGIES:
        for size in SIZES:
            figures |= measure(world, name, size)
    if world.rank == 0:
        print(report(f"{world.size} ranks", {"exchange": figures}), flush=True)
    world.finish()


if __name__ == "__main__":
    main()
