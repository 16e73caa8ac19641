"""Losses of action values: each gives its mean and its gradient with respect to the values."""

import torch
from torch import Tensor


def temporal_difference(
    values: Tensor, actions: Tensor, goals: Tensor, huber: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of the values of the actions taken; also the differences themselves."""
    taken = values.gather(1, actions.unsqueeze(1)).squeeze(1)
    difference = taken - goals
    if huber:
        slope = difference.clamp(-1, 1)
        loss = (slope * (difference - 0.5 * slope)).mean()
    else:
        slope = 2 * difference
        loss = difference.square().mean()
    gradient = torch.zeros_like(values)
    gradient.scatter_(1, actions.unsqueeze(1), (slope / len(values)).unsqueeze(1))
    return loss, gradient, difference


def imitation(values: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """KL(teacher ‖ student) of the softmax policies, as in QDagger."""
    student, wanted = values / temperature, teacher / temperature
    log_student, log_wanted = student.log_softmax(1), wanted.log_softmax(1)
    chances = log_wanted.exp()
    loss = (chances * (log_wanted - log_student)).sum(1).mean()
    return loss, (log_student.exp() - chances) / (temperature * len(values))


def stored_values(values: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Mean square distance from values stored earlier, as in DER++."""
    difference = values - stored
    return difference.square().mean(), 2 * difference / values.numel()
