"""The whole of an agent in the middle of a task, as columns, and back."""

from typing import TYPE_CHECKING

import numpy as np

from canal_mpi import seeding
from canal_mpi.attempt import Attempt, best
from canal_mpi.errors import DamagedData
from canal_mpi.state import inside, under
from canal_mpi.types import Columns

if TYPE_CHECKING:
    from canal_mpi.agent import Agent


def state_of(agent: "Agent") -> Columns:
    """Everything that the agent needs to go on from here with the same bits."""
    parts = {
        "attempt": agent.now.state(),
        "learner": agent.learner.state(),
        "memory": agent.memory.state(),
        "own": agent.replay.own.state(),
        "link": agent.sharing.link.state(),
        "record": agent.record.state(),
        "sink": agent.record.sink.state(),
        "streams": {
            "explore": seeding.snapshot(agent.explore),
            "draws": seeding.snapshot(agent.draws),
        },
    }
    held: Columns = {
        "round": np.array([agent.record.round], dtype="<i8"),
        "looks": np.array([agent.looks], dtype="<i8"),
        "foreign": np.array([agent.replay.foreign]),
    }
    for name, columns in parts.items():
        held |= under(name, columns)
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
    attempt = agent.now = agent.taken_up = Attempt.restored(inside("attempt", state))
    agent.record.begin(agent.task, round_)
    agent.learner.restore(inside("learner", state))
    agent.learner.begin(agent.task)
    same = agent.hold(attempt.lessons)
    if attempt.how.imitate:
        agent.learner.teach(best(same).network)
    agent.memory.restore(inside("memory", state))
    agent.replay.own.restore(inside("own", state))
    agent.replay.foreign = float(state["foreign"][0])
    agent.sharing.begin(agent.task, round_)
    if attempt.lessons:
        agent.sharing.sync.leave(agent.learner)
    agent.sharing.link.restore(inside("link", state))
    agent.explore, agent.draws = agent.stream("explore"), agent.stream("sample")
    seeding.rewind(agent.explore, state["streams/explore"])
    seeding.rewind(agent.draws, state["streams/draws"])
    offers = [lesson.offer for lesson in attempt.lessons]
    agent.record.restore(inside("record", state), offers)
    agent.record.sink.restore(inside("sink", state))
