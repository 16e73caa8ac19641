"""Figures that set several groups of runs beside each other."""

from collections.abc import Sequence

import numpy as np

from canal_mpi.report import svg
from canal_mpi.report.figures import Figure
from canal_mpi.report.svg import Axes, colour, number, path, picture, tag
from canal_mpi.results import measures as m
from canal_mpi.results.compare import PARTS, Comparison, Group
from canal_mpi.types import Array

DRAWS = 400


def progress(comparison: Comparison, names: bool = False) -> Figure:
    """Mean score over all agents and tasks against the environment steps of all agents.

    With `names` it says itself which group has which colour, for a file of its own.
    """
    groups = [group for group in comparison.groups if group.whole]
    lines = [(group, *group.progress()) for group in groups]
    bands = [band(scores, group.agents) for group, _, scores in lines]
    values = [float(v) for pair in bands for side in pair for v in side]
    most = max((float(steps[-1]) for _, steps, _ in lines), default=1.0)
    axes = Axes(46, 22, 480, 230, (0, most), svg.span(values))
    parts = [axes.frame("environment steps of all agents", "mean score over agents and tasks")]
    told = []
    for (group, steps, scores), (low, high) in zip(lines, bands, strict=True):
        k = comparison.groups.index(group)
        there = [axes.at(float(x), float(y)) for x, y in zip(steps, high, strict=True)]
        back = [axes.at(float(x), float(y)) for x, y in zip(steps, low, strict=True)]
        parts.append(path([*there, *back[::-1]], fill=colour(k), opacity=0.16))
        mean = scores.mean(axis=0)
        points = [axes.at(float(x), float(y)) for x, y in zip(steps, mean, strict=True)]
        parts.append(path(points, stroke=colour(k), stroke_width=2.4))
        parts += [tag("circle", cx=x, cy=y, r=3, fill=colour(k), cls="mark") for x, y in points]
        told.append(
            f"{group.label}: {number(float(mean[-1]))} after {number(float(steps[-1]))} steps"
        )
    if names:
        parts += _names([(group.label, comparison.groups.index(group)) for group, *_ in lines])
    drawing = picture(540, 290, "Score against steps", "; ".join(told) or "nothing known", *parts)
    words = (
        "Mean over agents and tasks after each round; 95 % bootstrap bands over runs, then agents."
    )
    return Figure("progress", "How fast agents get better", drawing, words)


def _names(groups: Sequence[tuple[str, int]]) -> list[str]:
    """Names of groups in the lower right corner, each beside its colour."""
    found = []
    for row, (name, k) in enumerate(reversed(groups)):
        y = 244.0 - 15 * row
        found.append(tag("rect", x=512, y=y - 9, width=10, height=10, fill=colour(k)))
        found.append(svg.text(506, y, name, "end", cls="small"))
    return found


def band(scores: Array, crowd: int) -> tuple[Array, Array]:
    """95 % interval of the mean over rows, for every column: runs are drawn, then their agents."""
    rng = np.random.Generator(np.random.PCG64(0))
    whole = crowd if len(scores) % crowd == 0 else 1  # runs of several sizes: agents alone
    draws = m.rows_of_runs(len(scores), whole, rng, (DRAWS,))
    low, high = np.percentile(scores[draws].mean(axis=1), [2.5, 97.5], axis=0)
    return low, high


def advantage(comparison: Comparison) -> Figure:
    """TA_mean(p) of every group that is compared with the baseline."""
    lines = []
    for group in comparison.groups:
        if group is not comparison.baseline:
            values = [comparison.advantage(group, part) for part in PARTS]
            lines.append((group, values))
    known = [v for _, values in lines for v in values if np.isfinite(v)]
    axes = Axes(46, 22, 330, 230, (0, 100), (0.0, max([1.5, *known]) * 1.08))
    parts = [axes.frame("p: % of what agents without sharing reach", "TA_mean(p)")]
    one = [axes.at(0, 1), axes.at(100, 1)]
    parts.append(path(one, stroke="var(--fg)", stroke_width=1, stroke_dasharray="4 4"))
    told = []
    for group, values in lines:
        k = comparison.groups.index(group)
        pairs = zip(PARTS, values, strict=True)
        points = [axes.at(100 * p, v) for p, v in pairs if np.isfinite(v)]
        parts.append(path(points, stroke=colour(k), stroke_width=2.4))
        parts += [tag("circle", cx=x, cy=y, r=3, fill=colour(k)) for x, y in points]
        told.append(f"{group.label}: {number(values[-1])} at 100 %")
    drawing = picture(392, 290, "Time advantage", "; ".join(told) or "nothing known", *parts)
    words = (
        "Environment steps without sharing over steps with it, until the mean score reaches p %. "
        "Above the dashed line sharing is faster; a point is missing where p % was never reached."
    )
    return Figure("advantage", "Time advantage of sharing", drawing, words)


def task_scores(comparison: Comparison) -> list[Figure]:
    """For each task: the mean learning curve of every group."""
    return [_task(comparison, i) for i in range(len(comparison.tasks))]


def _task(comparison: Comparison, i: int) -> Figure:
    task = comparison.tasks[i]
    curves = [(group, *_spread(group, i)) for group in comparison.groups]
    values = [float(v) for _, *triple in curves for side in triple for v in side]
    budget = max(int(g.runs[0].run.setting("train.frames", 1)) for g in comparison.groups)
    axes = Axes(46, 22, 250, 120, (0, budget), svg.span(values))
    parts, told = [axes.frame("own steps on the task", "normalised score")], []
    for group, mean, low, high in curves:
        if np.isnan(mean).all():
            continue
        k, steps = comparison.groups.index(group), np.linspace(0, budget, len(mean))
        there = [axes.at(float(x), float(y)) for x, y in zip(steps, high, strict=True)]
        back = [axes.at(float(x), float(y)) for x, y in zip(steps, low, strict=True)]
        parts.append(path([*there, *back[::-1]], fill=colour(k), opacity=0.14))
        line = [axes.at(float(x), float(y)) for x, y in zip(steps, mean, strict=True)]
        parts.append(path(line, stroke=colour(k), stroke_width=2))
        told.append(f"{group.label} ends at {number(float(mean[-1]))}")
    alt = "; ".join(told) or "nothing known"
    drawing = picture(316, 178, f"Mean curve of {task}", alt, *parts)
    return Figure(f"versus-{i}", task, drawing)


def _spread(group: Group, task: int) -> tuple[Array, Array, Array]:
    curves = [run.even_curve(a, task) for run in group.runs for a in range(group.agents)]
    known = np.array([curve for curve in curves if not np.isnan(curve).any()])
    if not len(known):
        nothing = np.full(101, np.nan)
        return nothing, nothing, nothing
    return known.mean(axis=0), *band(known, group.agents if len(known) == len(curves) else 1)
