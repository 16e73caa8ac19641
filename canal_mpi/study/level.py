"""The scale of a study: random play and single-task experts, game by game."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from canal_mpi.results import measures as m
from canal_mpi.results.reading import Run
from canal_mpi.types import Array

CLEARLY = 2.0  # standard errors by which a difference counts


@dataclass(frozen=True)
class Level:
    """Mean score of every task and its standard error, over all episodes there were."""

    mean: Array
    error: Array
    spread: Array  # standard deviation of an episode
    episodes: int

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Level":
        """Of agents right after they learnt each task.

        The error is that of episodes or that of runs, whichever is larger: episodes of one run
        have the same network and are not independent.
        """
        means, errors, spreads, count = [], [], [], 0
        for i in range(len(runs[0].tasks)):
            by_run = [episodes_after(run, 0, i) for run in runs]
            scores = np.concatenate(by_run)
            means.append(m.mean(scores))
            spreads.append(float(scores.std()))
            errors.append(max(_error(scores), _error(np.array([m.mean(x) for x in by_run]))))
            count = max(count, len(scores))
        return cls(np.array(means), np.array(errors), np.array(spreads), count)


def _error(values: Array) -> float:
    """Standard error of a mean; 0 where one value can't tell."""
    return float(values.std() / np.sqrt(len(values) - 1)) if len(values) > 1 else 0.0


def clearly_above(expert: Level, random: Level) -> Array:
    """[task]: whether the difference is larger than two standard errors and than episodes scatter.

    Where it is smaller than that spread, a score of few episodes on the scale is mostly chance.
    """
    error = np.hypot(expert.error, random.error)
    spread = np.hypot(expert.spread, random.spread) / np.sqrt(2)
    found: Array = expert.mean - random.mean > np.maximum(CLEARLY * error, spread)
    return found


def episodes_after(run: Run, agent: int, task: int) -> Array:
    """Scores of the episodes of one agent on a task, right after it learnt it."""
    places = np.flatnonzero(run.order[agent] == run.tasks[task])
    if not len(places):
        return np.zeros(0)
    scores: Array = run.score[agent, places[0] + 1, task]
    return scores[~np.isnan(scores)]
