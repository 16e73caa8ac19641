"""Feeds TensorBoard or Weights & Biases during a run: `python -m canal_mpi.trackers RUN NAME`.

Rank 0 starts it (`Trackers` in rank/display.py). It reads the files of the run and nothing else, so
nothing that happens here can hurt the run. Each start, also a resume, begins a new log with
everything that is in run.h5.
"""

import os
import shutil
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import isfinite
from pathlib import Path
from time import sleep
from typing import Any, Protocol

import numpy as np

from canal_mpi.errors import import_extra
from canal_mpi.results.progress import number
from canal_mpi.results.reader import Run, load
from canal_mpi.results.status import RunStatus

EVERY = 2.0  # seconds between two looks at the files
CURVES = {
    "loss": ("train", "step"),
    "return": ("episodes", "step"),
    "score": ("curve", "env_steps"),
}
LIVE = ("mean_return", "loss", "steps_per_second")  # of status.json, over total_steps
ENDING = threading.Lock()  # several threads may fail at once; the words of one are enough


class Tracker(Protocol):
    """Takes what agents did, as curves over their steps."""

    def scalar(self, agent: int, tag: str, step: int, value: float) -> None:
        """One point of a curve."""

    def close(self) -> None:
        """The run is over."""


class TensorBoard:
    """Event files in RUN/tensorboard, a folder per agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        shutil.rmtree(self.folder, ignore_errors=True)
        self._make = import_extra("tensorboardX", "tensorboard").SummaryWriter
        self._writers: dict[int, Any] = {}

    def scalar(self, agent: int, tag: str, step: int, value: float) -> None:
        """One point of a curve."""
        if agent not in self._writers:
            place = str(self.folder / f"agent-{agent}")
            self._writers[agent] = self._make(logdir=place, flush_secs=EVERY)
        self._writers[agent].add_scalar(tag, value, step)

    def close(self) -> None:
        """The run is over."""
        for writer in self._writers.values():
            writer.close()


class WandB:
    """A run of Weights & Biases, in RUN/wandb; its own variables (WANDB_MODE …) steer it."""

    def __init__(self, folder: Path) -> None:
        job, wandb = RunStatus(folder).settings, import_extra("wandb", "wandb")
        self._run = wandb.init(project="canal-mpi", name=folder.name, dir=str(folder), config=job)
        self._run.define_metric("*", step_metric="step")

    def scalar(self, agent: int, tag: str, step: int, value: float) -> None:
        """One point of a curve; its x axis is the agent's step, not W&B's."""
        self._run.log({f"agent-{agent}/{tag}": value, "step": step})

    def close(self) -> None:
        """The run is over."""
        self._run.finish()


KINDS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def scalars(run: Run) -> Iterator[tuple[int, str, int, float]]:
    """The curves of a run, point by point: agent, name, step and value."""
    for value, (table, step) in CURVES.items():
        columns = run[table]
        for row in np.flatnonzero(np.isfinite(columns[value])):
            agent, tag = int(columns["agent"][row]), f"{columns['task'][row]}/{value}"
            yield agent, tag, int(columns[step][row]), float(columns[value][row])
    for k, after, task in zip(*np.nonzero(~np.isnan(run.score).all(axis=3)), strict=True):
        tag = f"{run.tasks[task]}/evaluation_after_round"
        yield run.agents[k], tag, int(after), float(np.nanmean(run.score[k, after, task]))


class Follower:
    """Hands a tracker everything that is new in the files of a run."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._sent: Counter[tuple[int, str]] = Counter()  # points of each agent's curves
        self._steps: Counter[int] = Counter()

    def add_rows(self, run: Run) -> None:
        """The curves of run.h5, from where they ended last time."""
        found: Counter[tuple[int, str]] = Counter()
        for agent, tag, step, value in scalars(run):
            found[agent, tag] += 1
            if found[agent, tag] > self._sent[agent, tag]:
                self.tracker.scalar(agent, tag, step, value)
        self._sent = found

    def add_status(self, status: RunStatus) -> None:
        """What agents are doing, between two rounds."""
        for facts in status.agents:
            agent, step = int(number(facts["agent"])), int(number(facts["total_steps"]))
            for name in LIVE if step > self._steps[agent] else ():
                if isfinite(value := number(facts.get(name))):
                    self.tracker.scalar(agent, f"live/{name}", step, value)
            self._steps[agent] = step


def follow(folder: Path, tracker: Tracker) -> None:
    """Track a run until it is over."""
    follower, seen, alive = Follower(tracker), 0, True
    while alive:
        status = RunStatus(folder)
        alive = status.status == "running"
        with suppress(FileNotFoundError):  # it has finished no round yet
            if (changed := (folder / "run.h5").stat().st_mtime_ns) != seen:
                seen = changed
                follower.add_rows(load(folder))
        follower.add_status(status)
        sleep(EVERY if alive else 0)
    tracker.close()


def fail(error: BaseException | None) -> None:
    """End at once: who waits for a library's thread that has failed would wait for ever."""
    with ENDING:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    sys.excepthook = lambda kind, error, trace: fail(error)
    threading.excepthook = lambda failure: fail(failure.exc_value)
    run_folder = Path(sys.argv[1])
    follow(run_folder, KINDS[sys.argv[2]](run_folder))
