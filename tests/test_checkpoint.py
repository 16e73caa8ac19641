"""Checkpoints: when they are written, which are kept, and what happens when one can't be."""

import resource
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canal_mpi.errors import Stopped, StorageError
from canal_mpi.interfaces import Columns
from canal_mpi.results import checkpoint
from canal_mpi.results.checkpoint import Checkpoints, Mark, folder_of, marks, survey, tidy
from canal_mpi.results.files import read_arrays
from canal_mpi.settings import CheckpointConfig

ABOUT = {"agent": 3, "run_id": "x", "agents": 5, "first_agent": 0, "job": "seed = 1"}


def saver(folder: Path, every: int = 10, seconds: float = 0.0, **options: Any) -> Checkpoints:
    return Checkpoints(folder, ABOUT, CheckpointConfig(every, seconds), **options)


def state(round_: int = 1, number: int = 1) -> Columns:
    return {"round": np.array([round_]), "number": np.array([number])}


def kept(folder: Path) -> list[tuple[int, int]]:
    return [(mark.round, mark.save) for mark in marks(folder_of(folder, 3))]


def test_a_checkpoint_is_written_when_a_round_starts_and_every_so_many_turns(
    tmp_path: Path,
) -> None:
    keeper = saver(tmp_path)
    keeper.start(state)
    assert kept(tmp_path) == [(1, 1)]
    for _ in range(19):
        keeper.turn(1, state)
    assert kept(tmp_path) == [(1, 1), (1, 2)]
    keeper.turn(1, state)
    assert kept(tmp_path) == [(1, 2), (1, 3)]


def test_the_newest_two_stay_and_the_newest_of_the_round_before(tmp_path: Path) -> None:
    keeper = saver(tmp_path)
    for now in (partial(state, 1), partial(state, 2), partial(state, 3)):
        keeper.start(now)
        for _ in range(30):
            keeper.turn(1, now)
    assert kept(tmp_path) == [(2, 8), (3, 11), (3, 12)]
    keeper.start(partial(state, 4))
    assert kept(tmp_path) == [(3, 12), (4, 13)]


def test_time_alone_is_enough_but_never_more_often_than_they_are_dear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint, "monotonic", lambda: now[0])
    keeper = saver(tmp_path, every=0, seconds=5.0)

    def slow() -> Columns:
        now[0] += 1.0
        return state()

    keeper.start(slow)
    now[0] += 39
    keeper.turn(1, slow)
    assert len(kept(tmp_path)) == 1, "a checkpoint takes a second: one in forty at most"
    now[0] += 2
    keeper.turn(1, slow)
    assert len(kept(tmp_path)) == 2


def test_a_stop_saves_first(tmp_path: Path) -> None:
    keeper = saver(tmp_path, every=0, stopping=lambda: True)
    with pytest.raises(Stopped):
        keeper.turn(1, lambda: state(1, 7))
    assert read_arrays(folder_of(tmp_path, 3) / Mark(1, 1).file)["number"][0] == 7
    with pytest.raises(Stopped):
        keeper.turn(1, None)
    assert len(kept(tmp_path)) == 1, "none is possible here"


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = saver(tmp_path, every=1)
    keeper.start(state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 1000, 2000):  # inside the first block, the arrays, what HDF5 writes at last
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            for _ in range(3):
                keeper.turn(1, state)
            told = capsys.readouterr().err
            assert told.count("canal-mpi: warning: agent 3: can't write") == (limit == 100), limit
            assert "File too large" in told or limit > 100
            with pytest.raises(StorageError):
                keeper.start(partial(state, 2))  # nobody could go back to round 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept(tmp_path) == [(1, 1)]
    keeper.start(partial(state, 2))
    assert kept(tmp_path) == [(1, 1), (2, 2)]


def test_a_survey_finds_whole_checkpoints_and_names_damaged_ones(tmp_path: Path) -> None:
    keeper = saver(tmp_path, every=1)
    keeper.start(state)
    keeper.turn(1, state)
    folder = folder_of(tmp_path, 3)
    (folder / "learner.h5").write_bytes(b"no checkpoint")
    (folder / ".round-0001-save-000009.h5.new").write_bytes(b"half")
    spoilt = folder / Mark(1, 2).file
    spoilt.write_bytes(spoilt.read_bytes()[:-5])
    found, damaged = survey(tmp_path)
    assert [(f.agent, f.mark) for f in found] == [(3, Mark(1, 1))]
    assert (found[0].run_id, found[0].agents, found[0].job) == ("x", 5, "seed = 1")
    assert len(damaged) == 1 and str(spoilt) in damaged[0]
    lesson = tmp_path / "membuf" / "agent-0" / "round-01-x.h5"
    lesson.parent.mkdir(parents=True)
    lesson.write_bytes(b"x" * 1000)
    assert survey(tmp_path)[0] == found and str(lesson) in survey(tmp_path)[1][1]


def test_a_checkpoint_under_another_name_is_not_believed(tmp_path: Path) -> None:
    saver(tmp_path).start(state)
    folder = folder_of(tmp_path, 3)
    (folder / Mark(1, 1).file).rename(folder / Mark(2, 1).file)
    found, damaged = survey(tmp_path)
    assert found == [] and "of agent 3, version 4" in damaged[0]


def test_tidying_removes_what_lies_beyond_and_what_is_half_written(tmp_path: Path) -> None:
    keeper = saver(tmp_path, every=1)
    keeper.start(state)
    keeper.start(partial(state, 2))
    half = folder_of(tmp_path, 3) / ".round-0002-save-000003.h5.new"
    half.write_bytes(b"half")
    tidy(tmp_path, {3: Mark(1, 1)})
    assert kept(tmp_path) == [(1, 1)] and not half.exists()
    assert saver(tmp_path).save == 1
