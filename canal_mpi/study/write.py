"""What a study leaves: `study.h5`, a page that compares the arms, and a summary in Markdown."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.cluster.marker import status_of
from canal_mpi.report import page, parts, versus
from canal_mpi.report.style import FIGURE, LIGHT
from canal_mpi.report.svg import stand_alone
from canal_mpi.results import measures as m
from canal_mpi.results.files import write_whole
from canal_mpi.results.hdf5 import image, write_dataset
from canal_mpi.results.reading import load
from canal_mpi.schema import TEXT
from canal_mpi.show import duration
from canal_mpi.study.arms import EXPERT, RANDOM, about
from canal_mpi.study.weigh import PARTS, Level, Pair, Study, Weighed, clearly_above, goals, weigh
from canal_mpi.sweep.engine import FINISHED
from canal_mpi.sweep.grid import Point

PICTURE = "progress.svg"
Row = list[str]
Interval = tuple[float, float, float]


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write what the finished runs tell; a line for each file, or why there is none."""
    arms: dict[str, list[Any]] = {}
    for point in points:
        if status_of(folder / point.name) == FINISHED:
            arms.setdefault(point.settings["arm"], []).append(load(folder / point.name))
    experts, random = arms.pop(EXPERT, []), arms.pop(RANDOM, [])
    if not (arms and experts and random):
        return ["Nothing to compare yet: that takes random play, an expert and one arm."]
    study = weigh(arms, experts, random)
    if study is None:
        return [
            "No expert clearly beats random play on any task, so nothing can be weighed: give more "
            "--frames, or more evaluation.episodes.",
            "",
            *_table(SCALE_HEAD, scale_rows(experts[0].tasks, Level.of(random), Level.of(experts))),
        ]
    left = [p.name for p in points if status_of(folder / p.name) != FINISHED]
    text = summary(study, points[0], left)
    write_whole(folder / "study.h5", image(lambda file: _fill(file, study)))
    write_whole(folder / "summary.md", text.encode())
    write_whole(folder / PICTURE, _picture(study).encode())
    write_whole(folder / "report.html", _page(study, left).encode())
    return [f"Results: {folder / 'study.h5'}", f"Report:  {folder / 'report.html'}", "", text]


# ── tables, for Markdown and for the page ──────────────────────────────────────────────────────


def scale_rows(tasks: Sequence[str], random: Level, expert: Level) -> Iterable[Row]:
    """Random play and experts of every task."""
    above = clearly_above(expert, random)
    for i, task in enumerate(tasks):
        counts = "yes" if above[i] else "left out"
        levels = [f"{x.mean[i]:.1f} ± {x.error[i]:.1f}" for x in (random, expert)]
        yield [task, *levels, counts]


SCALE_HEAD = ["game", "random play", "expert", "counts"]


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
            _range(arm.iqm),
            _range(arm.improvement),
            *(_range(arm.advantage(part)) for part in PARTS),
            _range(arm.forgetting),
            _share(arm.worse.pairs),
            str(arm.dropped),
        ]


ARM_HEAD = [
    "arm",
    "seeds",
    "agents",
    "environment steps",
    "time in tasks",
    "average performance",
    "IQM",
    "P(better than none at the end)",
    *(f"TA_mean({part:.0%})" for part in PARTS),
    "forgetting",
    "clearly worse pairs",
    "lessons dropped",
]


def speed_rows(study: Study) -> Iterable[Row]:
    """How soon pairs of agent and task reach a part of the expert's score."""
    for arm in study.arms:
        found = [arm.reached(k) for k in range(len(PARTS))]
        yield [
            arm.label,
            str(len(arm.pairs)),
            *(f"{there}" for there, _, _ in found),
            *(_number(steps, 0) for _, steps, _ in found),
            *("–" if arm.part else _number(seconds, 0) for _, _, seconds in found),
        ]


SPEED_HEAD = [
    "arm",
    "pairs",
    *(f"reach {part:.0%}" for part in PARTS),
    *(f"own steps to {part:.0%}" for part in PARTS),
    *(f"seconds to {part:.0%}" for part in PARTS),
]


