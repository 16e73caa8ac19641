"""Forward and backward by hand give the numbers of autograd."""

import numpy as np
import pytest
import torch
from small import random_batch
from torch import Tensor, nn

from canal_mpi.learn.losses import temporal_difference
from canal_mpi.learn.nets import Cnn, Dueling, Mlp
from canal_mpi.learn.passes import ByHand, Passes, Plain, passes
from canal_mpi.learn.piece import Piece, adam, flatten
from canal_mpi.types import Batch, Spaces

SPACES = Spaces((10,), "<f4", 6)
NORMS = pytest.mark.parametrize("layer_norm", [False, True])


class _Net:
    """A trunk and a head as pieces, with one kind of passes."""

    def __init__(self, layer_norm: bool, by_hand: bool) -> None:
        torch.manual_seed(3)
        trunk, head = Mlp(SPACES.shape, (16, 12), layer_norm), nn.Linear(12, SPACES.actions)
        self.trunk, self.head = Piece(trunk), Piece(head)
        self.online: Passes
        self.target: Passes
        if by_hand:
            self.online = ByHand([trunk], head)
            assert isinstance(self.trunk.target, Mlp) and isinstance(self.head.target, nn.Linear)
            self.target = ByHand([self.trunk.target], self.head.target)
        else:
            self.online = Plain([trunk], head)
            self.target = Plain([self.trunk.target], self.head.target)

    def learn(self, batch: Batch, huber: bool = True) -> None:
        following = torch.from_numpy(batch.next_states)
        best = self.online.values(following).argmax(1, keepdim=True)
        chosen = self.target.values(following).gather(1, best).squeeze(1)
        goals = torch.from_numpy(batch.returns) + torch.from_numpy(batch.discounts) * chosen
        values = self.online.forward(torch.from_numpy(batch.states)).numpy()
        found = temporal_difference(values, batch.actions, goals.numpy(), huber)
        self.online.backward(torch.from_numpy(found[1]))
        adam([self.trunk, self.head], 1e-4)

    def weights(self) -> Tensor:
        return torch.cat([self.trunk.weights, self.head.weights]).detach()

    def gradients(self) -> Tensor:
        return torch.cat([self.trunk.grad, self.head.grad])


def _pair(layer_norm: bool) -> tuple[_Net, _Net]:
    return _Net(layer_norm, True), _Net(layer_norm, False)


@NORMS
def test_values_by_hand_are_those_of_the_modules(layer_norm: bool) -> None:
    hand, plain = _pair(layer_norm)
    obs = torch.from_numpy(random_batch(0, 32, SPACES).states)
    expected = plain.online.values(obs)
    torch.testing.assert_close(hand.online.values(obs), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(hand.online.forward(obs), expected, rtol=0, atol=1e-6)


@NORMS
def test_gradients_by_hand_are_those_of_autograd(layer_norm: bool) -> None:
    hand, plain = _pair(layer_norm)
    for seed in range(5):  # again and again: a backward pass replaces the gradients of the last
        obs = torch.from_numpy(random_batch(seed, 32, SPACES).states)
        slope = torch.randn(32, SPACES.actions, generator=torch.Generator().manual_seed(seed))
        for net in (hand, plain):
            net.online.forward(obs)
            net.online.backward(slope / 32)
        assert float(plain.gradients().abs().max()) > 0.01
        torch.testing.assert_close(hand.gradients(), plain.gradients(), rtol=0, atol=1e-6)


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


@NORMS
def test_acting_on_few_states_sees_the_same_values_also_after_updates(layer_norm: bool) -> None:
    for net in _pair(layer_norm):
        obs = random_batch(7, 3, SPACES).states
        for update in range(20):
            net.learn(random_batch(update, 32, SPACES))
        expected = net.online.values(torch.from_numpy(obs)).numpy()
        np.testing.assert_allclose(net.online.act(obs), expected, rtol=0, atol=1e-6)


@NORMS
def test_values_between_forward_and_backward_leave_the_gradient_alone(layer_norm: bool) -> None:
    slope = torch.randn(32, SPACES.actions, generator=torch.Generator().manual_seed(1))
    obs = torch.from_numpy(random_batch(0, 32, SPACES).states)
    for net in _pair(layer_norm):
        net.online.forward(obs)
        net.online.backward(slope)
        expected = net.gradients().clone()
        net.online.forward(obs)
        net.online.values(torch.from_numpy(random_batch(1, 32, SPACES).states))
        net.online.backward(slope)
        assert torch.equal(net.gradients(), expected)


def test_a_plain_network_goes_by_hand_and_the_others_by_autograd() -> None:
    mlp, frames = Mlp((10,), (8,), True), Cnn((4, 84, 84), (8,), True)
    linear, dueling = nn.Linear(8, 6), Dueling(8, 6)
    for module in (mlp, frames, linear, dueling):
        flatten(module)
    assert isinstance(passes([mlp], linear), ByHand)
    assert isinstance(passes([mlp], dueling), Plain)
    assert isinstance(passes([frames], linear), Plain)


def test_a_dueling_head_adds_value_and_centred_advantage() -> None:
    head = Dueling(2, 3)
    with torch.no_grad():
        for part in head.parameters():
            part.zero_()
        head.value.bias.fill_(10.0)
        head.advantage.bias.copy_(torch.tensor([1.0, 2.0, 6.0]))
    assert head(torch.zeros(1, 2)).tolist() == [[8.0, 9.0, 13.0]]
