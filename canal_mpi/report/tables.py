"""Rows of the report's tables, also for CSV and JSON."""

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from canal_mpi.report.parts import Best, Cell
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Comparison, Group
from canal_mpi.results.reading import Run
from canal_mpi.results.runs import events, number
from canal_mpi.results.summary import Measured
from canal_mpi.types import Array

USUAL = {"start", "round", "finished"}  # events that are no news


def measure_rows(measured: Measured) -> Iterator[list[Cell]]:
    """Every measure of a run: its mean, an interval where there is one, its meaning."""
    for name, measure in measured.measures().items():
        if measure.dims == ("value", "low", "high"):
            value, low, high = (float(v) for v in measure.value)
        elif measure.dims == ("after_round",):
            value, low, high = float(measure.value[-1]), float("nan"), float("nan")
        else:
            value = measure.overall
            low, high = _agent_interval(measure.value)
        yield [name, value, low, high, measure.about]


def _agent_interval(values: Array) -> tuple[float, float]:
    """95 % bootstrap interval of the mean, agents (and tasks) drawn anew."""
    rows = values.reshape(len(values), -1)
    if len(rows) < 2 or np.isnan(rows).all():
        return float("nan"), float("nan")
    return m.interval(m.overall_mean, rows)


def comparison_rows(comparison: Comparison) -> Iterator[list[Cell]]:
    """One measure a row, one group a column; the better value is marked."""
    groups = comparison.groups
    found = [_of_group(comparison, group) for group in groups]
    signs = {name: sign for own in found for name, (_, sign) in own.items()}
    for name, sign in signs.items():
        values = [own.get(name, (float("nan"), 0))[0] for own in found]
        known = [value for value in values if not np.isnan(value)]
        best = (max(known) if sign > 0 else min(known)) if sign and len(known) > 1 else None
        yield [name, *(Best(v) if v == best else v for v in values)]


def _of_group(comparison: Comparison, group: Group) -> dict[str, tuple[float, int]]:
    parts = [run.measures() for run in group.runs]
    found: dict[str, tuple[float, int]] = {"runs": (len(group.runs), 0)}
    for name, measure in parts[0].items():
        found[name] = (m.mean([p[name].single for p in parts]), measure.sign)
    steps = [
        float((r.run["tasks"]["env_steps"] + r.run["tasks"]["probe_steps"]).sum())
        for r in group.runs
    ]
    found["environment steps"] = (m.mean(steps), -1)
    found["seconds in tasks, slowest agent"] = (m.mean([r.run.seconds for r in group.runs]), -1)
    speeds = [float(r.run["agents"]["speed"].min(initial=1)) for r in group.runs]
    if min(speeds) < 1:
        found["speed of the slowest emulated device"] = (min(speeds), 0)
    low, high = m.interval(m.interquartile_mean, group.learnt)
    found["IQM right after tasks"] = (m.interquartile_mean(group.learnt), +1)
    found["IQM right after tasks, low"] = (low, 0)
    found["IQM right after tasks, high"] = (high, 0)
    chance, after = "probability of improvement", "probability of improvement right after tasks"
    versus = comparison.versus(group).items()
    return found | {name.replace(chance, after): (value, 0) for name, value in versus}


def task_rows(measured: Measured) -> Iterator[list[Cell]]:
    """Every task of every agent."""
    run, table = measured.run, measured.run["tasks"]
    for k in np.lexsort((table["round"], table["agent"])):
        agent, task = int(table["agent"][k]), str(table["task"][k])
        donors = str(table["donors"][k])
        source = f"from agent {donors}" if donors else "played"
        place = run.tasks.index(task) if task in run.tasks else -1
        norm = (
            float(measured.learnt[run.agents.index(agent), place]) if place >= 0 else float("nan")
        )
        yield [
            agent,
            int(table["round"][k]),
            task,
            source,
            int(table["env_steps"][k]),
            float(table["score"][k]),
            norm,
            float(table["seconds"][k]),
        ]


def exchange_rows(run: Run) -> Iterator[list[Cell]]:
    """The ledger without offers and requests."""
    table = run["exchange"]
    for k in np.flatnonzero((table["kind"] != "offer") & (table["kind"] != "request")):
        yield [
            int(table["round"][k]),
            str(table["kind"][k]),
            int(table["donor"][k]),
            int(table["to"][k]),
            str(table["task"][k]),
            int(table["rows"][k]),
            float(table["bytes"][k]) / 1e6,
            float(table["score_before"][k]),
            float(table["score_after"][k]),
            str(table["reason"][k]),
        ]


def fault_rows(run: Run) -> Iterator[list[Cell]]:
    """Refusals and drops of the ledger, and every unusual event."""
    table = run["exchange"]
    for k in np.flatnonzero(np.isin(table["kind"], ["refusal", "drop"])):
        who = f"agent {table['to'][k]}, lesson of agent {table['donor'][k]} ({table['task'][k]})"
        what = f"{table['kind'][k]}: {table['reason'][k]}"
        yield [f"round {table['round'][k]}", what, who]
    for event in events(run.folder):
        kind = str(event.get("event", ""))
        if kind not in USUAL:
            rest = {k: v for k, v in event.items() if k not in ("event", "time")}
            words = ", ".join(f"{name} {value}" for name, value in rest.items())
            yield [_clock(number(event.get("time"))), kind[:80], words[:300]]


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""
