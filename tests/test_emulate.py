"""Ranks that play hosts which are not there, at their speed."""

from pathlib import Path

import numpy as np
import pytest
from launch import SMOKE, mpirun

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.rank.emulate import Device, check_size, devices, emulated, servers_of, told
from canal_mpi.report.page import page
from canal_mpi.results.compare import compare
from canal_mpi.results.reading import Run, load

MIX = "xavier-1\nnano-[1-2]  speed=0.25\n"


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    file = tmp_path / "mix.hosts"
    file.write_text(MIX)
    return file


def test_a_file_of_hosts_becomes_a_setting_of_the_job_that_a_resumed_run_still_has(
    mix: Path,
) -> None:
    layer = emulated(str(mix))
    assert layer == {"emulate": ("xavier-1", "nano-1@0.25", "nano-2@0.25")}
    job = config.resolve(layer, environ={})
    again = config.from_toml(config.to_toml(job))
    assert devices(again, ["here"] * 3) == [
        Device("xavier-1"),
        Device("nano-1", 0.25),
        Device("nano-2", 0.25),
    ]
    assert emulated(None) == {}


def test_without_emulation_ranks_are_where_they_are() -> None:
    assert devices(config.resolve(environ={}), ["a", "b"]) == [Device("a"), Device("b")]


def test_the_rules_for_hosts_may_slow_them_and_the_file_wins() -> None:
    rules = {"hosts.nano-*.speed": 0.5, "emulate": ["nano-1", "nano-2@0.25", "xavier-1"]}
    played = devices(config.resolve(rules, environ={}), ["here"] * 3)
    assert [device.speed for device in played] == [0.5, 0.25, 1.0]
    real = devices(config.resolve({"hosts.nano-*.speed": 0.5}, environ={}), ["nano-9", "b"])
    assert [device.speed for device in real] == [0.5, 1.0]


def test_hosts_that_serve_environments_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "server.hosts"
    file.write_text("nano-[1-2] speed=0.5\nxavier-1 1 env-server\n")
    assert servers_of(str(file)) == 1


def test_slow_devices_are_told_in_few_words() -> None:
    played = [Device("x"), Device("a", 0.25), Device("b", 0.25), Device("c", 0.5)]
    assert told(played) == "2 at 0.25, 1 at 0.5"
    assert told(played[:1]) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nano-1@0", "expected a number from 0.05 to 1"),
        ("nano-1@2", "expected a number from 0.05 to 1"),
        ("nano-1@fast", "expected a number from 0.05 to 1"),
        ("no name", "expected a host, as in nano-1"),
    ],
)
def test_what_is_no_host_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        devices(config.resolve({"emulate": [text]}, environ={}), ["here"])


def test_another_number_of_ranks_and_several_machines_are_refused() -> None:
    job = config.resolve({"emulate": ["a", "b"]}, environ={})
    with pytest.raises(UsageError, match="mpirun -np 2"):
        check_size(job, 3)
    with pytest.raises(UsageError, match="one machine"):
        devices(job, ["here", "there"])


@pytest.mark.mpi
def test_a_run_of_emulated_hosts_says_so_everywhere_and_slows_the_slow_ones(
    mpi: str, mix: Path, out: Path
) -> None:
    job = (*SMOKE, "--share", "none", "--set", "train.rounds=1", "--set", "learn.algorithm=linear")
    options = ("--frames", "3000", "--order", "same", "--emulate", str(mix))
    result = mpirun(3, "train", *job, *options, "--out", str(out), mpi=mpi)
    assert result.code == 0, result.err
    assert "3 agents on 3 emulated hosts (2 at 0.25 of full speed)" in result.out
    run = load(out)
    agents = run["agents"]
    assert list(agents["host"]) == ["xavier-1", "nano-1", "nano-2"]
    assert list(agents["speed"]) == [1.0, 0.25, 0.25]
    busy = [_busy_seconds(run, agent) for agent in range(3)]
    assert min(busy[1:]) > 1.7 * busy[0]  # 4 on an idle machine
    assert "nano-1 at 0.25 of full speed" in page(compare([run]))


def _busy_seconds(run: Run, agent: int) -> float:
    train = run["train"]
    here = train["agent"] == agent
    return float(np.sum(train["env_seconds"][here]) + np.sum(train["learn_seconds"][here]))


@pytest.mark.mpi
def test_the_wrong_number_of_ranks_is_one_message(mix: Path, out: Path) -> None:
    result = mpirun(2, "train", *SMOKE, "--emulate", str(mix), "--out", str(out))
    assert result.code == 2 and len(result.complaints) == 1, result.err
    assert "mpirun -np 3" in result.complaints[0]
