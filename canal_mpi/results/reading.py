"""Reading `run.h5`: everything is checked before it is used, and what is missing is told."""

import io
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from canal_mpi.errors import DamagedData, StorageError, UsageError
from canal_mpi.results.hdf5 import BLOCK, MAGIC, arrays_in, checked_image, flaw
from canal_mpi.schema import SCHEMA_VERSION, TABLES, Column
from canal_mpi.types import Array, Columns

if TYPE_CHECKING:
    from canal_mpi.rank.policy import Policy

LIMIT = 1 << 30  # bytes that the datasets of a file may unpack to, all together
LONGEST_TEXT = 4096


@dataclass(frozen=True)
class Run:
    """A run as its file tells it; `notes` say what is missing or odd."""

    path: Path
    attributes: dict[str, Any]
    tables: dict[str, Columns]
    order: Array  # [agent, round - 1], names of tasks
    adjacency: Array  # [agent, agent], 1 where the row sends to the column
    tasks: list[str]
    score: Array  # [agent, after_round, task, episode]
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, table: str) -> Columns:
        """A table as NumPy columns."""
        return self.tables[table]

    def frame(self, table: str) -> Any:
        """A table as a pandas.DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise UsageError("frame() needs pandas: pip install pandas.") from error
        return pandas.DataFrame(self.tables[table])

    def policy(self, agent: int | None = None, trust: bool = False) -> "Policy":
        """An agent's policy as its newest checkpoint has it: `policy.act(task, observation)`.

        Modules that the run's job names are imported only with `trust`.
        """
        from canal_mpi.rank.policy import load_policy

        return load_policy(self, self.agents[0] if agent is None else agent, trust)

    @property
    def name(self) -> str:
        """What the folder of the run is called."""
        return self.folder.resolve().name

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def agents(self) -> list[int]:
        """The numbers of the agents, in the order of the first dimension of the arrays."""
        return agent_numbers(self.tables["agents"], len(self.order))

    @property
    def rounds(self) -> int:
        """Tasks that each agent learns."""
        return int(self.order.shape[1])

    @property
    def seconds(self) -> float:
        """Wall time inside tasks, of the slowest agent."""
        table = self["tasks"]
        each = [float(table["seconds"][table["agent"] == agent].sum()) for agent in self.agents]
        return max(each, default=0.0)

    @property
    def status(self) -> str:
        """Running, finished, stopped, degraded …, as rank 0 wrote it last."""
        return str(self.attributes.get("status", ""))

    @property
    def job(self) -> dict[str, Any]:
        """The job's settings, by section."""
        try:
            return tomllib.loads(str(self.attributes.get("job", "")))
        except (ValueError, RecursionError):
            return {}

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the job by its dotted key."""
        found: Any = self.job
        for name in key.split("."):
            if not isinstance(found, dict) or name not in found:
                return default
            found = found[name]
        return found

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that the run used."""
        try:
            found = json.loads(str(self.attributes.get("versions", "{}")))
        except ValueError:
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def load(run: str | Path) -> Run:
    """The tables of a run, from its folder or its run.h5."""
    path = run_file(Path(run))
    with open_file(path) as file:
        return _Reader(path, file).run()


def run_file(path: Path) -> Path:
    """The run.h5 that a user means by a folder or a file."""
    file = path / "run.h5" if path.is_dir() else path
    if not file.exists():
        what = "holds no run.h5" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}; name the folder of a run, as in runs/NAME.")
    return file


def open_file(path: Path) -> Any:
    """An HDF5 file of ours, its checksum verified, for reading."""
    try:
        with path.open("rb") as file:
            front = file.read(len(MAGIC))
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}.") from error
    if front != MAGIC:
        raise UsageError(f"{path} is not a file of canal-mpi.")
    image = checked_image(path)
    try:
        return h5py.File(io.BytesIO(image), "r")
    except (OSError, RuntimeError) as error:
        raise DamagedData(f"{path} can't be opened as HDF5 after its {BLOCK} bytes.") from error


def checked_arrays(path: Path) -> Columns:
    """The arrays of any file of ours, each looked at before it is read."""
    with open_file(path) as file:
        return arrays_in(file, str(path), LIMIT)


def agent_numbers(agents: Columns, count: int) -> list[int]:
    """The agents' own numbers; a lone agent may be any."""
    ours = agents["agent"][agents["role"] == "agent"] if "role" in agents else agents["agent"]
    found = sorted({int(number) for number in ours})
    return found if len(found) == count else list(range(count))


