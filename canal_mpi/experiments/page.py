"""The page of a study: pictures first, tables last; also `study.h5` and the pictures as files."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.experiments import analysis
from canal_mpi.experiments.analysis import ArmStats, Interval
from canal_mpi.experiments.points import Point
from canal_mpi.experiments.study import FILE, Claim, Results, claims, gather, label, percent, read
from canal_mpi.experiments.sweep import Column, write_tables
from canal_mpi.interfaces import Array
from canal_mpi.results.files import write_whole
from canal_mpi.results.progress import digits, duration

STYLE: dict[str, Any] = {"svg.hashsalt": "canal-mpi", "svg.fonttype": "none"}  # bit-identical
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
STYLE |= {"grid.alpha": 0.3, "figure.constrained_layout.use": True}
COLOURS = ("#555555", "#0b6bcb", "#d1541f", "#2a8a4a", "#8a4fbf", "#b8860b", "#c2347a", "#1f9e9e")
VERDICTS = {True: "met", False: "missed", None: "not known"}


@dataclass(frozen=True)
class Figure:
    """A picture; `draw` fills its axes. The page has the words for each key."""

    key: str
    draw: Callable[[Any], None]
    height: float = 3.8
    width: float = 6.4

    def image(self, kind: str) -> bytes:
        """The picture as svg, pdf or png."""
        import matplotlib
        from matplotlib.figure import Figure as Canvas

        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        memory = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            canvas = Canvas(figsize=(self.width, self.height))
            self.draw(canvas.subplots())
            canvas.savefig(memory, format=kind, dpi=200, metadata=undated)
        return memory.getvalue()

    @cached_property
    def svg(self) -> str:
        """The picture as it stands in the page."""
        text = self.image("svg").decode()
        return text[text.index("<svg") :]


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write what the finished runs tell: report.html, figures/ and study.h5; a line for each."""
    results, notes = gather(folder, read(folder / FILE), points)
    if results is None:
        return notes
    figures, found = main_figures(results), list(claims(results))
    for figure in figures:
        images = {"svg": figure.svg.encode()} | {k: figure.image(k) for k in ("pdf", "png")}
        for kind, data in images.items():
            write_whole(folder / "figures" / f"{figure.key}.{kind}", data)
    about = "A study of canal-mpi: /arms has a row per arm and budget, /scores one per score."
    attributes = {"kind": "study", "description": about}
    columns = {"arms": arm_columns(results), "scores": score_columns(results)}
    write_tables(folder / "study.h5", attributes, columns)
    write_whole(folder / "report.html", page(results, figures, found).encode())
    notes += [f"Results: {folder / 'study.h5'}", f"Report:  {folder / 'report.html'}"]
    return notes + [f"{VERDICTS[claim.met]:<9}  {claim.goal}: {claim.found}" for claim in found]


