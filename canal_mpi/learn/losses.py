"""Losses of action values: each gives its mean and its gradient with respect to the values."""

from typing import Any

import numpy as np

from canal_mpi.machine import compiled
from canal_mpi.types import Array

HALF, ONE, TWO = (np.float32(number) for number in (0.5, 1, 2))  # keep single precision


@compiled
def goals_of(judge: Any, choice: Any, returns: Any, discounts: Any) -> Any:
    """Returns and, discounted, what `judge` says of the action that `choice` finds best."""
    goals = np.empty_like(returns)
    for i in range(len(goals)):
        best = 0
        for j in range(1, choice.shape[1]):
            if choice[i, j] > choice[i, best]:
                best = j
        goals[i] = returns[i] + discounts[i] * judge[i, best]
    return goals


def temporal_difference(
    values: Array, actions: Array, goals: Array, huber: bool, out: Array | None = None
) -> tuple[float, Array, Array]:
    """Loss of the values of the actions taken; also the differences themselves.

    The gradient is written to `out`, if there is one.
    """
    gradient = np.empty_like(values) if out is None else out
    loss, difference = _difference(values, actions, goals, huber, gradient)
    return loss, gradient, difference


@compiled
def _difference(
    values: Any, actions: Any, goals: Any, huber: bool, gradient: Any
) -> tuple[float, Any]:
    rows, loss, errors = len(actions), 0.0, np.empty_like(goals)
    for i in range(rows):
        error = values[i, actions[i]] - goals[i]
        if huber:
            slope = min(max(error, -ONE), ONE)
            loss += slope * (error - HALF * slope)
        else:
            slope = TWO * error
            loss += error * error
        gradient[i, :] = 0
        gradient[i, actions[i]] = slope / rows
        errors[i] = error
    return loss / rows, errors


def imitation(values: Array, teacher: Array, temperature: float) -> tuple[float, Array]:
    """KL(teacher ‖ student) of the softmax policies, as in QDagger."""
    log_student, log_wanted = _log_softmax(values, temperature), _log_softmax(teacher, temperature)
    chances = np.exp(log_wanted)
    loss = float((chances * (log_wanted - log_student)).sum(axis=1).mean())
    return loss, (np.exp(log_student) - chances) / (temperature * len(values))


def departure(
    values: Array, stored: Array, temperature: float, alpha: float
) -> tuple[float, Array]:
    """How far the policy of an old task is from the stored one, as steep as other losses."""
    weight = alpha * temperature
    loss, gradient = imitation(values, stored, temperature)
    return weight * loss, np.float32(weight) * gradient


def _log_softmax(values: Array, temperature: float) -> Array:
    lower = (values - values.max(axis=1, keepdims=True)) / temperature
    found: Array = lower - np.log(np.exp(lower).sum(axis=1, keepdims=True))
    return found
