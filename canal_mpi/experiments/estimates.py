"""How long points will take on this machine: from runs that are finished, or from a short trial."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from canal_mpi import config
from canal_mpi.errors import RankFailed, UsageError
from canal_mpi.experiments.points import FINISHED, Point
from canal_mpi.experiments.runner import cores
from canal_mpi.games import order_of
from canal_mpi.launch.mpirun import Command, program
from canal_mpi.rank.plan import devices
from canal_mpi.results.progress import duration
from canal_mpi.results.reader import load
from canal_mpi.results.status import status_of
from canal_mpi.settings import Job

TRIAL_STEPS, TRIAL_TIMEOUT = 600, 300.0
START_SECONDS = 4.0  # until the first step of a run


@dataclass(frozen=True)
class Pace:
    """What one agent needs that has a core for itself."""

    env: float  # seconds per step in the environment
    learn: float  # seconds per update
    episode: float  # seconds per evaluation episode


def dry_run(folder: Path, points: Sequence[Point], slots: int) -> list[str]:
    """The groups of points that differ only in their seed, with runs and times, as a table."""
    done = {p.name: seconds for p in points if (seconds := _seconds_taken(folder / p.name))}
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    times = _times(groups, done)
    width = max(5, *map(len, groups))
    lines = [f" {'what':<{width}}  ranks  runs  finished  each"]
    for name, members in groups.items():
        finished = sum(point.name in done for point in members)
        facts = f"{members[0].ranks:>5}  {len(members):>4}  {finished:>8}"
        lines.append(f" {name:<{width}}  {facts}  about {duration(times[name])}")
    left = [point for point in points if point.name not in done]
    total = seconds_in_all(left, [times[point.group] for point in left], slots)
    runs = f"{len(points)} points, {len(done)} finished"
    return [*lines, f" {runs} · with {slots} slots about {duration(total)} to go · {folder}"]


def _seconds_taken(run: Path) -> float:
    """How long a finished run took; 0 where it is not finished."""
    return load(run).seconds + START_SECONDS if status_of(run) == FINISHED else 0.0


def _times(groups: dict[str, list[Point]], done: dict[str, float]) -> dict[str, float]:
    """Seconds per run of each group: of runs that are finished, else from a short trial."""
    known = {
        name: fmean(done[p.name] for p in members if p.name in done)
        for name, members in groups.items()
        if any(p.name in done for p in members)
    }
    unknown = [members[0] for name, members in groups.items() if name not in known]
    if not unknown:
        return known
    pace = measure_pace(max(unknown, key=lambda p: (p.job.train.steps, p.ranks)).job)
    return known | {point.group: seconds_of(point, pace) for point in unknown}


def measure_pace(job: Job) -> Pace:
    """Measured: one agent plays a part of its first task."""
    frames = min(TRIAL_STEPS, job.train.steps)
    half = max(frames // 2, 1)  # in the first one things are loaded and compiled
    train = replace(job.train, steps=frames, rounds=1, log_interval=half)
    short = replace(job, emulate=(), train=train)
    with TemporaryDirectory(prefix="canal-") as folder:
        run, file = Path(folder) / "trial", Path(folder) / "job.toml"
        file.write_text(config.to_toml(short), encoding="utf-8")
        _run_trial([*program(), "train", "-q", "--job", str(file), "--out", str(run)], frames)
        trial = load(run)
    rows = trial["train"]
    steps = int(rows["step"][-1] - (rows["step"][-2] if len(rows["step"]) > 1 else 0))
    env, learn = (float(rows[name][-1]) / steps for name in ("env_seconds", "learn_seconds"))
    episodes = max(_episodes_per_task(short), 1)
    return Pace(env, learn, float(trial["tasks"]["evaluate_seconds"].sum()) / episodes)


def _run_trial(command: list[str], steps: int) -> None:
    env = Command(command, settings=False).environment()
    given: dict[str, Any] = {"env": env, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=TRIAL_TIMEOUT, **given)
    except subprocess.TimeoutExpired as error:
        raise RankFailed(
            f"the trial of {steps} steps took more than {TRIAL_TIMEOUT:.0f} s, so no time can be "
            "told: shorten evaluation.episodes or evaluation.max_steps, or leave out --dry-run."
        ) from error
    said = done.stderr.strip().removeprefix("canal-mpi: ")
    if done.returncode == UsageError.code:
        raise UsageError(said)
    if done.returncode:
        raise RankFailed(f"the trial run failed: {said or done.returncode}")


def _episodes_per_task(job: Job) -> float:
    """Evaluation episodes that belong to a task, in the mean over the tasks of a run."""
    how, rounds = job.evaluation, job.train.rounds or len(job.tasks)
    looks = (job.train.steps - 1) // how.interval + 1 if how.interval else 0  # the first at once
    others = {"current": 0.0, "seen": (rounds - 1) / 2, "all": len(job.tasks) - 1.0}
    return how.episodes * (1 + looks + others[how.tasks])


def seconds_of(point: Point, pace: Pace) -> float:
    """About so long: tasks that somebody has learnt before are taken to come as lessons."""
    job, reuse, frames = point.job, point.job.reuse, point.job.train.steps
    rounds = job.train.rounds or len(job.tasks)
    crowd = max(point.ranks / cores(), 1.0) if not point.hosts else 1.0
    slowest = min(device.speed for device in devices(job, ["here"] * point.ranks))
    rehearses = job.rehearsal.rows > 0 and rounds > 1  # updates on old tasks come on top
    learn = pace.learn / (1 - job.rehearsal.ratio if rehearses else 1.0)
    played, taught = (pace.env + learn) * frames, learn * frames * reuse.pretrain_updates
    taught += (pace.env + learn * reuse.updates) * frames * reuse.steps
    part = taught_part(point)
    each = part * taught + (1 - part) * played + pace.episode * _episodes_per_task(job)
    return START_SECONDS + rounds * each * max(crowd, 1 / slowest)


def taught_part(point: Point) -> float:
    """The part of all tasks that another agent has learnt in an earlier round."""
    job, agents = point.job, point.agents
    if agents == 1 or job.share.policy == "none":
        return 0.0
    rounds = job.train.rounds or len(job.tasks)
    orders = [order_of(job.order, job.tasks, k, job.seed)[:rounds] for k in range(agents)]
    known, taught = set[str](), 0
    for tasks in zip(*orders, strict=True):
        taught += sum(task in known for task in tasks)
        known |= set(tasks)
    return taught / (agents * rounds)


def seconds_in_all(points: Sequence[Point], seconds: Sequence[float], slots: int) -> float:
    """How long points take within so many slots."""
    share = [
        s * (1.0 if p.hosts else min(p.ranks / slots, 1.0))
        for p, s in zip(points, seconds, strict=True)
    ]
    return max(sum(share), *seconds) if seconds else 0.0
