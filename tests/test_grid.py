"""The points of a sweep, their names, and the folder that remembers them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from madeup import write_run

from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.results.files import NAME
from canal_mpi.sweep import grid, slurm
from canal_mpi.sweep.folder import load_points, save
from canal_mpi.sweep.grid import Axis, Choice, Point, points_of

SMOKE = {"tasks": ["CartPole-v1", "Acrobot-v1"], "order": "rotate"}


def points(*axes: Axis, **flags: Any) -> list[Point]:
    return points_of(axes, SMOKE | flags, None)


def test_every_combination_is_a_point_and_the_last_axis_varies_fastest() -> None:
    found = points(
        grid.named("topology", "share.topology", ["full", "ring"]), grid.seeds("2", first=1)
    )
    assert [p.name for p in found] == ["full_seed-1", "full_seed-2", "ring_seed-1", "ring_seed-2"]
    assert [p.job.share.topology for p in found] == ["full", "full", "ring", "ring"]
    assert [p.job.seed for p in found] == [1, 2, 1, 2]
    assert {p.ranks for p in found} == {grid.AGENTS}
    assert found[3].settings == {"topology": "ring", "seed": "2"}


def test_any_setting_is_varied_lists_too() -> None:
    found = points(grid.varied("learn.lr=0.001,0.01"), grid.varied("learn.widths=[32],[64,64]"))
    assert [p.name for p in found][:2] == ["lr-0.001_widths-32", "lr-0.001_widths-64-64"]
    assert found[1].job.learn.widths == (64, 64) and found[2].job.learn.lr == 0.01
    assert [p.job.reuse.mode for p in points(grid.varied("reuse.mode=mix, replay"))] == [
        "mix",
        "replay",
    ]


def test_seeds_are_counted_from_the_jobs_own_or_named() -> None:
    assert [c.label for c in grid.seeds("3", first=5).choices] == ["5", "6", "7"]
    assert [c.label for c in grid.seeds("4,7", first=5).choices] == ["4", "7"]


def test_numbers_of_agents_are_varied() -> None:
    assert [(p.name, p.ranks) for p in points(grid.agents("2,3"))] == [
        ("agents-2", 2),
        ("agents-3", 3),
    ]


def test_a_sweep_of_nothing_is_one_run_of_the_job() -> None:
    assert [p.name for p in points(name="mine")] == ["mine"]


def test_mixes_of_hosts_are_used_or_played(tmp_path: Path) -> None:
    (tmp_path / "a.hosts").write_text("xavier-1 2\nnano-1 speed=0.5\n")
    (tmp_path / "b.hosts").write_text("nano-[1-2]\nxavier-1 env-server\n")
    pattern = [str(tmp_path / "*.hosts")]
    played = points(grid.hostfiles(pattern, emulate=True))
    assert [(p.name, p.ranks, p.servers) for p in played] == [("a", 3, 0), ("b", 3, 1)]
    assert played[0].job.emulate == ("xavier-1", "xavier-1", "nano-1@0.5")
    assert played[0].hosts == ()
    with pytest.raises(UsageError, match=r"xavier-1, gets .* not this machine: .*--emulate"):
        grid.hostfiles(pattern, emulate=False)
    real = points(grid.hostfiles(pattern, emulate=False, shared_disk=True))
    assert [host.name for host in real[0].hosts] == ["xavier-1", "nano-1"]
    assert real[0].job.emulate == ()


def test_long_and_odd_settings_still_make_different_names_of_folders() -> None:
    long = [f"module_{'x' * 90}:{k}" for k in "ab"]
    names = {grid.name_of({"policy": label, "seed": "1"}) for label in [*long, "a/b", "../c"]}
    assert len(names) == 4
    assert all(NAME.fullmatch(name) for name in names)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grid.seeds("0", 1), "expected how many"),
        (lambda: grid.seeds("00", 1), "expected how many"),
        (lambda: grid.seeds("9" * 5000, 1), "expected how many"),
        (lambda: grid.agents("9" * 5000), "expected numbers of agents"),
        (lambda: grid.seeds("1,x", 1), "or which, as in 4,7,9"),
        (lambda: grid.agents("0"), "expected numbers of agents"),
        (lambda: grid.varied("learn.lr"), "expected a setting and values"),
        (lambda: grid.hostfiles(["/nowhere/*.hosts"], True), "there is no such file"),
        (lambda: points(grid.varied("learn.rl=1,2")), "did you mean 'learn.lr'"),
        (lambda: points(grid.varied("learn.lr=1,1")), "name each value once"),
        (lambda: points(*[Axis(str(k), [Choice("a")] * 99) for k in range(3)]), "at most 10000"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_the_folder_remembers_the_points_and_grows(tmp_path: Path) -> None:
    few, more = points(grid.seeds("1", 1)), points(grid.seeds("2", 1))
    save(tmp_path, few)
    assert load_points(tmp_path) == few
    save(tmp_path, more)
    assert load_points(tmp_path) == more
    wide = [replace(point, network="10.0.0.0/24") for point in few]
    save(tmp_path, wide)
    assert load_points(tmp_path) == wide


def test_a_run_of_another_job_is_not_taken_for_a_point(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-1")
    with pytest.raises(UsageError, match="is a run of another job"):
        save(tmp_path, points(grid.seeds("1", 1)))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"ranks": 0},
        {"ranks": 10**9},
        {"servers": 5},
        {"ranks": "many"},
        {"ranks": float("inf")},
        {"settings": []},
        {"hosts": ["no host!"]},
        {"network": "-x"},
    ],
)
def test_what_the_folder_says_is_checked(change: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, points(grid.seeds("1", 1)))
    facts = json.loads((tmp_path / "sweep.json").read_text())
    facts["points"][0] |= change
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    with pytest.raises((DamagedData, UsageError)):
        load_points(tmp_path)


def test_a_sweep_without_points_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"points": []}')
    with pytest.raises(DamagedData, match="0 points"):
        load_points(tmp_path)


def test_a_folder_without_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no sweep"):
        load_points(tmp_path)


def test_the_slurm_script_has_the_numbers_of_the_sweep(tmp_path: Path) -> None:
    file, folder = tmp_path / "x.sbatch", tmp_path / "my sweep"
    slurm.write_script(file, folder, points(grid.agents("2,7"), grid.seeds("2", 1)))
    text = file.read_text()
    assert "#SBATCH --array=0-3\n" in text and "#SBATCH --ntasks=7\n" in text
    assert f"sweep='{folder}'\n" in text
    assert f"\nVENV=${{VENV:-{sys.prefix}}}\n" in text
