"""What needs root or Debian packages: full disks, crashes inside a save, several hosts."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import h5py
import pytest
from launch import ROOT, SMOKE, VENVS, Result, columns, differences, mpirun, run

pytestmark = pytest.mark.root

LAZY = ("--set", "learn.algorithm=plugins:Lazy")


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    needs_root()
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)])
    if done.returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_without_room_is_refused_at_the_start(small_disk: Path) -> None:
    (small_disk / "big").write_bytes(bytes(4 << 20))
    result = mpirun(2, "train", *SMOKE, *LAZY, "--out", str(small_disk / "run"))
    assert result.code == 74, result.err
    assert len(result.complaints) == 1
    assert "MB free; this run needs up to" in result.complaints[0]


def test_a_disk_that_fills_up_leaves_the_old_file_whole(small_disk: Path) -> None:
    out = small_disk / "run"
    result = mpirun(
        2, "train", *SMOKE, *LAZY, "--out", str(out), "--share", "plugins:fills_the_disk"
    )
    assert result.code != 0
    assert len(result.complaints) == 1, result.err
    assert "No space left on device" in result.complaints[0]
    with h5py.File(out / "run.h5") as file:
        assert set(file["tasks/round"][()].tolist()) == {1}


CALLS = ("write", "fsync", "rename")
SAVE = """
import sys
from pathlib import Path
import numpy as np
from canal_mpi.results.hdf5 import write_arrays
write_arrays(Path(sys.argv[1]), {"a": np.full(100, int(sys.argv[2]))}, {})
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_crash_inside_a_save_leaves_the_old_or_the_new_file(call: str, tmp_path: Path) -> None:
    needs("strace")
    from canal_mpi.results.hdf5 import read_arrays

    file, python = tmp_path / "file.h5", str(VENVS["openmpi"] / "bin" / "python")
    crashes = 0
    for when in range(1, 4):
        subprocess.run([python, "-c", SAVE, str(file), "1"], check=True, cwd=ROOT)
        trace = ["strace", "-f", "-o", "/dev/null", "-P", str(file.with_name(".file.h5.new"))]
        trace += ["-P", str(file), "-P", str(tmp_path), "-e", f"trace={call}"]
        trace += ["-e", f"inject={call}:signal=KILL:when={when}"]
        done = subprocess.run([*trace, python, "-c", SAVE, str(file), "2"], cwd=ROOT)
        crashes += done.returncode != 0
        assert int(read_arrays(file)["a"][0]) in (1, 2)
    assert crashes


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """Three hosts on one machine: network namespaces on a bridge, each with its own disk."""
    needs_root()
    needs("ip")
    tag = f"c{secrets.token_hex(2)}"
    names = ["alpha", "beta", "gamma"]
    commands = [f"ip link add {tag}br type bridge", f"ip link set {tag}br up"]
    commands += [f"ip addr add 10.77.0.254/24 dev {tag}br"]
    for k, name in enumerate(names, 1):
        space = f"{tag}{name}"
        commands += [
            f"ip netns add {space}",
            f"ip link add {tag}v{k} type veth peer name eth0 netns {space}",
            f"ip link set {tag}v{k} master {tag}br up",
            f"ip -n {space} addr add 10.77.0.{k}/24 dev eth0",
            f"ip -n {space} link set eth0 up",
            f"ip -n {space} link set lo up",
        ]
    lines = "".join(f"10.77.0.{k} {name}\n" for k, name in enumerate(names, 1))
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
    agent = tmp_path / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
        f'exec ip netns exec {tag}$host unshare --uts --mount --fork --kill-child sh -c "\n'
        f"hostname $host; mount --bind {tmp_path}/hosts /etc/hosts\n"
        f"mkdir -p {tmp_path}/disk-$host {tmp_path}/shared\n"
        f"mount --bind {tmp_path}/disk-$host {tmp_path}/shared\n"
        'mount -t tmpfs tmpfs /dev/shm; $*"\n'
    )
    agent.chmod(0o755)
    try:
        for command in commands:
            if subprocess.run(command.split(), capture_output=True).returncode:
                pytest.skip(f"may not make namespaces: {command}")
        yield tmp_path
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"{tag}{name}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{tag}br"], capture_output=True)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_five_agents_on_one_env_server_over_three_hosts_have_the_bits_of_one(
    mpi: str, hosts: Path
) -> None:
    one = hosts / "one"
    result = mpirun(5, "train", *SMOKE, *LAZY, "--out", str(one), mpi=mpi)
    assert result.code == 0, result.err
    names, out = ["alpha"] * 3 + ["beta"] * 2 + ["gamma"], str(hosts / "shared" / "run")
    result = spread(hosts, mpi, names, *SMOKE, *LAZY, "--env-server", "--out", out)
    assert result.code == 0, result.err + result.out
    assert "5 agents on 3 hosts · environments on rank 5 on gamma" in result.out
    spread_run = hosts / "disk-alpha" / "run"
    assert differences(columns(one / "run.h5"), columns(spread_run / "run.h5")) == []
    assert (hosts / "disk-gamma" / "run" / "logs" / "env-server-5.log").exists()


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_three_hosts_without_a_shared_disk_give_the_bits_of_one(mpi: str, hosts: Path) -> None:
    one = hosts / "one"
    result = mpirun(3, "train", *SMOKE, "--out", str(one), mpi=mpi)
    assert result.code == 0, result.err
    shared = hosts / "shared"
    result = spread(hosts, mpi, ["alpha", "beta", "gamma"], *SMOKE, "--out", str(shared / "run"))
    assert result.code == 0, result.err + result.out
    assert "3 agents on 3 hosts" in result.out
    spread_run = hosts / "disk-alpha" / "run"
    assert differences(columns(one / "run.h5"), columns(spread_run / "run.h5")) == []
    assert (hosts / "disk-beta" / "run" / "logs" / "agent-1.log").exists()
    assert not (hosts / "disk-beta" / "run" / "run.h5").exists()
    weights = [
        columns(folder / "checkpoints/agent-2/learner.h5")
        for folder in (one, hosts / "disk-gamma" / "run")
    ]
    assert differences(*weights) == []


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_run_goes_on_with_its_agents_on_other_hosts(mpi: str, hosts: Path) -> None:
    job = (*SMOKE, "--frames", "3000", "--set", "learn.algorithm=linear")
    one, run_ = hosts / "one", str(hosts / "shared" / "run")
    result = mpirun(3, "train", *job, "--out", str(one), mpi=mpi, timeout=300)
    assert result.code == 0, result.err
    names = ["alpha", "beta", "gamma"]
    result = spread(hosts, mpi, names, *job, "--max-time", "5s", "--out", run_)
    assert result.code == 75, result.err + result.out
    assert not (hosts / "disk-gamma/run/checkpoints/agent-0").exists()
    result = spread(hosts, mpi, ["gamma", "alpha", "beta"], "--resume", run_)
    assert result.code == 0, result.err + result.out
    moved = hosts / "disk-gamma" / "run"
    assert differences(columns(one / "run.h5"), columns(moved / "run.h5")) == []
    assert (moved / "checkpoints/agent-0").exists()


