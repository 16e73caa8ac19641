"""`inspect --verify` on good files and on bad ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from small import Sink, played, small_agent, small_job
from test_store import info

from canal_mpi.cli import cli
from canal_mpi.job import CheckpointConfig
from canal_mpi.results.checkpoint import Checkpoints, folder_of
from canal_mpi.results.hdf5 import write_arrays
from canal_mpi.results.store import Store
from canal_mpi.results.verify import verify
from canal_mpi.types import Columns

ABOUT = {"agent": 0, "run_id": "x", "agents": 1, "first_agent": 0, "job": "seed = 1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good file of every kind."""
    folder = tmp_path_factory.mktemp("run")
    Store(folder / "run.h5", info()).write("finished")
    write_arrays(folder / "membuf/agent-0/round-01-x.h5", played(20), {"kind": "membuf"})
    agent = small_agent(small_job(train__frames=8), sink=Sink())
    agent.saver = Checkpoints(folder, ABOUT, CheckpointConfig(every=4))
    agent.run()
    write_arrays(folder / "checkpoints/agent-0/learner.h5", agent.learner.state(), {})
    (folder / "job.toml").write_text("seed = 1\n")
    (folder / "events.jsonl").write_text('{"event": "start"}\n{"event": "round"}\n')
    return folder


def test_a_run_that_is_whole_passes(run: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(run), "--verify"])
    assert result.exit_code == 0, result.output
    assert "7 files are whole" in result.output


def test_every_flipped_bit_of_every_file_is_found(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for path in sorted(run.rglob("*.h5")):
        for _ in range(5):
            data = bytearray(path.read_bytes())
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            (tmp_path / path.name).write_bytes(data)
            assert verify(tmp_path / path.name), path


def test_a_spoilt_run_is_told_with_exit_code_1(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.h5"
    file.write_bytes((run / "run.h5").read_bytes()[:-1])
    result = CliRunner().invoke(cli, ["inspect", str(file), "--verify"])
    assert result.exit_code == 1
    assert "is damaged" in result.output


def membuf(change: dict[str, Any]) -> Columns:
    rows = played(6)
    for name, (place, value) in change.items():
        rows[name][place] = value
    return rows


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (membuf({"flags": (2, 64)}), "unknown flags"),
        (membuf({"flags": (-1, 0)}), "not closed"),
        (membuf({"reward": (1, np.nan)}), "not finite"),
        (membuf({"flags": (1, 2)}), "a cut is not followed"),
        ({"state": np.zeros(3)}, "lacks action, reward, flags"),
    ],
)
def test_a_membuf_with_a_right_checksum_and_wrong_rows_is_told(
    columns: Columns, words: str, tmp_path: Path
) -> None:
    write_arrays(tmp_path / "a.h5", columns, {"kind": "membuf"})
    assert any(words in told for told in verify(tmp_path / "a.h5"))


def test_results_that_name_a_missing_agent_are_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.h5", info())
    sink = Sink()
    sink.add("curve", agent=7, round=0, task="x", env_steps=1, score=0.0, seconds=0.0)
    store.append(sink.take(), 0)
    store.write("running")
    told = "\n".join(verify(tmp_path / "run.h5"))
    assert "/curve/agent names agent 7" in told
    assert "/curve/round holds a number that is too small" in told


def test_a_checkpoint_that_lacks_a_part_is_told(run: Path, tmp_path: Path) -> None:
    from canal_mpi.results.hdf5 import read_arrays

    good = sorted(folder_of(run, 0).glob("round-*"))[-1]
    columns = read_arrays(good)
    del columns["streams/draws"]
    write_arrays(tmp_path / good.name, columns, ABOUT | {"kind": "checkpoint", "round": 3})
    told = "\n".join(verify(tmp_path / good.name))
    assert "lacks streams/draws" in told and "is of round 1 inside and of 3 outside" in told


def test_texts_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    (tmp_path / "job.toml").write_text("a: 1")
    assert verify(tmp_path / "status.json") and verify(tmp_path / "job.toml")
    assert "can't read" in verify(tmp_path / "none.h5")[0]
