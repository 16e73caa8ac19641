"""A topology of one's own: agents in pairs, and a chain between the pairs.

mpirun -np 4 canal-mpi train --job smoke --topology pairs:pairs
canal-mpi topology pairs:pairs -n 6
"""


def pairs(size: int) -> set[tuple[int, int]]:
    """Directed edges (from, to) among agents 0 to size - 1: who sends offers to whom."""
    within = {(agent, agent ^ 1) for agent in range(size) if agent ^ 1 < size}  # 0-1, 2-3, …
    between = {(agent, agent + 2) for agent in range(0, size - 2, 2)}  # 0 to 2, 2 to 4, …
    return within | between
