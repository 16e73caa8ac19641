"""How long points will take on this machine: from runs that are finished, or from a short trial."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from canal_mpi import config
from canal_mpi.cluster.launch import Launch
from canal_mpi.cluster.marker import status_of
from canal_mpi.cluster.mpis import program
from canal_mpi.errors import RankFailed, UsageError
from canal_mpi.job import Job
from canal_mpi.rank.emulate import devices
from canal_mpi.results.reading import load
from canal_mpi.sweep.engine import FINISHED, cores
from canal_mpi.sweep.grid import Point

STEPS = 600  # of the trial
START = 4.0  # seconds until the first step of a run
LONGEST = 300.0  # seconds that the trial may take


@dataclass(frozen=True)
class Pace:
    """What one agent needs when it has a core for itself."""

    env: float  # seconds of a step in the environment
    learn: float  # seconds of its updates
    episode: float  # seconds of an evaluation episode


def seconds_of_all(points: Sequence[Point]) -> dict[str, float]:
    """At most so long takes each point; one agent plays a little to find out."""
    longest = max(points, key=lambda point: (point.job.train.frames, point.ranks))
    pace = pace_of(longest.job)
    return {point.name: seconds_of(point, pace) for point in points}


def pace_of(job: Job) -> Pace:
    """Measured: one agent plays a part of its first task."""
    frames = min(STEPS, job.train.frames)
    half = max(frames // 2, 1)  # in the first one things are loaded and compiled
    train = replace(job.train, frames=frames, rounds=1, log_every=half)
    short = replace(job, emulate=(), train=train)
    with TemporaryDirectory(prefix="canal-") as folder:
        run, file = Path(folder) / "trial", Path(folder) / "job.toml"
        file.write_text(config.to_toml(short), encoding="utf-8")
        command = [*program(), "train", "-q", "--job", str(file), "--out", str(run)]
        env = Launch(command, settings=False).environment()
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired as error:
            raise RankFailed(
                f"the trial of {frames} steps took more than {LONGEST:.0f} s, so no time can be "
                "told: shorten evaluation.episodes or evaluation.max_steps, or leave out --dry-run."
            ) from error
        said = done.stderr.strip().removeprefix("canal-mpi: ")
        if done.returncode == UsageError.code:
            raise UsageError(said)
        if done.returncode:
            raise RankFailed(f"the trial run failed: {said or done.returncode}")
        trial = load(run)
    tasks, rows = trial["tasks"], trial["train"]
    evaluation = float(tasks["evaluate_seconds"].sum())
    episode = evaluation / max(_episodes_of_a_task(short), 1)
    steps = int(rows["step"][-1] - (rows["step"][-2] if len(rows["step"]) > 1 else 0))
    played, learnt = (float(rows[name][-1]) for name in ("env_seconds", "learn_seconds"))
    return Pace(played / steps, learnt / steps, episode)


def _episodes_of_a_task(job: Job) -> float:
    """Evaluation episodes that belong to a task, in the mean over the tasks of a run."""
    how, rounds = job.evaluation, job.train.rounds or len(job.tasks)
    inside = (job.train.frames - 1) // how.every + 1 if how.every else 0  # the first at once
    others = {"current": 0.0, "seen": (rounds - 1) / 2, "all": len(job.tasks) - 1.0}
    return how.episodes * (1 + inside + others[how.tasks])


def seconds_of(point: Point, pace: Pace) -> float:
    """At most so long: as if every task were played from scratch, on the slowest device."""
    job = point.job
    rounds = job.train.rounds or len(job.tasks)
    crowd = max(point.ranks / cores(), 1.0) if not point.hosts else 1.0
    slowest = min(device.speed for device in devices(job, ["here"] * point.ranks))
    rehearses = job.memory.rows > 0 and rounds > 1  # old tasks come on top
    learn = pace.learn / (job.memory.current_bias if rehearses else 1.0)
    each = (pace.env + learn) * job.train.frames + pace.episode * _episodes_of_a_task(job)
    return START + rounds * each * max(crowd, 1 / slowest)


def finished_seconds(folder: Path, points: Sequence[Point]) -> dict[str, float]:
    """How long the points that are finished took."""
    found = {}
    for point in points:
        if status_of(folder / point.name) == FINISHED:
            found[point.name] = START + load(folder / point.name).seconds
    return found


def together(points: Sequence[Point], seconds: Sequence[float], slots: int) -> float:
    """How long points take within so many slots."""
    share = [
        s * (1.0 if p.hosts else min(p.ranks / slots, 1.0))
        for p, s in zip(points, seconds, strict=True)
    ]
    return max(sum(share), *seconds) if seconds else 0.0
