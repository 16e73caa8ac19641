"""HDF5 files with a checksum in front."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from canal_mpi.errors import DamagedData, StorageError
from canal_mpi.results.hdf5 import (
    BLOCK,
    ROWS_IN_CHUNK,
    checked_image,
    image,
    read_arrays,
    write_arrays,
)
from canal_mpi.types import Columns

CHECKED = 48  # magic, length and digest


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

    (tmp_path / "small.h5").write_bytes(image(fill))
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
            checked_image(spoilt)
            missed.append(place)
        except DamagedData:
            pass
    return missed


def test_every_changed_byte_is_found(small: Path) -> None:
    size = small.stat().st_size
    assert checked_image(small) == small.read_bytes()
    assert undetected(small, range(CHECKED)) == []
    assert undetected(small, range(BLOCK, size)) == []


def test_every_changed_byte_of_the_first_block_is_found(small: Path) -> None:
    assert undetected(small, range(CHECKED, BLOCK)) == []


def test_every_truncation_is_found(small: Path) -> None:
    whole, cut = small.read_bytes(), small.with_name("cut.h5")
    for size in {
        0,
        1,
        7,
        8,
        16,
        47,
        48,
        511,
        512,
        513,
        *range(600, len(whole), 97),
        len(whole) - 1,
    }:
        cut.write_bytes(whole[:size])
        with pytest.raises(DamagedData):
            checked_image(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(DamagedData, match="checksum does not match"):
        checked_image(cut)


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


def test_plain_arrays_are_read_like_packed_ones() -> None:
    from canal_mpi.results.hdf5 import array_image, parse_arrays

    columns = {
        "a/b/c": np.arange(300, dtype="<i4").reshape(100, 3)[:, ::2],
        "a/none": np.zeros((0, 4), dtype="<f4"),
        "scalar": np.array(2.5),
        "text": np.array([b"Krull", b"x"], dtype="S64"),
        "flag": np.array([True, False]),
    }
    for pack in (True, False):
        found = parse_arrays(array_image(columns, {"agent": 1}, pack), "it")
        assert found.keys() == columns.keys()
        for name, column in columns.items():
            assert found[name].dtype == column.dtype and found[name].shape == column.shape
            assert np.array_equal(found[name], column)
