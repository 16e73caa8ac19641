"""The engine of sweeps on made-up programs, and real sweeps that are killed half-way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import h5py
import pytest
from launch import environment, processes_with, run
from madeup import write_run

from canal_mpi.cli import cli
from canal_mpi.cluster import supervise
from canal_mpi.cluster.launch import Launch
from canal_mpi.commands.sweep import _tell_of_others
from canal_mpi.errors import DamagedData, RankFailed, UsageError
from canal_mpi.job import EvaluationConfig, Job, MemoryConfig
from canal_mpi.results.hdf5 import write_arrays
from canal_mpi.results.tree import differences
from canal_mpi.sweep import engine as engines
from canal_mpi.sweep import estimate
from canal_mpi.sweep.board import Board
from canal_mpi.sweep.engine import BROKEN, ELSEWHERE, FINISHED, STOPPED, Engine, Work, last_words
from canal_mpi.sweep.estimate import Pace, seconds_of, together
from canal_mpi.sweep.folder import load_points, save
from canal_mpi.sweep.grid import Point

FAKE = """
import signal, sys, time
from pathlib import Path
from canal_mpi.results.hdf5 import write_arrays
folder, how, resumes = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open(folder.parent / "calls", "a") as calls:
    calls.write(f"{folder.name} {'resumes' if resumes else 'starts'}\\n")
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
(folder / "checkpoints/agent-0").mkdir(parents=True, exist_ok=True)
(folder / "checkpoints/agent-0/round-1").touch()
if how in ("slow", "deaf"):
    time.sleep(60)
if how == "damaged" and resumes:
    sys.exit(65)
if how == "in use":
    sys.exit(73)
if how == "breaks":
    sys.exit("canal-mpi: the disk is full.")
