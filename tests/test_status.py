"""Runs seen from outside: ls, watch, and what they make of odd files."""

import fcntl
import json
import os
import subprocess
import sys
import time
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launch import ROOT
from madeup import write_run

from canal_mpi import cli
from canal_mpi.results import status as status_module
from canal_mpi.results.progress import coloured, events, progress_lines, sittings
from canal_mpi.results.status import RunStatus, follow, metrics, run_lines, runs_in

AGENT = {
    "agent": 0,
    "host": "nano-1",
    "phase": "training",
    "round": 2,
    "task": "Krull",
    "source": 1,
    "step": 40,
    "steps": 200,
    "total_steps": 1040,
    "mean_return": 12.5,
    "loss": 0.03,
    "wait_share": 0.25,
    "waits_for": -1,
    "steps_per_second": 99.0,
}


def status(folder: Path, age: float = 0.0, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    said = {"status": "running", "time": time.time() - age, "rounds": 10, "agents": [AGENT]}
    (folder / "status.json").write_text(json.dumps(said | facts))
    return folder


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.cli, list(arguments))


def test_the_table_says_who_waits_for_whom() -> None:
    waiting = AGENT | {"agent": 1, "host": "nano-2", "phase": "exchanging", "waits_for": 0}
    facts = {"agents": [AGENT, waiting], "rounds": 10, "left": 72.0, "saved": 90.0, "note": "hm"}
    lines = progress_lines(facts, 102.0)
    assert "40/200" in lines[1]
    assert "waits for 0" in lines[2]
    assert lines[3:] == [" hm", " checkpoint 12 s ago · about 1 min 12 s left"]
    assert max(map(len, lines)) < 100


def test_names_are_not_cut() -> None:
    long = AGENT | {"host": "xavier-with-a-long-name", "task": "my_module.envs:MountainClimber-v1"}
    lines = progress_lines({"agents": [AGENT, long], "rounds": 10}, 0.0)
    assert "xavier-with-a-long-name" in lines[2] and "my_module.envs:MountainClimber-v1" in lines[2]
    assert len({line.index("40/200") for line in lines[1:3]}) == 1
    coloured_lines = coloured(lines, 200, 0.5).splitlines()
    assert len(coloured_lines) == len(lines) and "━" in coloured_lines[-1]


def test_a_run_began_when_it_first_did_and_took_the_time_of_all_its_sittings(
    tmp_path: Path,
) -> None:
    assert isnan(sittings(tmp_path)[0])
    seen = [("start", 100), ("round", 150), ("stopped", 160), ("resume", 900), ("round", 930)]
    lines = [json.dumps({"event": event, "time": when}) for event, when in seen]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert sittings(tmp_path) == (100, 90)


def test_odd_facts_are_shown_as_dashes() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"agents": None},
        {"agents": [None, 3, {}]},
        {"agents": [{"round": "x", "task": 5, "loss": [], "returns": "abc", "source": 1e400}]},
        {"agents": {}, "rounds": "many", "left": {}, "saved": [], "note": 7},
    ]
    for facts in odd:
        assert progress_lines(facts, 0.0)


def test_a_file_can_not_send_commands_to_the_terminal() -> None:
    nasty = AGENT | {"task": "\x1b[2J\x07evil", "host": "\x1b]0;x"}
    text = "\n".join(progress_lines({"agents": [nasty], "note": "\x1b[31m\r\n"}, 0.0))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_run_without_a_sign_of_life_has_died(tmp_path: Path) -> None:
    assert RunStatus(status(tmp_path / "a")).status == "running"
    assert RunStatus(status(tmp_path / "b", age=100)).status == "died"
    assert RunStatus(status(tmp_path / "c", age=100, status="finished")).status == "finished"


def test_a_run_whose_lock_is_held_is_alive(tmp_path: Path) -> None:
    folder = status(tmp_path / "a", age=1000)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert RunStatus(folder).status == "running"
    os.close(lock)
    assert RunStatus(folder).status == "died"


def test_looking_does_not_take_the_lock(tmp_path: Path) -> None:
    folder = status(tmp_path / "a")
    RunStatus(folder)
    assert not (folder / ".lock").exists()


