"""The training loop against its floor: the emulator's bare `act` and the update's bare products.

python benchmarks/floors.py [--game RoadRunner] [--steps 100] [--repeats 15]

Everything is timed in seconds of this process's CPU, in turn, so that noise hits all alike.
"""

import argparse
import os
from dataclasses import replace
from time import process_time

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy is loaded

import numpy as np
from measuring import Figure, products, ratios, report, timed

from canal_mpi import config, envs
from canal_mpi.envs.atari import Emulator
from canal_mpi.rank.build import make_agent
from canal_mpi.results.store import Rows
from canal_mpi.topology.exchange import alone

WARM = 300  # steps before the first measurement, so that updates have begun


def rawplayer(task, frame_skip):
    """Plays one step at random: `act` for every frame, a reset where the game is over."""
    ale = Emulator.of(task)
    moves = [int(action.value) for action in ale.getLegalActionSet()]
    drawn = np.random.default_rng(1).integers(len(moves), size=4096).tolist()
    place = 0

    def play():
        nonlocal place
        place = (place + 1) % len(drawn)
        for _ in range(frame_skip):
            ale.act(moves[drawn[place]])
        if ale.game_over():
            ale.restart()

    return play


class Timer:
    """Stops a training loop after every block of steps, where it would save, to time others."""

    def __init__(self, steps, others):
        self.steps, self.others = steps, others
        self.loop, self.times = [], [[] for _ in others]
        self._turns, self._start = 0, 0.0

    def start(self, state): ...

    def end(self, state): ...

    def turn(self, steps, state):
        self._turns += 1
        done = self._turns - WARM
        if done > 0 and done % self.steps == 0:
            self.loop.append((process_time() - self._start) / self.steps)
            for work, times in zip(self.others, self.times, strict=True):
                times.append(timed(work, self.steps))
        if done >= 0 and done % self.steps == 0:
            self._start = process_time()


def run_loop(job, steps, others):
    """Run the agent's own training loop, with everything it records, and time it."""
    timer = Timer(steps, others)
    make_agent(job, 0, job.tasks, alone, Rows(), lambda progress: None, saver=timer).run()
    return timer


def measure(game, steps, repeats):
    """The whole loop at one update per step, and at one update in four steps."""
    flags = {"tasks": [game], "train.steps": WARM + steps * repeats, "evaluation.episodes": 0}
    flags |= {"explore.eps_start": 0.05, "explore.eps_end": 0.05}
    job = envs.named(config.resolve(flags))
    spaces = envs.common_spaces(job.tasks, job.task)
    act, bare = rawplayer(job.tasks[0], job.task.frame_skip), products(spaces, job.learn)
    one = run_loop(job, steps, [act, bare])
    four = run_loop(replace(job, learn=replace(job.learn, updates_per_step=0.25)), steps, [act])
    floor = [a + b for a, b in zip(*one.times, strict=True)]
    per_second = "steps/s of CPU"
    return {
        "emulator alone": Figure.of([1 / t for t in one.times[0]], per_second),
        "products of an update": Figure.of([1e6 * t for t in one.times[1]], "µs"),
        "1 update per step": Figure.of([1 / t for t in one.loop], per_second),
        "that / floor": ratios(floor, one.loop, "of act + products"),
        "1 update in 4 steps": Figure.of([1 / t for t in four.loop], per_second),
        "that / emulator": ratios(four.times[0], four.loop, "of the emulator alone"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", default="RoadRunner")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    found = measure(options.game, options.steps, options.repeats)
    print(report(options.game, {"train": found}))


if __name__ == "__main__":
    main()
