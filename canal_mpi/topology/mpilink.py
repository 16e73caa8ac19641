"""The link of an agent over MPI: its desk on a distributed-graph communicator."""

from mpi4py import MPI

from canal_mpi.topology.crowd import Crowd
from canal_mpi.topology.desk import Desk, Terms
from canal_mpi.topology.graphs import Edges
from canal_mpi.topology.mpimail import Idle, Post, deadline


class MpiLink(Desk):
    """The desk of one rank."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        edges: Edges,
        idle: Idle,
        limit: int,
        terms: Terms,
        plain: bool = False,
    ) -> None:
        agent = comm.Get_rank()
        sources = sorted(a for a, b in edges if b == agent)
        audience = sorted(b for a, b in edges if a == agent)
        with deadline():
            graph = _graph(comm, sources, audience, plain)
        super().__init__(agent, edges, Post(graph, idle, limit), terms)


def _graph(
    comm: MPI.Intracomm, sources: list[int], audience: list[int], plain: bool
) -> MPI.Intracomm:
    """A distributed-graph communicator, or a copy: Open MPI's graphs may not survive a death."""
    if isinstance(comm, Crowd):
        return comm.copy()
    return (
        comm.Dup() if plain else comm.Create_dist_graph_adjacent(sources, audience, reorder=False)
    )
