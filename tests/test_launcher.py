"""Who started us, told by the environment alone."""

import os
import subprocess
import sys

import pytest

from canal_mpi.launcher import Launcher, detect, terminal

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "5"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


def test_a_launcher_is_known_by_its_variables() -> None:
    for environ, launcher in [
        (OPEN_MPI, Launcher("Open MPI's mpirun", 2, 5)),
        (MPICH, Launcher("MPICH's mpirun", 0, 3)),
        (SRUN, Launcher("srun", 1, 4)),
        (SRUN | OPEN_MPI, Launcher("Open MPI's mpirun", 2, 5)),
        (SRUN | MPICH, Launcher("MPICH's mpirun", 0, 3)),
    ]:
        assert detect(environ | {"HOME": "/root"}) == launcher


def test_anything_less_is_no_launcher() -> None:
    for environ in [
        {},
        {"PMI_RANK": "0"},
        {"PMI_SIZE": "3"},
        {"PMI_RANK": "", "PMI_SIZE": "3"},
        {"PMI_RANK": "zero", "PMI_SIZE": "3"},
        {"PMI_RANK": "-1", "PMI_SIZE": "3"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # inside sbatch, without srun
    ]:
        assert detect(environ) is None


def test_the_environment_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OPEN_MPI, *MPICH, *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert detect() is None
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert detect() == Launcher("MPICH's mpirun", 1, 2)


def terminal_of(stdout: int) -> str:
    """What a process with that output takes for its terminal."""
    program = "import sys; from canal_mpi.launcher import terminal; "
    program += "print(terminal(), file=sys.stderr)"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=clean,
    )
    return done.stderr.strip()


def test_a_pipe_is_no_terminal_and_a_terminal_is_one() -> None:
    assert terminal_of(subprocess.PIPE) == "None"
    leader, follower = os.openpty()
    try:
        assert terminal_of(follower) == os.ttyname(follower)
    finally:
        os.close(leader)
        os.close(follower)


def test_under_a_launcher_that_is_not_seen_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert terminal() is None
