"""Files of a run: never torn, and read only after their kind, size and checksum were checked.

HDF5 files have their SHA-256 in front; any HDF5 reader opens them. h5py is
loaded by the first function that needs it: `canal-mpi ls` and `--help` do without.
"""

import fcntl
import hashlib
import io
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from canal_mpi.errors import DamagedData, DirectoryInUse, StorageError, UsageError
from canal_mpi.interfaces import Columns

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESULTS = {"run.h5", "checkpoints", "membuf"}  # a folder with one of these holds a run
PARTS = ("job.toml", "run.h5", "events.jsonl", "status.json", "logs", "checkpoints", "membuf")
BLOCK = 512  # HDF5 leaves a block of this size in front to its user
MAGIC = b"CANALH5\n"
ROWS_IN_CHUNK = 16384
MOST = 1 << 36  # bytes of a file, and of the arrays in it
OVERHEAD = 1 << 20  # bytes of a file beside its arrays
FREE, RATIO = 100 << 20, 100  # bytes of arrays that any file may hold, and more per byte of it
TEXT_FACTOR = 5  # texts take so many times their bytes when they are decoded
MOST_ATTRIBUTES, MOST_ITEMS, DEEPEST = 1 << 24, 20_000, 8  # bytes, links, groups in groups
UNREADABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, MemoryError, zlib.error)
MOST_TEXTS = 16  # of one attribute: their lengths are known only after they were read


class ForeignFile(DamagedData):
    """A file that another program wrote: the user named the wrong one."""

    code = UsageError.code


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by these bytes; after a crash either the old or the new one is there."""
    replace_file(path, lambda file: file.write(data))


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file by what `write` writes; after a crash either the old or the new is there."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
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
            f"can't write {path}: {error.strerror or error}; what was there before is whole."
        ) from error


def temporary_name(name: str) -> str:
    """The name of a file until it is whole; different for every process on every host."""
    return f".{name[:120]}.{socket.gethostname()[:60]}-{os.getpid()}.new"


def file_name(text: str) -> str:
    """A text as a safe name of a file."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:64]
    return name if NAME.fullmatch(name) else f"x{name}"[:64]


_LOCKS: list[int] = []  # of this process


def release_locks() -> None:
    """Let others have the folders of this process's runs; a program's end does the same."""
    while _LOCKS:
        os.close(_LOCKS.pop())


class RunDirectory:
    """The folder of one run, locked while it is running."""

    def __init__(self, path: Path) -> None:
        self.path, self.existed = path, os.access(path, os.F_OK)

    def create(self, force: bool, needed_bytes: int) -> None:
        """Make the folder, or refuse one that holds a run already."""
        with self._writable():
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"--out {self.path} is a file; name a directory.")
            self.path.mkdir(parents=True, exist_ok=True)
            there = {e.name for e in self.path.iterdir() if not (e.match(".*.new") and e.is_file())}
            if there - {*PARTS, ".lock"} and not there & RESULTS:
                raise UsageError(f"--out {self.path} is not empty and holds no run; name another.")
            self._take_lock()
            if there & RESULTS and not force:
                words = "holds a run already; name another --out, or --force to replace it."
                raise UsageError(f"{self.path} {words}")
            self._clear()  # also what a start that failed has left
            free = shutil.disk_usage(self.path).free
        if free < needed_bytes:
            self.discard()
            raise StorageError(
                f"{self.path} has {free / 1e6:.1f} MB free; this run needs up to "
                f"{needed_bytes / 1e6:.1f} MB: free some, or name another --out."
            )

    def reopen(self) -> None:
        """Take the folder of a run that is resumed; it may be missing on this host."""
        with self._writable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._remove_unfinished()
            for name in PARTS:
                part, kind = self.path / name, "regular file" if "." in name else "folder"
                fits = part.is_file() if "." in name else part.is_dir()
                if (part.exists() or part.is_symlink()) and not fits:
                    raise DamagedData(f"{part} is not a {kind}; remove it.")

    def discard(self) -> None:
        """Undo `create`: a start that failed leaves nothing behind."""
        with suppress(OSError):
            self._clear()
        self.give_back()

    def give_back(self) -> None:
        """Undo `reopen` where there was no run: leave no empty folder behind."""
        with suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                if not self.existed:
                    self.path.rmdir()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"can't write to {self.path}: {error.strerror}.") from error

    def _take_lock(self) -> None:
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise DirectoryInUse(
                f"{self.path} is in use by another run; wait for it, or name another --out."
            ) from error
        _LOCKS.append(lock)

    def _clear(self) -> None:
        """Remove what a run leaves, and nothing else."""
        self._remove_unfinished()
        for part in PARTS:
            path = self.path / part
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _remove_unfinished(self) -> None:
        """Remove what a killed run was writing here."""
        for part in PARTS:
            for rest in self.path.glob(f".{part}.*new"):
                rest.unlink(missing_ok=True)