class _Reader:
    """Takes a run out of an open file, distrusting it."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.file = path, file
        self.notes: list[str] = []
        self._left = LIMIT

    def run(self) -> Run:
        attributes = self._attributes()
        self._check_version(attributes)
        tables = {name: self._table(name) for name in TABLES if name != "evaluation"}
        order = self._array("agents/order", "S", 2)
        tasks = [str(task) for task in self._array("evaluation/task", "S", 1)]
        score = self._array("evaluation/score", "<f8", 4)
        adjacency = self._array("topology/adjacency", "|u1", 2)
        agents = len(order)
        if not agents or adjacency.shape != (agents, agents) or order.shape[1] < 1:
            raise self._bad("its orders and its topology don't fit")
        if score.shape[:3] != (agents, order.shape[1] + 1, len(tasks)):
            raise self._bad(f"evaluation/score has the shape {score.shape}")
        run = Run(self.path, attributes, tables, order, adjacency, tasks, score, self.notes)
        self._check_rows(run)
        return run

    def _bad(self, why: str) -> DamagedData:
        return DamagedData(f"{self.path} is not as canal-mpi writes it: {why}.")

    def _attributes(self) -> dict[str, Any]:
        held = self.file.attrs
        if "schema_version" not in held or "job" not in held:
            raise UsageError(f"{self.path} is a file of canal-mpi, but not the results of a run.")
        found: dict[str, Any] = {}
        for name in held:
            value = held[name]
            if isinstance(value, str | bytes):
                found[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
            elif np.ndim(value) == 0:
                found[name] = value.item() if hasattr(value, "item") else value
            else:
                found[name] = [str(item) for item in np.ravel(value)[:100]]
        return found

    def _check_version(self, attributes: dict[str, Any]) -> None:
        version = attributes["schema_version"]
        if not isinstance(version, int) or version < 1:
            raise self._bad(f"schema_version is {version!r}")
        if version != SCHEMA_VERSION:
            age = "an older" if version < SCHEMA_VERSION else "a newer"
            self.notes.append(
                f"The file has {age} schema ({version}; this program writes {SCHEMA_VERSION}): "
                "columns that it lacks are left empty, columns that are new are left out."
            )

    def _table(self, name: str) -> Columns:
        known = TABLES[name]
        columns = {
            short: self._column(f"{name}/{short}", column) for short, column in known.items()
        }
        lengths = {len(column) for column in columns.values() if column is not None}
        if len(lengths) > 1:
            raise self._bad(f"the columns of '{name}' differ in length")
        missing = [short for short, column in columns.items() if column is None]
        if missing:
            self.notes.append(f"/{name} has no {', '.join(missing)}.")
        rows = lengths.pop() if lengths else 0
        return {
            short: _empty(known[short], rows) if column is None else column
            for short, column in columns.items()
        }

    def _column(self, name: str, column: Column) -> Array | None:
        if not self._there(name):
            return None
        return self._array(name, "S" if column.dtype.startswith("S") else column.dtype, 1)

    def _there(self, name: str) -> bool:
        """Whether a dataset exists, reached by hard links alone."""
        group = self.file
        for part in name.split("/"):
            if not isinstance(group, h5py.Group) or part not in group:
                return False
            if not isinstance(group.get(part, getlink=True), h5py.HardLink):
                raise self._bad(f"'{name}' is a link to somewhere else")
            group = group[part]
        return isinstance(group, h5py.Dataset)

    def _array(self, name: str, dtype: str, ndim: int) -> Array:
        if not self._there(name):
            raise self._bad(f"it has no '{name}'")
        data = self.file[name]
        check_dataset(data, self._bad)
        text = dtype == "S"
        right = data.dtype.kind == "S" if text else data.dtype == np.dtype(dtype)
        if not right or data.ndim != ndim or (text and data.dtype.itemsize > LONGEST_TEXT):
            raise self._bad(f"'{name}' is {data.dtype} with {data.ndim} dimensions")
        self._left -= data.size * data.dtype.itemsize
        if self._left < 0:
            raise self._bad(f"its arrays are larger than {LIMIT >> 20} MB")
        try:
            found: Array = data[()]
        except (OSError, RuntimeError) as error:
            raise self._bad(f"'{name}' can't be read") from error
        return np.char.decode(found, "utf-8", "replace") if text else found

    def _check_rows(self, run: Run) -> None:
        agents = set(run.agents)
        for name in ("tasks", "episodes", "train", "curve"):
            table = run[name]
            if not {int(agent) for agent in np.unique(table["agent"])} <= agents:
                raise self._bad(f"/{name} tells of agents that the run has not")
            if (
                len(table["round"])
                and not 0 <= table["round"].min() <= table["round"].max() <= run.rounds
            ):
                raise self._bad(f"/{name} tells of rounds that the run has not")


def check_dataset(data: Any, bad: Any) -> None:
    """Refuse storage that reads other files, and filters that are not ours."""
    if why := flaw(data):
        raise bad(f"'{data.name}' {why}")


def _empty(column: Column, rows: int) -> Array:
    """A column that an older file lacks."""
    if column.dtype.startswith("S"):
        return np.full(rows, "", dtype="U1")
    return np.full(rows, np.nan if "f" in column.dtype else 0, dtype=column.dtype)


def of_tables(
    path: Path,
    attributes: dict[str, Any],
    tables: dict[str, Columns],
    orders: Sequence[Sequence[str]],
    tasks: Sequence[str],
    adjacency: Array,
    score: Array,
) -> Run:
    """A run that is still in memory, as a file of it would be read."""
    texts = {
        name: {
            short: np.char.decode(column, "utf-8", "replace")
            if column.dtype.kind == "S"
            else column
            for short, column in table.items()
        }
        for name, table in tables.items()
    }
    order = np.array([list(order) for order in orders])
    return Run(path, attributes, texts, order, adjacency, list(tasks), score)
