"""Whether a run is finished, as its run.h5 says; also as a program, to ask another host."""

import json
import sys
from pathlib import Path

from canal_mpi.errors import CanalError
from canal_mpi.results.hdf5 import check_image, parse_attributes, read_bytes

SIGN = "canal-mpi-status "


def status_of(folder: Path) -> str:
    """`finished`, `running`, `stopped` and so on; `missing` or `damaged` where run.h5 is."""
    return marks_of(folder)[0]


def marks_of(folder: Path) -> tuple[str, int]:
    """The status of a run, and how many agents it has (0 where that is not known)."""
    path = folder / "run.h5"
    if not path.is_file():
        return "missing", 0
    try:
        data = read_bytes(path)
        check_image(data, str(path))
        facts = parse_attributes(data, str(path))
        return str(facts["status"]), int(facts.get("agents", 0))
    except (CanalError, LookupError, ValueError, TypeError):
        return "damaged", 0


if __name__ == "__main__":
    print(f"{SIGN}{json.dumps({'status': status_of(Path(sys.argv[1]))})}", flush=True)
