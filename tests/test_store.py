"""Rows of results, and run.h5 as plain h5py reads it."""

import json
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from canal_mpi.agent.recorder import Recorder
from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Columns, Sink
from canal_mpi.results.files import read_arrays
from canal_mpi.results.store import (
    SCHEMA_VERSION,
    TABLES,
    TEXT,
    VOLATILE_ATTRIBUTES,
    Rows,
    RunInfo,
    Store,
)

TASKS = ("Krull", "Älien")


def info(orders: tuple[tuple[str, ...], ...] = (TASKS, TASKS[::-1]), first: int = 0) -> RunInfo:
    edges = [(0, 1)] if len(orders) > 1 else []
    return RunInfo(
        run_id="20260101-000000",
        seed=7,
        job='name = "é"',
        tasks=TASKS,
        first_agent=first,
        orders=orders,
        edges=edges,
        versions={"numpy": "2"},
    )


def store(folder: Path, **options: Any) -> Store:
    return Store(folder / "run.h5", info(**options))


def evaluated(agent: int, round_: int, task: str, scores: list[float]) -> Columns:
    rows = Rows()
    for episode, score in enumerate(scores):
        rows.add(
            "evaluation",
            agent=agent,
            after_round=round_,
            task=task,
            episode=episode,
            score=score,
            length=9,
            seconds=0.5,
        )
    return rows.take()


def test_a_run_without_rows_has_every_table(tmp_path: Path) -> None:
    store(tmp_path).write("running")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        assert set(file) == {*TABLES, "topology"}
        for table in TABLES.keys() - {"evaluation"}:
            for name in TABLES[table]:
                assert file[table][name].shape == (0,)
        assert file["evaluation/score"].shape == (2, 3, 2, 0)


