"""`canal-mpi bench train` and `bench learn`: the training loop and its parts against their floor.

The floor is the emulator's bare `act` and the bare matrix products of the update. Everything is
timed in seconds of this process's CPU, in turn, so that noise hits all alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import process_time

import numpy as np

from canal_mpi import config, tasks
from canal_mpi.bench.tell import Figure, figure_of_ratios
from canal_mpi.errors import UsageError
from canal_mpi.job import Job
from canal_mpi.membuf.replay import Replay
from canal_mpi.tasks.atari import atari_games
from canal_mpi.types import LAST, Batch, Columns

WARM = 300  # steps before the first measurement, so that updates have begun


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    steps: int = 100  # of a block
    repeats: int = 15


def job_of(game: str, steps: int, updates: float = 1.0) -> Job:
    """A job of one Atari game on RAM, without exams, that acts by its network nearly always."""
    flags = {"tasks": [game], "train.frames": steps, "learn.updates_per_step": updates}
    flags |= {"evaluation.episodes": 0, "explore.start": 0.05, "explore.end": 0.05}
    job = tasks.named(config.resolve(flags))
    if job.tasks[0] not in atari_games():
        raise UsageError(f"--game {game}: expected an Atari game; the floor is its emulator.")
    return job


class Timer:
    """Stops a training loop after every block of steps and lets others have a turn."""

    def __init__(self, size: Size, others: Sequence[Callable[[], None]]) -> None:
        self.size, self.others = size, others
        self.loop: list[float] = []
        self.times: list[list[float]] = [[] for _ in others]
        self._turns, self._start = 0, 0.0

    def start(self, state: Callable[[], Columns]) -> None:
        """The task begins."""

    def end(self, state: Callable[[], Columns] | None) -> None:
        """The task is over."""

    def turn(self, steps: int, state: Callable[[], Columns] | None) -> None:
        """A step is over; at the end of a block the others are timed."""
        self._turns += 1
        done = self._turns - WARM
        if done > 0 and done % self.size.steps == 0:
            self.loop.append((process_time() - self._start) / self.size.steps)
            for work, times in zip(self.others, self.times, strict=True):
                times.append(timed(work, self.size.steps))
        if done >= 0 and done % self.size.steps == 0:
            self._start = process_time()


def _quiet(work: Callable[..., object], *arguments: object) -> None:
    work(*arguments)


def timed(work: Callable[[], None], times: int) -> float:
    """Seconds of CPU that a piece of work takes once."""
    start = process_time()
    for _ in range(times):
        work()
    return (process_time() - start) / times


def loop(job: Job, size: Size, others: Sequence[Callable[[], None]]) -> Timer:
    """Run the agent's own training loop, with everything it records, and time it."""
    from canal_mpi.rank import build
    from canal_mpi.schema import Rows
    from canal_mpi.topology.link import SoloLink

    timer = Timer(size, others)
    sink = Rows()
    build.agent(job, 0, job.tasks, SoloLink(), sink, lambda progress: None, saver=timer).run()
    return timer


def train(game: str, size: Size) -> dict[str, Figure]:
    """The whole loop at one update a step, and at one update in four steps."""
    from canal_mpi.learn.products import bare_products
    from canal_mpi.tasks.raw import raw_player

    job = job_of(game, WARM + size.steps * size.repeats)
    spaces = tasks.common_spaces(job.tasks, job.task)
    act, products = raw_player(job.tasks[0], job.task.frame_skip), bare_products(spaces, job.learn)
    one = loop(job, size, [act, products, player(job)])
    four = loop(replace(job, learn=replace(job.learn, updates_per_step=0.25)), size, [act])
    raw, bare, env = one.times
    floor = [a + b for a, b in zip(raw, bare, strict=True)]
    skip = job.task.frame_skip
    per_second = "steps/s of CPU"
    return {
        "emulator alone": Figure.of([1 / t for t in raw], per_second),
        "emulator alone, frames": Figure.of([skip / t for t in raw], "frames/s of CPU"),
        "environment": Figure.of([1 / t for t in env], per_second),
        "environment / emulator": figure_of_ratios(raw, env, "of its floor"),
        "products of an update": Figure.of([1e6 * t for t in bare], "µs"),
        "training, 1 update a step": Figure.of([1 / t for t in one.loop], per_second),
        "training, frames": Figure.of([skip / t for t in one.loop], "frames/s of CPU"),
        "training / floor": figure_of_ratios(floor, one.loop, "of act + products"),
        "training, 1 update in 4 steps": Figure.of([1 / t for t in four.loop], per_second),
        "that / emulator": figure_of_ratios(four.times[0], four.loop, "of the emulator alone"),
    }


def player(job: Job) -> Callable[[], None]:
    """One step of the environment as agents have it, at random."""
    from canal_mpi.rank import build

    spaces = tasks.common_spaces(job.tasks, job.task)
    env, rng = build.env_maker(job, spaces)(job.tasks[0], "train", 0), np.random.default_rng(1)
    env.reset()

    def play() -> None:
        env.send(rng.integers(spaces.actions, size=1))
        env.receive()

    return play


def learn(game: str, size: Size) -> dict[str, Figure]:
    """The learner alone: where the time of an update goes."""
    from canal_mpi.learn.products import bare_products
    from canal_mpi.learn.profile import parts
    from canal_mpi.rank import build

    job = job_of(game, 1)
    task, spaces = job.tasks[0], tasks.common_spaces(job.tasks, job.task)
    learner, rng = build.learner(job, 0, spaces, task), np.random.default_rng(1)
    replay = filled(Replay(spaces, 10_000, build.recipe(job)), 2000)
    state = rng.integers(0, 256, (1, *spaces.shape)).astype(np.uint8)

    def draw() -> Batch:
        return replay.sample(rng)._replace(task=task)

    def update() -> None:
        learner.learn(draw())

    batch = draw()
    works: dict[str, Callable[[], None]] = {
        "products": bare_products(spaces, job.learn),
        "drawing a batch": partial(_quiet, draw),
        "learning from it": partial(_quiet, learner.learn, batch),
        "drawing and learning": update,
        "acting on a state": partial(_quiet, learner.act, state),
    }
    works |= {f"  {n}": partial(_quiet, work) for n, work in parts(learner, batch).items()}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(size.repeats + 1):
        for name, work in works.items():
            found[name].append(timed(work, size.steps))
    first = {name: times[1:] for name, times in found.items()}  # the first turn only warms up
    figures = {name: Figure.of([1e6 * t for t in times], "µs") for name, times in first.items()}
    ratio = figure_of_ratios(first["drawing and learning"], first["products"], "× its products")
    speed = Figure.of([1 / t for t in first["drawing and learning"]], "updates/s of CPU")
    return figures | {"an update": ratio, "learner alone": speed}


def filled(replay: Replay, rows: int) -> Replay:
    """The replay with made-up rows of play."""
    rng, spaces = np.random.default_rng(2), replay.spaces
    columns: Columns = {
        "state": rng.integers(0, 256, (rows + 1, *spaces.shape), dtype=np.uint8),
        "action": rng.integers(0, spaces.actions, rows + 1).astype(np.uint8),
        "reward": (rng.random(rows + 1) < 0.02).astype(np.float32),
        "flags": np.zeros(rows + 1, dtype=np.uint8),
        "cursor": np.array([rows]),
        "count": np.array([rows]),
        "squares": np.ones(2),
    }
    columns["flags"][-1] = LAST
    columns["state"] = columns["state"].reshape(rows + 1, -1)
    replay.own.restore(columns)
    return replay
