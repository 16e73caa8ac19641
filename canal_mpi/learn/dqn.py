"""Deep Q-learning: double, with a target network, on whatever network the job names."""

import copy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from canal_mpi import pick
from canal_mpi.config import LearnConfig
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.learn import NETWORKS
from canal_mpi.learn.flat import flatten
from canal_mpi.types import Array, Batch, Columns, Spaces


class DQN:
    """A learner that meets the `Learner` protocol."""

    def __init__(self, spaces: Spaces, config: LearnConfig, seed: int) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config, self.device = config, _device(config.device)
        self.factor = 1 / 255 if config.scale_input and spaces.dtype == "|u1" else 1.0
        make = pick.pick("network", config.network, NETWORKS)
        try:
            self.online = make(spaces.shape, spaces.actions, config.widths).to(self.device)
        except ValueError as error:
            raise UsageError(f"learn.network = {config.network}: {error}.") from error
        self.weights = flatten(self.online)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.target_weights = flatten(self.target)
        self.optimiser = torch.optim.Adam([self.weights], lr=config.lr, fused=True)
        self.loss = functional.smooth_l1_loss if config.loss == "huber" else functional.mse_loss
        self.updates = 0

    def begin(self, task: str) -> None:
        """One network learns all tasks, one after the other."""

    def act(self, obs: Array) -> Array:
        """The best action for each observation."""
        with torch.inference_mode():
            values = self.online(self._input(obs.reshape(len(obs), -1)))
            best: Array = values.argmax(dim=1).cpu().numpy()
        return best

    def learn(self, batch: Batch) -> float:
        """One step of Adam on the temporal difference; returns the loss."""
        actions = torch.from_numpy(batch.actions).to(self.device).unsqueeze(1)
        values = self.online(self._input(batch.states)).gather(1, actions).squeeze(1)
        loss = self.loss(values, self._goals(batch))
        assert self.weights.grad is not None
        self.weights.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.updates += 1
        if self.config.target_every and self.updates % self.config.target_every == 0:
            self.target_weights.copy_(self.weights)
        return float(loss.detach())

    @torch.no_grad()
    def _goals(self, batch: Batch) -> Tensor:
        states = self._input(batch.next_states)
        judge = self.target if self.config.target_every else self.online
        following = judge(states)
        if self.config.double:
            best = self.online(states).argmax(dim=1, keepdim=True)
            following = following.gather(1, best).squeeze(1)
        else:
            following = following.amax(dim=1)
        returns = torch.from_numpy(batch.returns).to(self.device)
        goals: Tensor = returns + torch.from_numpy(batch.discounts).to(self.device) * following
        return goals

    def _input(self, obs: Array) -> Tensor:
        tensor = torch.from_numpy(obs).to(self.device, torch.float32)
        return tensor.mul_(self.factor) if self.factor != 1.0 else tensor

    def state(self) -> Columns:
        """Weights, target and Adam's memory."""
        memory = self.optimiser.state.get(self.weights, {})
        held = {"weights": self.weights, "target": self.target_weights} | memory
        columns = {name: tensor.detach().cpu().numpy().copy() for name, tensor in held.items()}
        return columns | {"updates": np.array([self.updates], dtype="<i8")}

    def restore(self, state: Columns) -> None:
        """Take back what `state` gave."""
        for name, tensor in (("weights", self.weights), ("target", self.target_weights)):
            if state[name].shape != tuple(tensor.shape):
                raise DamagedData(
                    f"saved {name} have the shape {state[name].shape}, not {tuple(tensor.shape)}"
                )
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(state[name]))
        memory = {n: torch.from_numpy(c.copy()) for n, c in state.items() if n in ADAM}
        self.optimiser.state.clear()
        if memory:
            self.optimiser.state[self.weights] = memory
        self.updates = int(state["updates"][0])


ADAM = ("step", "exp_avg", "exp_avg_sq")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("learn.device = cuda, but torch finds no usable CUDA; use cpu.")
    return torch.device(name)
