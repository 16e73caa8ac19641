"""A study: arms at several budgets on the same seeds, as one TOML file says, and what they show."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.experiments import analysis
from canal_mpi.experiments.analysis import ArmStats
from canal_mpi.experiments.points import (
    Column,
    Point,
    check_names,
    finished_runs,
    name_of,
    resolved,
    write_tables,
)
from canal_mpi.interfaces import Array
from canal_mpi.launch.hostfile import MOST_RANKS
from canal_mpi.report.drawing import MUTED, Figure, LeftOut, Pictures, styled
from canal_mpi.report.figures import EVALUATE
from canal_mpi.report.report import render
from canal_mpi.report.statistics import (
    UNKNOWN,
    Interval,
    bootstrap,
    mean_score,
    percent,
    performance_profile,
    times,
)
from canal_mpi.results.files import write_whole
from canal_mpi.results.measures import Scale, interquartile_mean
from canal_mpi.results.progress import duration
from canal_mpi.results.reader import Run
from canal_mpi.settings import Layer

FILE = "study.toml"  # the definition, in the folder of a study
RANDOM = "random"
RANDOM_PLAY: Layer = {"share.policy": "none", "learn.heads": "separate", "rehearsal.rows": 0}
RANDOM_PLAY |= {"evaluation.interval": 0, "evaluation.epsilon": 1.0, "evaluation.tasks": "final"}
VERDICTS = {True: "met", False: "missed", None: "not known"}
ABOUT = "A study of canal-mpi: /arms has a row per arm and budget, /scores one per score."
BANDS = "measuring left out; bands: 95 %, bootstrap over seeds."


@dataclass(frozen=True)
class Arm:
    """A way to share at several budgets."""

    name: str
    steps: Sequence[int]  # budgets: steps per task
    seeds: int  # how many of the study's
    agents: int
    about: str = ""
    settings: Layer = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """What is run and compared."""

    seeds: Sequence[int]
    baseline: str
    main: str
    arms: Mapping[str, Arm]
    title: str = "Does sharing pay?"
    random_episodes: int = 100
    settings: Layer = field(default_factory=dict)
    equal_steps: Sequence[Mapping[str, Any]] = ()  # arm, steps; baseline: its steps

    def points(self) -> list[Point]:
        """Every run: random play first, then seed by seed, arms with fewer seeds last."""
        chance = RANDOM_PLAY | {"evaluation.episodes": self.random_episodes}
        found = [self._point(Arm(RANDOM, [1], 1, 1, settings=chance), 1, self.seeds[0])]
        for count in sorted({arm.seeds for arm in self.arms.values()}, reverse=True):
            arms = [arm for arm in self.arms.values() if arm.seeds == count]
            runs = ((arm, s, k) for k in self.seeds[:count] for arm in arms for s in arm.steps)
            found += [self._point(*run) for run in runs]
        check_names(found)
        return found

    def _point(self, arm: Arm, steps: int, seed: int) -> Point:
        labels = {"arm": arm.name, "steps": str(steps), "seed": str(seed)}
        flags = self.settings | {"train.steps": steps} | arm.settings | {"seed": seed}
        return Point(name_of(labels), resolved(flags, environ={}), arm.agents, labels)


def find(name: str) -> Path:
    """The file of a study that comes with the package, or the user's own."""
    known = {p.stem: p for f in config.job_folders() for p in sorted(f.glob("studies/*.toml"))}
    path = known.get(name, Path(name))
    if not path.is_file():
        names = ", ".join(sorted(known))
        raise UsageError(f"there is no study '{name}': expected {names}, or path/to/my.toml.")
    return path


