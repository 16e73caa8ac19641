"""`canal-mpi launch` with real ranks on this machine."""

import fcntl
import os
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from launch import (
    LAZY,
    SMOKE,
    TINY,
    VENVS,
    kill,
    nothing_is_left,
    processes_with,
    run,
    saved,
    start,
    wait_until,
)

from canal_mpi.results.status import status_of

LONG = (*SMOKE, *LAZY, "--frames", "2000000", "-q")


def test_the_command_is_shown_and_nothing_is_run(tmp_path: Path) -> None:
    for name, option in (("openmpi", "--ft"), ("mpich", "--env-server")):
        words = ["launch", "-n", "3", "--dry-run", "--", "train", *SMOKE, option]
        result = run([str(VENVS[name] / "bin" / "canal-mpi"), *words], name)
        assert result.code == 0, result.err
        assert f"{VENVS[name]}/bin/mpirun -np 3 " in result.out
        assert f"{VENVS[name]}/bin/canal-mpi train --job smoke {option} --name smoke-" in result.out


def test_a_wrong_request_is_one_message() -> None:
    for words, complaint in [
        (("-n", "3", "--", "report", "x"), "launch starts train or evaluate, not 'report'"),
        (("--", "train"), "how many ranks? Give -n 5, or a --hostfile."),
        (("-n", "0", "--", "train"), "-n 0: expected at least one rank"),
        (("-n", "3", "--hostfile", "none", "--", "train"), "hostfile none can't be read"),
        (("-n", "3", "--", "train", "--max-time", "soon"), "--max-time soon: expected a time"),
    ]:
        result = run(["canal-mpi", "launch", *words])
        assert result.code == 2
        assert len(result.complaints) == 1 and complaint in result.complaints[0]


def test_a_wrong_option_of_train_is_found_before_anything_starts() -> None:
    result = run(["canal-mpi", "launch", "-n", "3", "--", "train", "--frmes", "3"])
    assert result.code == 2 and result.err.count("No such option") == 1
    assert result.seconds < 60


@pytest.mark.mpi
def test_a_launched_run_is_finished_and_leaves_nothing(mpi: str, out: Path) -> None:
    result = run(["canal-mpi", "launch", "-n", "2", "--", "train", *TINY, "--out", str(out)], mpi)
    assert result.code == 0, result.err
    assert status_of(out) == "finished" and result.complaints == []
    again = f"canal-mpi launch -n 2 -- train --job {out}/job.toml --share none "
    assert again in result.out and "mpirun -np 2 canal-mpi" not in result.out
    assert processes_with(str(out)) == []


def begun(mpi: str, out: Path, **options: Any) -> "subprocess.Popen[str]":
    """A launch whose ranks have begun to train."""
    words = ["launch", "-n", "2", "--", "train", *LONG, "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE} | options
    process = start([str(VENVS[mpi] / "bin" / "canal-mpi"), *words], mpi, **pipes)
    wait_until(lambda: saved(out, 2), process)
    time.sleep(1)
    return process


@pytest.mark.slow
@pytest.mark.mpi
def test_the_first_signal_lets_the_ranks_save(mpi: str, out: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = begun(mpi, out / str(number))
        process.send_signal(number)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 75, err
        again = f"canal-mpi launch -n 2 -- train --resume {out / str(number)}\n"
        assert f"everything is saved. To go on: {again}" in err
        assert status_of(out / str(number)) == "stopped"


@pytest.mark.mpi
def test_the_ranks_save_when_the_terminal_is_closed(out: Path) -> None:
    """The kernel sends SIGHUP, and what is printed from then on fails."""
    master, terminal = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = begun("openmpi", out, start_new_session=True, preexec_fn=take_terminal, **streams)
    os.close(terminal)
    os.close(master)
    assert process.wait(90) == 75
    assert status_of(out) == "stopped" and processes_with(str(out)) == []


# With less time to save than users have.
IMPATIENT = """
from canal_mpi.entry import main
from canal_mpi.launch import supervise
supervise.SAVE_TIME = 4.0
main()
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_that_hang_are_killed_after_max_time(mpi: str, out: Path) -> None:
    """Each rank hangs inside its environment: its own clock and heartbeat hang with it."""
    job = (*SMOKE, *LAZY, "--tasks", "plugins:Hangs-v0", "--out", str(out))
    words = ["launch", "-n", "2", "--", "train", "--max-time", "12s", *job]
    result = run([str(VENVS[mpi] / "bin" / "python"), "-c", IMPATIENT, *words], mpi)
    assert result.code == 76, result.err
    assert result.seconds >= 16
    assert len(result.complaints) == 1, result.err
    assert "did not stop within 4 s after --max-time was over and were killed" in result.err
    assert f"To resume: canal-mpi launch -n 2 -- train --resume {out}" in result.err
    assert processes_with(str(out)) == []


@pytest.mark.slow
@pytest.mark.mpi
def test_a_killed_launch_leaves_no_folder_behind_the_next_one(mpi: str, out: Path) -> None:
    """The ranks save and stop by themselves; the next start removes the folder they used."""
    process = begun(mpi, out)
    environments = [Path(f"/proc/{pid}/environ").read_text() for pid in processes_with(str(out))]
    words = [word for text in environments for word in text.split("\0")]
    folder = next(Path(w[7:]) for w in words if w.startswith("TMPDIR=/tmp/canal-mpi-"))
    process.kill()
    process.communicate(timeout=90)
    assert nothing_is_left(out, 60) and status_of(out) == "stopped" and folder.is_dir()
    result = run(
        ["canal-mpi", "launch", "-n", "2", "--", "train", "--resume", str(out), "--max-time", "5s"],
        mpi,
    )
    assert result.code == 75, result.err
    assert not folder.exists()


@pytest.mark.mpi
def test_the_mpirun_of_another_mpi_gives_one_line(out: Path) -> None:
    command = [str(VENVS["mpich"] / "bin" / "mpirun"), "-np", "2"]
    command += [str(VENVS["openmpi"] / "bin" / "canal-mpi"), "train", *SMOKE, "--out", str(out)]
    result = run(command, "mpich")
    assert result.code == 78
    assert "belong to different MPIs" in result.err and len(result.err.splitlines()) == 1


@pytest.mark.mpi
def test_a_killed_rank_is_code_70_and_the_others_are_gone(mpi: str, out: Path) -> None:
    process = begun(mpi, out)
    kill(out)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 70, err
    assert sum(line.startswith("canal-mpi:") for line in err.splitlines()) == 1, err
    assert processes_with(str(out)) == []


@pytest.mark.mpi
def test_the_second_signal_ends_also_ranks_that_hang(mpi: str, out: Path) -> None:
    process = begun(mpi, out)
    kill(out, number=signal.SIGSTOP)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(2)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "ending at once" in err and processes_with(str(out)) == []
