"""Pairs of agent and task of an arm: how soon and how well each was learnt."""

from dataclasses import dataclass
from math import nan

from canal_mpi.games import RANDOM_AND_HUMAN
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Group
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured
from canal_mpi.types import Array

PARTS = (0.5, 0.75, 0.9)  # of the expert's score, and of what agents reach without sharing


@dataclass(frozen=True)
class Pair:
    """One agent and one task of one run of an arm; scores are normalised."""

    arm: str
    seed: int
    agent: int
    task: str
    lesson: bool  # whether it was learnt from a lesson
    own_steps: int
    before: float  # before the lesson; NaN where there was none
    learnt: float  # right after the task
    final: float  # at the end of the run
    gained: float  # human-normalised score since before the lesson; 0 where there was none
    steps_to: tuple[float, ...]  # own steps to each of PARTS of the expert's score
    seconds_to: tuple[float, ...]


def pairs_of(group: Group) -> list[Pair]:
    """All pairs of an arm."""
    return [
        _pair(group.label, run, a, i)
        for run in group.runs
        for a in range(group.agents)
        for i in range(len(run.run.tasks))
        if run.when[a, i]
    ]


def seed_of(run: Run) -> int:
    """The seed of a run."""
    return int(run.attributes.get("seed", 0))


def lessons_of(run: Run, agent: int, round_: int, kind: str = "lesson") -> Array:
    """Which rows of the exchange ledger are lessons that an agent took (or dropped) in a round."""
    ledger = run["exchange"]
    here: Array = (ledger["to"] == agent) & (ledger["round"] == round_) & (ledger["kind"] == kind)
    return here


def _pair(label: str, measured: Measured, agent: int, task: int) -> Pair:
    run, name, who = measured.run, measured.run.tasks[task], measured.run.agents[agent]
    table, round_ = run["tasks"], int(measured.when[agent, task])
    here = (table["agent"] == who) & (table["task"] == name)
    before = run["exchange"]["score_before"][lessons_of(run, who, round_)][:1]
    low, high = RANDOM_AND_HUMAN.get(name, (nan, nan))
    own_steps = int(table["env_steps"][here].sum())
    steps, seconds, scores = _looks(measured, agent, task, own_steps)
    return Pair(
        label,
        seed_of(run),
        who,
        name,
        bool((table["source"][here] == "lesson").any()),
        own_steps,
        float(measured.scale(before, task)[0]) if len(before) else nan,
        float(measured.learnt[agent, task]),
        float(measured.P[agent, -1, task]),
        float((table["score"][here][0] - before[0]) / (high - low)) if len(before) else 0.0,
        tuple(m.steps_to(part, steps, scores) for part in PARTS),
        tuple(m.steps_to(part, seconds, scores) for part in PARTS),
    )


def _looks(measured: Measured, agent: int, task: int, own_steps: int) -> tuple[Array, Array, Array]:
    """Steps, seconds and scores of the looks at a pair, from its first step to its last.

    What was not learnt yet counts 0 however lucky it was: the look before anything was learnt,
    and those at a lesson that was dropped.
    """
    run, who = measured.run, measured.run.agents[agent]
    curve = run["curve"]
    there = (curve["agent"] == who) & (curve["task"] == run.tasks[task])
    steps, seconds = (curve[name][there].astype(float) for name in ("env_steps", "seconds"))
    scores = measured.scale(curve["score"][there], task)
    if len(steps) > 1 and steps[0] == 0:
        scores[0] = 0.0
    if lessons_of(run, who, int(measured.when[agent, task]), "drop").any():
        scores[steps <= own_steps - int(run.setting("train.frames"))] = 0.0
    return steps, seconds, scores
