"""A task that is being learnt: how, from which lessons, and how far the agent has come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np

from canal_mpi.membuf.lesson import Lesson
from canal_mpi.membuf.share import best_first
from canal_mpi.state import inside, record_from_columns, record_to_columns, under
from canal_mpi.types import Array, Columns, Env, Offer


@dataclass(frozen=True)
class Training:
    """How one task is learnt."""

    steps: int  # own steps in the environment, at most
    study: int = 0  # updates on lessons before the first own step
    updates: float = 1.0  # times the usual updates for each own step
    foreign: float = 0.0  # part of a batch that comes from lessons while playing
    imitate: float = 0.0  # weight of imitating the donor
    goal: float = inf  # the donor's score; imitation fades on the way to it
    stops: bool = False  # whether to stop when not clearly below it
    looks: bool = True  # whether to look at the score before the first own step
    epsilon: float = 0.0  # probability of a random action at first


@dataclass
class Attempt:
    """Where an agent is in its task, so that it can be left and taken up again."""

    how: Training
    lessons: list[Lesson] = field(default_factory=list)
    before: float = nan  # the agent's score before it
    doubt: float = 0.0  # standard error of that score
    weights: Columns = field(default_factory=dict)  # to go back to if lessons make it worse
    imitate: float = 0.0  # weight of imitating the donor now
    studied: int = 0  # updates on lessons so far
    playing: bool = False  # whether the first own step has begun
    done: int = 0  # own steps so far
    trained: bool = False  # whether only the evaluation and the exchange are left
    env: Env | None = None
    obs: Array = field(default_factory=lambda: np.zeros(0))  # what the next action answers
    saved_env: Columns = field(default_factory=dict)  # of the environments before a resume

    def state(self) -> Columns:
        """Everything of it, for a checkpoint."""
        numbers = [self.studied, self.playing, self.done, self.trained]
        held = under("how", record_to_columns(self.how)) | under("weights", self.weights)
        held |= {"numbers": np.array(numbers, dtype="<i8")}
        held |= {"scores": np.array([self.before, self.doubt, self.imitate])}
        for k, lesson in enumerate(self.lessons):
            parts = under("offer", record_to_columns(lesson.offer)) | under("rows", lesson.rows)
            held |= under(f"lesson-{k:04d}", parts | under("network", lesson.network))
        if self.playing and not self.trained and self.env is not None:
            held |= under("env", self.env.state()) | {"obs": self.obs}
        return held

    @classmethod
    def restored(cls, state: Columns) -> "Attempt":
        """The attempt that `state` told of."""
        names = sorted({name.split("/")[0] for name in state if name.startswith("lesson-")})
        studied, playing, done, trained = (int(number) for number in state["numbers"])
        before, doubt, imitate = (float(score) for score in state["scores"])
        return cls(
            record_from_columns(Training, inside("how", state)),
            [_lesson(inside(name, state)) for name in names],
            before,
            doubt,
            inside("weights", state),
            imitate,
            studied,
            bool(playing),
            done,
            bool(trained),
            obs=state.get("obs", np.zeros(0)),
            saved_env=inside("env", state),
        )


def best(lessons: Sequence[Lesson]) -> Lesson:
    """The lesson of the donor that scores best."""
    return min(lessons, key=lambda lesson: best_first(lesson.offer))


def _lesson(state: Columns) -> Lesson:
    offer = record_from_columns(Offer, inside("offer", state))
    return Lesson(offer, inside("rows", state), inside("network", state))


class NoCheckpoints:
    """For an agent whose steps nobody keeps."""

    def start(self, state: Callable[[], Columns]) -> None:
        """Nothing is kept."""

    def turn(self, steps: int, state: Callable[[], Columns] | None) -> None:
        """Nothing is kept."""

    def end(self, state: Callable[[], Columns] | None) -> None:
        """Nothing is kept."""
