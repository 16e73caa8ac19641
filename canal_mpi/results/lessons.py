"""The lessons of an earlier run, from the files under its `membuf/`; everything is checked."""

from pathlib import Path

from canal_mpi.errors import CanalError, DamagedData, UsageError, logger
from canal_mpi.interfaces import Offer, Spaces
from canal_mpi.membuf.lesson import ROWS, Lesson, pack, unpack
from canal_mpi.results.files import read_arrays
from canal_mpi.state import strip_prefix


def check_folder(run: str) -> None:
    """UsageError where a folder holds no lessons."""
    if not any(Path(run).glob("membuf/agent-*/*.h5")):
        raise UsageError(
            f"--lessons {run}: no lessons there; expected the folder of a run, with "
            "membuf/agent-0/round-01-… in it."
        )


def earlier_lessons(
    run: str, tasks: tuple[str, ...], spaces: Spaces, limit: int
) -> list[tuple[Lesson, bytes]]:
    """The lessons of these tasks, packed and checked; files that fail are left out by name."""
    found = []
    for path in sorted(Path(run).glob("membuf/agent-*/*.h5")):
        try:
            lesson, data = _read_lesson(path, spaces, limit)
        except CanalError as error:
            logger.warning("%s is not offered: %s", path, error)
            continue
        if lesson.offer.task in tasks:
            found.append((lesson, data))
    return found


def _read_lesson(path: Path, spaces: Spaces, limit: int) -> tuple[Lesson, bytes]:
    known = {*ROWS, "donor", "round", "task", "score"}
    columns = read_arrays(path, limit, lambda name: name in known or name.startswith("network/"))
    try:
        donor, round_ = int(columns["donor"][0]), int(columns["round"][0])
        task, score = columns["task"][0].decode(), float(columns["score"][0])
        rows = {name: columns[name] for name in ROWS}
        data = pack(donor, -round_, task, rows, strip_prefix("network", columns))
        offer = Offer(donor, -round_, task, score, len(rows["action"]), len(data))
    except (LookupError, ValueError, AttributeError, TypeError, ArithmeticError) as error:
        raise DamagedData(f"no lesson: {error}") from error
    return unpack(data, offer, spaces, limit), data
