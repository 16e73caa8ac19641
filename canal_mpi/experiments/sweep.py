"""A sweep: every combination of what is varied is a point; at the end one report compares them."""

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.experiments.points import (
    MAX_POINTS,
    Point,
    check_names,
    finished_runs,
    name_of,
    resolved,
)
from canal_mpi.launch.hostfile import MOST_RANKS, emulated, is_here, read_hosts, total
from canal_mpi.report.figures import mixes
from canal_mpi.report.report import Beside, answers, comparison_pictures, page, unlike
from canal_mpi.report.statistics import costs
from canal_mpi.results.compare import Comparison, Measured, compare, scale_for
from canal_mpi.results.files import file_name, write_whole
from canal_mpi.settings import Layer

MAX_DIGITS = 18  # of a number in an option
DEFAULT_AGENTS = 5


@dataclass(frozen=True)
class Choice:
    """One value of something that is varied: settings of the job, and facts of the point."""

    label: str
    settings: Layer = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # ranks, servers, hostfile


Axis = tuple[str, Sequence[Choice]]  # something that is varied, by its column in tables


def grid(
    axes: Sequence[Axis], flags: Layer, job_file: str | None = None, network: str = ""
) -> list[Point]:
    """Every combination of the axes, the last one varying fastest."""
    count = prod(len(choices) for _, choices in axes)
    if count > MAX_POINTS:
        raise UsageError(f"the sweep has {count} points; at most {MAX_POINTS} are possible.")
    found = []
    for choices in itertools.product(*(choices for _, choices in axes)):
        layer = dict(flags)
        facts: dict[str, Any] = {"ranks": DEFAULT_AGENTS, "network": network}
        for choice in choices:
            layer |= choice.settings
            facts |= choice.facts
        job = resolved(layer, job_file)
        settings = {name: one.label for (name, _), one in zip(axes, choices, strict=True)}
        name = name_of(settings) or file_name(job.name)
        found.append(Point(name, job, settings=settings, **facts))
    check_names(found)
    return found


def _numbers(text: str, least: int, most: int) -> list[int]:
    """The numbers of a text such as `2,5`; none where one of them is wrong."""
    words = [word.strip() for word in text.split(",")]
    right = (w.isdecimal() and len(w) <= MAX_DIGITS and least <= int(w) <= most for w in words)
    return [int(word) for word in words] if all(right) else []


def seeds(text: str, first: int) -> Axis:
    """The axis of seeds: `3` are three, from the first one on; `4,7` are these."""
    found = _numbers(text, 0, 10**MAX_DIGITS)
    if len(found) == 1:
        found = list(range(first, first + found[0])) if found[0] <= MAX_POINTS else []
    if not found:
        raise UsageError(f"--seeds {text[:80]}: expected how many, as in 3, or which, as in 4,7,9.")
    return named("seed", "seed", found)


def agents(text: str) -> Axis:
    """Numbers of agents, as in `2,5`."""
    found = _numbers(text, 1, MOST_RANKS)
    if not found:
        raise UsageError(f"-n {text[:80]}: expected numbers of agents, as in 5 or 2,3,5.")
    return "agents", [Choice(str(number), facts={"ranks": number}) for number in found]


def varied(text: str) -> Axis:
    """`learn.lr=0.001,0.0005`; lists in brackets, as in `learn.widths=[32],[64,64]`."""
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not values.strip():
        raise UsageError(f"--vary {text}: expected a setting and values, as in learn.lr=0.01,0.1.")
    found = config.parse_value(f"[{values}]")
    if not isinstance(found, list):
        found = [config.parse_value(value.strip()) for value in values.split(",")]
    return named(key, key, found)


def named(axis: str, key: str, values: Sequence[object]) -> Axis:
    """Values of one setting."""
    return axis, [Choice(_label(value), {key: value}) for value in values]


def _label(value: object) -> str:
    if isinstance(value, list):
        return "-".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def hostfiles(patterns: Sequence[str], emulate: bool, shared_disk: bool = False) -> Axis:
    """Mixes of hosts, one per file; emulated on this machine, or used as they are."""
    paths = [Path(pattern) for pattern in patterns]
    files = [f for p in paths for f in sorted(Path(p.anchor).glob(str(p.relative_to(p.anchor))))]
    if not files:
        raise UsageError(f"--hostfiles {' '.join(patterns)}: there is no such file.")
    return "hosts", [_mix(file, emulate, shared_disk) for file in files]


def _mix(file: Path, emulate: bool, shared_disk: bool) -> Choice:
    """Rank 0 writes the results, so the first host must be this one, or all share a disk."""
    hosts = read_hosts(file)
    facts: dict[str, Any] = {"ranks": total(hosts), "servers": total(hosts, serving=True)}
    if emulate:
        return Choice(file.stem, {"emulate": emulated(hosts)}, facts)
    if not shared_disk and not is_here(hosts[0].name):
        raise UsageError(
            f"{file}: its first host, {hosts[0].name}, gets the results, but is not this machine: "
            "give --emulate to play the hosts here, start the sweep on that host, or say "
            "--shared-disk where --out is on a disk that all of them share."
        )
    return Choice(file.stem, {}, facts | {"hostfile": str(file.absolute())})


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write report.html, figures/ and table.csv from what is finished; what to say of them."""
    runs = finished_runs(folder, points)
    if not runs:
        return ["No point is finished: there is nothing to report."]
    same = len({tuple(run.tasks) for run in runs.values()}) == 1
    scale = scale_for(list(runs.values())) if same else None
    rows: list[dict[str, object]] = []
    for point in (point for point in points if point.name in runs):
        run = runs[point.name]
        facts = costs(run)
        facts |= {name: it.single for name, it in Measured(run, scale).measures().items()}
        rows.append({"name": point.name, **point.settings, "ranks": point.ranks, **facts})
    write_csv(folder / "table.csv", rows)
    notes = [f"Table:   {folder / 'table.csv'}"]
    try:
        comparison = compare(list(runs.values()))
    except UsageError as error:  # runs of other tasks are no comparison, but each is there
        return [*notes, f"No report: {error}"]
    pictures = comparison_pictures(comparison).files(folder / "figures")
    files = pictures | {folder / "report.html": page(comparison).encode()}
    for path, data in files.items():
        write_whole(path, data)
    notes += [f"Figures: {folder / 'figures'}"] if pictures else []
    return [*_answers(comparison), *notes, f"Report:  {folder / 'report.html'}"]


def _answers(comparison: Comparison) -> Iterator[str]:
    """Which mix of hosts is fastest; what sharing gained, where there is one way to share."""
    if hosts := mixes(comparison):
        yield from (f"{it.question} {it.answer}. {it.words}" for it in answers(comparison)[:2])
        yield from unlike(comparison.groups, hosts)
    shares = [group for group in comparison.groups if group.shares]
    if len(shares) == 1 and comparison.baseline is not None:
        yield f"Sharing: {Beside(shares[0], comparison.baseline)}."


def write_csv(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Rows as a table that any program reads."""
    held = io.StringIO()
    writer = csv.DictWriter(held, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, held.getvalue().encode())
