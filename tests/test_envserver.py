"""Env-server ranks: real ranks whose environments run elsewhere."""

from pathlib import Path

import h5py
import pytest
from launch import SMOKE, columns, differences, mpirun

pytestmark = pytest.mark.mpi

LAZY = ("--set", "learn.algorithm=plugins:Lazy")
PLACES = {
    "the last rank": (3, ["--env-server"]),
    "rank 0": (3, ["--env-server-rank", "0"]),
    "two in the middle": (4, ["--env-servers", "2", *"--env-server-rank 0 --env-server-rank 2".split()]),
}
ATARI = ("--tasks", "Krull,Pong", "--order", "rotate", "--frames", "60")
BRIEF = "learn.starts=20 learn.batch=16 evaluation.max_steps=15 evaluation.episodes=1".split()
SHORT = [word for setting in BRIEF for word in ("--set", setting)]


def same_bits(one: Path, other: Path, agents: int) -> None:
    """Everything but times and places is the same, in the results and in the networks."""
    assert differences(columns(one / "run.h5"), columns(other / "run.h5")) == []
    for agent in range(agents):
        file = f"checkpoints/agent-{agent}/learner.h5"
        assert differences(columns(one / file), columns(other / file)) == []


def test_agents_learn_the_same_bits_wherever_their_environments_run(
    mpi: str, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    more = ("--envs-per-agent", "3")
    assert mpirun(2, "train", *SMOKE, *more, "--out", str(local), mpi=mpi).code == 0
    for k, (ranks, options) in enumerate(PLACES.values()):
        out = tmp_path / str(k)
        result = mpirun(ranks, "train", *SMOKE, *more, *options, "--out", str(out), mpi=mpi)
        assert result.code == 0, result.err
        assert "2 agents on 1 host" in result.out
        same_bits(local, out, 2)
        with h5py.File(out / "run.h5") as file:
            assert file["agents/rank"][()].tolist() == [[0, 1], [1, 2], [1, 3]][k]


@pytest.mark.atari
@pytest.mark.parametrize("obs", ["ram", "pixels"])
def test_atari_on_a_server_gives_the_bits_of_atari_at_home(obs: str, tmp_path: Path) -> None:
    common = ("train", *ATARI, *SHORT, "--obs", obs, "--envs-per-agent", "2")
    local, remote = tmp_path / "local", tmp_path / "remote"
    assert mpirun(2, *common, "--out", str(local)).code == 0
    result = mpirun(3, *common, "--env-server", "--out", str(remote))
    assert result.code == 0, result.err
    same_bits(local, remote, 2)
    with h5py.File(local / "run.h5") as file:
        assert set(file["tasks/env_steps"][()].tolist()) & {60}
