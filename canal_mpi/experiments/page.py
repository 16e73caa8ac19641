"""The page of a study: pictures first, then what it shows in sentences, then tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path

import numpy as np

from canal_mpi.experiments.analysis import Cell, compared, difference
from canal_mpi.experiments.points import Point
from canal_mpi.experiments.study import FILE, Results, findings, gather, read
from canal_mpi.experiments.sweep import write_csv
from canal_mpi.report.drawing import MUTED, Figure, LeftOut, Pictures, styled
from canal_mpi.report.figures import EVALUATE, Shown
from canal_mpi.report.report import render
from canal_mpi.report.statistics import Interval, bootstrap
from canal_mpi.results.compare import improvement
from canal_mpi.results.files import write_whole
from canal_mpi.results.progress import duration

BANDS = "measuring left out; bands: 95 %, bootstrap over seeds."


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write what the finished runs tell: report.html, figures/ and table.csv; and what to say."""
    results = gather(folder, read(folder / FILE), points)
    if results is None:
        return ["Nothing to compare yet: that takes random play and one arm."]
    told, shown, games = list(findings(results)), pictures(results), game_pictures(results)
    for path, data in (shown.files(folder / "figures") | games.files(folder / "figures")).items():
        write_whole(path, data)
    write_csv(folder / "table.csv", list(score_rows(results)))
    page = render(
        "study.html.j2",
        title=results.study.title,
        results=results,
        findings=told,
        shown=shown,
        games=games,
        definition=(folder / FILE).read_text(encoding="utf-8"),
        duration=duration,
    )
    write_whole(folder / "report.html", page.encode())
    return [*told, f"Scores: {folder / 'table.csv'}", f"Report: {folder / 'report.html'}"]


def score_rows(results: Results) -> Iterator[dict[str, object]]:
    """One row per arm, budget, seed, agent and task."""
    for cell in results.cells:
        for (s, agent, i), score in np.ndenumerate(cell.final):
            names = {"arm": cell.arm, "budget": cell.budget, "seed": cell.seeds[s], "agent": agent}
            points = {"points": cell.points[s, agent, i], "score": score}
            yield names | {"task": results.tasks[i]} | points


@styled()
def pictures(results: Results) -> Pictures:
    """The pictures of the whole study, in the order of the page."""
    study, full, found = results.study, results.full, Pictures()
    unit = f"mean {results.scale.name}, %"
    words = f"Steps of all agents for training and decisions, {BANDS}"
    steps = Figure("score-steps", "Score against all steps", words, 2.4)
    words = f"Wall time of a run on the same cores, {BANDS}"
    time = Figure("score-time", "Score against wall time", words, 2.4)
    curves = [
        _curves(figure, full, lambda cell: cell.mean, cost, unit)
        for figure, cost in ((steps, "steps"), (time, "seconds"))
    ]
    found.add("Several budgets of each arm", "", curves)
    found.add("How sure it is", "", _certainty(results, full))
    found.add("What is kept, and what carries sharing", "", _ablations(results))
    both = [(cell, main) for cell, main in results.pairs(study.main) if cell not in full]
    rows = list(dict.fromkeys([*(main for _, main in both), *(cell for cell, _ in both)]))
    found.add("Time", "", _times(rows) if both else [])
    return found


def _certainty(results: Results, full: Sequence[Cell]) -> Iterator[Shown]:
    """Interquartile means, performance profile and probability of improvement."""
    unit, base = results.scale.name, results.study.baseline
    words = "The middle half of all scores over seeds and games, with its 95 % interval."
    iqm = Figure("iqm", "Interquartile mean", words, xlabel=f"IQM of {unit}, %")
    yield _intervals(iqm, {cell.label: cell.iqm for cell in full})
    yield _profile(full, unit)
    words = "How often a seed of the first beats one of the second, in the mean over games."
    better = Figure("improvement", "Probability of improvement", words, xlabel="probability, %")
    same = [(cell, other) for cell, other in results.pairs(base) if cell in full]
    beaten = dict.fromkeys([*same, *results.equal_steps()])
    found = {f"{x.label} > {y.label}": compared(improvement, x, y) for x, y in beaten}
    yield _intervals(better, found, 50)