def shell_rows(study: Study) -> Iterable[Row]:
    """ShELL's measures, and what the lessons weighed."""
    for arm in study.arms:
        instant, total = arm.learning_advantage
        points = 100 * arm.hns
        each = arm.megabytes / points if points > 0 else float("nan")
        yield [
            arm.label,
            _number(arm.icr, 2),
            _number(instant, 2),
            _number(total, 2),
            _number(arm.megabytes, 1) if arm.megabytes else "–",
            _number(points, 0) if arm.megabytes else "–",
            _number(each, 3) if arm.megabytes else "–",
        ]


SHELL_HEAD = [
    "arm",
    "ICR",
    "ILA",
    "TLA",
    "MB of lessons",
    "HNS points gained",
    "MB a point of HNS",
]


def harm_rows(study: Study) -> Iterable[Row]:
    """Negative transfer of the arms that share."""
    for arm in study.arms:
        if arm.base is not None and arm.group.shares:
            chance = arm.worse.chance
            found = ["–" if np.isnan(chance) else f"{chance:.0%}"]
            yield [arm.label, _share(arm.worse.pairs), _share(arm.worse.runs), *found]


HARM_HEAD = [
    "arm",
    "agent and task, over all seeds",
    "agent, task and seed, by their evaluations",
    "the same between two seeds without sharing",
]
HARM = (
    "Pairs that learnt from a lesson and ended the task clearly below the same agent without "
    "sharing: by more than two standard errors. Over all seeds the error is that of runs, which "
    "differ in their training (with one seed it is not known); of a single run it is that of its "
    "evaluation alone, and then many pairs differ by chance: the last column tells how many do so "
    "without any sharing."
)


def task_rows(study: Study, measure: Callable[[Pair], float]) -> Iterable[Row]:
    """Mean of something by arm and task, with its standard error over agents and seeds."""
    for arm in study.arms:
        by_task = [
            np.array([measure(pair) for pair in arm.pairs if pair.task == task])
            for task in study.comparison.tasks
        ]
        errors = [x.std() / np.sqrt(max(len(x) - 1, 1)) if len(x) else np.nan for x in by_task]
        means = [m.mean(x) for x in by_task]
        yield [
            arm.label,
            *(f"{_number(a, 2)} ± {_number(b, 2)}" for a, b in zip(means, errors, strict=True)),
        ]


BY_GAME: dict[str, Callable[[Pair], float]] = {
    "Game by game, right after the task": lambda pair: pair.learnt,
    "Game by game, lost from then to the end": lambda pair: pair.learnt - pair.final,
}


def _share(count: tuple[int, int]) -> str:
    return f"{count[0]} of {count[1]}" if count[1] else "–"


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if isfinite(value) else "–" if np.isnan(value) else "not"


def _range(values: Interval) -> str:
    value, low, high = values
    if np.isnan(value):
        return "–"
    return f"{value:.2f} ({low:.2f} – {high:.2f})" if isfinite(low) else f"{value:.2f}"


# ── Markdown ───────────────────────────────────────────────────────────────────────────────────


def summary(study: Study, point: Point, left: Sequence[str]) -> str:
    """The study on one page of Markdown."""
    job, tasks = point.job, study.comparison.tasks
    counted = f"{len(tasks)} of {len(study.tasks)} games count" if not study.counts.all() else ""
    frames = next(iter(study.arms)).runs[0].run.setting("train.frames")
    lines = [
        "# Does sharing pay?",
        "",
        f"{len(study.tasks)} tasks, {frames:,} steps a task, seeds "
        f"{', '.join(map(str, study.seeds))}. Scores: 0 is random play, 1 a single-task expert of "
        "the same steps; a task that was not learnt yet counts 0. Intervals: 95 %, bootstrap over "
        "seeds, then agents of each; with one seed they tell of agents alone.",
        *([f"Not finished yet: {', '.join(left)}."] if left else []),
        "",
        *_goal_lines(study),
        "## The scale",
        "",
        f"Mean score and standard error ({study.random.episodes} episodes at random, "
        f"{study.expert.episodes} of experts, evaluation episodes of at most "
        f"{job.evaluation.max_steps:,} steps). A game counts where the experts beat random play by "
        "more than two standard errors and by more than episodes scatter (their standard "
        f"deviation). {counted}".strip(),
        "",
        *_table(SCALE_HEAD, scale_rows(study.tasks, study.random, study.expert)),
        "## The arms",
        "",
        *(f"- `{arm.label}`: {about(arm.label)}." for arm in study.arms),
        "",
        *_table(ARM_HEAD, arm_rows(study)),
        f"![Mean score over agents and tasks against environment steps, by arm]({PICTURE})",
        "",
        "Environment steps: of all agents together. "
        f"TA_mean is 0 where agents that share never get there.{_note_on_parts(study)}",
        "",
        *_harm_lines(study),
        "## Steps and time to a part of the expert's score",
        "",
        "Medians over pairs of agent and task, of own steps and of wall time on the task; "
        "`not`: less than half of the pairs got there.",
        "",
        *_table(SPEED_HEAD, speed_rows(study)),
        "## All agents together (ShELL), and what lessons weigh",
        "",
        "ILA and TLA are over single agents, which are those of the arm without sharing.",
        "",
        *_table(SHELL_HEAD, shell_rows(study)),
    ]
    for title, measure in BY_GAME.items():
        lines += [f"## {title}", "", "Mean and standard error over agents and seeds.", ""]
        lines += _table(["arm", *tasks], task_rows(study, measure))
    return "\n".join(lines).rstrip() + "\n"


