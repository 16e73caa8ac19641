"""A part of a network: flat weights, Adam in place, state and back; of arrays and of modules."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array
from canal_mpi.learn.fast_mlp import Layers, ParamBlock, array_of
from canal_mpi.learn.networks import Mlp, TorchBlock, flatten

Make = Callable[[int], ParamBlock]


def _module(seed: int = 5) -> Mlp:
    torch.manual_seed(seed)
    return Mlp((4,), (6, 3), True)


def _of_module(seed: int = 5) -> TorchBlock:
    return TorchBlock(_module(seed))


def _of_arrays(seed: int = 5) -> ParamBlock:
    layers = Layers((4, 6, 3), True)
    return ParamBlock(layers, layers.initial_params(seed))


BOTH = pytest.mark.parametrize("make", [_of_arrays, _of_module])


def _gradient(step: int, size: int) -> Array:
    gradient = np.random.default_rng(step).normal(size=size).astype(np.float32)
    gradient[::3] *= 1e-4  # small ones too: there the epsilon of Adam counts
    return gradient


def _give(piece: ParamBlock, gradient: Array) -> None:
    piece.grad[:] = piece.put(gradient)


def _expected(steps: int) -> Array:
    """Where torch's own Adam ends."""
    module = _module()
    theirs = torch.optim.Adam(module.parameters(), lr=1e-3)
    for step in range(steps):
        gradient = torch.from_numpy(_gradient(step, sum(p.numel() for p in module.parameters())))
        start = 0
        for part in module.parameters():
            part.grad = gradient[start : start + part.numel()].view_as(part).clone()
            start += part.numel()
        theirs.step()
    return torch.cat([part.detach().reshape(-1) for part in module.parameters()]).numpy()


@BOTH
def test_adam_in_place_is_torchs_adam(make: Make) -> None:
    piece = make(5)
    for step in range(200):
        _give(piece, _gradient(step, len(piece.params)))
        piece.adam_step(1e-3)
    np.testing.assert_allclose(array_of(piece.params), _expected(200), rtol=0, atol=1e-6)
    assert float(abs(piece.params - piece.target_params).max()) > 1e-2


def test_the_first_step_of_adam_by_hand_is_the_learning_rate_against_the_sign() -> None:
    piece = ParamBlock(Layers((1, 1)), np.ones(2, dtype=np.float32))
    piece.grad[:] = [4.0, -0.5]
    piece.adam_step(0.1)
    assert piece.params.tolist() == pytest.approx([0.9, 1.1], abs=1e-6)


def test_both_kinds_of_piece_do_the_same() -> None:
    one, two = _of_arrays(), _of_module()
    others, anchor, fisher = (_gradient(k, len(one.params)) for k in (7, 8, 9))
    for piece in (one, two):
        piece.params[:] = piece.put(others)
        _give(piece, _gradient(1, len(one.params)))
        piece.anchor, piece.fisher = piece.put(anchor), piece.put(fisher)
        piece.add_penalty(3.3)
    np.testing.assert_array_equal(one.params, array_of(two.params))
    np.testing.assert_array_equal(one.grad, array_of(two.grad))
    assert one.grad_norm() == pytest.approx(two.grad_norm(), rel=1e-5)
    assert one.target_params.tolist() == two.target_params.tolist() != one.params.tolist()


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
    piece = _of_module()
    module = piece.module
    module(torch.ones(2, 4)).sum().backward()
    parts = [part.grad.reshape(-1) for part in module.parameters() if part.grad is not None]
    assert torch.equal(piece.grad, torch.cat(parts))
    assert piece.grad.any()


@BOTH
def test_the_target_stays_until_it_follows(make: Make) -> None:
    piece = make(5)
    old = array_of(piece.params)
    piece.grad[:] = 1.0
    piece.adam_step(0.1)
    assert np.array_equal(piece.target_params, old)
    piece.update_target()
    assert np.array_equal(piece.target_params, piece.params)
    piece.adam_step(0.1)
    assert not np.array_equal(piece.target_params, piece.params)


def test_the_target_of_a_module_is_a_module() -> None:
    piece, obs = _of_module(), torch.ones(1, 4)
    piece.grad.fill_(1.0)
    piece.adam_step(0.1)
    assert not torch.equal(piece.target(obs), piece.module(obs))
    piece.update_target()
    assert torch.equal(piece.target(obs), piece.module(obs))


@BOTH
def test_a_restored_piece_goes_on_with_the_same_bits(make: Make) -> None:
    one, two = make(5), make(6)
    for step in range(10):
        _give(one, _gradient(step, len(one.grad)))
        one.adam_step(1e-2)
    two.load_state_dict(one.state_dict())
    assert not np.array_equal(one.params, one.target_params)
    for step in range(10, 20):
        for piece in (one, two):
            _give(piece, _gradient(step, len(one.grad)))
            piece.adam_step(1e-2)
    assert np.array_equal(one.params, two.params)
    assert np.array_equal(one.target_params, two.target_params)
    assert one.step == two.step == 20


@BOTH
def test_a_state_is_a_copy_and_not_a_view(make: Make) -> None:
    piece = make(5)
    state = piece.state_dict()
    kept = {name: column.copy() for name, column in state.items()}
    piece.grad[:] = 1.0
    piece.adam_step(0.1)
    piece.update_target()
    for name, column in kept.items():
        np.testing.assert_array_equal(state[name], column)


def test_one_kind_restores_what_the_other_saved() -> None:
    one, two = _of_module(1), _of_arrays(2)
    one.grad.fill_(1.0)
    one.adam_step(0.1)
    two.load_state_dict(one.state_dict())
    for name, column in one.state_dict().items():
        np.testing.assert_array_equal(two.state_dict()[name], column)


@BOTH
@pytest.mark.parametrize("name", ["params", "target", "exp_avg", "exp_avg_sq"])
def test_a_state_of_another_size_is_refused(make: Make, name: str) -> None:
    piece = make(5)
    state = piece.state_dict()
    state[name] = state[name][:-1]
    with pytest.raises(DamagedData, match=name):
        piece.load_state_dict(state)
