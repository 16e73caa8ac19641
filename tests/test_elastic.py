"""Elastic weight consolidation by hand, and against autograd of its penalty."""

import numpy as np
import torch
from small import RIGHT, WALK, random_batch, small_dqn, small_job
from torch import nn

from canal_mpi.learn.ewc import EWC
from canal_mpi.learn.fast_mlp import Layers, ParamBlock, array_of
from canal_mpi.learn.networks import TorchBackend, TorchBlock


def _two_weights(first: float, second: float) -> ParamBlock:
    return ParamBlock(Layers((1, 1)), np.array([first, second], dtype=np.float32))


def _measure(elastic: EWC, piece: ParamBlock, *gradients: tuple[float, float]) -> None:
    with elastic.measuring({"net": piece}) as measure:
        for gradient in gradients:
            piece.grad[:] = gradient
            measure()


def test_the_fisher_information_is_a_running_mean_of_squares() -> None:
    elastic, piece = EWC(alpha=0.25), _two_weights(3.0, 4.0)
    _measure(elastic, piece, (1.0, 2.0), (3.0, 0.0))
    assert elastic.fisher["net"].tolist() == [3.75, 1.5]  # 3/4 of (1 + 9) / 2 and of (4 + 0) / 2
    _measure(elastic, piece, (2.0, 4.0))
    # 1/4 of the old, 3/4 of the new (4, 16)
    assert elastic.fisher["net"].tolist() == [3.9375, 12.375]


def test_the_pull_by_hand_is_strength_times_fisher_times_distance() -> None:
    elastic, piece = EWC(alpha=0.0), _two_weights(3.0, 4.0)
    _measure(elastic, piece, (1.0, 2.0))
    piece.params[:] = [3.5, 3.0]
    piece.grad[:] = [10.0, 20.0]
    elastic.add_penalty({"net": piece}, strength=100.0)
    assert piece.grad.tolist() == [10.0 + 100 * 1 * 0.5, 20.0 + 100 * 4 * -1.0]


def test_the_pull_is_the_gradient_of_the_penalty() -> None:
    torch.manual_seed(0)
    elastic, piece = EWC(alpha=0.5), TorchBlock(nn.Linear(5, 3))
    anchor = piece.params.clone()
    with elastic.measuring({"net": piece}) as measure:
        for _ in range(4):
            piece.grad.normal_()
            measure()
    piece.params.normal_()
    piece.grad.zero_()
    elastic.add_penalty({"net": piece}, strength=7.0)
    leaf = piece.params.detach().clone().requires_grad_()
    penalty = 7.0 / 2 * (elastic.fisher["net"] * (leaf - anchor) ** 2).sum()
    (expected,) = torch.autograd.grad(penalty, leaf)
    torch.testing.assert_close(piece.grad, expected)


def test_the_anchor_is_where_the_task_ended() -> None:
    elastic, piece = EWC(alpha=0.5), _two_weights(1.0, 2.0)
    _measure(elastic, piece, (1.0, 1.0))
    piece.params[:] = [8.0, 9.0]
    assert elastic.anchor["net"].tolist() == [1.0, 2.0]
    _measure(elastic, piece, (1.0, 1.0))
    assert elastic.anchor["net"].tolist() == [8.0, 9.0]


def test_pieces_that_were_never_measured_are_free() -> None:
    elastic, known, unknown = EWC(0.5), _two_weights(1.0, 2.0), _two_weights(3.0, 4.0)
    _measure(elastic, known, (1.0, 1.0))
    unknown.grad[:] = 0
    elastic.add_penalty({"other": unknown}, strength=100.0)
    assert not unknown.grad.any()


def test_state_and_back_pull_alike() -> None:
    one, two, piece = EWC(0.5), EWC(0.5), _two_weights(1.0, 2.0)
    _measure(one, piece, (1.0, 2.0))
    two.load_state_dict(one.state_dict())
    piece.params[:] = [5.0, 6.0]
    found = []
    for elastic in (one, two):
        piece.grad[:] = 0
        elastic.add_penalty({"net": piece}, 3.0)
        found.append(piece.grad.tolist())
    assert found[0] == found[1] == [3 * 0.5 * 4, 3 * 2.0 * 4]


