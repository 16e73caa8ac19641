"""A part of a network: flat weights, Adam in place, state and back."""

import numpy as np
import pytest
import torch
from torch import nn

from canal_mpi.errors import DamagedData
from canal_mpi.learn.piece import Piece, adam, flatten


def _module(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def _gradient(step: int, size: int) -> torch.Tensor:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(step))
    gradient[::3] *= 1e-4  # small ones too: there the epsilon of Adam counts
    return gradient


def test_adam_in_place_is_torchs_adam() -> None:
    piece, other = Piece(_module()), _module()
    theirs = torch.optim.Adam(other.parameters(), lr=1e-3)
    for step in range(200):
        gradient = _gradient(step, len(piece.weights))
        piece.grad.copy_(gradient)
        start = 0
        for part in other.parameters():
            part.grad = gradient[start : start + part.numel()].view_as(part).clone()
            start += part.numel()
        adam([piece], 1e-3)
        theirs.step()
    expected = torch.cat([part.detach().reshape(-1) for part in other.parameters()])
    torch.testing.assert_close(piece.weights, expected, rtol=0, atol=1e-6)
    assert float((piece.weights - piece.target_weights).abs().max()) > 1e-2


def test_the_first_step_of_adam_by_hand_is_the_learning_rate_against_the_sign() -> None:
    piece = Piece(nn.Linear(1, 1))
    before = piece.weights.clone()
    piece.grad.copy_(torch.tensor([4.0, -0.5]))
    adam([piece], 0.1)
    assert (piece.weights - before).tolist() == pytest.approx([-0.1, 0.1], abs=1e-6)


def test_flat_weights_are_the_modules_own_memory() -> None:
    module = _module()
    before = [part.detach().clone() for part in module.parameters()]
    flat = flatten(module)
    assert len(flat) == sum(part.numel() for part in before)
    for part, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(part, old)
    flat.zero_()
    assert all(not part.any() for part in module.parameters())


def test_gradients_of_autograd_land_in_the_flat_gradient() -> None:
    piece = Piece(_module())
    module = piece.module
    module(torch.ones(2, 4)).sum().backward()
    parts = [part.grad.reshape(-1) for part in module.parameters() if part.grad is not None]
    assert torch.equal(piece.grad, torch.cat(parts))
    assert piece.grad.any()


def test_the_target_stays_until_it_follows() -> None:
    piece = Piece(_module())
    old = piece.weights.clone()
    piece.grad.fill_(1.0)
    adam([piece], 0.1)
    assert torch.equal(piece.target_weights, old)
    piece.follow()
    assert torch.equal(piece.target_weights, piece.weights)
    obs = torch.ones(1, 4)
    assert torch.equal(piece.target(obs), piece.module(obs))
    adam([piece], 0.1)
    assert not torch.equal(piece.target_weights, piece.weights)


def test_a_restored_piece_goes_on_with_the_same_bits() -> None:
    one, two = Piece(_module()), Piece(_module(6))
    for step in range(10):
        one.grad.copy_(_gradient(step, len(one.grad)))
        adam([one], 1e-2)
    two.restore(one.state())
    assert not torch.equal(one.weights, one.target_weights)
    for step in range(10, 20):
        for piece in (one, two):
            piece.grad.copy_(_gradient(step, len(one.grad)))
            adam([piece], 1e-2)
    assert torch.equal(one.weights, two.weights)
    assert torch.equal(one.target_weights, two.target_weights)
    assert one.steps == two.steps == 20


def test_a_state_is_a_copy_and_not_a_view() -> None:
    piece = Piece(_module())
    state = piece.state()
    kept = {name: column.copy() for name, column in state.items()}
    piece.grad.fill_(1.0)
    adam([piece], 0.1)
    piece.follow()
    for name, column in kept.items():
        np.testing.assert_array_equal(state[name], column)


@pytest.mark.parametrize("name", ["weights", "target", "mean", "square"])
def test_a_state_of_another_size_is_refused(name: str) -> None:
    piece = Piece(_module())
    state = piece.state()
    state[name] = state[name][:-1]
    with pytest.raises(DamagedData, match=name):
        piece.restore(state)
