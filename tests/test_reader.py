"""Reading runs: whole ones, running ones, older ones, and files that lie."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from madeup import GAMES, write_run
from small import played
from test_hostile import Change, replaced, rewrite

import canal_mpi
from canal_mpi.errors import DamagedData, UsageError, logger
from canal_mpi.interfaces import Spaces
from canal_mpi.results import reader
from canal_mpi.results.checkpoint import earlier_lessons
from canal_mpi.results.files import write_arrays, write_hdf5
from canal_mpi.results.inspect import differences, tree, verify
from canal_mpi.results.reader import load


def changed(path: Path, change: Change) -> Path:
    """The same run after a change of its results, with a right checksum."""
    rewrite(path / "run.h5", change)
    return path


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = canal_mpi.load(write_run(tmp_path / "a"))
    assert (run.name, run.status, run.agents, run.rounds) == ("a", "finished", [0, 1], 3)
    assert run.tasks == list(GAMES)
    assert run.score.shape == (2, 4, 3, 2)
    assert run["tasks"]["task"][0] == "Krull"
    assert run.order.tolist() == [["Krull", "Alien", "Robotank"], ["Alien", "Robotank", "Krull"]]
    assert run.setting("train.steps") == 1000
    assert run.setting("train.nothing", 7) == 7
    assert run.versions == {"numpy": "2.4"}
    assert load(run.folder / "run.h5").name == "a"


def test_a_lone_agent_keeps_its_number(tmp_path: Path) -> None:
    assert load(write_run(tmp_path / "a", agents=1, first=3)).agents == [3]


def test_a_table_is_a_frame_of_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed (extra: look)")
    frame = load(write_run(tmp_path / "a")).frame("tasks")
    assert frame["env_steps"].sum() == 3600
    assert set(frame["source"]) == {"env", "lesson"}


def test_a_run_that_has_only_begun_can_be_read(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "a", rounds=0, status="running"))
    assert run.status == "running"
    assert len(run["tasks"]["agent"]) == 0


def test_a_run_of_another_schema_is_refused_in_one_line(tmp_path: Path) -> None:
    for version in (1, 4, 99):

        def other(file: Any, version: int = version) -> None:
            file.attrs["schema_version"] = version

        folder = changed(write_run(tmp_path / str(version)), other)
        with pytest.raises(UsageError) as caught:
            load(folder)
        assert str(caught.value) == (
            f"{folder / 'run.h5'} has schema version {version}; this program reads version 7: "
            "run the job again, or use the canal-mpi that wrote it."
        )
        assert verify(folder / "run.h5") == [str(caught.value)]


# Files that are not ours, or not whole


def test_a_file_that_is_not_ours_is_a_usage_error(tmp_path: Path) -> None:
    for data in (b"", b"hello", b"\x89HDF\r\n\x1a\n" + bytes(600)):
        (tmp_path / "run.h5").write_bytes(data)
        with pytest.raises(DamagedData, match=r"is not a file of canal-mpi\.$") as caught:
            load(tmp_path)
        assert caught.value.code == UsageError.code
    write_hdf5(tmp_path / "run.h5", lambda file: None)
    with pytest.raises(UsageError, match="not the results of a run"):
        load(tmp_path)


def test_nothing_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no run\.h5"):
        load(tmp_path)
    with pytest.raises(UsageError, match="does not exist") as caught:
        load(tmp_path / "nothing")
    assert caught.value.code == 2


def test_folders_pipes_and_devices_are_refused_without_being_opened(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("folder", "pipe", "device")]
    for place in places:
        place.mkdir()
    (places[0] / "run.h5").mkdir()
    os.mkfifo(places[1] / "run.h5")
    (places[2] / "run.h5").symlink_to("/dev/zero")
    for place in places:
        for read in (load, tree, lambda folder: differences(folder, folder)):
            with pytest.raises(DamagedData, match=r"run\.h5 is not a regular file\.$") as caught:
                read(place)
            assert caught.value.code == 65
        assert verify(place / "run.h5") == [f"{place / 'run.h5'} is not a regular file."]


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a") / "run.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match="checksum"):
        load(path)


def test_a_dataset_of_an_unknown_name_is_not_read(tmp_path: Path) -> None:
    def unknown(file: Any) -> None:
        file.create_dataset("tasks/colour", (1 << 36,), "u1", chunks=(1 << 20,), compression="gzip")

    folder = changed(write_run(tmp_path / "a"), unknown)
    assert "colour" not in load(folder)["tasks"]
    with pytest.raises(DamagedData, match="declares over"):
        differences(folder, folder)


def test_a_file_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "a")
    size = (folder / "run.h5").stat().st_size
    monkeypatch.setattr(reader, "LIMIT", size)
    rows = np.zeros(size, dtype="<f8")

    def long(file: Any) -> None:
        for name in list(file["train"]):
            kind = file[f"train/{name}"].dtype
            replaced(f"train/{name}", data=rows.astype(kind), compression="gzip")(file)

    with pytest.raises(DamagedData, match=r"expected at most|declares over"):
        load(changed(folder, long))


def test_odd_attributes_do_no_harm(tmp_path: Path) -> None:
    def odd(file: Any) -> None:
        file.attrs["job"] = "this is = not [toml"
        file.attrs["versions"] = "[1, 2"
        file.attrs["status"] = np.bytes_(b"\xff\xfe")

    run = load(changed(write_run(tmp_path / "a"), odd))
    assert (run.job, run.versions, run.setting("seed", 3)) == ({}, {}, 3)


# Lessons of an earlier run


def test_odd_lesson_files_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, folder = played(20), tmp_path / "membuf" / "agent-0"
    about = {"donor": np.array([0]), "round": np.array([1]), "score": np.array([1.0])}
    about |= {"std_error": np.array([0.5]), "episodes": np.array([4])}
    whole = rows | about | {"task": np.array([b"x"], dtype="S64")}
    spaces = Spaces(rows["state"].shape[1:], rows["state"].dtype.str, 255)
    unknown = {"colour": np.zeros(1 << 21, dtype="u1")}  # more than the limit, but not asked for
    write_arrays(folder / "good.h5", whole | unknown, {})
    write_arrays(folder / "lacks.h5", rows | about, {})
    write_arrays(folder / "flat.h5", whole | {"state": np.zeros(3)}, {})
    write_arrays(folder / "score.h5", whole | {"score": np.array([b"high"])}, {})
    write_arrays(folder / "far.h5", whole | {"donor": np.array([1 << 40])}, {})
    write_arrays(folder / "large.h5", whole | {"state": np.zeros((1 << 20, 4), dtype="u1")}, {})
    (folder / "noise.h5").write_bytes(b"x" * 1000)
    (folder / "folder.h5").mkdir()
    os.mkfifo(folder / "pipe.h5")
    (folder / "device.h5").symlink_to("/dev/zero")
    monkeypatch.setattr(logger, "propagate", True)
    found = earlier_lessons(str(tmp_path), ("x",), spaces, 1 << 20)
    assert [lesson.offer.key for lesson, _ in found] == [(0, -1)]
    for name in ("lacks", "flat", "score", "far", "large", "noise", "folder", "pipe", "device"):
        assert f"{name}.h5 is not offered" in caplog.text