def page(results: Results, figures: Sequence[Figure], found: Sequence[Claim]) -> str:
    """The page, complete in one file."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("canal_mpi.report", "templates")
    template = Environment(loader=loader, autoescape=True).get_template("study.html.j2")
    return template.render(
        results=results,
        claims=[(VERDICTS[claim.met], claim.goal, claim.found) for claim in found],
        figures=figures,
        games=[game_figure(results, k) for k in range(len(results.tasks))],
        tables=tables(results),
    )


# ── pictures ───────────────────────────────────────────────────────────────────────────────────


def main_figures(results: Results) -> list[Figure]:
    """The pictures of the whole study, in the order of the page."""
    study, unit = results.study, results.scale.name
    full = [cell for cell in results.cells if study.arms[cell.arm].seeds == len(study.seeds)]
    mean = partial(_curves, cells=full, score=analysis.mean_of, y_label=f"mean {unit}, %")
    equal = [(c, b) for c in full for b in results.of(study.baseline, c.budget) if c.arm != b.arm]
    pairs = dict.fromkeys([*equal, *results.equal_steps()])
    beaten = [(f"{label(c)} > {label(b)}", analysis.improvement(c, b)) for c, b in pairs]
    others = [(c, b) for c in results.cells for b in results.of(study.main, c.budget)]
    changes = [(label(c), analysis.difference(c, b)) for c, b in others if c not in full]
    iqms = [(label(cell), analysis.iqm_of(cell)) for cell in full]
    return [
        Figure("score-steps", partial(mean, cost="steps", x_label="steps of all agents")),
        Figure("score-time", partial(mean, cost="seconds", x_label="seconds")),
        _interval_figure("iqm", iqms, f"IQM of {unit}, %"),
        Figure("profile", partial(_profiles, cells=full, unit=unit)),
        _interval_figure("improvement", beaten, "probability, %", 50),
        _interval_figure("ablations", changes, f"difference of {unit}, percentage points", 0),
    ]


def game_figure(results: Results, task: int) -> Figure:
    """One game: scores of the baseline and the main arm against all steps."""
    cells = results.of(results.study.baseline) + results.of(results.study.main)
    chance = 100 * float(results.scale(results.random)[task])

    def score(cell: ArmStats) -> Interval:
        return analysis.bootstrap(lambda x: x.mean(axis=-1), cell.scores[:, task])

    def draw(axes: Any) -> None:
        axes.axhline(chance, color="#999999", linestyle=":", label="random play")
        _curves(axes, cells, score, f"{results.scale.name}, %", "steps", "steps of all agents")

    return Figure(results.tasks[task], draw, 3.0, 4.4)


def _curves(
    axes: Any,
    cells: Sequence[ArmStats],
    score: Callable[[ArmStats], Interval],
    y_label: str,
    cost: str,
    x_label: str,
) -> None:
    for k, arm in enumerate(dict.fromkeys(cell.arm for cell in cells)):
        ours = [cell for cell in cells if cell.arm == arm]
        x = np.array([getattr(cell, cost).mean() for cell in ours])
        y, low, high = 100 * np.array([score(cell) for cell in ours]).T
        colour = COLOURS[k % len(COLOURS)]
        axes.plot(x, y, "o-", color=colour, label=arm)
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        if len(ours) == 1:
            axes.vlines(x, low, high, color=colour)
    axes.set_xlim(left=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1e4 else f"{x:g}")
    axes.legend(frameon=False)


def _interval_figure(
    key: str, rows: Sequence[tuple[str, Interval]], x_label: str, mark: float | None = None
) -> Figure:
    def draw(axes: Any) -> None:
        for y, (_, (value, low, high)) in enumerate(rows):
            axes.hlines(y, 100 * low, 100 * high, color=COLOURS[1], linewidth=4, alpha=0.35)
            axes.plot(100 * value, y, "o", color=COLOURS[1])
        if mark is not None:
            axes.axvline(mark, color="#999999", linestyle=":")
        axes.set_yticks(range(len(rows)), [words for words, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(x_label)

    return Figure(key, draw, 1.0 + 0.32 * max(len(rows), 1))


def _profiles(axes: Any, cells: Sequence[ArmStats], unit: str) -> None:
    known = [cell for cell in cells if not np.isnan(cell.scores).any()]
    levels = np.linspace(0, max((cell.scores.max() for cell in known), default=1.0), 151)
    for k, cell in enumerate(known):
        value, low, high = (100 * part for part in analysis.profile_of(cell, levels))
        colour = COLOURS[k % len(COLOURS)]
        axes.plot(100 * levels, value, color=colour, label=label(cell))
        axes.fill_between(100 * levels, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.set(xlabel=f"level of {unit}, %", ylabel="seeds and games above it, %")
    axes.legend(frameon=False, fontsize=9)


# ── tables ─────────────────────────────────────────────────────────────────────────────────────


def arm_columns(results: Results) -> dict[str, Column]:
    """One row per arm and budget; intervals have three values."""
    chance, cells = results.scale(results.random), results.cells
    parts: dict[str, tuple[Callable[[ArmStats], Any], str]] = {
        "arm": (lambda c: c.arm, "arm"),
        "budget": (lambda c: c.budget, "steps per task"),
        "seeds": (lambda c: len(c.seeds), "runs, each with its own seed"),
        "agents": (lambda c: c.final.shape[1], "agents of a run"),
        "mean": (analysis.mean_of, "mean score at the end, 95 % interval"),
        "iqm": (analysis.iqm_of, "interquartile mean at the end, 95 % interval"),
        "forgetting": (
            lambda c: analysis.forgetting_of(c, chance) if c.can_forget else analysis.UNKNOWN,
            "part of the score above random play that was lost since the task, 95 % interval",
        ),
        "spread": (analysis.spread_of, "standard deviation of the mean score over seeds"),
        "train_steps": (lambda c: c.train_steps.mean(), "own training steps of all agents"),
        "decision_steps": (lambda c: c.decision_steps.mean(), "steps that decided something"),
        "eval_cost": (lambda c: c.eval_cost.mean(), "steps that only measured (NaN: not counted)"),
        "seconds": (lambda c: c.seconds.mean(), "wall time without evaluation, slowest agent"),
        "waiting": (lambda c: c.waiting.mean(), "part of it that agents waited for others"),
    }
    return {name: ([value(c) for c in cells], about) for name, (value, about) in parts.items()}


def score_columns(results: Results) -> dict[str, Column]:
    """One row per arm, budget, seed, agent and task."""
    rows = [
        (c.arm, c.budget, seed, agent, task, *(x[k, agent, i] for x in (c.points, c.final)))
        for c in results.cells
        for k, seed in enumerate(c.seeds)
        for agent in range(c.final.shape[1])
        for i, task in enumerate(results.tasks)
    ]
    about = {"arm": "arm", "budget": "steps per task", "seed": "seed", "agent": "agent"}
    about |= {"task": "task", "points": "game points at the end", "final": "normalised score"}
    return dict(zip(about, zip(zip(*rows, strict=True), about.values(), strict=True), strict=True))


def tables(results: Results) -> dict[str, list[list[str]]]:
    """The rows of every table of the page, heads first."""
    columns, cells = arm_columns(results), results.cells
    costs = zip(*(values for values, _ in columns.values()), strict=True)
    games = [["", *results.tasks], ["random play", *_errors(results.random, results.random_error)]]
    for cell in cells:
        means = cell.points.mean(axis=1)  # [seed, task]
        error = means.std(axis=0) / np.sqrt(max(len(means) - 1, 1))
        games.append([label(cell), *_errors(means.mean(axis=0), error)])
    seeds = sorted({seed for cell in cells for seed in cell.seeds})
    by_seed = [(c, dict(zip(c.seeds, 100 * c.by_seed, strict=True))) for c in cells]
    each = [[label(c), *(digits(found.get(s, np.nan), 1) for s in seeds)] for c, found in by_seed]
    return {
        "arms": [["arm", ""], *([arm.name, arm.about] for arm in results.study.arms.values())],
        "costs": [[name.replace("_", " ") for name in columns]]
        + [[*map(_worded, columns, row)] for row in costs],
        "games": games,
        "seeds": [["", *map(str, seeds)], *each],
    }


def _errors(means: Array, errors: Array) -> list[str]:
    return [f"{mean:.1f} ± {error:.1f}" for mean, error in zip(means, errors, strict=True)]


def _worded(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return percent(value)
    if name == "seconds":
        return duration(value)
    if name in ("spread", "waiting"):
        return f"{digits(100 * value, 1)} %"
    return value if isinstance(value, str) else f"{value:,.0f}" if value == value else "–"
