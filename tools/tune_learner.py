"""A learner to try changes on: DQN on RAM in one process, every candidate change one setting.

The defaults are those of `canal-mpi train`. `tools/tune` runs it; nothing in the package uses it.
"""

from dataclasses import dataclass, fields
from math import exp
from time import process_time
from typing import Any
from zlib import crc32

import numpy as np
import tune_kernels as kernels
from tune_kernels import Array

from canal_mpi.envs.atari import AtariGame
from canal_mpi.interfaces import TERMINATED, TRUNCATED
from canal_mpi.settings import TaskConfig


@dataclass(frozen=True)
class Settings:
    """What a run learns with."""

    steps: int = 20_000
    widths: str = "128-128"
    head: str = "dqn"  # dqn, c51, qr (quantiles)
    atoms: int = 21  # of c51 and qr
    v_min: float = -5.0  # support of c51
    v_max: float = 15.0
    input: str = "scale"  # scale (bytes / 255), std (standardised), nibble; +diff, +step, +bits
    reward: str = "clip"  # clip, none, symlog
    lr: float = 5e-4
    lr_decay: float = 0.5  # last part of training in which the learning rate falls to 0
    adam_eps: float = 1e-8
    weight_decay: float = 0.0  # of AdamW
    gamma: float = 0.99
    gamma_start: float = 0.0  # anneal from here, 0: constant
    n_step: int = 3
    n_start: int = 0  # anneal from here, 0: constant
    anneal: float = 0.5  # part of training (or of the time between resets) in which both anneal
    batch: int = 128
    updates: float = 1.0  # per step
    starts: int = 200
    double: bool = True
    target_interval: int = 500
    tau: float = 0.0  # EMA target instead of copies
    act: str = "online"  # which network plays: online or target
    munchausen: float = 0.0
    entropy: float = 0.03  # temperature of munchausen
    per: float = 0.0  # exponent of prioritised sampling
    per_beta: float = 0.5
    reset_interval: int = 0  # updates between two resets
    shrink: float = 0.5  # part of the hidden weights that a reset keeps
    last_reset: float = 0.8  # no reset in what remains of training after this part
    eps_end: float = 0.01
    eps_decay: float = 4000.0
    eps_test: float = 0.01
    sticky: float = 0.0
    episodes: int = 10
    max_steps: int = 3000


