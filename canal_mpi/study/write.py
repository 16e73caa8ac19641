"""What a study leaves: `study.h5`, a page that compares the arms, and a summary in Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.cluster.marker import status_of
from canal_mpi.config import from_toml
from canal_mpi.errors import CanalError
from canal_mpi.report import page, parts, versus
from canal_mpi.report.style import FIGURE, LIGHT
from canal_mpi.report.svg import stand_alone
from canal_mpi.results.files import write_whole
from canal_mpi.results.hdf5 import image, write_dataset
from canal_mpi.results.reading import Run, load
from canal_mpi.schema import TEXT
from canal_mpi.study.arms import DEFAULT, EXPERT, NONE, RANDOM, about
from canal_mpi.study.level import Level
from canal_mpi.study.pairs import PARTS
from canal_mpi.study.tables import ARM_HEAD, SCALE_HEAD, Row, arm_rows, scale_rows, tables
from canal_mpi.study.weigh import Study, goals, seeds_of_goals, weigh
from canal_mpi.study.weighed import Interval, Weighed
from canal_mpi.sweep.engine import FINISHED
from canal_mpi.sweep.folder import what_differs
from canal_mpi.sweep.grid import Point

PICTURE = "progress.svg"
TITLE = "# Does sharing pay?"
HOPELESS = (
    "No expert clearly beats random play on any task, so nothing can be weighed: give more "
    "--frames, or more evaluation.episodes."
)


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write what the finished runs tell; a line for each file, or why there is none."""
    arms: dict[str, list[Run]] = {}
    said: list[str] = []
    for point in points:
        if status_of(folder / point.name) == FINISHED:
            run = load(folder / point.name)
            if words := _another(run, point):
                said.append(words)
            else:
                arms.setdefault(point.settings["arm"], []).append(run)
    experts, random = arms.pop(EXPERT, []), arms.pop(RANDOM, [])
    if not (arms and experts and random):
        return [*said, "Nothing to compare yet: that takes random play, an expert and one arm."]
    study = weigh(arms, experts, random)
    if study is None:
        rows = scale_rows(experts[0].tasks, Level.of(random), Level.of(experts))
        text = "\n".join([TITLE, "", HOPELESS, "", *_table(SCALE_HEAD, rows)])
        write_whole(folder / "summary.md", text.encode())
        for name in ("study.h5", PICTURE, "report.html"):  # of runs that are no longer there
            (folder / name).unlink(missing_ok=True)
        return [*said, f"Results: {folder / 'summary.md'}", "", text]
    left = [p.name for p in points if status_of(folder / p.name) != FINISHED]
    text = summary(study, points[0], left)
    write_whole(folder / "study.h5", image(lambda file: _fill(file, study)))
    write_whole(folder / "summary.md", text.encode())
    write_whole(folder / PICTURE, _picture(study).encode())
    write_whole(folder / "report.html", _page(study, points[0], left).encode())
    said += [f"Results: {folder / 'study.h5'}", f"Report:  {folder / 'report.html'}"]
    return [*said, "", text]


def _another(run: Run, point: Point) -> str:
    """Why a run does not count: its run.h5 is of another job than the point's."""
    try:
        words = what_differs(from_toml(str(run.attributes.get("job", ""))), len(run.agents), point)
    except CanalError as error:
        return f"{point.name} is left out: the job in its run.h5 can't be read: {error}"
    again = "remove that folder and go on with --resume"
    left = f"{point.name} is left out: its run.h5 is of another job"
    return f"{left} ({words}); {again}." if words else ""


# ── Markdown ───────────────────────────────────────────────────────────────────────────────────


def summary(study: Study, point: Point, left: Sequence[str]) -> str:
    """The study on one page of Markdown."""
    lines = [
        TITLE,
        "",
        _about_study(study),
        *([f"Not finished yet: {', '.join(left)}."] if left else []),
        "",
        *_goal_lines(study),
        "## The scale",
        "",
        _about_scale(study, point),
        "",
        *_table(SCALE_HEAD, scale_rows(study.tasks, study.random, study.expert)),
        "## The arms",
        "",
        *(f"- {words}" for words in _each_arm(study)),
        "",
        *_table(ARM_HEAD, arm_rows(study)),
        f"![Mean score over agents and tasks against environment steps]({PICTURE})",
        "",
        _about_arms(study),
        "",
    ]
    for table in tables(study):
        lines += [f"## {table.title}", "", table.about, "", *_table(table.head, table.rows)]
    return "\n".join(lines).rstrip() + "\n"


def _about_study(study: Study) -> str:
    frames = next(iter(study.arms)).runs[0].run.setting("train.frames")
    return (
        f"{len(study.tasks)} tasks, {frames:,} steps a task, seeds "
        f"{', '.join(map(str, study.seeds))}. Scores: 0 is random play, 1 a single-task expert of "
        "the same steps; a task that was not learnt yet counts 0. Intervals: 95 %, bootstrap over "
        "seeds, then agents of each; with one seed they tell of agents alone."
    )


def _about_scale(study: Study, point: Point) -> str:
    kept, all_ = len(study.comparison.tasks), len(study.tasks)
    return (
        f"Mean score and standard error ({study.random.episodes} episodes at random, "
        f"{study.expert.episodes} of experts, evaluation episodes of at most "
        f"{point.job.evaluation.max_steps:,} steps); the error is that of episodes or that of "
        "runs, whichever is larger. A game counts where the experts beat random play by more than "
        "two standard errors and by more than episodes scatter (their standard deviation). "
        "Intervals below take this scale as exact."
        f"{f' {kept} of {all_} games count.' if kept < all_ else ''}"
    )


