"""The link of an agent over MPI: its desk on a distributed-graph communicator."""

from mpi4py import MPI

from canal_mpi.topology.desk import Desk, Terms
from canal_mpi.topology.graphs import Edges
from canal_mpi.topology.mpimail import Idle, Post


class MpiLink(Desk):
    """The desk of one rank."""

    def __init__(
        self, comm: MPI.Intracomm, edges: Edges, idle: Idle, limit: int, terms: Terms
    ) -> None:
        agent = comm.Get_rank()
        sources = sorted(a for a, b in edges if b == agent)
        audience = sorted(b for a, b in edges if a == agent)
        graph = comm.Create_dist_graph_adjacent(sources, audience, reorder=False)
        self.post = Post(graph, idle, limit)
        super().__init__(agent, edges, self.post, terms)

    def settle(self) -> None:
        """Wait until everything sent has left, before the ranks part."""
        self.post.settle("the end")
