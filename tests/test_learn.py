"""The learner against plain torch, and what it keeps, copies and refuses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from canal_mpi.config import LearnConfig
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.learn.dqn import DQN
from canal_mpi.learn.flat import flatten
from canal_mpi.learn.nets import Cnn, Mlp
from canal_mpi.results.hdf5 import read_arrays, write_arrays
from canal_mpi.types import Array, Batch, Spaces

VECTOR = Spaces((5,), "<f4", 3)
BYTES = Spaces((5,), "|u1", 3)
FRAMES = Spaces((4, 84, 84), "|u1", 6)
SMALL = LearnConfig(widths=(7, 6), batch=8, lr=1e-2, target_every=3)


def batch_of(spaces: Spaces, rows: int = 8, seed: int = 0, ends: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    features = int(np.prod(spaces.shape))

    def states() -> Array:
        if spaces.dtype == "|u1":
            return rng.integers(0, 256, (rows, features)).astype(np.uint8)
        return rng.normal(size=(rows, features)).astype(np.float32)

    discounts = np.full(rows, 0.0 if ends else 0.97, dtype=np.float32)
    if not ends:
        discounts[::3] = 0
    return Batch(
        states=states(),
        actions=rng.integers(0, spaces.actions, rows),
        returns=(3 * rng.normal(size=rows)).astype(np.float32),
        next_states=states(),
        discounts=discounts,
    )


class Plain:
    """Q-learning written down a second time: double precision, no vector of weights, own Adam."""

    def __init__(self, learner: DQN, config: LearnConfig, scale: float = 1.0) -> None:
        self.config, self.scale = config, scale
        self.online = [p.detach().double().clone() for p in learner.online.parameters()]
        self.target = [p.detach().double().clone() for p in learner.target.parameters()]
        self.first = [torch.zeros_like(p) for p in self.online]
        self.second = [torch.zeros_like(p) for p in self.online]
        self.updates = 0

    def values(self, weights: Sequence[Tensor], states: Array) -> Tensor:
        x = torch.from_numpy(states.astype(np.float64) * self.scale)
        for k in range(0, len(weights), 2):
            x = x @ weights[k].T + weights[k + 1]
            x = x.clamp(min=0) if k + 2 < len(weights) else x
        return x

    def learn(self, batch: Batch) -> float:
        config, rows = self.config, range(len(batch.actions))
        judge = self.target if config.target_every else self.online
        goals = []
        after, choice = (self.values(w, batch.next_states) for w in (judge, self.online))
        for k in rows:
            best = int(choice[k].argmax()) if config.double else int(after[k].argmax())
            goals.append(
                float(batch.returns[k]) + float(batch.discounts[k]) * float(after[k, best])
            )
        weights = [p.clone().requires_grad_() for p in self.online]
        values = self.values(weights, batch.states)
        loss = torch.zeros((), dtype=torch.float64)
        for k in rows:
            error = values[k, int(batch.actions[k])] - goals[k]
            huber = error.abs() - 0.5 if abs(error.item()) > 1 else 0.5 * error**2
            loss = loss + (huber if config.loss == "huber" else error**2) / len(rows)
        self._adam(torch.autograd.grad(loss, weights))
        self.updates += 1
        if config.target_every and self.updates % config.target_every == 0:
            self.target = [p.clone() for p in self.online]
        return loss.item()

    def _adam(self, gradients: Sequence[Tensor]) -> None:
        t = self.updates + 1
        for k, gradient in enumerate(gradients):
            self.first[k] = 0.9 * self.first[k] + 0.1 * gradient
            self.second[k] = 0.999 * self.second[k] + 0.001 * gradient**2
            step = self.first[k] / (1 - 0.9**t)
            scale = (self.second[k] / (1 - 0.999**t)).sqrt() + 1e-8
            self.online[k] = self.online[k] - self.config.lr * step / scale


def distance(learner: DQN, plain: Plain) -> float:
    flat = torch.cat([p.reshape(-1) for p in plain.online])
    return float((learner.weights.detach().double() - flat).abs().max())


@pytest.mark.parametrize("target_every", [0, 3])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("double", [True, False])
def test_an_update_is_what_plain_torch_does(double: bool, loss: str, target_every: int) -> None:
    config = replace(SMALL, double=double, loss=loss, target_every=target_every, lr=1e-3)
    learner = DQN(VECTOR, config, 4)
    state, noise = learner.state(), np.random.default_rng(3)
    shape = state["target"].shape
    learner.restore(state | {"target": noise.normal(size=shape).astype(np.float32)})
    plain = Plain(learner, config)  # whose target now has a mind of its own
    batch = batch_of(VECTOR)
    assert learner.learn(batch) == pytest.approx(plain.learn(batch), rel=1e-6)
    assert distance(learner, plain) < 1e-6


@pytest.mark.parametrize("double", [True, False])
def test_many_updates_stay_with_plain_torch(double: bool) -> None:
    config = replace(SMALL, double=double, lr=1e-3)
    learner = DQN(VECTOR, config, 4)
    plain = Plain(learner, config)
    for seed in range(12):
        batch = batch_of(VECTOR, seed=seed)
        assert learner.learn(batch) == pytest.approx(plain.learn(batch), rel=1e-4)
    assert distance(learner, plain) < 1e-5


def test_the_kinds_of_update_differ() -> None:
    """Otherwise the tests above would show little."""
    losses = set()
    for change in ({}, {"double": False}, {"loss": "mse"}, {"target_every": 0}):
        settings: dict[str, Any] = {"target_every": 2} | change
        learner = DQN(VECTOR, replace(SMALL, lr=5e-2, **settings), 4)
        losses.add([learner.learn(batch_of(VECTOR, seed=seed)) for seed in range(8)][-1])
    assert len(losses) == 4


def test_rows_that_end_do_not_bootstrap() -> None:
    batch = batch_of(VECTOR, ends=True)
    other = batch._replace(next_states=1000 * np.ones_like(batch.next_states))
    one, two = DQN(VECTOR, SMALL, 4), DQN(VECTOR, SMALL, 4)
    assert one.learn(batch) == two.learn(other)
    assert torch.equal(one.weights, two.weights)


def test_rows_that_go_on_do_bootstrap() -> None:
    batch = batch_of(VECTOR)
    other = batch._replace(next_states=batch.next_states + 1)
    assert DQN(VECTOR, SMALL, 4).learn(batch) != DQN(VECTOR, SMALL, 4).learn(other)


def test_the_target_is_copied_every_so_many_updates() -> None:
    learner = DQN(VECTOR, SMALL, 4)
    first = learner.target_weights.clone()
    assert torch.equal(first, learner.weights)
    for update in range(1, 8):
        held = learner.target_weights.clone()
        learner.learn(batch_of(VECTOR, seed=update))
        same = torch.equal(learner.target_weights, held)
        assert same == (update % 3 != 0)
        assert torch.equal(learner.target_weights, learner.weights) == (update % 3 == 0)


def test_the_target_network_uses_the_copied_weights() -> None:
    learner = DQN(VECTOR, SMALL, 4)
    for seed in range(3):
        learner.learn(batch_of(VECTOR, seed=seed))
    states = torch.from_numpy(batch_of(VECTOR).states)
    assert torch.equal(learner.target(states), learner.online(states))


def test_learning_lowers_the_loss() -> None:
    learner, batch = DQN(VECTOR, replace(SMALL, lr=5e-3), 4), batch_of(VECTOR, ends=True)
    losses = [learner.learn(batch) for _ in range(300)]
    assert losses[-1] < losses[0] / 10


# Input


@pytest.mark.parametrize(("scale", "factor"), [(True, 1 / 255), (False, 1.0)])
def test_bytes_are_scaled_where_the_job_says_so(scale: bool, factor: float) -> None:
    config = replace(SMALL, scale_input=scale, lr=1e-3)
    learner = DQN(BYTES, config, 4)
    plain = Plain(learner, config, factor)
    batch = batch_of(BYTES)
    assert learner.learn(batch) == pytest.approx(plain.learn(batch), rel=1e-5)
    assert distance(learner, plain) < 1e-6


def test_numbers_are_never_scaled() -> None:
    states = batch_of(VECTOR).states
    scaled, plain = (DQN(VECTOR, replace(SMALL, scale_input=on), 4) for on in (True, False))
    assert np.array_equal(scaled.act(states), plain.act(states))
    assert scaled.learn(batch_of(VECTOR)) == plain.learn(batch_of(VECTOR))


@pytest.mark.parametrize("spaces", [VECTOR, BYTES])
def test_neither_acting_nor_learning_changes_what_it_is_given(spaces: Spaces) -> None:
    learner, batch = DQN(spaces, SMALL, 4), batch_of(spaces)
    before = [column.copy() for column in batch]
    learner.act(batch.states)
    learner.learn(batch)
    assert all(np.array_equal(a, b) for a, b in zip(before, batch, strict=True))


def test_acting_takes_the_best_value() -> None:
    learner, states = DQN(VECTOR, SMALL, 4), batch_of(VECTOR, rows=50).states
    best = learner.online(torch.from_numpy(states)).argmax(dim=1).numpy()
    assert np.array_equal(learner.act(states), best)
    assert len(set(best.tolist())) > 1


# Seeds and states


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (DQN(VECTOR, SMALL, seed).weights for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("before", [0, 5])
def test_a_restored_learner_goes_on_with_the_same_bits(before: int) -> None:
    learner = DQN(VECTOR, SMALL, 1)
    for seed in range(before):
        learner.learn(batch_of(VECTOR, seed=seed))
    state = learner.state()
    other = DQN(VECTOR, SMALL, 2)
    other.learn(batch_of(VECTOR, seed=99))
    other.restore(state)
    for seed in range(50, 57):
        batch = batch_of(VECTOR, seed=seed)
        assert learner.learn(batch) == other.learn(batch)
    ours, theirs = learner.state(), other.state()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_state_is_a_copy() -> None:
    learner = DQN(VECTOR, SMALL, 1)
    learner.learn(batch_of(VECTOR))
    state = learner.state()
    kept = {name: column.copy() for name, column in state.items()}
    learner.learn(batch_of(VECTOR))
    assert all(np.array_equal(kept[name], state[name]) for name in kept)
    learner.restore(state)
    learner.learn(batch_of(VECTOR))
    assert all(np.array_equal(kept[name], state[name]) for name in kept)


def test_weights_of_another_shape_are_refused() -> None:
    state = DQN(VECTOR, replace(SMALL, widths=(8,)), 1).state()
    with pytest.raises(DamagedData, match="saved weights have the shape"):
        DQN(VECTOR, SMALL, 1).restore(state)


def test_a_learner_goes_on_from_a_checkpoint_file(tmp_path: Path) -> None:
    learner, other = DQN(VECTOR, SMALL, 1), DQN(VECTOR, SMALL, 2)
    learner.learn(batch_of(VECTOR))
    write_arrays(tmp_path / "learner.h5", learner.state(), {})
    other.restore(read_arrays(tmp_path / "learner.h5"))
    assert learner.learn(batch_of(VECTOR, seed=1)) == other.learn(batch_of(VECTOR, seed=1))


# Networks


def test_frames_need_three_dimensions() -> None:
    with pytest.raises(UsageError, match=r"learn.network = cnn: .*needs frames.*shape \(5,\)"):
        DQN(VECTOR, replace(SMALL, network="cnn"), 1)


def test_frames_that_are_too_small_are_refused() -> None:
    with pytest.raises(UsageError):
        DQN(Spaces((3, 10, 10), "|u1", 2), replace(SMALL, network="cnn"), 1)


def test_an_unknown_network_is_refused_with_the_closest_name() -> None:
    with pytest.raises(UsageError, match="unknown network 'mpl'; did you mean 'mlp'"):
        DQN(VECTOR, replace(SMALL, network="mpl"), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(UsageError, match="finds no usable CUDA; use cpu"):
        DQN(VECTOR, replace(SMALL, device="cuda"), 1)


def test_a_network_has_the_layers_that_widths_name() -> None:
    shapes = [tuple(p.shape) for p in Mlp((5,), 3, (7, 6)).parameters()]
    assert shapes == [(7, 5), (7,), (6, 7), (6,), (3, 6), (3,)]
    assert [tuple(p.shape) for p in Mlp((5,), 3, ()).parameters()] == [(3, 5), (3,)]


@pytest.mark.parametrize("make", [lambda: Mlp((12,), 4, (9,)), lambda: Cnn((1, 36, 36), 4, (9,))])
def test_flattening_keeps_the_function(make: Any) -> None:
    network: nn.Module = make()
    features = 12 if isinstance(network, Mlp) else 36 * 36
    inputs = torch.randn(3, features)
    before = network(inputs).detach().clone()
    flat = flatten(network)
    assert torch.equal(network(inputs), before)
    assert flat.numel() == sum(p.numel() for p in network.parameters())
    flat.zero_()
    assert not network(inputs).any()


def test_gradients_arrive_in_the_vector() -> None:
    network = Mlp((5,), 3, (4,))
    flat = flatten(network)
    network(torch.randn(2, 5)).sum().backward()
    assert flat.grad is not None
    parts = torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None])
    assert flat.grad.any()
    assert torch.equal(flat.grad, parts)


def test_frames_are_learnt_from() -> None:
    config = LearnConfig(network="cnn", widths=(32,), target_every=2, lr=1e-3)
    learner = DQN(FRAMES, config, 1)
    batch = batch_of(FRAMES, rows=4, ends=True)
    frames = batch.states.reshape(4, *FRAMES.shape)
    actions = learner.act(frames)
    assert actions.shape == (4,)
    assert np.array_equal(actions, learner.act(batch.states))
    losses = [learner.learn(batch) for _ in range(12)]
    assert losses[-1] < losses[0]
    other = DQN(FRAMES, config, 2)
    other.restore(learner.state())
    assert other.learn(batch) == learner.learn(batch)