def _each_arm(study: Study) -> list[str]:
    return [f"`{arm.label}`: {about(arm.label)}." for arm in study.arms]


def _about_arms(study: Study) -> str:
    names = " and ".join(f"`{arm.label}`" for arm in study.arms if arm.part)
    words = "are the first agents of `none`: those that don't share are the same at any number"
    return (
        "Environment steps: of all agents together, in training. An arm is compared with the one "
        "without sharing on the seeds that both have. TA_mean is 0 where agents that share never "
        f"get there.{f' {names} {words}.' if names else ''}"
    )


def _goal_lines(study: Study) -> list[str]:
    rows = [[want, found, _verdict(met)] for want, found, met in goals(study)]
    return [*_table(["goal", f"found, {seeds_of_goals(study)}", ""], rows)] if rows else []


def _verdict(met: bool | None) -> str:
    return "not known" if met is None else "reached" if met else "missed"


def _table(head: Sequence[str], rows: Iterable[Row]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return [*lines, *(f"| {' | '.join(row)} |" for row in cells), ""]


def _picture(study: Study) -> str:
    """How fast agents get better, as a file of its own: the main arms, where there are any."""
    main = [group for group in study.comparison.groups if group.label in (NONE, DEFAULT)]
    shown = replace(study.comparison, groups=main or study.comparison.groups)
    figure = versus.progress(shown, names=True)
    return stand_alone(figure.drawing, LIGHT, FIGURE)


# ── the page ───────────────────────────────────────────────────────────────────────────────────


def _page(study: Study, point: Point, left: Sequence[str]) -> str:
    cards = "".join(
        parts.card(want, found, _verdict(met), "" if met is None else "good" if met else "bad")
        for want, found, met in goals(study)
    )
    shown = {group.label for group in study.comparison.groups}
    others = [arm.label for arm in study.arms if arm.label not in shown]
    below = f"Side by side: {', '.join(sorted(shown))}; others have other seeds or agents."
    body = [
        "<h1>Does sharing pay?</h1>",
        _quiet(_about_study(study)),
        parts.note(f"Not finished yet: {', '.join(left)}.") if left else "",
        f'<div class="cards">{cards}</div>' if cards else "",
        _quiet(f"The goals are told by {seeds_of_goals(study)}.") if cards else "",
        parts.table("The scale", SCALE_HEAD, scale_rows(study.tasks, study.random, study.expert)),
        _quiet(_about_scale(study, point)),
        parts.table("The arms", ARM_HEAD, arm_rows(study), "arms"),
        _quiet(_about_arms(study)),
        *(_quiet(words) for words in _each_arm(study)),
        *(
            parts.table(table.title, table.head, table.rows) + _quiet(table.about)
            for table in tables(study)
        ),
        _quiet(below) if others else "",
        page.compared(study.comparison),
    ]
    return page.document("Does sharing pay?", "".join(body))


def _quiet(words: str) -> str:
    """A paragraph under a table; Markdown's marks are left out."""
    return f'<p class="quiet">{escape(words.replace("`", ""))}</p>'


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
        "lesson_pairs": (
            [arm.worse.pairs[1] for arm in arms],
            "pairs of agent and task that had a lesson in some seed; of them worse counts",
        ),
        "worse_runs": (
            [arm.worse.runs[0] for arm in arms],
            "pairs of single runs clearly worse, by the error of their evaluations",
        ),
        "lesson_runs": (
            [arm.worse.runs[1] for arm in arms],
            "pairs of single runs that had a lesson; of them worse_runs counts",
        ),
        "worse_by_chance": (
            [arm.worse.chance for arm in arms],
            "part of pairs that differ so between two seeds without sharing",
        ),
        "worse_told": (
            [arm.worse.told for arm in arms],
            "of lesson_pairs, where a student that plays at random would have been found",
        ),
        "exams": ([arm.exams[0] for arm in arms], "evaluations of a run that steer its agents"),
        "exam_steps": (
            [arm.exams[1] for arm in arms],
            "environment steps of evaluations that steer, of a run, estimated",
        ),
        "dropped": ([arm.dropped for arm in arms], "tasks whose lessons the admission refused"),
        "megabytes": ([arm.megabytes for arm in arms], "lessons of a run"),
        "megabytes_that_count": (
            [arm.megabytes_that_count for arm in arms],
            "lessons of a run, of tasks that count",
        ),
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
        found[f"ta_mean_{part:.0%}_with_exams"] = (
            [arm.advantage_with_exams(part) for arm in arms],
            f"TA_mean({part:.0%}) if evaluations that steer counted",
        )
    return found | {n: (list(v), f"{w}: value, low, high (95 %)") for n, (v, w) in ranges.items()}


def _columns(group: Any, columns: dict[str, tuple[list[Any], str]]) -> None:
    for name, (values, words) in columns.items():
        text = bool(values) and isinstance(values[0], str)
        column = (
            np.array([v.encode()[:64] for v in values], dtype=TEXT) if text else np.array(values)
        )
        write_dataset(group, name.replace("%", ""), column, description=words)
