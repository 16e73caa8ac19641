"""Numbers and rows of the report's tables, also for CSV and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite, isnan
from typing import Any

import numpy as np

from canal_mpi.interfaces import Array
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Comparison, Group, Measured, mix
from canal_mpi.results.progress import events
from canal_mpi.results.progress import number as number_in
from canal_mpi.results.reader import Run

Cell = str | float | int
USUAL = {"start", "round", "finished"}  # events that are no news
PARTS = ("environment", "learning", "evaluation", "exchange", "waiting", "checkpoint", "other")


class Best(float):
    """A number that is the best of its row."""


@dataclass(frozen=True)
class Table:
    """Rows under a head; `key` is its id in the page, `about` a line below it."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    key: str = ""
    about: str = ""


def number(value: float) -> str:
    """A number as people read it."""
    if not isfinite(value):
        return "–" if isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size < 5e-4:
        return "0"
    if size >= 1e12:
        return f"{value:.2e}".replace("-", "−")
    digits = 0 if size >= 100 or value == int(value) else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", "−")


# ── one run ────────────────────────────────────────────────────────────────────────────────────


def seconds(run: Run) -> Array:
    """[agent, part]: seconds that each agent spent on each of PARTS."""
    tasks, train = run["tasks"], run["train"]
    found = np.zeros((len(run.agents), len(PARTS)))
    for k, agent in enumerate(run.agents):
        mine, here = tasks["agent"] == agent, train["agent"] == agent
        named = [train[f"{part}_seconds"][here] for part in ("env", "learn")]
        named += [
            tasks[f"{part}_seconds"][mine] for part in ("evaluate", "exchange", "wait", "save")
        ]
        found[k, :-1] = [np.nansum(part) for part in named]
        found[k, -1] = max(np.nansum(tasks["seconds"][mine]) - found[k, :-1].sum(), 0.0)
    return found


def wall_seconds(run: Run) -> float:
    """From the start of the run to its end; NaN where it has not ended."""
    try:
        ends = [datetime.fromisoformat(str(run.attributes[k])) for k in ("started", "finished")]
        return (ends[1] - ends[0]).total_seconds()
    except (KeyError, ValueError, TypeError):
        return float("nan")


def steps_played(run: Run) -> float:
    """Environment steps of all agents in training, with those spent on choosing lessons."""
    return float((run["tasks"]["env_steps"] + run["tasks"]["probe_steps"]).sum())


def between(run: Run, which: Array, donor: str, values: Array) -> Array:
    """[donor, student]: the sum of the ledger's values over the rows that count."""
    table, agents = run["exchange"], run.agents
    place = {agent: k for k, agent in enumerate(agents)}
    found = np.zeros((len(agents), len(agents)))
    for k in np.flatnonzero(which):
        a, b = int(table[donor][k]), int(table["to"][k])
        if a in place and b in place:
            found[place[a], place[b]] += float(values[k])
    return found


def run_tables(measured: Measured, prefix: str = "") -> list[Table]:
    """Tasks, measures, the ledger, and what did not go as planned."""
    run = measured.run
    tasks = ["agent", "round", "task", "source", "own steps", "score", "normalised", "seconds"]
    ledger = ["round", "kind", "donor", "to", "task", "rows", "MB", "before", "after", "reason"]
    measures = ["measure", "value", "low", "high", "meaning"]
    means = "Measures: means over what each is told for, with 95 % intervals"
    faults = ["when", "what", "details"]
    return [
        Table("Tasks as they were learnt", tasks, [*task_rows(measured)], f"{prefix}tasks"),
        Table(means, measures, [*measure_rows(measured)], f"{prefix}measures"),
        Table("Ledger of lessons, without offers", ledger, [*ledger_rows(run)], f"{prefix}ledger"),
        Table("Faults and resumes", faults, [*fault_rows(run)], f"{prefix}faults"),
    ]


def measure_rows(measured: Measured) -> Iterator[list[Cell]]:
    """Every measure of a run: its mean, an interval where there is one, its meaning."""
    for name, measure in measured.measures().items():
        low, high = float("nan"), float("nan")
        if measure.dims == ("value", "low", "high"):
            _, low, high = (float(v) for v in measure.value)
        elif measure.dims != ("after_round",):
            rows = measure.value.reshape(len(measure.value), -1)
            if len(rows) > 1 and not np.isnan(rows).all():
                low, high = m.interval(m.overall_mean, rows)
        yield [name, measure.single, low, high, measure.about]


def task_rows(measured: Measured) -> Iterator[list[Cell]]:
    """Every task of every agent."""
    run, table = measured.run, measured.run["tasks"]
    for k in np.lexsort((table["round"], table["agent"])):
        agent, task, donors = (str(table[name][k]) for name in ("agent", "task", "donors"))
        place = run.tasks.index(task) if task in run.tasks else -1
        score = measured.learnt[run.agents.index(int(agent)), place] if place >= 0 else np.nan
        source = f"from agent {donors}" if donors else "played"
        row: list[Cell] = [int(agent), int(table["round"][k]), task, source]
        points, time = float(table["score"][k]), float(table["seconds"][k])
        yield [*row, int(table["env_steps"][k]), points, float(score), time]


def ledger_rows(run: Run) -> Iterator[list[Cell]]:
    """The ledger without offers and requests."""
    table = run["exchange"]
    for k in np.flatnonzero(~np.isin(table["kind"], ["offer", "request"])):
        row: list[Cell] = [int(table["round"][k]), str(table["kind"][k]), int(table["donor"][k])]
        row += [int(table["to"][k]), str(table["task"][k]), int(table["rows"][k])]
        scores = [float(table[name][k]) for name in ("score_before", "score_after")]
        yield [*row, float(table["bytes"][k]) / 1e6, *scores, str(table["reason"][k])]


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
            yield [_clock(number_in(event.get("time"))), kind[:80], words[:300]]


