"""Losses against torch's autograd of the textbook formula, and against numbers done by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canal_mpi.learn.dqn import policy_kl, td_loss


def _values(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(16, 5, generator=generator, dtype=torch.float64)
    actions = torch.randint(5, (16,), generator=generator)
    goals = scale * torch.randn(16, generator=generator, dtype=torch.float64)
    return values, actions, goals


def _autograd(values: Tensor, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, values)
    return gradient


@pytest.mark.parametrize("huber", [True, False])
def test_the_temporal_difference_agrees_with_autograd(huber: bool) -> None:
    values, actions, goals = _values()
    leaf = values.clone().requires_grad_()
    taken = leaf[torch.arange(16), actions]
    textbook = functional.smooth_l1_loss if huber else functional.mse_loss
    expected = textbook(taken, goals)
    loss, gradient = td_loss(values.numpy(), actions.numpy(), goals.numpy(), huber)
    assert loss == pytest.approx(float(expected.detach()))
    np.testing.assert_allclose(gradient, _autograd(leaf, expected).numpy())
    far = (taken - goals).abs() > 1
    assert far.any() and not far.all()  # both parts of Huber


def test_huber_by_hand_is_a_parabola_near_and_a_line_far() -> None:
    values = np.array([[1.0, 5.0], [0.0, 2.0]])
    actions, goals = np.array([0, 1]), np.array([0.5, 5.0])
    loss, gradient = td_loss(values, actions, goals, True)
    assert float(loss) == pytest.approx((0.125 + 2.5) / 2)
    assert gradient.tolist() == [[0.25, 0.0], [0.0, -0.5]]


def test_mse_by_hand_is_the_mean_of_the_squares() -> None:
    values = np.array([[1.0, 5.0], [0.0, 2.0]])
    actions, goals = np.array([0, 1]), np.array([0.5, 5.0])
    loss, gradient = td_loss(values, actions, goals, False)
    assert float(loss) == pytest.approx((0.25 + 9.0) / 2)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, -3.0]]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_imitation_agrees_with_autograd_of_the_divergence(temperature: float) -> None:
    values, teacher = _values(1)[0], _values(2)[0]
    leaf = values.clone().requires_grad_()
    scale = temperature * float(teacher.std(dim=1, correction=0).mean())
    student = functional.log_softmax(leaf / scale, 1)
    wanted = functional.softmax(teacher / scale, 1)
    expected = functional.kl_div(student, wanted, reduction="batchmean")
    loss, gradient = policy_kl(values.numpy(), teacher.numpy(), temperature)
    assert loss == pytest.approx(float(expected.detach()))
    np.testing.assert_allclose(gradient, scale * _autograd(leaf, expected).numpy(), atol=1e-9)


def test_imitation_by_hand() -> None:
    # a spread of ln 3, twice: the teacher plays (3/4, 1/4), the student (1/2, 1/2)
    teacher = np.array([[2 * math.log(3.0), 0.0]])
    loss, gradient = policy_kl(np.array([[7.0, 7.0]]), teacher, 2 / math.log(3.0))
    assert float(loss) == pytest.approx(0.1308120, abs=1e-6)  # 3/4 ln(3/2) + 1/4 ln(1/2)
    assert gradient[0].tolist() == pytest.approx([-0.25, 0.25])


def test_a_student_that_plays_like_its_teacher_has_nothing_to_imitate() -> None:
    values = _values()[0].numpy()
    loss, gradient = policy_kl(values, values + 3.0, 0.5)
    assert loss == pytest.approx(0, abs=1e-12)
    assert np.abs(gradient).max() < 1e-12
