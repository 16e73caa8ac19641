"""The report of runs: one page with the answers on top; tables, measures and figures as files."""

import csv as csv_format
import io
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from canal_mpi import __version__
from canal_mpi.report import figures
from canal_mpi.report.answers import answers, missing
from canal_mpi.report.drawing import LIGHT, TEMPLATES, Figure, LeftOut, styled
from canal_mpi.report.tables import (
    Best,
    Table,
    comparison_tables,
    facts,
    mixes,
    number,
    run_tables,
)
from canal_mpi.results.compare import Comparison, Measured, compare
from canal_mpi.results.files import file_name, write_whole
from canal_mpi.results.reader import load

MOST_RUNS = 4  # whose own figures are part of a comparison
CURVES = (
    "Thin: training episodes, ten at a time. Dots: evaluations. Large: the task is learnt, by play "
    "(circle) or from a lesson (diamond)."
)


@dataclass
class Pictures:
    """Figures in sections, each with a title and a line of words; and why others were left out."""

    sections: list[tuple[str, str, list[Figure]]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def add(self, title: str, words: str, shown: Iterable[Figure | LeftOut]) -> None:
        """Add a section of those that have something to show."""
        found: list[Figure] = []
        for one in shown:
            if isinstance(one, Figure):
                found.append(one)
            else:
                self.left_out.setdefault(one.words, []).append(one.title)
        self.sections += [(title, words, found)] if found else []

    @property
    def figures(self) -> list[Figure]:
        """All of them."""
        return [figure for *_, found in self.sections for figure in found]


def run_pictures(measured: Measured) -> Pictures:
    """Every figure of one run."""
    run, found = measured.run, Pictures()
    framed = "Normalised score on every task after every round; framed where it was learnt."
    with styled():
        what = [figures.timeline(run), figures.topology(run), figures.lessons(run)]
        found.add("What happened", "", what)
        curves = [figures.curve(measured, i) for i in range(len(run.tasks))]
        found.add("Learning curves", CURVES, curves)
        found.add("Evaluations", framed, figures.heat_maps(measured))
        kept = [figures.forgetting(measured), figures.isolated(measured)]
        found.add("Forgetting and transfer", "", kept)
        found.add("Time and bytes", "", [figures.time_bars(run), figures.megabytes(run)])
    return found


def comparison_pictures(comparison: Comparison) -> Pictures:
    """Every figure that sets groups of runs beside each other."""
    found, hosts = Pictures(), mixes(comparison)
    words = "Mean scores over agents after each round with 95 % bands, against the steps of all."
    with styled():
        found.add("Mixes of hosts", "", figures.mix_bars(hosts) if hosts else [])
        beside = [figures.progress(comparison), figures.task_scores(comparison)]
        found.add("Side by side", "", [*beside, figures.advantage(comparison)])
        if any(group.whole for group in comparison.groups):
            tasks = range(len(comparison.tasks))
            found.add("Task by task", words, [figures.progress(comparison, i) for i in tasks])
    return found


def page(comparison: Comparison) -> str:
    """The report as one HTML text."""
    runs = _runs(comparison)
    first, several = runs[0].run, len(runs) > 1
    steps = number(float(first.setting("train.steps", 0)))
    chips = [f"job {first.setting('name', '?')}", f"{len(first.tasks)} tasks × {steps} steps"]
    own = runs if len(runs) <= MOST_RUNS else []
    return render(
        "report.html.j2",
        title=_title(comparison),
        chips=[*chips, f"{len(runs)} run{'s' * several}", f"scores: {comparison.scale.name}"],
        scale=comparison.scale,
        cards=answers(comparison),
        notes=_notes(runs),
        shown=comparison_pictures(comparison) if len(comparison.groups) > 1 else Pictures(),
        tables=comparison_tables(comparison),
        runs=[_run(measured, f"run{k}-" * several) for k, measured in enumerate(own)],
        folders=[measured.run.folder for measured in runs],
    )


def _runs(comparison: Comparison) -> list[Measured]:
    return [measured for group in comparison.groups for measured in group.runs]


def _title(comparison: Comparison) -> str:
    names, count = [group.label for group in comparison.groups], len(_runs(comparison))
    if hosts := {one.hosts for one in mixes(comparison)}:
        return f"{len(hosts)} mixes of hosts"
    if len(names) == 2:
        return " against ".join(names)
    return names[0] if count == 1 else f"{count} runs compared"


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


def _run(measured: Measured, prefix: str) -> dict[str, Any]:
    """What the template shows of one run."""
    run = measured.run
    hosts = sorted({str(host) for host in run["agents"]["host"]})
    start = f"mpirun -np {len(run.agents)} " if len(run.agents) > 1 else ""
    alone = f" --agent {run.agents[0]}" if run.agents != list(range(len(run.agents))) else ""
    return {
        "run": run,
        "hosts": hosts,
        "prefix": prefix,
        "shown": run_pictures(measured),
        "tables": run_tables(measured, prefix),
        "command": f"{start}canal-mpi train --job {run.folder}/job.toml{alone}",
    }


def render(template: str, **context: Any) -> str:
    """A page of its own, with style and script inside; whatever is put in is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: number(float(value))
    environment.filters["exact"] = lambda value: repr(float(value)) if isfinite(value) else ""
    environment.tests["best"] = lambda value: isinstance(value, Best)
    script = (TEMPLATES / "sort.js").read_text()
    digest = b64encode(sha256(script.encode()).digest()).decode()
    fixed = {"light": LIGHT, "version": __version__, "script": Markup(script), "digest": digest}
    return environment.get_template(template).render(**fixed, **context)


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    experts: Sequence[Path] = (),
    csv: bool = False,
    as_json: bool = False,
    png: bool = False,
    figures: Path | None = None,
) -> list[Path]:
    """Write the report of some runs; the files it made."""
    loaded = [load(run) for run in runs]
    comparison = compare(loaded, [load(run) for run in experts])
    page_file = out or loaded[0].folder / "report.html"
    if page_file.is_dir():
        page_file = page_file / "report.html"
    beside = page_file.with_suffix("")
    files = {page_file: page(comparison).encode()}
    files |= _csv_files(comparison, beside) if csv else {}
    if as_json:
        text = json.dumps(facts(comparison), indent=1, ensure_ascii=False)
        files[page_file.with_suffix(".json")] = text.encode()
    files |= _figure_files(comparison, beside, ["png"]) if png else {}
    files |= _figure_files(comparison, figures, ["pdf", "svg"]) if figures else {}
    for path, data in files.items():
        write_whole(path, data)
    return list(files)


def _csv_files(comparison: Comparison, beside: Path) -> dict[Path, bytes]:
    shown: list[tuple[str, Table]] = [("", table) for table in comparison_tables(comparison)]
    for measured in _runs(comparison):
        name = f"{file_name(measured.run.name)}-"
        shown += [(name, table) for table in run_tables(measured)]
    return {beside / f"{name}{table.key}.csv": _csv(table) for name, table in shown}


def _csv(table: Table) -> bytes:
    text = io.StringIO()
    writer = csv_format.writer(text)
    writer.writerow([name.replace(" ", "_") for name in table.head])
    writer.writerows(table.rows)
    return text.getvalue().encode()


def _figure_files(comparison: Comparison, folder: Path, kinds: Sequence[str]) -> dict[Path, bytes]:
    several = len(comparison.groups) > 1
    beside = comparison_pictures(comparison).figures if several else []
    shown = [("", figure) for figure in beside]
    for measured in _runs(comparison):
        name = f"{file_name(measured.run.name)}-"
        shown += [(name, figure) for figure in run_pictures(measured).figures]
    return {
        folder / f"{name}{figure.key}.{kind}": figure.file(kind)
        for name, figure in shown
        for kind in kinds
    }
