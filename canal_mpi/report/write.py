"""The files of a report: the page, and on request tables, measures and pictures."""

import csv
import io
import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from canal_mpi.errors import UsageError
from canal_mpi.report import versus
from canal_mpi.report.figures import Figure
from canal_mpi.report.page import page, run_figures
from canal_mpi.report.style import FIGURE, LIGHT
from canal_mpi.report.svg import stand_alone
from canal_mpi.report.tables import comparison_rows, measure_rows, task_rows
from canal_mpi.results.compare import Comparison, compare
from canal_mpi.results.files import file_name, write_whole
from canal_mpi.results.reading import load


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    experts: Sequence[Path] = (),
    csv: bool = False,
    as_json: bool = False,
    png: bool = False,
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
        facts = json.dumps(_facts(comparison), indent=1, ensure_ascii=False)
        files[page_file.with_suffix(".json")] = facts.encode()
    files |= _pictures(comparison, beside) if png else {}
    for path, data in files.items():
        write_whole(path, data)
    return list(files)


def _csv_files(comparison: Comparison, beside: Path) -> dict[Path, bytes]:
    groups = comparison.groups
    files = {}
    if len(groups) > 1:
        head = ["measure", *(group.label for group in groups)]
        files[beside / "compared.csv"] = _csv(head, comparison_rows(comparison))
    for group in groups:
        for measured in group.runs:
            name = file_name(measured.run.name)
            head = ["measure", "value", "low", "high", "meaning"]
            files[beside / f"{name}-measures.csv"] = _csv(head, measure_rows(measured))
            head = ["agent", "round", "task", "source", "own_steps", "score", "normalised"]
            files[beside / f"{name}-tasks.csv"] = _csv([*head, "seconds"], task_rows(measured))
    return files


def _csv(head: Sequence[str], rows: Any) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue().encode()


def _facts(comparison: Comparison) -> dict[str, Any]:
    groups = []
    for group in comparison.groups:
        runs = [
            {
                "run": str(measured.run.folder),
                "status": measured.run.status,
                "measures": {
                    name: {
                        "mean": _json(m.overall),
                        "dims": m.dims,
                        "value": _json(m.value.tolist()),
                    }
                    for name, m in measured.measures().items()
                },
            }
            for measured in group.runs
        ]
        versus_ = {name: _json(value) for name, value in comparison.versus(group).items()}
        groups.append({"label": group.label, "runs": runs, "versus": versus_})
    return {"scale": comparison.scale.name, "tasks": comparison.tasks, "groups": groups}


def _json(value: Any) -> Any:
    """A value without NaN, which JSON does not know."""
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def _pictures(comparison: Comparison, beside: Path) -> dict[Path, bytes]:
    try:
        import resvg_py
    except ImportError as error:
        raise UsageError("--png needs a drawing library: pip install 'canal-mpi[png]'.") from error
    found = {}
    for name, figure in _all_figures(comparison):
        drawing = stand_alone(figure.drawing, LIGHT, FIGURE)
        data = resvg_py.svg_to_bytes(svg_string=drawing, background="#ffffff", zoom=2)
        found[beside / f"{name}{file_name(figure.key)}.png"] = bytes(data)
    return found


def _all_figures(comparison: Comparison) -> list[tuple[str, Figure]]:
    found: list[tuple[str, Figure]] = []
    if len(comparison.groups) > 1:
        shown = [versus.progress(comparison), *versus.task_scores(comparison)]
        shown += [versus.advantage(comparison)] if comparison.baseline is not None else []
        found += [("", figure) for figure in shown]
    for group in comparison.groups:
        for measured in group.runs:
            name = f"{file_name(measured.run.name)}-"
            sections = run_figures(measured).values()
            found += [(name, figure) for section in sections for figure in section]
    return found