def settings_of(variant: str, **fixed: Any) -> Settings:
    """The defaults with changes as in `head=qr,lr=1e-3`; `baseline` has none."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    changes: dict[str, Any] = {}
    for part in variant.split(",") if variant != "baseline" else ():
        name, _, value = part.partition("=")
        changes[name] = value == "true" if kinds[name] is bool else kinds[name](value)
    return Settings(**{**fixed, **changes})


class Replay:
    """All steps of a run; row k + 1 follows row k, and an episode's last state has its own row."""

    def __init__(self, settings: Settings, rng: np.random.Generator) -> None:
        rows = settings.steps * 2 + 2
        self.settings, self.rng, self.size, self.newest = settings, rng, 0, 0
        self.obs = np.zeros((rows, 128), np.uint8)
        self.before = np.zeros(rows, np.int64)
        self.action, self.reward = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
        self.flags, self.steps = np.zeros(rows, np.int64), np.zeros(settings.steps, np.int64)
        self.tree = np.zeros(2 << (settings.steps - 1).bit_length(), np.float64)
        self.highest = 1.0
        batch = settings.batch
        self.returns, self.discounts = np.zeros(batch, np.float32), np.zeros(batch, np.float32)
        self.following, self.places = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.weights = np.ones(batch, np.float32)

    def start(self, obs: Array) -> None:
        """An episode begins."""
        self.newest += bool(self.size)
        self.obs[self.newest], self.before[self.newest] = obs, self.newest

    def add(self, action: int, reward: float, flags: int, obs: Array) -> None:
        """A step."""
        row, kind = self.newest, self.settings.reward
        if kind != "none":
            reward = float(np.sign(reward) * (1 if kind == "clip" else np.log1p(abs(reward))))
        self.action[row], self.reward[row], self.flags[row] = action, reward, flags
        self.steps[self.size] = row
        if self.settings.per:
            kernels.tree_set(self.tree, np.array([self.size]), np.array([self.highest]))
        self.size, self.newest = self.size + 1, row + 1
        self.obs[row + 1], self.before[row + 1] = obs, row

    def draw(self, n: int, gamma: float) -> Array:
        """Rows of a batch; their returns, discounts, following rows and weights are attributes."""
        s, draws = self.settings, self.rng.random(self.settings.batch)
        if s.per:
            kernels.tree_draw(self.tree, draws, self.places, self.size)
            chance = self.tree[len(self.tree) // 2 + self.places] / self.tree[1]
            self.weights[:] = (chance * self.size) ** -s.per_beta
            self.weights /= self.weights.max()
        else:
            self.places[:] = draws * self.size
        rows = self.steps[self.places]
        found = (self.returns, self.discounts, self.following)
        kernels.n_step_returns(rows, self.reward, self.flags, self.newest, n, gamma, *found)
        return rows

    def learnt(self, errors: Array) -> None:
        """Write priorities."""
        if self.settings.per:
            priorities = (errors.astype(np.float64) + 1e-3) ** self.settings.per
            self.highest = max(self.highest, float(priorities.max()))
            kernels.tree_set(self.tree, self.places, priorities)


# ── learner ─────────────────────────────────────────────────────────────────────────────────────


class Inputs:
    """Turns rows of the replay into inputs; what they are standardised by is measured at times."""

    def __init__(self, settings: Settings, replay: Replay) -> None:
        self.kinds, self.replay, self.rooms = settings.input.split("+"), replay, {}
        self.mean = np.zeros(128, np.float32)
        self.factor = np.full(128, 1 / 255, np.float32)
        self.change = np.zeros(128 if "diff" in self.kinds else 0, np.float32)
        self.bits = np.zeros(0, np.int64)
        moved = np.arange(-255, 256, dtype=np.float32)
        self.steps = (np.sign(moved) * np.log1p(np.abs(moved)) / np.log(16)).astype(np.float32)
        self.steps = self.steps if "step" in self.kinds else self.steps[:0]
        self.nibbles = "nibble" in self.kinds
        self.due = settings.starts

    @property
    def width(self) -> int:
        """Numbers per row."""
        return 128 * (1 + self.nibbles + bool(len(self.steps))) + len(self.change) + len(self.bits)

    def measure(self) -> None:
        """Take mean and spread from all play so far, when it has doubled."""
        replay, seen = self.replay, self.replay.obs[: self.replay.newest]
        if "bits" in self.kinds and not len(self.bits):
            every = np.unpackbits(seen, axis=1, bitorder="little")
            self.bits = np.flatnonzero(every.min(axis=0) != every.max(axis=0))
        if "std" in self.kinds:
            self.mean[:] = seen.mean(axis=0)
            self.factor[:] = 1 / np.maximum(seen.std(axis=0), 1)
        if len(self.change):
            old = replay.obs[replay.before[: replay.newest]]
            moved = seen.astype(np.float32) - old.astype(np.float32)
            self.change[:] = 1 / np.maximum(moved.std(axis=0), 1)
        self.due *= 2

    def of(self, rows: Array, room: str) -> Array:
        """Inputs [rows, width]; the next call with this room overwrites them."""
        x = self.rooms.get(room)
        if x is None:
            x = self.rooms[room] = np.zeros((len(rows), self.width), np.float32)
        replay = self.replay
        kernels.features(
            rows,
            replay.obs,
            replay.before,
            self.mean,
            self.factor,
            self.change,
            self.bits,
            self.nibbles,
            self.steps,
            x,
        )
        return x


class Learner:
    """A network, its target, and Adam."""

    def __init__(self, settings: Settings, replay: Replay, actions: int, rng: Any) -> None:
        self.s, self.replay, self.actions, self.rng = settings, replay, actions, rng
        self.inputs, self.t, self.updates = Inputs(settings, replay), 0, 0
        self.atoms = 1 if settings.head == "dqn" else settings.atoms
        self.kind = ("dqn", "c51", "qr").index(settings.head)
        self.support = np.linspace(settings.v_min, settings.v_max, self.atoms, dtype=np.float32)
        self.net: kernels.Network | None = None
        self.since_reset = 0

    def build(self) -> None:
        """Make the network: its inputs are known now."""
        widths = map(int, self.s.widths.split("-"))
        self.net = net = kernels.Network(
            [self.inputs.width, *widths, self.actions * self.atoms], self.rng
        )
        self.params, self.target = net.params, net.params.copy()
        self.grad, self.m, self.v = (np.zeros_like(net.params) for _ in range(3))
        self.online_layers, self.target_layers = net.views(self.params), net.views(self.target)
        self.grads, shape = net.views(self.grad), (self.s.batch, self.atoms)
        self.out, self.following, self.slope = (np.zeros(shape, np.float32) for _ in range(3))
        self.errors = np.zeros(self.s.batch, np.float32)

    def q_values(self, layers: list[list[Array]], h: Array) -> Array:
        """[rows, actions], from what the hidden layers give."""
        q = np.empty((len(h), self.actions), np.float32)
        kernels.values(h, *layers[-1], self.kind, self.support, q)
        return q

    def act(self, row: int) -> int:
        """Greedy."""
        assert self.net
        layers = self.target_layers if self.s.act == "target" else self.online_layers
        h = self.net.forward(layers, self.inputs.of(np.array([row]), "act"))
        return int(self.q_values(layers, h)[0].argmax())

    def schedule(self, progress: float) -> tuple[int, float]:
        """n and gamma now."""
        s = self.s
        part = progress / s.anneal
        if s.reset_interval:
            part = self.since_reset / (s.anneal * s.reset_interval)
        part = min(part, 1.0)
        n = round(s.n_start * (s.n_step / s.n_start) ** part) if s.n_start else s.n_step
        far, near = 1 - s.gamma, 1 - s.gamma_start
        return n, 1 - near * (far / near) ** part if s.gamma_start else s.gamma

    def update(self, progress: float) -> None:
        """One step of Adam on a batch."""
        s, replay, inputs = self.s, self.replay, self.inputs
        if replay.size >= inputs.due:
            inputs.measure()
        if self.net is None:
            self.build()
        assert self.net
        rows = replay.draw(*self.schedule(progress))
        actions, after = replay.action[rows], inputs.of(replay.following, "next")
        targets = self.bootstrap(after)
        x = inputs.of(rows, "now")
        if s.munchausen:
            targets = self.munchausen(x, actions, after)
        h = self.net.forward(self.online_layers, x)
        kernels.chosen(h, *self.online_layers[-1], actions, self.out)
        known = (self.following, replay.returns, replay.discounts, replay.weights)
        if self.kind == 0:
            kernels.scalar_loss(self.out, targets, replay.weights, self.slope, self.errors)
        elif self.kind == 1:
            kernels.c51_loss(self.out, *known, self.support, self.slope, self.errors)
        else:
            kernels.qr_loss(self.out, *known, self.slope, self.errors)
        dh = self.net.room(len(x))[-1][3]
        kernels.chosen_back(self.slope, h, self.online_layers[-1][0], actions, *self.grads[-1], dh)
        self.net.backward(self.online_layers, self.grads, x)
        replay.learnt(self.errors)
        self.step(progress)

    def bootstrap(self, after: Array) -> Array:
        """Fill `following` with what the target says of the best next actions; scalar targets."""
        assert self.net
        layers = self.online_layers if self.s.double else self.target_layers
        h = self.net.forward(layers, after)
        best = self.q_values(layers, h).argmax(axis=1)
        if self.s.double:
            h = self.net.forward(self.target_layers, after)
        kernels.chosen(h, *self.target_layers[-1], best, self.following)
        return self.replay.returns + self.replay.discounts * self.following[:, 0]

    def munchausen(self, x: Array, actions: Array, after: Array) -> Array:
        """Soft targets, with the scaled log-policy of the target network added to the reward."""
        assert self.net
        s, replay, layers = self.s, self.replay, self.target_layers
        now, q = (self.q_values(layers, self.net.forward(layers, part)) for part in (x, after))
        log_now, log_next = log_policy(now, s.entropy), log_policy(q, s.entropy)
        bonus = np.maximum(s.entropy * log_now[np.arange(len(x)), actions], -1)
        soft = (np.exp(log_next) * (q - s.entropy * log_next)).sum(axis=1)
        found = replay.returns + s.munchausen * bonus + replay.discounts * soft
        return found.astype(np.float32)

    def step(self, progress: float) -> None:
        """Adam, then the target, then a reset if one is due."""
        s = self.s
        rate = min((1 - progress) / s.lr_decay, 1.0) if s.lr_decay else 1.0
        self.t, self.updates, self.since_reset = self.t + 1, self.updates + 1, self.since_reset + 1
        assert self.net
        moments, rates = (self.m, self.v), (s.lr * rate, s.adam_eps, s.weight_decay)
        kernels.adam(self.params, self.grad, *moments, self.net.decays, self.t, *rates)
        if s.tau:
            kernels.follow(self.target, self.params, s.tau)
        elif self.updates % s.target_interval == 0:
            self.target[:] = self.params
        if s.reset_interval and self.since_reset >= s.reset_interval and progress < s.last_reset:
            self.reset()

    def reset(self) -> None:
        """Shrink and perturb the hidden layers, draw the head anew, forget Adam's moments."""
        assert self.net
        fresh, start = self.net.initial(self.rng), self.net.head_start
        for vector in (self.params, self.target):
            vector[:start] = self.s.shrink * vector[:start] + (1 - self.s.shrink) * fresh[:start]
            vector[start:] = fresh[start:]
        self.m[:], self.v[:], self.t, self.since_reset = 0, 0, 0, 0


def log_policy(q: Array, temperature: float) -> Array:
    """Logarithm of softmax(q / temperature)."""
    scaled = (q - q.max(axis=1, keepdims=True)) / temperature
    return scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))


