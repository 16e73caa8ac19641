"""Lessons as they lie on disk under `membuf/`: read to be offered again, or to be verified."""

from dataclasses import replace
from pathlib import Path

from canal_mpi.errors import CanalError, DamagedData, UsageError, logger
from canal_mpi.interfaces import Offer, Spaces
from canal_mpi.membuf.lesson import ROWS, Lesson, pack, unpack
from canal_mpi.results.files import MOST, read_arrays
from canal_mpi.state import strip_prefix

KNOWN = (*ROWS, "donor", "round", "task", "score", "std_error", "episodes", "network")
FILES = "membuf/agent-*/*.h5"


def check_folder(run: str) -> None:
    """UsageError where a folder holds no lessons."""
    if not any(Path(run).glob(FILES)):
        raise UsageError(
            f"--lessons {run}: no lessons there; expected the folder of a run, with "
            "membuf/agent-0/round-01-… in it."
        )


def earlier_lessons(
    run: str, tasks: tuple[str, ...], spaces: Spaces, limit: int
) -> list[tuple[Lesson, bytes]]:
    """The lessons of these tasks, packed and checked; files that fail are left out by name."""
    found = []
    for path in sorted(Path(run).glob(FILES)):
        try:
            lesson, data = read_lesson(path, spaces, limit)
        except CanalError as error:
            logger.warning("%s is not offered: %s", path, error)
            continue
        if lesson.offer.task in tasks:
            found.append((lesson, data))
    return found


def read_lesson(
    path: Path, spaces: Spaces | None = None, limit: int = MOST
) -> tuple[Lesson, bytes]:
    """The lesson in a file and its packed bytes, checked as those of a neighbour are.

    Without `spaces` the states may have any shape. Its round is negative: it is of another run.
    """
    columns = read_arrays(path, limit, lambda name: name.partition("/")[0] in KNOWN)
    try:
        donor, round_ = int(columns["donor"][0]), int(columns["round"][0])
        task, score = columns["task"][0].decode(), float(columns["score"][0])
        rows = {name: columns[name] for name in ROWS}
        spaces = spaces or Spaces(rows["state"].shape[1:], rows["state"].dtype.str, 256)
        data = pack(donor, -round_, task, rows, strip_prefix("network", columns))
        std_error, episodes = float(columns["std_error"][0]), int(columns["episodes"][0])
        offer = Offer(donor, -round_, task, score, len(rows["action"]), len(data))
        offer = replace(offer, std_error=std_error, episodes=episodes)
    except (LookupError, ValueError, AttributeError, TypeError, ArithmeticError) as error:
        raise DamagedData(f"no lesson: {error}") from error
    return unpack(data, offer, spaces, limit), data
