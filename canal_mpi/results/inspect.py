"""What is in the files of a run, whether they are whole, whether two runs are the same; and the
tables of a run as CSV or Parquet."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from canal_mpi import config
from canal_mpi.errors import CanalError, import_extra
from canal_mpi.interfaces import Columns
from canal_mpi.results import checkpoint, files
from canal_mpi.results.files import attributes_of
from canal_mpi.results.progress import EVENTS, SMALL, clean
from canal_mpi.results.reader import LIMIT, Run, load, run_file
from canal_mpi.results.store import SCHEMA, TABLES

PARTS = ("evaluations/*.h5", "checkpoints/agent-*/*.h5", "membuf/agent-*/*.h5")


def tree(path: Path) -> list[str]:
    """The lines that describe a file, or the files of a run."""
    file = run_file(path)
    with files.opened(file, LIMIT) as content:
        facts = sorted(attributes_of(content, file).items())
        words = [(name, " ".join(str(value).split())) for name, value in facts]
        lines = [f"  @{name} = {text[:70]}{'…' * (len(text) > 70)}" for name, text in words]
        lines += [_line(name, item) for name, item in files.contents(content, file).items()]
    for pattern in PARTS if path.is_dir() else ():
        if found := [part for part in sorted(path.glob(pattern)) if part.is_file()]:
            size = sum(part.stat().st_size for part in found)
            lines.append(f"{path / pattern}: {len(found)} files, {size / 1e6:.2f} MB")
    return [str(file), *("".join(c for c in line if c.isprintable()) for line in lines)]


def _line(name: str, item: Any) -> str:
    depth, short = name.count("/") + 1, name.rpartition("/")[2]
    space = "  " * depth
    if not isinstance(item, h5py.Dataset):
        return f"{space}{short}/"
    marks = attributes_of(item, name)
    shape = " × ".join(str(size) for size in item.shape) or "one value"
    kind = "text" if item.dtype.kind in "SO" else str(item.dtype)
    unit = f" [{clean(marks['unit'])}]" if "unit" in marks else ""
    volatile = " (volatile)" if marks.get("volatile", False) else ""
    about = f"{shape:<14} {kind:<8} {clean(marks.get('description', ''))}{unit}{volatile}".rstrip()
    return f"{space}{short:<{max(22 - 2 * depth, 1)}} {about}"


# ── two runs ───────────────────────────────────────────────────────────────────────────────────


def differences(a: Path, b: Path) -> list[str]:
    """Where two runs differ, apart from volatile columns and attributes; empty: nowhere.

    Files that are not those of their own run.h5 count too."""
    ours, theirs = _content(a), _content(b)
    lines = [words for run in (a, b) if run.is_dir() for words in checkpoint.strangers(run)]
    lines += [
        f"{name}: only in {a if name in ours else b}"
        for name in sorted(ours.keys() ^ theirs.keys())
    ]
    for name in sorted(ours.keys() & theirs.keys()):
        compare = _other_job if name == "@job" else _difference
        line = compare(ours[name], theirs[name])
        lines += [f"{name}: {line}"] if line else []
    return lines


def _content(path: Path) -> dict[str, Any]:
    """Everything in a run.h5 that must be the same for the same seed."""
    run = load(path)
    volatile = {"volatile", *run.attributes.get("volatile", ())}
    facts = {f"@{name}": value for name, value in run.attributes.items() if name not in volatile}
    wanted = lambda name: name not in SCHEMA or not SCHEMA[name].volatile  # noqa: E731
    return facts | files.read_arrays(run_file(path), LIMIT, wanted)


def _other_job(a: Any, b: Any) -> str:
    """The settings that differ; a setting that only one version knows does not count."""
    if a == b:
        return ""
    try:
        odd = config.differences(*(config.from_toml(str(text)) for text in (a, b)))
    except CanalError:
        return "differs"
    return ", ".join(f"{key} is {x!r} against {y!r}" for key, (x, y) in odd.items())


def _difference(a: Any, b: Any) -> str:
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{x.dtype} {x.shape} against {y.dtype} {y.shape}"
    # Byte by byte: two NaN are the same where their bits are.
    raw = [np.frombuffer(z.tobytes(), np.uint8).reshape(z.size, z.itemsize) for z in (x, y)]
    odd = np.flatnonzero((raw[0] != raw[1]).any(axis=-1))
    if not len(odd):
        return ""
    first = np.unravel_index(int(odd[0]), x.shape)
    place = ", ".join(str(int(k)) for k in first)
    return (
        f"{len(odd)} of {x.size} values differ, first at [{place}]: {x[first]} against {y[first]}"
    )


# ── is it whole? ───────────────────────────────────────────────────────────────────────────────


def verify_all(path: Path) -> tuple[int, list[str]]:
    """How many files were looked at, and what is wrong with them or missing."""
    kinds, inside = (".h5", ".json", ".jsonl", ".toml"), sorted(path.rglob("*"))
    known = [file for file in inside if file.suffix in kinds and file.name[0] != "."]
    found = {file: verify(file) for file in (known if path.is_dir() else [path])}
    wrong = [words for flaws in found.values() for words in flaws]
    if found.get(path / "run.h5") == []:
        wrong += checkpoint.strangers(path)
    return len(found), list(dict.fromkeys(wrong))


def verify(path: Path) -> list[str]:
    """What is wrong with a file; nothing if it is as it should be."""
    try:
        if path.suffix == ".toml":
            config.parse_toml(files.read_bytes(path, SMALL), str(path))
        elif path.suffix == ".json":
            json.loads(files.read_bytes(path, SMALL))
        elif path.suffix == ".jsonl":
            for line in io.BytesIO(files.read_bytes(path, EVENTS)):
                json.loads(line[:SMALL])
        else:
            _verify_hdf5(path)
        return []
    except (CanalError, ValueError, RecursionError) as error:
        return [str(error) if str(path) in str(error) else f"{path}: {error}"]


def _verify_hdf5(path: Path) -> None:
    about = files.read_attributes(path)
    kind = about.get("kind")
    if "schema_version" in about:
        load(path)
    elif "membuf" in (kind, *path.parts[-3:-2]):
        checkpoint.read_lesson(path)
    else:
        if kind == "checkpoint" or checkpoint.NAME.fullmatch(path.name):
            checkpoint.checked(path)
        files.read_finite(path, prefix="learner/" if kind == "checkpoint" else "")


# ── other formats ──────────────────────────────────────────────────────────────────────────────


def export(path: Path, kind: str, out: Path | None = None) -> list[Path]:
    """Write a run's tables; the files it made."""
    run = load(path)
    folder = out or run.folder / kind
    write = {"csv": _csv, "parquet": _parquet}[kind]
    made = []
    for name, columns in _tables(run).items():
        made.append(folder / f"{name}.{kind}")
        files.write_whole(made[-1], write(name, columns))
    return made


def _tables(run: Run) -> dict[str, Columns]:
    """Every table, with the evaluations as rows too."""
    agent, after, task, episode = np.nonzero(~np.isnan(run.score))
    evaluation = {
        "agent": np.array(run.agents, dtype="<i4")[agent],
        "after_round": after.astype("<i4"),
        "task": np.array(run.tasks, dtype=str)[task],
        "episode": episode.astype("<i4"),
        "score": run.score[agent, after, task, episode],
    }
    return {**run.tables, "evaluation": evaluation}


def _csv(name: str, columns: Columns) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return text.getvalue().encode()


def _parquet(name: str, columns: Columns) -> bytes:
    pa = import_extra("pyarrow", "parquet")
    parquet = import_extra("pyarrow.parquet", "parquet")
    arrays, target = {short: pa.array(c) for short, c in columns.items()}, pa.BufferOutputStream()
    fields = []
    for short, array in arrays.items():
        marks = {"description": TABLES[name][short].about, "unit": TABLES[name][short].unit}
        fields.append(pa.field(short, array.type, metadata=marks))
    table = pa.Table.from_arrays(list(arrays.values()), schema=pa.schema(fields))
    parquet.write_table(table, target)
    return bytes(target.getvalue().to_pybytes())