write_arrays(folder / "run.h5", {}, {"status": "finished"})
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Runs that are made up; what each of them does, by its name."""
    how: dict[str, str] = {}

    def command(point: Point, folder: Path, resumes: bool) -> Launch:
        words = [str(folder / point.name), how.get(point.name, "works"), str(resumes)]
        return Launch([sys.executable, "-c", FAKE, *words])

    monkeypatch.setattr(engines, "command_of", command)
    return how


def a_point(name: str, ranks: int = 1) -> Point:
    return Point(name, Job(), ranks, {"name": name})


def swept(folder: Path, *points: Point, slots: int = 2) -> tuple[Engine, list[str]]:
    """Run points; the engine, and what it told."""
    told: list[str] = []
    engine = Engine(folder, points, slots, lambda what, w: told.append(f"{what} {w.point.name}"))
    engine.run()
    return engine, told


def calls(folder: Path) -> list[str]:
    return sorted((folder / "calls").read_text().splitlines())


@pytest.mark.usefixtures("fake")
def test_points_run_at_once_as_far_as_they_fit_and_finished_ones_never_again(
    tmp_path: Path,
) -> None:
    engine, told = swept(tmp_path, *(a_point(name) for name in "abc"))
    assert told[:2] == ["started a", "started b"] and told[2].startswith("finished")
    assert len(engine.of(FINISHED)) == 3
    before = {name: (tmp_path / name / "run.h5").stat().st_mtime_ns for name in "abc"}
    engine, told = swept(tmp_path, *(a_point(name) for name in "abcd"))
    assert told == ["started d", "finished d"]
    assert {name: (tmp_path / name / "run.h5").stat().st_mtime_ns for name in "abc"} == before
    assert calls(tmp_path) == ["a starts", "b starts", "c starts", "d starts"]


@pytest.mark.usefixtures("fake")
def test_a_point_that_is_too_large_runs_alone(tmp_path: Path) -> None:
    _, told = swept(tmp_path, a_point("a", 5), a_point("b", 5))
    assert told == ["started a", "finished a", "started b", "finished b"]


def test_a_broken_point_does_not_stop_the_others_and_says_why(
    fake: dict[str, str], tmp_path: Path
) -> None:
    fake["a"] = "breaks"
    engine, _ = swept(tmp_path, a_point("a"), a_point("b"))
    assert [w.point.name for w in engine.of(FINISHED)] == ["b"]
    broken = engine.of(BROKEN)[0]
    assert broken.why == "the disk is full."
    assert "broken" in "\n".join(Board(engine).lines())
    fake["a"] = "works"
    engine, told = swept(tmp_path, a_point("a"), a_point("b"))
    assert told == ["resumed a", "finished a"]


def test_the_reason_is_of_this_start_and_no_warning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("canal-mpi: the old trouble.\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("canal-mpi: warning: it is late.\n")
    assert last_words(log, since) == f"see {log}"
    with log.open("a") as file:
        file.write("canal-mpi: the disk is full.\ncanal-mpi: warning: it is late.\n")
    assert last_words(log, since) == "the disk is full."


def begin(folder: Path) -> None:
    """Leave a checkpoint, as a run that was stopped does."""
    (folder / "checkpoints/agent-0").mkdir(parents=True)
    (folder / "checkpoints/agent-0/round-1").touch()


def test_only_a_point_with_damaged_checkpoints_is_repeated_from_its_start(
    fake: dict[str, str], tmp_path: Path
) -> None:
    begin(tmp_path / "a")
    begin(tmp_path / "b")
    fake |= {"a": "damaged", "b": "breaks"}
    _, told = swept(tmp_path, a_point("a"), slots=1)
    assert told == ["resumed a", "repeated a", "started a", "finished a"]
    _, told = swept(tmp_path, a_point("b"))
    assert told == ["resumed b", "broken b"] and calls(tmp_path).count("b starts") == 0


def test_a_signal_stops_politely_and_the_next_start_goes_on(
    fake: dict[str, str], tmp_path: Path
) -> None:
    fake["a"] = "slow"
    told: list[str] = []
    engine = Engine(tmp_path, [a_point("a"), a_point("b")], 1, lambda what, w: told.append(what))

    def interrupt() -> None:
        if (tmp_path / "a/checkpoints/agent-0/round-1").exists() and not engine.asked:
            os.kill(os.getpid(), signal.SIGINT)

    engine.run(interrupt)
    assert told == ["started", STOPPED] and engine.asked == "SIGINT"
    assert not (tmp_path / "b").exists()
    fake["a"] = "works"
    swept(tmp_path, a_point("a"), a_point("b"))
    assert calls(tmp_path) == ["a resumes", "a starts", "b starts"]


def test_a_signal_that_comes_while_a_point_is_being_started_is_not_lost(
    fake: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake["a"] = "slow"
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    engine = Engine(tmp_path, [a_point("a")], 1)
    begun = time.monotonic()
    engine.run()
    assert engine.asked == "SIGTERM" and engine.works[0].status == STOPPED
    assert time.monotonic() - begun < 40  # it would sleep for 60 s


def test_a_second_signal_ends_what_does_not_listen(
    fake: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PATIENCE", 0.5)
    fake["a"] = "deaf"
    engine = Engine(tmp_path, [a_point("a")], 1)

    def interrupt() -> None:
        if (tmp_path / "a/checkpoints/agent-0/round-1").exists():
            os.kill(os.getpid(), signal.SIGINT)

    engine.run(interrupt)
    assert engine.works[0].status == STOPPED


def test_a_time_limit_stops_politely_too(fake: dict[str, str], tmp_path: Path) -> None:
    fake["a"] = "slow"
    engine = Engine(tmp_path, [a_point("a"), a_point("b")], 1)
    engine.run(limit=2.0)
    assert engine.asked == "its time is over (--max-time)"
    assert [w.point.name for w in engine.of(STOPPED)] == ["a"]


@pytest.mark.usefixtures("fake")
def test_a_point_that_another_process_runs_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    hold = f"import fcntl, time; f = open({str(folder / '.lock')!r}, 'w'); "
    hold += "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        engine = Engine(tmp_path, [a_point("a")], 2)
        seen: list[str] = []

        def finish_it() -> None:
            seen.append(engine.works[0].status)
            write_arrays(folder / "run.h5", {}, {"status": "finished"})
            other.kill()

        engine.run(finish_it)
    assert seen[0] == ELSEWHERE and engine.works[0].status == FINISHED
    assert not (tmp_path / "calls").exists()


def test_a_point_that_was_in_use_after_all_is_left_alone_for_a_while(
    fake: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LATER", 2.0)
    fake["a"] = "in use"
    engine = Engine(tmp_path, [a_point("a")], 1)

    def free() -> None:
        fake["a"] = "works" if engine.works[0].status == ELSEWHERE else fake["a"]

    engine.run(free)
    starts = (tmp_path / "logs/a.log").read_text().count("-c")
    assert engine.works[0].status == FINISHED and starts == 2


def test_a_report_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, [a_point("a", 2), a_point("b", 2)])
    write_run(tmp_path / "a")
    (tmp_path / "a/job.toml").unlink()  # it is of another job
    cli(["sweep", "--resume", str(tmp_path), "--report"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "1 of 2 points are finished" in said and (tmp_path / "report.html").is_file()
    assert not (tmp_path / "logs").exists() and not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match="of which sweep"):
        cli(["sweep", "--report"], standalone_mode=False)


def test_a_report_says_how_runs_that_are_not_finished_were_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["stopped", "died", "torn", "failed", "new"]
    save(tmp_path, [a_point(name, 2) for name in names])
    write_run(tmp_path / "stopped", status="stopped")
    write_run(tmp_path / "died", status="running")
    write_run(tmp_path / "torn")
    (tmp_path / "torn/run.h5").write_bytes(b"hi")
    for name in names:  # they are of other jobs
        (tmp_path / name / "job.toml").unlink(missing_ok=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/failed.log").write_text("canal-mpi: something\n")
    os.utime(tmp_path / "logs/failed.log", (1, 1))
    cli(["sweep", "--resume", str(tmp_path), "--report"], standalone_mode=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    told = {words[0]: words[1] for words in lines if words[0] in names}
    assert told == {
        "stopped": "stopped",
        "died": "broken",
        "torn": "damaged",
        "failed": "broken",
        "new": "waiting",
    }


def test_settings_in_which_two_runs_differ_are_named(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert "@job: seed is 1 against 2" in differences(one, other)
    assert differences(one, one) == []


def test_a_later_sweep_of_a_folder_tells_what_is_no_part_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, [a_point("a"), a_point("b")])
    _tell_of_others(tmp_path, [a_point("b"), a_point("c")])
    assert "1 points of an earlier sweep (a …) are no part of this one" in capsys.readouterr().err
    _tell_of_others(tmp_path, [a_point("b"), a_point("a")])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda points: points.append(points[0]), "a point is there twice"),
        (lambda points: points[0]["settings"].update(arm="x"), "some points are of a study"),
        (lambda points: points[0]["settings"].update(name="a\n| b |"), "the settings of 'a'"),
    ],
)
def test_an_index_that_nobody_wrote_so_is_refused(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    save(tmp_path, [a_point("a"), a_point("b")])
    facts = json.loads((tmp_path / "sweep.json").read_text())
    change(facts["points"])
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    with pytest.raises(DamagedData, match=words):
        load_points(tmp_path)


def test_a_run_on_another_node_is_not_called_broken(tmp_path: Path) -> None:
    """Its locks are not seen here, its heartbeat is; or its log is just being begun."""
    work = Work(a_point("a"), write_run(tmp_path / "a", status="running"), tmp_path / "a.log")
    (tmp_path / "a/status.json").write_text(json.dumps({"status": "running", "time": time.time()}))
    assert work.found() == ELSEWHERE
    (tmp_path / "a/status.json").write_text(json.dumps({"status": "running", "time": 1.0}))
    assert work.found() == BROKEN
    (tmp_path / "a.log").touch()
    assert work.found() == ELSEWHERE


def test_a_point_that_is_much_smaller_tells_nothing_of_the_time_left(tmp_path: Path) -> None:
    small, large = a_point("small"), a_point("large")
    small = replace(small, job=replace(small.job, train=replace(small.job.train, frames=1)))
    engine = Engine(tmp_path, [small, large], 2)
    engine.works[0].status, engine.works[0].seconds = FINISHED, 2.0
    assert isnan(Board(engine).left())


def test_the_time_left_is_told_from_what_is_finished(tmp_path: Path) -> None:
    engine = Engine(tmp_path, [a_point(name) for name in "abcd"], 2)
    states = [(FINISHED, 10.0), (FINISHED, 20.0), ("running", 5.0), ("waiting", 0.0)]
    for work, (status, seconds) in zip(engine.works, states, strict=True):
        work.status, work.seconds = status, seconds
    assert Board(engine).left() == 10 + 15
    assert "2 of 4 points are finished · about 25 s left" in Board(engine).lines()[-1]


def test_a_trial_that_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "LONGEST", 0.01)
    with pytest.raises(RankFailed, match="the trial of 600 steps took more than"):
        estimate.pace_of(Job(tasks=("CartPole-v1",)))


def test_a_table_is_no_higher_than_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "12")
    board = Board(Engine(tmp_path, [a_point(f"p{k}") for k in range(40)], 2))
    board._terminal = True
    assert len(board.lines()) < 12 and " … and 33 more" in board.lines()


def test_estimates_count_steps_crowding_and_slow_devices() -> None:
    pace = Pace(env=0.0005, learn=0.0005, episode=0.2)
    job = Job(tasks=("a", "b"), memory=MemoryConfig(rows=0))
    one = seconds_of(Point("x", job, 1), pace)
    assert one == pytest.approx(4 + 2 * (20 + 1))
    rehearses = Job(tasks=("a", "b"))  # a third more updates
    assert seconds_of(Point("x", rehearses, 1), pace) == pytest.approx(4 + 2 * (10 + 10 / 0.75 + 1))
    looks = EvaluationConfig(every=5000, tasks="seen")  # 4 inside a task, the other task in half
    often = replace(job, evaluation=looks)
    assert seconds_of(Point("x", often, 1), pace) == pytest.approx(4 + 2 * (20 + 5.5))
    crowd = seconds_of(Point("x", job, 1000), pace)
    assert crowd > 100 * one
    slow = seconds_of(Point("x", replace(job, emulate=("n@0.25",)), 1), pace)
    assert slow == pytest.approx(4 + 2 * 21 * 4)
    assert together([a_point("a"), a_point("b")], [10.0, 10.0], slots=2) == 10.0
    assert together([a_point("a", 2), a_point("b", 2)], [10.0, 10.0], slots=2) == 20.0


def test_work_knows_its_own_run(tmp_path: Path) -> None:
    work = Work(a_point("a"), tmp_path / "a", tmp_path / "log")
    work.look()
    assert work.status == "waiting"


# Real ranks

JOB = """
tasks = ["CartPole-v1", "Acrobot-v1"]
order = "rotate"
[train]
frames = 400
[learn]
algorithm = "linear"
batch = 32
starts = 32
[evaluation]
episodes = 1
max_steps = 50
tasks = "all"
[reuse]
admission = false
[checkpoint]
every = 50
"""
MIXES = {
    "nano2": "nano-[1-2] speed=0.5\n",
    "nano1-xavier1": "xavier-1\nnano-1 speed=0.5\n",
    "xavier2": "xavier-[1-2]\n",
}


def run_ids(folder: Path) -> dict[str, tuple[str, int]]:
    """Of every finished point: the id of its run, and when its file was written last."""
    found = {}
    for file in folder.glob("*/run.h5"):
        with h5py.File(file) as run_file:
            if run_file.attrs["status"] == "finished":
                found[file.parent.name] = (run_file.attrs["run_id"], file.stat().st_mtime_ns)
    return found


@pytest.mark.mpi
def test_three_emulated_mixes_and_two_seeds_killed_half_way_repeat_nothing_that_was_finished(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    for name, text in MIXES.items():
        (tmp_path / f"{name}.hosts").write_text(text)
    out = tmp_path / "sweep"
    command = ["canal-mpi", "sweep", "--job", str(tmp_path / "job.toml"), "--slots", "4"]
    command += ["--hostfiles", str(tmp_path / "*.hosts"), "--emulate", "--seeds", "2"]
    command += ["--out", str(out)]
    first = subprocess.Popen(command, env=environment("openmpi"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(run_ids(out)) < 2 or not list(out.glob("xavier2*/checkpoints/*/round-*")):
        if len(run_ids(out)) >= 4:
            break
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    while processes_with(str(out)):
        assert time.monotonic() < deadline  # mpirun is told, saves and ends
        time.sleep(0.05)
    before = run_ids(out)
    assert 2 <= len(before) < 6

    again = run(command, timeout=240)
    assert again.code == 0, again.out + again.err
    after = run_ids(out)
    assert len(after) == 6 and {name: after[name] for name in before} == before
    for name in before:
        assert f"started  {name}" not in again.out and f"resumed  {name}" not in again.out
    page = (out / "report.html").read_text()
    assert "2 nano" in page and "1 xavier, 1 nano" in page and "2 xavier" in page
    assert "nano-1 at 0.5 of full speed" in page
    with h5py.File(out / "sweep.h5") as file:
        assert list(file["points/status"][()]) == [b"finished"] * 6
        assert list(file["points/slowest"][()]) == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
        assert list(file["settings/seed"][()]) == [b"1", b"2"] * 3
    assert run(["canal-mpi", "inspect", "--verify", str(out / "sweep.h5")]).code == 0
    bits = differences(out / "nano2_seed-1", out / "xavier2_seed-1")
    assert all("job" in words for words in bits), bits  # slowness changes no result


@pytest.mark.mpi
def test_ctrl_c_stops_a_sweep_politely_and_says_how_to_go_on(mpi: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("400", "40000"))
    out = tmp_path / "sweep"
    command = ["canal-mpi", "sweep", "--job", str(tmp_path / "job.toml"), "-n", "2"]
    process = subprocess.Popen(
        [*command, "--seeds", "2", "--out", str(out)],
        env=environment(mpi),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while len(list(out.glob("*seed-1/checkpoints/*/round-*"))) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=60)
    assert process.returncode == 75, said + err
    assert f"To go on: canal-mpi sweep --resume {out}" in err
    assert "0 of 2 points are finished" in err
    assert processes_with(str(out)) == []
