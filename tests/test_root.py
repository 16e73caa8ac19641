"""What needs root or Debian packages: full disks, crashes inside a save, several hosts."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import time

import h5py
import pytest
from launch import (
    ROOT,
    SMOKE,
    TINY,
    VENVS,
    columns,
    differences,
    mpirun,
    processes_with,
    start,
    wait_until,
)
from namespaces import make_hosts, needs, needs_root, spread

pytestmark = pytest.mark.root

LAZY = ("--set", "learn.algorithm=plugins:Lazy")
TRACKERS = [("tensorboard", "tensorboardX"), ("wandb", "wandb")]


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
    assert result.code == 74, result.err
    assert len(result.complaints) == 1, result.err
    assert "No space left on device" in result.complaints[0]
    assert "Traceback" not in result.err
    with h5py.File(out / "run.h5") as file:
        assert set(file["tasks/round"][()].tolist()) == {1}


@pytest.mark.parametrize(("tracker", "library"), TRACKERS)
def test_a_full_disk_of_a_tracker_is_one_warning_and_the_run_ends_well(
    tracker: str,
    library: str,
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed (extra: look)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with suppress(OSError):
        (small_disk / "big").write_bytes(bytes(7 << 20))
    out = tmp_path / "run"
    command = ["mpirun", "-np", "2", "canal-mpi", "train", *TINY, "--out", str(out)]
    job = start([*command, "--track", tracker])
    wait_until(out.exists, job)
    (out / tracker).symlink_to(small_disk)
    err = job.communicate(timeout=240)[1]
    after = time() - (out / "status.json").stat().st_mtime
    warnings = [line for line in err.splitlines() if "warning" in line]
    assert job.returncode == 0, err
    assert len(warnings) == 1, err
    assert f"--track {tracker} has failed, the run goes on: " in warnings[0]
    assert warnings[0].endswith("No space left on device")
    assert after < 30, "nobody waited for it until all patience was over"
    assert processes_with(f"canal_mpi.trackers {out}") == []


CALLS = ("write", "fsync", "rename")
SAVE = """
import os, sys
from pathlib import Path
import numpy as np
from canal_mpi.results.files import write_arrays
os.getpid = lambda: 7  # it is in the name that is traced
write_arrays(Path(sys.argv[1]), {"a": np.full(100, int(sys.argv[2]))}, {})
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_crash_inside_a_save_leaves_the_old_or_the_new_file(call: str, tmp_path: Path) -> None:
    needs("strace")
    from canal_mpi.results.files import read_arrays

    file, python = tmp_path / "file.h5", str(VENVS["openmpi"] / "bin" / "python")
    crashes = 0
    for when in range(1, 4):
        subprocess.run([python, "-c", SAVE, str(file), "1"], check=True, cwd=ROOT)
        half = file.with_name(f".file.h5.{socket.gethostname()}-7.new")
        trace = ["strace", "-f", "-o", "/dev/null", "-P", str(half)]
        trace += ["-P", str(file), "-P", str(tmp_path), "-e", f"trace={call}"]
        trace += ["-e", f"inject={call}:signal=KILL:when={when}"]
        done = subprocess.run([*trace, python, "-c", SAVE, str(file), "2"], cwd=ROOT)
        crashes += done.returncode != 0
        assert int(read_arrays(file)["a"][0]) in (1, 2)
    assert crashes


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """Three hosts on one machine."""
    yield from make_hosts(tmp_path)


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


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.long)])
def test_a_run_goes_on_with_its_agents_on_other_hosts(mpi: str, hosts: Path) -> None:
    job = (*SMOKE, "--frames", "12000", "--set", "learn.widths=8")
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


@pytest.mark.parametrize(
    ("names", "policy", "dead", "writes"),
    [
        (["alpha"] * 2 + ["beta"] * 2 + ["gamma"], "is_killed", 1, "alpha"),
        (["alpha", "beta", "gamma"], "is_killed", 1, "alpha"),  # the only rank of its host
        (["alpha", "beta", "beta"], "first_is_killed", 0, "beta"),  # the one that wrote run.h5
    ],
)
def test_the_others_go_on_when_a_rank_of_another_host_dies(
    names: list[str], policy: str, dead: int, writes: str, hosts: Path
) -> None:
    job = (*SMOKE, *LAZY, "--ft", "--share", f"plugins:{policy}")
    result = spread(hosts, "openmpi", names, *job, "--out", str(hosts / "shared" / "run"))
    assert result.code == 0, result.err + result.out
    with h5py.File(hosts / f"disk-{writes}" / "run" / "run.h5") as file:
        assert file.attrs["status"] == "degraded"
        assert file["faults/agent"][()].tolist() == [dead]
        done = file["tasks/agent"][()].tolist()
    assert all(done.count(agent) == 3 for agent in range(len(names)) if agent != dead)