def test_ls_lists_runs_newest_first(tmp_path: Path) -> None:
    for k, name in enumerate(("old", "new")):
        folder = status(tmp_path / name, status="finished", mean_hns=0.25)
        (folder / "job.toml").write_text("[evaluation]\nmax_steps = 3000\n")
        os.utime(folder, (k, k))
    (tmp_path / "other").mkdir()
    assert [run.name for run in runs_in(tmp_path)] == ["new", "old"]
    lines = run_lines([RunStatus(run) for run in runs_in(tmp_path)])
    assert lines[1].split()[:6] == ["new", "finished", "1", "2/10", "Krull", "25.0%"]


def test_ls_says_what_can_be_resumed(tmp_path: Path) -> None:
    dead = status(tmp_path / "a", age=500)
    (dead / "checkpoints" / "agent-0").mkdir(parents=True)
    (dead / "checkpoints" / "agent-0" / "learner.h5").write_bytes(b"x")
    assert RunStatus(dead).resumable
    assert run_lines([RunStatus(dead)])[1].endswith("yes")
    assert not RunStatus(status(tmp_path / "b")).resumable


def test_ls_of_nothing_says_so(tmp_path: Path) -> None:
    assert "holds no runs" in invoke("ls", str(tmp_path)).output
    assert isinstance(invoke("ls", str(tmp_path / "nothing")).exception, Exception)


def test_a_torn_or_odd_status_is_no_trouble(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"agents": 5, "time": "x"}', "\0\0"):
        (tmp_path / "status.json").write_text(text)
        assert run_lines([RunStatus(tmp_path)])
        assert metrics(RunStatus(tmp_path))
    (tmp_path / "status.json").unlink()
    os.mkfifo(tmp_path / "status.json")
    (tmp_path / "job.toml").symlink_to("/dev/zero")
    (tmp_path / "events.jsonl").mkdir()
    assert RunStatus(tmp_path).facts == {} and RunStatus(tmp_path).settings == {}
    assert list(events(tmp_path)) == []


def test_watch_shows_a_dead_run_once(tmp_path: Path) -> None:
    result = invoke("watch", str(status(tmp_path / "a", age=100)))
    assert result.exit_code == 0
    assert "died: no sign of life since 1 min 40 s ago, in round 2" in result.output


def test_watch_follows_a_run_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = status(tmp_path / "a")
    monkeypatch.setattr(
        status_module, "sleep", lambda seconds: status(folder, status="finished") and None
    )
    follow(folder, prometheus=tmp_path / "a.prom")
    assert "a: finished" in capsys.readouterr().out
    text = (tmp_path / "a.prom").read_text()
    assert 'canal_mpi_up{run="a",status="finished"} 0.0' in text
    assert 'canal_mpi_return{agent="0",run="a"} 12.5' in text


def test_files_that_are_not_ours_are_one_line_and_a_code(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(b"hello")
    os.mkfifo(tmp_path / "run.h5")
    cases = [(c, tmp_path / "x.h5", 2) for c in ("inspect", "report", "watch")]
    cases += [("inspect", tmp_path, 65), ("report", tmp_path, 65), ("watch", tmp_path, 2)]
    for command, path, code in cases:
        program = [sys.executable, "-m", "canal_mpi", command, str(path)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("canal-mpi: ") and done.stderr.count("\n") == 1


def test_looking_costs_less_than_a_second_of_cpu_and_loads_no_torch(tmp_path: Path) -> None:
    for k in range(10):
        write_run(status(tmp_path / f"run-{k}", age=100, status="finished"))
    heavy = {"torch", "mpi4py", "gymnasium", "ale_py"}
    for words, unwanted in (
        (["ls", f"{tmp_path}"], heavy | {"h5py"}),
        (["watch", f"{tmp_path}/run-3"], heavy | {"h5py"}),
        (["inspect", f"{tmp_path}/run-3"], heavy),
    ):
        program = (
            "import sys, time\nfrom canal_mpi.entry import main\n"
            f"sys.argv = ['canal-mpi', *{words!r}]\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
            f"print(sorted({unwanted!r} & set(sys.modules)), time.process_time())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        loaded, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
        assert loaded == "[]", done.stderr
        assert float(seconds) < 1.0
