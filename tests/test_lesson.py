from typing import Any

import numpy as np
import pytest
from helpers import SPACES, Player, head, lesson_offer, message

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import LAST, LIFE, TERMINATED, TRUNCATED, Columns, Offer, Spaces
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import LESSON_VERSION, ROWS, pack, unpack
from canal_mpi.membuf.wire import decode, encode

LIMIT = 1 << 20
FLOATS = Spaces((3,), "<f4", 2)


def some_rows() -> Columns:
    player = Player(Buffer(SPACES, 50))
    for flags in (0, LIFE, TRUNCATED, 0, TERMINATED, 0):
        player.step(flags)
    return player.buffer.export(100)


def open_lesson(rows: Columns, **changes: Any) -> Columns:
    """Unpack a lesson of these rows after columns were replaced, added or (None) taken away."""
    columns = decode(pack(3, 2, "Krull", rows, {}), LIMIT) | changes
    data = encode({name: column for name, column in columns.items() if column is not None})
    return unpack(data, lesson_offer(len(columns["action"])), SPACES, LIMIT).rows


def test_rows_come_back_as_they_were_packed() -> None:
    rows = some_rows()
    offer = lesson_offer(len(rows["action"]))
    lesson = unpack(pack(3, 2, "Krull", rows, {}), offer, SPACES, LIMIT)
    assert lesson.offer is offer
    assert lesson.network == {}
    assert list(lesson.rows) == list(ROWS)
    for name in ROWS:
        assert lesson.rows[name].dtype == rows[name].dtype
        assert np.array_equal(lesson.rows[name], rows[name])


def test_a_network_comes_back_as_it_was_packed() -> None:
    rows, rng = some_rows(), np.random.default_rng(0)
    network = {name: rng.normal(size=7).astype("<f4") for name in ("trunk", "head")}
    offer = lesson_offer(len(rows["action"]))
    lesson = unpack(pack(3, 2, "Krull", rows, network), offer, SPACES, LIMIT)
    assert list(lesson.rows) == list(ROWS)
    assert lesson.network.keys() == network.keys()
    for name, weights in network.items():
        assert lesson.network[name].dtype == weights.dtype
        assert np.array_equal(lesson.network[name], weights)


@pytest.mark.parametrize(
    "weights",
    [
        np.zeros(3, dtype="<f8"),
        np.zeros(3, dtype="<i4"),
        np.zeros((3, 1), dtype="<f4"),
        np.array([0, np.nan], dtype="<f4"),
        np.array([np.inf, 0], dtype="<f4"),
    ],
)
def test_a_network_that_is_no_vector_of_finite_numbers_is_refused(weights: Any) -> None:
    with pytest.raises(DamagedData, match=r"lesson's network/trunk (is no vector|holds)"):
        open_lesson(some_rows(), **{"network/trunk": weights})


@pytest.mark.parametrize("task", ["Krull", "ALE/Krull-v5", "ns:Straße-v0", "x" * 64])
def test_the_name_of_the_task_travels_with_it(task: str) -> None:
    rows = some_rows()
    offer = lesson_offer(len(rows["action"]), task=task)
    assert unpack(pack(3, 2, task, rows, {}), offer, SPACES, LIMIT)


def test_a_task_whose_name_does_not_fit_is_not_packed_under_a_shorter_one() -> None:
    with pytest.raises(ValueError, match="over 64 bytes"):
        pack(3, 2, "my_module.with_games/" + "VeryLong" * 8 + "-v0", some_rows(), {})


def test_pixels_and_floats_are_packed_too() -> None:
    rows: Columns = {
        "state": np.random.default_rng(0).normal(size=(4, 3)).astype("<f4"),
        "action": np.array([0, 1, 1, 0], dtype=np.uint8),
        "reward": np.array([0.5, -1, 2, 0], dtype="<f4"),
        "flags": np.array([0, 0, TERMINATED, LAST], dtype=np.uint8),
    }
    found = unpack(pack(3, 2, "Krull", rows, {}), lesson_offer(4), FLOATS, LIMIT)
    assert np.array_equal(found.rows["state"], rows["state"])


@pytest.mark.parametrize("network", [{}, {"head": np.ones(5, dtype="<f4")}])
def test_every_changed_byte_is_refused(network: Columns) -> None:
    rows = some_rows()
    data, offer = pack(3, 2, "Krull", rows, network), lesson_offer(len(rows["action"]))
    for at in range(0, len(data), 3):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises(DamagedData):
            unpack(damaged, offer, SPACES, LIMIT)


def test_a_lesson_above_the_limit_is_refused() -> None:
    rows = some_rows()
    with pytest.raises(DamagedData, match="the limit is 50"):
        unpack(pack(3, 2, "Krull", rows, {}), lesson_offer(len(rows["action"])), SPACES, 50)


@pytest.mark.parametrize("missing", ["version", "donor", "task", "state", "flags"])
def test_a_missing_column_is_refused(missing: str) -> None:
    changes: dict[str, Any] = {missing: None}
    with pytest.raises(DamagedData, match=r"lesson has the columns .*; expected \['action',"):
        open_lesson(some_rows(), **changes)


