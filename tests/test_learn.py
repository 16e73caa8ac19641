"""The learner against plain torch, and what it keeps, copies and refuses."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_dqn import PlainDQN
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.interfaces import Array, Batch, Spaces
from canal_mpi.learn import dqn
from canal_mpi.learn.dqn import DQN
from canal_mpi.learn.fast_mlp import FastBackend, ParamBlock, array_of
from canal_mpi.learn.networks import Cnn, Mlp, TorchBackend, flatten
from canal_mpi.results.files import read_arrays, write_arrays
from canal_mpi.settings import Job, LearnConfig

VECTOR = Spaces((5,), "<f4", 3)
BYTES = Spaces((5,), "|u1", 3)
FRAMES = Spaces((4, 84, 84), "|u1", 6)
SMALL = LearnConfig(
    widths=(7, 6),
    batch_size=8,
    lr=1e-2,
    target_update_interval=3,
    heads="shared",
)
TASK = "Krull"


def learner_of(spaces: Spaces, config: LearnConfig, seed: int) -> DQN:
    """A learner of one task; every piece of its network has a seed of its own."""
    names: list[str] = []

    def seeded(name: str) -> int:
        names.append(name)
        return 100 * seed + len(names)

    learner = DQN(spaces, Job(learn=config), seeded)
    learner.set_task(TASK)
    assert len(set(names)) == len(names) == 2
    return learner


@pytest.fixture(params=[FastBackend, TorchBackend])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways through the network, one after the other."""
    monkeypatch.setattr(dqn, "make_backend", request.param)
    return request.param


def pieces_of(learner: DQN) -> list[ParamBlock]:
    return [learner.blocks[name] for name in learner.block_names(TASK).values()]


def weights(learner: DQN) -> Array:
    """All weights that the task has."""
    return np.concatenate([array_of(piece.params) for piece in pieces_of(learner)])


def target_weights(learner: DQN) -> Array:
    return np.concatenate([array_of(piece.target_params) for piece in pieces_of(learner)])


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
        task=TASK,
    )


def plain_copy(learner: DQN) -> PlainDQN:
    """Plain torch with the learner's weights, in double precision."""
    plain = PlainDQN(learner.spaces, Job(learn=learner.config), lambda name: 0)
    for network, flat in (
        (plain.online, weights(learner)),
        (plain.target, target_weights(learner)),
    ):
        network.double()
        vector_to_parameters(torch.from_numpy(flat).double(), network.parameters())
    return plain


def distance(learner: DQN, plain: PlainDQN) -> float:
    flat = parameters_to_vector(plain.online.parameters()).detach().numpy()
    return float(abs(weights(learner) - flat).max())


def with_odd_weights(learner: DQN, seed: int = 0) -> DQN:
    """Norms that do something, and a target with a mind of its own."""
    state, noise = learner.state_dict(), np.random.default_rng(seed)
    for name in learner.block_names(TASK).values():
        for part in ("params", "target"):
            column = state[f"blocks/{name}/{part}"]
            spread = 1.0 if part == "target" else 0.3
            column += (spread * noise.normal(size=column.shape)).astype(np.float32)
    learner.load_state_dict(state)
    return learner


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("target_update_interval", [0, 3])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("double", [True, False])
def test_an_update_is_what_plain_torch_does(
    way: Any, double: bool, loss: str, target_update_interval: int, layer_norm: bool
) -> None:
    config = replace(
        SMALL, double=double, loss=loss, target_update_interval=target_update_interval, lr=1e-3
    )
    config = replace(config, layer_norm=layer_norm)
    learner = with_odd_weights(learner_of(VECTOR, config, 4))
    assert isinstance(learner.backend, way)
    plain = plain_copy(learner)
    batch = batch_of(VECTOR)
    assert learner.update(batch) == pytest.approx(plain.update(batch), rel=1e-6)
    assert distance(learner, plain) < 1e-6


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("double", [True, False])
def test_many_updates_stay_with_plain_torch(way: Any, double: bool, layer_norm: bool) -> None:
    config = replace(SMALL, double=double, layer_norm=layer_norm, lr=1e-3)
    learner = learner_of(VECTOR, config, 4)
    plain = plain_copy(learner)
    for seed in range(250):
        batch = batch_of(VECTOR, seed=seed)
        assert learner.update(batch) == pytest.approx(plain.update(batch), rel=1e-3, abs=1e-5)
    assert distance(learner, plain) < 1e-4