def spread(hosts: Path, mpi: str, names: list[str], *arguments: str) -> Result:
    """`canal-mpi train …` with one rank on each of the named hosts, in that order."""
    program, agent = str(VENVS[mpi] / "bin" / "canal-mpi"), str(hosts / "agent")
    places = [(name, len(list(same))) for name, same in groupby(names)]
    file, ranks = hosts / "hostfile", str(len(names))
    if mpi == "openmpi":
        file.write_text("".join(f"{name} slots={number}\n" for name, number in places))
        launcher = ["mpirun", "--hostfile", str(file), "-x", "PYTHONPATH", "-np", ranks]
        settings = f"PRTE_MCA_plm_ssh_agent={agent} PRTE_MCA_prte_if_include=10.77.0.0/24"
        settings += " OMPI_MCA_btl_tcp_if_include=10.77.0.0/24"
    else:
        file.write_text("".join(f"{name}:{number}\n" for name, number in places))
        launcher = ["mpirun", "-launcher", "ssh", "-launcher-exec", agent, "-f", str(file)]
        launcher += ["-localhost", "10.77.0.254", "-np", ranks]
        settings = ""
    (hosts / "shared").mkdir(exist_ok=True)
    command = [*launcher, program, "train", *arguments]
    see = f"mount --bind {hosts}/hosts /etc/hosts; exec env {settings} {' '.join(command)}"
    return run(["unshare", "--mount", "sh", "-c", see], mpi, timeout=300)
