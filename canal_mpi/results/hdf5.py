"""HDF5 files built in memory, with their SHA-256 in front; any HDF5 reader opens them."""

import io
from collections.abc import Callable
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


def image(fill: Callable[[Any], None]) -> bytes:
    """The bytes of an HDF5 file that `fill` writes, with the checksum in its user block."""
    memory = io.BytesIO()
    with h5py.File(memory, "w", userblock_size=BLOCK, libver=("earliest", "v110")) as file:
        fill(file)
    body = memory.getvalue()[BLOCK:]
    front = MAGIC + len(body).to_bytes(8, "little") + sha256(body).digest()
    return front.ljust(BLOCK, b"\0") + body


def checked_image(path: Path) -> bytes:
    """The bytes of a file that `image` made; DamagedData if a single bit differs."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}.") from error
    body = memoryview(data)[BLOCK:]
    if data[:8] != MAGIC:
        raise DamagedData(f"{path} is not a file of canal-mpi.")
    length, digest, rest = data[8:16], data[16:48], data[48:BLOCK]
    whole = int.from_bytes(length, "little") == len(body) and not any(rest)
    if not whole or sha256(body).digest() != digest:
        raise DamagedData(f"{path} is damaged: its checksum does not match.")
    return data


def write_arrays(path: Path, columns: Columns, attributes: dict[str, Any]) -> None:
    """A file of named arrays."""

    def fill(file: Any) -> None:
        file.attrs.update(attributes)
        for name, column in columns.items():
            write_dataset(file, name, column)

    write_whole(path, image(fill))


def read_arrays(path: Path) -> Columns:
    """The arrays of a file that `write_arrays` made, checked."""
    with h5py.File(io.BytesIO(checked_image(path)), "r") as file:
        found: Columns = {}
        file.visititems(
            lambda name, item: (
                found.update({name: np.asarray(item[()])})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


def write_dataset(group: Any, name: str, column: Any, **attributes: Any) -> None:
    """One array; long ones in chunks that hold one byte place of many rows, which pack well."""
    if column.dtype.kind == "S":
        column = column.astype(h5py.string_dtype("utf-8", column.dtype.itemsize))
    options: dict[str, Any] = {}
    if column.ndim and column.size > 64:
        rows = min(len(column), ROWS_IN_CHUNK)
        chunks = (rows, *(1 for _ in column.shape[1:2]), *column.shape[2:])
        options = {"chunks": chunks, "compression": "gzip", "compression_opts": 1, "shuffle": True}
    dataset = group.create_dataset(name, data=column, **options)
    for key, value in attributes.items():
        dataset.attrs[key] = value
