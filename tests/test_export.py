"""Runs in other formats."""

import csv
from math import nan
from pathlib import Path

import pytest
from madeup import write_run

from canal_mpi.errors import UsageError
from canal_mpi.results.export import export


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


def test_scalars_become_tensorboard_logs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    folders = export(write_run(tmp_path / "a"), "tensorboard", tmp_path / "out")
    assert [folder.name for folder in folders] == ["agent-0", "agent-1"]
    for folder in folders:
        (log,) = folder.iterdir()
        assert log.stat().st_size > 500


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [("parquet", "pyarrow", "parquet"), ("tensorboard", "tensorboardX", "tensorboard")],
)
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UsageError, match=rf"canal-mpi\[{extra}\]"):
        export(write_run(tmp_path / "a"), kind)
