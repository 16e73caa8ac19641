"""Words that must not be in the repository, and files that were made to harm."""

import os
import re
import tracemalloc
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from canal_mpi.errors import DamagedData
from canal_mpi.results.files import (
    read_arrays,
    read_attributes,
    read_bytes,
    write_arrays,
    write_hdf5,
)

ROOT = Path(__file__).parent.parent
FORBIDDEN = re.compile(
    r"^\s*(import|from)\s+(pickle|dill|cloudpickle|marshal|shelve)\b|\beval\(|\bexec\(|"
    r"\bos\.system\(|shell\s*=\s*True|\btorch\.load\(|allow_pickle\s*=\s*True"
)


def test_no_code_of_the_repository_pickles_evaluates_or_starts_a_shell() -> None:
    files = [p for d in ("canal_mpi", "tools") for p in (ROOT / d).rglob("*") if p.is_file()]
    texts = {p: p.read_text(encoding="utf-8") for p in files if p.suffix in ("", ".py")}
    assert len(texts) > 40
    odd = [
        f"{path}:{number}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert odd == []


def test_the_search_finds_what_it_looks_for() -> None:
    for line in ("import pickle", "  from marshal import x", "y = eval(x)", "run(x, shell=True)"):
        assert FORBIDDEN.search(line)
    assert not FORBIDDEN.search("agent.evaluate(x)")


def external(file: h5py.File) -> None:
    file.create_dataset("a", (8,), "u1", external=[("/etc/hostname", 0, 8)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(4,), dtype="i4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "a", shape=(4,))
    file.create_virtual_dataset("a", layout)


def terabytes(file: h5py.File) -> None:
    file.create_dataset("a", (1 << 40,), "u1", chunks=(1 << 20,), compression="gzip")


def large_chunk(file: h5py.File) -> None:
    file.create_dataset("a", (4,), "u1", chunks=(1 << 31,), maxshape=(None,), compression="gzip")


def objects(file: h5py.File) -> None:
    file.create_dataset("a", data=["x" * 10], dtype=h5py.string_dtype())


def compound(file: h5py.File) -> None:
    file.create_dataset("a", data=np.zeros(3, dtype=[("x", "<i4"), ("y", "<f8")]))


def other_filter(file: h5py.File) -> None:
    file.create_dataset("a", data=np.arange(100), chunks=(10,), scaleoffset=2)


def nested(file: h5py.File) -> None:
    group = file
    for _ in range(3000):
        group = group.create_group("a")


def test_files_that_were_made_to_harm_are_refused_by_name_with_little_memory(
    tmp_path: Path,
) -> None:
    words = {
        external: "'a' is stored in other files",
        virtual: "'a' is stored in other files",
        terabytes: "declares over",
        large_chunk: "'a' has chunks that are larger than itself",
        objects: "'a' has the type object",
        compound: "'a' has the type",
        other_filter: "'a' is packed in an unknown way",
        nested: "too deep",
    }
    for fill, why in words.items():
        write_hdf5(tmp_path / "it", fill)
        tracemalloc.start()
        with pytest.raises(DamagedData, match=f"it:? .*({why})"):
            read_arrays(tmp_path / "it")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20, why
        tracemalloc.stop()


def test_a_small_file_that_declares_12_gib_is_refused_whatever_the_limit(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file.create_dataset("a", (12 << 30,), "u1", chunks=(1 << 20,), compression="gzip")

    write_hdf5(tmp_path / "it", fill)
    assert (tmp_path / "it").stat().st_size < 16 << 10
    with pytest.raises(DamagedData, match="it declares over"):
        read_arrays(tmp_path / "it", 1 << 40)


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_arrays(tmp_path / "other.h5", {"a": np.arange(3)}, {})

    def fill(file: h5py.File) -> None:
        file["b"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "a")
        file["d/e"] = h5py.SoftLink("/c")
        file["d/f"] = file["d"]  # a group in itself
        file["c"] = np.arange(2)

    write_hdf5(tmp_path / "it", fill)
    assert list(read_arrays(tmp_path / "it")) == ["c"]


def test_arrays_that_nobody_asked_for_are_not_read(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "it", terabytes)
    found = read_arrays(tmp_path / "it", 1 << 20, lambda name: name != "a")
    assert found == {}


def test_attributes_are_not_read_beyond_a_limit(tmp_path: Path) -> None:
    def one_large(file: h5py.File) -> None:
        file.attrs.create("x", "x" * ((1 << 24) + 1))

    def many_texts(file: h5py.File) -> None:
        file.attrs["x"] = ["text"] * 17

    for fill in (one_large, many_texts):
        write_hdf5(tmp_path / "it", fill)
        with pytest.raises(DamagedData, match="it declares too many bytes of attributes"):
            read_attributes(tmp_path / "it")


def test_a_chunk_that_unpacks_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    def bomb(file: h5py.File) -> None:
        data = file.create_dataset("a", (1 << 20,), "u1", chunks=(1 << 20,), compression="gzip")
        data.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 28)))

    write_hdf5(tmp_path / "it", bomb)
    tracemalloc.start()
    with pytest.raises(DamagedData, match="'a' has chunks that don't unpack to their size"):
        read_arrays(tmp_path / "it")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_pipes_folders_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for read in (read_bytes, read_attributes, read_arrays):
            with pytest.raises(DamagedData, match=f"^{path} is not a regular file"):
                read(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse.h5").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedData, match=r"sparse\.h5 has 1099511627776 bytes; expected at most"):
        read_attributes(tmp_path / "sparse.h5")
