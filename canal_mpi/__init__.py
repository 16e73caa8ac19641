"""Shared-experience lifelong reinforcement learning on MPI."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from canal_mpi.api import evaluate, train
    from canal_mpi.results.reader import load

__version__ = "0.2.0"
__all__ = ["evaluate", "load", "train"]
HOMES = {"evaluate": "canal_mpi.api", "load": "canal_mpi.results.reader", "train": "canal_mpi.api"}


def __getattr__(name: str) -> Any:
    """The Python API: `train`, `load` and `evaluate` are imported by their first use."""
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'canal_mpi' has no attribute '{name}'")
