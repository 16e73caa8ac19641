"""Layers as numbers: their places in a vector, and first weights that are torch's, bit for bit."""

import numpy as np
import pytest
import torch
from torch import nn

from canal_mpi.interfaces import Spaces
from canal_mpi.learn.fast_mlp import CHUNK, FastBackend, Layers
from canal_mpi.learn.networks import Mlp, TorchBackend, flatten
from canal_mpi.settings import LearnConfig

SEEDS = (0, 1, 12345, 2**32 - 1, 2**32 + 5, 2**63 - 1)


def test_parameters_lie_as_in_a_module() -> None:
    for norm in (False, True):
        layers, module = Layers((5, 7, 6), norm), Mlp((5,), (7, 6), norm)
        flat = flatten(module).numpy()
        for ours, theirs in zip(layers.split(flat), module, strict=True):
            wanted = [part.detach().numpy() for part in theirs.parameters()]
            assert [view.base is not None for view in ours] == [True] * 4
            for view, part in zip([view for view in ours if len(view)], wanted, strict=True):
                np.testing.assert_array_equal(view, part)
    assert Layers((5,), True).split(np.zeros(0, np.float32)) == []
    assert layers.part(slice(0, 1)) == Layers((5, 7), True)
    assert layers.part(slice(1, None)) == Layers((7, 6), True)
    assert Layers((5,)).part(slice(None)) == Layers((5,))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 15), (2, 3), (16, 1), (5, 7), (128, 18), (128, 128), (300, CHUNK // 256)]
)
def test_the_initial_params_of_a_layer_are_torchs(shape: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    wanted = [p.detach().numpy().reshape(-1) for p in nn.Linear(*shape).parameters()]
    np.testing.assert_array_equal(Layers(shape).initial_params(seed), np.concatenate(wanted))


def test_the_bounds_of_all_widths_are_torchs() -> None:
    """torch has one for weights, by way of the gain of a leaky ReLU, and one for the bias."""
    gain = (2 / (1 + (5**0.5) ** 2)) ** 0.5
    fan = np.arange(1, 16385, dtype=np.float64)
    weights = (3**0.5 * (gain / np.sqrt(fan))).astype(np.float32)
    np.testing.assert_array_equal((1 / np.sqrt(fan)).astype(np.float32), weights)


def test_the_first_pieces_of_all_networks_are_those_of_modules() -> None:
    for identity in ["shared", "per_task", "separate"]:
        for widths in [(), (3,), (128, 128), (7, 1, 9, 33)]:
            for layer_norm in [False, True]:
                config = LearnConfig(widths=widths, layer_norm=layer_norm, heads=identity)
                spaces, found = Spaces((2, 64), "|u1", 18), []
                for maker in (FastBackend(spaces, config), TorchBackend(spaces, config)):
                    made = [maker.block(part, 2**40 + 77) for part in ("trunk", "input", "head")]
                    found.append([piece.state_dict() for piece in made])
                for ours, theirs in zip(*found, strict=True):
                    assert ours.keys() == theirs.keys()
                    for name, column in ours.items():
                        assert column.dtype == theirs[name].dtype
                        np.testing.assert_array_equal(column, theirs[name])