def stream(seed: int, game: str, purpose: str) -> np.random.SeedSequence:
    """Of every random choice in a run, by what it is for."""
    return np.random.SeedSequence([seed, crc32(game.encode()), crc32(purpose.encode())])


def make_game(s: Settings, game: str, seed: int, purpose: str) -> AtariGame:
    """The environment of a run."""
    config = TaskConfig(frame_stack=1, repeat_action_probability=s.sticky)
    return AtariGame(game, config, stream(seed, game, purpose))


def train(s: Settings, game: str, seed: int) -> tuple[Learner, list[float]]:
    """Learn a game; the learner and the returns of its episodes."""
    env, rng = make_game(s, game, seed, "train"), np.random.default_rng(stream(seed, game, "act"))
    replay = Replay(s, np.random.default_rng(stream(seed, game, "replay")))
    actions, draws = env.spaces.actions, np.random.default_rng(stream(seed, game, "weights"))
    learner, total, returns = Learner(s, replay, actions, draws), 0.0, []
    replay.start(env.reset())
    starts = max(s.starts, s.batch)
    for step in range(s.steps):
        epsilon = s.eps_end + (1 - s.eps_end) * exp(-step / s.eps_decay)
        chance, action = rng.random(), int(rng.integers(actions))
        if learner.net and chance >= epsilon:
            action = learner.act(replay.newest)
        obs, reward, flags = env.step(action)
        total += reward
        replay.add(action, reward, flags, obs)
        if flags & (TERMINATED | TRUNCATED):
            returns.append(total)
            total = 0.0
            replay.start(env.reset())
        if step >= starts:
            for _ in range(int((step + 1) * s.updates) - int(step * s.updates)):
                learner.update(step / s.steps)
    return learner, returns