# ── reading ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _regular(path: Path, limit: int) -> Iterator[tuple[io.BufferedReader, int]]:
    """An open file and its size; folders, pipes, devices and too large files are not opened."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise DamagedData(f"{path} is not a regular file.")
        if about.st_size > limit:
            raise DamagedData(f"{path} has {about.st_size} bytes; expected at most {limit}.")
        with path.open("rb") as file:
            yield file, about.st_size
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StorageError(f"can't read {path}: {reason}.") from error


def read_bytes(path: Path, limit: int = MOST) -> bytes:
    """The bytes of a regular file of at most `limit`."""
    with _regular(path, limit) as (file, size):
        return file.read(size)


def _verify(file: io.BufferedReader, size: int, path: Path) -> None:
    front = file.read(BLOCK)
    if front[:8] != MAGIC:
        raise ForeignFile(f"{path} is not a file of canal-mpi.")
    length, sha256, rest = int.from_bytes(front[8:16], "little"), front[16:48], front[48:]
    torn = length != size - BLOCK or any(rest)
    if torn or hashlib.file_digest(file, "sha256").digest() != sha256:
        raise DamagedData(f"{path} is damaged: its checksum does not match.")


Wanted = Callable[[str], bool]


@contextmanager
def opened(path: Path, limit: int = MOST) -> Iterator[Any]:
    """An h5py.File, its checksum verified; whatever h5py can't read becomes DamagedData."""
    import h5py

    with _regular(path, limit) as (file, size):
        _verify(file, size, path)
        try:
            with h5py.File(file, "r") as content:
                yield content
        except UNREADABLE as error:
            raise DamagedData(f"{path} can't be read as HDF5: {error}.") from error


def read(
    path: Path, limit: int = MOST, wanted: Wanted = lambda name: True
) -> tuple[dict[str, Any], Columns]:
    """The attributes of an HDF5 file, and its arrays with wanted names: at most `limit` bytes."""
    with opened(path, limit + OVERHEAD) as file:
        arrays = _arrays(file, path, min(limit, FREE + RATIO * path.stat().st_size), wanted)
        return attributes_of(file, path), arrays


def read_attributes(path: Path) -> dict[str, Any]:
    """The attributes of a file, its checksum verified."""
    with opened(path) as file:
        return attributes_of(file, path)


def read_arrays(path: Path, limit: int = MOST, wanted: Wanted = lambda name: True) -> Columns:
    """The arrays with wanted names of a file of `write_arrays`; they take at most `limit` bytes."""
    return read(path, limit, wanted)[1]


def read_finite(path: Path, limit: int = MOST, prefix: str = "") -> Columns:
    """All arrays of a file; DamagedData where one under the prefix holds NaN or infinity."""
    columns = read_arrays(path, limit)
    for name, column in columns.items():
        if name.startswith(prefix) and column.dtype.kind == "f" and not np.isfinite(column).all():
            raise DamagedData(f"{path}: {name} holds a number that is not finite.")
    return columns


def _arrays(file: Any, path: Path, limit: int, wanted: Wanted) -> Columns:
    """The arrays of an open file; a right checksum does not make them harmless."""
    import h5py

    chosen = {
        name: item
        for name, item in contents(file, path).items()
        if isinstance(item, h5py.Dataset) and wanted(name)
    }
    left = limit
    for name, item in chosen.items():
        if why := _flaw(item):
            raise DamagedData(f"{path}: '{name}' {why}.")
        left -= item.size * item.dtype.itemsize * (TEXT_FACTOR if item.dtype.kind == "S" else 1)
        if left < 0:
            raise DamagedData(f"{path} declares over {limit} bytes of arrays.")
    for name, item in chosen.items():
        _check_packing(item, f"{path}: '{name}'")
    return {name: item[()] for name, item in chosen.items()}


def contents(file: Any, path: Path) -> dict[str, Any]:
    """Every group and dataset of an open file by its name; links are not followed."""
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        found[name] = item
        if len(found) > MOST_ITEMS or name.count("/") > DEEPEST:
            raise DamagedData(f"{path} has too many groups, or too deep ones.")

    file.visititems(visit)
    return found


