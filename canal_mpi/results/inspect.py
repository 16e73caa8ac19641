"""What is in the files of a run, whether they are whole, whether two runs are the same; and the
tables of a run in other formats: CSV, Parquet, TensorBoard."""

import csv
import io
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from canal_mpi import config
from canal_mpi.errors import CanalError, DamagedData, import_extra
from canal_mpi.interfaces import KNOWN_FLAGS, LAST, TRUNCATED, Columns
from canal_mpi.results.checkpoint import NAME
from canal_mpi.results.files import (
    attributes_of,
    checked_image,
    flaw,
    parse_arrays,
    parse_attributes,
    read_bytes,
    walk,
    write_whole,
)
from canal_mpi.results.progress import clean
from canal_mpi.results.reader import LIMIT, Run, allowance, load, open_file, run_file
from canal_mpi.results.store import TABLES

PARTS = ("evaluations/*.h5", "checkpoints/agent-*/*.h5", "membuf/agent-*/*.h5")
Facts = dict[str, Any]


def tree(path: Path) -> list[str]:
    """The lines that describe a file, or the files of a run."""
    file = run_file(path)
    with open_file(file) as opened:
        facts = sorted(attributes_of(opened, str(file)).items())
        words = [(name, " ".join(str(value).split())) for name, value in facts]
        lines = [f"  @{name} = {text[:70]}{'…' * (len(text) > 70)}" for name, text in words]
        lines += [_line(name, item) for name, item in walk(opened, str(file))]
    for pattern in PARTS if path.is_dir() else ():
        if found := [part for part in sorted(path.glob(pattern)) if part.is_file()]:
            size = sum(part.stat().st_size for part in found)
            lines.append(f"{path / pattern}: {len(found)} files, {size / 1e6:.2f} MB")
    return [str(file), *("".join(c for c in line if c.isprintable()) for line in lines)]


def _line(name: str, item: Any) -> str:
    depth, short = name.count("/") + 1, name.rpartition("/")[2]
    space = "  " * depth
    if item is None:
        return f"{space}{short}  a link to somewhere else; not followed"
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
    """Where two runs differ, apart from volatile columns and attributes; empty: nowhere."""
    ours, theirs = _content(a), _content(b)
    lines = [
        f"{name}: only in {a if name in ours else b}"
        for name in sorted(ours.keys() ^ theirs.keys())
    ]
    for name in sorted(ours.keys() & theirs.keys()):
        compare = _other_job if name == "@job" else _difference
        line = compare(ours[name], theirs[name])
        lines += [f"{name}: {line}"] if line else []
    return lines


def _content(path: Path) -> Facts:
    """Everything in a run.h5 that must be the same for the same seed."""
    load(path)  # checks it
    file = run_file(path)
    left = allowance(file)
    with open_file(file) as opened:
        facts = attributes_of(opened, str(file))
        volatile = {"volatile", *(str(name) for name in np.ravel(facts.get("volatile", [])))}
        found = {f"@{name}": value for name, value in facts.items() if name not in volatile}
        for name, item in walk(opened, str(file)):
            if item is None:
                raise DamagedData(f"{file}: '{name}' is a link, which can't be compared.")
            if isinstance(item, h5py.Group) or attributes_of(item, name).get("volatile", False):
                continue
            left -= item.size * item.dtype.itemsize
            if (why := flaw(item)) or left < 0:
                raise DamagedData(f"{file}: '{name}' {why or 'is too large'}.")
            found[name] = item[()]
    return found


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
    if x.dtype.kind == "O" or x.ndim == 0:
        return "" if bool(np.all(x == y)) else "differs"
    if x.tobytes() == y.tobytes():
        return ""
    ours, theirs = (np.ascontiguousarray(v).view(np.uint8).reshape(-1, x.itemsize) for v in (x, y))
    odd = np.flatnonzero((ours != theirs).any(axis=1))
    first = np.unravel_index(int(odd[0]), x.shape)
    place = ", ".join(str(int(k)) for k in first)
    return (
        f"{len(odd)} of {x.size} values differ, first at [{place}]: {x[first]} against {y[first]}"
    )


