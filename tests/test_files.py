"""Files that are never torn, run directories of one run, and HDF5 files with a checksum."""

import errno
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from canal_mpi.errors import DamagedData, DirectoryInUse, StorageError, UsageError
from canal_mpi.interfaces import Columns
from canal_mpi.results.files import (
    NAME,
    PARTS,
    RESULTS,
    ROWS_IN_CHUNK,
    RunDirectory,
    digest,
    file_name,
    read_arrays,
    release_locks,
    temporary_name,
    write_arrays,
    write_hdf5,
    write_whole,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Whole files


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "b" / "c.txt", b"hello")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == b"hello"
    assert names(tmp_path / "a" / "b") == {"c.txt"}


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for data in (b"a long first version", b"short", b""):
        write_whole(tmp_path / "f", data)
        assert (tmp_path / "f").read_bytes() == data


def test_what_a_killed_run_was_writing_is_cleared_away(tmp_path: Path) -> None:
    half = tmp_path / ".run.h5.nano-1-77.new"
    half.touch()
    RunDirectory(tmp_path).create(force=False, needed_bytes=0)
    assert not half.exists()


def test_two_writers_of_a_file_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    first = temporary_name("run.h5")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    second = temporary_name("run.h5")
    assert first != second and second.endswith("-7.new") and second.startswith(".run.h5.")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_the_old_file_stays_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_whole(tmp_path / "f", b"old")

    def fails(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(StorageError, match=r"can't write .*f: No space left"):
            write_whole(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == {"f"}


def test_a_disk_that_fills_up_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "f", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(StorageError, match="File too large"):
            write_whole(tmp_path / "f", b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == {"f"}


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="can't write"):
        write_whole(tmp_path / "file" / "inside", b"1")


# Names


def test_any_text_becomes_a_safe_name() -> None:
    safe = {
        "round-01-RoadRunner": "round-01-RoadRunner",
        "round-01-my/Env-v0": "round-01-my-Env-v0",
        "../../etc/passwd": "x..-..-etc-passwd",
        "..": "x..",
        "": "x",
        ".hidden": "x.hidden",
        "-rf": "x-rf",
        "a\nb\0c": "a-b-c",
        "é": "x-",
        "y" * 100: "y" * 64,
        "." * 100: "x" + "." * 63,
    }
    for text, name in safe.items():
        assert file_name(text) == name
        assert NAME.fullmatch(file_name(text))
        assert "/" not in name
        assert name not in (".", "..")


# Run directories


@pytest.fixture(autouse=True)
def unlocked() -> Iterator[None]:
    yield
    release_locks()


def create(path: Path, force: bool = False, needed: int = 0) -> None:
    RunDirectory(path).create(force, needed)


def test_a_new_or_an_empty_directory_is_taken(tmp_path: Path) -> None:
    create(tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run").is_dir()
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty")


def test_a_directory_where_only_a_start_failed_can_be_used(tmp_path: Path) -> None:
    for part in set(PARTS) - RESULTS:
        folder = tmp_path / f"with {part}"
        folder.mkdir()
        (folder / part).write_text("what a refused start left")
        create(folder)
        assert names(folder) == {".lock"}


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    for part in RESULTS:
        folder = tmp_path / f"with {part}"
        folder.mkdir()
        (folder / part).write_text("precious")
        with pytest.raises(UsageError, match="holds a run already; name another --out, or --force"):
            create(folder)
        assert (folder / part).read_text() == "precious"


def test_a_directory_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for force in (True, False):
        with pytest.raises(UsageError, match="is not empty and holds no run"):
            create(tmp_path, force)
        assert names(tmp_path) == {"thesis.tex"}


def test_force_removes_our_parts_and_nothing_else(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("1")
    run.mkdir()
    for part in ("logs", "membuf"):
        (run / part / "deep").mkdir(parents=True)
        (run / part / "deep" / "file").write_text("1")
    (run / "checkpoints").symlink_to(elsewhere)
    (run / "run.h5").write_text("1")
    (run / "notes.txt").write_text("mine")
    create(run, force=True)
    assert names(run) == {"notes.txt", ".lock"}
    assert names(elsewhere) == {"precious"}


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(UsageError, match="is a file; name a directory"):
        create(tmp_path / "file", force=True)


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    for path in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(StorageError, match="can't write to"):
            create(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="can't write to"):
        create(tmp_path / "run")


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"MB free; this run needs up to 4611686018427\.4 MB"):
        create(tmp_path / "run", needed=1 << 62)


def test_a_directory_where_a_start_failed_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        create(tmp_path / "run", needed=1 << 62)
    release_locks()
    create(tmp_path / "run")


def test_a_second_process_finds_the_directory_in_use(tmp_path: Path) -> None:
    create(tmp_path / "run")
    (tmp_path / "run" / "job.toml").write_text("precious")
    program = (
        "import sys; from pathlib import Path\n"
        "from canal_mpi.errors import DirectoryInUse\n"
        "from canal_mpi.results.files import RunDirectory\n"
        "try:\n    RunDirectory(Path(sys.argv[1])).create(True, 0)\n"
        "except DirectoryInUse as error:\n    print(error); sys.exit(error.code)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 73
    assert "is in use by another run; wait for it" in second.stdout
    assert (tmp_path / "run" / "job.toml").read_text() == "precious"
    release_locks()
    assert subprocess.run(command, timeout=60).returncode == 0


def test_two_runs_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    create(tmp_path)
    (tmp_path / "job.toml").write_text("1")
    with pytest.raises(DirectoryInUse):
        create(tmp_path, force=True)


# HDF5 files


def some_columns() -> Columns:
    rng = np.random.default_rng(1)
    return {
        "state": rng.integers(0, 256, (300, 4, 5)).astype(np.uint8),
        "reward": rng.normal(size=300).astype("<f4"),
        "kept": np.array([True, False]),
        "task": np.array([b"Krull", "é".encode()], dtype="S64"),
        "game-0/rng": np.array([2**64 - 1, 0], dtype="<u8"),
        "game-0/nothing": np.zeros((0, 3), dtype="<i8"),
        "nan": np.array([np.nan, np.inf]),
    }


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    columns = some_columns()
    write_arrays(tmp_path / "a.h5", columns, {"agent": 3})
    found = read_arrays(tmp_path / "a.h5")
    assert set(found) == set(columns)
    for name, column in columns.items():
        assert found[name].dtype.kind == column.dtype.kind
        assert found[name].dtype.itemsize == column.dtype.itemsize
        assert found[name].shape == column.shape
        assert found[name].tobytes() == column.tobytes()


def test_plain_h5py_opens_the_file(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.h5", some_columns(), {"agent": 3, "name": "Krüll"})
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert file.attrs["agent"] == 3
        assert file.attrs["name"] == "Krüll"
        assert file["task"].asstr()[1] == "é"
        assert file["game-0/rng"][0] == 2**64 - 1
        assert file["state"].compression == "gzip"
        assert file["state"].shape == (300, 4, 5)


def test_long_arrays_are_cut_into_chunks(tmp_path: Path) -> None:
    rows = ROWS_IN_CHUNK + 1
    write_arrays(tmp_path / "a.h5", {"x": np.arange(2 * rows).reshape(rows, 2)}, {})
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert file["x"].chunks == (ROWS_IN_CHUNK, 1)
    assert np.array_equal(read_arrays(tmp_path / "a.h5")["x"].ravel(), np.arange(2 * rows))


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        write_arrays(tmp_path / name, some_columns(), {"agent": 1})
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    def fill(file: Any) -> None:
        file.create_dataset("x", data=np.arange(10, dtype=np.uint8))

    write_hdf5(tmp_path / "small.h5", fill)
    return tmp_path / "small.h5"


def undetected(path: Path, places: range) -> list[int]:
    """Places where a changed byte goes unnoticed."""
    whole, missed = path.read_bytes(), []
    spoilt = path.with_name("spoilt.h5")
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        spoilt.write_bytes(data)
        try:
            read_arrays(spoilt)
            missed.append(place)
        except DamagedData:
            pass
    return missed


def test_every_changed_byte_is_found(small: Path) -> None:
    assert read_arrays(small)["x"].tolist() == list(range(10))
    assert undetected(small, range(small.stat().st_size)) == []


def test_every_truncation_is_found(small: Path) -> None:
    whole, cut = small.read_bytes(), small.with_name("cut.h5")
    edges = (0, 1, 7, 8, 16, 47, 48, 511, 512, 513, len(whole) - 1)
    for size in {*edges, *range(600, len(whole), 97)}:
        cut.write_bytes(whole[:size])
        with pytest.raises(DamagedData):
            read_arrays(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(DamagedData, match="checksum does not match"):
        read_arrays(cut)


def test_a_damaged_file_is_not_opened(small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[-1] ^= 1
    small.write_bytes(data)
    with pytest.raises(DamagedData, match=r"small\.h5 is damaged"):
        read_arrays(small)


def test_a_file_of_others_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(DamagedData, match="is not a file of canal-mpi"):
        read_arrays(tmp_path / "other.h5")


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"can't read .*No such file"):
        read_arrays(tmp_path / "none.h5")


def test_plain_arrays_are_read_like_packed_ones(tmp_path: Path) -> None:
    columns = {
        "a/b/c": np.arange(300, dtype="<i4").reshape(100, 3)[:, ::2],
        "a/none": np.zeros((0, 4), dtype="<f4"),
        "scalar": np.array(2.5),
        "text": np.array([b"Krull", b"x"], dtype="S64"),
        "flag": np.array([True, False]),
    }
    for pack in (True, False):
        write_arrays(tmp_path / "a.h5", columns, {"agent": 1}, pack)
        found = read_arrays(tmp_path / "a.h5")
        assert found.keys() == columns.keys()
        for name, column in columns.items():
            assert found[name].dtype == column.dtype and found[name].shape == column.shape
            assert np.array_equal(found[name], column)


def test_writing_arrays_takes_little_memory_beside_them(tmp_path: Path) -> None:
    """A replay buffer may be most of what a small device has."""
    columns = {"state": np.ones((1 << 12, 1 << 12), dtype=np.uint8)}
    tracemalloc.start()
    try:
        write_arrays(tmp_path / "a.h5", columns, {}, pack=False)
        told = digest(columns)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert digest(read_arrays(tmp_path / "a.h5")) == told
