"""Shared-experience lifelong reinforcement learning on MPI."""

__version__ = "0.1.0"
