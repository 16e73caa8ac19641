"""`canal-mpi bench`: how fast this machine is, part by part.

`learn` is held against its floor, the bare matrix products of an update. What is compared takes
turns in one process and is timed in seconds of its CPU, so that noise hits both alike.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Any

import numpy as np

from canal_mpi import __version__, config, envs
from canal_mpi.errors import RankFailed
from canal_mpi.interfaces import Offer, Spaces
from canal_mpi.settings import Job, LearnConfig

BLOCK = 100  # steps or updates of one measurement
WARM_UP = 3  # blocks before the first measurement: things are loaded and compiled, learning begins
ROWS = 10_000  # of a lesson
SECONDS = 60.0  # for two ranks to start and measure


@dataclass(frozen=True)
class Figure:
    """The median of several measurements and the middle half of them."""

    median: float
    low: float
    high: float
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> "Figure":
        """Of measurements."""
        low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return cls(median(values), low, high, unit)

    def __str__(self) -> str:
        """For people."""
        spread = f" ({self.low:.4g} – {self.high:.4g})" if self.low < self.high else ""
        return f"{self.median:9.4g} {self.unit}{spread}"


def ratios(above: Sequence[float], below: Sequence[float], unit: str) -> Figure:
    """Of the ratios of what was measured side by side."""
    return Figure.of([a / b for a, b in zip(above, below, strict=True)], unit)


Figures = dict[str, Figure]


def timed(work: Callable[[], object], times: int = BLOCK) -> float:
    """Seconds of CPU that a piece of work takes once."""
    start = process_time()
    for _ in range(times):
        work()
    return (process_time() - start) / times


def in_turn(works: Sequence[Callable[[], object]], repeats: int, times: int) -> list[list[float]]:
    """Seconds of each work, measured one after the other again and again."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, seconds in zip(works, found, strict=True):
            seconds.append(timed(work, times))
    return [seconds[1:] for seconds in found]  # the first time things are loaded and compiled


