"""Learners and networks, by name; torch is loaded only when one is built."""

from collections.abc import Mapping

ALGORITHMS: Mapping[str, str] = {
    "dqn": "canal_mpi.learn.dqn:DQN",
}
NETWORKS: Mapping[str, str] = {
    "mlp": "canal_mpi.learn.networks:Mlp",
    "cnn": "canal_mpi.learn.networks:Cnn",
}
LOSSES = ("huber", "mse")
HEADS = ("shared", "per_task", "separate")
INPUTS = ("raw", "scale", "change")
REWARDS = ("clip", "none")
REUSE_MODES = ("replay", "mix", "distill", "adopt")
