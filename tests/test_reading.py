"""Reading runs: whole ones, running ones, old ones, and files that lie."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from madeup import GAMES, write_run

import canal_mpi
from canal_mpi.errors import CanalError, DamagedData, StorageError, UsageError
from canal_mpi.results import reading
from canal_mpi.results.hdf5 import image
from canal_mpi.results.reading import load


def changed(path: Path, change: Callable[[Any], None]) -> Path:
    """The same file after a change, with a right checksum."""
    memory = io.BytesIO((path / "run.h5").read_bytes())
    with h5py.File(memory, "r") as old:

        def fill(new: Any) -> None:
            new.attrs.update(dict(old.attrs))
            for name in old:
                old.copy(name, new)
            change(new)

        data = image(fill)
    (path / "run.h5").write_bytes(data)
    return path


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = canal_mpi.load(write_run(tmp_path / "a"))
    assert (run.name, run.status, run.agents, run.rounds) == ("a", "finished", [0, 1], 3)
    assert run.tasks == list(GAMES)
    assert run.notes == []
    assert run.score.shape == (2, 4, 3, 2)
    assert run["tasks"]["task"][0] == "Krull"
    assert run.order.tolist() == [["Krull", "Alien", "Robotank"], ["Alien", "Robotank", "Krull"]]
    assert run.setting("train.frames") == 1000
    assert run.setting("train.nothing", 7) == 7
    assert run.versions == {"numpy": "2.4"}


def test_the_file_and_the_folder_are_the_same_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert load(folder / "run.h5").name == load(folder).name == "a"


def test_a_lone_agent_keeps_its_number(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "a", agents=1, first=3))
    assert run.agents == [3]


def test_a_table_is_a_frame_of_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed (extra: look)")
    frame = load(write_run(tmp_path / "a")).frame("tasks")
    assert frame["env_steps"].sum() == 3600
    assert set(frame["source"]) == {"env", "lesson"}


def test_a_run_that_has_only_begun_can_be_read(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "a", rounds=0, status="running"))
    assert run.status == "running"
    assert len(run["tasks"]["agent"]) == 0


def test_an_older_file_is_read_with_a_note(tmp_path: Path) -> None:
    def older(file: Any) -> None:
        file.attrs["schema_version"] = 1
        for name in ("evaluate_seconds", "exchange_seconds", "save_seconds"):
            del file[f"tasks/{name}"]

    run = load(changed(write_run(tmp_path / "a"), older))
    assert "older schema (1" in run.notes[0]
    assert "/tasks has no evaluate_seconds" in run.notes[1]
    assert np.isnan(run["tasks"]["save_seconds"]).all()


def test_a_newer_file_is_read_with_a_note(tmp_path: Path) -> None:
    def newer(file: Any) -> None:
        file.attrs["schema_version"] = 99
        file["tasks/colour"] = np.zeros(6)

    run = load(changed(write_run(tmp_path / "a"), newer))
    assert "newer schema (99" in run.notes[0]
    assert "colour" not in run["tasks"]


# Files that are not ours, or not whole


@pytest.mark.parametrize("data", [b"", b"hello", b"\x89HDF\r\n\x1a\n" + bytes(600)])
def test_a_file_that_is_not_ours_is_a_usage_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.h5").write_bytes(data)
    with pytest.raises(UsageError, match=r"is not a file of canal-mpi\.$"):
        load(tmp_path)


def test_another_file_of_ours_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "run.h5").write_bytes(image(lambda file: None))
    with pytest.raises(UsageError, match="not the results of a run"):
        load(tmp_path)


def test_nothing_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no run\.h5"):
        load(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path / "nothing")


def test_a_file_that_can_not_be_read_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run.h5").mkdir()
    with pytest.raises((StorageError, UsageError)):
        load(tmp_path)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a") / "run.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match="checksum"):
        load(path)


def external_file(file: Any) -> None:
    del file["tasks/score"]
    file.create_dataset("tasks/score", (6,), "<f8", external=[("/etc/hostname", 0, 48)])


def external_link(file: Any) -> None:
    del file["tasks/score"]
    file["tasks/score"] = h5py.ExternalLink("/etc/hostname", "/score")


def soft_link(file: Any) -> None:
    del file["tasks/score"]
    file["tasks/score"] = h5py.SoftLink("/tasks/seconds")


def virtual(file: Any) -> None:
    del file["tasks/score"]
    layout = h5py.VirtualLayout((6,), "<f8")
    layout[:] = h5py.VirtualSource("/etc/hostname", "score", (6,))
    file.create_virtual_dataset("tasks/score", layout)


def huge(file: Any) -> None:
    for name in list(file["train"]):
        del file[f"train/{name}"]
        file.create_dataset(f"train/{name}", (1 << 40,), "<f8", chunks=(1 << 10,))


def other_type(file: Any) -> None:
    del file["tasks/score"]
    file["tasks/score"] = np.zeros(6, dtype=">f4")


def other_length(file: Any) -> None:
    del file["tasks/score"]
    file["tasks/score"] = np.zeros(5)


def other_shape(file: Any) -> None:
    del file["evaluation/score"]
    file["evaluation/score"] = np.zeros((1, 2, 3, 4))


def unknown_agent(file: Any) -> None:
    file["tasks/agent"][0] = 99


def unknown_round(file: Any) -> None:
    file["tasks/round"][0] = -5


def no_topology(file: Any) -> None:
    del file["topology"]


def odd_version(file: Any) -> None:
    file.attrs["schema_version"] = "two"


LIES = [
    external_file,
    external_link,
    soft_link,
    virtual,
    huge,
    other_type,
    other_length,
    other_shape,
    unknown_agent,
    unknown_round,
    no_topology,
    odd_version,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_file_that_lies_is_refused(tmp_path: Path, lie: Callable[[Any], None]) -> None:
    folder = changed(write_run(tmp_path / "a"), lie)
    with pytest.raises(DamagedData, match="not as canal-mpi writes it"):
        load(folder)


def test_a_file_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "a")
    monkeypatch.setattr(reading, "LIMIT", 1000)
    with pytest.raises(DamagedData, match="larger"):
        load(folder)


def test_odd_attributes_do_no_harm(tmp_path: Path) -> None:
    def odd(file: Any) -> None:
        file.attrs["job"] = "this is = not [toml"
        file.attrs["versions"] = "[1, 2"
        file.attrs["status"] = np.bytes_(b"\xff\xfe")

    run = load(changed(write_run(tmp_path / "a"), odd))
    assert (run.job, run.versions, run.setting("seed", 3)) == ({}, {}, 3)


def test_every_trouble_has_a_code(tmp_path: Path) -> None:
    with pytest.raises(CanalError) as caught:
        load(tmp_path / "nothing")
    assert caught.value.code == 2
