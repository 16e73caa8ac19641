"""MPICH's mpirun may end without a word of why a helper did not start: the hosts are asked."""

from pathlib import Path

import pytest

from canal_mpi.cluster.hydra import FAILED, ask_again, ways_to_helpers
from canal_mpi.cluster.mistakes import Noise

MPIRUN = Path("/env/bin/mpirun")
GENERAL = "mpirun could not bring the hosts together: "


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of ssh that ends in its own way for each host."""
    path = tmp_path / "ssh"
    path.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "case $1 in\n"
        "alpha) exit 7;;\n"  # the helper starts and finds no mpirun to talk to
        "beta) exit 127;;\n"
        'gamma) echo "ssh: connect to host gamma port 22: Connection refused" >&2; exit 255;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(path))
    for name in ("HYDRA_LAUNCHER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return path


def diagnosis(*hosts: str, said: str = f"[mpiexec@vm] ui_cmd_cb: {FAILED}.\n") -> str:
    noise = Noise()
    noise.lines = [said]
    ask_again(MPIRUN, hosts, noise)
    return noise.diagnosis()


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (("alpha", "beta"), "beta has no /env/bin/hydra_pmi_proxy, the helper of this mpirun"),
        (("gamma", "alpha"), "gamma refuses ssh (nothing listens on port 22): start sshd"),
        (("alpha", "localhost"), GENERAL),
    ],
)
def test_the_host_at_fault_is_named(ssh: Path, hosts: tuple[str, ...], words: str) -> None:
    assert diagnosis(*hosts).startswith(words)


def test_nobody_is_asked_without_need(ssh: Path) -> None:
    assert diagnosis("beta", said="[mpiexec@vm] something else\n") == ""


@pytest.mark.parametrize("setting", [("HYDRA_LAUNCHER", "slurm"), ("SLURM_JOB_ID", "12")])
def test_where_ssh_is_not_the_way_nobody_is_asked(
    ssh: Path, setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*setting)
    assert ways_to_helpers(MPIRUN, ["beta"]) == {}


def test_a_host_that_can_not_be_asked_changes_nothing(ssh: Path) -> None:
    ssh.unlink()
    assert diagnosis("beta").startswith(GENERAL)
