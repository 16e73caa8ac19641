"""What `canal-mpi bench lesson` measures, and that a lesson is as small as it has to be."""

import pickle  # only here: to hold what the benchmark says about it
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from canal_mpi.bench.lesson import Figures, measure, pickled_bytes, played, report, rows_of_file
from canal_mpi.cli import cli
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.results.hdf5 import write_arrays
from canal_mpi.types import ENDED, LAST, Columns

pytestmark = pytest.mark.atari


@pytest.fixture(scope="module")
def rows() -> Columns:
    return played("Krull", 3000)


def tuples(rows: Columns) -> list[tuple[object, ...]]:
    state, action, reward, flags = (rows[n] for n in ("state", "action", "reward", "flags"))
    return [
        (
            state[k].copy(),
            np.int64(action[k]),
            float(reward[k]),
            state[k + 1].copy(),
            bool(flags[k] & ENDED),
        )
        for k in range(len(state))
        if not flags[k] & LAST
    ]


def test_the_size_of_pickled_tuples_is_what_pickle_makes_of_them(rows: Columns) -> None:
    real = len(pickle.dumps(tuples(rows), pickle.HIGHEST_PROTOCOL))
    assert pickled_bytes(rows) == pytest.approx(real, rel=0.005)


def test_a_lesson_is_at_most_a_twentieth_of_pickled_tuples(rows: Columns) -> None:
    found = measure("Krull", rows, repeats=1)
    assert found.rows == len(rows["action"])
    assert found.packed <= found.pickled / 20
    assert found.raw == sum(column.nbytes for column in rows.values())


def test_packing_pays_below_the_speed_at_which_both_ways_take_as_long() -> None:
    figures = Figures(10, 9999, 1000, 200, 0.3, 0.2, 0.01, 0.1)
    assert figures.pays_below == pytest.approx(2000)
    speed = figures.pays_below
    packed = figures.pack + figures.unpack + figures.packed / speed
    assert packed == pytest.approx(figures.plain + figures.raw / speed)
    assert Figures(10, 9999, 1000, 200, 0.1, 0.1, 0.01, 0.3).pays_below == float("inf")


def test_the_report_says_where_the_rows_come_from() -> None:
    lines = report("Krull", "from x.h5", Figures(10, 3350, 1340, 67, 0.3, 0.2, 0.01, 0.1))
    assert lines[0] == "Krull · 10 rows from x.h5"
    assert "1/50.0 of pickled tuples" in lines[3]
    assert lines[-1].startswith("  packing pays below")


def test_the_command_measures_rows_of_a_file_and_of_play(tmp_path: Path, rows: Columns) -> None:
    write_arrays(tmp_path / "rows.h5", rows, {})
    for words in (("--rows", str(tmp_path / "rows.h5")), ("--steps", "300")):
        found = CliRunner().invoke(cli, ["bench", "lesson", "--game", "Krull", *words])
        assert found.exit_code == 0, found.output
        assert "of pickled tuples" in found.output
    assert "of random play" in found.output


def test_a_file_without_rows_and_too_few_steps_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "other.h5", {"a": np.zeros(3)}, {})
    with pytest.raises(DamagedData, match="expected rows of play"):
        rows_of_file(str(tmp_path / "other.h5"))
    with pytest.raises(UsageError, match="--steps 1: expected at least 2"):
        played("Krull", 1)
