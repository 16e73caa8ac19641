from canal_mpi.api import evaluate as evaluate
from canal_mpi.api import train as train
from canal_mpi.results.reader import load as load

__version__: str
__all__ = ["evaluate", "load", "train"]
