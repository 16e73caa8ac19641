"""The points of a sweep, their names, and the folder that remembers them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from madeup import write_run

from canal_mpi.config import from_toml
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.experiments import design
from canal_mpi.experiments.design import Axis, Choice
from canal_mpi.experiments.points import INDEX, Point, check_same_job, load_points, name_of, save
from canal_mpi.results.files import NAME

SMOKE = {"tasks": ["CartPole-v1", "Acrobot-v1"], "order": "rotate"}


def points(*axes: Axis, **flags: Any) -> list[Point]:
    return design.grid(axes, SMOKE | flags)


def test_every_combination_is_a_point_and_the_last_axis_varies_fastest() -> None:
    topologies = design.named("topology", "share.topology", ["full", "ring"])
    found = points(topologies, design.seeds("2", first=1))
    assert [p.name for p in found] == ["full_seed-1", "full_seed-2", "ring_seed-1", "ring_seed-2"]
    assert [p.job.share.topology for p in found] == ["full", "full", "ring", "ring"]
    assert [p.job.seed for p in found] == [1, 2, 1, 2]
    assert {p.ranks for p in found} == {design.DEFAULT_AGENTS}
    assert found[3].settings == {"topology": "ring", "seed": "2"} and found[3].group == "ring"
    assert [p.name for p in points(name="mine")] == ["mine"]  # nothing is varied


def test_any_setting_is_varied_lists_too() -> None:
    found = points(design.varied("learn.lr=0.001,0.01"), design.varied("learn.widths=[32],[64,64]"))
    assert [p.name for p in found][:2] == ["lr-0.001_widths-32", "lr-0.001_widths-64-64"]
    assert found[1].job.learn.widths == (64, 64) and found[2].job.learn.lr == 0.01
    modes = [p.job.reuse.mode for p in points(design.varied("reuse.mode=mix, replay"))]
    assert modes == ["mix", "replay"]


def test_seeds_are_counted_or_named_and_numbers_of_agents_varied() -> None:
    assert [c.label for c in design.seeds("3", first=5)[1]] == ["5", "6", "7"]
    assert [c.label for c in design.seeds("4,7", first=5)[1]] == ["4", "7"]
    found = [(p.name, p.ranks) for p in points(design.agents("2,3"))]
    assert found == [("agents-2", 2), ("agents-3", 3)]


def test_mixes_of_hosts_are_used_or_emulated(tmp_path: Path) -> None:
    (tmp_path / "a.hosts").write_text("xavier-1 2\nnano-1 speed=0.5\n")
    (tmp_path / "b.hosts").write_text("nano-[1-2]\nxavier-1 env-server\n")
    pattern = [str(tmp_path / "*.hosts")]
    played = points(design.hostfiles(pattern, emulate=True))
    assert [(p.name, p.ranks, p.servers) for p in played] == [("a", 3, 0), ("b", 3, 1)]
    assert played[0].job.emulate == ("xavier-1", "xavier-1", "nano-1@0.5")
    assert played[0].hostfile == ""
    with pytest.raises(UsageError, match=r"xavier-1, gets .* not this machine: .*--emulate"):
        design.hostfiles(pattern, emulate=False)
    real = points(design.hostfiles(pattern, emulate=False, shared_disk=True))
    assert real[0].hostfile == str(tmp_path / "a.hosts")
    assert real[0].job.emulate == ()


def test_long_and_odd_settings_still_make_different_names_of_folders() -> None:
    long = [f"module_{'x' * 90}:{k}" for k in "ab"]
    names = {name_of({"policy": label, "seed": "1"}) for label in [*long, "a/b", "../c"]}
    assert len(names) == 4
    assert all(NAME.fullmatch(name) for name in names)


def test_a_wrong_grid_is_refused_before_anything_runs() -> None:
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: design.seeds("0", 1), "expected how many"),
        (lambda: design.seeds("00", 1), "expected how many"),
        (lambda: design.seeds("9" * 5000, 1), "expected how many"),
        (lambda: design.agents("9" * 5000), "expected numbers of agents"),
        (lambda: design.seeds("1,x", 1), "or which, as in 4,7,9"),
        (lambda: design.agents("0"), "expected numbers of agents"),
        (lambda: design.varied("learn.lr"), "expected a setting and values"),
        (lambda: design.hostfiles(["/nowhere/*.hosts"], True), "there is no such file"),
        (lambda: points(design.varied("learn.rl=1,2")), "did you mean 'learn.lr'"),
        (lambda: points(design.varied("learn.lr=1,1")), "name each value once"),
        (lambda: points(*[(str(k), [Choice("a")] * 99) for k in range(3)]), "at most 10000"),
    ]
    for make, words in wrong:
        with pytest.raises(UsageError, match=words):
            make()


def test_the_folder_remembers_the_points_and_grows(tmp_path: Path) -> None:
    few, more = points(design.seeds("1", 1)), points(design.seeds("2", 1))
    more_facts: dict[str, Any] = {"network": "10.0.0.0/24", "hostfile": "/a.hosts", "servers": 1}
    wide = [replace(point, **more_facts) for point in few]
    for kept in (few, more, wide):
        save(tmp_path, "sweep", kept)
        assert load_points(tmp_path, "sweep") == kept


def test_a_run_of_another_job_is_not_taken_for_a_point(tmp_path: Path) -> None:
    run = write_run(tmp_path / "seed-1")
    with pytest.raises(UsageError, match="is a run of another job"):
        save(tmp_path, "sweep", points(design.seeds("1", 1)))
    job = from_toml((run / "job.toml").read_text())
    assert check_same_job(run, Point("seed-1", job, 2)) == "finished"
    with pytest.raises(UsageError, match="agents: 2 there, 5 here"):
        check_same_job(run, Point("seed-1", job, 5))


def test_an_index_that_nobody_wrote_so_is_refused(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"name": "../x"},
        {"ranks": 0},
        {"ranks": 10**9},
        {"servers": 5},
        {"ranks": "many"},
        {"ranks": float("inf")},
        {"settings": []},
        {"settings": {"name": "a\n| b |"}},
        {"network": "-x"},
        {"odd": 1},
    ]
    save(tmp_path, "sweep", points(design.seeds("1", 1)))
    facts = json.loads((tmp_path / INDEX).read_text())
    broken = [facts | {"points": [facts["points"][0] | change]} for change in changes]
    broken += [facts | {"points": []}, facts | {"points": facts["points"] * 2}]
    broken += [facts | {"kind": "other"}, {"points": facts["points"]}, {"kind": ["sweep"]}]
    for wrong in broken:
        (tmp_path / INDEX).write_text(json.dumps(wrong))
        with pytest.raises((DamagedData, UsageError)):
            load_points(tmp_path, "sweep")
    (tmp_path / INDEX).unlink()
    with pytest.raises(UsageError, match="holds no sweep"):
        load_points(tmp_path, "sweep")


def test_a_damaged_job_file_is_named_and_a_published_one_is_beside_its_run(tmp_path: Path) -> None:
    found = points(design.seeds("1", 1))
    save(tmp_path, "sweep", found)
    file = tmp_path / "jobs/seed-1.toml"
    text = file.read_text()
    for wrong, words in (
        ("foo = [", r"seed-1\.toml is not as canal-mpi writes it: "),
        ('[train]\nsteps = "many"', r"seed-1\.toml is not as .*train\.steps = 'many'"),
    ):
        file.write_text(wrong)
        with pytest.raises(DamagedData, match=words):
            load_points(tmp_path, "sweep")
    file.unlink()
    with pytest.raises(DamagedData, match=r"seed-1\.toml is not as .*: .*No such file"):
        load_points(tmp_path, "sweep")
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1/job.toml").write_text(text)
    assert load_points(tmp_path, "sweep") == found


def test_what_could_not_start_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="order 'nowhere:order': can't import 'nowhere'"):
        save(tmp_path / "new", "sweep", points(design.seeds("1", 1), order="nowhere:order"))
    assert not (tmp_path / "new").exists()
