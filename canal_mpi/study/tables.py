"""The tables of a study, for Markdown and for the page: heads, rows, and what they mean."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan

import numpy as np

from canal_mpi.results import measures as m
from canal_mpi.show import duration
from canal_mpi.study.level import Level, clearly_above
from canal_mpi.study.pairs import PARTS, Pair
from canal_mpi.study.transfer import beside
from canal_mpi.study.weigh import Study, points_of
from canal_mpi.study.weighed import Interval, Weighed

Row = list[str]
PERCENT = [f"{part:.0%}" for part in PARTS]


@dataclass(frozen=True)
class Table:
    """Rows under a title, with a few words of what they tell."""

    title: str
    about: str
    head: Row
    rows: list[Row]


def tables(study: Study) -> list[Table]:
    """All tables behind those of the scale and of the arms; without those that have no row."""
    found = [
        _seed_table(study),
        _harm_table(study),
        _difference_table(study),
        _speed_table(study),
        _exam_table(study),
        _shell_table(study),
        *(_task_table(study, title, measure) for title, measure in BY_GAME.items()),
        _points_table(study),
    ]
    return [table for table in found if table.rows]


# ── the scale and the arms ─────────────────────────────────────────────────────────────────────

SCALE_HEAD = ["game", "random play", "expert", "counts"]


def scale_rows(tasks: Sequence[str], random: Level, expert: Level) -> Iterable[Row]:
    """Random play and experts of every task."""
    above = clearly_above(expert, random)
    for i, task in enumerate(tasks):
        counts = "yes" if above[i] else "left out"
        levels = [f"{x.mean[i]:.1f} ± {x.error[i]:.1f}" for x in (random, expert)]
        yield [task, *levels, counts]


ARM_HEAD = [
    "arm",
    "seeds",
    "agents",
    "environment steps",
    "time in tasks",
    "average performance",
    "without sharing, same seeds",
    "IQM",
    "P(better at the end)",
    *(f"TA_mean({part})" for part in PERCENT),
    "forgetting",
    "clearly worse pairs",
    "lessons dropped",
]


def arm_rows(study: Study) -> Iterable[Row]:
    """What every arm cost and reached."""
    for arm in study.arms:
        yield [
            arm.label,
            str(len(arm.runs)),
            str(arm.group.agents),
            f"{arm.steps:,.0f}",
            "–" if arm.part else duration(arm.seconds),
            _range(arm.average),
            _alone(arm),
            _range(arm.iqm),
            _range(arm.improvement),
            *(_range(arm.advantage(part)) for part in PARTS),
            _range(arm.forgetting),
            _share(arm.worse.pairs),
            str(arm.dropped),
        ]


def _seed_table(study: Study) -> Table:
    """Every seed for itself, where there are several."""
    rows = []
    for seed in study.seeds:
        for arm in (arm.on([seed]) for arm in study.arms if seed in arm.seeds and not arm.part):
            ta, forgot = _number(arm.advantage(0.9)[0], 2), _number(arm.forgetting[0], 2)
            better, average = _number(arm.improvement[0], 2), _number(arm.average[0], 2)
            steps = f"{arm.steps:,.0f}"
            rows += [[str(seed), arm.label, steps, average, _alone(arm), better, ta, forgot]]
    head = ["seed", "arm", "environment steps", "average performance"]
    head += ["without sharing", "P(better at the end)", "TA_mean(90%)", "forgetting"]
    about = "Each seed for itself: arms with fewer seeds are to be compared here."
    return Table("Seed by seed", about, head, rows if len(study.seeds) > 1 else [])


def _alone(arm: Weighed) -> str:
    return _number(arm.matched[1].average[0], 2) if arm.matched else "–"


# ── what lessons did to pairs ──────────────────────────────────────────────────────────────────


def _harm_table(study: Study) -> Table:
    """Negative transfer of the arms that share."""
    head = [
        "arm",
        "agent and task, over all seeds",
        "of these could tell",
        "agent, task and seed, by their evaluations",
        "the same between two seeds without sharing",
    ]
    rows = [
        [
            arm.label,
            _share(arm.worse.pairs),
            str(arm.worse.told) if arm.worse.pairs[1] else "–",
            _share(arm.worse.runs),
            "–" if isnan(arm.worse.chance) else f"{arm.worse.chance:.0%}",
        ]
        for arm in _sharing(study)
    ]
    about = (
        "Pairs that learnt from a lesson and ended the task clearly below the same agent without "
        "sharing: by more than two standard errors. Over all seeds the error is that of runs, "
        "which differ in their training; an arm with one seed takes it from the seeds of the arm "
        "without sharing. Where it is large, little could show harm: a pair could tell where a "
        "student that plays at random would have been found. Of a single run the error is that of "
        "its evaluation alone, and then many pairs differ by chance: the last column tells how "
        "many do so without any sharing. Lessons that were dropped are not among the pairs."
    )
    return Table("Negative transfer", about, head, rows)


def _difference_table(study: Study) -> Table:
    """By game: students minus the same agents without sharing."""
    rows = []
    for arm in _sharing(study):
        both = beside(arm.pairs, arm.base.pairs if arm.base else [])
        gains = [(one.task, one.learnt - other.learnt) for one, other in both]
        rows.append([arm.label, *_by_game(gains, study.comparison.tasks)])
    about = (
        "Score right after the task of pairs that learnt from a lesson, minus that of the same "
        "agent, task and seed without sharing: mean and standard error over agents and seeds."
    )
    return Table("What lessons changed", about, ["arm", *study.comparison.tasks], rows)


def _sharing(study: Study) -> list[Weighed]:
    return [arm for arm in study.arms if arm.base is not None and arm.group.shares]


# ── how soon, and what it takes ────────────────────────────────────────────────────────────────


def _speed_table(study: Study) -> Table:
    """How soon pairs of agent and task reach a part of the expert's score."""
    head = [
        "arm",
        "pairs",
        *(f"reach {part}" for part in PERCENT),
        *(f"end at {part}" for part in PERCENT),
        *(f"own steps to {part}" for part in PERCENT),
        *(f"seconds to {part}" for part in PERCENT),
    ]
    rows = []
    for arm in study.arms:
        found = [arm.reached(k) for k in range(len(PARTS))]
        rows.append(
            [
                arm.label,
                str(len(arm.pairs)),
                *(f"{there}" for there, _, _ in found),
                *(f"{arm.ended_at(part)}" for part in PARTS),
                *(_number(steps, 0, "not") for _, steps, _ in found),
                *("–" if arm.part else _number(seconds, 0, "not") for _, _, seconds in found),
            ]
        )
    about = (
        "Pairs of agent and task: how many reach it in any evaluation after they began to learn "
        "(more looks, more luck), how many end the task with it; medians of own steps and of wall "
        "time on the task until it is reached. `not`: less than half of the pairs got there."
    )
    return Table("Steps and time to a part of the expert's score", about, head, rows)


