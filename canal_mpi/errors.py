"""Errors with their exit codes, lookup of names with suggestions, and the log."""

import importlib
import inspect
import logging
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any


class CanalError(Exception):
    """An error with a message for the user; ends the program with `code`."""

    code = 70


class UsageError(CanalError):
    """Something the user asked for can't be done as asked."""

    code = 2


class DamagedData(CanalError):
    """A file or message fails its checks."""

    code = 65


class NotRepeatable(CanalError):
    """An environment can't be brought back to a saved state; its episode has to restart."""


class RankFailed(CanalError):
    """A rank can't continue: its environment or its learner broke."""

    code = 70


class DirectoryInUse(CanalError):
    """Another run writes to this run directory."""

    code = 73


class StorageError(CanalError):
    """Reading or writing a file failed."""

    code = 74


class Stopped(CanalError):
    """The run ends early, in good order; it can be resumed."""

    code = 75


class ProtocolError(CanalError):
    """A peer sent something else than the protocol says, or nothing at all."""

    code = 76


class RanksDiffer(CanalError):
    """The ranks don't run the same code, job or MPI."""

    code = 78


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'RoadRunner'?`, or nothing where no name is close."""
    from difflib import get_close_matches  # only mistakes load it

    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""


def check_name(kind: str, name: str, table: Iterable[str], outside: bool = True) -> None:
    """Refuse a name that is neither in the table nor, where allowed, `module:name`."""
    names = sorted(table)
    if name not in names and not (outside and ":" in name):
        hint = suggestion(name, names)
        known = ", ".join(filter(None, names)) + (", or module:name" if outside else "")
        raise UsageError(f"unknown {kind} '{name}'{hint or ';'} known: {known}.")


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """The table's entry of that name; text entries and outside names are imported."""
    check_name(kind, name, table)
    found = table.get(name, name)
    return import_name(kind, found) if isinstance(found, str) else found


TAKES = {  # what a function or class of the user's own is called with
    "algorithm": ("spaces", "job", "seed_of"),
    "network": ("shape", "widths", "layer_norm"),
    "order": ("tasks", "agent", "seed"),
    "policy": ("need", "offers"),
    "topology": ("size",),
}


def import_name(kind: str, path: str) -> Any:
    """Import `module:name`; only for names from the user's own job."""
    module, _, attribute = path.partition(":")
    there = import_module(module, f"{kind} '{path}'")
    found = getattr(there, attribute, None)
    if found is None:
        hint = suggestion(attribute, vars(there)) or "."
        raise UsageError(f"{kind} '{path}': module '{module}' has no '{attribute}'{hint}")
    if not callable(found):
        raise UsageError(f"{kind} '{path}': expected a function or class, not {found!r:.40}.")
    with suppress(ValueError):  # what is written in C may not tell
        try:
            inspect.signature(found).bind(*TAKES[kind])
        except TypeError as error:
            wanted = f"expected a function or class that takes ({', '.join(TAKES[kind])})"
            raise UsageError(f"{kind} '{path}': {wanted}: {error}.") from error
    return found


def import_module(module: str, whose: str) -> ModuleType:
    """A module that the user's own job names; what goes wrong inside it is said, with its place."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and module.endswith(".py"):
            words = f"a module is named without .py: '{module[:-3]}'"
        elif isinstance(error, ModuleNotFoundError) and error.name == module:
            words = f"there is no such module in {Path.cwd()} or among the installed ones"
        elif not isinstance(error, SyntaxError):  # that one names its place
            words += f" ({place(error)})"
        raise UsageError(f"{whose}: can't import '{module}': {words}.") from error


def place(error: BaseException) -> str:
    """Where it was raised: the innermost line that is the user's own, if any is."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (str(Path(__file__).parent), *sysconfig.get_paths().values(), "<")
    own = [frame for frame in frames if not frame.filename.startswith(ours)]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def described(error: BaseException) -> str:
    """An error of somebody else's code in a line: its kind, its words and where it was raised."""
    return f"{type(error).__name__}: {error} ({place(error)})"


def import_extra(module: str, extra: str) -> Any:
    """A library that only an extra of the package installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"this needs {module}: pip install 'canal-mpi[{extra}]'.") from error


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Say in one line what to install where a small install has left a library out."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{what} needs {error.name}: pip install {error.name}.") from error


logger = logging.getLogger("canal_mpi")
logger.addHandler(logging.NullHandler())
logger.propagate = False


class LogFile(logging.FileHandler):
    """A log whose lines are dropped where the disk is full: the error has its own line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback."""


def close_log() -> None:
    """Log nowhere from now on."""
    for handler in logger.handlers:
        with suppress(OSError):  # what a full disk did not take
            handler.close()
    logger.handlers = [logging.NullHandler()]


def log_to_file(path: Path, verbose: bool) -> None:
    """Send this process's log to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    close_log()
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
