"""The same work for everybody: RAM of a game, a network of 128-128, batches of 128, Huber, Adam, a
target network copied every 500 updates, one update a step, a replay of 100,000 rows."""

from collections.abc import Callable
from copy import deepcopy

import gymnasium
import numpy as np
import torch
from torch import nn

BATCH, ROWS, STARTS, LR, GAMMA, FOLLOWS, EPSILON = 128, 100_000, 200, 5e-4, 0.99, 500, 0.05


def environment(game: str) -> gymnasium.Env:
    """The game as gymnasium has it: RAM, actions repeated four times, no sticky actions."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make(
        f"ALE/{game}-v5",
        obs_type="ram",
        frameskip=4,
        repeat_action_probability=0.0,
        full_action_space=True,
    )


class Network:
    """Online and target network with the optimiser that torch offers by default."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layers = [
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 18),
        ]
        self.online = nn.Sequential(*layers)
        self.target = deepcopy(self.online)
        self.adam = torch.optim.Adam(self.online.parameters(), lr=LR)
        self.updates = 0

    def act(self, state: np.ndarray) -> int:
        """The best action of one state."""
        values = self.online(torch.as_tensor(state, dtype=torch.float32).unsqueeze(0) / 255)
        return int(values.argmax(dim=1))

    def learn(self, states, actions, rewards, later, over) -> float:
        """One update of tensors."""
        with torch.no_grad():
            goals = rewards + GAMMA * (1 - over) * self.target(later / 255).max(dim=1).values
        taken = self.online(states / 255).gather(1, actions[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(taken, goals)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.updates += 1
        if self.updates % FOLLOWS == 0:
            self.target.load_state_dict(self.online.state_dict())
        return loss.item()


def stepping(env, act: Callable, store: Callable, learn: Callable, log: Callable) -> Callable:
    """One step of a plain loop: act, step, store, learn, log."""
    rng = np.random.default_rng(1)
    state, _ = env.reset(seed=1)
    step, total = 0, 0.0

    def one() -> None:
        nonlocal state, step, total
        greedy = rng.random() >= EPSILON
        action = act(state) if greedy else int(rng.integers(18))
        later, reward, ended, cut, _ = env.step(action)
        total += float(reward)
        store(state, action, float(np.sign(reward)), later, ended)
        state, step = later, step + 1
        loss = learn() if step > STARTS else 0.0
        if step % 100 == 0:
            log(step, total, loss)
        if ended or cut:
            state, _ = env.reset()

    return one
