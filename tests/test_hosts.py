"""Settings that differ between hosts."""

from pathlib import Path

import numpy as np
import pytest

from canal_mpi import config
from canal_mpi.config import on_host
from canal_mpi.errors import RanksDiffer, UsageError
from canal_mpi.learn import networks as device
from canal_mpi.rank.plan import check_equal_envs
from canal_mpi.rank.resume import check_num_envs
from canal_mpi.settings import Job

TEXT = """
[hosts."nano-1"]
threads = 2
[hosts."nano-*"]
device = "cpu"
threads = 4
envs = 2
[hosts."xavier-*"]
device = "auto"
"""


def job_of(tmp_path: Path, flags: dict[str, object] | None = None, text: str = TEXT) -> Job:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return config.resolve(flags or {}, str(file), {})


def test_the_first_rule_that_matches_decides_each_setting(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    one, two = on_host(job, "nano-1"), on_host(job, "nano-2.lab.example")
    assert (one.learn.threads, one.train.num_envs) == (2, 2)
    assert (two.learn.threads, two.learn.device) == (4, "cpu")
    assert on_host(job, "xavier-1").learn.device == "auto"
    assert on_host(job, "node-7") == job


def test_rules_come_back_from_toml(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert config.from_toml(config.to_toml(job)) == job
    assert config.from_toml(config.to_toml(job, explain=True)) == job


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"hosts.nano-*.threads": 1, "hosts.x.envs": 3})
    assert on_host(job, "nano-2").learn.threads == 1
    assert on_host(job, "nano-2").train.num_envs == 2
    assert on_host(job, "x").train.num_envs == 3
    assert on_host(config.changed(job, {"hosts.x.envs": 5}, {}), "x").train.num_envs == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hosts.a]\nthread = 1", "unknown setting 'hosts.a.thread'; did you mean 'threads'"),
        ("[hosts.a]\ndevice = 'cud'", "hosts.a.device: unknown value .*did you mean 'cuda'"),
        ("[hosts.a]\nenvs = 0", "hosts.a.envs: .*expected at least 1"),
        ("hosts = 3", "hosts: expected hosts.PATTERN.SETTING"),
        ("[hosts]\na = 1", "hosts.a: expected"),
        ("[hosts.'a b']\nenvs = 1", "hosts.a b.envs: expected hosts.PATTERN.SETTING"),
    ],
)
def test_a_wrong_rule_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        job_of(tmp_path, text=text)


def test_a_setting_without_a_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hosts\.envs: expected hosts\.PATTERN.SETTING"):
        job_of(tmp_path, {"hosts.envs": 1})


def test_agents_that_meet_inside_a_task_need_as_many_environments(tmp_path: Path) -> None:
    hosts = ["nano-1", "xavier-1"]
    check_equal_envs(job_of(tmp_path), hosts)
    with pytest.raises(UsageError, match="2 on nano-1, 1 on xavier-1"):
        check_equal_envs(job_of(tmp_path, {"row_exchange.save_interval": 10}), hosts)


def test_an_agent_goes_on_with_as_many_environments_as_it_was_saved_with() -> None:
    state = {"own/cursor": np.zeros(2, dtype=np.int64)}
    check_num_envs(state, 2, 0, "a")
    with pytest.raises(RanksDiffer, match=r"agent 0 was saved with 2 .* --set hosts\.a\.envs=2"):
        check_num_envs(state, 1, 0, "a")


def test_auto_is_cuda_only_where_it_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "cuda_trouble", lambda: "")
    assert device.choose_device("auto") == "cuda"
    monkeypatch.setattr(device, "cuda_trouble", lambda: "no driver")
    assert device.choose_device("auto") == "cpu"
    assert "computing on the CPU, for no driver" in caplog.text
    with pytest.raises(UsageError, match=r"learn\.device = cuda, but no driver; use cpu or auto"):
        device.choose_device("cuda")
