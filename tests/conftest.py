"""Shared fixtures."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from launch import SMOKE, VENVS, mpirun

Once = Callable[[str, Callable[[Path], None]], Path]

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing
settings.load_profile("any machine")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, runs that tests start would ignore it


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


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)`: a path at which `make` is called by the first worker that asks."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def made(name: str, make: Callable[[Path], None]) -> Path:
        done = shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(shared / name)
                done.touch()
        return shared / name

    return made


def train(out: Path, *options: str) -> None:
    """A small real run of two agents."""
    result = mpirun(2, "train", *SMOKE, "--frames", "60", "-q", "--out", str(out), *options)
    assert result.code == 0, result.err


@pytest.fixture(scope="session")
def trained(once: Once) -> Path:
    """A finished run of two agents, to be read only."""
    return once("trained", train)


@pytest.fixture(scope="session")
def trained_with_seed_2(once: Once) -> Path:
    """The same with another seed."""
    return once("trained-2", lambda out: train(out, "--seed", "2"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests that compare two machines say at the end what they compared."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "compared":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
