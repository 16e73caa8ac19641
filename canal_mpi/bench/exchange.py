"""`canal-mpi bench exchange`: how long lessons take among ranks, by topology and size."""

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.bench import under_mpirun
from canal_mpi.bench.tell import Figure, report
from canal_mpi.columns import encode
from canal_mpi.errors import ProtocolError
from canal_mpi.rank.launcher import detect
from canal_mpi.topology import graphs
from canal_mpi.topology.desk import Terms
from canal_mpi.types import Key, Offer

if TYPE_CHECKING:
    from canal_mpi.rank.world import World

TOPOLOGIES = ("full", "ring", "star", "line")
SIZES = (1_000, 1_000_000)  # bytes of a lesson
LIMIT = 1 << 24
ROUNDS = 7


def run(ranks: int, as_json: bool) -> int:
    """Measure on so many ranks, started here where no launcher did."""
    if detect() is None:
        words = ["bench", "exchange", "--ranks", str(ranks), *["--json"] * as_json]
        return under_mpirun(ranks, words)
    from canal_mpi.rank.world import World

    world = World()
    world.open()
    world.handshake("bench exchange")
    world.seat([])
    world.watch.timeout = 60.0
    figures: dict[str, Figure] = {}
    for name in TOPOLOGIES:
        for size in SIZES:
            figures |= _measure(world, name, size)
    if world.rank == 0:
        print(report(f"exchange among {world.size} ranks", figures, as_json), flush=True)
    world.finish()
    return 0


def _measure(world: "World", name: str, size: int) -> dict[str, Figure]:
    """Rounds in which everybody offers a lesson and takes all that it hears of."""
    from canal_mpi.topology.mpilink import MpiLink

    terms = Terms()
    edges = graphs.edges(name, world.size)
    assert world.comm is not None
    link = MpiLink(world.comm, edges, world.watch.idle, LIMIT, terms)
    world.watch.serve = link.poll
    data = encode({"rows": np.zeros(size, dtype=np.uint8)})
    waits, speeds, done = [], [], set[Key]()
    for round_ in range(1, ROUNDS + 1):
        link.begin(round_)
        start = perf_counter()
        link.publish(Offer(world.rank, round_, f"task-{world.rank}", 0.0, 10, len(data)), data)
        wanted = [offer for offer in link.offers() if offer.key not in done]
        done |= {offer.key for offer in wanted}
        parcels = link.fetch(wanted)
        if refusals := [parcel.refusal for parcel in parcels if parcel.refusal]:
            raise ProtocolError(f"a lesson of the benchmark was refused: {refusals[0]}")
        taken = sum(len(parcel.data) for parcel in parcels)
        waits.append(1e3 * (perf_counter() - start))
        speeds.append(taken / (perf_counter() - start) / 1e6)
    world.meet()
    link.settle()
    title = f"{name}, {size // 1000} kB"
    return {
        f"{title}: a round": Figure.of(waits, "ms"),
        f"{title}: taken in": Figure.of(speeds, "MB/s a rank"),
    }
