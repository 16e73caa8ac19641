"""What a sweep leaves: one report that compares its runs, and `sweep.h5` with a row a point."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.cluster.marker import status_of
from canal_mpi.errors import CanalError, UsageError
from canal_mpi.report.write import write_report
from canal_mpi.results.compare import mix
from canal_mpi.results.files import write_whole
from canal_mpi.results.hdf5 import image, write_dataset
from canal_mpi.results.reading import Run, load
from canal_mpi.results.summary import Measured, scale_for
from canal_mpi.schema import TEXT
from canal_mpi.sweep.engine import FINISHED
from canal_mpi.sweep.grid import Point

ABOUT = {
    "name": "the point, and its run directory beside this file",
    "status": "finished, or how far its run is",
    "agents": "agents of the run",
    "seed": "seed of the run",
    "hosts": "emulated hosts, those of a kind counted; empty where ranks ran as they are",
    "slowest": "speed of the slowest emulated device, 1 where none was slowed",
    "env_steps": "own training steps in the environment, of all agents together",
    "probe_steps": "steps spent on choosing lessons, of all agents together",
    "seconds": "wall time inside tasks, of the slowest agent",
}


def all_finished(folder: Path, points: Sequence[Point]) -> bool:
    """Whether nothing is left to run."""
    return all(status_of(folder / point.name) == FINISHED for point in points)


def collect(folder: Path, points: Sequence[Point]) -> list[str]:
    """Write report.html and sweep.h5 from what is finished; a line for each, or why not."""
    runs = {
        point.name: load(folder / point.name)
        for point in points
        if status_of(folder / point.name) == FINISHED
    }
    if not runs:
        return ["No point is finished: there is nothing to report."]
    write_whole(folder / "sweep.h5", image(lambda file: _fill(file, folder, points, runs)))
    said = [f"Results: {folder / 'sweep.h5'}"]
    try:
        write_report([folder / name for name in runs], folder / "report.html")
        said.append(f"Report:  {folder / 'report.html'}")
    except UsageError as error:  # runs of other tasks are no comparison, but each is there
        said.append(f"No report: {error}")
    return said


def _fill(file: Any, folder: Path, points: Sequence[Point], runs: dict[str, Run]) -> None:
    file.attrs["kind"] = "sweep"
    file.attrs["description"] = "A sweep of canal-mpi: in every group, row k is about point k."
    facts = [_facts(folder, point, runs.get(point.name)) for point in points]
    for name, about in ABOUT.items():
        write_dataset(
            file.require_group("points"), name, _column([f[name] for f in facts]), description=about
        )
    for axis in dict.fromkeys(axis for point in points for axis in point.settings):
        labels = [point.settings.get(axis, "") for point in points]
        about = "what was varied"
        write_dataset(file.require_group("settings"), axis, _column(labels), description=about)
    _fill_measures(file.require_group("measures"), points, runs)


def _facts(folder: Path, point: Point, run: Run | None) -> dict[str, Any]:
    known = dict.fromkeys(ABOUT, 0) | {"seconds": np.nan, "slowest": np.nan}
    if run is not None:
        tasks = run["tasks"]
        known |= {
            "env_steps": int(tasks["env_steps"].sum()),
            "probe_steps": int(tasks["probe_steps"].sum()),
            "seconds": run.seconds,
            "slowest": float(run["agents"]["speed"].min()),
        }
    return known | {
        "name": point.name,
        "status": status_of(folder / point.name),
        "agents": point.ranks - point.servers,
        "seed": point.job.seed,
        "hosts": mix(point.job.emulate) if point.job.emulate else "",
    }


def _fill_measures(group: Any, points: Sequence[Point], runs: dict[str, Run]) -> None:
    """Each measure of each run as one number, on a scale that all runs of the same tasks share."""
    same = len({tuple(run.tasks) for run in runs.values()}) == 1
    try:
        scale = scale_for(list(runs.values())) if same else None
    except CanalError:
        scale = None
    found = {name: Measured(run, scale).measures() for name, run in runs.items()}
    names = dict.fromkeys(name for measures in found.values() for name in measures)
    for name in names:
        known = [found.get(point.name, {}).get(name) for point in points]
        about = next(measure.about for measure in known if measure is not None)
        values = [np.nan if measure is None else measure.single for measure in known]
        family, _, short = name.partition("/")
        write_dataset(
            group.require_group(family), short, _column(values), description=f"{about} (one number)"
        )


def _column(values: Sequence[Any]) -> Any:
    if values and isinstance(values[0], str):
        return np.array([value.encode()[:64] for value in values], dtype=TEXT)
    return np.array(values)
