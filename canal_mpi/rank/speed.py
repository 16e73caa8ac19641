"""How fast the link between hosts is, for the choice whether lessons are packed."""

from time import perf_counter

from canal_mpi.rank.world import World

PROBE = 1 << 21  # bytes
TAG = 37
PACKING = 100e6  # bytes of rows a second that are packed and unpacked (canal-mpi bench lesson)


def slowest_link(world: World) -> float:
    """Bytes a second from rank 0 to the slowest other host; infinite on one host."""
    hosts = world.hosts[: world.agents]
    firsts = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    others = sorted(rank for host, rank in firsts.items() if host != hosts[0])
    found = float("inf")
    if world.mail is None or not others:
        return found
    for rank in others if world.rank == 0 else [0] * (world.rank in others):
        for size in (1, PROBE):  # the first one opens the connection
            start = perf_counter()
            if world.rank == 0:
                world.mail.post(bytes(size), rank, TAG)
            echo = world.mail.collect(rank, TAG, PROBE, "the start")
            if world.rank:
                world.mail.post(b"\0", 0, TAG)
            assert echo
        found = min(found, PROBE / (perf_counter() - start))
    world.mail.settle("the start")
    return float(world.broadcast(repr(found).encode(), world.agents))
