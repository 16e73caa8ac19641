"""What goes with training: memory, logging, a growing replay, start-up, several ranks per core.

python benchmarks/costs.py [--game RoadRunner] [memory logging start scaling]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy is loaded

import numpy as np
import psutil
from measuring import Figure, in_turn, player, ratios, report

from canal_mpi import config, envs, load
from canal_mpi.agent.recorder import Recorder
from canal_mpi.interfaces import LAST, TERMINATED, Step
from canal_mpi.launch.mpirun import build_command
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.wire import encode
from canal_mpi.rank.build import make_learner
from canal_mpi.results.store import Rows, RunInfo, Store

FEW, MANY = 10_000, 1_000_000  # rows of a replay
EPISODE = 500  # steps, for the logging
PROGRAM = [sys.executable, "-m", "canal_mpi"]


def filled(replay, rows):
    """The replay with made-up rows of play."""
    rng, spaces = np.random.default_rng(2), replay.spaces
    state = rng.integers(0, 256, (rows + 1, *spaces.frame_shape), dtype=np.uint8)
    columns = {
        "state": state,
        "action": rng.integers(0, spaces.actions, rows + 1).astype(np.uint8),
        "reward": (rng.random(rows + 1) < 0.02).astype(np.float32),
        "flags": np.zeros(rows + 1, dtype=np.uint8),
        "cursor": np.array([rows]),
        "count": np.array([rows]),
        "squares": np.ones(2),
    }
    columns["flags"][-1] = LAST
    replay.own.load_state_dict(columns)
    return replay


def memory(game, repeats=15, steps=40):
    """Memory of a full replay, and a step with many rows against one with few."""
    job = envs.named(config.resolve({"tasks": [game], "train.steps": 1}))
    task, spaces = job.tasks[0], envs.common_spaces(job.tasks, job.task)
    learner, rng, play = make_learner(job, 0, spaces, task), np.random.default_rng(1), player(job)
    small, before = filled(Replay(spaces, FEW, job.learn), FEW), psutil.Process()
    resident = before.memory_info().rss
    large = filled(Replay(spaces, MANY, job.learn), MANY)
    held = before.memory_info().rss - resident
    state = rng.integers(0, 256, (1, *spaces.shape), dtype=np.uint8)
    step = Step(state, np.zeros(1), np.zeros(1, dtype=np.uint8), state)

    def stepping(replay):
        def one():
            play()
            learner.act(state)
            replay.own.add(np.zeros(1, dtype=np.int64), step)
            learner.update(replay.sample(rng)._replace(task=task))

        return one

    few, many = in_turn([stepping(small), stepping(large)], repeats, steps)
    return {
        f"{MANY:,} rows": Figure.of([held / 1e6], "MB"),
        "the whole process": Figure.of([before.memory_info().rss / 1e6], "MB"),
        "a step with them": ratios(many, few, f"of one with {FEW:,}"),
    }


def logging(game, steps=20_000, repeats=7):
    """What it costs to write down a step: counting it, rows of /train and /episodes, HDF5."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        info = RunInfo("bench", 1, "", [game], 0, [[game]], [], {})
        for _ in range(repeats):
            sink, store = Rows(), Store(Path(folder) / "r", info)
            record = Recorder(sink, lambda progress: None, 0, 134)
            record.begin(game, 1)
            start = process_time()
            write_down(record, steps)
            rows = sink.take()
            encode(rows, pack=True)
            store.append(rows, 0)
            store.write("running")
            found.append((process_time() - start) / steps * 1e6)
    return {"a step, with HDF5": Figure.of(found, "µs")}


def write_down(record, steps):
    obs, reward = np.zeros((1, 128), dtype=np.uint8), np.ones(1)
    flags = (np.array([flag], dtype=np.uint8) for flag in (0, TERMINATED))
    going, ended = (Step(obs, reward, flag, obs) for flag in flags)
    for k in range(steps):
        record.step(ended if k % EPISODE == 0 else going)
        record.update(0.5)
        if record.turn(1, 500):
            record.training(0.1)


def start(game, repeats=3):
    """Seconds until the help is there and until five ranks took their first step."""
    first = ["train", "-q", "--job", "quick", "--frames", "1", "--set", "train.rounds=1"]
    first += ["--set", "evaluation.episodes=0", "--force", "--out"]
    helps, trains, imports = [], [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            imports.append(seconds([sys.executable, "-c", "import torch"]))
            helps.append(seconds([*PROGRAM, "--help"]))
            trains.append(seconds(build_command(5, [*first, f"{folder}/run"]).argv))
    unit = "× `import torch`"
    return {
        "`import torch`": Figure.of(imports, "s"),
        "canal-mpi --help": Figure.of(helps, "s"),
        "help / import": ratios(helps, imports, unit),
        "5 ranks, 1 step": Figure.of(trains, "s"),
        "that / import": ratios(trains, imports, unit),
    }


def seconds(command):
    begun = perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr!r}")
    return perf_counter() - begun


def scaling(game, steps=1500, repeats=3):
    """Steps per second of all agents together: one on one core, two and five on two cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    kinds = {"1 agent, 1 core": (1, cores[:1])}
    kinds |= {f"{n} agents, {len(cores)} cores": (n, cores) for n in (2, 5)}
    found = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, (ranks, where) in kinds.items():
            found[name].append(speed(game, ranks, where, steps))
    one, two, five = found.values()
    figures = {name: Figure.of(speeds, "steps/s together") for name, speeds in found.items()}
    return figures | {
        "5 agents / 1 agent": ratios(five, one, "× (wall time)"),
        "5 agents / 2 agents": ratios(five, two, "× (wall time)"),
    }


def speed(game, ranks, cores, steps):
    before = os.sched_getaffinity(0)
    words = ["train", "-q", "--tasks", game, "--order", "same", "--share", "none"]
    words += ["--frames", str(steps), "--set", "evaluation.episodes=0", "--out"]
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, cores)
        try:
            seconds(build_command(ranks, [*words, f"{folder}/run"]).argv)
        finally:
            os.sched_setaffinity(0, before)
        rows = load(f"{folder}/run")["tasks"]
    return float(rows["env_steps"].sum() / rows["seconds"].max())


PARTS = {part.__name__: part for part in (memory, logging, start, scaling)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--game", default="RoadRunner")
    options = parser.parse_args()
    found = {part: PARTS[part](options.game) for part in options.parts}
    print(report(options.game, found))


if __name__ == "__main__":
    main()