def test_long_gradients_are_cut_to_their_limit(way: Any) -> None:
    """Adam forgets the length of one gradient, but not that of several."""
    config = replace(SMALL, lr=1e-3, max_grad_norm=0.5)
    learner = learner_of(VECTOR, config, 4)
    plain, loose = plain_copy(learner), plain_copy(learner)
    loose.config = replace(config, max_grad_norm=0.0)
    for seed in range(12):
        batch = batch_of(VECTOR, seed=seed)
        loose.update(batch)
        assert learner.update(batch) == pytest.approx(plain.update(batch), rel=1e-4)
    assert distance(learner, plain) < 1e-5 < distance(learner, loose)


def test_the_kinds_of_update_differ() -> None:
    """Otherwise the tests above would show little."""
    losses = set()
    changes: list[dict[str, Any]] = [
        {},
        {"double": False},
        {"loss": "mse"},
        {"target_update_interval": 0},
    ]
    for change in [*changes, {"layer_norm": False}, {"max_grad_norm": 0.01}]:
        settings: dict[str, Any] = {"target_update_interval": 2} | change
        learner = learner_of(VECTOR, replace(SMALL, lr=5e-2, **settings), 4)
        losses.add([learner.update(batch_of(VECTOR, seed=seed)) for seed in range(8)][-1])
    assert len(losses) == 6


def test_rows_that_end_do_not_bootstrap() -> None:
    batch = batch_of(VECTOR, ends=True)
    other = batch._replace(next_states=1000 * np.ones_like(batch.next_states))
    one, two = learner_of(VECTOR, SMALL, 4), learner_of(VECTOR, SMALL, 4)
    assert one.update(batch) == two.update(other)
    assert np.array_equal(weights(one), weights(two))


def test_rows_that_go_on_do_bootstrap() -> None:
    batch = batch_of(VECTOR)
    other = batch._replace(next_states=batch.next_states + 1)
    assert learner_of(VECTOR, SMALL, 4).update(batch) != learner_of(VECTOR, SMALL, 4).update(other)


def test_the_target_is_copied_every_so_many_updates() -> None:
    learner = learner_of(VECTOR, SMALL, 4)
    first = target_weights(learner)
    assert np.array_equal(first, weights(learner))
    for update in range(1, 8):
        held = target_weights(learner)
        learner.update(batch_of(VECTOR, seed=update))
        same = np.array_equal(target_weights(learner), held)
        assert same == (update % 3 != 0)
        assert np.array_equal(target_weights(learner), weights(learner)) == (update % 3 == 0)


def test_the_target_network_uses_the_copied_weights(way: Any) -> None:
    learner = learner_of(VECTOR, SMALL, 4)
    for seed in range(3):
        learner.update(batch_of(VECTOR, seed=seed))
    states = batch_of(VECTOR).states
    online, target = learner.network(TASK)[:2]
    assert isinstance(learner.backend, way)
    assert np.array_equal(target.q_values(states), online.q_values(states))
    learner.update(batch_of(VECTOR, seed=3))
    assert not np.array_equal(target.q_values(states), online.q_values(states))


def test_learning_lowers_the_loss(way: Any) -> None:
    learner, batch = learner_of(VECTOR, replace(SMALL, lr=5e-3), 4), batch_of(VECTOR, ends=True)
    losses = [learner.update(batch) for _ in range(300)]
    assert losses[-1] < losses[0] / 10


# Input


@pytest.mark.parametrize("kind", ["scale", "raw"])
def test_bytes_are_scaled_where_the_job_says_so(way: Any, kind: str) -> None:
    config = replace(SMALL, input=kind, lr=1e-3)
    learner = learner_of(BYTES, config, 4)
    plain = plain_copy(learner)
    batch = batch_of(BYTES)
    assert learner.update(batch) == pytest.approx(plain.update(batch), rel=1e-5)
    assert distance(learner, plain) < 1e-6


def test_numbers_are_never_scaled() -> None:
    states = batch_of(VECTOR).states
    scaled, plain = (learner_of(VECTOR, replace(SMALL, input=kind), 4) for kind in ("scale", "raw"))
    assert np.array_equal(scaled.act(states), plain.act(states))
    assert scaled.update(batch_of(VECTOR)) == plain.update(batch_of(VECTOR))


@pytest.mark.parametrize("spaces", [VECTOR, BYTES])
def test_neither_acting_nor_learning_changes_what_it_is_given(way: Any, spaces: Spaces) -> None:
    learner, batch = learner_of(spaces, SMALL, 4), batch_of(spaces)
    before = [column.copy() for column in batch[:5]]
    learner.act(batch.states)
    learner.update(batch)
    assert all(np.array_equal(a, b) for a, b in zip(before, batch[:5], strict=True))