def train(job: Job, repeats: int) -> Figures:
    """A real training run with one update per step, as its run.h5 tells."""
    from canal_mpi.results.reader import load

    words = ["train", "-q", "--tasks", job.tasks[0], "--frames", str(BLOCK * (WARM_UP + repeats))]
    words += ["--set", "evaluation.episodes=0", "--set", f"train.log_interval={BLOCK}", "--out"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "canal_mpi", *words, f"{folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RankFailed(f"the training run failed: {done.stderr.strip()}")
        rows = load(f"{folder}/run")["train"]
    env, learn = (rows[name][WARM_UP:] for name in ("env_seconds", "learn_seconds"))
    speeds = (BLOCK / (env + learn)).tolist()
    return {
        "training": Figure.of(speeds, "steps/s, one update per step"),
        "share of learning": Figure.of((100 * learn / (env + learn)).tolist(), "% of the time"),
    }


def env(job: Job, repeats: int) -> Figures:
    """Steps of the environment alone, at random."""
    (seconds,) = in_turn([player(job)], repeats, BLOCK)
    return {"environment": Figure.of([1 / t for t in seconds], "steps/s of CPU")}


def learn(job: Job, repeats: int) -> Figures:
    """Updates alone, against the matrix products that they can't do without."""
    from canal_mpi.rank.build import make_learner

    task, replay = job.tasks[0], played(job, 2000)
    learner, rng = make_learner(job, 0, replay.spaces, task), np.random.default_rng(1)

    def update() -> None:
        learner.update(replay.sample(rng)._replace(task=task))

    state = np.zeros((1, *replay.spaces.shape), dtype=replay.spaces.dtype)
    works = [products(replay.spaces, job.learn), update, lambda: learner.act(state)]
    floor, whole, act = in_turn(works, repeats, BLOCK)
    micro = [[1e6 * t for t in times] for times in (whole, floor, act)]
    return {
        "an update": Figure.of(micro[0], "µs of CPU"),
        "its matrix products": Figure.of(micro[1], "µs of CPU (NumPy)"),
        "update / products": ratios(whole, floor, "×"),
        "acting on one state": Figure.of(micro[2], "µs of CPU"),
    }


def products(spaces: Spaces, learn: LearnConfig) -> Callable[[], None]:
    """Does the matrix products of an update of an mlp: each pass that the loss needs, and back."""
    sizes, rows = [prod(spaces.shape), *learn.widths, spaces.actions], learn.batch_size
    rng, number = np.random.default_rng(1), np.float32
    weights = [rng.random((a, b), dtype=number) for a, b in pairwise(sizes)]
    obs, errors = (rng.random((rows, size), dtype=number) for size in (sizes[0], sizes[-1]))
    passes = 2 + bool(learn.double and learn.target_update_interval)

    def multiply() -> None:
        for _ in range(passes):
            inputs = [obs]
            for weight in weights:
                inputs.append(np.dot(inputs[-1], weight))
        back = errors
        for weight, given in zip(weights[::-1], inputs[-2::-1], strict=True):
            np.dot(given.T, back)
            back = np.dot(back, weight.T) if given is not obs else back

    return multiply


def lesson(job: Job, repeats: int) -> Figures:
    """A lesson of random play: its size, and what packing and unpacking cost."""
    from canal_mpi.membuf.lesson import pack, unpack

    replay, task = played(job, ROWS), job.tasks[0]
    rows = replay.own.export_all()
    data, count = pack(0, 1, task, rows, {}), len(rows["action"])
    offer, raw = Offer(0, 1, task, 0.0, count, len(data)), sum(c.nbytes for c in rows.values())
    works: list[Callable[[], object]] = [
        lambda: pack(0, 1, task, rows, {}),
        lambda: unpack(data, offer, replay.spaces, 2 * raw),
    ]
    packing, unpacking = in_turn(works, repeats, 1)
    return {
        "a row": Figure.of([len(data) / count], f"bytes ({raw / count:.0f} unpacked)"),
        "packing": Figure.of([1e3 * t for t in packing], f"ms of CPU for {count:,} rows"),
        "unpacking": Figure.of([1e3 * t for t in unpacking], f"ms of CPU for {count:,} rows"),
    }


def exchange(job: Job, repeats: int) -> Figures:
    """Two ranks of this machine: how fast messages go from one to the other."""
    from canal_mpi.launch.doctor import measure_links

    found = [measure_links([(0, 1)], [], SECONDS, None)[0, 1] for _ in range(min(repeats, 3))]
    return {
        "between two ranks": Figure.of([rate / 1e6 for _, rate in found], "MB/s"),
        "one way": Figure.of([1e6 * latency for latency, _ in found], "µs"),
    }


def player(job: Job, replay: Any = None) -> Callable[[], None]:
    """Plays one step at random, and stores it in a replay."""
    from canal_mpi.envs import env_maker

    spaces = envs.common_spaces(job.tasks, job.task)
    env, rng = env_maker(job, spaces)(job.tasks[0], "train", 0), np.random.default_rng(1)
    first = env.reset()
    if replay is not None:
        replay.own.start(first)

    def play() -> None:
        actions = rng.integers(spaces.actions, size=1)
        env.send(actions)
        step = env.recv()
        if replay is not None:
            replay.own.add(actions, step)

    return play


def played(job: Job, steps: int) -> Any:
    """A replay with rows of random play."""
    from canal_mpi.membuf.replay import Replay
    from canal_mpi.rank.build import recipe

    spaces = envs.common_spaces(job.tasks, job.task)
    replay = Replay(spaces, 2 * steps, recipe(job))
    timed(player(job, replay), steps)
    return replay


PARTS: dict[str, Callable[[Job, int], Figures]] = {
    part.__name__: part for part in (train, env, learn, lesson, exchange)
}


def measure(parts: Sequence[str], task: str, repeats: int) -> dict[str, Figures]:
    """The figures of each part."""
    job = envs.named(config.resolve({"tasks": [task]}))
    return {part: PARTS[part](job, repeats) for part in parts}


def machine() -> dict[str, str]:
    """Where it was measured."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    return {"canal-mpi": __version__, "cpu": cpu, "cores": str(cores), "load": f"{load:.1f}"}


def report(task: str, found: Mapping[str, Figures], as_json: bool) -> str:
    """All figures, as lines or as one JSON object."""
    if as_json:
        parts = {p: {n: asdict(f) for n, f in figures.items()} for p, figures in found.items()}
        return json.dumps({"task": task, "machine": machine(), "parts": parts}, indent=1)
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [f"{task} · {about} · median (middle half of the measurements)"]
    for part, figures in found.items():
        lines += [f"  {part:<9} {name:<20} {figure}" for name, figure in figures.items()]
    return "\n".join(lines)
