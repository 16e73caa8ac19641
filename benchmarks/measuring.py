"""What the scripts of this folder measure with: figures, taking turns, and work to measure.

What is compared takes turns in one process and is timed in seconds of its CPU, so that noise hits
both alike.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Any

import numpy as np

from canal_mpi import __version__, envs
from canal_mpi.interfaces import Spaces
from canal_mpi.membuf.replay import Replay
from canal_mpi.settings import Job, LearnConfig

BLOCK = 100  # steps or updates of one measurement


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


def player(job: Job, replay: Any = None) -> Callable[[], None]:
    """Plays one step at random, and stores it in a replay."""
    spaces = envs.common_spaces(job.tasks, job.task)
    env, rng = envs.env_maker(job, spaces)(job.tasks[0], "train", 0), np.random.default_rng(1)
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
    spaces = envs.common_spaces(job.tasks, job.task)
    replay = Replay(spaces, 2 * steps, job.learn)
    timed(player(job, replay), steps)
    return replay


def machine() -> dict[str, str]:
    """Where it was measured."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    return {"canal-mpi": __version__, "cpu": cpu, "cores": str(cores), "load": f"{load:.1f}"}


def report(task: str, found: Mapping[str, Figures]) -> str:
    """All figures, as lines."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [f"{task} · {about} · median (middle half of the measurements)"]
    for part, figures in found.items():
        lines += [f"  {part:<9} {name:<20} {figure}" for name, figure in figures.items()]
    return "\n".join(lines)