def _exam_table(study: Study) -> Table:
    """What sharing costs in evaluations."""
    head = ["arm", "environment steps", "evaluations that steer", "their steps, estimated"]
    head += [f"TA_mean({part}) with them" for part in PERCENT]
    rows = [
        [
            arm.label,
            f"{arm.steps:,.0f}",
            _number(arm.exams[0], 0),
            _number(arm.exams[1], 0),
            *(_number(arm.advantage_with_exams(part), 2) for part in PARTS),
        ]
        for arm in _sharing(study)
    ]
    about = (
        "By evaluations agents that share admit a lesson, end its study and choose among donors; "
        "environment steps and TA_mean don't count them. Here are all at tasks with a lesson and "
        "the last one of every other task, a run; an episode is taken to be as long as those of "
        "training on the task."
    )
    return Table("Evaluations that steer", about, head, rows)


def _shell_table(study: Study) -> Table:
    """ShELL's measures, and what the lessons weighed."""
    head = ["arm", "ICR", "ILA", "TLA", "MB of lessons", "of games that count"]
    head += ["HNS points gained", "MB a point of HNS"]
    rows = []
    for arm in study.arms:
        instant, total = arm.learning_advantage
        points, moved = 100 * arm.hns, arm.megabytes_that_count
        lessons = [
            _number(arm.megabytes, 1),
            _number(moved, 1),
            _number(points, 0),
            _number(moved / points if points > 0 else float("nan"), 3),
        ]
        row = [arm.label, *(_number(value, 2) for value in (arm.icr, instant, total))]
        rows.append([*row, *(lessons if arm.megabytes else ["–"] * len(lessons))])
    about = (
        "ILA and TLA are over single agents, which are those of the arm without sharing: for that "
        "arm itself they tell what the best of several agents are worth. Points gained, and MB a "
        "point, are of the games that count."
    )
    return Table("All agents together (ShELL), and what lessons weigh", about, head, rows)


# ── game by game ───────────────────────────────────────────────────────────────────────────────

BY_GAME: dict[str, Callable[[Pair], float]] = {
    "Game by game, right after the task": lambda pair: pair.learnt,
    "Game by game, lost from then to the end": lambda pair: pair.learnt - pair.final,
}


def _task_table(study: Study, title: str, measure: Callable[[Pair], float]) -> Table:
    """Mean of something by arm and task, with its standard error over agents and seeds."""
    tasks = study.comparison.tasks
    rows = []
    for arm in study.arms:
        values = [(pair.task, measure(pair)) for pair in arm.pairs]
        rows.append([arm.label, *_by_game(values, tasks)])
    return Table(title, "Mean and standard error over agents and seeds.", ["arm", *tasks], rows)


def _points_table(study: Study) -> Table:
    """All games, also those that don't count, in their own points."""
    rows = []
    for label, runs in study.whole.items():
        found = [points_of(runs, task) for task in study.tasks]
        rows.append([label, *(f"{_number(a, 1)} → {_number(b, 1)}" for a, b in found)])
    for label, level in (("random play", study.random), ("experts", study.expert)):
        rows.append([label, *(_number(float(value), 1) for value in level.mean)])
    about = (
        "Also those that don't count: mean points of all agents and seeds right after the task → "
        "at the end of the run."
    )
    return Table("All games, in points", about, ["arm", *study.tasks], rows)


def _by_game(values: Sequence[tuple[str, float]], tasks: Sequence[str]) -> Row:
    """A cell for every task: mean and standard error of its values."""
    return [_with_error([value for name, value in values if name == task]) for task in tasks]


def _with_error(values: Sequence[float]) -> str:
    error = np.std(values) / np.sqrt(len(values) - 1) if len(values) > 1 else np.nan
    return f"{_number(m.mean(values), 2)} ± {_number(float(error), 2)}" if values else "–"


def _share(count: tuple[int, int]) -> str:
    return f"{count[0]} of {count[1]}" if count[1] else "–"


def _number(value: float, digits: int, endless: str = "∞") -> str:
    return f"{value:,.{digits}f}" if isfinite(value) else "–" if isnan(value) else endless


def _range(values: Interval) -> str:
    value, low, high = values
    if isnan(value):
        return "–"
    ends = f" ({_number(low, 2)} – {_number(high, 2)})" if isfinite(low) else ""
    return f"{_number(value, 2)}{ends}"
