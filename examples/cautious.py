"""A sharing policy of one's own: learn only from donors that have proved themselves.

mpirun -np 3 canal-mpi train --job smoke --share cautious:cautious
"""

from collections.abc import Sequence

from canal_mpi.interfaces import Offer
from canal_mpi.membuf.selection import Need, best_first

FEWEST = 3  # episodes behind a donor's score


def cautious(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """The lessons to take for `need.task`: of the very same task, from a score one can trust."""
    same = [offer for offer in offers if offer.task == need.task]
    sure = [offer for offer in same if offer.episodes >= FEWEST]
    return best_first(sure)[: need.donors]
