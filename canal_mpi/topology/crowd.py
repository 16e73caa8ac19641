"""A communicator that is smaller than it was, with the numbers of before."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from canal_mpi.topology.mpimail import deadline

ANYBODY, ANY = MPI.ANY_SOURCE, MPI.ANY_TAG


class Crowd(MPI.Intracomm):
    """The calls that we use, for members that keep the numbers they had in a larger world."""

    numbers: Sequence[int]
    ranks: dict[int, int]

    def __new__(cls, comm: MPI.Intracomm, numbers: Sequence[int]) -> "Crowd":
        """The members of `comm`, whose numbers are these in its order."""
        crowd = super().__new__(cls, comm)
        crowd.numbers = numbers
        crowd.ranks = {number: rank for rank, number in enumerate(numbers)} | {ANYBODY: ANYBODY}
        return crowd

    def Get_rank(self) -> int:
        """This process's number."""
        return self.numbers[super().Get_rank()]

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """Start sending."""
        return super().Isend(buf, self.ranks[dest], tag)

    def Irecv(self, buf: Any, source: int = ANYBODY, tag: int = ANY) -> MPI.Request:
        """Start receiving."""
        return super().Irecv(buf, self.ranks[source], tag)

    def Recv(
        self, buf: Any, source: int = ANYBODY, tag: int = ANY, status: MPI.Status | None = None
    ) -> None:
        """Receive what is known to be there."""
        super().Recv(buf, self.ranks[source], tag, status)

    def Iprobe(
        self, source: int = ANYBODY, tag: int = ANY, status: MPI.Status | None = None
    ) -> bool:
        """Whether something is there; the status names its sender by number."""
        status = status or MPI.Status()
        found = super().Iprobe(self.ranks[source], tag, status)
        self._name(status, found)
        return found

    def Improbe(
        self, source: int = ANYBODY, tag: int = ANY, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Take what is there; the status names its sender by number."""
        status = status or MPI.Status()
        found = super().Improbe(self.ranks[source], tag, status)
        self._name(status, found is not None)
        return found

    def _name(self, status: MPI.Status, found: bool) -> None:
        if found:
            status.Set_source(self.numbers[status.Get_source()])

    def copy(self) -> "Crowd":
        """The same members, whose messages can't be mixed up with those of this one."""
        return Crowd(MPI.Intracomm(self).Dup(), self.numbers)


def shrunk(
    comm: MPI.Intracomm, numbers: Sequence[int], inner: MPI.Intracomm | None, seconds: float
) -> Crowd:
    """The living members of a communicator; everybody else is made to notice, also in `inner`."""
    for one in (comm, inner):
        if one is not None:
            one.Revoke()
    with deadline(seconds):
        new = MPI.Intracomm(MPI.Intracomm(comm).Shrink())
    places = MPI.Group.Translate_ranks(new.Get_group(), None, comm.Get_group())
    return Crowd(new, [numbers[place] for place in places])


def split(crowd: Crowd, agents: int, seconds: float) -> Crowd:
    """The part of a crowd on this side of a number: the agents, or the env servers behind them."""
    serves = crowd.Get_rank() >= agents
    with deadline(seconds):
        part = MPI.Intracomm(crowd).Split(int(serves), crowd.ranks[crowd.Get_rank()])
    return Crowd(
        MPI.Intracomm(part), [number for number in crowd.numbers if (number >= agents) == serves]
    )
