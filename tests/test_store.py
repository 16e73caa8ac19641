"""run.h5, read by plain h5py alone, as DESIGN.md describes it."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from canal_mpi.errors import DamagedData
from canal_mpi.results.hdf5 import checked_image
from canal_mpi.results.store import VOLATILE_ATTRIBUTES, RunInfo, Store
from canal_mpi.schema import SCHEMA_VERSION, TABLES, Rows
from canal_mpi.types import Columns

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
        for name in ("agents/order", "topology/adjacency", "evaluation/score", "evaluation/task"):
            assert file[name].attrs["description"]


def test_the_tables_are_those_of_the_design() -> None:
    design = {
        "agents": "agent rank host machine device threads role speed",
        "tasks": "agent round task source donors env_steps probe_steps updates score seconds "
        "wait_seconds evaluate_seconds exchange_seconds save_seconds",
        "episodes": "agent round task episode step return length",
        "train": "agent round task step loss epsilon return_mean env_seconds learn_seconds "
        "wait_seconds",
        "exchange": "kind round donor from to task rows bytes raw_bytes seconds wait_seconds "
        "score_before score_after kept reason",
    }
    for table, names in design.items():
        assert list(TABLES[table]) == names.split()


def test_times_hosts_and_bytes_on_the_wire_are_volatile_and_nothing_else() -> None:
    volatile = {
        f"{t}/{n}" for t, columns in TABLES.items() for n, c in columns.items() if c.volatile
    }
    seconds = {f"{t}/{n}" for t, columns in TABLES.items() for n in columns if "seconds" in n}
    tables = {f"{table}/{name}" for table in ("relays", "faults") for name in TABLES[table]}
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
    checked_image(tmp_path / "run.h5")
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


@pytest.mark.parametrize("kind", bad_columns())
def test_columns_that_are_not_in_the_schema_are_refused(tmp_path: Path, kind: str) -> None:
    kept = store(tmp_path)
    with pytest.raises(DamagedData, match="agent 1 sent"):
        kept.append(bad_columns()[kind], 1)
    assert all(len(column) == 0 for column in kept.table("evaluation").values())


def test_no_rows_at_all_are_fine(tmp_path: Path) -> None:
    kept = store(tmp_path)
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
