"""Choosing by name: from a table, or `module:name` from outside."""

import importlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from canal_mpi.errors import UsageError


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'RoadRunner'?`, or nothing where no name is close."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""


def check(kind: str, name: str, table: Iterable[str], outside: bool = True) -> None:
    """Refuse a name that is neither in the table nor, where allowed, `module:name`."""
    names = sorted(table)
    if name not in names and not (outside and ":" in name):
        hint = suggestion(name, names)
        raise UsageError(
            f"unknown {kind} '{name}'{hint or ';'} known: {', '.join(filter(None, names))}."
        )


def pick(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """The table's entry of that name; text entries and outside names are imported."""
    check(kind, name, table)
    found = table.get(name, name)
    return load(kind, found) if isinstance(found, str) else found


def load(kind: str, path: str) -> Any:
    """Import `module:name`; only for names from the user's own job."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, TypeError) as error:
        raise UsageError(f"{kind} '{path}': can't import '{module}': {error}.") from error
    except AttributeError as error:
        raise UsageError(f"{kind} '{path}': module '{module}' has no '{attribute}'.") from error