def test_the_attributes_describe_the_run(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.write("running")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        facts = dict(file.attrs)
    assert facts["schema_version"] == SCHEMA_VERSION
    assert (facts["run_id"], facts["agents"], facts["seed"]) == ("20260101-000000", 2, 7)
    assert facts["job"] == 'name = "é"'
    assert json.loads(facts["versions"]) == {"numpy": "2"}
    assert (facts["status"], facts["finished"]) == ("running", "")
    assert facts["started"]
    assert set(facts["volatile"]) == set(VOLATILE_ATTRIBUTES)
    kept.write("finished")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        assert file.attrs["status"] == "finished"
        assert file.attrs["finished"] >= file.attrs["started"]


def test_every_column_says_what_it_is(tmp_path: Path) -> None:
    store(tmp_path).write("running")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        for table in TABLES.keys() - {"evaluation"}:
            for name, column in TABLES[table].items():
                marks = file[table][name].attrs
                assert marks["description"] == column.about != ""
                assert marks.get("unit", "") == column.unit
                assert bool(marks.get("volatile", False)) == column.volatile
        for name in ("agents/order", "topology/adjacency", "evaluation/task", "evaluation/score"):
            assert file[name].attrs["description"]


def test_the_tables_are_those_of_the_design() -> None:
    design = {
        "agents": "agent rank host machine device threads role speed",
        "tasks": "agent round task source donors env_steps probe_steps evaluation_steps "
        "updates score seconds cpu_seconds core_seconds env_seconds learn_seconds pretrain_seconds "
        "probe_seconds exchange_seconds remember_seconds save_seconds evaluate_seconds "
        "wait_seconds",
        "episodes": "agent round task episode step return length",
        "train": "agent round task step loss epsilon return_mean env_seconds learn_seconds "
        "wait_seconds",
        "files": "agent path sha256",
        "exchange": "kind round donor from to task rows bytes raw_bytes seconds "
        "score kl agreement reason",
    }
    for table, names in design.items():
        assert list(TABLES[table]) == names.split()


def test_a_task_gets_the_scores_and_costs_of_its_evaluations(tmp_path: Path) -> None:
    kept, rows = store(tmp_path), Rows()
    for round_, task in enumerate(TASKS, 1):
        recorder = Recorder(rows, lambda progress: None, 0, 1)
        recorder.begin(task, round_)
        recorder.learnt([])
    kept.append(rows.take(), 0)
    assert np.isnan(kept.table("tasks")["score"]).all()
    for after, task, scores in ((0, TASKS[0], [9.0]), (1, TASKS[0], [1.0, 3.0])):
        kept.append(evaluated(0, after, task, scores), 0)
    for task in TASKS:
        kept.append(evaluated(0, 2, task, [7.0]), 0)
    found = kept.table("tasks")
    assert found["score"].tolist() == [2.0, 7.0], "right after the task, else at the end"
    assert found["evaluation_steps"].tolist() == [27, 18]
    assert found["evaluate_seconds"].tolist() == [1.5, 1.0]
    assert (found["seconds"] >= found["evaluate_seconds"]).all()
    kept.write("running")
    with h5py.File(tmp_path / "run.h5") as file:
        assert file["evaluation/length"][()].sum() == 45


def test_times_hosts_and_bytes_on_the_wire_are_volatile_and_nothing_else() -> None:
    volatile = {
        f"{t}/{n}" for t, columns in TABLES.items() for n, c in columns.items() if c.volatile
    }
    seconds = {f"{t}/{n}" for t, columns in TABLES.items() for n in columns if "seconds" in n}
    tables = {f"faults/{name}" for name in TABLES["faults"]}
    assert volatile == seconds | tables | {
        "agents/rank",
        "agents/host",
        "agents/device",
        "agents/threads",
        "agents/machine",
        "agents/speed",
        "exchange/bytes",
    }


def test_orders_and_edges_are_arrays(tmp_path: Path) -> None:
    store(tmp_path).write("running")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        order = file["agents/order"].asstr()[()]
        assert order.tolist() == [["Krull", "Älien"], ["Älien", "Krull"]]
        assert file["topology/adjacency"][()].tolist() == [[0, 1], [0, 0]]


def test_rows_of_all_agents_are_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    kept, rows = store(tmp_path), Rows()
    for agent in (1, 0):
        rows.add(
            "episodes",
            agent=agent,
            round=1,
            task="Älien",
            episode=1,
            step=5,
            length=5,
            **{"return": 2.5},
        )
        kept.append(rows.take(), agent)
    kept.write("running")
    read_arrays(tmp_path / "run.h5")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        assert file["episodes/agent"][()].tolist() == [1, 0]
        assert file["episodes/return"][()].tolist() == [2.5, 2.5]
        assert file["episodes/task"].asstr()[()].tolist() == ["Älien", "Älien"]
        assert file["episodes/return"].attrs["unit"] == "game points"


def test_the_evaluation_is_an_array_of_episodes(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.append(evaluated(0, 1, "Krull", [1.0, 2.0]), 0)
    kept.append(evaluated(1, 2, "Älien", [5.0]), 1)
    kept.write("running")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        data = file["evaluation/score"]
        score = data[()]
        assert list(data.attrs["dims"]) == ["agent", "after_round", "task", "episode"]
        assert data.attrs["unit"] == "game points"
        assert file["evaluation/task"].asstr()[()].tolist() == list(TASKS)
    assert score.shape == (2, 3, 2, 2)
    assert score[0, 1, 0].tolist() == [1.0, 2.0]
    assert score[1, 2, 1, 0] == 5.0
    assert np.isnan(score).sum() == score.size - 3


def test_a_lone_agent_with_a_number_of_its_own_can_be_written(tmp_path: Path) -> None:
    kept = store(tmp_path, orders=(TASKS,), first=3)
    kept.append(evaluated(3, 1, "Krull", [1.0]), 3)
    kept.write("running")
    with h5py.File(tmp_path / "run.h5", "r") as file:
        assert np.nanmax(file["evaluation/score"][()]) == 1.0


def bad_columns() -> dict[str, Columns]:
    good = evaluated(0, 1, "Krull", [1.0])
    return {
        "an unknown table": {"pets/name": np.zeros(1)},
        "an unknown column": good | {"evaluation/colour": np.zeros(1)},
        "a name without table": {"agent": np.zeros(1, dtype="<i4")},
        "another type": good | {"evaluation/score": np.zeros(1, dtype="<f4")},
        "another byte order": good | {"evaluation/score": np.zeros(1, dtype=">f8")},
        "longer text": good | {"evaluation/task": np.zeros(1, dtype="S65")},
        "two dimensions": good | {"evaluation/score": np.zeros((1, 1))},
        "another length": good | {"evaluation/score": np.zeros(2)},
        "a missing column": {n: c for n, c in good.items() if n != "evaluation/score"},
    }


def test_columns_that_are_not_in_the_schema_are_refused(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for columns in bad_columns().values():
        with pytest.raises(DamagedData, match="agent 1 sent"):
            kept.append(columns, 1)
    assert all(len(column) == 0 for column in kept.table("evaluation").values())
    kept.append({}, 0)
    kept.write("running")


def test_the_same_rows_give_the_same_datasets(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        kept = Store(tmp_path / name, info())
        kept.append(evaluated(0, 1, "Krull", [1.0, 2.0]), 0)
        kept.write("running")
        with h5py.File(tmp_path / name, "r") as file:
            found.append({t: file[t][()].tobytes() for t in ("evaluation/score", "agents/order")})
    assert found[0] == found[1]


# Rows

EPISODE: dict[str, float | int | str] = {
    "agent": 1,
    "round": 2,
    "task": "Krull",
    "episode": 3,
    "step": 400,
    "return": -1.5,
    "length": 100,
}


def filled(table: str) -> dict[str, float | int | str]:
    return {
        name: "text" if column.dtype.startswith("S") else 1
        for name, column in TABLES[table].items()
    }


def text_of(task: str) -> bytes:
    rows = Rows()
    rows.add("episodes", **EPISODE | {"task": task})
    return bytes(rows.take()["episodes/task"][0])


def test_rows_become_typed_columns() -> None:
    rows = Rows()
    rows.add("episodes", **EPISODE)
    rows.add("episodes", **EPISODE | {"return": nan, "task": "Alien"})
    taken = rows.take()
    assert list(taken) == [f"episodes/{name}" for name in TABLES["episodes"]]
    assert taken["episodes/task"].tolist() == [b"Krull", b"Alien"]
    assert taken["episodes/return"][0] == -1.5
    assert np.isnan(taken["episodes/return"][1])


def test_every_table_takes_a_row_and_gives_its_types() -> None:
    for table in TABLES:
        rows = Rows()
        rows.add(table, **filled(table))
        taken = rows.take()
        assert len(taken) == len(TABLES[table])
        for name, column in TABLES[table].items():
            assert taken[f"{table}/{name}"].dtype == np.dtype(column.dtype)
            assert taken[f"{table}/{name}"].shape == (1,)


def test_rows_are_taken_once() -> None:
    rows = Rows()
    rows.add("episodes", **EPISODE)
    assert len(rows.take()) == len(EPISODE)
    assert rows.take() == {}


def test_rows_of_several_tables_are_taken_together() -> None:
    rows = Rows()
    for table in ("train", "tasks", "train"):
        rows.add(table, **filled(table))
    taken = rows.take()
    assert len(taken["train/loss"]) == 2
    assert len(taken["tasks/score"]) == 1


def test_a_row_that_is_not_in_the_schema_is_refused_and_leaves_nothing_behind() -> None:
    rows = Rows()
    fewer = {name: value for name, value in EPISODE.items() if name != "step"}
    with pytest.raises(KeyError, match=r"row for 'episodes' differs from its schema in \['step'\]"):
        rows.add("episodes", **fewer)
    with pytest.raises(KeyError, match=r"differs from its schema in \['loss', 'speed'\]"):
        rows.add("episodes", **EPISODE, speed=1, loss=2)
    with pytest.raises(KeyError, match="epsiodes"):
        rows.add("epsiodes", **EPISODE)
    assert rows.take() == {}


def test_short_texts_are_kept_whole() -> None:
    assert text_of("") == b""
    assert text_of("Straße") == "Straße".encode()
    assert text_of("x" * 64) == b"x" * 64


def test_long_texts_are_clipped_on_a_character_border() -> None:
    for lead, character in product(range(4), ("x", "ß", "€", "🎮")):
        whole = "a" * lead + character * 70
        clipped = text_of(whole).decode()
        assert whole.startswith(clipped)
        assert 64 - len(character.encode()) < len(clipped.encode()) <= 64


def test_a_reason_may_be_longer_than_a_name() -> None:
    rows = Rows()
    rows.add("exchange", **filled("exchange") | {"reason": "r" * 300})
    assert rows.take()["exchange/reason"][0] == b"r" * 200


def test_a_number_where_a_text_belongs_is_written_as_text() -> None:
    rows = Rows()
    rows.add("tasks", **filled("tasks") | {"donors": 3})
    assert rows.take()["tasks/donors"][0] == b"3"


def test_a_text_where_a_number_belongs_is_refused() -> None:
    rows = Rows()
    rows.add("episodes", **EPISODE | {"step": "many"})
    with pytest.raises(ValueError, match="many"):
        rows.take()


def test_rows_are_a_sink_without_files() -> None:
    rows = Rows()
    sink: Sink = rows
    columns: Columns = {"a": np.zeros(1)}
    sink.save("membuf", "round-01", columns)
    sink.flush(1)
    assert rows.take() == {}


def test_texts_have_room_for_the_name_of_a_task() -> None:
    assert TEXT == "S64"
    assert all(columns["task"].dtype == TEXT for columns in TABLES.values() if "task" in columns)
