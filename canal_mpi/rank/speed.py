"""How fast the link between hosts is, for the choice whether lessons are packed."""

from time import perf_counter

from canal_mpi.rank.world import World

PROBE = 1 << 21  # bytes
TAG = 37
PACKING = 100e6  # bytes of rows a second that are packed and unpacked (canal-mpi bench lesson)


def slowest_link(world: World) -> float:
    """Bytes a second from the leading rank to the slowest other host; infinite on one host."""
    firsts = {world.hosts[rank]: rank for rank in reversed(world.alive) if rank < world.agents}
    others = sorted(rank for host, rank in firsts.items() if host != world.hosts[world.lead])
    found = float("inf")
    if world.mail is None or not others:
        return found
    for rank in others if world.leads else [world.lead] * (world.rank in others):
        for size in (1, PROBE):  # the first one opens the connection
            start = perf_counter()
            if world.leads:
                world.mail.post(bytes(size), rank, TAG)
            echo = world.mail.collect(rank, TAG, PROBE, "the start")
            if not world.leads:
                world.mail.post(b"\0", rank, TAG)
            assert echo
        found = min(found, PROBE / (perf_counter() - start))
    world.mail.settle("the start")
    return float(world.broadcast(repr(found).encode(), world.agents))
