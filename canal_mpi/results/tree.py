"""What is in an HDF5 file of a run, for people; and whether two runs are the same."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from canal_mpi import config
from canal_mpi.errors import CanalError, UsageError
from canal_mpi.results.reading import LIMIT, check_dataset, load, open_file, run_file

PARTS = ("run.h5", "evaluations/*.h5", "checkpoints/agent-*/*.h5", "membuf/agent-*/*.h5")
DEEP = 6  # groups inside groups that are shown


def tree(path: Path) -> list[str]:
    """The lines that describe a file, or the files of a run."""
    if not path.is_dir():
        return _file(run_file(path))
    lines = _file(run_file(path))
    for pattern in PARTS[1:]:
        found = sorted(path.glob(pattern))
        if found:
            size = sum(file.stat().st_size for file in found)
            lines.append(f"{path / pattern}: {len(found)} files, {size / 1e6:.2f} MB")
    return lines


def _file(path: Path) -> list[str]:
    with open_file(path) as file:
        lines = [f"{path}"]
        for name in sorted(file.attrs):
            words = " ".join(str(file.attrs[name]).split())
            lines.append(f"  @{name} = {words[:70]}{'…' * (len(words) > 70)}")
        return lines + _group(file, 1)


def _group(group: Any, depth: int) -> list[str]:
    lines, space = [], "  " * depth
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            lines.append(f"{space}{name}  a link to somewhere else; not followed")
            continue
        item = group[name]
        if isinstance(item, h5py.Dataset):
            lines.append(f"{space}{name:<{max(22 - 2 * depth, 1)}} {_about(item)}")
        elif isinstance(item, h5py.Group) and depth < DEEP:
            lines.append(f"{space}{name}/")
            lines += _group(item, depth + 1)
    return lines


def _about(data: Any) -> str:
    shape = " × ".join(str(size) for size in data.shape) or "one value"
    marks = data.attrs
    unit = f" [{marks['unit']}]" if "unit" in marks else ""
    volatile = " (volatile)" if marks.get("volatile", False) else ""
    kind = "text" if data.dtype.kind in "SO" else str(data.dtype)
    return f"{shape:<14} {kind:<8} {marks.get('description', '')}{unit}{volatile}".rstrip()


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


def _content(path: Path) -> dict[str, Any]:
    """Everything in a run.h5 that must be the same for the same seed."""
    load(path)  # checks it
    found: dict[str, Any] = {}
    with open_file(run_file(path)) as file:
        volatile = {str(name) for name in np.ravel(file.attrs.get("volatile", []))}
        for name in file.attrs:
            if name not in volatile | {"volatile"}:
                found[f"@{name}"] = file.attrs[name]
        _collect(file, "", found)
    return found


def _collect(group: Any, prefix: str, found: dict[str, Any]) -> None:
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink) or prefix.count("/") > DEEP:
            raise UsageError(f"'{prefix}{name}' can't be compared: it is a link or too deep.")
        item = group[name]
        if isinstance(item, h5py.Group):
            _collect(item, f"{prefix}{name}/", found)
        elif not item.attrs.get("volatile", False):
            check_dataset(item, UsageError)
            if item.size * item.dtype.itemsize > LIMIT:
                raise UsageError(f"'{prefix}{name}' is too large to compare.")
            found[f"{prefix}{name}"] = item[()]


def _other_job(a: Any, b: Any) -> str:
    """The settings that differ; those that only one of two versions knows are none."""
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
    size = x.dtype.itemsize
    bytes_ = (np.ascontiguousarray(v).view(np.uint8).reshape(-1, size) for v in (x, y))
    odd = np.flatnonzero((next(bytes_) != next(bytes_)).any(axis=1))
    first = np.unravel_index(int(odd[0]), x.shape)
    place = ", ".join(str(int(k)) for k in first)
    return (
        f"{len(odd)} of {x.size} values differ, first at [{place}]: {x[first]} against {y[first]}"
    )
