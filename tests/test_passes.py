"""Forward and backward by compiled kernels give the numbers of autograd."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small import random_batch

from canal_mpi.interfaces import Array, Batch, Spaces
from canal_mpi.learn import networks
from canal_mpi.learn.dqn import make_backend, td_loss
from canal_mpi.learn.fast_mlp import FastBackend, FastQNetwork, array_of, inputs_of
from canal_mpi.learn.networks import TorchBackend
from canal_mpi.settings import LearnConfig

SPACES = Spaces((10,), "<f4", 6)
NORMS = pytest.mark.parametrize("layer_norm", [False, True])


Kind = type[FastBackend | TorchBackend]


class _Net:
    """A trunk and a head as pieces, by one kind of maker, from the same first weights."""

    def __init__(self, layer_norm: bool, kind: Kind, spaces: Spaces = SPACES) -> None:
        config = LearnConfig(widths=(16, 12), layer_norm=layer_norm, heads="shared")
        maker = kind(spaces, config)
        self.trunk, self.head = pieces = (maker.block("trunk", 3), maker.block("head", 4))
        self.online = maker.q_network(pieces)
        self.target = maker.q_network(pieces, target=True)

    def learn(self, batch: Batch, huber: bool = True) -> None:
        best = self.online.q_values(batch.next_states).argmax(axis=1)
        chosen = self.target.q_values(batch.next_states)[np.arange(len(best)), best]
        values = self.online.forward(batch.states)
        goals = batch.returns + batch.discounts * chosen
        self.online.backward(td_loss(values, batch.actions, goals, huber)[1])
        self.trunk.adam_step(1e-4)
        self.head.adam_step(1e-4)

    def weights(self) -> Array:
        return np.concatenate([array_of(piece.params) for piece in (self.trunk, self.head)])

    def gradients(self) -> Array:
        return np.concatenate([array_of(piece.grad) for piece in (self.trunk, self.head)])


def _pair(layer_norm: bool) -> tuple[_Net, _Net]:
    return _Net(layer_norm, FastBackend), _Net(layer_norm, TorchBackend)


@NORMS
def test_values_of_kernels_are_those_of_the_modules(layer_norm: bool) -> None:
    ours, plain = _pair(layer_norm)
    for rows in (32, 1, 5, 1027):
        obs = random_batch(rows, rows, SPACES).states
        expected = plain.online.q_values(obs)
        np.testing.assert_allclose(ours.online.q_values(obs), expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.online.forward(obs), expected, rtol=0, atol=1e-6)


@NORMS
def test_bytes_are_prepared_alike_in_both_ways(layer_norm: bool) -> None:
    slope = np.ones((4, 6), dtype=np.float32)
    for stack in (1, 2, 5):
        obs = np.random.default_rng(stack).integers(0, 256, (4, 10), dtype=np.uint8)
        found = []
        for kind in (FastBackend, TorchBackend):
            net = _Net(layer_norm, kind, Spaces((10,), "|u1", 6, stack))
            values = net.online.forward(obs).copy()
            net.online.backward(slope)
            found.append((values, net.gradients()))
        for ours, plain in zip(*found, strict=True):
            np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


def test_stacked_bytes_become_the_newest_ones_and_logarithms_of_changes() -> None:
    none = np.zeros(0, dtype=np.float32)
    layer = (np.eye(6, dtype=np.float32), np.zeros(6, dtype=np.float32), none, none)
    obs = np.array([[0, 15, 255, 0, 0, 255]], dtype=np.uint8)
    cases: list[tuple[int, list[float]]] = [
        (1, [0, 15 / 255, 1, 0, 0, 1]),
        (2, [0, -1, 0, 0, 0, 1]),
        (3, [2, -1, -2, 2, 0, 1]),
    ]
    for stack, expected in cases:
        inputs = inputs_of(Spaces((6,), "|u1", 6, stack), LearnConfig(input="change"))
        found = FastQNetwork([layer], [], inputs).q_values(obs)[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@NORMS
def test_gradients_of_kernels_are_those_of_autograd(layer_norm: bool) -> None:
    ours, plain = _pair(layer_norm)
    for seed in range(5):  # again and again: a backward pass replaces the gradients of the last
        obs = random_batch(seed, 32, SPACES).states
        slope = np.random.default_rng(seed).normal(size=(32, SPACES.actions)).astype(np.float32)
        for net in (ours, plain):
            net.online.forward(obs)
            net.online.backward(slope / 32)
        assert float(abs(plain.gradients()).max()) > 0.01
        np.testing.assert_allclose(ours.gradients(), plain.gradients(), rtol=0, atol=1e-6)


@NORMS
def test_a_thousand_updates_by_hand_end_at_the_same_weights(layer_norm: bool) -> None:
    hand, plain = _pair(layer_norm)
    start = hand.weights()
    np.testing.assert_array_equal(start, plain.weights())
    for update in range(1000):
        batch = random_batch(update, 32, SPACES)
        for net in (hand, plain):
            net.learn(batch)
            if update % 100 == 0:
                net.trunk.update_target()
                net.head.update_target()
    assert float(abs(hand.weights() - start).max()) > 1e-2
    np.testing.assert_allclose(hand.weights(), plain.weights(), rtol=0, atol=1e-5)


def test_a_target_has_no_way_back() -> None:
    net = _Net(True, FastBackend)
    net.target.forward(random_batch(0, 4, SPACES).states)
    with pytest.raises(AssertionError, match="no gradients"):
        net.target.backward(np.ones((4, 6), dtype=np.float32))


def test_a_plain_network_is_of_arrays_and_the_others_are_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = Spaces((4, 84, 84), "|u1", 6)
    assert isinstance(make_backend(SPACES, LearnConfig()), FastBackend)
    assert isinstance(make_backend(frames, LearnConfig(network="cnn")), TorchBackend)
    assert isinstance(
        make_backend(SPACES, LearnConfig(network="canal_mpi.learn.networks:Mlp")), TorchBackend
    )
    if not torch.cuda.is_available():
        assert isinstance(make_backend(SPACES, LearnConfig(device="auto")), FastBackend)
    monkeypatch.setattr(networks, "choose_device", lambda name: "cuda")
    assert isinstance(make_backend(SPACES, LearnConfig(device="cuda")), TorchBackend)


LEARNS = """
import numpy as np
from small import random_batch, small_dqn, small_job
learner = small_dqn(small_job(learn__layer_norm=True, learn__widths=(40, 24)))
for seed in range(3):
    learner.update(random_batch(seed, 32))
print(*(column.tobytes().hex() for column in learner.state_dict().values()))
"""


@pytest.mark.long
def test_the_process_that_compiles_has_the_bits_of_those_that_load(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    found = [
        subprocess.run(
            [sys.executable, "-c", LEARNS],
            env=environment,
            capture_output=True,
            timeout=180,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert any(tmp_path.rglob("*.nbc"))
    assert found[0] == found[1] != b""
