"""DQN in plain torch: the update that `canal_mpi/learn/dqn.py` computes faster, for one network.

It is also a learner of one's own:

canal-mpi train --job quick --set learn.algorithm=plain_dqn:PlainDQN
"""

from collections.abc import Callable
from copy import deepcopy
from math import prod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from canal_mpi.interfaces import Array, Batch, Columns, Learner, Spaces
from canal_mpi.settings import Job


class PlainDQN(Learner):
    """Double DQN with a target network, Huber loss and Adam; all tasks share one network."""

    def __init__(self, spaces: Spaces, job: Job, seed: Callable[[str], int]) -> None:
        self.config = config = job.learn
        self.scale = 1 / 255 if config.input != "raw" and spaces.dtype == "|u1" else 1.0
        torch.manual_seed(seed("network"))
        layers: list[nn.Module] = []
        inputs = prod(spaces.shape)
        for width in config.widths:
            norm = nn.LayerNorm(width) if config.layer_norm else nn.Identity()
            layers += [nn.Linear(inputs, width), norm, nn.ReLU()]
            inputs = width
        self.online = nn.Sequential(*layers, nn.Linear(inputs, spaces.actions))
        self.target = deepcopy(self.online)
        self.adam = torch.optim.Adam(self.online.parameters(), lr=config.lr)
        self.updates = 0

    def set_task(self, task: str) -> None:
        """Every task is learnt by the same network."""

    def q(self, network: nn.Module, obs: Array) -> Tensor:
        """Q-values of observations, in the precision of the network."""
        precision = next(network.parameters()).dtype
        found: Tensor = network(torch.from_numpy(obs).flatten(1).to(precision) * self.scale)
        return found

    @torch.no_grad()
    def act(self, obs: Array) -> Array:
        """The greedy action for each observation."""
        best: Array = self.q(self.online, obs).argmax(dim=1).numpy()
        return best

    @torch.no_grad()
    def td_targets(self, batch: Batch) -> Tensor:
        """n-step returns plus the discounted value of the state after them."""
        network = self.target if self.config.target_update_interval else self.online
        target_q = self.q(network, batch.next_states)
        online_q = self.q(self.online, batch.next_states) if self.config.double else target_q
        best = online_q.argmax(dim=1, keepdim=True)
        discounts = torch.from_numpy(batch.discounts)
        return torch.from_numpy(batch.returns) + discounts * target_q.gather(1, best).squeeze(1)

    def update(self, batch: Batch) -> float:
        """One step of Adam on a batch; returns the loss."""
        targets = self.td_targets(batch)
        actions = torch.from_numpy(batch.actions).unsqueeze(1)
        q = self.q(self.online, batch.states).gather(1, actions).squeeze(1)
        huber = self.config.loss == "huber"
        loss = (nn.functional.smooth_l1_loss if huber else nn.functional.mse_loss)(q, targets)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.config.max_grad_norm:
            clip_grad_norm_(self.online.parameters(), self.config.max_grad_norm)
        self.adam.param_groups[0]["lr"] = self.config.lr * batch.lr_scale
        self.adam.step()
        self.updates += 1
        interval = self.config.target_update_interval
        if interval and self.updates % interval == 0:
            self.target.load_state_dict(self.online.state_dict())
        return loss.item()

    def state_dict(self) -> Columns:
        """Both networks, Adam and the number of updates, as arrays."""
        held = {"updates": np.array([self.updates])}
        for name, network in (("online", self.online), ("target", self.target)):
            held[name] = parameters_to_vector(network.parameters()).detach().numpy()
        for k, state in self.adam.state_dict()["state"].items():
            held |= {f"adam/{k}/{name}": tensor.numpy().copy() for name, tensor in state.items()}
        return held

    def load_state_dict(self, state: Columns) -> None:
        """Take back what `state_dict` gave."""
        self.updates = int(state["updates"][0])
        for name, network in (("online", self.online), ("target", self.target)):
            vector_to_parameters(torch.tensor(state[name]), network.parameters())
        adam = self.adam.state_dict()
        adam["state"] = {}
        for key in (key for key in state if key.startswith("adam/")):
            _, k, name = key.split("/")
            adam["state"].setdefault(int(k), {})[name] = torch.tensor(state[key])
        self.adam.load_state_dict(adam)
