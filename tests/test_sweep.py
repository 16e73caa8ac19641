"""The runner of sweeps on made-up programs, and real sweeps that are killed half-way."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from click.testing import CliRunner
from launch import environment, processes_with, run
from madeup import write_run

from canal_mpi.cli import cli
from canal_mpi.config import from_toml
from canal_mpi.errors import UsageError
from canal_mpi.experiments import runner as runners
from canal_mpi.experiments.points import FINISHED, Point, save
from canal_mpi.experiments.runner import (
    BROKEN,
    STOPPED,
    Runner,
    command_of,
    dry_run,
    guess,
    last_error,
    seconds_left,
    show,
    table,
)
from canal_mpi.results.files import write_arrays
from canal_mpi.results.inspect import differences
from canal_mpi.settings import Job

FAKE = """
import signal, sys, time
from pathlib import Path
from canal_mpi.results.files import write_arrays
folder, how, resumes = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open(folder.parent / "calls", "a") as calls:
    calls.write(f"{folder.name} {'resumes' if resumes else 'starts'}\\n")
if how == "deaf":  # until it is told to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
(folder / "checkpoints/agent-0").mkdir(parents=True, exist_ok=True)
(folder / "checkpoints/agent-0/round-1").touch()
if how in ("slow", "deaf"):
    time.sleep(60)
if how == "damaged" and resumes:
    sys.exit(65)
if how == "breaks":
    sys.exit("canal-mpi: the disk is full.")
