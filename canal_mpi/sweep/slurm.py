"""A sweep as an array of Slurm jobs, made from `jobs/sweep-array.sbatch`."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from canal_mpi.config import job_folders
from canal_mpi.errors import UsageError
from canal_mpi.results.files import write_whole
from canal_mpi.sweep.grid import Point

TEMPLATE = "sweep-array.sbatch"


def write_script(file: Path, folder: Path, points: Sequence[Point]) -> None:
    """Write the script that runs every point as one job of an array."""
    if any(point.hosts for point in points):
        raise UsageError("--slurm: Slurm chooses the hosts; leave out --hostfiles, or --emulate.")
    write_whole(file, script(_template(), folder, points).encode())


def script(template: str, folder: Path, points: Sequence[Point]) -> str:
    """The template with the numbers of this sweep."""
    values = {
        r"(?m)^#SBATCH --array=.*$": f"#SBATCH --array=0-{len(points) - 1}",
        r"(?m)^#SBATCH --ntasks=.*$": f"#SBATCH --ntasks={max(p.ranks for p in points)}",
        r"(?m)^sweep=.*$": f"sweep={shlex.quote(str(folder.absolute()))}",
    }
    if Path(sys.prefix, "bin/activate").is_file():  # not so in every kind of environment
        values[r"(?m)^VENV=.*$"] = f"VENV=${{VENV:-{shlex.quote(sys.prefix)}}}"
    for pattern, line in values.items():
        template, count = re.subn(pattern, line.replace("\\", r"\\"), template)
        if count != 1:
            raise UsageError(f"{TEMPLATE} has {count} lines like {pattern}; expected one.")
    return template


def _template() -> str:
    for folder in job_folders():
        if (folder / TEMPLATE).is_file():
            return (folder / TEMPLATE).read_text(encoding="utf-8")
    raise UsageError(f"{TEMPLATE} is missing from this installation of canal-mpi.")
