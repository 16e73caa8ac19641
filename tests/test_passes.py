"""Forward and backward by compiled kernels give the numbers of autograd."""

import numpy as np
import pytest
import torch
from small import random_batch
from torch import Tensor, nn

import canal_mpi.learn.passes
from canal_mpi.learn.losses import temporal_difference
from canal_mpi.learn.nets import Cnn, Dueling, Mlp
from canal_mpi.learn.passes import MOST_ROWS, Compiled, Passes, Plain, passes
from canal_mpi.learn.piece import Piece, adam, flatten
from canal_mpi.types import Batch, Spaces

SPACES = Spaces((10,), "<f4", 6)
NORMS = pytest.mark.parametrize("layer_norm", [False, True])


class _Net:
    """A trunk and a head as pieces, with one kind of passes."""

    def __init__(self, layer_norm: bool, compiled: bool) -> None:
        torch.manual_seed(3)
        trunk, head = Mlp(SPACES.shape, (16, 12), layer_norm), nn.Linear(12, SPACES.actions)
        self.trunk, self.head = Piece(trunk), Piece(head)
        self.online: Passes
        self.target: Passes
        if compiled:
            self.online = Compiled([trunk], head)
            assert isinstance(self.trunk.target, Mlp) and isinstance(self.head.target, nn.Linear)
            self.target = Compiled([self.trunk.target], self.head.target)
        else:
            self.online = Plain([trunk], head)
            self.target = Plain([self.trunk.target], self.head.target)

    def learn(self, batch: Batch, huber: bool = True) -> None:
        best = self.online.values(batch.next_states).argmax(axis=1)
        chosen = self.target.values(batch.next_states)[np.arange(len(best)), best]
        values = self.online.forward(batch.states)
        goals = batch.returns + batch.discounts * chosen
        self.online.backward(temporal_difference(values, batch.actions, goals, huber)[1])
        adam([self.trunk, self.head], 1e-4)

    def weights(self) -> Tensor:
        return torch.cat([self.trunk.weights, self.head.weights]).detach()

    def gradients(self) -> Tensor:
        return torch.cat([self.trunk.grad, self.head.grad])


def _pair(layer_norm: bool) -> tuple[_Net, _Net]:
    return _Net(layer_norm, True), _Net(layer_norm, False)


@NORMS
def test_values_of_kernels_are_those_of_the_modules(layer_norm: bool) -> None:
    ours, plain = _pair(layer_norm)
    for rows in (32, 1, 5, MOST_ROWS + 3):
        obs = random_batch(rows, rows, SPACES).states
        expected = plain.online.values(obs)
        np.testing.assert_allclose(ours.online.values(obs), expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.online.forward(obs), expected, rtol=0, atol=1e-6)


def test_bytes_are_multiplied_by_the_factor_in_both_ways() -> None:
    torch.manual_seed(3)
    trunk, head = Mlp((10,), (8,), True), nn.Linear(8, 6)
    flatten(trunk)
    flatten(head)
    obs = np.random.default_rng(1).integers(0, 256, (4, 10), dtype=np.uint8)
    slope = np.ones((4, 6), dtype=np.float32)
    found = []
    for way in (Compiled([trunk], head, 1 / 255), Plain([trunk], head, 1 / 255)):
        values = way.forward(obs).copy()
        way.backward(slope)
        assert trunk.linears[0].weight.grad is not None
        found.append((values, trunk.linears[0].weight.grad.clone()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


@NORMS
def test_gradients_of_kernels_are_those_of_autograd(layer_norm: bool) -> None:
    ours, plain = _pair(layer_norm)
    for seed in range(5):  # again and again: a backward pass replaces the gradients of the last
        obs = random_batch(seed, 32, SPACES).states
        slope = np.random.default_rng(seed).normal(size=(32, SPACES.actions)).astype(np.float32)
        for net in (ours, plain):
            net.online.forward(obs)
            net.online.backward(slope / 32)
        assert float(plain.gradients().abs().max()) > 0.01
        torch.testing.assert_close(ours.gradients(), plain.gradients(), rtol=0, atol=1e-6)


@NORMS
def test_a_thousand_updates_by_hand_end_at_the_same_weights(layer_norm: bool) -> None:
    hand, plain = _pair(layer_norm)
    start = hand.weights().clone()
    for update in range(1000):
        batch = random_batch(update, 32, SPACES)
        for net in (hand, plain):
            net.learn(batch)
            if update % 100 == 0:
                net.trunk.follow()
                net.head.follow()
    assert float((hand.weights() - start).abs().max()) > 1e-2
    torch.testing.assert_close(hand.weights(), plain.weights(), rtol=0, atol=1e-5)


def test_a_plain_network_is_compiled_and_the_others_go_by_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlp, frames = Mlp((10,), (8,), True), Cnn((4, 84, 84), (8,), True)
    linear, dueling = nn.Linear(8, 6), Dueling(8, 6)
    for module in (mlp, frames, linear, dueling):
        flatten(module)
    assert isinstance(passes([mlp], linear), Compiled)
    assert isinstance(passes([mlp], dueling), Plain)
    assert isinstance(passes([frames], linear), Plain)
    monkeypatch.setattr(canal_mpi.learn.passes, "PRODUCT", 0)  # torch's library shows no BLAS
    assert isinstance(passes([mlp], linear), Plain)


def test_a_dueling_head_adds_value_and_centred_advantage() -> None:
    head = Dueling(2, 3)
    with torch.no_grad():
        for part in head.parameters():
            part.zero_()
        head.value.bias.fill_(10.0)
        head.advantage.bias.copy_(torch.tensor([1.0, 2.0, 6.0]))
    assert head(torch.zeros(1, 2)).tolist() == [[8.0, 9.0, 13.0]]
