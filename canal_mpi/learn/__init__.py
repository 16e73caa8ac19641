"""Learners and networks, by name; torch is loaded only when one is built."""

from collections.abc import Mapping

ALGORITHMS: Mapping[str, str] = {
    "dqn": "canal_mpi.learn.dqn:DQN",
    "linear": "canal_mpi.learn.linear:Linear",
}
NETWORKS: Mapping[str, str] = {"mlp": "canal_mpi.learn.nets:Mlp", "cnn": "canal_mpi.learn.nets:Cnn"}
LOSSES = ("huber", "mse")
IDENTITIES = ("single", "heads", "separate")
REWARDS = ("clip", "none", "scale")
REUSE_MODES = ("replay", "mix", "distill", "adopt")