def _clock(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""


# ── several runs ───────────────────────────────────────────────────────────────────────────────


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Mixes of hosts, and every measure of every group; none where there is one group."""
    found, hosts, several = [], mixes(comparison), len(comparison.groups) > 1
    if hosts:
        head = ["hosts", "clock", "runs", "seconds", "% waiting", "by kind", "CPU s", "steps"]
        fastest = sorted(hosts, key=lambda one: one.wall)
        rows = [one.row() for one in fastest]
        found.append(Table("Mixes of hosts, the fastest first", [*head, "score"], rows, "mixes"))
    if several:
        words = "Means of each group; the better value is bold. Click a head to sort."
        head = ["measure", *(group.label for group in comparison.groups)]
        found.append(Table(words, head, [*comparison_rows(comparison)], "compared"))
    return found


def comparison_rows(comparison: Comparison) -> Iterator[list[Cell]]:
    """One measure per row, one group per column; the better value is marked."""
    found = [_of_group(comparison, group) for group in comparison.groups]
    signs = {name: sign for own in found for name, (_, sign) in own.items()}
    for name, sign in signs.items():
        values = [own.get(name, (float("nan"), 0))[0] for own in found]
        known = [value for value in values if not np.isnan(value)]
        best = (max(known) if sign > 0 else min(known)) if sign and len(set(known)) > 1 else None
        if known:
            yield [name, *(Best(v) if v == best else v for v in values)]


def _of_group(comparison: Comparison, group: Group) -> dict[str, tuple[float, int]]:
    parts = [run.measures() for run in group.runs]
    found: dict[str, tuple[float, int]] = {"runs": (len(group.runs), 0)}
    for name, measure in parts[0].items():
        found[name] = (m.mean([p[name].single for p in parts]), measure.sign)
    found["environment steps"] = (m.mean([steps_played(r.run) for r in group.runs]), -1)
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


@dataclass(frozen=True)
class Mix:
    """What runs on one mix of hosts, with one clock, cost and reached: means over those runs."""

    hosts: str
    clock: str  # rounds or free
    runs: int
    wall: float  # seconds inside tasks, of the slowest agent
    waiting: float  # part of all agents' time that they waited for others
    waits: dict[str, float]  # the same for each kind of host
    cpu: float  # seconds of all agents; NaN where the files don't have them
    steps: float
    score: float  # normalised, right after each task

    @property
    def waits_told(self) -> str:
        """Which kind of host waits how much."""
        return ", ".join(f"{kind} {part:.0%}" for kind, part in self.waits.items())

    def row(self) -> list[Cell]:
        """A row of the table of mixes."""
        row: list[Cell] = [self.hosts, self.clock, self.runs, self.wall, 100 * self.waiting]
        return [*row, self.waits_told, self.cpu, self.steps, self.score]


def mixes(comparison: Comparison) -> list[Mix]:
    """The mixes of hosts of a comparison, by clock; none where all runs had the same hosts."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for measured in (measured for group in comparison.groups for measured in group.runs):
        hosts = mix([str(host) for host in measured.run["agents"]["host"]])
        clock = str(measured.run.setting("share.exchange", "rounds"))
        found.setdefault((hosts, clock), []).append(measured)
    if len({hosts for hosts, _ in found}) < 2:
        return []
    return [_mix(hosts, clock, runs) for (hosts, clock), runs in found.items()]


def _mix(hosts: str, clock: str, runs: Sequence[Measured]) -> Mix:
    spent: dict[str, Array] = {}  # seconds waited and in all, by kind of host
    for run in (measured.run for measured in runs):
        tasks, agents = run["tasks"], run["agents"]
        for agent, host in zip(agents["agent"], agents["host"], strict=True):
            kind, mine = mix([str(host)]).partition(" ")[2], tasks["agent"] == agent
            both = [np.nansum(tasks[name][mine]) for name in ("wait_seconds", "seconds")]
            spent[kind] = spent.get(kind, np.zeros(2)) + both
    waited, total = sum(spent.values(), np.zeros(2))
    cpu = [measured.run["tasks"].get("cpu_seconds") for measured in runs]
    return Mix(
        hosts,
        clock,
        len(runs),
        m.mean([measured.run.seconds for measured in runs]),
        float(waited / (total or 1)),
        {kind: float(wait / (all_ or 1)) for kind, (wait, all_) in spent.items()},
        m.mean([float(column.sum()) for column in cpu if column is not None]),
        m.mean([steps_played(measured.run) for measured in runs]),
        m.mean([m.mean(measured.learnt) for measured in runs]),
    )


def facts(comparison: Comparison) -> Any:
    """Every measure of every run, for JSON, which knows no NaN."""
    groups = [
        {
            "label": group.label,
            "runs": [_run_facts(measured) for measured in group.runs],
            "versus": comparison.versus(group),
        }
        for group in comparison.groups
    ]
    return _known({"scale": comparison.scale.name, "tasks": comparison.tasks, "groups": groups})


def _run_facts(measured: Measured) -> dict[str, Any]:
    measures = {
        name: {"mean": one.overall, "dims": one.dims, "value": one.value.tolist()}
        for name, one in measured.measures().items()
    }
    return {"run": str(measured.run.folder), "status": measured.run.status, "measures": measures}


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_known(item) for item in value]
    return value if not isinstance(value, float) or isfinite(value) else None