def read(path: Path) -> Study:
    """The study that a file defines; UsageError says what is wrong with it."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = {"agents": tree.pop("agents", 5), "seeds": len(tree["seeds"])}
        arms = {name: Arm(name, **(defaults | arm)) for name, arm in tree.pop("arms").items()}
        study = Study(arms=arms, **tree)
        named = [study.baseline, study.main, *(pair["arm"] for pair in study.equal_steps)]
        if odd := [name for name in named if name not in arms]:
            raise ValueError(f"it has no arm '{odd[0]}'")
        for pair in study.equal_steps:
            budgets = (arms[pair["arm"]].steps, arms[study.baseline].steps)
            if pair["steps"] not in budgets[0] or pair["baseline"] not in budgets[1]:
                raise ValueError(f"equal_steps names a budget that no arm has: {dict(pair)}")
        if not study.seeds or not all(1 <= arm.agents <= MOST_RANKS for arm in arms.values()):
            raise ValueError(f"expected seeds, and 1 to {MOST_RANKS} agents in each arm")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} does not define a study: {error}.") from error
    return study


# ── what it shows ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Results:
    """The finished runs of a study on one scale."""

    study: Study
    tasks: list[str]
    scale: Scale
    random: Array  # [task] mean game points of random play
    random_error: Array  # [task] its standard error
    cells: list[ArmStats]  # arms at budgets, in the order of the study
    missing: list[str]  # points that are not finished

    def of(self, arm: str, budget: int | None = None) -> list[ArmStats]:
        """The cells of an arm, or the one at a budget."""
        return [c for c in self.cells if c.arm == arm and budget in (None, c.budget)]

    def equal_steps(self) -> list[tuple[ArmStats, ArmStats]]:
        """Arms beside the baseline where the study compares them at equal total steps."""
        base = self.study.baseline
        return [
            (ours, theirs)
            for pair in self.study.equal_steps
            for ours in self.of(pair["arm"], pair["steps"])
            for theirs in self.of(base, pair["baseline"])
        ]


def gather(folder: Path, study: Study, points: Sequence[Point]) -> tuple[Results | None, list[str]]:
    """What the finished runs tell, and why some don't count; None where it is too little."""
    runs, notes = finished_runs(folder, points)
    found: dict[tuple[str, int], list[Run]] = {}
    for point in points:
        if point.name in runs:
            cell = (point.settings["arm"], int(point.settings["steps"]))
            found.setdefault(cell, []).append(runs[point.name])
    chance = found.pop((RANDOM, 1), [])
    if not chance or not found:
        return None, [*notes, "Nothing to compare yet: that takes random play and one arm."]
    tasks = chance[0].tasks
    played = [chance[0].score[..., k, :] for k in range(len(tasks))]
    played = [scores[~np.isnan(scores)] for scores in played]
    random = np.array([scores.mean() for scores in played])
    error = np.array([scores.std() / np.sqrt(max(len(scores) - 1, 1)) for scores in played])
    alone = [run for (arm, _), group in found.items() if arm == study.baseline for run in group]
    scale = analysis.scale_of(tasks, random, alone)
    order = [(arm.name, steps) for arm in study.arms.values() for steps in sorted(arm.steps)]
    cells = [ArmStats.of(*cell, found[cell], scale) for cell in order if cell in found]
    missing = [point.name for point in points if point.name not in runs]
    return Results(study, tasks, scale, random, error, cells, missing), notes


@dataclass(frozen=True)
class Claim:
    """What has to be shown, what was found, and whether it was met (None: not known)."""

    goal: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """Met, missed or not known."""
        return VERDICTS[self.met]


def claims(results: Results) -> Iterator[Claim]:
    """What the study has to show, as far as there are runs for it."""
    base, main = (
        [cell for cell in results.of(arm) if not np.isnan(cell.final).any()]
        for arm in (results.study.baseline, results.study.main)
    )
    if base and main:
        best = analysis.best_budget(base)
        at = f"at the score of {best.label}, its best budget, {results.study.main} needs"
        steps, seconds = (analysis.cost_ratio(main, best, cost) for cost in ("steps", "seconds"))
        met = steps[0] <= 1 / 4 and steps[2] < 1 / 3
        yield _claim(f"{at} at most a quarter of all steps", times(steps), steps, met)
        met = seconds[0] <= 1 / 3
        yield _claim(f"{at} at most a third of the wall time", times(seconds), seconds, met)
    for ours, theirs in results.equal_steps():
        yield _higher(ours, theirs)
    for cell in main[-1:]:
        if cell.can_forget:  # else it would be zero by construction
            lost = cell.forgetting(results.scale(results.random))
            goal = f"{cell.label} forgets at most 5 % of its score above random play"
            yield _claim(goal, percent(lost), lost, lost[0] <= 0.05)
        decided = sum(float(cell.decision_steps.sum()) for cell in main)
        goal, found = f"{cell.arm} takes no step for decisions", f"{decided:,.0f} steps"
        yield Claim(goal, found, decided == 0)
    both = [(cell, other) for cell in main for other in base if cell.budget == other.budget]
    for cell, other in both[-1:]:
        spread, without = (one.spread for one in analysis.matched(cell, other))
        ratio = spread / without if without else nan
        goal = f"seeds of {cell.label} spread at most 1.5 times as much as those of {other.arm}"
        yield _claim(goal, times((ratio, nan, nan)), (ratio, 0.0, 0.0), ratio <= 1.5)


