"""Logs: each agent has a file of its own; what people should see goes through rank 0."""

import logging
from pathlib import Path

logger = logging.getLogger("canal_mpi")
logger.addHandler(logging.NullHandler())
logger.propagate = False


def to_file(path: Path, verbose: bool) -> None:
    """Send this process's log to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
