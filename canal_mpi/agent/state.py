"""A task that is being learnt: how, from which lessons, and how far the agent has come."""

from dataclasses import asdict, dataclass, field
from math import inf, nan
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns, Env, Stateful
from canal_mpi.membuf.lesson import Lesson
from canal_mpi.state import from_json, rng_state, set_rng_state, strip_prefix, to_json, with_prefix

if TYPE_CHECKING:
    from canal_mpi.agent.loop import Agent


@dataclass(frozen=True)
class TaskSchedule:
    """How one task is learnt."""

    steps: int  # own steps in the environment
    pretrain: int = 0  # updates on lessons before the first own step, at most
    lesson_fraction: float = 0.0  # of a batch, while playing
    imitation: float = 0.0  # weight of imitating the donor; 0: nobody teaches
    epsilon: float = 0.0  # probability of a random action at first


@dataclass
class TaskProgress:
    """Where an agent is in its task, so that it can stop and resume."""

    schedule: TaskSchedule
    lessons: list[Lesson] = field(default_factory=list)
    updates: int = 0  # on lessons before the first own step
    kl: float = nan  # KL(teacher ‖ student) on held-out rows
    agreement: float = nan  # fraction of equal greedy actions on them
    best_kl: float = inf
    plateaus: int = 0  # checks at which the KL had not improved
    playing: bool = False  # whether the first own step has begun
    steps: int = 0  # own steps so far
    trained: bool = False  # whether only remembering and the exchange are left
    env: Env | None = None
    obs: Array = field(default_factory=lambda: np.zeros(0))  # what the next action answers
    saved_env: Columns = field(default_factory=dict)  # of the environments before a resume

    SAVED = (
        *("updates", "plateaus", "playing", "steps", "trained"),
        *("kl", "agreement", "best_kl"),
    )

    @property
    def imitation(self) -> float:
        """Weight of imitating the donor now: it falls to 0 over the own steps."""
        over = self.steps / self.schedule.steps if self.playing else 0.0
        return self.schedule.imitation * (1 - over)

    def state_dict(self) -> Columns:
        """Everything of it, for a checkpoint."""
        told = {"schedule": asdict(self.schedule), "lessons": len(self.lessons)}
        held = {"counts": to_json(told | {name: getattr(self, name) for name in self.SAVED})}
        for k, lesson in enumerate(self.lessons):
            held |= with_prefix(f"lesson-{k}", lesson.state_dict())
        if self.playing and not self.trained and self.env is not None:
            held |= with_prefix("env", self.env.state_dict()) | {"obs": self.obs}
        return held

    @classmethod
    def restored(cls, state: Columns) -> "TaskProgress":
        """The progress that `state` told of."""
        counts = from_json(state["counts"])
        schedule = TaskSchedule(**counts.pop("schedule"))
        names = [f"lesson-{k}" for k in range(counts.pop("lessons"))]
        lessons = [Lesson.restored(strip_prefix(name, state)) for name in names]
        obs = state.get("obs", np.zeros(0))
        return cls(schedule, lessons, obs=obs, saved_env=strip_prefix("env", state), **counts)


def _parts(agent: "Agent") -> dict[str, Stateful]:
    """What takes back its state after the lessons are taken in."""
    return {
        "rehearsal": agent.rehearsal,
        "own": agent.replay.own,
        "link": agent.sharing.link,
        "record": agent.record,
        "sink": agent.record.sink,
    }


def agent_state_dict(agent: "Agent") -> Columns:
    """Everything that the agent needs to resume from here, bit-identical."""
    held: Columns = {
        "round": np.array([agent.record.round], dtype="<i8"),
        "lesson_fraction": np.array([agent.replay.lesson_fraction]),
        "streams/explore": rng_state(agent.explore),
        "streams/sample": rng_state(agent.draws),
    }
    held |= with_prefix("progress", agent.progress.state_dict())
    held |= with_prefix("learner", agent.learner.state_dict())
    for name, part in _parts(agent).items():
        held |= with_prefix(name, part.state_dict())
    for round_, network in agent.networks.items():
        held |= with_prefix(f"networks/{round_}", network)
    return held


def restore(agent: "Agent", state: Columns) -> None:
    """Put an agent that was just built where `agent_state_dict` was taken."""
    try:
        _restore(agent, state)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise DamagedData(
            f"the checkpoint does not fit this agent ({type(error).__name__}: {error})"
        ) from error


def _restore(agent: "Agent", state: Columns) -> None:
    agent.first_round = int(state["round"][0])
    agent.progress = agent.resumed = TaskProgress.restored(strip_prefix("progress", state))
    agent.learner.load_state_dict(strip_prefix("learner", state))
    agent.set_task(agent.order[agent.first_round - 1], agent.first_round)
    agent.take_in(agent.progress)
    for name, part in _parts(agent).items():
        part.load_state_dict(strip_prefix(name, state))
    agent.replay.lesson_fraction = float(state["lesson_fraction"][0])
    set_rng_state(agent.explore, state["streams/explore"])
    set_rng_state(agent.draws, state["streams/sample"])
    networks = strip_prefix("networks", state)
    for number in {name.partition("/")[0] for name in networks}:
        agent.networks[int(number)] = strip_prefix(number, networks)
