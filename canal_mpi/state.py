"""States as named arrays: parts under a prefix, and plain records as columns."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.types import Array, Columns

T = TypeVar("T")


def under(prefix: str, columns: Mapping[str, Array]) -> Columns:
    """The columns with their names under a prefix."""
    return {f"{prefix}/{name}": column for name, column in columns.items()}


def inside(prefix: str, columns: Mapping[str, Array]) -> Columns:
    """The columns that `under` put there."""
    start = f"{prefix}/"
    return {n.removeprefix(start): c for n, c in columns.items() if n.startswith(start)}


def record_to_columns(record: Any) -> Columns:
    """A dataclass of numbers, texts and arrays, a column a field."""
    return {part.name: _column(getattr(record, part.name)) for part in fields(record)}


def record_from_columns(cls: type[T], columns: Mapping[str, Array]) -> T:
    """The record that `record_to_columns` wrote; fields it did not know keep their defaults."""
    known = {part.name: part for part in fields(cls)}  # type: ignore[arg-type]
    odd = columns.keys() - known.keys()
    if odd:
        raise DamagedData(f"a saved {cls.__name__} has the unknown parts {sorted(odd)}")
    return cls(**{name: _value(column) for name, column in columns.items()})


def _column(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value.reshape(1, *value.shape)  # one dimension more than a number has
    if isinstance(value, str):
        raw = value.encode()
        return np.array(raw, dtype=f"S{max(len(raw), 1)}")
    return np.asarray(value)


def _value(column: Array) -> Any:
    if column.ndim:
        return column[0]
    value = column.item()
    return value.decode() if isinstance(value, bytes) else value
