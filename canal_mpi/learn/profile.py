"""The parts of an update, each to be timed alone."""

from collections.abc import Callable

import numpy as np

from canal_mpi.learn.dqn import DQN
from canal_mpi.learn.losses import temporal_difference
from canal_mpi.types import Batch, Learner


def parts(learner: Learner, batch: Batch) -> dict[str, Callable[[], object]]:
    """What an update of this batch consists of, in its order; empty for other learners."""
    if not isinstance(learner, DQN):
        return {}
    online, target = learner._network(batch.task)
    values = online.values(batch.states).copy()
    pieces, slope = list(learner._moved[batch.task].values()), np.zeros_like(values)

    def loss() -> None:
        temporal_difference(values, batch.actions, batch.returns, True, slope)

    def there_and_back() -> None:
        online.forward(batch.states)
        online.backward(slope)

    def adam() -> None:
        for piece in pieces:
            piece.step(0.0)

    return {
        "next states, target": lambda: target.values(batch.next_states),
        "next states, online": lambda: online.values(batch.next_states),
        "states, forward": lambda: online.forward(batch.states),
        "loss": loss,
        "forward and backward": there_and_back,
        "Adam": adam,
    }
