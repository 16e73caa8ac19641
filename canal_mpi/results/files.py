"""Files that are never torn: a new one is written beside the old and takes its place at once."""

import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from canal_mpi.errors import DirectoryInUse, StorageError, UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESULTS = {"run.h5", "checkpoints", "membuf"}  # a folder with one of these holds a run
PARTS = ("job.toml", "run.h5", "events.jsonl", "status.json", "logs", "checkpoints", "membuf")


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by these bytes; after a crash the old or the new one is there, whole."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(
            f"can't write {path} ({len(data)} bytes): {error.strerror}; "
            "what was there before is whole."
        ) from error


def temporary_name(name: str) -> str:
    """What a file is called until it is whole; two writers of it, on any host, don't meet."""
    return f".{name[:120]}.{socket.gethostname()[:60]}-{os.getpid()}.new"


def file_name(text: str) -> str:
    """A text as a safe name of a file."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:64]
    return name if NAME.fullmatch(name) else f"x{name}"[:64]


class RunDirectory:
    """The folder of one run, locked while the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def create(self, force: bool, needed_bytes: int) -> None:
        """Make the folder, or refuse one that holds a run already."""
        try:
            self._make(force)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise StorageError(f"can't write to {self.path}: {error.strerror}.") from error
        if free < needed_bytes:
            raise StorageError(
                f"{self.path} has {free / 1e6:.1f} MB free; this run needs up to "
                f"{needed_bytes / 1e6:.1f} MB: free some, or name another --out."
            )

    def reopen(self) -> None:
        """Take the folder of a run that is to go on; it may be missing on this host."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"can't write to {self.path}: {error.strerror}.") from error
        self._take_lock()
        self._clear_halves()

    def give_back(self) -> None:
        """Undo `reopen` where there was no run: leave no empty folder behind."""
        with suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()

    def _make(self, force: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file; name a directory.")
        self.path.mkdir(parents=True, exist_ok=True)
        there = {e.name for e in self.path.iterdir() if not (e.match(".*.new") and e.is_file())}
        if there - {*PARTS, ".lock"} and not there & RESULTS:
            raise UsageError(f"--out {self.path} is not empty and holds no run; name another.")
        self._take_lock()
        if there & RESULTS and not force:
            raise UsageError(
                f"{self.path} holds a run already; name another --out, or --force to replace it."
            )
        self._clear()  # also what a start that failed has left

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        try:
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(f"can't write to {self.path}: {error.strerror}.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise DirectoryInUse(
                f"{self.path} is in use by another run; wait for it, or name another --out."
            ) from error
        self._lock = lock

    def _clear(self) -> None:
        """Remove what a run leaves, and nothing else."""
        self._clear_halves()
        for part in PARTS:
            path = self.path / part
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _clear_halves(self) -> None:
        """Remove what a killed run was writing here."""
        for part in PARTS:
            for rest in self.path.glob(f".{part}.*new"):
                rest.unlink(missing_ok=True)
