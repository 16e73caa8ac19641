"""Files that are never torn, and run directories that belong to one run."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from canal_mpi.errors import DirectoryInUse, StorageError, UsageError
from canal_mpi.results.files import (
    NAME,
    PARTS,
    RESULTS,
    RunDirectory,
    file_name,
    temporary_name,
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


def test_a_large_file_survives_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, data = os.write, os.urandom(100_000)
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, bytes(view[:999])))
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


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_the_old_file_stays_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_whole(tmp_path / "f", b"old")

    def fails(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(StorageError, match=r"can't write .*f \(3 bytes\): No space left"):
            write_whole(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == {"f"}


def test_a_disk_that_fills_up_half_way_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "f", b"old")
    write, calls = os.write, list[int]()

    def fills_up(fd: int, view: memoryview) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, view[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fills_up)
        with pytest.raises(StorageError):
            write_whole(tmp_path / "f", b"x" * 100)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == {"f"}


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="can't write"):
        write_whole(tmp_path / "file" / "inside", b"1")


# Names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("round-01-RoadRunner", "round-01-RoadRunner"),
        ("round-01-my/Env-v0", "round-01-my-Env-v0"),
        ("../../etc/passwd", "x..-..-etc-passwd"),
        ("..", "x.."),
        ("", "x"),
        (".hidden", "x.hidden"),
        ("-rf", "x-rf"),
        ("a\nb\0c", "a-b-c"),
        ("é", "x-"),
        ("y" * 100, "y" * 64),
        ("." * 100, "x" + "." * 63),
    ],
)
def test_any_text_becomes_a_safe_name(text: str, name: str) -> None:
    assert file_name(text) == name
    assert NAME.fullmatch(file_name(text))
    assert "/" not in name
    assert name not in (".", "..")


# Run directories


@pytest.fixture
def opened() -> Iterator[list[RunDirectory]]:
    """Directories whose locks are given back at the end."""
    directories: list[RunDirectory] = []
    yield directories
    for directory in directories:
        release(directory)


def release(directory: RunDirectory) -> None:
    if directory._lock is not None:
        os.close(directory._lock)
        directory._lock = None


def create(path: Path, opened: list[RunDirectory], force: bool = False, needed: int = 0) -> None:
    opened.append(RunDirectory(path))
    opened[-1].create(force, needed)


def test_a_new_or_an_empty_directory_is_taken(tmp_path: Path, opened: list[RunDirectory]) -> None:
    create(tmp_path / "new" / "run", opened)
    assert (tmp_path / "new" / "run").is_dir()
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty", opened)


@pytest.mark.parametrize("part", sorted(set(PARTS) - RESULTS))
def test_a_directory_where_only_a_start_failed_can_be_used(
    tmp_path: Path, opened: list[RunDirectory], part: str
) -> None:
    (tmp_path / part).write_text("what a refused start left")
    create(tmp_path, opened)
    assert not (tmp_path / part).exists()


@pytest.mark.parametrize("part", sorted(RESULTS))
def test_a_directory_that_holds_a_run_is_refused(
    tmp_path: Path, opened: list[RunDirectory], part: str
) -> None:
    (tmp_path / part).write_text("precious")
    with pytest.raises(UsageError, match="holds a run already; name another --out, or --force"):
        create(tmp_path, opened)
    assert (tmp_path / part).read_text() == "precious"


@pytest.mark.parametrize("force", [True, False])
def test_a_directory_of_other_things_is_refused(
    tmp_path: Path, opened: list[RunDirectory], force: bool
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not empty and holds no run"):
        create(tmp_path, opened, force)
    assert names(tmp_path) == {"thesis.tex"}


def test_force_removes_our_parts_and_nothing_else(
    tmp_path: Path, opened: list[RunDirectory]
) -> None:
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
    create(run, opened, force=True)
    assert names(run) == {"notes.txt", ".lock"}
    assert names(elsewhere) == {"precious"}


def test_a_file_is_no_directory(tmp_path: Path, opened: list[RunDirectory]) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(UsageError, match="is a file; name a directory"):
        create(tmp_path / "file", opened, force=True)


def test_a_place_where_nothing_can_be_written_is_refused(
    tmp_path: Path, opened: list[RunDirectory]
) -> None:
    (tmp_path / "file").write_text("1")
    for path in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(StorageError, match="can't write to"):
            create(path, opened)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(
    tmp_path: Path, opened: list[RunDirectory]
) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="can't write to"):
        create(tmp_path / "run", opened)


def test_a_disk_without_room_is_refused(tmp_path: Path, opened: list[RunDirectory]) -> None:
    with pytest.raises(StorageError, match=r"MB free; this run needs up to 4611686018427\.4 MB"):
        create(tmp_path / "run", opened, needed=1 << 62)


def test_a_directory_where_a_start_failed_can_be_used(
    tmp_path: Path, opened: list[RunDirectory]
) -> None:
    with pytest.raises(StorageError):
        create(tmp_path / "run", opened, needed=1 << 62)
    release(opened[0])
    create(tmp_path / "run", opened)


def test_a_second_process_finds_the_directory_in_use(
    tmp_path: Path, opened: list[RunDirectory]
) -> None:
    create(tmp_path / "run", opened)
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
    release(opened[0])
    assert subprocess.run(command, timeout=60).returncode == 0


def test_two_runs_of_one_process_do_not_share_a_directory(
    tmp_path: Path, opened: list[RunDirectory]
) -> None:
    create(tmp_path, opened)
    (tmp_path / "job.toml").write_text("1")
    with pytest.raises(DirectoryInUse):
        create(tmp_path, opened, force=True)
