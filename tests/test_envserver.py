"""Env-server ranks: real ranks whose environments run elsewhere."""

from pathlib import Path

import h5py
import pytest
from launch import (
    LAZY,
    SMOKE,
    check_time_line,
    columns,
    differences,
    kill,
    mpirun,
    nothing_is_left,
    pid_of,
    processes_with,
    start,
    wait_until,
)

pytestmark = pytest.mark.mpi

PLACES = [(3, ["--env-server"], "mpich"), (4, ["--env-servers", "2"], "openmpi")]
ATARI = ("--tasks", "Krull,Pong", "--order", "rotate", "--frames", "60")
BRIEF = [
    "learn.learning_starts=20",
    "learn.batch_size=16",
    "evaluation.max_steps=15",
    "evaluation.episodes=1",
]
SHORT = [word for setting in BRIEF for word in ("--set", setting)]


def same_bits(one: Path, other: Path, agents: int) -> None:
    """Everything but times and places is the same, in the results and in the networks."""
    assert differences(columns(one / "run.h5"), columns(other / "run.h5")) == []
    for agent in range(agents):
        file = f"checkpoints/agent-{agent}/learner.h5"
        assert differences(columns(one / file), columns(other / file)) == []


@pytest.mark.alone
@pytest.mark.slow
def test_agents_learn_the_same_bits_wherever_their_environments_run(tmp_path: Path) -> None:
    job, local = ("train", *SMOKE, "--envs-per-agent", "3"), tmp_path / "local"
    assert mpirun(2, *job, "--out", str(local)).code == 0
    for ranks, options, mpi in PLACES:
        out = tmp_path / mpi
        result = mpirun(ranks, *job, *options, "--out", str(out), mpi=mpi)
        assert result.code == 0, result.err
        assert "2 agents on 1 host" in result.out
        check_time_line(result.out)
        same_bits(local, out, 2)
        with h5py.File(out / "run.h5") as file:
            assert file["agents/rank"][()].tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.atari
@pytest.mark.parametrize("obs", ["ram", pytest.param("pixels", marks=pytest.mark.long)])
def test_atari_on_a_server_gives_the_bits_of_atari_at_home(obs: str, tmp_path: Path) -> None:
    learner = {"ram": "dqn", "pixels": "plugins:Linear"}[obs]
    what = ("--obs", obs, "--set", f"learn.algorithm={learner}", "--envs-per-agent", "2")
    common = ("train", *ATARI, *SHORT, *what)
    local, remote = tmp_path / "local", tmp_path / "remote"
    compiled = {"NUMBA_DISABLE_JIT": "0"}  # Python would copy pixels one by one
    assert mpirun(2, *common, "--out", str(local), **compiled).code == 0
    result = mpirun(3, *common, "--env-server", "--out", str(remote), **compiled)
    assert result.code == 0, result.err
    same_bits(local, remote, 2)
    with h5py.File(local / "run.h5") as file:
        assert set(file["tasks/env_steps"][()].tolist()) & {60}


TROUBLE = {
    "Raises": "ZeroDivisionError: on purpose",
    "Crashes": "the process of this environment was killed by signal 11",
    "NanObs": "task 'plugins:NanObs-v0' gave the observation array([ 0., nan]) at step 20 of",
    "Hangs": "has not answered for 8 s (timeout 8 s): step of plugins:Hangs-v0",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TROUBLE)
def test_an_environment_in_trouble_ends_the_job_with_the_names_of_agent_and_server(
    kind: str, out: Path
) -> None:
    options = ("--tasks", f"CartPole-v1,plugins:{kind}-v0", "--order", "rotate", "--frames", "100")
    common = ("train", *options, *LAZY, "--set", "timeout=8", "--out", str(out))
    result = mpirun(3, *common, "--env-server")
    assert result.code != 0
    assert len(result.complaints) == 1, result.err
    start = "canal-mpi: agent 1 (rank 1 on "
    assert result.complaints[0].startswith(start), result.err
    assert "rank 2 on " in result.complaints[0]
    assert TROUBLE[kind] in result.complaints[0]
    assert nothing_is_left(out)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["env-server-2", "agent-1"])
def test_whoever_is_killed_is_named_and_nothing_stays_behind(
    mpi: str, victim: str, out: Path
) -> None:
    names = {"env-server-2": "an env server (rank 2 on ", "agent-1": "agent 1 (rank 1 on "}
    for attempt in range(3 if mpi == "mpich" else 1):
        err, workers = killed(mpi, victim, out / str(attempt))
        if names[victim] in err:
            break  # MPICH kills the others within a millisecond: now and then one of them is named
    assert names[victim] in err, err
    assert err.count("canal-mpi:") == 1, err
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), seconds=30)


def killed(mpi: str, victim: str, out: Path) -> tuple[str, list[int]]:
    """Kill a rank while it plays: what was said, and the server's workers."""
    command = ["mpirun", "-np", "3", "canal-mpi", "train", *SMOKE, *LAZY, "--frames", "200000"]
    job, status = start([*command, "--env-server", "--out", str(out)], mpi), out / "status.json"
    wait_until(lambda: status.exists() and '"training"' in status.read_text(), job)
    workers = children(pid_of(out, "env-server-2"))
    assert len(workers) == 2
    kill(out, victim)
    _, err = job.communicate(timeout=60)  # silence would take 300 s
    assert job.returncode != 0
    return err, workers


def children(pid: int) -> list[int]:
    """The workers of a server."""
    found = processes_with("canal_mpi.envs.server")
    stats = {other: Path(f"/proc/{other}/stat").read_text() for other in found}
    return [k for k, stat in stats.items() if int(stat.rpartition(")")[2].split()[1]) == pid]


def test_a_world_without_room_for_agents_is_refused(out: Path) -> None:
    result = mpirun(3, "train", *SMOKE, "--env-servers", "3", "--out", str(out))
    assert result.code == 2, result.err
    words = "--env-servers 3 leaves no rank for an agent: the world has 3 ranks"
    assert len(result.complaints) == 1 and words in result.complaints[0]