def test_a_column_too_many_is_refused() -> None:
    with pytest.raises(DamagedData, match=r"lesson has the columns .*'more'"):
        open_lesson(some_rows(), more=np.zeros(3))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"donor": 4}, "donor"),
        ({"round_": 3}, "round"),
        ({"task": "Alien"}, "task"),
        ({"task": "Krul"}, "task"),
    ],
)
def test_another_lesson_than_the_one_offered_is_refused(changes: dict[str, Any], name: str) -> None:
    rows = some_rows()
    offer = lesson_offer(len(rows["action"]), **changes)
    with pytest.raises(DamagedData, match=rf"lesson's {name} is .*; the offer said"):
        unpack(pack(3, 2, "Krull", rows, {}), offer, SPACES, LIMIT)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("version", np.array([LESSON_VERSION + 1], dtype="<u2")),
        ("version", np.array([LESSON_VERSION], dtype="<u4")),
        ("version", np.array([LESSON_VERSION] * 2, dtype="<u2")),
        ("donor", np.array([3], dtype="<i8")),
        ("donor", np.array([3.0])),
        ("round", np.zeros(0, dtype="<i4")),
        ("round", np.array([[2]], dtype="<i4")),
        ("task", np.array([b"Krull"], dtype="S63")),
        ("task", np.array([7], dtype="<i4")),
    ],
)
def test_a_label_of_another_kind_is_refused(name: str, column: Any) -> None:
    with pytest.raises(DamagedData, match=f"lesson's {name} is"):
        open_lesson(some_rows(), **{name: column})


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("state", "<i8", (8, 2, 2)),
        ("state", "<u4", (8, 2, 2)),
        ("state", "<i4", (8, 4)),
        ("state", "<i4", (8, 2, 3)),
        ("state", "<i4", (8,)),
        ("action", "<i8", (8,)),
        ("action", "|i1", (8,)),
        ("action", "|u1", (8, 1)),
        ("reward", "<f8", (8,)),
        ("reward", "<i4", (8,)),
        ("reward", "<f4", (8, 1)),
        ("flags", "|b1", (8,)),
        ("flags", "|u1", (8, 1)),
    ],
)
def test_rows_of_another_type_or_shape_are_refused(
    name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    rows = some_rows()
    assert len(rows["action"]) == 8
    with pytest.raises(DamagedData, match=rf"lesson's {name} is .* of shape"):
        open_lesson(rows, **{name: np.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize("name", ROWS)
def test_columns_of_different_length_are_refused(name: str) -> None:
    rows = some_rows()
    with pytest.raises(DamagedData, match="differ in length"):
        open_lesson(rows, **{name: rows[name][:-1]})


@pytest.mark.parametrize("offered", [7, 9, 0, 10**12])
def test_another_number_of_rows_than_offered_is_refused(offered: int) -> None:
    rows = some_rows()
    with pytest.raises(DamagedData, match=f"lesson has 8 rows; the offer said {offered}"):
        unpack(pack(3, 2, "Krull", rows, {}), lesson_offer(offered), SPACES, LIMIT)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_lesson_without_a_single_move_is_refused(rows: int) -> None:
    few = {name: column[len(column) - rows :] for name, column in some_rows().items()}
    with pytest.raises(DamagedData, match=f"lesson has {rows} rows"):
        open_lesson(few)


def test_an_action_that_does_not_exist_is_refused() -> None:
    rows = some_rows()
    rows["action"][3] = SPACES.actions
    with pytest.raises(DamagedData, match="holds action 5; there are 5"):
        open_lesson(rows)
    rows["action"][3] = SPACES.actions - 1
    assert open_lesson(rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_reward_that_is_too_large_or_not_finite_is_refused(value: float) -> None:
    rows = some_rows()
    rows["reward"][2] = value
    with pytest.raises(DamagedData, match=r"reward holds .*; expected at most 1e\+09"):
        open_lesson(rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -3e38])
def test_a_state_that_is_too_large_or_not_finite_is_refused(value: float) -> None:
    rows: Columns = {
        "state": np.array([[0, 1, value], [0, 0, 0]], dtype="<f4"),
        "action": np.zeros(2, dtype=np.uint8),
        "reward": np.zeros(2, dtype="<f4"),
        "flags": np.array([0, LAST], dtype=np.uint8),
    }
    with pytest.raises(DamagedData, match="state holds"):
        unpack(pack(3, 2, "Krull", rows, {}), lesson_offer(2), FLOATS, LIMIT)


@pytest.mark.parametrize("flag", [16, 32, 128])
def test_unknown_flags_are_refused(flag: int) -> None:
    rows = some_rows()
    rows["flags"][0] |= flag
    with pytest.raises(DamagedData, match="unknown flags"):
        open_lesson(rows)


@pytest.mark.parametrize(
    "flags", [[LAST, 0, 0, LAST], [0, 0, 0, 0], [0, LAST, LAST, LAST], [0, LAST, 0, TERMINATED]]
)
def test_segments_that_are_not_closed_properly_are_refused(flags: list[int]) -> None:
    rows = {name: column[:4] for name, column in some_rows().items()}
    rows["flags"] = np.array(flags, dtype=np.uint8)
    with pytest.raises(DamagedData, match="not closed properly"):
        open_lesson(rows)


def test_several_closed_segments_are_accepted() -> None:
    rows = {name: column[:4] for name, column in some_rows().items()}
    rows["flags"] = np.array([0, LAST, 0, LAST], dtype=np.uint8)
    assert open_lesson(rows)["flags"].tolist() == [0, LAST, 0, LAST]


def test_something_else_than_a_lesson_is_refused() -> None:
    offer = Offer(3, 2, "Krull", 1.0, 8, 100)
    for data in (b"", b"noise" * 50, message([head()], b"x"), encode({})):
        with pytest.raises(DamagedData):
            unpack(data, offer, SPACES, LIMIT)
