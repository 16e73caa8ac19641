"""The tables of a run in other formats: CSV, Parquet, TensorBoard."""

import csv
import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.results.files import write_whole
from canal_mpi.results.reading import Run, load
from canal_mpi.schema import TABLES
from canal_mpi.types import Columns


def export(path: Path, kind: str, out: Path | None = None) -> list[Path]:
    """Write a run's tables; the files it made."""
    run = load(path)
    folder = out or run.folder / kind
    if kind == "tensorboard":
        return _tensorboard(run, folder)
    write = {"csv": _csv, "parquet": _parquet}[kind]
    made = []
    for name, columns in tables(run).items():
        file = folder / f"{name}.{kind}"
        write_whole(file, write(name, columns))
        made.append(file)
    return made


def tables(run: Run) -> dict[str, Columns]:
    """Every table, with the evaluations as rows too."""
    found = {name: columns for name, columns in run.tables.items() if name != "evaluation"}
    agent, after, task, episode = np.nonzero(~np.isnan(run.score))
    found["evaluation"] = {
        "agent": np.array(run.agents, dtype="<i4")[agent],
        "after_round": after.astype("<i4"),
        "task": np.array(run.tasks)[task] if len(task) else np.zeros(0, dtype="U1"),
        "episode": episode.astype("<i4"),
        "score": run.score[agent, after, task, episode],
    }
    return found


def _csv(name: str, columns: Columns) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return text.getvalue().encode()


def _parquet(name: str, columns: Columns) -> bytes:
    pa: Any = _extra("pyarrow", "parquet")
    from pyarrow import parquet

    fields = []
    for short, column in columns.items():
        known = TABLES[name][short]
        marks = {"description": known.about, "unit": known.unit}
        kind = pa.string() if column.dtype.kind == "U" else pa.from_numpy_dtype(column.dtype)
        fields.append(pa.field(short, kind, metadata=marks))
    pairs = zip(columns.values(), fields, strict=True)
    arrays = [pa.array(column.tolist(), field.type) for column, field in pairs]
    target = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), target)
    return bytes(target.getvalue().to_pybytes())


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"this needs {module}: pip install 'canal-mpi[{extra}]'.") from error


def _tensorboard(run: Run, folder: Path) -> list[Path]:
    """One log an agent: returns, scores and losses over its own turns and steps."""
    writer_of = _extra("tensorboardX", "tensorboard").SummaryWriter
    made = []
    for k, agent in enumerate(run.agents):
        path = folder / f"agent-{agent}"
        with writer_of(logdir=str(path)) as writer:
            for tag, step, value in _scalars(run, k, agent):
                writer.add_scalar(tag, value, step)
        made.append(path)
    return made


def _scalars(run: Run, k: int, agent: int) -> list[tuple[str, int, float]]:
    found: list[tuple[str, int, float]] = []
    sources = (("train", "step", "loss"), ("episodes", "step", "return"))
    for table, step, value in (*sources, ("curve", "env_steps", "score")):
        columns = run[table]
        for row in np.flatnonzero(columns["agent"] == agent):
            number = float(columns[value][row])
            if np.isfinite(number):
                task = str(columns["task"][row])
                found.append((f"{task}/{value}", int(columns[step][row]), number))
    known = ~np.isnan(run.score[k])
    for after, task_ in zip(*np.nonzero(known.any(axis=2)), strict=True):
        mean = float(run.score[k, after, task_][known[after, task_]].mean())
        found.append((f"{run.tasks[task_]}/evaluation after round", int(after), mean))
    return found
