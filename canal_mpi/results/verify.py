"""Is a file of a run whole, and is in it what should be? For `canal-mpi inspect --verify`."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.errors import CanalError, DamagedData, StorageError
from canal_mpi.results.checkpoint import NAME
from canal_mpi.results.hdf5 import check_image, parse_arrays, parse_attributes, read_bytes
from canal_mpi.schema import SCHEMA_VERSION, TABLES
from canal_mpi.types import CUT, KNOWN_FLAGS, LAST, Columns

Facts = dict[str, Any]


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file of a run that can be verified."""
    if not path.is_dir():
        return [path]
    found = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    return [p for p in found if p.suffix in (".h5", ".json", ".jsonl", ".toml")]


def verify(path: Path) -> list[str]:
    """What is wrong with a file; nothing if it is as it should be."""
    try:
        data = read_bytes(path)
        if path.suffix != ".h5":
            return list(_text(path, data))
        check_image(data, str(path))
        about, columns = parse_attributes(data, str(path)), parse_arrays(data, str(path))
        return [f"{path}: {words}" for words in _checks(path, about)(about, columns)]
    except (DamagedData, StorageError) as error:
        return [str(error)]
    except (CanalError, ValueError, KeyError, TypeError, IndexError) as error:
        return [f"{path}: {type(error).__name__}: {error}"]


def _checks(path: Path, about: Facts) -> Callable[[Facts, Columns], Iterator[str]]:
    if "schema_version" in about:
        return _results
    if about.get("kind") == "sweep":
        return _sweep
    if about.get("kind") == "study":
        return _study
    if about.get("kind") == "checkpoint" or NAME.fullmatch(path.name):
        return _checkpoint
    return _membuf if about.get("kind") == "membuf" else _finite


def _text(path: Path, data: bytes) -> Iterator[str]:
    try:
        text = data.decode()
        if path.suffix == ".toml":
            tomllib.loads(text)
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            if path.suffix != ".toml":
                json.loads(line)
    except ValueError as error:
        yield f"{path}: {error}"


def _results(about: Facts, columns: Columns) -> Iterator[str]:
    """run.h5: the schema, equal lengths, and numbers inside their ranges."""
    if about["schema_version"] != SCHEMA_VERSION:
        yield f"schema version {about['schema_version']}; this code knows {SCHEMA_VERSION}"
    for table, known in TABLES.items():
        if table == "evaluation":
            continue
        here = {short: columns.get(f"{table}/{short}") for short in known}
        missing = [short for short, column in here.items() if column is None]
        if missing:
            yield f"/{table} lacks {', '.join(missing)}"
            continue
        yield from _table(table, {short: c for short, c in here.items() if c is not None}, about)
    if columns["evaluation/score"].shape[0] != about["agents"]:
        yield "/evaluation/score has another number of agents than the run"


def _table(table: str, columns: Columns, about: Facts) -> Iterator[str]:
    if len({len(column) for column in columns.values()}) != 1:
        yield f"the columns of /{table} differ in length"
    for short, column in columns.items():
        wanted = np.dtype(TABLES[table][short].dtype)
        if column.dtype != wanted:
            yield f"/{table}/{short} is {column.dtype.str}, not {wanted.str}"
    if table == "faults":
        return  # who died may have been no agent, in no round
    first, agents = int(about.get("first_agent", 0)), int(about["agents"])
    donors = () if _had_lessons(about) else ("donor",)  # an earlier run may have had more agents
    for short in ("agent", "from", "to", *donors):
        numbers = columns.get(short, np.zeros(0, dtype=np.int64))
        odd = numbers[(numbers < first) | (numbers >= first + agents)]
        if len(odd):
            yield f"/{table}/{short} names agent {odd[0]}; the run has {agents} from {first} on"
    for short in ("round", "step", "env_steps", "updates", "rows", "length"):
        if (columns.get(short, np.zeros(0)) < (short == "round")).any():
            yield f"/{table}/{short} holds a number that is too small"


def _had_lessons(about: Facts) -> bool:
    """Whether lessons of an earlier run were offered."""
    try:
        return bool(tomllib.loads(str(about["job"]))["share"]["lessons"])
    except (KeyError, TypeError, ValueError):
        return False


def _sweep(about: Facts, columns: Columns) -> Iterator[str]:
    """sweep.h5: every column has a row for each point; measures may be unknown."""
    if len({len(column) for column in columns.values()}) != 1:
        yield "its columns differ in length"


def _study(about: Facts, columns: Columns) -> Iterator[str]:
    """study.h5: the columns of a group have one length; what is not known is NaN."""
    for group in sorted({name.partition("/")[0] for name in columns}):
        inside = [column for name, column in columns.items() if name.startswith(f"{group}/")]
        if len({len(column) for column in inside}) != 1:
            yield f"the columns of '{group}' differ in length"


def _checkpoint(about: Facts, columns: Columns) -> Iterator[str]:
    for name in ("run_id", "agent", "agents", "first_agent", "job", "round"):
        if name not in about:
            yield f"lacks the attribute {name}"
    for name in ("round", "attempt/numbers", "streams/explore", "streams/draws", "record/counts"):
        if name not in columns:
            yield f"lacks {name}"
    if int(columns["round"][0]) != int(about["round"]):
        yield f"is of round {int(columns['round'][0])} inside and of {about['round']} outside"
    learner = {name: c for name, c in columns.items() if name.startswith("learner/")}
    yield from _finite(about, learner)


def _membuf(about: Facts, columns: Columns) -> Iterator[str]:
    """Rows of play: equal lengths, known flags, every segment closed."""
    names = ("state", "action", "reward", "flags")
    missing = [name for name in names if name not in columns]
    if missing:
        yield f"lacks {', '.join(missing)}"
        return
    if len({len(columns[name]) for name in names}) != 1:
        yield "its columns differ in length"
    flags = columns["flags"]
    if (flags & ~np.uint8(KNOWN_FLAGS)).any():
        yield "holds unknown flags"
    if len(flags) and not flags[-1] & LAST:
        yield "its play is not closed"
    if ((flags[:-1] & CUT) != 0)[(flags[1:] & LAST) == 0].any():
        yield "a cut is not followed by its last state"
    yield from _finite(about, columns)


def _finite(about: Facts, columns: Columns) -> Iterator[str]:
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            yield f"{name} holds a number that is not finite"
