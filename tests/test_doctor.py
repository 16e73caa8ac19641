"""What `doctor` makes of what hosts say."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch import run

from canal_mpi.launch.doctor import CheckReport, HostCheck, check_here, power_limits, same_names
from canal_mpi.launch.mpirun import Command
from canal_mpi.launch.supervise import ANSWER, ask_program

FACTS = {
    "host": "nano-1",
    "boot": "e5d0-1",
    "machine": "aarch64",
    "python": "3.11",
    "canal-mpi": "0.1.0 abc",
    "torch": "2.9.0",
    "mpi": "Open MPI v5.0.11",
    "ale-py": "0.12.1",
    "games": 10,
    "device": "cpu",
    "cores": 4,
    "memory": 2 << 30,
    "disk": 1 << 30,
}


def host(**changes: object) -> HostCheck:
    return HostCheck("nano-1", 1, FACTS | changes)


def problems(found: HostCheck) -> list[str]:
    return list(found.problems(FACTS))


def test_a_host_like_this_one_has_no_problems() -> None:
    assert problems(host()) == []


def test_another_version_is_a_problem_with_a_remedy() -> None:
    for name, value in [
        ("python", "3.12"),
        ("canal-mpi", "0.1.0 abd"),
        ("torch", "2.8.0"),
        ("mpi", "MPICH Version: 5.0.2"),
        ("mpi", ""),
        ("ale-py", "0.11"),
    ]:
        (words,) = problems(host(**{name: value}))
        assert words.startswith(f"{name} is {value or 'missing'}, here it is {FACTS[name]}: ")


def test_room_and_clock_are_checked() -> None:
    needs = {"disk": 1 << 40, "memory": 1 << 40}
    words = problems(replace(host(clock=-90.0), needs=needs))
    assert [w.split()[0] for w in words] == ["2.1", "1.1", "its"]
    assert "2.1 GB of memory free, the job needs up to 1.1 TB: " in words[0]
    assert "its clock is 90 s behind: " in words[2]


def test_a_small_board_needs_swap() -> None:
    (words,) = problems(host(**{"swap": 0, "total memory": 4 << 30}))
    assert words.startswith("no swap beside 4.3 GB of memory: sudo fallocate")
    assert problems(host(**{"swap": 0, "total memory": 16 << 30})) == []
    assert problems(host(**{"swap": 1 << 30, "total memory": 4 << 30})) == []


def test_two_hosts_of_one_name_are_told_apart() -> None:
    fresh, other = host(host="ubuntu"), replace(host(host="ubuntu", boot="e5d0-2"), host="nano-2")
    ((name, words),) = same_names([fresh, other, HostCheck("nano-3", 1), HostCheck("nano-4", 1)])
    assert (name, words.partition(": sudo hostnamectl set-hostname nano-2")[0]) == (
        "nano-2",
        "it calls itself ubuntu, and so does nano-1",
    )
    ((name, words),) = same_names([host(), replace(host(), host="10.0.0.1")])
    assert (name, words.partition(": leave it out")[0]) == (
        "10.0.0.1",
        "it is nano-1 under another name",
    )
    assert not list(same_names([host(), host(host="nano-2")]))  # containers of one machine


def test_a_low_power_mode_is_told_where_the_kernel_tells_it(tmp_path: Path) -> None:
    def write(**files: object) -> str:
        for name, value in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        return power_limits(tmp_path)

    assert power_limits(tmp_path) == write(cpu0__online=1, cpu1__online=1) == ""
    full = write(cpu0__cpufreq__scaling_max_freq=1479000, cpu0__cpufreq__cpuinfo_max_freq=1479000)
    assert full == ""
    low = write(cpu1__online=0, cpu0__cpufreq__scaling_max_freq=918000)
    assert low == "1 of 2 cores are off, cpu0 runs at 918 of 1479 MHz"
    assert write(smt__control="off") == "cpu0 runs at 918 of 1479 MHz"
    write(cpu0__cpufreq__scaling_max_freq=1479000, cpu0__cpufreq__scaling_driver="intel_pstate")
    assert write(cpu0__cpufreq__scaling_governor="powersave") == ""
    assert write(cpu0__cpufreq__scaling_driver="tegra") == "cpufreq's governor is powersave"


def test_a_host_without_torch_is_fit_where_it_computes_on_the_cpu() -> None:
    assert problems(host(torch="")) == []
    assert "torch is missing" in problems(host(torch="", device="cuda"))[0]


def test_what_could_not_be_found_out_is_a_problem() -> None:
    assert problems(host(troubles={"games": "OSError: no ROM"})) == ["games: OSError: no ROM"]
    assert problems(HostCheck("a", 1, no_answer="a is down")) == ["a is down"]


def test_the_table_has_a_line_per_host_also_for_silent_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unknown = host()
    del unknown.facts["games"]
    silent = HostCheck("delta", 2, no_answer="down")
    CheckReport([unknown, silent], [("delta", "down [1]")], ["a word"]).print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["nano-1", "1", "aarch64"] and " ?  " in lines[1]
    assert "2.1 GB (needs 0 bytes)" in lines[1]
    assert lines[2].split() == ["delta", "2", "no", "answer"]
    assert lines[3:] == [" note: a word.", " delta: down [1].", "1 thing to fix."]


def test_the_check_looks_at_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = check_here(tmp_path / "not" / "there", "cpu", ["Krull"])
    assert facts["games"] == 1 and facts["disk"] > 0 and facts["memory"] > 0
    assert isinstance(facts["canal-mpi"], str) and facts["device"] == "cpu"
    assert facts["troubles"] == {}
    monkeypatch.setattr("canal_mpi.learn.networks.cuda_trouble", lambda: "no driver")
    troubles = check_here(tmp_path, "cuda", ["NoSuchGame"])["troubles"]
    assert "games" in troubles and "no driver; use cpu or auto" in troubles["device"]


def test_an_answer_that_does_not_come_is_told() -> None:
    slow = Command([sys.executable, "-c", "import time; time.sleep(60)"])
    assert "no answer within 1 s" in ask_program(slow, 1.0)[1]
    dead = Command([sys.executable, "-c", "raise SystemExit('no module')"])
    assert ask_program(dead, 30.0) == ({}, "no module")
    odd = Command([sys.executable, "-c", f"print({ANSWER!r} + '[')"])
    assert ask_program(odd, 30.0)[0] == {}


@pytest.mark.mpi
def test_one_machine_is_fit_to_run(mpi: str, tmp_path: Path) -> None:
    result = run(["canal-mpi", "doctor", "--job", "smoke", "--out", str(tmp_path)], mpi)
    assert result.code == 0, result.out + result.err
    assert "Fit to run." in result.out


def test_one_machine_without_mpi_is_fit_for_one_agent(tmp_path: Path) -> None:
    """A Python of its own, without an mpirun beside it or on the PATH."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    site = 'import sys; sys.path[:] = {!r}; sys.executable = {!r}; sys.argv = ["x", "doctor", '
    site += '"--job", "smoke"]; from canal_mpi.cli import run; sys.exit(run())'
    program = site.format(sys.path, str(python))
    python.symlink_to(sys.executable)
    paths = {"PATH": "/nowhere", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=paths,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: no mpirun here: one agent can train" in done.stdout
