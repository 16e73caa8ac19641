"""`canal-mpi launch` with real ranks on this machine."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import SMOKE, VENVS, environment, processes_with, run

from canal_mpi.cluster.marker import status_of

LAZY = ("--set", "learn.algorithm=plugins:Lazy")
LONG = (*SMOKE, "--frames", "2000000", "--set", "learn.algorithm=linear", "-q")


def test_the_command_is_shown_and_nothing_is_run(tmp_path: Path) -> None:
    for name in ("openmpi", "mpich"):
        words = ["launch", "-n", "3", "--dry-run", "--", "train", *SMOKE]
        result = run([str(VENVS[name] / "bin" / "canal-mpi"), *words], name)
        assert result.code == 0, result.err
        assert f"{VENVS[name]}/bin/mpirun -np 3 " in result.out
        assert f"{VENVS[name]}/bin/canal-mpi train --job smoke --name smoke-" in result.out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("-n", "3", "--", "report", "x"), "launch starts train or evaluate, not 'report'"),
        (("--", "train"), "how many ranks? Give -n 5, or a --hostfile."),
        (("-n", "0", "--", "train"), "-n 0: expected at least one rank"),
        (("-n", "3", "--hostfile", "none", "--", "train"), "hostfile none can't be read"),
    ],
)
def test_a_wrong_wish_is_one_message(words: tuple[str, ...], complaint: str) -> None:
    result = run(["canal-mpi", "launch", *words])
    assert result.code == 2
    assert len(result.complaints) == 1 and complaint in result.complaints[0]


def test_a_wrong_option_of_train_is_found_before_anything_starts() -> None:
    result = run(["canal-mpi", "launch", "-n", "3", "--", "train", "--frmes", "3"])
    assert result.code == 2 and result.err.count("No such option") == 1
    assert result.seconds < 60


@pytest.mark.mpi
def test_a_launched_run_is_finished_and_leaves_nothing(mpi: str, out: Path) -> None:
    result = run(
        ["canal-mpi", "launch", "-n", "2", "--", "train", *SMOKE, *LAZY, "--out", str(out)], mpi
    )
    assert result.code == 0, result.err
    assert status_of(out) == "finished" and result.complaints == []
    assert processes_with(str(out)) == []


def begun(mpi: str, out: Path) -> "subprocess.Popen[str]":
    """A launch whose ranks have begun to train."""
    words = ["launch", "-n", "2", "--", "train", *LONG, "--out", str(out)]
    process = subprocess.Popen(
        [str(VENVS[mpi] / "bin" / "canal-mpi"), *words],
        env=environment(mpi),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 90
    while not list(out.glob("checkpoints/agent-*/round-*")) and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(1)
    return process


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_ranks_save(mpi: str, number: int, out: Path) -> None:
    process = begun(mpi, out)
    process.send_signal(number)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 75, err
    assert "everything is saved" in err and status_of(out) == "stopped"


@pytest.mark.mpi
def test_a_killed_rank_is_code_70_and_the_others_are_gone(mpi: str, out: Path) -> None:
    process = begun(mpi, out)
    found = re.search(r"process (\d+)", (out / "logs" / "agent-1.log").read_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 70, err
    assert sum(line.startswith("canal-mpi:") for line in err.splitlines()) == 1, err
    assert processes_with(str(out)) == []


@pytest.mark.mpi
def test_the_second_signal_ends_also_ranks_that_hang(mpi: str, out: Path) -> None:
    process = begun(mpi, out)
    found = re.search(r"process (\d+)", (out / "logs" / "agent-1.log").read_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGSTOP)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(2)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "ending at once" in err and processes_with(str(out)) == []