def _higher(ours: ArmStats, theirs: ArmStats) -> Claim:
    """At equal total steps: mean and IQM at least 1.5 times as high, hardly a game lower."""
    statistics = (mean_score, interquartile_mean)
    ratios = mean, iqm = [analysis.score_ratio(one, ours, theirs) for one in statistics]
    lower, games = int(analysis.clearly_lower(ours, theirs).sum()), ours.final.shape[2]
    met = all(x[0] >= 1.5 and x[1] > 1 for x in ratios) and games - lower >= 0.8 * games
    total = f"{ours.steps.mean():,.0f} and {theirs.steps.mean():,.0f} steps in all"
    goal = f"{ours.label} ends at least 1.5 times as high as {theirs.label} ({total})"
    found = f"mean {times(mean)}, IQM {times(iqm)}, clearly lower on {lower} of {games} tasks"
    return _claim(goal, found, mean if isfinite(iqm[0]) else iqm, met)


def _claim(goal: str, found: str, value: Interval, met: Any) -> Claim:
    """Without a value, or with one seed only, nobody knows."""
    return Claim(goal, found, None if isnan(value[0]) or isnan(value[1]) else bool(met))


# ── what it leaves ─────────────────────────────────────────────────────────────────────────────


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write what the finished runs tell: report.html, figures/ and study.h5; a line for each."""
    results, notes = gather(folder, read(folder / FILE), points)
    if results is None:
        return notes
    found, shown, games = list(claims(results)), pictures(results), game_pictures(results)
    for path, data in (shown.files(folder / "figures") | games.files(folder / "figures")).items():
        write_whole(path, data)
    tables = {"arms": arm_columns(results), "scores": score_columns(results)}
    write_tables(folder / "study.h5", "study", ABOUT, tables)
    page = render(
        "study.html.j2",
        title=results.study.title,
        results=results,
        claims=found,
        shown=shown,
        games=games,
        arms=tables["arms"],
        duration=duration,
    )
    write_whole(folder / "report.html", page.encode())
    notes += [f"Results: {folder / 'study.h5'}", f"Report:  {folder / 'report.html'}"]
    return notes + [f"{claim.verdict:<9}  {claim.goal}: {claim.found}" for claim in found]


@styled()
def pictures(results: Results) -> Pictures:
    """The pictures of the whole study, in the order of the page."""
    study, unit, found = results.study, results.scale.name, Pictures()
    full = [cell for cell in results.cells if study.arms[cell.arm].seeds == len(study.seeds)]
    words = f"Steps of all agents for training and decisions, {BANDS}"
    steps = Figure("score-steps", "Score against all steps", words, 2.4)
    words = f"Wall time of a run on the same cores, {BANDS}"
    time = Figure("score-time", "Score against wall time", words, 2.4, xlabel="seconds")
    curves = [
        _curves(figure, full, lambda cell: cell.mean, cost, f"mean {unit}, %")
        for figure, cost in ((steps, "steps"), (time, "seconds"))
    ]
    found.add("Several budgets of each arm", "", curves)

    words = "The middle half of all scores over seeds and games, with its 95 % interval."
    iqm = Figure("iqm", "Interquartile mean", words, xlabel=f"IQM of {unit}, %")
    words = "How often a seed of the first beats one of the second, in the mean over games."
    better = Figure("improvement", "Probability of improvement", words, xlabel="probability, %")
    equal = [(c, b) for c in full for b in results.of(study.baseline, c.budget) if c.arm != b.arm]
    pairs = dict.fromkeys([*equal, *results.equal_steps()])
    beaten = {f"{c.label} > {b.label}": analysis.improvement(c, b) for c, b in pairs}
    words = f"Difference to {study.main} at the same budget, on the seeds that both have."
    label = f"difference of {unit}, percentage points"
    carries = Figure("ablations", "What carries sharing", words, xlabel=label)
    others = [(c, b) for c in results.cells for b in results.of(study.main, c.budget)]
    changes = {c.label: analysis.difference(c, b) for c, b in others if c not in full}
    shown = [
        _intervals(iqm, {cell.label: cell.iqm for cell in full}),
        _profile(full, unit),
        _intervals(better, beaten, 50),
        _intervals(carries, changes, 0),
    ]
    found.add("How sure it is", "", shown)
    return found


@styled()
def game_pictures(results: Results) -> Pictures:
    """Each game: scores of the baseline and the main arm against all steps."""
    cells = results.of(results.study.baseline) + results.of(results.study.main)
    shown, chance = list[Figure | LeftOut](), 100 * results.scale(results.random)
    for k, task in enumerate(results.tasks):
        figure = Figure(f"game-{k}", task, "", 1.9)
        figure.axes.axhline(chance[k], color=MUTED, ls=":", lw=0.9, label="random play")

        def score(cell: ArmStats, k: int = k) -> Interval:
            return bootstrap(lambda x: x.mean(axis=-1), cell.scores[:, k])

        shown.append(_curves(figure, cells, score, "steps", f"{results.scale.name}, %"))
    found = Pictures()
    found.add("Each game against all steps", "Means over seeds with 95 % bands.", shown)
    return found


def _curves(
    figure: Figure,
    cells: Sequence[ArmStats],
    score: Callable[[ArmStats], Interval],
    cost: str,
    y_label: str,
) -> Figure | LeftOut:
    """One curve per arm over its budgets: score against cost."""
    known = [cell for cell in cells if not np.isnan(score(cell)[0])]
    if not known:
        return LeftOut(figure.title, EVALUATE)
    for k, arm in enumerate(dict.fromkeys(cell.arm for cell in known)):
        ours = [cell for cell in known if cell.arm == arm]
        x = np.array([getattr(cell, cost).mean() for cell in ours])
        figure.curve(k, x, 100 * np.array([score(cell) for cell in ours]).T, arm)
    figure.axes.set_ylabel(y_label)
    if cost == "steps":
        figure.axes.set_xlabel("steps of all agents")
    figure.fit()
    figure.axes.set_xlim(left=0)
    figure.legend()
    return figure


def _intervals(
    figure: Figure, values: Mapping[str, Interval], mark: float | None = None
) -> Figure | LeftOut:
    """A dot with its interval in each row, and a line that means no difference."""
    known = {name: value for name, value in values.items() if not isnan(value[0])}
    if not known:
        return LeftOut(figure.title, "it needs finished arms with evaluations")
    if mark is not None:
        figure.axes.axvline(mark, color=MUTED, ls=":", lw=0.9)
    figure.intervals(list(known), 100 * np.array(list(known.values())))
    return figure


def _profile(cells: Sequence[ArmStats], unit: str) -> Figure | LeftOut:
    title, known = "Performance profile", [c for c in cells if not np.isnan(c.scores).any()]
    if not known:
        return LeftOut(title, EVALUATE)
    words = "How many seeds and games score above each level; higher is better everywhere."
    figure = Figure("profile", title, words, xlabel=f"level of {unit}, %")
    levels = np.linspace(0, max(cell.scores.max() for cell in known), 151)
    for k, cell in enumerate(known):
        band = [100 * part for part in performance_profile(cell.scores, levels)]
        figure.curve(k, 100 * levels, band, cell.label, marker="")
    figure.axes.set_ylabel("seeds and games above it, %")
    figure.legend()
    return figure


def arm_columns(results: Results) -> dict[str, Column]:
    """One row per arm and budget; intervals have three values."""
    chance, cells = results.scale(results.random), results.cells
    parts: dict[str, tuple[Callable[[ArmStats], Any], str]] = {
        "arm": (lambda c: c.arm, "arm"),
        "budget": (lambda c: c.budget, "steps per task"),
        "seeds": (lambda c: len(c.seeds), "runs, each with its own seed"),
        "agents": (lambda c: c.final.shape[1], "agents of a run"),
        "mean": (lambda c: c.mean, "mean score at the end, 95 % interval"),
        "iqm": (lambda c: c.iqm, "interquartile mean at the end, 95 % interval"),
        "forgetting": (
            lambda c: c.forgetting(chance) if c.can_forget else UNKNOWN,
            "part of the score above random play that was lost since the task, 95 % interval",
        ),
        "spread": (lambda c: c.spread, "standard deviation of the mean score over seeds"),
        "train_steps": (lambda c: c.train_steps.mean(), "own training steps of all agents"),
        "decision_steps": (lambda c: c.decision_steps.mean(), "steps that decided something"),
        "evaluation_steps": (lambda c: c.evaluation_steps.mean(), "steps that only measured"),
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
