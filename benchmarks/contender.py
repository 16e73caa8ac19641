"""One contender: reads a number of steps from stdin, does them, answers with CPU and wall seconds.

python benchmarks/contender.py ours|ours-same|sb3|cleanrl|original|original-sockets GAME
"""

import os
import random
import sys
from collections import deque
from pathlib import Path
from time import perf_counter, process_time

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import work


def blocks(one) -> None:
    """Do what the caller asks for, step by step."""
    for line in sys.stdin:
        start, began = process_time(), perf_counter()
        for _ in range(int(line)):
            one()
        print(process_time() - start, perf_counter() - began, flush=True)


class Turns:
    """Drives this package's own training loop from outside, where it would save checkpoints."""

    def __init__(self) -> None:
        self.left = 0

    def start(self, state) -> None: ...

    def end(self, state) -> None: ...

    def turn(self, steps: int, state) -> None:
        if self.left == 0:
            self.left = int(sys.stdin.readline() or sys.exit())
            self.begin = process_time(), perf_counter()
        self.left -= 1
        if self.left == 0:
            cpu, wall = self.begin
            print(process_time() - cpu, perf_counter() - wall, flush=True)
            self.turn(0, state)


def ours(game: str, same: bool) -> None:
    """This package: as it comes, or with the plain DQN that the others have."""
    from canal_mpi import config, envs
    from canal_mpi.rank.build import make_agent
    from canal_mpi.results.store import Rows
    from canal_mpi.topology.exchange import alone

    flags = {"tasks": [game], "train.steps": 10**9, "evaluation.episodes": 0}
    flags |= {"explore.eps_start": work.EPSILON, "explore.eps_end": work.EPSILON}
    if same:
        flags |= {"learn.layer_norm": False, "learn.double": False, "learn.n_step": 1}
        flags |= {"learn.heads": "shared"}
        flags |= {"task.frame_stack": 1, "learn.input": "scale", "learn.batch_size": work.BATCH}
    job = envs.named(config.resolve(flags))
    make_agent(job, 0, job.tasks, alone, Rows(), lambda progress: None, saver=Turns()).run()


def sb3(game: str) -> None:
    """Stable-Baselines3's DQN; it goes on where its last block ended."""
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy",
        work.environment(game),
        learning_rate=work.LR,
        buffer_size=work.ROWS,
        learning_starts=work.STARTS,
        batch_size=work.BATCH,
        gamma=work.GAMMA,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=work.FOLLOWS,
        exploration_initial_eps=work.EPSILON,
        exploration_final_eps=work.EPSILON,
        policy_kwargs={"net_arch": [128, 128]},
        device="cpu",
        seed=1,
    )
    for line in sys.stdin:
        start, began = process_time(), perf_counter()
        model.learn(int(line), reset_num_timesteps=False, log_interval=4)
        print(process_time() - start, perf_counter() - began, flush=True)


def cleanrl(game: str):
    """A single-file loop: arrays as replay, autograd, torch's Adam, a line of log now and then."""
    net, rng = work.Network(), np.random.default_rng(2)
    states, later = (np.zeros((work.ROWS, 128), dtype=np.uint8) for _ in range(2))
    actions, rewards = np.zeros(work.ROWS, dtype=np.int64), np.zeros(work.ROWS, dtype=np.float32)
    over, count = np.zeros(work.ROWS, dtype=np.float32), 0

    def act(state):
        with torch.no_grad():
            return net.act(state)

    def store(state, action, reward, after, ended):
        nonlocal count
        row, count = count % work.ROWS, count + 1
        states[row], actions[row], rewards[row] = state, action, reward
        later[row], over[row] = after, ended

    def learn():
        rows = rng.integers(0, min(count, work.ROWS), work.BATCH)
        columns = (states, actions, rewards, later, over)
        return net.learn(*(torch.as_tensor(column[rows]) for column in columns))

    return work.stepping(work.environment(game), act, store, learn, logger())


def original(env):
    """A list of tuples, drawn by random.sample and stacked for every update."""
    net, memory = work.Network(), deque(maxlen=work.ROWS)

    def store(*row):
        memory.append(row)

    def learn():
        parts = zip(*random.sample(memory, work.BATCH), strict=True)
        states, actions, rewards, later, over = (np.stack(part) for part in parts)
        numbers = (torch.FloatTensor(a) for a in (states, rewards, later, over.astype(np.float32)))
        states, rewards, later, over = numbers
        return net.learn(states, torch.LongTensor(actions), rewards, later, over)

    return work.stepping(env, net.act, store, learn, logger())


def logger():
    """A line of text for every hundred steps."""
    file = Path(os.devnull).open("w")  # noqa: SIM115
    return lambda *values: print(*values, file=file, flush=True)


def main(kind: str, game: str) -> None:
    """Be one of the contenders."""
    torch.set_num_threads(1)
    if kind in ("ours", "ours-same"):
        ours(game, kind == "ours-same")
    elif kind == "sb3":
        sb3(game)
    elif kind == "cleanrl":
        blocks(cleanrl(game))
    elif kind == "original":
        blocks(original(work.environment(game)))
    else:
        from sockets import Remote

        blocks(original(Remote(game)))


main(*sys.argv[1:])
