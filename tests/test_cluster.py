"""Three hosts with their own addresses, names and disks: launch and doctor.

Network namespaces on a bridge; ssh is an agent that enters one, or the real ssh where it has to
fail. A clock that is off is libfaketime around everything on that host, a full disk a small tmpfs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import ROOT, VENVS, Result
from namespaces import canal, make_hosts, needs, network, on_host

import canal_mpi
from canal_mpi.launch.mpirun import HELPERS
from canal_mpi.results.status import status_of

pytestmark = pytest.mark.root
LAZY = ("--set", "learn.algorithm=plugins:Lazy")
CUT = ("--set", "evaluation.max_steps=20")
SHORT = ("--job", "quick", "--frames", "40", "--set", "train.rounds=2", *CUT, *LAZY)
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """Three hosts on one machine."""
    yield from make_hosts(tmp_path)


def over(hosts: Path, text: str) -> list[str]:
    """The options that name these hosts."""
    (hosts / "mine.hosts").write_text(text)
    return ["--hostfile", str(hosts / "mine.hosts"), "--network", network(hosts)]


def train_on(hosts: Path, mpi: str, text: str, *arguments: str) -> Result:
    out = ["--out", str(hosts / "shared" / "run"), "--force"]
    return canal(hosts, mpi, "launch", *over(hosts, text), "--", "train", *arguments, *out)


def test_launch_runs_the_quick_job_over_three_hosts(mpi: str, hosts: Path) -> None:
    result = train_on(hosts, mpi, "alpha 2\nbeta\ngamma env-server", *SHORT)
    assert result.code == 0, result.err + result.out
    assert result.complaints == []
    assert "3 agents on 3 hosts · environments on rank 3 on gamma" in result.out
    assert status_of(hosts / "disk-alpha" / "run") == "finished"
    assert not (hosts / "disk-beta" / "run" / "run.h5").exists()


def test_settings_of_a_host_reach_its_agent(hosts: Path) -> None:
    from canal_mpi import load

    rules = ("--set", "hosts.beta.threads=2", "--set", "hosts.beta.envs=3")
    job = ("--job", "smoke", "--frames", "60", *rules)
    result = train_on(hosts, "openmpi", "alpha slots=1\nbeta slots=1\n", *job)
    assert result.code == 0, result.err + result.out
    agents = load(hosts / "disk-alpha" / "run")["agents"]
    assert agents["host"].tolist() == ["alpha", "beta"]
    assert agents["threads"].tolist() == [1, 2]


LOW = "cd /sys/devices/system/cpu; mount -t tmpfs tmpfs $PWD; cd .; mkdir cpu0 cpu1; "
LOW += "echo 1 > cpu0/online; echo 0 > cpu1/online; cd /"  # as nvpmodel does


def test_doctor_finds_three_hosts_fit(mpi: str, hosts: Path) -> None:
    on_host(hosts, "gamma", LOW)
    options = over(hosts, "alpha\nbeta:1\ngamma slots=1\n")
    result = canal(hosts, mpi, "doctor", *options, "--job", "smoke", "--out", f"{hosts}/shared")
    assert result.code == 0, result.out + result.err
    assert "Fit to run." in result.out
    note = "gamma is in a low power mode (1 of 2 cores are off): `sudo nvpmodel"
    assert result.out.count("low power mode") == result.out.count(note) == 1


def make_unfit(hosts: Path) -> None:
    """Alpha has other code, beta no disk, gamma a wrong clock; delta is down anyway."""
    other = hosts / "other"
    on_host(
        hosts,
        "alpha",
        f"mkdir -p {other}; cp -r {ROOT}/canal_mpi/. {other}; echo '# x' >> {other}/log.py\n"
        f"mount --bind {other} {ROOT}/canal_mpi",
    )
    full = f"mount -t tmpfs -o size=6m tmpfs {hosts}/shared; head -c 4M /dev/zero > "
    on_host(hosts, "beta", f"{full}{hosts}/shared/big")
    fake = f"LD_PRELOAD={FAKETIME} FAKETIME=+1h FAKETIME_DONT_FAKE_MONOTONIC=1"
    on_host(hosts, "gamma", f"export {fake}")


def test_doctor_finds_what_is_wrong_with_each_host(mpi: str, hosts: Path) -> None:
    needs("ssh")
    if not FAKETIME.exists():
        pytest.skip("needs libfaketime (apt-get install faketime) for a clock that is off")
    make_unfit(hosts)
    options = over(hosts, "alpha\nbeta\ngamma\ndelta\n")
    result = canal(hosts, mpi, "doctor", *options, "--job", "smoke", "--out", f"{hosts}/shared/x")
    assert result.code == 1, result.out + result.err
    lines = {line.split(":")[0].strip(): line for line in result.out.splitlines() if ": " in line}
    assert (
        f"canal-mpi is {canal_mpi.__version__} " in lines["alpha"]
        and "install the same" in lines["alpha"]
    )
    assert "of disk free, the job needs up to" in lines["beta"]
    assert "its clock is 3600 s ahead: sudo timedatectl" in lines["gamma"]
    assert "delta does not answer (No route to host)" in lines["delta"]
    assert "4 things to fix." in result.out


BARE = "mount -t tmpfs tmpfs {1}; printf '#!/bin/sh\\necho {2}\\n' > {0}/x; chmod +x {0}/x; "
BARE += "mount --bind {0}/x $(readlink -f $(which {3}))"  # nothing installed, one program that lies
CUT_OUT = "mkdir {0}/up {0}/work; cd {1}/lib/python3*/site-packages; mount -t overlay overlay -o "
CUT_OUT += "lowerdir=$PWD,upperdir={0}/up,workdir={0}/work $PWD; cd .; rm -r $PWD/{2}; cd /"
SMALL = "sed 's/^MemTotal:.*/MemTotal: 4000000 kB/; s/^SwapTotal:.*/SwapTotal: 0 kB/' /proc/meminfo"
SMALL += " > {0}/memory; mount --bind {0}/memory /proc/meminfo"
TWIN = "hostname alpha; echo 1 > {0}/boot; mount --bind {0}/boot /proc/sys/kernel/random/boot_id"
BROKEN = {
    "old glibc": (BARE, "glibc 2.27", "getconf", "its glibc 2.27 is older than the 2.28"),
    "old Python": (BARE, "Python 3.6.9", "python3", "its Python is 3.6, and canal-mpi needs 3.11"),
    "other machine": (BARE, "aarch64", "uname", "it is aarch64, and this machine x86_64"),
    "missing wheel": (CUT_OUT, "psutil", "", "psutil is missing there: pip install"),
    "no swap": (SMALL, "", "", "no swap beside 4.1 GB of memory: sudo fallocate"),
    "one name": (TWIN, "", "", "calls itself alpha, and so does alpha: sudo hostnamectl"),
    "another name": ("hostname alpha", "", "", "it is alpha under another name: leave it out"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_doctor_says_in_one_line_what_a_broken_host_needs(kind: str, hosts: Path) -> None:
    shell, words, program, remedy = BROKEN[kind]
    on_host(hosts, "beta", shell.format(hosts, VENVS["openmpi"], words, program))
    options = (*over(hosts, "alpha\nbeta\n"), "--job", "smoke", "--out", f"{hosts}/shared")
    result = canal(hosts, "openmpi", "doctor", *options)
    assert result.code == 1, result.out + result.err
    [line] = [line for line in result.out.splitlines() if line.startswith(" beta: ")]
    assert remedy in line and "1 thing to fix." in result.out


MIXED = "mkdir -p {0}/m; mount --bind {1} {0}/m; mount --bind {2} {1}; mount --bind {0}/m {2}"
EMPTY = "mount -t tmpfs tmpfs {1}"
NO_PROGRAM = "mkdir -p {0}/b; cp -a {1}/bin/. {0}/b; rm {0}/b/canal-mpi; mount --bind {0}/b {1}/bin"
OTHER = "cp -r {3} {0}/o; echo '# x' >> {0}/o/log.py; mount --bind {0}/o {3}"
ERRORS = {
    "unknown": ("alpha\nnosuchhost", "", "host nosuchhost is unknown: check its spelling", 70),
    "down": ("alpha\ndelta", "", "delta does not answer (No route to host): switch it on", 70),
    "refused": ("alpha\nbeta", "ssh", "beta refuses ssh: start sshd there", 70),
    "nothing there": ("alpha\nbeta", EMPTY, "beta has no {1}/bin/{4}: install", 70),
    "no program": ("alpha\nbeta", NO_PROGRAM, "beta has no {1}/bin/canal-mpi: install", 70),
    "another MPI": ("alpha\nbeta", MIXED, "beta has no {1}/bin/{4}: install", 70),
    "another version": ("alpha\nbeta", OTHER, "the ranks differ in code: rank 0 on alpha", 78),
    "syntax": ("alpha\nbeta two", "", "line 2: 'two' is not understood", 2),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_mistake_of_a_newcomer_is_one_message(error: str, mpi: str, hosts: Path) -> None:
    needs("ssh")
    text, shell, words, code = ERRORS[error]
    other = {"openmpi": "mpich", "mpich": "openmpi"}[mpi]
    parts = (hosts, VENVS[mpi], VENVS[other], ROOT / "canal_mpi", HELPERS[mpi])
    if shell == "ssh":
        (hosts / "ssh-beta").touch()
    elif shell:
        on_host(hosts, "beta", shell.format(*parts))
    result = train_on(hosts, mpi, text, *SHORT)
    assert result.code == code, result.out + result.err
    assert len(result.complaints) == 1, result.err
    assert words.format(*parts) in result.complaints[0]
    assert result.err.strip() == result.complaints[0]


def test_more_ranks_than_slots_are_refused_before_anything_starts(hosts: Path) -> None:
    options = over(hosts, "alpha 2")
    result = canal(hosts, "openmpi", "launch", "-n", "3", *options, "--", "train", *SHORT)
    assert result.code == 2
    assert "as many as the hostfile has (2 on 1 hosts)" in result.complaints[0]
