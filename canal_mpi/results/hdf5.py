"""HDF5 files built in memory, with their SHA-256 in front; any HDF5 reader opens them."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from canal_mpi.errors import DamagedData, StorageError
from canal_mpi.results.files import write_whole
from canal_mpi.types import Columns

BLOCK = 512  # HDF5 leaves a block of this size in front to its user
MAGIC = b"CANALH5\n"
ROWS_IN_CHUNK = 16384
SCALAR, WORDS = h5py.h5s.create(h5py.h5s.SCALAR), h5py.string_dtype("utf-8")
TEXTS = h5py.h5t.py_create(WORDS, logical=True)
WITH_GROUPS = h5py.h5p.create(h5py.h5p.LINK_CREATE)  # a name may lead through new groups
WITH_GROUPS.set_create_intermediate_group(True)
UNTIMED = h5py.h5p.create(h5py.h5p.DATASET_CREATE)  # the same content is the same bytes
UNTIMED.set_obj_track_times(False)
MOST = 1 << 36  # bytes of arrays in a file
FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}


def image(fill: Callable[[Any], None]) -> bytes:
    """The bytes of an HDF5 file that `fill` writes, with the checksum in its user block."""
    memory = io.BytesIO()
    with h5py.File(memory, "w", userblock_size=BLOCK, libver=("earliest", "v110")) as file:
        fill(file)
    body = memory.getvalue()[BLOCK:]
    front = MAGIC + len(body).to_bytes(8, "little") + sha256(body).digest()
    return front.ljust(BLOCK, b"\0") + body


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, or StorageError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}.") from error


def checked_image(path: Path) -> bytes:
    """The bytes of a file that `image` made; DamagedData if a single bit differs."""
    data = read_bytes(path)
    check_image(data, str(path))
    return data


def check_image(data: bytes, where: str) -> None:
    """DamagedData unless these are the bytes that `image` made."""
    body = memoryview(data)[BLOCK:]
    if data[:8] != MAGIC:
        raise DamagedData(f"{where} is not a file of canal-mpi.")
    length, digest, rest = data[8:16], data[16:48], data[48:BLOCK]
    whole = int.from_bytes(length, "little") == len(body) and not any(rest)
    if not whole or sha256(body).digest() != digest:
        raise DamagedData(f"{where} is damaged: its checksum does not match.")


def write_arrays(path: Path, columns: Columns, attributes: dict[str, Any]) -> None:
    """A file of named arrays."""
    write_whole(path, array_image(columns, attributes))


def array_image(columns: Columns, attributes: dict[str, Any], pack: bool = True) -> bytes:
    """The bytes of a file of named arrays; unpacked they take a tenth of the time to write."""

    def fill(file: Any) -> None:
        file.attrs.update(attributes)
        if not pack:
            return _write_plain(file, columns)
        for name, column in columns.items():
            write_dataset(file, name, column)

    return image(fill)


def _write_plain(file: Any, columns: Columns) -> None:
    """Many arrays as they are, by HDF5's own calls: h5py's take a quarter of a millisecond each."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    for name, column in columns.items():
        kind, array = h5py.h5t.py_create(column.dtype, logical=True), np.asarray(column, order="C")
        space = h5py.h5s.create_simple(array.shape) if array.ndim else SCALAR
        dataset = h5py.h5d.create(file.id, name.encode(), kind, space, lcpl=links)
        if array.size:
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)


def read_arrays(path: Path, limit: int = MOST) -> Columns:
    """The arrays of a file that `write_arrays` made, checked; they take at most `limit` bytes."""
    return parse_arrays(checked_image(path), str(path), limit)


def parse_arrays(data: bytes, where: str, limit: int = MOST) -> Columns:
    """The arrays in the bytes of a file whose checksum was right. That proves no good will."""
    with _opened(data, where) as file:
        return arrays_in(file, where, limit)


def arrays_in(file: Any, where: str, limit: int) -> Columns:
    """The arrays of an open file, each looked at before it is read."""
    found: Columns = {}
    total = 0

    def visit(name: str, item: Any) -> None:
        nonlocal total
        if isinstance(item, h5py.Dataset):
            total += proper_bytes(name, item, where)
            if total > limit:
                raise DamagedData(f"{where} announces over {limit} bytes of arrays.")
            found[name] = np.asarray(item[()])

    file.visititems(visit)  # links to elsewhere are not followed
    return found


def proper_bytes(name: str, item: Any, where: str) -> int:
    """The size of a dataset that lies in its file, plainly; DamagedData for any other."""
    if item.dtype.kind not in "biufS" or flaw(item):
        raise DamagedData(f"{where}: '{name}' is not a plain array in this file.")
    return int(item.size) * int(item.dtype.itemsize)


def flaw(item: Any) -> str:
    """Why a dataset may not be read: it reads other files, or has filters that are not ours."""
    if item.is_virtual or item.external is not None:
        return "is stored in other files"
    plist = item.id.get_create_plist()
    filters = {plist.get_filter(k)[0] for k in range(plist.get_nfilters())}
    return "" if filters <= FILTERS else "is packed in an unknown way"


def parse_attributes(data: bytes, where: str) -> dict[str, Any]:
    """The attributes of a file whose checksum was right."""
    with _opened(data, where) as file:
        return dict(file.attrs)


@contextmanager
def _opened(data: bytes, where: str) -> Iterator[Any]:
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            yield file
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise DamagedData(f"{where} can't be read as HDF5: {error}.") from error


def write_dataset(group: Any, name: str, column: Any, **attributes: Any) -> None:
    """One array; long ones in chunks that hold one byte place of many rows, which pack well.

    Short ones, and texts beside them, go by the low level of h5py, which takes half as long.
    """
    if column.dtype.kind == "S":
        column = column.astype(h5py.string_dtype("utf-8", column.dtype.itemsize))
    if column.ndim and column.size > 64:
        rows = min(len(column), ROWS_IN_CHUNK)
        chunks = (rows, *(1 for _ in column.shape[1:2]), *column.shape[2:])
        options = {"chunks": chunks, "compression": "gzip", "compression_opts": 1, "shuffle": True}
        dataset = group.create_dataset(name, data=column, **options)
    else:
        column = np.ascontiguousarray(column).reshape(column.shape)
        space = h5py.h5s.create_simple(column.shape) if column.ndim else SCALAR
        kind = h5py.h5t.py_create(column.dtype, logical=True)
        made = h5py.h5d.create(group.id, name.encode(), kind, space, UNTIMED, WITH_GROUPS)
        if column.size:
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, column)
        dataset = h5py.Dataset(made)
    for key, value in attributes.items():
        if isinstance(value, str):
            mark = h5py.h5a.create(dataset.id, key.encode(), TEXTS, SCALAR)
            mark.write(np.array(value, dtype=WORDS))
        else:
            dataset.attrs[key] = value