def evaluate(s: Settings, learner: Learner, game: str, seed: int) -> list[float]:
    """Scores of greedy episodes."""
    env, rng = make_game(s, game, seed, "test"), np.random.default_rng(stream(seed, game, "eps"))
    replay, scores = learner.replay, []
    for _ in range(s.episodes):
        replay.start(env.reset())
        total, flags, steps = 0.0, 0, 0
        while not flags & (TERMINATED | TRUNCATED) and steps < s.max_steps:
            row = replay.newest
            action = learner.act(row)
            if rng.random() < s.eps_test:
                action = int(rng.integers(learner.actions))
            obs, reward, flags = env.step(action)
            # Two rows are enough to act on: the state and the one before it.
            replay.obs[row - 1], replay.before[row] = replay.obs[row], row - 1
            replay.obs[row], total, steps = obs, total + reward, steps + 1
        scores.append(total)
    return scores


def run(variant: str, game: str, seed: int, steps: int, **fixed: Any) -> dict[str, Any]:
    """Train and evaluate; what a row of the table needs."""
    s = settings_of(variant, steps=steps, **fixed)
    start = process_time()
    learner, returns = train(s, game, seed)
    trained = process_time()
    scores = evaluate(s, learner, game, seed)
    return {
        "score": round(float(np.mean(scores)), 2),
        "late": round(float(np.mean(returns[-10:])), 2) if returns else "",
        "train_seconds": round(trained - start, 2),
        "test_seconds": round(process_time() - trained, 2),
    }
