from math import nan

import numpy as np
import pytest

from canal_mpi.schema import TABLES, TEXT, Rows
from canal_mpi.types import Columns, Sink

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


@pytest.mark.parametrize("table", TABLES)
def test_every_table_takes_a_row_and_gives_its_types(table: str) -> None:
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


def test_a_row_without_a_column_is_refused() -> None:
    fewer = {name: value for name, value in EPISODE.items() if name != "step"}
    with pytest.raises(KeyError, match=r"row for 'episodes' differs from its schema in \['step'\]"):
        Rows().add("episodes", **fewer)


def test_a_row_with_a_column_too_many_is_refused() -> None:
    with pytest.raises(KeyError, match=r"differs from its schema in \['loss', 'speed'\]"):
        Rows().add("episodes", **EPISODE, speed=1, loss=2)


def test_a_row_for_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError, match="epsiodes"):
        Rows().add("epsiodes", **EPISODE)


def test_a_refused_row_leaves_nothing_behind() -> None:
    rows = Rows()
    with pytest.raises(KeyError):
        rows.add("episodes", agent=1)
    assert rows.take() == {}


def test_short_texts_are_kept_whole() -> None:
    assert text_of("") == b""
    assert text_of("Straße") == "Straße".encode()
    assert text_of("x" * 64) == b"x" * 64


@pytest.mark.parametrize("character", ["x", "ß", "€", "🎮"])
@pytest.mark.parametrize("lead", range(4))
def test_long_texts_are_clipped_on_a_character_border(lead: int, character: str) -> None:
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


def test_every_column_says_what_it_is() -> None:
    for table in TABLES.values():
        for column in table.values():
            assert column.about
            assert np.dtype(column.dtype).itemsize


def test_times_and_hosts_may_differ_between_equal_runs_and_nothing_else() -> None:
    volatile = {
        (table, name)
        for table, columns in TABLES.items()
        for name, column in columns.items()
        if column.volatile
    }
    timed = {(t, name) for t, cols in TABLES.items() for name in cols if name.endswith("seconds")}
    where = ("rank", "host", "machine", "device", "threads", "speed")
    machine = {("agents", name) for name in where}
    relays = {("relays", name) for name in TABLES["relays"]}  # who passes on depends on timing
    faults = {("faults", name) for name in TABLES["faults"]}
    assert volatile == timed | machine | relays | faults | {("exchange", "bytes")}


def test_texts_have_room_for_the_name_of_a_task() -> None:
    assert TEXT == "S64"
    assert all(columns["task"].dtype == TEXT for columns in TABLES.values() if "task" in columns)