def _harm_lines(study: Study) -> list[str]:
    rows = list(harm_rows(study))
    return ["## Negative transfer", "", HARM, "", *_table(HARM_HEAD, rows)] if rows else []


def _note_on_parts(study: Study) -> str:
    names = " and ".join(f"`{arm.label}`" for arm in study.arms if arm.part)
    words = "are the first agents of `none`: those that don't share are the same at any number"
    return f" {names} {words}." if names else ""


def _goal_lines(study: Study) -> list[str]:
    rows = [[want, found, _verdict(met)] for want, found, met in goals(study)]
    return [*_table(["goal", "found", ""], rows)] if rows else []


def _verdict(met: bool | None) -> str:
    return "not known" if met is None else "reached" if met else "missed"


def _table(head: Sequence[str], rows: Iterable[Row]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _picture(study: Study) -> str:
    """How fast the agents of each arm get better, as a file of its own."""
    figure = versus.progress(study.comparison, names=True)
    return stand_alone(figure.drawing, LIGHT, FIGURE)


# ── the page ───────────────────────────────────────────────────────────────────────────────────


def _page(study: Study, left: Sequence[str]) -> str:
    cards = "".join(
        parts.card(want, found, _verdict(met), "" if met is None else "good" if met else "bad")
        for want, found, met in goals(study)
    )
    about_scale = f"Scores: {study.comparison.scale.about}. A task not learnt yet counts 0."
    body = [
        "<h1>Does sharing pay?</h1>",
        f'<p class="quiet">{escape(about_scale)}</p>',
        parts.note(f"Not finished yet: {', '.join(left)}.") if left else "",
        f'<div class="cards">{cards}</div>' if cards else "",
        parts.table("The scale", SCALE_HEAD, scale_rows(study.tasks, study.random, study.expert)),
        parts.table("The arms", ARM_HEAD, arm_rows(study), "arms"),
        *_harm_parts(study),
        parts.table(
            "Medians over pairs of agent and task; `not`: less than half got there",
            SPEED_HEAD,
            speed_rows(study),
        ),
        parts.table("All agents together, and what lessons weigh", SHELL_HEAD, shell_rows(study)),
        *(
            parts.table(title, ["arm", *study.comparison.tasks], task_rows(study, measure))
            for title, measure in BY_GAME.items()
        ),
        page.compared(study.comparison),
    ]
    return page.document("Does sharing pay?", "".join(body))


def _harm_parts(study: Study) -> list[str]:
    rows = list(harm_rows(study))
    words = f'<p class="quiet">{escape(HARM)}</p>'
    return [parts.table("Negative transfer", HARM_HEAD, rows), words] if rows else []


# ── HDF5 ───────────────────────────────────────────────────────────────────────────────────────


def _fill(file: Any, study: Study) -> None:
    file.attrs["kind"] = "study"
    file.attrs["description"] = (
        "A study of canal-mpi: does sharing pay? Row k of a group's columns."
    )
    scale: dict[str, tuple[list[Any], str]] = {
        "task": (study.tasks, "task"),
        "random": (study.random.mean.tolist(), "mean score of random play"),
        "random_error": (study.random.error.tolist(), "its standard error"),
        "expert": (study.expert.mean.tolist(), "mean score of single-task experts"),
        "expert_error": (study.expert.error.tolist(), "its standard error"),
        "counts": (study.counts.tolist(), "whether experts clearly beat random play"),
    }
    _columns(file.require_group("scale"), scale)
    _columns(file.require_group("arms"), _arm_columns(study.arms))
    pairs = [pair for arm in study.arms for pair in arm.pairs]
    columns: dict[str, tuple[list[Any], str]] = {
        name: ([getattr(pair, name) for pair in pairs], words)
        for name, words in {
            "arm": "arm",
            "seed": "seed of the run",
            "agent": "agent",
            "task": "task",
            "lesson": "whether it was learnt from a lesson",
            "own_steps": "own training steps on the task",
            "before": "normalised score before the lesson (NaN: no lesson)",
            "learnt": "normalised score right after the task",
            "final": "normalised score at the end of the run",
            "gained": "human-normalised score since before the lesson",
        }.items()
    }
    for k, part in enumerate(PARTS):
        words = f"to {part:.0%} of the expert's score (NaN: not reached)"
        columns[f"steps_to_{part:.0%}"] = ([p.steps_to[k] for p in pairs], f"own steps {words}")
        columns[f"seconds_to_{part:.0%}"] = ([p.seconds_to[k] for p in pairs], f"seconds {words}")
    _columns(file.require_group("pairs"), columns)


def _arm_columns(arms: Sequence[Weighed]) -> dict[str, tuple[list[Any], str]]:
    found: dict[str, tuple[list[Any], str]] = {
        "arm": ([arm.label for arm in arms], "arm"),
        "runs": ([len(arm.runs) for arm in arms], "runs, each with its own seed"),
        "agents": ([arm.group.agents for arm in arms], "agents of a run"),
        "env_steps": ([arm.steps for arm in arms], "environment steps of all agents of a run"),
        "seconds": ([arm.seconds for arm in arms], "wall time inside tasks, slowest agent"),
        "icr": ([arm.icr for arm in arms], "sum over tasks of the best agent's score at the end"),
        "ila": ([arm.learning_advantage[0] for arm in arms], "ICR over a single agent's"),
        "tla": ([arm.learning_advantage[1] for arm in arms], "TPOT over a single agent's"),
        "worse": (
            [arm.worse.pairs[0] for arm in arms],
            "pairs of agent and task clearly worse than without sharing, over all seeds",
        ),
        "lesson_pairs": ([arm.worse.pairs[1] for arm in arms], "of so many that had a lesson"),
        "worse_runs": (
            [arm.worse.runs[0] for arm in arms],
            "pairs of single runs clearly worse, by the error of their evaluations",
        ),
        "lesson_runs": ([arm.worse.runs[1] for arm in arms], "of so many that had a lesson"),
        "worse_by_chance": (
            [arm.worse.chance for arm in arms],
            "part of pairs that differ so between two seeds without sharing",
        ),
        "dropped": ([arm.dropped for arm in arms], "tasks whose lessons the admission refused"),
        "megabytes": ([arm.megabytes for arm in arms], "lessons of a run"),
        "hns": ([arm.hns for arm in arms], "human-normalised score gained with lessons, of a run"),
    }
    ranges: dict[str, tuple[list[Interval], str]] = {
        "average": ([arm.average for arm in arms], "mean score at the end"),
        "iqm": ([arm.iqm for arm in arms], "interquartile mean at the end"),
        "forgetting": ([arm.forgetting for arm in arms], "score lost since the task"),
        "improvement": ([arm.improvement for arm in arms], "P(better than without sharing)"),
    }
    for part in PARTS:
        values = [arm.advantage(part) for arm in arms]
        ranges[f"ta_mean_{part:.0%}"] = (values, f"TA_mean({part:.0%})")
    return found | {n: (list(v), f"{w}: value, low, high (95 %)") for n, (v, w) in ranges.items()}


def _columns(group: Any, columns: dict[str, tuple[list[Any], str]]) -> None:
    for name, (values, words) in columns.items():
        text = bool(values) and isinstance(values[0], str)
        column = (
            np.array([v.encode()[:64] for v in values], dtype=TEXT) if text else np.array(values)
        )
        write_dataset(group, name.replace("%", ""), column, description=words)