def _flaw(item: Any) -> str:
    """Why a dataset may not be read: other files, unknown filters, huge chunks, odd types."""
    from h5py import h5z

    if item.is_virtual or item.external is not None:
        return "is stored in other files"
    plist = item.id.get_create_plist()
    filters = {plist.get_filter(k)[0] for k in range(plist.get_nfilters())}
    if not filters <= {h5z.FILTER_DEFLATE, h5z.FILTER_SHUFFLE}:
        return "is packed in an unknown way"
    if item.dtype.kind not in "biufS":
        return f"has the type {item.dtype}"
    chunk = prod(item.chunks or ())  # it is unpacked as a whole, however little is read
    return "has chunks that are larger than itself" if chunk > max(item.size, BLOCK) else ""


def _check_packing(item: Any, what: str) -> None:
    """Refuse chunks that would unpack to more than their size: HDF5 itself has no limit."""
    if not item.compression:
        return
    size = prod(item.chunks) * item.dtype.itemsize
    for k in range(item.id.get_num_chunks()):
        about = item.id.get_chunk_info(k)
        if about.size > size + size // 100 + BLOCK:  # what deflate can't pack grows a little
            raise DamagedData(f"{what} has chunks that are larger than itself.")
        skipped, packed = item.id.read_direct_chunk(about.chunk_offset)
        if skipped or len(zlib.decompressobj().decompress(packed, size + 1)) != size:
            raise DamagedData(f"{what} has chunks that don't unpack to their size.")


def attributes_of(item: Any, where: Path | str) -> dict[str, Any]:
    """The attributes of an open file or dataset, their sizes checked before they are read."""
    if len(item.attrs) > MOST_ITEMS:
        raise DamagedData(f"{where} has {len(item.attrs)} attributes.")
    left, found = MOST_ATTRIBUTES, {}
    for name in item.attrs:
        about = item.attrs.get_id(name)
        count = about.get_space().get_simple_extent_npoints()
        left -= about.dtype.itemsize * count
        if left >= 0 and (about.dtype.kind != "O" or count <= MOST_TEXTS):
            found[name] = item.attrs[name]
            left -= len(found[name]) if isinstance(found[name], str) else 0
        if left < 0 or name not in found:
            raise DamagedData(f"{where} declares too many bytes of attributes.")
    return found


# ── writing HDF5 ───────────────────────────────────────────────────────────────────────────────


def write_hdf5(path: Path, fill: Callable[[Any], None]) -> None:
    """Replace a file by HDF5 that `fill` writes, with the checksum in its user block.

    It is made on the disk: a replay buffer may be most of a small device's memory.
    """
    import h5py

    def write(file: BinaryIO) -> None:
        with h5py.File(file, "w", userblock_size=BLOCK, libver=("earliest", "v110")) as made:
            fill(made)
        length = file.seek(0, os.SEEK_END) - BLOCK
        file.seek(BLOCK)
        sha256 = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
        file.seek(0)
        file.write((MAGIC + length.to_bytes(8, "little") + sha256).ljust(BLOCK, b"\0"))

    replace_file(path, write)


def write_arrays(
    path: Path,
    columns: Columns,
    attributes: dict[str, Any],
    pack: bool = True,
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """A file of named arrays; `about`: attributes of arrays and groups.

    Long arrays are packed, in chunks that hold one byte column of many rows; unpacked they take a
    tenth of the time to write.
    """
    import h5py

    def fill(file: Any) -> None:
        file.attrs.update(attributes)
        for name, column in columns.items():
            options: dict[str, Any] = {}
            if column.dtype.kind == "S":
                column = column.astype(h5py.string_dtype("utf-8", column.dtype.itemsize))
            if pack and column.ndim and column.size > 64:
                rows = min(len(column), ROWS_IN_CHUNK)
                chunks = (rows, *(1 for _ in column.shape[1:2]), *column.shape[2:])
                options = {"chunks": chunks, "compression": "gzip", "compression_opts": 1}
                options["shuffle"] = True
            file.create_dataset(name, data=column, **options)
        for name, marks in (about or {}).items():
            file[name].attrs.update(marks)

    write_hdf5(path, fill)


def digest(columns: Columns) -> str:
    """SHA-256 of the names, types, shapes and values of arrays, however a file packs them."""
    total = hashlib.sha256()
    for name, column in sorted(columns.items()):
        total.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
        total.update(np.ascontiguousarray(column).data)
    return total.hexdigest()
