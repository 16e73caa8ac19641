"""A task that is being learnt: how, from which lessons, and how far the agent has come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns, Env, Offer
from canal_mpi.membuf.lesson import Lesson
from canal_mpi.membuf.selection import best_first
from canal_mpi.state import (
    record_from_columns,
    record_to_columns,
    rng_state,
    set_rng_state,
    strip_prefix,
    with_prefix,
)

if TYPE_CHECKING:
    from canal_mpi.agent.loop import Agent


@dataclass(frozen=True)
class TaskSchedule:
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
class TaskProgress:
    """Where an agent is in its task, so that it can be left and taken up again."""

    how: TaskSchedule
    lessons: list[Lesson] = field(default_factory=list)
    before: float = nan  # the agent's score before it
    std_error: float = 0.0  # standard error of that score
    weights: Columns = field(default_factory=dict)  # to go back to if lessons make it worse
    imitate: float = 0.0  # weight of imitating the donor now
    studied: int = 0  # updates on lessons so far
    playing: bool = False  # whether the first own step has begun
    done: int = 0  # own steps so far
    trained: bool = False  # whether only the evaluation and the exchange are left
    env: Env | None = None
    obs: Array = field(default_factory=lambda: np.zeros(0))  # what the next action answers
    saved_env: Columns = field(default_factory=dict)  # of the environments before a resume

    def state_dict(self) -> Columns:
        """Everything of it, for a checkpoint."""
        numbers = [self.studied, self.playing, self.done, self.trained]
        held = with_prefix("how", record_to_columns(self.how)) | with_prefix(
            "weights", self.weights
        )
        held |= {"numbers": np.array(numbers, dtype="<i8")}
        held |= {"scores": np.array([self.before, self.std_error, self.imitate])}
        for k, lesson in enumerate(self.lessons):
            parts = with_prefix("offer", record_to_columns(lesson.offer)) | with_prefix(
                "rows", lesson.rows
            )
            held |= with_prefix(f"lesson-{k:04d}", parts | with_prefix("network", lesson.network))
        if self.playing and not self.trained and self.env is not None:
            held |= with_prefix("env", self.env.state_dict()) | {"obs": self.obs}
        return held

    @classmethod
    def restored(cls, state: Columns) -> "TaskProgress":
        """The attempt that `state` told of."""
        names = sorted({name.split("/")[0] for name in state if name.startswith("lesson-")})
        studied, playing, done, trained = (int(number) for number in state["numbers"])
        before, std_error, imitate = (float(score) for score in state["scores"])
        return cls(
            record_from_columns(TaskSchedule, strip_prefix("how", state)),
            [_lesson(strip_prefix(name, state)) for name in names],
            before,
            std_error,
            strip_prefix("weights", state),
            imitate,
            studied,
            bool(playing),
            done,
            bool(trained),
            obs=state.get("obs", np.zeros(0)),
            saved_env=strip_prefix("env", state),
        )


def best(lessons: Sequence[Lesson]) -> Lesson:
    """The lesson of the donor that scores best."""
    return min(lessons, key=lambda lesson: best_first(lesson.offer))


def _lesson(state: Columns) -> Lesson:
    offer = record_from_columns(Offer, strip_prefix("offer", state))
    return Lesson(offer, strip_prefix("rows", state), strip_prefix("network", state))


class NoCheckpoints:
    """For an agent whose steps nobody keeps."""

    def start(self, state: Callable[[], Columns]) -> None:
        """Nothing is kept."""

    def turn(self, steps: int, state: Callable[[], Columns] | None) -> None:
        """Nothing is kept."""

    def end(self, state: Callable[[], Columns] | None) -> None:
        """Nothing is kept."""


def agent_state_dict(agent: "Agent") -> Columns:
    """Everything that the agent needs to go on from here with the same bits."""
    parts = {
        "attempt": agent.now.state_dict(),
        "learner": agent.learner.state_dict(),
        "memory": agent.rehearsal.state_dict(),
        "own": agent.replay.own.state_dict(),
        "link": agent.sharing.link.state_dict(),
        "record": agent.record.state_dict(),
        "sink": agent.record.sink.state_dict(),
        "streams": {
            "explore": rng_state(agent.explore),
            "draws": rng_state(agent.draws),
        },
    }
    held: Columns = {
        "round": np.array([agent.record.round], dtype="<i8"),
        "looks": np.array([agent.looks], dtype="<i8"),
        "foreign": np.array([agent.replay.foreign]),
    }
    for name, columns in parts.items():
        held |= with_prefix(name, columns)
    return held


def restore(agent: "Agent", state: Columns) -> None:
    """Put an agent that was just built where `state_of` was taken."""
    try:
        _restore(agent, state)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise DamagedData(
            f"the checkpoint does not fit this agent ({type(error).__name__}: {error})"
        ) from error


def _restore(agent: "Agent", state: Columns) -> None:
    round_ = agent.first_round = int(state["round"][0])
    agent.task, agent.looks = agent.order[round_ - 1], int(state["looks"][0])
    attempt = agent.now = agent.resumed = TaskProgress.restored(strip_prefix("attempt", state))
    agent.record.begin(agent.task, round_)
    agent.learner.load_state_dict(strip_prefix("learner", state))
    agent.learner.set_task(agent.task)
    same = agent.hold(attempt.lessons)
    if attempt.how.imitate:
        agent.learner.set_teacher(best(same).network)
    agent.rehearsal.load_state_dict(strip_prefix("memory", state))
    agent.replay.own.load_state_dict(strip_prefix("own", state))
    agent.replay.foreign = float(state["foreign"][0])
    agent.sharing.begin(agent.task, round_)
    if attempt.lessons:
        agent.sharing.sync.leave()
    agent.sharing.link.load_state_dict(strip_prefix("link", state))
    agent.explore, agent.draws = agent.stream("explore"), agent.stream("sample")
    set_rng_state(agent.explore, state["streams/explore"])
    set_rng_state(agent.draws, state["streams/draws"])
    offers = [lesson.offer for lesson in attempt.lessons]
    agent.record.load_state_dict(strip_prefix("record", state), offers)
    agent.record.sink.load_state_dict(strip_prefix("sink", state))