# ── is it whole? ───────────────────────────────────────────────────────────────────────────────


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file of a run that can be verified."""
    if not path.is_dir():
        return [path]
    kinds = (".h5", ".json", ".jsonl", ".toml")
    found = [p for p in sorted(path.rglob("*")) if p.suffix in kinds and p.name[0] != "."]
    return [p for p in found if not p.is_dir() or p.suffix == ".h5"]


def verify(path: Path) -> list[str]:
    """What is wrong with a file; nothing if it is as it should be."""
    try:
        if path.suffix != ".h5":
            return _text_trouble(path)
        data = checked_image(path)
        about = parse_attributes(data, str(path))
        if "schema_version" in about:
            load(path)
            return []
        columns = parse_arrays(data, str(path))
        return [f"{path}: {words}" for words in _trouble(path, about, columns)]
    except CanalError as error:
        return [str(error)]
    except (ValueError, LookupError, TypeError) as error:
        return [f"{path}: {type(error).__name__}: {error}"]


def _text_trouble(path: Path) -> list[str]:
    data = read_bytes(path, LIMIT)
    try:
        text = data.decode()
        if path.suffix == ".toml":
            tomllib.loads(text)
            return []
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            json.loads(line)
    except (ValueError, RecursionError) as error:
        return [f"{path}: {error}"]
    return []


def _trouble(path: Path, about: Facts, columns: Columns) -> Iterator[str]:
    kind = about.get("kind")
    if kind in ("sweep", "study"):
        yield from _equal_lengths(columns)
    elif kind == "checkpoint" or NAME.fullmatch(path.name):
        yield from _checkpoint(about, columns)
    elif kind == "membuf":
        yield from _membuf(columns)
    else:
        yield from _finite(columns)


def _equal_lengths(columns: Columns) -> Iterator[str]:
    for group in sorted({name.rpartition("/")[0] for name in columns}):
        lengths = {len(c) for name, c in columns.items() if name.rpartition("/")[0] == group}
        if len(lengths) != 1:
            yield f"the columns of '/{group}' differ in length"


def _checkpoint(about: Facts, columns: Columns) -> Iterator[str]:
    for name in ("run_id", "agent", "agents", "first_agent", "job", "round"):
        if name not in about:
            yield f"lacks the attribute {name}"
    for name in ("round", "attempt/numbers", "streams/explore", "streams/draws", "record/counts"):
        if name not in columns:
            yield f"lacks {name}"
    if int(columns["round"][0]) != int(about["round"]):
        yield f"is of round {int(columns['round'][0])} inside and of {about['round']} outside"
    yield from _finite({name: c for name, c in columns.items() if name.startswith("learner/")})


def _membuf(columns: Columns) -> Iterator[str]:
    """Rows of play: equal lengths, known flags, every segment closed."""
    names = ("state", "action", "reward", "flags")
    if missing := [name for name in names if name not in columns]:
        yield f"lacks {', '.join(missing)}"
        return
    yield from _equal_lengths({name: columns[name] for name in names})
    flags = columns["flags"]
    if (flags & ~np.uint8(KNOWN_FLAGS)).any():
        yield "holds unknown flags"
    if len(flags) and not flags[-1] & LAST:
        yield "its play is not closed"
    if ((flags[:-1] & TRUNCATED) != 0)[(flags[1:] & LAST) == 0].any():
        yield "a cut is not followed by its last state"
    yield from _finite(columns)


def _finite(columns: Columns) -> Iterator[str]:
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            yield f"{name} holds a number that is not finite"


# ── other formats ──────────────────────────────────────────────────────────────────────────────


def export(path: Path, kind: str, out: Path | None = None) -> list[Path]:
    """Write a run's tables; the files it made."""
    run = load(path)
    folder = out or run.folder / kind
    if kind == "tensorboard":
        return _tensorboard(run, folder)
    write = {"csv": _csv, "parquet": _parquet}[kind]
    made = []
    for name, columns in _tables(run).items():
        made.append(folder / f"{name}.{kind}")
        write_whole(made[-1], write(name, columns))
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
    fields = []
    for short, column in columns.items():
        known = TABLES[name][short]
        marks = {"description": known.about, "unit": known.unit}
        kind = pa.string() if column.dtype.kind == "U" else pa.from_numpy_dtype(column.dtype)
        fields.append(pa.field(short, kind, metadata=marks))
    target = pa.BufferOutputStream()
    arrays = [pa.array(c.tolist(), f.type) for c, f in zip(columns.values(), fields, strict=True)]
    parquet.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), target)
    return bytes(target.getvalue().to_pybytes())


def _tensorboard(run: Run, folder: Path) -> list[Path]:
    """One log per agent: returns, scores and losses over its own iterations and steps."""
    made = []
    for k, agent in enumerate(run.agents):
        made.append(folder / f"agent-{agent}")
        writer_of = import_extra("tensorboardX", "tensorboard").SummaryWriter
        with writer_of(logdir=str(made[-1])) as writer:
            for tag, step, value in _scalars(run, k, agent):
                writer.add_scalar(tag, value, step)
    return made


def _scalars(run: Run, k: int, agent: int) -> Iterator[tuple[str, int, float]]:
    sources = (("train", "step", "loss"), ("episodes", "step", "return"))
    for table, step, value in (*sources, ("curve", "env_steps", "score")):
        columns = run[table]
        for row in np.flatnonzero((columns["agent"] == agent) & np.isfinite(columns[value])):
            tag = f"{columns['task'][row]}/{value}"
            yield tag, int(columns[step][row]), float(columns[value][row])
    known = ~np.isnan(run.score[k])
    for after, task in zip(*np.nonzero(known.any(axis=2)), strict=True):
        mean = float(run.score[k, after, task][known[after, task]].mean())
        yield f"{run.tasks[task]}/evaluation after round", int(after), mean
