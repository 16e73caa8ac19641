"""Shared-experience lifelong reinforcement learning on MPI."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from canal_mpi.results.reader import Run

__version__ = "0.2.0"


def load(run: "str | Path") -> "Run":
    """A run's tables as NumPy or pandas, and its agents' policies, from its folder or run.h5."""
    from canal_mpi.results.reader import load

    return load(run)
