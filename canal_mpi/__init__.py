"""Shared-experience lifelong reinforcement learning on MPI."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """`canal_mpi.load(run)` reads a run's folder; its reader is imported by the first use."""
    if name == "load":
        return import_module("canal_mpi.results.reader").load
    raise AttributeError(f"module 'canal_mpi' has no attribute '{name}'")
