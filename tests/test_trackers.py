"""Trackers beside a run: their files, read back by their own libraries, and what can't hurt it."""

import os
import re
import signal
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from launch import environment, processes_with
from launch import run as run_command
from madeup import write_run

import canal_mpi
from canal_mpi.rank.display import Trackers
from canal_mpi.trackers import Follower, TensorBoard, follow, scalars

Curves = dict[tuple[int, str], list[tuple[int, float]]]
TASKS = ("--tasks", "small:SmallRight-v0,small:SmallLeft-v0", "--steps", "400", "-q")
QUICK = ("--set", "evaluation.max_steps=12", "--set", "learn.widths=[8]")


def curves_of(run: Path) -> Curves:
    """The curves of run.h5, with 32 bits: the trackers' own precision."""
    found: Curves = defaultdict(list)
    for agent, tag, step, value in scalars(canal_mpi.load(run)):
        found[agent, tag].append((step, struct.unpack("f", struct.pack("f", value))[0]))
    return dict(found)


def tensorboard_curves(folder: Path) -> Curves:
    """What TensorBoard itself reads from the event files."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: Curves = {}
    for agent in sorted(folder.glob("agent-*")):
        events = reader.EventAccumulator(str(agent), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            points = [(event.step, event.value) for event in events.Scalars(tag)]
            found[int(agent.name.removeprefix("agent-")), tag] = points
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a W&B file, by its protocol: blocks as those of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def wandb_curves(path: Path) -> Curves:
    found: Curves = defaultdict(list)
    for record in wandb_records(path):
        items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        for name, value in items.items():
            agent, _, tag = name.partition("/")
            if agent.startswith("agent-"):
                step = int(float(items["step"]))
                number = struct.unpack("f", struct.pack("f", float(value)))[0]
                found[int(agent.removeprefix("agent-")), tag].append((step, number))
    return dict(found)


def as_tags(curves: Curves) -> Curves:
    """With the names that TensorBoard makes of ours: `small_SmallLeft-v0/loss`."""
    return {(agent, re.sub(r"[^-/\w.]", "_", tag)): p for (agent, tag), p in curves.items()}


def without_live(curves: Curves) -> Curves:
    return {key: points for key, points in curves.items() if not key[1].startswith("live/")}


@pytest.mark.mpi
def test_tensorboard_and_wandb_hold_the_curves_of_a_run(out: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra: look)")
    command = ["mpirun", "-np", "2", "canal-mpi", "train", *TASKS, *QUICK, "--out", str(out)]
    command += ["--track", "tensorboard,wandb,prometheus"]
    done = run_command(command, timeout=240, WANDB_MODE="offline")
    assert done.code == 0, done.err
    assert done.complaints == []
    curves = curves_of(out)
    assert {agent for agent, _ in curves} == {0, 1}
    assert without_live(tensorboard_curves(out / "tensorboard")) == as_tags(curves)
    (file,) = out.glob("wandb/offline-run-*/*.wandb")
    assert without_live(wandb_curves(file)) == curves
    assert 'canal_mpi_up{run="run",status="finished"} 0.0' in (out / "metrics.prom").read_text()


class Memory:
    """A tracker that only remembers."""

    def __init__(self) -> None:
        self.points: Curves = defaultdict(list)

    def scalar(self, agent: int, tag: str, step: int, value: float) -> None:
        self.points[agent, tag].append((step, value))

    def close(self) -> None:
        """Everything is in `points`."""


def test_every_point_is_sent_once_however_often_the_file_is_read(tmp_path: Path) -> None:
    write_run(tmp_path)
    run, tracker = canal_mpi.load(tmp_path), Memory()
    follower = Follower(tracker)
    for _ in range(3):
        follower.add_rows(run)
    sent = sum(len(points) for points in tracker.points.values())
    assert sent == len(list(scalars(run))) > 0


def test_a_run_that_is_over_is_tracked_as_a_whole(tmp_path: Path) -> None:
    write_run(tmp_path)
    follow(tmp_path, TensorBoard(tmp_path))
    assert without_live(tensorboard_curves(tmp_path / "tensorboard")) == curves_of(tmp_path)


def started(tmp_path: Path, wandb: str, said: list[str]) -> Trackers:
    """A tracker whose library is this text: a file in front of it stands in for another venv."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "wandb.py").write_text(wandb)
    trackers = Trackers(tmp_path, said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        trackers.start(["wandb"])
    return trackers


def test_a_library_that_is_missing_is_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = started(tmp_path, "raise ImportError('no wandb here')", said)
    trackers.check(120.0)
    trackers.check()
    assert len(said) == 1
    assert said[0].startswith("--track wandb has failed, the run goes on: canal_mpi.errors.UsageE")
    assert said[0].endswith("this needs wandb: pip install 'canal-mpi[wandb]'.")


def test_a_tracker_that_cannot_start_is_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = Trackers(tmp_path / "nowhere", said.append)  # no folder for its log
    trackers.start(["tensorboard"])
    trackers.check(5.0)
    assert len(said) == 1
    assert said[0].startswith("--track tensorboard can't be started: [Errno 2]")


def test_a_full_disk_of_a_tracker_is_one_warning_and_the_run_ends_well(out: Path) -> None:
    """A folder in the place of its file stands in for the disk: every write fails."""
    command = ["canal-mpi", "train", *TASKS, *QUICK, "--out", str(out), "--track", "prometheus"]
    with subprocess.Popen(
        command, env=environment("openmpi"), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = monotonic() + 120
        while not out.exists() and monotonic() < deadline:
            sleep(0.01)
        (out / "metrics.prom").mkdir()  # nothing can be written there
        err = process.communicate(timeout=240)[1]
    warnings = [line for line in err.splitlines() if "warning" in line]
    assert process.returncode == 0, err
    assert len(warnings) == 1
    assert "--track prometheus has failed, the run goes on" in warnings[0]
    assert canal_mpi.load(out).status == "finished"


def test_a_tracker_that_does_not_end_is_killed_with_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = started(tmp_path, "import time; time.sleep(600)", said)
    trackers.check()
    assert said == []
    trackers.check(1.0)
    trackers.check(1.0)
    assert said == ["--track wandb did not end within 1 s and was killed."]
    assert processes_with(f"canal_mpi.trackers {tmp_path}") == []


def test_a_killed_tracker_is_one_warning_and_the_run_ends_well(out: Path) -> None:
    command = ["canal-mpi", "train", *TASKS, *QUICK, "--out", str(out), "--track", "tensorboard"]
    with subprocess.Popen(
        command, env=environment("openmpi"), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = monotonic() + 120
        while not (found := processes_with(f"canal_mpi.trackers {out}")):
            assert monotonic() < deadline
            sleep(0.01)
        os.kill(found[0], signal.SIGKILL)
        err = process.communicate(timeout=240)[1]
    assert process.returncode == 0, err
    warnings = [line for line in err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "--track tensorboard has failed, the run goes on: it was killed" in warnings[0]
    assert canal_mpi.load(out).status == "finished"


def test_unknown_trackers_are_refused(out: Path) -> None:
    command = [sys.executable, "-m", "canal_mpi", "train", "--track", "mlflow", "--out", str(out)]
    done = run_command(command)
    assert done.code == 2
    assert "unknown value for track 'mlflow'; known: prometheus, tensorboard, wandb." in done.err