def _ablations(results: Results) -> Iterator[Shown]:
    """Forgetting, and how other arms differ from the main one."""
    words = "Lost between task and end, as part of the score above random play then."
    lost = Figure("forgetting", "Forgetting", words, xlabel="% of the score, 95 % interval")
    kept = {cell.label: results.lost(cell) for cell in results.cells}
    yield _intervals(lost, kept, 0)
    main, full = results.study.main, results.full
    words = f"Difference to {main} at the same budget, on the seeds that both have."
    label = f"difference of {results.scale.name}, percentage points"
    carries = Figure("ablations", "Other ways to share", words, xlabel=label)
    others = [(cell, other) for cell, other in results.pairs(main) if cell not in full]
    yield _intervals(carries, {x.label: compared(difference, x, y) for x, y in others}, 0)


def _times(cells: Sequence[Cell]) -> Iterator[Figure]:
    """Wall time and waiting of arms, slow devices among them."""
    for key, title, label, factor in (
        ("seconds", "Wall time of each arm", "seconds, measuring left out", 1),
        ("waiting", "Waiting for others", "% of the agents' time", 100),
    ):
        figure = Figure(f"arms-{key}", title, "", 0.6 + 0.2 * len(cells), xlabel=label)
        values = [factor * float(cell.costs[key].mean()) for cell in cells]
        figure.bars(range(len(cells)), values, 0, 1, "")
        figure.name_rows([cell.label for cell in cells])
        yield figure


@styled()
def game_pictures(results: Results) -> Pictures:
    """Each game: scores of the baseline and the main arm against all steps."""
    cells = results.of(results.study.baseline) + results.of(results.study.main)
    shown, chance = list[Shown](), 100 * results.scale(results.random)
    for k, task in enumerate(results.tasks):
        figure = Figure(f"game-{k}", task, "", 1.9)
        figure.axes.axhline(chance[k], color=MUTED, ls=":", lw=0.9, label="random play")

        def score(cell: Cell, k: int = k) -> Interval:
            return bootstrap(lambda x: x.mean(axis=-1), cell.scores[:, k])

        shown.append(_curves(figure, cells, score, "steps", f"{results.scale.name}, %"))
    found = Pictures()
    found.add("Each game against all steps", "Means over seeds with 95 % bands.", shown)
    return found


def _curves(
    figure: Figure,
    cells: Sequence[Cell],
    score: Callable[[Cell], Interval],
    cost: str,
    y_label: str,
) -> Shown:
    """One curve per arm over its budgets: score against cost."""
    known = [cell for cell in cells if not np.isnan(score(cell)[0])]
    if not known:
        return LeftOut(figure.title, EVALUATE)
    for k, arm in enumerate(dict.fromkeys(cell.arm for cell in known)):
        ours = [cell for cell in known if cell.arm == arm]
        x = np.array([cell.costs[cost].mean() for cell in ours])
        figure.curve(k, x, 100 * np.array([score(cell) for cell in ours]).T, arm)
    figure.axes.set_ylabel(y_label)
    figure.axes.set_xlabel("steps of all agents" if cost == "steps" else "seconds")
    figure.fit()
    figure.axes.set_xlim(left=0)
    figure.legend()
    return figure


def _intervals(figure: Figure, values: Mapping[str, Interval], mark: float | None = None) -> Shown:
    """A dot with its interval in each row, and a line that means no difference."""
    known = {name: value for name, value in values.items() if not isnan(value[0])}
    if not known:
        return LeftOut(figure.title, "it needs finished arms with evaluations")
    if mark is not None:
        figure.axes.axvline(mark, color=MUTED, ls=":", lw=0.9)
    figure.intervals(list(known), 100 * np.array(list(known.values())))
    return figure


def _profile(cells: Sequence[Cell], unit: str) -> Shown:
    title, known = "Performance profile", [c for c in cells if not np.isnan(c.scores).any()]
    if not known:
        return LeftOut(title, EVALUATE)
    words = "How many seeds and games score above each level; higher is better everywhere."
    figure = Figure("profile", title, words, xlabel=f"level of {unit}, %")
    levels = np.linspace(0, max(cell.scores.max() for cell in known), 151)
    for k, cell in enumerate(known):
        band = bootstrap(lambda x: 100 * (x[..., None] > levels).mean(axis=(-3, -2)), cell.scores)
        figure.curve(k, 100 * levels, band, cell.label, marker="")
    figure.axes.set_ylabel("seeds and games above it, %")
    figure.legend()
    return figure
