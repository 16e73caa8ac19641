"""Started on every rank: exchanges lessons over the named graphs and checks what arrives.

mpirun -np 5 python exchange_program.py EDGES [EDGES …]
"""

import sys
from time import monotonic, sleep

import numpy as np
from mpi4py import MPI
from thread_links import known

from canal_mpi.interfaces import Offer, TransferEvent
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.settings import ShareConfig
from canal_mpi.topology.exchange import Exchange
from canal_mpi.topology.graphs import Edges, edges
from canal_mpi.topology.transport import MpiTransport

ROUNDS = 5
LIMIT = 1 << 26
STARTED = monotonic()


def idle(peer: int, phase: str) -> None:
    if monotonic() - STARTED > 200:
        raise TimeoutError(f"rank {MPI.COMM_WORLD.Get_rank()} waits for {peer} in {phase}")


def lesson(donor: int, round_: int) -> bytes:
    """Most are small; some take several chunks."""
    size = 9_000_000 if (donor, round_) == (0, 1) else 1000 + 7 * donor
    return encode({"rows": np.full(size, 10 * donor + round_, dtype=np.uint8)})


def offer(donor: int, round_: int) -> Offer:
    return Offer(donor, round_, f"task-{donor}-{round_}", float(donor), 10, 10)


def check(link: Exchange, wanted: list[Offer]) -> None:
    for result in link.fetch(wanted):
        assert result.refusal == "", result.refusal
        rows = decode(result.data, LIMIT)["rows"]
        donor, round_ = result.offer.key
        assert (rows == 10 * donor + round_).all()


def leave(link: Exchange, comm: MPI.Intracomm) -> None:
    """Answer messages until all ranks are done."""
    link.settle()
    barrier = comm.Ibarrier()
    while not barrier.Test():
        link.poll()
        sleep(0.001)


def exchange(name: str, joined: Edges, free: bool) -> None:
    comm = MPI.COMM_WORLD
    agent, size, moved = comm.Get_rank(), comm.Get_size(), list[TransferEvent]()
    transport = MpiTransport(comm, idle, LIMIT)
    share = ShareConfig(exchange="free" if free else "rounds")
    link = Exchange(agent, joined, transport, share, (), moved.append)
    rng = np.random.default_rng(agent)
    for round_ in range(1, ROUNDS + 1):
        link.begin(round_)
        link.publish(offer(agent, round_), lesson(agent, round_))
        found = link.offers()
        if not free:
            assert {one.key for one in found} == known(joined, size, agent, round_ + 1), name
        check(link, [one for one in found if rng.random() < 0.3])
    heard = known(joined, size, agent, ROUNDS + size)
    reachable = {key for key in heard if key[1] <= ROUNDS}
    while free and len(link.offers()) < len(reachable):
        idle(-1, "the last news")
        sleep(0.001)
    if free:
        assert {one.key for one in link.offers()} == reachable
    check(link, link.offers())
    leave(link, comm)
    crossed = [(m.offer.key, m.sender) for m in moved if m.kind == "transfer"]
    assert len(crossed) == len(set(crossed)), "a lesson crossed an edge twice"
    assert all((sender, agent) in joined for _, sender in crossed)


def main() -> None:
    for name in sys.argv[1:]:
        for free in (False, True):
            exchange(name, edges(name, MPI.COMM_WORLD.Get_size()), free)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print("all as it should be")


main()
