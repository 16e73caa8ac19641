"""Statistics with their uncertainty, for reports and studies: the unit of resampling is the seed.

Agents of one run share what they learnt, so scores of a seed are means over its agents. Samples are
[seed, task] where nothing else is said; what can't be told is NaN.
"""

from math import inf, isfinite, isnan
from typing import Any

import numpy as np

from canal_mpi.interfaces import Array
from canal_mpi.results.measures import Interval, ratio
from canal_mpi.results.reader import Run


def mean_score(scores: Array) -> Any:
    """The mean over [seed, task]."""
    return scores.mean(axis=(-2, -1))


def busy_seconds(run: Run) -> Array:
    """The seconds of each row of /tasks, measuring left out."""
    return run["tasks"]["seconds"] - run["tasks"]["evaluate_seconds"]


def costs(run: Run) -> dict[str, float]:
    """What a run spent; measuring is left out of `steps`, `seconds` and `waiting`."""
    tasks = run["tasks"]
    found = {
        "training": float(tasks["env_steps"].sum()),
        "decisions": float(tasks["probe_steps"].sum()),
        "evaluation": float(tasks["evaluation_steps"].sum()),
    }
    busy = busy_seconds(run)
    each = [float(busy[tasks["agent"] == agent].sum()) for agent in run.agents]
    waiting = float(tasks["wait_seconds"].sum()) / max(sum(each), 1e-9)
    steps = found["training"] + found["decisions"]
    return found | {"steps": steps, "seconds": max(each), "waiting": waiting}


def times(value: Interval, more: str = "", less: str = "") -> str:
    """A ratio with its interval: `2.8 × fewer steps (2.1 to 3.5)`; `less` is told below 1."""
    if less and 0 < value[0] < 1:
        middle, high, low = ratio(1, np.array(value))
        return times((middle, low, np.where(np.isnan(high), inf, high)), less)
    if more and f"{value[0]:.1f}" == "1.0":
        more = f"the {more.partition(' ')[2]}"  # neither fewer nor more
    return _worded(value, 1, f" × {more}".rstrip())


def percent(value: Interval, sign: str = "") -> str:
    """A part with its interval, in percent; `+` for differences."""
    return _worded(value, 100, " %", sign)


def _worded(value: Interval, factor: float, unit: str, sign: str = "") -> str:
    middle, low, high = (
        f"{factor * x:{sign}.1f}".replace("-", "−") if isfinite(x) else "∞" for x in value
    )
    if isnan(value[0]):
        return "not known"
    return f"{middle}{unit}" if isnan(value[1]) else f"{middle}{unit} ({low} to {high})"
