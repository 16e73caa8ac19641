"""The parts of an update, each to be timed alone."""

from collections.abc import Callable

import torch

from canal_mpi.learn.dqn import DQN
from canal_mpi.learn.losses import temporal_difference
from canal_mpi.learn.piece import adam
from canal_mpi.types import Batch, Learner


def parts(learner: Learner, batch: Batch) -> dict[str, Callable[[], object]]:
    """What an update of this batch consists of, in its order; empty for other learners."""
    if not isinstance(learner, DQN):
        return {}
    online, target = learner._network(batch.task)
    obs = learner._numbers(batch.states)
    values, pieces = online.values(obs).numpy().copy(), list(learner._moved[batch.task].values())
    slope = torch.rand(values.shape)

    def loss() -> None:
        temporal_difference(values, batch.actions, batch.returns, True, slope.numpy())

    def there_and_back() -> None:
        online.forward(obs)
        online.backward(slope)

    return {
        "bytes to numbers (twice)": lambda: learner._numbers(batch.states),
        "next states, target": lambda: target.values(obs),
        "next states, online": lambda: online.values(obs),
        "states, forward": lambda: online.forward(obs),
        "loss": loss,
        "forward and backward": there_and_back,
        "Adam": lambda: adam(pieces, 0.0),
    }
