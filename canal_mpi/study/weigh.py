"""What a study measures: arms on the scale from random play to single-task experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf, isnan, nan

import numpy as np

from canal_mpi.results import measures as m
from canal_mpi.results.compare import Comparison, Group
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import Measured, Scale
from canal_mpi.study.arms import DEFAULT, NONE
from canal_mpi.study.exams import lengths_of
from canal_mpi.study.level import Level, clearly_above
from canal_mpi.study.pairs import PARTS, pairs_of
from canal_mpi.study.weighed import Weighed
from canal_mpi.types import Array


@dataclass
class Study:
    """All arms on one scale."""

    tasks: list[str]  # all of them
    random: Level
    expert: Level
    arms: list[Weighed]
    whole: dict[str, list[Run]]  # the runs of each arm with the tasks that don't count
    comparison: Comparison
    seeds: list[int]

    @property
    def counts(self) -> Array:
        """[task]: whether the experts clearly beat random play; only these tasks are in means."""
        return clearly_above(self.expert, self.random)

    def arm(self, label: str) -> Weighed | None:
        """An arm by its name."""
        return next((arm for arm in self.arms if arm.label == label), None)


def weigh(arms: dict[str, list[Run]], experts: list[Run], random: list[Run]) -> Study | None:
    """Everything about a study; None where no expert clearly beats random play, or nothing ran."""
    if not (arms and experts and random):
        return None
    tasks = experts[0].tasks
    expert, chance = Level.of(experts), Level.of(random)
    kept = [i for i, counts in enumerate(clearly_above(expert, chance)) if counts]
    if not kept:
        return None
    about = "0 is random play, 1 a single-task expert (same steps, no sharing)"
    scale = Scale("expert", about, chance.mean[kept], expert.mean[kept], unseen=0.0)
    less = _fewer_alone(arms)
    groups = [
        Group(label, [Measured(_only(run, kept), scale) for run in runs])
        for label, runs in (arms | less).items()
    ]
    weighed = _weighed(groups, less, lengths_of(run for runs in arms.values() for run in runs))
    baseline = next((g for g in groups if g.label == NONE), None)
    stes = [Measured(_only(run, kept), scale) for run in experts]
    many = baseline.agents if baseline else groups[0].agents  # steps of all agents are compared
    alike = [arm for arm in weighed if arm.group.agents == many]
    if none := next((arm for arm in alike if arm.group is baseline), None):
        alike = [arm for arm in alike if arm.seeds == none.seeds]  # the page compares all of them
    comparison = Comparison([arm.group for arm in alike], scale, baseline, None, stes)
    seeds = sorted({seed for arm in weighed for seed in arm.seeds})
    return Study(tasks, chance, expert, weighed, arms, comparison, seeds)


def _weighed(
    groups: Sequence[Group], less: dict[str, list[Run]], lengths: dict[str, float]
) -> list[Weighed]:
    """The arms, each with the one that it is compared to."""
    found = [Weighed(g.label, g, pairs_of(g), None, g.label in less, lengths) for g in groups]
    for arm in found:
        if arm.part:  # their times are those of a larger crowd
            arm.pairs = [replace(pair, seconds_to=(nan,) * len(PARTS)) for pair in arm.pairs]
        arm.base = next(
            (b for b in found if not b.group.shares and b.group.agents == arm.group.agents), None
        )
        arm.base = None if arm.base is arm else arm.base
    return found


def _only(run: Run, kept: list[int]) -> Run:
    """The run without the tasks that don't count."""
    return replace(run, tasks=[run.tasks[i] for i in kept], score=run.score[:, :, kept])


def _fewer_alone(arms: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """Arms of fewer agents that don't share: agents of `none` are the same at any number."""
    whole, found = arms.get(NONE, []), {}
    for number in sorted({len(run.agents) for runs in arms.values() for run in runs}):
        if whole and number < len(whole[0].agents) and f"{NONE}-{number}" not in arms:
            found[f"{NONE}-{number}"] = [_first(run, number) for run in whole]
    return found


def _first(run: Run, number: int) -> Run:
    """The run with its first agents alone."""
    agents = run.agents[:number]
    tables = {
        name: {key: column[np.isin(table["agent"], agents)] for key, column in table.items()}
        if "agent" in table
        else table
        for name, table in run.tables.items()
    }
    return replace(
        run,
        tables=tables,
        order=run.order[:number],
        adjacency=run.adjacency[:number, :number],
        score=run.score[:number],
    )


def points_of(runs: Sequence[Run], task: str) -> tuple[float, float]:
    """Mean game points of all agents of an arm: right after the task, and at the end."""
    learnt, final = [], []
    for run in runs:
        table, i = run["tasks"], run.tasks.index(task)
        learnt += table["score"][table["task"] == task].tolist()
        final += [m.mean(scores) for scores in run.score[:, -1, i]]
    return m.mean(learnt), m.mean(final)


Goal = tuple[str, str, bool | None]  # what was wanted, what was found, whether it was reached


def goals(study: Study) -> list[Goal]:
    """The goals of a study, on the seeds that both main arms have."""
    arm = study.arm(DEFAULT)
    if arm is None or arm.matched is None:
        return []
    ours, theirs = arm.matched
    (average, *_), chance, (lost, least, most) = ours.average, arm.improvement, ours.forgetting
    return [
        _advantage_goal(arm),
        (
            "average performance not below that without sharing, P(improvement) over 0.5",
            f"{average:.2f} against {theirs.average[0]:.2f}; P = {chance[0]:.2f} "
            f"({chance[1]:.2f} – {chance[2]:.2f})",
            None
            if isnan(average) or isnan(theirs.average[0])
            else average >= theirs.average[0] and chance[0] > 0.5,
        ),
        (
            "forgetting at most 0.05",
            f"{lost:.3f} ({least:.3f} – {most:.3f})",
            None if isnan(lost) else lost <= 0.05,
        ),
        _harm_goal(arm),
    ]


def seeds_of_goals(study: Study) -> str:
    """The seeds that both main arms have, in words."""
    arm = study.arm(DEFAULT)
    seeds = arm.matched[0].seeds if arm and arm.matched else []
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _advantage_goal(arm: Weighed) -> Goal:
    ta, low, high = arm.advantage(0.9)
    words = f"{ta:.2f} ({low:.2f} – {high:.2f})" if ta else "never got there"
    if isinf(ta):
        words = "got there without a step"
    if isnan(ta):
        words = "not all evaluations are there, or agents without sharing learnt nothing"
    return "TA_mean(90 %) at least 2.5", words, None if isnan(ta) else ta >= 2.5


def _harm_goal(arm: Weighed) -> Goal:
    (worse, pairs), told = arm.worse.pairs, arm.worse.told
    lessons = any(pair.lesson for pair in arm.pairs)
    nothing = "one seed can't tell" if lessons else "nobody learnt from a lesson"
    return (
        "negative transfer in at most 1 of 20 pairs",
        f"{worse} of {pairs} ({told} could tell)" if pairs else nothing,
        worse * 20 <= pairs if told or worse else None,
    )
