"""Real ranks: 1, 2 and 5 of them, under Open MPI and MPICH."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import (
    LAZY,
    SMOKE,
    TINY,
    VENVS,
    check_time_line,
    columns,
    differences,
    kill,
    logged,
    mpirun,
    nothing_is_left,
    pid_of,
    run,
    saved,
    start,
    wait_until,
)

from canal_mpi.results.checkpoint import load_state
from canal_mpi.results.files import read_attributes

pytestmark = pytest.mark.mpi


def donors(run_file: Path) -> list[tuple[int, int, str]]:
    """(agent, donor, task) of every lesson that was learnt from."""
    with h5py.File(run_file) as file:
        tasks = file["tasks"]
        return [
            (int(agent), int(donor), task.decode())
            for agent, several, task in zip(
                tasks["agent"][()], tasks["donors"][()], tasks["task"][()], strict=True
            )
            for donor in several.split(b",")
            if donor
        ]


def students(run_file: Path) -> set[tuple[int, str]]:
    """(agent, task) of all that were learnt from lessons."""
    return {(agent, task) for agent, _, task in donors(run_file)}


@pytest.mark.slow
def test_the_first_run_ever_compiles_once_and_is_not_taken_for_one_that_hangs(
    tmp_path: Path,
) -> None:
    (kept := tmp_path / "machine-code").mkdir()
    options = (*SMOKE, "--frames", "60", "--set", "timeout=6", "--out", str(tmp_path / "run"))
    result = mpirun(2, "train", *options, NUMBA_CACHE_DIR=str(kept))
    assert result.code == 0, result.err
    found = [path.name.rpartition(".")[0] for path in kept.rglob("*.nbc")]
    assert len(found) == len({*found}) > 5


def test_every_agent_learns_every_task(mpi: str, tmp_path: Path) -> None:
    for ranks in {"openmpi": (1, 5), "mpich": (1, 2)}[mpi]:
        out = tmp_path / str(ranks)
        result = mpirun(ranks, "train", *TINY, "--out", str(out), mpi=mpi)
        assert result.code == 0, result.err
        with h5py.File(out / "run.h5") as file:
            assert file.attrs["status"] == "finished"
            assert file.attrs["agents"] == ranks
            assert len(file["tasks/agent"]) == 3 * ranks
            assert file["agents/rank"][()].tolist() == list(range(ranks))
        assert len(students(out / "run.h5")) == {1: 0, 2: 3, 5: 10}[ranks]
        assert json.loads((out / "status.json").read_text())["status"] == "finished"
        assert (out / "job.toml").exists()
        assert len(list((out / "logs").iterdir())) == ranks


def test_a_run_with_the_defaults_takes_no_step_for_decisions(out: Path) -> None:
    short = ["--steps", "150", "--order", "rotate", "--tasks", "Krull,Alien,Kangaroo"]
    short += ["--set", "evaluation.max_steps=20", "--set", "learn.batch_size=16"]
    result = mpirun(3, "train", *short, "--out", str(out))
    assert result.code == 0, result.err
    with h5py.File(out / "run.h5") as file:
        tasks = {name: column[()] for name, column in file["tasks"].items()}
        ledger = {name: column[()] for name, column in file["exchange"].items()}
    taught = tasks["source"] == b"lesson"
    assert len(taught) == 9 and taught.sum() == 6
    assert not tasks["probe_steps"].any()
    assert not tasks["env_steps"][taught].any() and (tasks["env_steps"][~taught] == 150).all()
    assert np.isfinite(ledger["kl"][ledger["kind"] == b"lesson"]).any()


@pytest.mark.slow
def test_one_seed_gives_the_same_bits_under_both_mpis_and_another_seed_others(
    trained: Path, trained_with_seed_2: Path, tmp_path: Path
) -> None:
    job = ("train", *SMOKE, "--frames", "60", "-q", "--out")
    for mpi in ("openmpi", "mpich"):
        result = mpirun(2, *job, str(tmp_path / mpi), mpi=mpi)
        assert result.code == 0, result.err
        assert result.out == "", "-q says nothing, not even an escape sequence of a library"
    runs = [trained, tmp_path / "openmpi", tmp_path / "mpich", trained_with_seed_2]
    found = [columns(folder / "run.h5") for folder in runs]
    assert differences(found[0], found[1]) == differences(found[0], found[2]) == []
    assert "train/loss" in differences(found[0], found[3])
    weights = [columns(folder / "checkpoints/agent-1/learner.h5") for folder in runs]
    assert differences(weights[0], weights[1]) == differences(weights[0], weights[2]) == []
    assert "blocks/trunk/params" in differences(weights[0], weights[3])


@pytest.mark.slow
def test_without_sharing_an_agent_has_the_bits_it_has_alone(tmp_path: Path) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    result = mpirun(3, "train", *SMOKE, "--share", "none", "--out", str(together))
    assert result.code == 0, result.err
    result = run(["canal-mpi", "train", *SMOKE, "--agent", "2", "--out", str(alone)])
    assert result.code == 0, result.err
    assert "mpirun -np 5 canal-mpi train" in result.out
    file = "checkpoints/agent-2/learner.h5"
    assert differences(columns(together / file), columns(alone / file)) == []
    both = [columns(folder / "run.h5") for folder in (together, alone)]
    for name in ("episodes/return", "train/loss", "tasks/score"):
        table = name.partition("/")[0]
        mine = both[0][name][both[0][f"{table}/agent"] == 2]
        assert mine.tobytes() == both[1][name].tobytes()


def test_one_agent_needs_no_mpi_library(out: Path, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    path = f"{tmp_path}:{Path(__file__).parent}"
    result = run(["canal-mpi", "train", *TINY, "--out", str(out)], PYTHONPATH=path)
    assert result.code == 0, result.err


def test_ranks_without_an_mpi_library_say_so_once(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    result = mpirun(3, "train", *SMOKE, PYTHONPATH=str(tmp_path))
    assert result.code == 78
    assert len(result.complaints) == 1
    assert "canal-mpi[openmpi]" in result.complaints[0]


TOPOLOGIES = {  # ways that both launchers have to go are those of tests/test_exchange_mpi.py
    "ring": ("openmpi", {(a, (a + d) % 5) for a in range(5) for d in (1, 4)}),
    "star": ("mpich", {(0, k) for k in range(1, 5)} | {(k, 0) for k in range(1, 5)}),
    "edges.txt": ("openmpi", {(0, 1), (1, 2), (2, 3), (3, 4)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lessons_travel_only_along_an_edge(topology: str, out: Path, tmp_path: Path) -> None:
    mpi, edges = TOPOLOGIES[topology]
    if topology == "edges.txt":
        topology = str(tmp_path / topology)
        lines = "".join(f"{a} -> {b}\n" for a, b in sorted(edges))
        Path(topology).write_text(f"# a line of five, one way\n{lines}")
    options = ("--topology", topology, "--out", str(out))
    result = mpirun(5, "train", *TINY, *options, mpi=mpi)
    assert result.code == 0, result.err
    told = columns(out / "run.h5")
    ways = (told[f"exchange/{name}"].tolist() for name in ("from", "to", "kind"))
    found = {(a, b) for a, b, kind in zip(*ways, strict=True) if kind in (b"offer", b"lesson")}
    assert found and found <= edges
    adjacency = told["topology/adjacency"]
    assert {(int(a), int(b)) for a, b in zip(*np.nonzero(adjacency), strict=True)} == edges


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raises", "leaves", "drops_out", "is_killed"])
def test_a_rank_that_ends_takes_the_job_down_and_is_named(mpi: str, policy: str, out: Path) -> None:
    for _ in range(3 if mpi == "mpich" else 1):
        options = ("--share", f"plugins:{policy}", "--out", str(out), "--force")
        result = mpirun(3, "train", *TINY, *options, mpi=mpi, timeout=60)  # silence takes 300 s
        assert result.code != 0
        assert len(result.complaints) <= 1, result.err
        if "agent 1 (rank 1 on " in result.err:
            break  # MPICH kills the others within a millisecond: now and then one of them is named
    assert len(result.complaints) == 1, result.err
    assert "agent 1 (rank 1 on " in result.complaints[0], result.err
    assert nothing_is_left(out)
    with h5py.File(out / "run.h5") as file:
        assert file["tasks/round"][()].tolist() == [1, 1, 1]


@pytest.mark.parametrize("moment", [0.0, 1.0])
def test_a_rank_killed_at_any_moment_leaves_nothing_behind(
    mpi: str, moment: float, out: Path
) -> None:
    command = ["mpirun", "-np", "3", "canal-mpi", "train", *SMOKE, *LAZY, "--frames", "200000"]
    job = start([*command, "--out", str(out)], mpi)
    wait_until(lambda: logged(out, "process ", "agent-2"), job)
    time.sleep(moment)
    kill(out, "agent-2")
    _, err = job.communicate(timeout=60)  # silence would take 300 s
    assert job.returncode != 0
    assert "rank 2" in err, err
    assert nothing_is_left(out)


def test_a_silent_rank_is_named_and_ends_the_job(mpi: str, out: Path) -> None:
    options = ("--share", "plugins:hangs", "--set", "timeout=8", "--out", str(out))
    result = mpirun(3, "train", *TINY, *options, mpi=mpi, timeout=90)
    assert result.code == 76, result.err
    assert len(result.complaints) == 1, result.err
    assert "rank 1 on " in result.complaints[0]
    assert "silent for" in result.complaints[0]


def test_a_rank_that_stops_while_all_leave_does_not_hold_up_the_launcher(out: Path) -> None:
    options = ("--share", "plugins:stops_at_the_end", "--set", "timeout=2", "--out", str(out))
    result = mpirun(2, "train", *TINY, *options, mpi="mpich", timeout=90)
    assert result.code != 0
    [said] = result.complaints
    assert "has not ended 12 s after all was done and saved." in said, result.err
    assert read_attributes(out / "run.h5")["status"] == "finished"
    assert nothing_is_left(out)


HANGS = (*SMOKE, *LAZY, "--tasks", "plugins:Hangs-v0")


def test_when_all_ranks_hang_the_job_is_ended_from_outside(mpi: str, out: Path) -> None:
    options = ("--set", "timeout=6", "--out", str(out))
    result = mpirun(2, "train", *HANGS, *options, mpi=mpi, timeout=90)
    assert result.code == 76, result.err
    [said] = result.complaints
    assert re.match(
        r"canal-mpi: rank [01] on \S+ has not moved for \d+ s in training \S+Hangs", said
    )
    assert nothing_is_left(out)


def test_ranks_that_hang_do_not_outlive_their_launcher(mpi: str, out: Path) -> None:
    job = start(["mpirun", "-np", "2", "canal-mpi", "train", *HANGS, "--out", str(out)], mpi)
    wait_until(lambda: saved(out, 2), job)
    time.sleep(1)  # by now they hang
    job.kill()
    job.communicate()
    assert nothing_is_left(out, seconds=30)


def cpu_seconds(pid: int) -> float:
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_waiting_rank_uses_almost_no_cpu(mpi: str, out: Path) -> None:
    command = ["mpirun", "-np", "3", "canal-mpi", "train", *TINY, "--out", str(out)]
    job = start([*command, "--share", "plugins:is_slow"], mpi)
    wait_until(lambda: logged(out, "round 1 done", "agent-2"), job)
    time.sleep(1.0)  # agent 1 now sleeps for six seconds; agents 0 and 2 wait for it
    pid = pid_of(out, "agent-2")
    before, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(4.0)
    share = (cpu_seconds(pid) - before) / (time.monotonic() - begun)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert share < 0.03


REFUSALS = [  # those that one process can make are in tests/test_cli.py
    (["--tasks", "RoadRuner"], "unknown task 'RoadRuner'; did you mean 'RoadRunner'?"),
    (["--agent", "1"], "--agent 1 is for one rank"),
    (["--topology", "star_graph"], "found 4 nodes; expected 3, one per agent"),
    (["--resume", ""], "--resume can't be empty"),
    (["--set", "share.policy=sys:maxsize"], "expected a function or class, not 92233"),
]


def test_bad_input_ends_every_rank_with_one_message(out: Path) -> None:
    for k, (options, words) in enumerate(REFUSALS):
        command = ("train", *TINY, *options, "--out", str(out))
        result = mpirun(3, *command, mpi="mpich" if k == 0 else "openmpi", timeout=60)
        assert result.code == 2, result.err
        assert len(result.complaints) == 1, result.err
        assert words in result.complaints[0]
        assert "Traceback" not in result.err


def test_a_job_file_that_is_not_toml_is_refused(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("frames: 3\n")
    result = mpirun(2, "train", "--job", str(file), "--out", str(out))
    assert result.code == 2
    assert f"{file} is not TOML" in result.complaints[0]


def test_a_topology_that_names_agent_7_of_5_is_refused(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "edges.txt"
    file.write_text("0 1\n1 2\n2 7\n")
    result = mpirun(5, "train", *TINY, "--topology", str(file), "--out", str(out))
    assert result.code == 2
    assert result.complaints == [
        f"canal-mpi: topology file {file}, line 3: agent 7 does not exist: this run has agents "
        "0 to 4 (mpirun -np 5)."
    ]


def test_a_run_directory_is_not_overwritten_unless_forced(out: Path) -> None:
    command = ("train", *TINY, "--set", "train.rounds=1", "--out", str(out))
    assert mpirun(2, *command).code == 0
    result = mpirun(2, *command)
    assert result.code == 2
    assert "holds a run already" in result.complaints[0]
    assert mpirun(2, *command, "--force").code == 0


def test_an_output_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = mpirun(2, "train", *TINY, "--out", str(tmp_path / "file" / "run"))
    assert result.code == 74
    assert len(result.complaints) == 1, result.err
    result = mpirun(2, "train", *TINY, "--out", "/proc/run")
    assert result.code == 74
    assert "can't write to /proc/run" in result.complaints[0]


def test_a_start_that_fails_leaves_no_folder(out: Path) -> None:
    for options in (("--set", "learn.device=cuda"), ("--set", "learn.algorithm=plugins:Nothing")):
        result = mpirun(2, "train", *SMOKE, *options, "--out", str(out))
        assert result.code == 2 and len(result.complaints) == 1, result.err
        assert not out.exists()


@pytest.mark.slow
def test_numbers_that_no_buffer_can_hold_end_the_job_with_their_name(out: Path) -> None:
    for kind, what in {
        "NanReward": "gave the reward nan",
        "HugeReward": "gave the reward 1e+300",
        "NanObs": "gave the observation array([ 0., nan])",
        "NoObs": "gave the observation None",
        "ShortObs": "gave the observation array([0.])",
        "ByteObs": "gave the observation array([ 0, 300])",
    }.items():
        options = ("--tasks", f"plugins:{kind}-v0", "--order", "same", "--out", str(out / kind))
        command = ["canal-mpi", "train", *LAZY, *options]
        launcher, mpi = {
            "NanReward": (["mpirun", "-np", "2"], "openmpi"),
            "NanObs": (["mpirun", "-np", "2"], "mpich"),
        }.get(kind, ([], "openmpi"))
        result = run([*launcher, *command], mpi, timeout=60)
        assert result.code == 70
        assert f"task 'plugins:{kind}-v0' {what} at step 20 of" in result.complaints[0]
        assert len(result.complaints) == 1, result.err


def test_a_network_that_breaks_ends_the_job_before_anything_of_it_is_shared(out: Path) -> None:
    task = ("--tasks", "plugins:LargeReward-v0", "--order", "same", "--out", str(out))
    plain = ("--set", "learn.reward=none", "--set", "learn.loss=mse", "--steps", "300")
    saves = ("--set", "checkpoint.interval=20")
    result = mpirun(2, "train", *task, *plain, *saves, timeout=120)
    assert result.code == 70, result.err
    assert "network is no longer finite in round 1, task '" in result.complaints[0]
    assert not list(out.glob("membuf/*/*.h5"))
    kept = list(out.glob("checkpoints/*/round-*.h5"))
    assert kept and all(load_state(path) for path in kept), "each can be resumed from"


def test_a_launcher_of_another_mpi_is_refused(out: Path) -> None:
    wrong = {"openmpi": "mpich", "mpich": "openmpi"}
    for launcher, library in wrong.items():
        mpirun_ = str(VENVS[launcher] / "bin" / "mpirun")
        program = str(VENVS[library] / "bin" / "canal-mpi")
        result = run([mpirun_, "-np", "3", program, "train", *TINY, "--out", str(out)], launcher)
        assert result.code == 78, result.err
        assert len(result.complaints) == 1, result.err
        assert "belong to different MPIs" in result.complaints[0]
        assert not out.exists()


def test_ranks_with_different_jobs_are_refused(mpi: str, out: Path) -> None:
    one = ["-np", "1", "canal-mpi", "train", *TINY, "--out", str(out), "--seed"]
    result = run(["mpirun", *one, "1", ":", *one, "2"], mpi)
    assert result.code == 78, result.err
    assert "the ranks differ in command line" in result.complaints[0]
    assert len(result.complaints) == 1


def test_ranks_with_different_code_are_refused(mpi: str, out: Path, tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "canal_mpi"
    subprocess.run(["cp", "-r", str(source), str(tmp_path / "canal_mpi")], check=True)
    with (tmp_path / "canal_mpi" / "agent.py").open("a") as file:
        file.write("# another version\n")
    command = ["-np", "1", "canal-mpi", "train", *TINY, "--out", str(out)]
    other = ["-np", "1", "env", f"PYTHONPATH={tmp_path}", *command[2:]]
    result = run(["mpirun", *command, ":", *other], mpi)
    assert result.code == 78, result.err
    assert "the ranks differ in code" in result.complaints[0]


@pytest.mark.atari
@pytest.mark.alone
def test_five_agents_share_ten_real_games(out: Path) -> None:
    result = mpirun(
        5,
        "train",
        *("--job", "quick", "--frames", "130", "--set", "evaluation.max_steps=20"),
        *("--out", str(out)),
        timeout=300,
    )
    assert result.code == 0, result.err
    check_time_line(result.out)
    assert "5 agents learnt from" in result.out and "estimated time" in result.out
    assert list(out.glob("checkpoints/*/round-*")) == [], "a finished run keeps no checkpoints"
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 10e6
    with h5py.File(out / "run.h5") as file:
        rounds, source = file["tasks/round"][()], file["tasks/source"][()]
        assert len(rounds) == 50
        assert (source[rounds <= 2] == b"env").all()
        assert (source[rounds > 2] == b"lesson").all()
    assert len(students(out / "run.h5")) == 40
    assert all(agent != donor for agent, donor, _ in donors(out / "run.h5"))


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(out: Path, mpi: str) -> None:
    """Ten rounds have forty lines; Open MPI's mpirun bears ten that can't be written."""
    short = "--frames 40 --set evaluation.episodes=1 --set evaluation.max_steps=20"
    command = f"mpirun -np 2 canal-mpi train {short} {' '.join(LAZY)} --out {out}"
    shell = ["bash", "-c", f"set -o pipefail; ({command}; echo code $? >&2) | head -1"]
    result = run(shell, mpi)
    assert "code 0" in result.err, result.err
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "finished"


@pytest.mark.alone
def test_a_run_ends_with_its_report(mpi: str, out: Path) -> None:
    job = ("--job", "smoke", "--frames", "60", *LAZY, "--out", str(out))
    result = mpirun(2, "train", *job, mpi=mpi, CANAL_REPORT="true")
    assert result.code == 0 and result.complaints == [], result.err
    assert f"Report:  {out}/report.html" in result.out
    assert "human" not in result.out and "HNS" not in result.out, "these tasks have no such scores"
    check_time_line(result.out)
    assert (out / "report.html").read_text().count("Did it learn?") == 1


def test_a_run_alone_goes_on_when_nobody_reads_its_output_any_more(out: Path) -> None:
    command = f"canal-mpi train {' '.join(TINY)} --out {out}"
    result = run(["bash", "-c", f"({command}; echo code $? >&2) | head -1"])
    assert "code 0" in result.err, result.err
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "finished"
