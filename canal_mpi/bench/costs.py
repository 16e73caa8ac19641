"""What goes with training: memory, logging, a replay that grows, start-up, several ranks a core."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from canal_mpi import load, tasks
from canal_mpi.bench import mpirun
from canal_mpi.bench.tell import Figure, figure_of_ratios
from canal_mpi.bench.train import filled, job_of, player, timed
from canal_mpi.columns import encode
from canal_mpi.errors import RankFailed
from canal_mpi.membuf.replay import Replay
from canal_mpi.record import Recorder
from canal_mpi.schema import Rows
from canal_mpi.types import ENDED, Step

FEW, MANY = 10_000, 1_000_000  # rows of a replay
EPISODE = 500  # steps, for the logging
IMPORT_TORCH = [sys.executable, "-c", "import torch"]


def resident() -> int:
    """Bytes of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(game: str, repeats: int = 15, steps: int = 40) -> dict[str, Figure]:
    """Memory of a full replay, and a step with many rows against one with few."""
    from canal_mpi.rank import build

    job = job_of(game, 1)
    task, spaces = job.tasks[0], tasks.common_spaces(job.tasks, job.task)
    learner, rng, play = build.learner(job, 0, spaces, task), np.random.default_rng(1), player(job)
    play()
    small, before = filled(Replay(spaces, FEW, build.recipe(job)), FEW), resident()
    large = filled(Replay(spaces, MANY, build.recipe(job)), MANY)
    held = resident() - before
    state = rng.integers(0, 256, (1, *spaces.shape), dtype=np.uint8)
    step = Step(state, np.zeros(1), np.zeros(1, dtype=np.uint8), state)

    def stepping(replay: Replay) -> Callable[[], None]:
        def one() -> None:
            play()
            learner.act(state)
            replay.own.add(np.zeros(1, dtype=np.int64), step)
            learner.learn(replay.sample(rng)._replace(task=task))

        return one

    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for replay, found in zip((small, large), times, strict=True):
            found.append(timed(stepping(replay), steps))
    return {
        f"rows of a full replay ({MANY:,})": Figure.of([held / 1e6], "MB"),
        "all of the process": Figure.of([resident() / 1e6], "MB"),
        "a step with so many rows": figure_of_ratios(times[1], times[0], f"of one with {FEW:,}"),
    }


def logging(steps: int = 20_000, repeats: int = 7) -> dict[str, Figure]:
    """What it costs to write down a step: counting it, rows of /train and /episodes, HDF5."""
    from canal_mpi.results.store import RunInfo, Store

    found = []
    with tempfile.TemporaryDirectory() as folder:
        info = RunInfo("bench", 1, "", ["Krull"], 0, [["Krull"]], [], {})
        for _ in range(repeats):
            sink = Rows()
            record, store = (
                Recorder(sink, lambda progress: None, 0, 134),
                Store(Path(folder) / "r", info),
            )
            record.begin("Krull", 1)
            start = process_time()
            _write_down(record, steps)
            rows = sink.take()
            encode(rows, pack=True)
            store.append(rows, 0)
            store.write("running")
            found.append((process_time() - start) / steps * 1e6)
    return {"logging, HDF5 included": Figure.of(found, "µs a step")}


def _write_down(record: Recorder, steps: int) -> None:
    obs, reward = np.zeros((1, 128), dtype=np.uint8), np.ones(1)
    flags = (np.array([flag], dtype=np.uint8) for flag in (0, ENDED))
    going, ended = (Step(obs, reward, flag, obs) for flag in flags)
    for k in range(steps):
        record.step(ended if k % EPISODE == 0 else going)
        record.update(0.5)
        if record.turn(1, 500):
            record.training(0.1)


def start_up(repeats: int = 3) -> dict[str, Figure]:
    """Seconds until the help is there and until five ranks took their first step."""
    words = [sys.executable, "-m", "canal_mpi"]
    first = ["train", "-q", "--job", "quick", "--frames", "1", "--set", "train.rounds=1"]
    first += ["--set", "evaluation.episodes=0", "--force", "--out"]
    helps, trains, imports = [], [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            imports.append(_seconds(IMPORT_TORCH))
            helps.append(_seconds([*words, "--help"]))
            trains.append(_seconds([mpirun(), "-np", "5", *words, *first, f"{folder}/run"]))
    unit = "× `import torch`"
    return {
        "`import torch`": Figure.of(imports, "s"),
        "canal-mpi --help": Figure.of(helps, "s"),
        "help / import": figure_of_ratios(helps, imports, unit),
        "five ranks, one step, the end": Figure.of(trains, "s"),
        "that / import": figure_of_ratios(trains, imports, unit),
    }


def _seconds(command: Sequence[str]) -> float:
    start = perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RankFailed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr!r}")
    return perf_counter() - start


def scaling(game: str, steps: int = 1500, repeats: int = 3) -> dict[str, Figure]:
    """Steps a second of all agents together: one on one core, two and five on two cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    kinds = {"1 agent on 1 core": (1, cores[:1])}
    kinds |= {f"{n} agents on {len(cores)} cores": (n, cores) for n in (2, 5)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, (ranks, where) in kinds.items():
            found[name].append(_speed(game, ranks, where, steps))
    one, two, five = found.values()
    figures = {name: Figure.of(speeds, "steps/s together") for name, speeds in found.items()}
    return figures | {
        "5 agents / 1 agent": figure_of_ratios(five, one, "× (wall time)"),
        "5 agents / 2 agents": figure_of_ratios(five, two, "× (wall time)"),
    }


def _speed(game: str, ranks: int, cores: list[int], steps: int) -> float:
    before = os.sched_getaffinity(0)
    words = ["train", "-q", "--tasks", game, "--order", "same", "--share", "none"]
    words += ["--frames", str(steps), "--set", "evaluation.episodes=0", "--out"]
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, cores)
        command = [mpirun(), "-np", str(ranks), sys.executable, "-m", "canal_mpi", *words]
        try:
            _seconds([*command, f"{folder}/run"])
        finally:
            os.sched_setaffinity(0, before)
        tasks_ = load(f"{folder}/run")["tasks"]
    return float(tasks_["env_steps"].sum() / tasks_["seconds"].max())