write_arrays(folder / "run.h5", {}, {"status": "finished"})
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Runs that are made up; what each of them does, by its name."""
    how: dict[str, str] = {}

    def command(point: Point, folder: Path, resumes: bool) -> list[str]:
        words = [str(folder / point.name), how.get(point.name, "works"), str(resumes)]
        return [sys.executable, "-c", FAKE, *words]

    monkeypatch.setattr(runners, "command_of", command)
    return how


def a_point(name: str, ranks: int = 1) -> Point:
    return Point(name, Job(), ranks, {"name": name})


def swept(folder: Path, *points: Point, slots: int = 2) -> tuple[Runner, list[str]]:
    """Run points; the runner, and what it told."""
    runner = Runner(folder, points, slots)
    return runner, [f"{run.change} {run.point.name}" for run in runner.run() if run]


def calls(folder: Path) -> list[str]:
    return sorted((folder / "calls").read_text().splitlines())


@pytest.mark.usefixtures("fake")
def test_points_run_at_once_as_far_as_they_fit_and_finished_ones_never_again(
    tmp_path: Path,
) -> None:
    runner, told = swept(tmp_path, *(a_point(name) for name in "abc"))
    assert told[:2] == ["started a", "started b"] and told[2].startswith("finished")
    assert len(runner.having(FINISHED)) == 3
    before = {name: (tmp_path / name / "run.h5").stat().st_mtime_ns for name in "abc"}
    runner, told = swept(tmp_path, *(a_point(name) for name in "abcd"))
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
    runner, _ = swept(tmp_path, a_point("a"), a_point("b"))
    assert [run.point.name for run in runner.having(FINISHED)] == ["b"]
    broken = runner.having(BROKEN)[0]
    assert broken.reason == "the disk is full."
    assert "broken" in "\n".join(table(runner))
    fake["a"] = "works"
    runner, told = swept(tmp_path, a_point("a"), a_point("b"))
    assert told == ["resumed a", "finished a"]


def test_the_reason_is_of_this_start_and_no_warning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("canal-mpi: the old trouble.\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("canal-mpi: warning: it is late.\n")
    assert last_error(log, since) == f"see {log}"
    with log.open("a") as file:
        file.write("canal-mpi: the disk is full.\ncanal-mpi: warning: it is late.\n")
    assert last_error(log, since) == "the disk is full."


def start_process(folder: Path) -> None:
    """Leave a checkpoint, as a run that was stopped does."""
    (folder / "checkpoints/agent-0").mkdir(parents=True)
    (folder / "checkpoints/agent-0/round-1").touch()


def test_only_a_point_with_damaged_checkpoints_is_repeated_from_its_start(
    fake: dict[str, str], tmp_path: Path
) -> None:
    start_process(tmp_path / "a")
    start_process(tmp_path / "b")
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
    runner = Runner(tmp_path, [a_point("a"), a_point("b")], 1)
    for changed in runner.run():
        told += [changed.change] if changed else []
        if (tmp_path / "a/checkpoints/agent-0/round-1").exists() and not runner.stop_reason:
            os.kill(os.getpid(), signal.SIGINT)
    assert told == ["started", STOPPED] and runner.stop_reason == "SIGINT"
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
    runner = Runner(tmp_path, [a_point("a")], 1)
    begun = time.monotonic()
    list(runner.run())
    assert runner.stop_reason == "SIGTERM" and runner.runs[0].status == STOPPED
    assert time.monotonic() - begun < 40  # it would sleep for 60 s


def test_a_second_signal_ends_what_does_not_listen(fake: dict[str, str], tmp_path: Path) -> None:
    fake["a"] = "deaf"
    runner = Runner(tmp_path, [a_point("a")], 1)
    for _ in runner.run():
        if (tmp_path / "a/checkpoints/agent-0/round-1").exists():
            os.kill(os.getpid(), signal.SIGINT)
    assert runner.runs[0].status == STOPPED


def test_a_time_limit_stops_politely_too(fake: dict[str, str], tmp_path: Path) -> None:
    fake["a"] = "slow"
    runner = Runner(tmp_path, [a_point("a"), a_point("b")], 1)
    list(runner.run(limit=2.0))
    assert runner.stop_reason == "its time is over (--max-time)"
    assert [run.point.name for run in runner.having(STOPPED)] == ["a"]


@pytest.mark.usefixtures("fake")
def test_a_point_whose_ranks_outlived_their_sweep_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    hold = f"import fcntl, time; f = open({str(folder / '.lock')!r}, 'w'); "
    hold += "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        runner = Runner(tmp_path, [a_point("a")], 2)
        seen: list[str] = []
        for _ in runner.run():
            seen.append(runner.runs[0].status)
            write_arrays(folder / "run.h5", {}, {"status": "finished"})
            other.kill()
    assert seen[0] == "waiting" and runner.runs[0].status == FINISHED
    assert not (tmp_path / "calls").exists()


def madeup_point(folder: Path, name: str, **given: Any) -> Point:
    """A point whose run is made up."""
    run = write_run(folder / name, **given)
    return Point(name, from_toml((run / "job.toml").read_text()), 2, {"name": name})


def test_a_report_starts_nothing_and_runs_of_other_jobs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [madeup_point(tmp_path, name, seed=seed) for seed, name in enumerate("ac")]
    save(tmp_path, "sweep", [there[0], a_point("b", 2), there[1]])
    command = ["report", str(tmp_path)]
    cli(command, standalone_mode=False)
    assert "2 of 3 points are finished" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["a", "c"] and float(rows[0]["seconds"]) == 24
    assert not (tmp_path / "logs").exists() and not (tmp_path / "b").exists()
    (tmp_path / "c/run.h5").write_bytes((tmp_path / "a/run.h5").read_bytes())
    with pytest.raises(UsageError, match=r"c is a run of another job \(seed: 0 there, 1 here\)"):
        cli(command, standalone_mode=False)


def test_of_a_finished_point_of_a_study_only_what_a_report_needs_is_kept(
    fake: dict[str, str], tmp_path: Path
) -> None:
    fake["a"] = "works"
    runner = Runner(tmp_path, [a_point("a")], 1, of_study=True)
    list(runner.run())
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["run.h5"]


def test_a_point_is_launched_with_its_job_alone_on_its_hosts(tmp_path: Path) -> None:
    point = replace(a_point("a", 3), servers=2, hostfile="/my.hosts", network="eth0")
    save(tmp_path, "sweep", [point])
    words = command_of(point, tmp_path, resumes=False)[1:]
    assert words[:6] == ["launch", "-n", "3", "--hostfile", "/my.hosts", "--network"]
    assert words[6:11] == ["eth0", "--", "train", "--out", f"{tmp_path}/a"]
    assert words[11:] == ["--force", "--job", f"{tmp_path}/jobs/a.toml", "--env-servers", "2"]
    again = command_of(a_point("a"), tmp_path, resumes=True)[1:]
    assert again == ["launch", "-n", "1", "--", "train", "--resume", f"{tmp_path}/a"]


@pytest.mark.slow
def test_the_report_of_a_comparison_tells_its_answer_in_a_sentence_and_draws_it_as_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [madeup_point(tmp_path, name, share=name == "exact") for name in ("none", "exact")]
    save(tmp_path, "sweep", points)
    cli(["report", str(tmp_path)], standalone_mode=False)
    said = capsys.readouterr().out.splitlines()[4:]
    assert said[0].startswith("Sharing: about the same score at the end (")
    assert "× fewer steps" in said[0] and said[0].endswith("; one seed: may be luck.")
    files = {"Table": "table.csv", "Figures": "figures", "Report": "report.html"}
    assert said[1:] == [f"{f'{name}:':<8} {tmp_path / file}" for name, file in files.items()]
    pictures = {file.name for file in (tmp_path / "figures").iterdir()}
    assert {f"progress-time.{kind}" for kind in ("pdf", "svg", "png")} < pictures
    save(tmp_path, "sweep", points[:1])  # the other is not there yet
    cli(["report", str(tmp_path)], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-2].startswith("Table:")
    with pytest.raises(UsageError, match=r"goes into its own folder.*--out"):
        cli(["report", str(tmp_path), "--out", "x.html"], standalone_mode=False)


def test_compare_runs_the_same_job_without_sharing_and_with_it(tmp_path: Path) -> None:
    command = ["compare", "--dry-run", "--out", str(tmp_path / "new")]
    told = CliRunner().invoke(cli, command, standalone_mode=False, catch_exceptions=False).output
    assert [line.split()[0] for line in told.splitlines()[1:3]] == ["none", "exact"]
    assert "2 points, 0 finished" in told and not (tmp_path / "new").exists()


def test_settings_in_which_two_runs_differ_are_named(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert "@job: seed is 1 against 2" in differences(one, other)
    assert differences(one, one) == []


def test_the_time_left_is_guessed_and_put_right_by_what_is_finished(tmp_path: Path) -> None:
    runner = Runner(tmp_path, [a_point(name) for name in "abcd"], 2)
    each = guess(runner.runs[0].point)
    assert seconds_left(runner) == pytest.approx(2 * each)
    states = [(FINISHED, 10.0), (FINISHED, 20.0), ("running", 5.0), ("waiting", 0.0)]
    for point_run, (status, seconds) in zip(runner.runs, states, strict=True):
        point_run.status, point_run.seconds = status, seconds
    assert seconds_left(runner) == pytest.approx(15)  # the last one alone
    assert "2 of 4 points are finished · about 15 s left" in table(runner)[-1]


def test_a_line_is_printed_for_each_change(
    fake: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake["[a]"] = "breaks"
    show(Runner(tmp_path, [a_point("[a]"), a_point("b", 5)], 2))
    broken, finished = "broken   [a]: the disk is full.", "finished b in "
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["started  [a]", broken, "started  b"] and len(lines) == 4
    assert lines[3].startswith(finished) and " s · 1 of 2 points are finished" in lines[3]


def test_guesses_count_lessons_crowding_and_slow_devices() -> None:
    job = Job(tasks=("a", "b"), order="rotate")
    one = guess(Point("x", job, 1))
    assert guess(Point("x", job, 100)) > 20 * one
    assert guess(Point("x", replace(job, emulate=("n@0.25",)), 1)) > 3 * one
    alone = replace(job, share=replace(job.share, policy="none"))
    assert guess(Point("x", job, 2)) < 0.9 * guess(Point("x", alone, 2))


def test_a_dry_run_tells_groups_of_seeds_by_what_their_runs_took(tmp_path: Path) -> None:
    """A run of 30 s is finished; of the second group there is none."""
    job = madeup_point(tmp_path, "a").job  # 3 tasks of 10 s each
    found = [Point(n, job, 2, {"arm": n[0], "seed": n}) for n in ("a", "a2", "b1")]
    lines = dry_run(Runner(tmp_path, found, slots=2), tmp_path)
    assert [line.split()[:4] for line in lines[1:3]] == [["a", "2", "2", "1"], ["b", "2", "1", "0"]]
    assert lines[1].endswith("about 30 s") and lines[2].endswith("about 30 s, a guess")
    assert lines[-1].startswith(" 3 points, 1 finished · with 2 slots about 1 min 0 s to go")


# Real ranks

JOB = """
tasks = ["CartPole-v1", "Acrobot-v1"]
order = "rotate"
[train]
steps = 400
[learn]
widths = [8]
batch_size = 32
learning_starts = 32
[evaluation]
episodes = 1
max_steps = 50
tasks = "all"
[checkpoint]
interval = 50
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


@pytest.mark.slow
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
    deadline = time.monotonic() + 300
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
    assert "nano at 0.5 of full speed" in page
    with (out / "table.csv").open() as table_file:
        rows = list(csv.DictReader(table_file))
    assert [row["seed"] for row in rows] == ["1", "2"] * 3
    assert [row["hosts"] for row in rows[::2]] == ["nano1-xavier1", "nano2", "xavier2"]
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
