"""Learners of two agents that are to go on as one."""

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.types import Columns


def check_twin(twin: Columns, mine: Columns) -> None:
    """DamagedData where another agent's twin is not of the make of one's own."""
    if twin.keys() != mine.keys():
        raise DamagedData(f"the other's learner has the parts {sorted(twin)}")
    for name, column in twin.items():
        wanted = mine[name]
        if column.dtype != wanted.dtype or column.shape != wanted.shape:
            raise DamagedData(f"the other's {name} is {column.dtype.str} of shape {column.shape}")
        if not np.isfinite(column).all() or (column.dtype.kind == "i" and (column < 0).any()):
            raise DamagedData(f"the other's {name} holds a number that can't be")
