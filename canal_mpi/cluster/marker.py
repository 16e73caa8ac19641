"""Whether a run is finished, as its run.h5 says; also as a program, to ask another host."""

import json
import sys
from pathlib import Path

from canal_mpi.errors import CanalError
from canal_mpi.results.hdf5 import check_image, parse_attributes, read_bytes

SIGN = "canal-mpi-status "


def status_of(folder: Path) -> str:
    """`finished`, `running`, `stopped` and so on; `missing` or `damaged` where run.h5 is."""
    path = folder / "run.h5"
    if not path.is_file():
        return "missing"
    try:
        data = read_bytes(path)
        check_image(data, str(path))
        return str(parse_attributes(data, str(path))["status"])
    except (CanalError, KeyError):
        return "damaged"


if __name__ == "__main__":
    print(f"{SIGN}{json.dumps({'status': status_of(Path(sys.argv[1]))})}", flush=True)