@pytest.mark.parametrize("layer_norm", [True, False])
def test_acting_takes_the_best_value(way: Any, layer_norm: bool) -> None:
    learner = with_odd_weights(learner_of(VECTOR, replace(SMALL, layer_norm=layer_norm), 4))
    states = batch_of(VECTOR, rows=50).states
    plain = plain_copy(learner)
    values = plain.q(plain.online, states).detach().numpy()
    best = values.argmax(axis=1)
    assert np.allclose(learner.q_values(states), values, rtol=1e-5, atol=1e-5)
    assert np.array_equal(learner.act(states), best)
    assert len(set(best.tolist())) > 1


# Seeds and states


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (weights(learner_of(VECTOR, SMALL, seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("before", [0, 5])
def test_a_restored_learner_goes_on_with_the_same_bits(way: Any, before: int) -> None:
    learner = learner_of(VECTOR, SMALL, 1)
    for seed in range(before):
        learner.update(batch_of(VECTOR, seed=seed))
    state = learner.state_dict()
    other = learner_of(VECTOR, SMALL, 2)
    other.update(batch_of(VECTOR, seed=99))
    other.load_state_dict(state)
    for seed in range(50, 57):
        batch = batch_of(VECTOR, seed=seed)
        assert learner.update(batch) == other.update(batch)
    ours, theirs = learner.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_state_is_a_copy() -> None:
    learner = learner_of(VECTOR, SMALL, 1)
    learner.update(batch_of(VECTOR))
    state = learner.state_dict()
    kept = {name: column.copy() for name, column in state.items()}
    learner.update(batch_of(VECTOR))
    assert all(np.array_equal(kept[name], state[name]) for name in kept)
    learner.load_state_dict(state)
    learner.update(batch_of(VECTOR))
    assert all(np.array_equal(kept[name], state[name]) for name in kept)


def test_weights_of_another_shape_are_refused() -> None:
    state = learner_of(VECTOR, replace(SMALL, widths=(8,)), 1).state_dict()
    with pytest.raises(DamagedData, match="saved params have the shape"):
        learner_of(VECTOR, SMALL, 1).load_state_dict(state)


def test_a_learner_goes_on_from_a_checkpoint_file(tmp_path: Path) -> None:
    learner, other = learner_of(VECTOR, SMALL, 1), learner_of(VECTOR, SMALL, 2)
    learner.update(batch_of(VECTOR))
    write_arrays(tmp_path / "learner.h5", learner.state_dict(), {})
    other.load_state_dict(read_arrays(tmp_path / "learner.h5"))
    assert learner.update(batch_of(VECTOR, seed=1)) == other.update(batch_of(VECTOR, seed=1))


def test_what_a_finished_run_keeps_of_a_learner_plays_the_same_in_a_quarter_of_the_bytes() -> None:
    for network in ("mlp", "cnn"):
        spaces = VECTOR if network == "mlp" else Spaces((1, 84, 84), "|u1", 3)
        settings = replace(SMALL, network=network)
        learner, other = learner_of(spaces, settings, 1), learner_of(spaces, settings, 2)
        learner.update(batch_of(spaces))
        kept, whole = learner.policy_state_dict(), learner.state_dict()
        other.load_state_dict(kept)
        obs = batch_of(spaces).states
        assert np.array_equal(learner.q_values(obs), other.q_values(obs))
        sizes = [sum(column.nbytes for column in state.values()) for state in (kept, whole)]
        assert 3.9 * sizes[0] < sizes[1]


# Networks


class Wide(nn.Linear):
    """A network that gives more features than it promises."""

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], layer_norm: bool) -> None:
        super().__init__(prod(shape), 6)
        self.features = 4


class Promises(Wide):
    """The same without a promise."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.features = None  # type: ignore[assignment]


class Narrow(Wide):
    """A network for observations of another size."""

    def forward(self, obs: Any) -> Any:
        """Fails."""
        return super().forward(obs[:, :-1])


def few_arguments(shape: tuple[int, ...]) -> None:
    """No network at all."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Wide", r"gave torch.float32 \[2, 6\] for 2 observations; expected .* \[2, 4\]"),
        ("Promises", "expected a torch.nn.Module with a whole number `features`"),
        (
            "Narrow",
            r"it fails on one or two observations \[5\]: RuntimeError.* \(test_learn.py, line",
        ),
    ],
)
def test_a_network_that_does_not_keep_its_promise_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"learn.network = test_learn:{name}: .*{words}"):
        learner_of(VECTOR, replace(SMALL, network=f"test_learn:{name}"), 1)


def test_a_network_that_takes_other_arguments_is_refused() -> None:
    with pytest.raises(UsageError, match=r"few_arguments': .* takes \(shape, widths, layer_norm\)"):
        learner_of(VECTOR, replace(SMALL, network="test_learn:few_arguments"), 1)


