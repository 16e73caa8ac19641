"""What a sweep or study leaves: its page, figures and table."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path

import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.experiments.analysis import Cell, Results, compared, difference, findings
from canal_mpi.experiments.design import FILE, RANDOM, read
from canal_mpi.experiments.points import Point, finished_runs
from canal_mpi.report import report
from canal_mpi.report.drawing import MUTED, Figure, Section, files_of, styled
from canal_mpi.report.figures import EVALUATE, mixes
from canal_mpi.results.compare import (
    Comparison,
    Measured,
    compare,
    costs,
    improvement,
    mean_score,
    scale_for,
)
from canal_mpi.results.files import write_whole
from canal_mpi.results.measures import Interval, bootstrap
from canal_mpi.results.progress import duration
from canal_mpi.results.reader import Run

NOTHING = "No point is finished: there is nothing to report."
BANDS = "measuring left out; bands: 95 %, bootstrap over seeds."


def collect(folder: Path, kind: str, points: Sequence[Point]) -> list[str]:
    """Write report.html, figures/ and table.csv from what is finished; what to say of them."""
    runs = finished_runs(folder, points)
    if kind == "study":
        return _collect_study(folder, points, runs)
    return _collect_sweep(folder, points, runs) if runs else [NOTHING]


def _collect_sweep(folder: Path, points: Sequence[Point], runs: Mapping[str, Run]) -> list[str]:
    found = list(runs.values())
    same = len({tuple(run.tasks) for run in found}) == 1
    scale = scale_for(found) if same else None
    rows: list[dict[str, object]] = []
    for point in (point for point in points if point.name in runs):
        run = runs[point.name]
        facts = costs(run)
        facts |= {name: it.single for name, it in Measured(run, scale).measures().items()}
        rows.append({"name": point.name, **point.settings, "ranks": point.ranks, **facts})
    notes = [f"Table:   {_write_table(folder, rows)}"]
    try:
        comparison = compare(found)
    except UsageError as error:  # runs of other tasks are no comparison, but each is there
        return [*notes, f"No report: {error}"]
    figures = files_of(report.comparison_pictures(comparison), folder / "figures")
    notes += [f"Figures: {folder / 'figures'}"] if figures else []
    notes += [f"Report:  {_write_page(folder, report.page(comparison), figures)}"]
    return [*_answers(comparison), *notes]


def _answers(comparison: Comparison) -> Iterator[str]:
    """Which mix of hosts is fastest; what sharing gained, where there is one way to share."""
    if hosts := mixes(comparison):
        told = report.answers(comparison)[:2]
        yield from (f"{it.question} {it.answer}. {it.words}" for it in told)
        yield from report.unlike(comparison.groups, hosts)
    shares = [group for group in comparison.groups if group.shares]
    if len(shares) == 1 and comparison.baseline is not None:
        yield f"Sharing: {report.Beside(shares[0], comparison.baseline)}."


def _write_table(folder: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Rows as a table that any program reads."""
    held = io.StringIO()
    writer = csv.DictWriter(held, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "table.csv", held.getvalue().encode())
    return folder / "table.csv"


def _write_page(folder: Path, page: str, figures: Mapping[Path, bytes]) -> Path:
    for path, data in figures.items():
        write_whole(path, data)
    write_whole(folder / "report.html", page.encode())
    return folder / "report.html"


# ── a study: pictures first, then what it shows in sentences, then tables ──────────────────────


def _collect_study(folder: Path, points: Sequence[Point], runs: Mapping[str, Run]) -> list[str]:
    arms = {point.settings["arm"] for point in points if point.name in runs}
    if RANDOM not in arms or len(arms) < 2:
        return ["Nothing to compare yet: that takes random play and one arm."]
    results = Results(read(folder / FILE), points, runs)
    told, shown = list(findings(results)), pictures(results)
    page = report.render(
        "study.html.j2",
        title=results.study.title,
        results=results,
        findings=told,
        shown=shown,
        definition=(folder / FILE).read_text(encoding="utf-8"),
        duration=duration,
    )
    table = _write_table(folder, list(score_rows(results)))
    figures = files_of(shown, folder / "figures")
    return [*told, f"Scores: {table}", f"Report: {_write_page(folder, page, figures)}"]


def score_rows(results: Results) -> Iterator[dict[str, object]]:
    """One row per arm, budget, seed, agent and task."""
    for cell in results.cells:
        for (s, agent, i), score in np.ndenumerate(cell.final):
            names = {"arm": cell.arm, "budget": cell.budget, "seed": cell.seeds[s], "agent": agent}
            points = {"points": cell.points[s, agent, i], "score": score}
            yield names | {"task": results.tasks[i]} | points


@styled()
def pictures(results: Results) -> list[Section]:
    """The pictures of a study, in the order of the page."""
    shown, unit = [], results.scale.name
    for key, title, cost, words in (
        ("steps", "all steps", "steps", "Steps of all agents for training and decisions"),
        ("time", "wall time", "seconds", "Wall time of a run on the same cores"),
    ):
        figure = Figure(f"score-{key}", f"Score against {title}", f"{words}, {BANDS}", 2.4)
        figure.axes.set_ylabel(f"mean {unit}, %")
        shown.append(_curves(figure, results.full, cost))
    games, words = list(_games(results)), "Means over seeds with 95 % bands."
    return [
        ("Several budgets of each arm", "", shown),
        ("How sure it is", "", list(_certainty(results))),
        ("What is kept, and what carries sharing", "", list(_ablations(results))),
        ("Time", "", list(_times(results))),
        ("Each game against all steps", words, games),
    ]


