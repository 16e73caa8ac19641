"""Shared-experience lifelong reinforcement learning on MPI.

`__init__.pyi` has the types of what is imported by its first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
HOMES = {"evaluate": "canal_mpi.api", "load": "canal_mpi.results.reader", "train": "canal_mpi.api"}
__all__ = [*HOMES]


def __getattr__(name: str) -> Any:
    """The Python API: `train`, `load` and `evaluate` are imported by their first use."""
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'canal_mpi' has no attribute '{name}'")
