"""SimNet: a tiny network, trained from the same first weights everywhere, whose weights or outputs
after a while on a task tell which tasks are alike. It learns the immediate reward: with
bootstrapping its weights told more of the random stream than of the task."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from canal_mpi.errors import needed_for
from canal_mpi.interfaces import Array, Batch, Spaces
from canal_mpi.learn.dqn import DQN
from canal_mpi.learn.fast_mlp import array_of
from canal_mpi.settings import Job

STATES = 256  # random states on which outputs are compared


def train_simnet(spaces: Spaces, job: Job, sample: Callable[[], Batch]) -> Array:
    """Train a SimNet on batches of a task; its embedding."""
    settings = job.simnet
    plain = replace(
        job.learn,
        network="mlp",
        widths=(settings.width,),
        layer_norm=False,
        heads="shared",
        lr=settings.lr,
    )
    quiet = replace(job, learn=plain, rehearsal=replace(job.rehearsal, ewc_lambda=0.0))
    net = DQN(spaces, quiet, lambda name: 0)
    net.set_task("simnet")
    _normal_weights(net)
    for _ in range(settings.updates):
        net.update(sample()._replace(task="simnet"))
    return _outputs(net, spaces) if settings.distance == "outputs" else _weights(net)


def _normal_weights(net: DQN) -> None:
    """The original's first weights: normal(0, 1), the same for every agent."""
    with needed_for("simnet"):
        import torch  # whose normal numbers have no like elsewhere

    generator = torch.Generator().manual_seed(1)
    for block in net.blocks.values():
        block.set(torch.empty(len(block.params)).normal_(0, 1, generator=generator).numpy())


def _weights(net: DQN) -> Array:
    """All weights, each layer scaled by its number of weights so that none drowns the others."""
    parts = [array_of(block.params) for block in net.blocks.values()]
    return np.concatenate([part / np.sqrt(len(part)) for part in parts]).astype("<f4")


def _outputs(net: DQN, spaces: Spaces) -> Array:
    rng = np.random.Generator(np.random.PCG64(11))
    shape = (STATES, *spaces.shape)
    states = (
        rng.integers(0, 256, shape).astype(np.uint8)
        if spaces.dtype == "|u1"
        else rng.normal(size=shape).astype(np.float32)
    )
    return net.q_values(states).astype("<f4").reshape(-1)