def test_modules_are_held_like_arrays_also_after_a_restore() -> None:
    torch.manual_seed(0)
    module = TorchBlock(nn.Linear(5, 3))
    arrays = ParamBlock(Layers((5, 3)), module.state_dict()["params"])
    pulled = []
    for piece in (module, arrays):
        one, two = EWC(0.5), EWC(0.5)
        for _ in range(2):
            with one.measuring({"net": piece}) as measure:
                piece.grad[:] = 0.3 * piece.params
                measure()
            two.load_state_dict(one.state_dict())
            one, two = two, one
        piece.params[:] = piece.params + 1
        one.add_penalty({"net": piece}, 3.0)
        pulled.append(array_of(piece.grad))
    np.testing.assert_array_equal(pulled[0], pulled[1])


def test_a_learner_measures_the_squared_gradients_of_its_loss() -> None:
    job = small_job(rehearsal__ewc_lambda=1.0, rehearsal__ewc_alpha=0.0, rehearsal__ewc_batches=3)
    learner = small_dqn(job)
    batches = [random_batch(seed) for seed in range(3)]
    drawn = iter(batches)
    learner.consolidate(lambda: next(drawn))
    plain = TorchBackend(WALK, job.learn)
    trunk, head = (plain.block(part, 0) for part in learner.block_names(RIGHT))
    for piece, name in zip((trunk, head), learner.block_names(RIGHT).values(), strict=True):
        piece.load_state_dict(learner.blocks[name].state_dict())
    assert isinstance(trunk, TorchBlock) and isinstance(head, TorchBlock)
    modules = nn.Sequential(trunk.module, head.module)
    targets = nn.Sequential(trunk.target, head.target)
    parts = [*trunk.module.parameters(), *head.module.parameters()]
    squares = torch.zeros(len(trunk.params) + len(head.params))
    for batch in batches:
        states, following = torch.from_numpy(batch.states), torch.from_numpy(batch.next_states)
        best = modules(following).argmax(1, keepdim=True)
        goals = torch.from_numpy(batch.returns) + torch.from_numpy(batch.discounts) * (
            targets(following).gather(1, best).squeeze(1).detach()
        )
        taken = modules(states).gather(1, torch.from_numpy(batch.actions)[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(taken, goals)
        gradients = torch.autograd.grad(loss, parts)
        squares += torch.cat([gradient.reshape(-1) for gradient in gradients]).square()
    found = np.concatenate([learner.ewc.fisher[n] for n in learner.block_names(RIGHT).values()])
    np.testing.assert_allclose(found, squares.numpy() / 3, rtol=1e-4, atol=1e-8)
    assert float(found.max()) > 0


def test_consolidating_moves_no_weight() -> None:
    learner = small_dqn(small_job(rehearsal__ewc_lambda=1.0, rehearsal__ewc_batches=2))
    before = learner.state_dict()
    learner.consolidate(lambda: random_batch(0))
    after = learner.state_dict()
    for name, column in before.items():
        np.testing.assert_array_equal(after[name], column)
    assert {"ewc/fisher/trunk", f"ewc/anchor/head/{RIGHT}"} <= after.keys()


def test_a_learner_with_consolidation_stays_nearer_to_its_old_weights() -> None:
    moved = {}
    for strength in (1e-9, 1e4):
        learner = small_dqn(small_job(rehearsal__ewc_lambda=strength, rehearsal__ewc_batches=5))
        learner.consolidate(lambda: random_batch(0))
        before = learner.blocks["trunk"].params.copy()
        for seed in range(1, 100):
            learner.update(random_batch(seed, scale=3.0))
        change = np.square(learner.blocks["trunk"].params - before)
        moved[strength] = float((change * learner.ewc.fisher["trunk"]).sum())
    assert moved[1e4] < 0.5 * moved[1e-9]
