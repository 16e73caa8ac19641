"""`inspect`: what is in files, whether they are whole, two runs beside each other; `export`."""

import csv
import shutil
import sys
from math import nan
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result
from madeup import write_run
from small import Sink, played, small_agent, small_job
from test_hostile import attribute, replaced, rewrite
from test_store import info

from canal_mpi.cli import cli
from canal_mpi.errors import UsageError
from canal_mpi.interfaces import Columns
from canal_mpi.results.checkpoint import Checkpoints, Mark, folder_of, strangers
from canal_mpi.results.files import read_arrays, read_attributes, write_arrays, write_hdf5
from canal_mpi.results.inspect import differences, export, tree, verify, verify_all
from canal_mpi.results.store import Store
from canal_mpi.settings import CheckpointConfig


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


ABOUT = {"agent": 0, "run_id": "x", "agents": 1, "first_agent": 0, "job": "seed = 1"}


def lesson(steps: int) -> Columns:
    """The arrays of a lesson's file."""
    about = {"donor": np.array([0]), "round": np.array([1]), "score": np.array([1.0])}
    about |= {"std_error": np.array([0.5]), "episodes": np.array([4])}
    return played(steps) | about | {"task": np.array([b"x"], dtype="S64")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good file of every kind."""
    folder = tmp_path_factory.mktemp("run")
    Store(folder / "run.h5", info()).write("finished")
    write_arrays(folder / "membuf/agent-0/round-01-x.h5", lesson(20), {"kind": "membuf"})
    agent = small_agent(small_job(train__steps=8), sink=Sink())
    agent.saver = Checkpoints(folder, ABOUT, CheckpointConfig(interval=4))
    agent.run()
    write_arrays(folder / "checkpoints/agent-0/learner.h5", agent.learner.state_dict(), {})
    (folder / "job.toml").write_text("seed = 1\n")
    (folder / "events.jsonl").write_text('{"event": "start"}\n{"event": "round"}\n')
    return folder


def test_a_run_that_is_whole_passes(run: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(run), "--verify"])
    assert result.exit_code == 0, result.output
    assert "7 files are whole" in result.output


@pytest.mark.mpi
def test_files_of_another_run_are_told_though_each_is_whole(
    trained: Path, trained_with_seed_2: Path, out: Path
) -> None:
    """A real run of two agents: its run.h5 names the files that belong to it."""
    a, b = out, trained_with_seed_2
    shutil.copytree(trained, a)
    assert verify_all(a)[1] == [] and differences(a, a) == []
    assert any(line.startswith("files/sha256") for line in differences(a, b))
    lesson, learner = sorted(a.glob("membuf/agent-0/*"))[0], a / "checkpoints/agent-1/learner.h5"
    learner.write_bytes((b / "checkpoints/agent-1/learner.h5").read_bytes())
    lesson.unlink()
    result = CliRunner().invoke(cli, ["inspect", str(a), "--verify"])
    assert result.exit_code == 1
    assert f"{lesson} is missing" in result.output
    assert differences(a, a)[0] in result.output
    assert f"{learner} is not the one that this run wrote" in result.output
    (damaged := sorted(a.glob("membuf/agent-1/*"))[0]).write_bytes(b"x")
    told = verify_all(a)[1]
    for path in (damaged, lesson, learner):
        assert sum(str(path) in line for line in told) == 1, told


@pytest.mark.mpi
def test_the_networks_of_a_run_that_lost_an_agent_are_compared_but_for_its_own(
    trained: Path, trained_with_seed_2: Path, out: Path
) -> None:
    shutil.copytree(trained, out)
    for agent in (0, 1):
        name = f"checkpoints/agent-{agent}/learner.h5"
        (out / name).write_bytes((trained_with_seed_2 / name).read_bytes())
    rewrite(out / "run.h5", replaced("faults/agent", data=np.array([0], dtype="<i4")))
    for status, told in (("degraded", 1), ("stopped", 0)):
        rewrite(out / "run.h5", attribute("status", status))
        assert sum("agent-1/learner.h5 is not" in line for line in strangers(out)) == told
        assert not any("agent-0" in line for line in strangers(out))


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


def test_rows_with_a_right_checksum_that_are_wrong_are_told(tmp_path: Path) -> None:
    def membuf(name: str, place: int, value: float) -> Columns:
        columns = lesson(6)
        columns[name][place] = value
        return columns

    wrong: dict[str, Columns] = {
        "unknown flags": membuf("flags", 2, 64),
        "not closed properly": membuf("flags", -1, 0),
        "reward holds nan": membuf("reward", 1, np.nan),
        "play are not closed": membuf("flags", 1, 2),
        "no lesson: 'donor'": {"state": np.zeros(3)},
        "differ in length": lesson(6) | {"action": np.zeros(2, dtype=np.uint8)},
    }
    for words, columns in wrong.items():
        write_arrays(tmp_path / "a.h5", columns, {"kind": "membuf"})
        assert any(words in told for told in verify(tmp_path / "a.h5"))


def test_results_that_name_a_missing_agent_or_round_are_told(tmp_path: Path) -> None:
    for agent, round_, task, column in (
        (7, 1, "Krull", "agent"),
        (0, 0, "Krull", "round"),
        (0, 1, "x", "task"),
    ):
        store, sink, words = Store(tmp_path / "run.h5", info()), Sink(), f"/curve/{column} names"
        sink.add("curve", agent=agent, round=round_, task=task, env_steps=1, score=0.0, seconds=0.0)
        store.append(sink.take(), 0)
        store.write("running")
        assert words in "\n".join(verify(tmp_path / "run.h5"))


def test_a_checkpoint_that_is_not_what_its_name_says_is_told(run: Path, tmp_path: Path) -> None:
    good = sorted(folder_of(run, 0).glob("round-*"))[-1]
    odd, about = tmp_path / "agent-0" / good.name, read_attributes(good)
    columns = read_arrays(good)
    write_arrays(odd, columns, about | {"round": 3})
    assert f"holds {Mark(3, int(about['save'])).file} of agent 0" in verify(odd)[0]
    write_arrays(odd.with_name(Mark(1, 99).file), columns, about)
    assert f"holds {good.name} of agent 0" in verify(odd.with_name(Mark(1, 99).file))[0]
    write_arrays(odd, columns | {"learner/x": np.array([np.inf])}, about)
    assert verify(odd) == [f"{odd}: learner/x holds a number that is not finite."]


def test_files_in_the_place_of_others_are_told(tmp_path: Path) -> None:
    odd = [tmp_path / "membuf/agent-0/round-01-x.h5", folder_of(tmp_path, 0) / Mark(1, 1).file]
    for path in odd:
        write_arrays(path, {"a": np.zeros(3)}, {})
    (tmp_path / "status.json").mkdir()
    wrong = "\n".join(verify_all(tmp_path)[1])
    assert all(f"{path}" in wrong for path in (*odd, tmp_path / "status.json"))
    assert "no lesson" in wrong and "is no checkpoint" in wrong and "not a regular file" in wrong


def test_texts_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    (tmp_path / "job.toml").write_text("a: 1")
    assert verify(tmp_path / "status.json") and verify(tmp_path / "job.toml")
    assert "can't read" in verify(tmp_path / "none.h5")[0]


# What is in a file


def test_inspect_shows_shapes_units_and_meaning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    result = invoke("inspect", str(folder))
    assert result.exit_code == 0
    assert "own training steps in the environment [agent steps]" in result.output
    assert "2 × 4 × 3 × 2" in result.output
    assert "(volatile)" in result.output


def test_inspect_says_whether_two_runs_are_the_same(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    same = invoke("inspect", str(a), "--same-as", str(b))
    assert (same.exit_code, same.output.startswith("the same")) == (0, True)
    c = write_run(tmp_path / "c", score=lambda agent, after, task: float(after))
    other = invoke("inspect", str(a), "--same-as", str(c))
    assert other.exit_code == 1
    assert "tasks/score: 6 of 6 values differ, first at [0]: 105.0 against 1.0" in other.output
    d = write_run(tmp_path / "d", agents=3)
    assert "evaluation/score: float64 (2, 4, 3, 2)" in (
        invoke("inspect", str(a), "--same-as", str(d)).output
    )


def test_what_a_file_says_can_not_command_the_terminal(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file.attrs["x"] = "\x1b[2J"
        file.create_dataset("a\x1b]0;x", data=np.arange(3)).attrs["description"] = "\x1b[31m"
        file["b"] = h5py.ExternalLink("/etc/hostname", "a")

    write_hdf5(tmp_path / "run.h5", fill)
    lines = tree(tmp_path / "run.h5")
    assert not any(line.strip().startswith("b") for line in lines)
    assert "\x1b" not in "".join(lines)


# Other formats


def test_every_table_becomes_csv(tmp_path: Path) -> None:
    files = export(write_run(tmp_path / "a"), "csv")
    names = {file.name for file in files}
    assert {"tasks.csv", "episodes.csv", "exchange.csv", "evaluation.csv"} <= names
    rows = list(csv.DictReader((tmp_path / "a" / "csv" / "evaluation.csv").open()))
    assert len(rows) == 2 * 4 * 3 * 2
    assert rows[0] == {
        "agent": "0",
        "after_round": "0",
        "task": "Krull",
        "episode": "0",
        "score": "6.0",
    }


def test_a_run_without_evaluations_can_be_exported(tmp_path: Path) -> None:
    export(write_run(tmp_path / "a", score=lambda *_: nan), "csv", tmp_path / "out")
    assert (tmp_path / "out" / "evaluation.csv").read_text().count("\n") == 1


def test_every_table_becomes_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    export(write_run(tmp_path / "a"), "parquet", tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "tasks.parquet")
    assert table.column("task").to_pylist()[:2] == ["Krull", "Alien"]
    assert table.schema.field("env_steps").metadata[b"unit"] == b"agent steps"


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"canal-mpi\[parquet\]"):
        export(run, "parquet")
