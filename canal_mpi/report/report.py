"""The report of runs: one page with the answers on top, and its figures as files."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from canal_mpi import __version__
from canal_mpi.games import WHOLE_GAME
from canal_mpi.interfaces import Array, Columns
from canal_mpi.report import figures
from canal_mpi.report.drawing import LIGHT, TEMPLATES, Section, files_of, number, styled
from canal_mpi.report.figures import Mix, mixes
from canal_mpi.results import measures as m
from canal_mpi.results.compare import (
    Comparison,
    Group,
    Measured,
    compare,
    costs,
    mix,
    percent,
    times,
)
from canal_mpi.results.files import file_name, write_whole
from canal_mpi.results.progress import events
from canal_mpi.results.reader import Run, load
from canal_mpi.results.summary import count, percentages, seconds_by_part

MOST_RUNS = 4  # whose own figures are part of a comparison
USUAL = {"start", "round", "finished"}  # events that are no news
COMPARED = ("steps", "seconds", "waiting")
CURVES = (
    "Lines: training episodes, ten at a time, with their random actions. Marks: a task is learnt, "
    "by play (circle) or from a lesson (diamond), with its score {}; later agents have smaller "
    "ones. Small dots: other evaluations."
)


# ── answers ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Card:
    """A question, its answer in large, and a sentence; the tone is good, bad or nothing."""

    question: str
    answer: str
    words: str
    tone: str = ""


def answers(comparison: Comparison) -> list[Card]:
    """Of mixes of hosts first; did it learn, did sharing help, did it forget, what took time."""
    group = next((g for g in comparison.groups if g.shares), comparison.groups[0])
    measured, found = group.runs[0], mixes(comparison)
    cards = [learnt(measured), shared(comparison, group), forgot(measured), spent(measured)]
    if len(comparison.groups) > 1:  # of which one is told
        cards = [replace(card, question=f"{card.question} ({group.label})") for card in cards]
    return [fastest(found), waiting(found), *cards] if found else cards


def learnt(measured: Measured) -> Card:
    """Scores right after each task against random play, or those before any task."""
    run, scale, after = measured.run, measured.scale, measured.learnt
    before, what, means = measured.P[:, 0, :], "the score before the first task", True
    cut = np.zeros(len(run.tasks), dtype=bool)
    if scale.name == "HNS":
        before, what = np.zeros_like(after), "random play"
    elif np.isnan(before).all():
        before, cut = _first_episodes(measured)
        what, means = "that of the first episodes", False
    first, last, sure, tasks = figures.changes(before, after)
    rest = _not_compared(measured, before, cut)
    if not len(tasks):
        return Card("Did it learn?", "not known yet", rest)
    better, above = int((sure > 0).sum()), int((last > first).sum())
    words = f"Tasks whose mean score over agents, {scored(measured)}, is above {what}"
    words += f"; on {better} by more than its standard error." if len(after) > 1 else "."
    if means:
        part = scale.name == "HNS"
        values = (first.mean(), last.mean(), np.median(last))
        told = (f"{100 * x:.0f} %" if part else number(x) for x in values)
        words += " Mean over tasks ({}): {} → {}, median {}.".format(scale.name, *told)
    played = int(run.setting("evaluation.episodes", 0))
    words += f" {count(played, 'episode')} for each agent and task." if played < 10 else ""
    words += f" {rest}" if rest else ""
    tone = "good" if better > len(tasks) / 2 else ""  # a short run that learnt little is no fault
    return Card("Did it learn?", f"better on {above} of {len(tasks)}", words, tone)


def _first_episodes(measured: Measured) -> tuple[Array, Array]:
    """[agent, task]: mean return of all agents' first ten training episodes, nearly random.

    NaN where [task] one of them was longer than evaluations may be: fewer steps tell another score.
    """
    run, table = measured.run, measured.run["episodes"]
    returns, cap = [], run.setting("evaluation.max_steps", WHOLE_GAME)
    cut = np.zeros(len(run.tasks), dtype=bool)
    for i, task in enumerate(run.tasks):
        here = [(table["agent"] == agent) & (table["task"] == task) for agent in run.agents]
        firsts = [np.flatnonzero(own)[:10] for own in here]
        returns.append(m.mean([m.mean(table["return"][rows]) for rows in firsts]))
        cut[i] = any((table["length"][rows] > cap).any() for rows in firsts)
    scores = measured.scale(np.where(cut, nan, returns))
    return np.tile(scores, (len(run.agents), 1)), cut


def _not_compared(measured: Measured, before: Array, cut: Array) -> str:
    """How many tasks have no two scores to compare, and why; `cut`: evaluations were shorter."""
    run, (seen, known) = measured.run, (~np.isnan(x).all(axis=0) for x in (measured.learnt, before))
    done, cut = np.isin(run.tasks, run["tasks"]["task"]), seen & ~known & cut
    if not done.any():
        return "No task is finished yet."
    if not int(run.setting("evaluation.episodes", 0)):
        return "Scores need evaluations: --set evaluation.episodes=30."
    cap = run.setting("evaluation.max_steps", WHOLE_GAME)
    why = {
        f"with evaluations cut after {cap} steps": cut,
        "without a training episode that ended": seen & ~known & ~cut,
        "without an evaluation": done & ~seen,
        "not finished yet": ~done,
    }
    told = [f"{count(int(own.sum()), 'task')} {words}" for words, own in why.items() if own.any()]
    return f"Left out: {', '.join(told)}." if told else ""


def shared(comparison: Comparison, group: Group) -> Card:
    """What lessons saved, and what that did to scores where a baseline is there."""
    question, run, base = "Did sharing help?", group.runs[0].run, comparison.baseline
    if not group.shares:
        words = "Agents of this run don't hear each other; --share exact makes them share."
        return Card(question, "no sharing", words)
    table, played = run["tasks"], costs(run)["steps"]
    lessons, tasks = int((table["source"] == "lesson").sum()), len(table["source"])
    full = float(tasks * int(run.setting("train.steps", 0)))
    words = f"{lessons} of {tasks} tasks were learnt from a lesson: {played:,.0f} steps played "
    words += f"where {full:,.0f} would have been without sharing."
    if base is None:
        words += " Whether scores are as good, only a run with --share none beside it can tell."
        found = (m.ratio(full, played), nan, nan)
        return Card(question, times(found, "fewer steps", "more steps"), words)
    beside = Beside(group, base)
    answer = times(beside.steps, "fewer steps", "more steps")
    return Card(question, answer, f"Beside no sharing: {beside}. {words}", beside.tone)


def scored(measured: Measured) -> str:
    """When the scores of tasks were measured."""
    final = measured.run.setting("evaluation.tasks") == "final"
    return "at the end" if final else "right after learning"


class Beside:
    """Scores, steps and time of a group beside those of another; as a text, one sentence."""

    def __init__(self, group: Group, base: Group) -> None:
        ours, theirs = ([costs(one.run) for one in which.runs] for which in (group, base))
        self.steps, self.seconds = (
            m.bootstrap(
                lambda x, y: m.ratio(x.mean(axis=-1), y.mean(axis=-1)),
                *(np.array([one[cost] for one in spent]) for spent in (theirs, ours)),
            )
            for cost in ("steps", "seconds")
        )
        self.score, self.base = (m.mean([run.final for run in x.runs]) for x in (group, base))
        self.seeds, scale = min(len(ours), len(theirs)), group.runs[0].scale.name
        self.unit = "of the range seen" if scale == "range" else scale

    @property
    def tone(self) -> str:
        """Good where steps are saved at no clearly lower score, bad where nothing is gained."""
        lower = self.score < 0.8 * self.base
        gains = self.steps[0] > 1.1 or self.score > 1.2 * self.base
        return ("" if gains else "bad") if lower else "good" if gains else ""

    def __str__(self) -> str:
        """As in `about the same score at the end (21 against 19 % HNS), 2.8 × fewer steps …`."""
        near = abs(self.score - self.base) <= 0.1 * abs(self.base)
        how = "about the same" if near else "a higher" if self.score > self.base else "a lower"
        values = [f"{100 * value:.0f}".replace("-", "−") for value in (self.score, self.base)]
        parts = [
            f"{how} score at the end ({values[0]} against {values[1]} % {self.unit})",
            times(self.steps, "fewer steps", "more steps"),
            times(self.seconds, "less time", "more time"),
        ]
        luck = "one seed: may be luck" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{', '.join(parts)}; {luck}"


def forgot(measured: Measured) -> Card:
    """Scores right after tasks against scores at the end."""
    question, (after, end, sure, tasks) = "Did it forget?", figures.kept_scores(measured)
    if not len(tasks):
        return Card(question, "not measured", f"I{figures.kept_needs(measured)[1:]}.")
    first, last = float(after.mean()), float(end.mean())
    change = f"{number(first)} → {number(last)}"
    lower = [measured.run.tasks[i] for i in tasks[sure < 0]]
    words = f"Mean score ({measured.scale.name}) right after tasks and at the end: {change}."
    if lower:
        words += f" Lower by more than the standard error over agents: {', '.join(lower)}."
        if measured.run.setting("evaluation.tasks") == "after":
            words += " The networks of then are kept: canal-mpi evaluate RUN --tag best."
    answer = f"lower on {len(lower)} of {len(tasks)}" if lower else "no task clearly lower"
    bad = first - last > 0.05 or len(lower) > len(tasks) / 2
    return Card(question, answer, words, "bad" if bad else "" if lower else "good")


def spent(measured: Measured) -> Card:
    """The largest parts of the time."""
    question, run = "Where did the time go?", measured.run
    if not run.seconds:
        return Card(question, "no task is finished", "Times are known when a task ends.")
    parts = {part: x.sum() for part, x in seconds_by_part(run["tasks"], run.agents).items()}
    whole = sorted(percentages(parts).items(), key=lambda item: -item[1])
    told = [f"{name} {part} %" for name, part in whole if part]
    words = f"{', '.join(told[1:])}; {number(run.seconds)} s in tasks, slowest agent."
    return Card(question, told[0], words)


def fastest(found: Sequence[Mix]) -> Card:
    """Which mix of hosts needs the least wall time."""
    first, *others = sorted(found, key=lambda one: one.wall)
    told = [f"{one} {one.wall / first.wall:.1f}\u00a0×" for one in others[:6]]
    words = f"{first.wall:.0f} s for {first.steps:,.0f} steps, score {number(first.score)}. "
    words += "Time of the others: "
    return Card("Which mix is fastest?", str(first), f"{words}{'; '.join(told)}.", "good")


def waiting(found: Sequence[Mix]) -> Card:
    """Who waits for whom."""
    question, most = "Who waits for whom?", max(found, key=lambda one: max(one.waits.values()))
    who, part = max(most.waits.items(), key=lambda item: item[1])
    whom = min(most.waits, key=lambda kind: most.waits[kind])
    whom = "each other" if who == whom else whom
    often = sorted(found, key=lambda one: -max(one.waits.values()))[:3]
    told = [f"{one}: {one.waits_told}" for one in often]
    words = f"Part of its time that a host waits for others, the most: {'; '.join(told)}."
    answer = f"{who} for {whom}: {part:.0f} %" if part >= 2 else "nobody"
    return Card(question, answer, words)


def missing(measured: Measured) -> Iterator[str]:
    """What a reader should know before reading on."""
    run = measured.run
    if run.status != "finished":
        done = f"{measured.rounds_done} of {run.rounds} rounds are in the file"
        yield f"The run is not finished (status {run.status or 'unknown'}): {done}."
    if not run.score.size or np.isnan(run.score).all():
        yield "There are no evaluations: scores, forgetting and transfer can't be told."
    agents = run["agents"]
    slow = agents["speed"] < 1  # NaN in older files: not known to be slow
    speeds = {float(speed): agents["speed"] == speed for speed in agents["speed"][slow]}
    pairs = [f"{mix(agents['host'][own])} at {speed:g}" for speed, own in speeds.items()]
    if names := ", ".join(f"{pair} of full speed" for pair in pairs):
        yield f"Slower devices were emulated ({names}): times are those of the emulation."
    elif run.setting("emulate"):
        yield "Hosts were emulated on one machine: times are those of the emulation."
    if (cap := int(run.setting("evaluation.max_steps", WHOLE_GAME))) < WHOLE_GAME:
        yield f"Evaluation episodes were limited to {cap} steps: scores may not be of whole games."


# ── the page ───────────────────────────────────────────────────────────────────────────────────


@styled()
def run_pictures(measured: Measured) -> list[Section]:
    """Every figure of one run."""
    run, kept = measured.run, figures.forgetting(measured)
    words, transfer = figures.zero_shot(measured)
    title = "Time" if kept.needs else "Forgetting and time"
    curves = [figures.curve(measured, i) for i in range(len(run.tasks))]
    return [
        ("Learning curves", CURVES.format(scored(measured)), curves),
        (title, words, [kept, figures.time_bars(run), *transfer]),
    ]


@styled()
def comparison_pictures(comparison: Comparison) -> list[Section]:
    """Every figure that sets groups of runs beside each other; none where there is one group."""
    if len(comparison.groups) < 2:
        return []
    beside = [*figures.progress(comparison), figures.task_scores(comparison)]
    mixed = list(figures.mix_bars(mixes(comparison)))
    return [("Mixes of hosts", "", mixed), ("Side by side", "", beside)]


def page(comparison: Comparison) -> str:
    """The report as one HTML text."""
    runs, hosts = comparison.runs, mixes(comparison)
    several, own = len(runs) > 1, runs if len(runs) <= MOST_RUNS else []
    prefixes = [f"run{k}-" * several for k in range(len(own))]
    names = [group.label for group in comparison.groups]
    title = f"{len({one.hosts for one in hosts})} mixes of hosts"
    if not hosts:
        one_or_two = not several or len(names) == 2
        title = " against ".join(names) if one_or_two else f"{len(runs)} runs compared"
    return render(
        "report.html.j2",
        title=title,
        comparison=comparison,
        cards=answers(comparison),
        notes=[*unlike(comparison.groups, hosts), *_notes(runs)],
        shown=comparison_pictures(comparison),
        mixes=sorted(hosts, key=lambda one: one.wall),
        compared=compared(comparison),
        runs=[
            (prefix, one, run_pictures(one), timeline(one.run), list(news(one.run)))
            for prefix, one in zip(prefixes, own, strict=True)
        ],
        folders=[measured.run.folder for measured in runs],
    )


def unlike(groups: Sequence[Group], found: Sequence[Mix]) -> Iterator[str]:
    """What keeps runs from being compared by their times alone."""
    if len(agents := sorted({group.agents for group in groups})) > 1:
        yield f"Not the same work: runs have {agents[0]} to {agents[-1]} agents."
    steps = sorted(one.steps for one in found)
    if found and steps[-1] > 1.1 * steps[0]:
        told = f"{steps[0]:,.0f} to {steps[-1]:,.0f}"
        yield f"Not all played as many steps ({told}): agents that find no lesson play themselves."
    if crowded := [f"{one} {one.core:.0f} %" for one in found if one.core >= 5]:
        yield f"Agents waited for a core ({', '.join(crowded)}): with more cores they are faster."


def _notes(runs: Sequence[Measured]) -> list[str]:
    """What a reader should know; where it holds for some of several runs, for which."""
    told: dict[str, list[str]] = {}
    for measured in runs:
        for words in missing(measured):
            told.setdefault(words, []).append(measured.run.name)
    return [
        words if len(names) == len(runs) else f"{', '.join(names)}: {words}"
        for words, names in told.items()
    ]


def timeline(run: Run) -> list[list[tuple[str, str, str]]]:
    """[round][agent]: the task, the agents whose lessons were used, and the class of its colour."""
    rows = [[(str(task), "", "open") for task in tasks] for tasks in run.order.T]
    colours = {str(agent): f"a{k % 8}" for k, agent in enumerate(run.agents)}
    for agent, round_, task, donors in table_rows(run["tasks"], "agent", "round", "task", "donors"):
        colour = colours.get(donors.split(",")[0], "played")
        rows[round_ - 1][run.agents.index(agent)] = (task, donors, colour)
    return rows


def news(run: Run) -> Iterator[tuple[str, str]]:
    """Every event of a run that is not usual, and its details."""
    for event in events(run.folder):
        if (kind := str(event.pop("event", ""))) not in USUAL:
            words = ", ".join(f"{name} {value}" for name, value in event.items())
            yield kind[:80], words[:300]


def compared(comparison: Comparison) -> dict[str, list[float]]:
    """For each measure its mean in each group."""
    found = [_of_group(comparison, group) for group in comparison.groups]
    rows = {name: [own.get(name, nan) for own in found] for own in found for name in own}
    return {name: values for name, values in rows.items() if not np.isnan(values).all()}


def _of_group(comparison: Comparison, group: Group) -> dict[str, float]:
    """The measures of a group."""
    parts = [run.measures() for run in group.runs]
    found = {
        f"{it.about} ({name})": m.mean([part[name].single for part in parts])
        for name, it in parts[0].items()
    }
    spent = [costs(run.run) for run in group.runs]
    return (
        {"runs": len(group.runs)}
        | found
        | {f"{name} without measuring": m.mean([x[name] for x in spent]) for name in COMPARED}
        | comparison.versus(group)
    )


def table_rows(table: Columns, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of a table as rows, for templates."""
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def render(template: str, **context: Any) -> str:
    """A page of its own, with style and script inside; whatever is put in is escaped."""
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    options |= {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), **options)
    environment.filters["number"] = lambda value: number(float(value))
    environment.filters["exact"] = lambda value: repr(float(value)) if isfinite(value) else ""
    environment.filters["percent"] = percent
    environment.filters["rows"] = table_rows
    script = (TEMPLATES / "sort.js").read_text()
    digest = b64encode(sha256(script.encode()).digest()).decode()
    fixed = {"light": LIGHT, "version": __version__, "script": Markup(script), "digest": digest}
    return environment.get_template(template).render(**fixed, **context)


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    experts: Sequence[Path] = (),
    figures: Path | None = None,
) -> list[Path]:
    """Write the report of some runs; the files it made."""
    loaded = [load(run) for run in runs]
    comparison = compare(loaded, [load(run) for run in experts])
    page_file = out or loaded[0].folder / "report.html"
    if page_file.is_dir():
        page_file = page_file / "report.html"
    files = {page_file: page(comparison).encode()}
    if figures:
        files |= files_of(comparison_pictures(comparison), figures)
        for measured in comparison.runs:
            files |= files_of(run_pictures(measured), figures, f"{file_name(measured.run.name)}-")
    for path, data in files.items():
        write_whole(path, data)
    return list(files)
