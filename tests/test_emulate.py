"""Ranks that emulate hosts, at their speed."""

import time
from pathlib import Path

import numpy as np
import pytest
from launch import SMOKE, columns, differences, mpirun, run

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.launch.hostfile import emulated, read_hosts
from canal_mpi.launcher import Throttle
from canal_mpi.rank.plan import Device, Request, devices, make_plan
from canal_mpi.report.report import page
from canal_mpi.results.compare import compare
from canal_mpi.results.reader import Run, load

MIX = "xavier-1\nnano-[1-2]  speed=0.25\n"


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    file = tmp_path / "mix.hosts"
    file.write_text(MIX)
    return file


def test_a_file_of_hosts_becomes_a_setting_of_the_job_that_a_resumed_run_still_has(
    mix: Path,
) -> None:
    setting = emulated(read_hosts(mix))
    assert setting == ("xavier-1", "nano-1@0.25", "nano-2@0.25")
    job = config.resolve({"emulate": setting}, environ={})
    again = config.from_toml(config.to_toml(job))
    assert devices(again, ["here"] * 3) == [
        Device("xavier-1"),
        Device("nano-1", 0.25),
        Device("nano-2", 0.25),
    ]


def test_without_emulation_ranks_are_where_they_are() -> None:
    assert devices(config.resolve(environ={}), ["a", "b"]) == [Device("a"), Device("b")]


def test_the_rules_for_hosts_may_slow_them_and_the_file_wins() -> None:
    rules = {"hosts.nano-*.speed": 0.5, "emulate": ["nano-1", "nano-2@0.25", "xavier-1"]}
    played = devices(config.resolve(rules, environ={}), ["here"] * 3)
    assert [device.speed for device in played] == [0.5, 0.25, 1.0]
    real = devices(config.resolve({"hosts.nano-*.speed": 0.5}, environ={}), ["nano-9", "b"])
    assert [device.speed for device in real] == [0.5, 1.0]


def test_what_is_no_host_is_refused() -> None:
    for text in ("nano-1@0", "nano-1@2", "nano-1@fast", "no name"):
        with pytest.raises(UsageError, match="expected a host, possibly with a speed"):
            devices(config.resolve({"emulate": [text]}, environ={}), ["here"])


def test_another_number_of_ranks_and_several_machines_are_refused() -> None:
    job = config.resolve({"emulate": ["a", "b"]}, environ={})
    with pytest.raises(UsageError, match="mpirun -np 2"):
        make_plan(Request({"emulate": ("a", "b"), "tasks": ["CartPole-v1"]}), ["here"] * 3, 3)
    with pytest.raises(UsageError, match="one machine"):
        devices(job, ["here", "there"])


def work(throttle: Throttle, seconds: float) -> tuple[float, float]:
    """Compute for so many CPU seconds; wall seconds, and the longest standstill."""
    start = last = time.monotonic()
    begun, longest = time.thread_time(), 0.0
    while time.thread_time() - begun < seconds:
        throttle.tick()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return time.monotonic() - start, longest


def test_every_busy_second_takes_four_at_a_quarter_of_the_speed() -> None:
    wall, longest = work(Throttle(0.25), 0.3)
    assert wall > 0.9 * 0.3 / 0.25
    assert longest < 0.5  # a heartbeat is due every half second


def test_waiting_takes_no_longer_and_earns_nothing() -> None:
    throttle, start = Throttle(0.1), time.monotonic()
    for _ in range(20):
        throttle.tick()
        time.sleep(0.02)
    assert time.monotonic() - start < 2  # 4 s if waiting were slowed
    time.sleep(1)
    assert work(throttle, 0.1)[0] > 0.9


def test_what_was_done_before_the_first_tick_does_not_count() -> None:
    throttle = Throttle(0.05)
    begun = time.thread_time()
    while time.thread_time() - begun < 0.1:
        pass
    start = time.monotonic()
    throttle.tick()
    assert time.monotonic() - start < 0.1


def test_full_speed_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canal_mpi.launcher.sleep", None)
    work(Throttle(1.0), 0.05)


@pytest.mark.alone
@pytest.mark.slow
def test_a_slow_device_computes_the_same_in_more_time(tmp_path: Path) -> None:
    """In turn, so that noise hits both alike; 3.3 times as long on an idle machine."""
    job = ["canal-mpi", "train", "-q", "--tasks", "CartPole-v1", "--frames", "2000"]
    job += ["--order", "same"]
    job += ["--set", "evaluation.episodes=0", "--set", "learn.algorithm=plugins:Linear"]
    job += ["--set", "learn.batch_size=8"]
    seconds: dict[str, list[float]] = {"nano-1": [], "nano-1 speed=0.3": []}
    for turn in range(3):
        for k, host in enumerate(seconds):
            (tmp_path / "one.hosts").write_text(host)
            out = tmp_path / f"{turn}-{k}"
            done = run([*job, "--emulate", str(tmp_path / "one.hosts"), "--out", str(out)])
            assert done.code == 0, done.err
            seconds[host].append(_busy_seconds(load(out), 0))
    full, slow = (np.median(times) for times in seconds.values())
    assert slow > 2 * full
    found = [columns(tmp_path / name / "run.h5") for name in ("0-0", "0-1")]
    assert differences(*found) in ([], ["agents/speed"])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.atari
def test_a_slow_env_server_answers_later(tmp_path: Path) -> None:
    seconds = []
    for k, speed in enumerate((1, 0.05)):
        (tmp_path / "two.hosts").write_text(f"xavier-1\nnano-1 env-server speed={speed}\n")
        job = ("-q", "--tasks", "Krull", "--frames", "300", "--set", "evaluation.episodes=0")
        options = ("--emulate", str(tmp_path / "two.hosts"), "--out", str(tmp_path / str(k)))
        result = mpirun(2, "train", *job, *options)
        assert result.code == 0, result.err
        seconds.append(_busy_seconds(load(tmp_path / str(k)), 0))
    assert seconds[1] > 1.7 * seconds[0]


@pytest.mark.mpi
def test_a_run_of_emulated_hosts_says_so_everywhere_and_slows_the_slow_ones(
    mix: Path, out: Path
) -> None:
    job = (*SMOKE, "--share", "none", "--set", "train.rounds=1", "--set", "learn.widths=8")
    options = ("--frames", "3000", "--order", "same", "--emulate", str(mix))
    result = mpirun(3, "train", *job, *options, "--out", str(out), mpi="mpich")
    assert result.code == 0, result.err
    assert "3 agents on 3 emulated hosts (2 at 0.25 of full speed)" in result.out
    found = load(out)
    agents = found["agents"]
    assert list(agents["host"]) == ["xavier-1", "nano-1", "nano-2"]
    assert list(agents["speed"]) == [1.0, 0.25, 0.25]
    busy = [_busy_seconds(found, agent) for agent in range(3)]
    assert min(busy[1:]) > 1.7 * busy[0]  # 4 on an idle machine
    assert "2 nano at 0.25 of full speed" in page(compare([found]))


def _busy_seconds(found: Run, agent: int) -> float:
    train = found["train"]
    here = train["agent"] == agent
    return float(np.sum(train["env_seconds"][here]) + np.sum(train["learn_seconds"][here]))


@pytest.mark.mpi
def test_the_wrong_number_of_ranks_is_one_message(mix: Path, out: Path) -> None:
    result = mpirun(2, "train", *SMOKE, "--emulate", str(mix), "--out", str(out))
    assert result.code == 2 and len(result.complaints) == 1, result.err
    assert "mpirun -np 3" in result.complaints[0]
