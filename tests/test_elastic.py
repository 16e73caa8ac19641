"""Elastic weight consolidation by hand, and against autograd of its penalty."""

import numpy as np
import torch
from small import RIGHT, WALK, random_batch, small_dqn, small_job
from torch import nn

from canal_mpi.learn.fast_mlp import Layers, ParamBlock, array_of
from canal_mpi.learn.networks import TorchBackend, TorchBlock


def _two_weights(first: float, second: float) -> ParamBlock:
    return ParamBlock(Layers((1, 1)), np.array([first, second], dtype=np.float32))


def _measure(piece: ParamBlock, alpha: float, *gradients: tuple[float, float]) -> None:
    squares = np.square(np.array(gradients, dtype=np.float32)).sum(axis=0)
    piece.consolidate(squares, len(gradients), alpha)


def test_the_fisher_information_is_a_running_mean_of_squares() -> None:
    piece = _two_weights(3.0, 4.0)
    _measure(piece, 0.25, (1.0, 2.0), (3.0, 0.0))
    assert piece.fisher.tolist() == [3.75, 1.5]  # 3/4 of (1 + 9) / 2 and of (4 + 0) / 2
    _measure(piece, 0.25, (2.0, 4.0))
    assert piece.fisher.tolist() == [3.9375, 12.375]  # 1/4 of the old, 3/4 of the new (4, 16)


def test_the_pull_by_hand_is_strength_times_fisher_times_distance() -> None:
    piece = _two_weights(3.0, 4.0)
    _measure(piece, 0.0, (1.0, 2.0))
    piece.params[:] = [3.5, 3.0]
    piece.grad[:] = [10.0, 20.0]
    piece.add_penalty(100.0)
    assert piece.grad.tolist() == [10.0 + 100 * 1 * 0.5, 20.0 + 100 * 4 * -1.0]


def test_the_pull_is_the_gradient_of_the_penalty() -> None:
    torch.manual_seed(0)
    piece = TorchBlock(nn.Linear(5, 3))
    anchor = piece.params.clone()
    piece.consolidate(torch.rand(len(anchor)), 4, 0.5)
    piece.params.normal_()
    piece.grad.zero_()
    piece.add_penalty(7.0)
    leaf = piece.params.detach().clone().requires_grad_()
    penalty = 7.0 / 2 * (piece.fisher * (leaf - anchor) ** 2).sum()
    (expected,) = torch.autograd.grad(penalty, leaf)
    torch.testing.assert_close(piece.grad, expected)


def test_the_anchor_is_where_the_task_ended() -> None:
    piece = _two_weights(1.0, 2.0)
    _measure(piece, 0.5, (1.0, 1.0))
    piece.params[:] = [8.0, 9.0]
    assert piece.anchor.tolist() == [1.0, 2.0]
    _measure(piece, 0.5, (1.0, 1.0))
    assert piece.anchor.tolist() == [8.0, 9.0]


def test_pieces_that_were_never_measured_are_free() -> None:
    unknown = _two_weights(3.0, 4.0)
    unknown.add_penalty(100.0)
    assert not unknown.grad.any()


def test_modules_are_held_like_arrays_also_after_a_restore() -> None:
    torch.manual_seed(0)
    module = TorchBlock(nn.Linear(5, 3))
    arrays = ParamBlock(Layers((5, 3)), module.state_dict()["params"])
    pulled = []
    for piece, again in (
        (module, TorchBlock(nn.Linear(5, 3))),
        (arrays, ParamBlock(Layers((5, 3)), np.zeros(18, dtype=np.float32))),
    ):
        for _ in range(2):
            piece.consolidate((0.3 * piece.params) ** 2, 1, 0.5)
            again.load_state_dict(piece.state_dict())
            piece, again = again, piece
        piece.params[:] = piece.params + 1
        piece.add_penalty(3.0)
        pulled.append(array_of(piece.grad))
    assert pulled[0].any()
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
    found = np.concatenate([learner.blocks[n].fisher for n in learner.block_names(RIGHT).values()])
    np.testing.assert_allclose(found, squares.numpy() / 3, rtol=1e-4, atol=1e-8)
    assert float(found.max()) > 0


def test_consolidating_moves_no_weight() -> None:
    learner = small_dqn(small_job(rehearsal__ewc_lambda=1.0, rehearsal__ewc_batches=2))
    before = learner.state_dict()
    learner.consolidate(lambda: random_batch(0))
    after = learner.state_dict()
    for name, column in before.items():
        np.testing.assert_array_equal(after[name], column)
    assert {"blocks/trunk/fisher", f"blocks/head/{RIGHT}/anchor"} <= after.keys()


def test_a_learner_with_consolidation_stays_nearer_to_its_old_weights() -> None:
    moved = {}
    for strength in (1e-9, 1e4):
        learner = small_dqn(small_job(rehearsal__ewc_lambda=strength, rehearsal__ewc_batches=5))
        learner.consolidate(lambda: random_batch(0))
        before = learner.blocks["trunk"].params.copy()
        for seed in range(1, 100):
            learner.update(random_batch(seed, scale=3.0))
        change = np.square(learner.blocks["trunk"].params - before)
        moved[strength] = float((change * learner.blocks["trunk"].fisher).sum())
    assert moved[1e4] < 0.5 * moved[1e-9]