def test_frames_need_three_dimensions() -> None:
    with pytest.raises(UsageError, match=r"learn.network = cnn: .*needs frames.*shape \(5,\)"):
        learner_of(VECTOR, replace(SMALL, network="cnn"), 1)


def test_frames_that_are_too_small_are_refused() -> None:
    with pytest.raises(UsageError):
        learner_of(Spaces((3, 10, 10), "|u1", 2), replace(SMALL, network="cnn"), 1)


def test_an_unknown_network_is_refused_with_the_closest_name() -> None:
    with pytest.raises(UsageError, match="unknown network 'mpl'; did you mean 'mlp'"):
        learner_of(VECTOR, replace(SMALL, network="mpl"), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(UsageError, match=r"learn\.device = cuda, but .*; use cpu or auto"):
        learner_of(VECTOR, replace(SMALL, device="cuda"), 1)


def test_a_network_has_the_layers_that_widths_name() -> None:
    shapes = [tuple(p.shape) for p in Mlp((5,), (7, 6), False).parameters()]
    assert shapes == [(7, 5), (7,), (6, 7), (6,)]
    shapes = [tuple(p.shape) for p in Mlp((5,), (7, 6), True).parameters()]
    assert shapes == [(7, 5), (7,), (7,), (7,), (6, 7), (6,), (6,), (6,)]
    assert list(Mlp((5,), (), True).parameters()) == []


def test_a_network_without_hidden_layers_is_linear(way: Any) -> None:
    config = replace(SMALL, widths=(), lr=1e-3)
    learner = learner_of(VECTOR, config, 4)
    plain, batch = plain_copy(learner), batch_of(VECTOR)
    assert learner.update(batch) == pytest.approx(plain.update(batch), rel=1e-6)
    assert distance(learner, plain) < 1e-6


@pytest.mark.parametrize(
    ("make", "features"),
    [
        (lambda: Mlp((12,), (9, 4), False), 12),
        (lambda: Mlp((12,), (9, 4), True), 12),
        (lambda: Cnn((1, 36, 36), (9,), False), 36 * 36),
        (lambda: Cnn((1, 36, 36), (9,), True), 36 * 36),
        (lambda: nn.Linear(12, 4), 12),
    ],
)
def test_flattening_keeps_the_function(make: Any, features: int) -> None:
    torch.manual_seed(1)
    network: nn.Module = make()
    inputs = torch.randn(3, features)
    before = network(inputs).detach().clone()
    assert before.any()
    flat = flatten(network)
    assert torch.equal(network(inputs), before)
    assert flat.numel() == sum(p.numel() for p in network.parameters())
    flat.zero_()
    assert not network(inputs).any()


@pytest.mark.parametrize("layer_norm", [True, False])
def test_gradients_arrive_in_the_vector(layer_norm: bool) -> None:
    torch.manual_seed(1)
    network = Mlp((5,), (4,), layer_norm)
    flat = flatten(network)
    network(torch.randn(2, 5)).sum().backward()
    assert flat.grad is not None
    parts = torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None])
    assert flat.grad.any()
    assert torch.equal(flat.grad, parts)


def test_frames_are_learnt_from() -> None:
    config = LearnConfig(network="cnn", widths=(32,), target_update_interval=2, lr=1e-3)
    learner = learner_of(FRAMES, config, 1)
    batch = batch_of(FRAMES, rows=4, ends=True)
    frames = batch.states.reshape(4, *FRAMES.shape)
    actions = learner.act(frames)
    assert actions.shape == (4,)
    assert np.array_equal(actions, learner.act(batch.states))
    losses = [learner.update(batch) for _ in range(12)]
    assert losses[-1] < losses[0]
    other = learner_of(FRAMES, config, 2)
    other.load_state_dict(learner.state_dict())
    assert other.update(batch) == learner.update(batch)


def test_an_input_layer_of_its_own_changes_nothing_about_one_task() -> None:
    """By the same seeds it is the network that the trunk would be alone, cut in two."""

    def seed_of(name: str) -> int:
        return len(name.partition("/")[0])

    made = [
        DQN(VECTOR, Job(learn=replace(SMALL, heads=heads)), seed_of)
        for heads in ("shared", "per_task")
    ]
    for learner in made:
        learner.set_task(TASK)
    assert [list(learner.block_names(TASK)) for learner in made] == [
        ["trunk", "head"],
        ["input", "trunk", "head"],
    ]
    states = batch_of(VECTOR).states
    for seed in range(20):
        whole, split = (learner.q_values(states) for learner in made)
        np.testing.assert_allclose(whole, split, rtol=1e-4, atol=1e-5)
        for learner in made:
            learner.update(batch_of(VECTOR, seed=seed))
    assert not np.allclose(made[0].q_values(states), whole)
