"""The scripts of jobs/ under a real Slurm, which the test starts on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import ROOT, run
from slurm import Slurm, why_not

# One Slurm at a time: its ports are fixed.
pytestmark = [pytest.mark.mpi, pytest.mark.root, pytest.mark.alone]
JOBS = ROOT / "jobs"
JOB_TOML = """
tasks = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"]
order = "rotate"
[train]
steps = 6000
[learn]
widths = [8]
batch_size = 32
learning_starts = 32
[evaluation]
episodes = 1
max_steps = 100
[checkpoint]
interval = 50
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm with two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def whole(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the single-node script, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "job.toml").write_text(JOB_TOML)
    given = {"JOB": str(folder / "job.toml"), "RUN": str(folder / "run")}
    job = slurm.submit("--ntasks=3", str(JOBS / "single-node.sbatch"), **given)
    said = slurm.finish(job)
    assert "3 agents on 1 host" in said and "Results:" in said
    return folder


def test_the_single_node_script_runs_to_the_end(whole: Path) -> None:
    assert run(["canal-mpi", "inspect", "--verify", str(whole / "run")]).code == 0


def test_a_preempted_run_goes_back_into_the_queue_and_ends_with_the_same_bits(
    slurm: Slurm, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = {"JOB": str(whole / "job.toml"), "RUN": str(out)}
    script = str(JOBS / "requeue.sbatch")
    job = slurm.submit("--ntasks=3", "--nodelist=n1", "--exclusive", script, **given)
    slurm.wait_for(lambda: len(list(out.glob("checkpoints/agent-*/round-*"))) >= 6, 60)
    slurm.submit("--partition=high", "--nodelist=n1", "--exclusive", "--wrap=sleep 1")
    said = slurm.finish(job)
    assert "everything is saved. To go on: mpirun -np 3 canal-mpi train --resume" in said
    assert "going back into the queue" in said and "Resumed in round" in said
    same = run(["canal-mpi", "inspect", str(out), "--same-as", str(whole / "run")])
    assert same.code == 0, same.out


def test_the_multi_node_script_uses_both_nodes(slurm: Slurm, tmp_path: Path) -> None:
    short = tmp_path / "short.toml"
    short.write_text(JOB_TOML.replace("6000", "100"))
    given = {"JOB": str(short), "RUN": str(tmp_path / "run")}
    job = slurm.submit("--ntasks-per-node=2", str(JOBS / "multi-node.sbatch"), **given)
    said = slurm.finish(job)
    assert "4 agents on" in said and "Results:" in said


def test_before_its_time_is_over_a_run_saves_itself_and_says_how_to_go_on(
    slurm: Slurm, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = {"JOB": str(whole / "job.toml"), "RUN": str(out)}
    job = slurm.submit("--ntasks=3", str(JOBS / "time-limit.sbatch"), **given)
    slurm.wait_for(lambda: len(list(out.glob("checkpoints/agent-*/round-*"))) >= 6, 60)
    slurm.ask("scancel", "-b", "-s", "USR1", job)  # as --signal=B:USR1@120 does
    slurm.wait_for(lambda: slurm.state(job) == {"FAILED"}, 60)
    assert "everything is saved" in slurm.output(job)
    assert f"To go on: sbatch --export=ALL,RUN={out} jobs/time-limit.sbatch" in slurm.output(job)
