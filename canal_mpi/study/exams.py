"""Evaluations that steer agents which share; they are no training, but they cost steps as well.

By them a lesson is admitted, its study is ended, and the best of several donors is chosen. Agents
that don't share need none of that. How many steps an evaluation took is not written down; here it
is estimated from the lengths of training episodes on the same task.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured
from canal_mpi.types import Array


def lengths_of(runs: Iterable[Run]) -> dict[str, float]:
    """By task: steps of an episode, in the mean over the training of all runs."""
    found: dict[str, list[Array]] = {}
    for run in runs:
        table, cap = run["episodes"], int(run.setting("evaluation.max_steps", 0))
        for task in np.unique(table["task"]):
            lengths = table["length"][table["task"] == task]
            found.setdefault(str(task), []).append(np.minimum(lengths, cap) if cap else lengths)
    return {task: float(np.concatenate(parts).mean()) for task, parts in found.items()}


def exams_of(measured: Measured, lengths: Mapping[str, float]) -> tuple[int, Array]:
    """How many evaluations steered, and [agent, after_round] their steps so far, estimated."""
    run, steers = measured.run, _steer(measured.run)
    curve, episodes = run["curve"], int(run.setting("evaluation.episodes", 1))
    longest = float(run.setting("evaluation.max_steps", 0)) or np.nan
    steps = np.zeros_like(measured.steps, dtype=float)
    places = {agent: k for k, agent in enumerate(run.agents)}
    for k in np.flatnonzero(steers):
        round_ = int(curve["round"][k])
        each = lengths.get(str(curve["task"][k]), longest)  # where no training episode ended
        steps[places[int(curve["agent"][k])], round_:] += episodes * each
    return int(steers.sum()), steps


def _steer(run: Run) -> Array:
    """Which looks steer: all at tasks with a lesson, and those that tell others of a donor."""
    curve, ledger = run["curve"], run["exchange"]
    steers = np.zeros(len(curve["round"]), dtype=bool)
    if not run.adjacency.any():
        return steers
    taken = np.isin(ledger["kind"], ("lesson", "drop"))
    taught = set(zip(ledger["to"][taken].tolist(), ledger["round"][taken].tolist(), strict=True))
    keys = list(zip(curve["agent"].tolist(), curve["round"].tolist(), strict=True))
    last = {key: k for k, key in enumerate(keys)}
    for k, key in enumerate(keys):
        steers[k] = key in taught or last[key] == k
    return steers