def _certainty(results: Results) -> Iterator[Figure]:
    """Interquartile means, performance profile and probability of improvement."""
    unit, full = results.scale.name, results.full
    words = "The middle half of all scores over seeds and games, with its 95 % interval."
    iqm = Figure("iqm", "Interquartile mean", words, xlabel=f"IQM of {unit}, %")
    yield _intervals(iqm, {cell.label: cell.iqm for cell in full})
    yield _profile(full, unit)
    words = "How often a seed of the first beats one of the second, in the mean over games."
    better = Figure("improvement", "Probability of improvement", words, xlabel="probability, %")
    same = [pair for pair in results.pairs(results.study.baseline) if pair[0] in full]
    beaten = dict.fromkeys([*same, *results.equal_steps()])
    found = {f"{x.label} > {y.label}": compared(improvement, x, y) for x, y in beaten}
    yield _intervals(better, found, 50)


def _ablations(results: Results) -> Iterator[Figure]:
    """Forgetting, and how other arms differ from the main one."""
    words = "Lost between task and end, as part of the score above random play then."
    lost = Figure("forgetting", "Forgetting", words, xlabel="% of the score, 95 % interval")
    kept = {cell.label: results.lost(cell) for cell in results.cells}
    yield _intervals(lost, kept, 0)
    if lost.needs:
        lost.needs = "it needs a budget among `forgetting` of an arm whose tasks share weights"
    words = f"Difference to {results.study.main} at the same budget, on the seeds that both have."
    label = f"difference of {results.scale.name}, percentage points"
    carries = Figure("ablations", "Other ways to share", words, xlabel=label)
    others = {x.label: compared(difference, x, y) for x, y in results.ablations}
    yield _intervals(carries, others, 0)


def _times(results: Results) -> Iterator[Figure]:
    """Wall time and waiting of the main arm and its ablations, slow devices among them."""
    others = results.ablations
    cells = dict.fromkeys([*(main for _, main in others), *(cell for cell, _ in others)])
    if not cells:
        return
    for key, title, label, factor in (
        ("seconds", "Wall time of each arm", "seconds, measuring left out", 1),
        ("waiting", "Waiting for others", "% of the agents' time", 100),
    ):
        figure = Figure(f"arms-{key}", title, xlabel=label)
        figure.bars({(cell.label, ""): factor * float(cell.costs[key].mean()) for cell in cells})
        yield figure


def _games(results: Results) -> Iterator[Figure]:
    """Each game: scores of the baseline and the main arm against all steps."""
    cells = results.of(results.study.baseline) + results.of(results.study.main)
    chance, unit = 100 * results.scale(results.random), f"{results.scale.name}, %"
    for k, task in enumerate(results.tasks):
        figure = Figure(f"game-{k}", task, height=1.9, ylabel=unit)
        figure.axes.axhline(chance[k], color=MUTED, ls=":", lw=0.9, label="random play")
        yield _curves(figure, cells, "steps", slice(k, k + 1))


def _curves(figure: Figure, cells: Sequence[Cell], cost: str, tasks: slice = slice(None)) -> Figure:
    """One curve per arm over its budgets: score on these tasks against cost."""
    known = [cell for cell in cells if not np.isnan(cell.scores[:, tasks]).any()]
    figure.needs = EVALUATE * (not known)
    for k, arm in enumerate(dict.fromkeys(cell.arm for cell in known)):
        ours = [cell for cell in known if cell.arm == arm]
        x = np.array([cell.costs[cost].mean() for cell in ours])
        scores = [bootstrap(mean_score, cell.scores[:, tasks]) for cell in ours]
        figure.curve(k, x, 100 * np.array(scores).T, arm)
    figure.axes.set_xlabel("steps of all agents" if cost == "steps" else "seconds")
    figure.fit()
    figure.axes.set_xlim(left=0)
    return figure


def _intervals(figure: Figure, values: Mapping[str, Interval], mark: float | None = None) -> Figure:
    """A dot with its interval in each row, and a line that means no difference."""
    known = {name: value for name, value in values.items() if not isnan(value[0])}
    figure.needs = "" if known else "it needs finished arms with evaluations"
    if mark is not None:
        figure.axes.axvline(mark, color=MUTED, ls=":", lw=0.9)
    figure.intervals(list(known), 100 * np.array(list(known.values())))
    return figure


def _profile(cells: Sequence[Cell], unit: str) -> Figure:
    known = [cell for cell in cells if not np.isnan(cell.scores).any()]
    words = "How many seeds and games score above each level; higher is better everywhere."
    figure = Figure("profile", "Performance profile", words, needs=EVALUATE * (not known))
    levels = np.linspace(0, max((cell.scores.max() for cell in known), default=1), 151)
    for k, cell in enumerate(known):
        band = bootstrap(lambda x: 100 * (x[..., None] > levels).mean(axis=(-3, -2)), cell.scores)
        figure.curve(k, 100 * levels, band, cell.label, marker="")
    figure.axes.set(xlabel=f"level of {unit}, %", ylabel="seeds and games above it, %")
    return figure
