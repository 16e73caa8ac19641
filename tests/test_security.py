"""Words that must not be in the repository, and files that were made to harm."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from canal_mpi.errors import DamagedData
from canal_mpi.results.files import NAME, file_name
from canal_mpi.results.hdf5 import image, parse_arrays, read_arrays, write_arrays

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


def test_a_dataset_that_lies_outside_its_file_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret!!")

    def fill(file: h5py.File) -> None:
        file.create_dataset("a", (8,), "u1", external=[(str(secret), 0, 8)])

    with pytest.raises(DamagedData, match="not a plain array"):
        parse_arrays(image(fill), "it")


def test_a_virtual_dataset_is_refused(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        layout = h5py.VirtualLayout(shape=(4,), dtype="i4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "a", shape=(4,))
        file.create_virtual_dataset("a", layout)

    with pytest.raises(DamagedData, match="not a plain array"):
        parse_arrays(image(fill), "it")


def test_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    write_arrays(tmp_path / "other.h5", {"a": np.arange(3)}, {})

    def fill(file: h5py.File) -> None:
        file["b"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "a")
        file["c"] = np.arange(2)

    assert list(parse_arrays(image(fill), "it")) == ["c"]


def test_a_small_file_that_announces_terabytes_is_refused() -> None:
    def fill(file: h5py.File) -> None:
        file.create_dataset("a", (1 << 40,), "u1", chunks=(1 << 20,), compression="gzip")

    data = image(fill)
    assert len(data) < 10_000
    with pytest.raises(DamagedData, match="announces over"):
        parse_arrays(data, "it")


def test_objects_are_refused(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file.create_dataset("a", data=["x" * 10], dtype=h5py.string_dtype())

    with pytest.raises(DamagedData, match="not a plain array"):
        parse_arrays(image(fill), "it")


@pytest.mark.parametrize("place", [0, 9, 20, 300, 600, -1])
def test_every_flipped_bit_is_found(place: int, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_arrays(path, {"a": np.arange(1000)}, {"agent": 1})
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedData):
        read_arrays(path)


@pytest.mark.parametrize("text", ["../../etc/passwd", "a/b", "", ".hidden", "x" * 500, "ä\n"])
def test_no_text_becomes_a_path(text: str) -> None:
    assert NAME.fullmatch(file_name(text))
