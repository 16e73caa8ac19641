"""Reading `run.h5` and the lessons of an earlier run: everything is checked before it is used."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canal_mpi.errors import DamagedData, UsageError, import_extra
from canal_mpi.interfaces import Array, Columns
from canal_mpi.results.files import (
    RATIO,
    attributes_of,
    checked_image,
    flaw,
    opened,
    read_arrays,
    walk,
)
from canal_mpi.results.store import SCHEMA_VERSION, TABLES, decoded

if TYPE_CHECKING:
    from canal_mpi.evaluation import Policy

LIMIT = 1 << 30  # bytes of a file, and of all its arrays together
LONGEST_TEXT = 4096


@dataclass(frozen=True)
class Run:
    """A run as read from its file."""

    path: Path
    attributes: dict[str, Any]
    tables: dict[str, Columns]
    order: Array  # [agent, round - 1], names of tasks
    adjacency: Array  # [agent, agent], 1 where the row sends to the column
    tasks: list[str]
    score: Array  # [agent, after_round, task, episode]

    def __getitem__(self, table: str) -> Columns:
        """A table as NumPy columns."""
        return self.tables[table]

    def frame(self, table: str) -> Any:
        """A table as a pandas.DataFrame."""
        return import_extra("pandas", "frames").DataFrame(self.tables[table])

    def policy(self, agent: int | None = None, trust: bool = False) -> "Policy":
        """An agent's policy as its newest checkpoint has it: `policy.act(task, observation)`.

        Modules that the run's job names are imported only with `trust`.
        """
        from canal_mpi.evaluation import load_policy

        return load_policy(self, self.agents[0] if agent is None else agent, trust)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def agents(self) -> list[int]:
        """The numbers of the agents, in the order of the first dimension of the arrays."""
        table = self.tables["agents"]
        found = sorted({int(number) for number in table["agent"][table["role"] == "agent"]})
        return found if len(found) == len(self.order) else list(range(len(self.order)))

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
        except (ValueError, RecursionError):
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


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """An HDF5 file of ours, its checksum verified, for reading."""
    try:
        data = checked_image(path, LIMIT)
    except DamagedData as error:
        if "is not a file of canal-mpi" not in str(error):
            raise
        raise UsageError(str(error)) from error
    with opened(data, str(path)) as file:
        yield file


def allowance(path: Path) -> int:
    """Bytes that the arrays of a file may take, all together."""
    return min(LIMIT, RATIO * path.stat().st_size)


def checked_arrays(path: Path) -> Columns:
    """The arrays of any file of ours, each checked before it is read."""
    return read_arrays(path, LIMIT)


class _Reader:
    """Takes a run out of an open file, trusting nothing in it."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self.attributes = attributes_of(file, str(path))
        if not {"schema_version", "job"} <= self.attributes.keys():
            raise UsageError(f"{path} is a file of canal-mpi, but not the results of a run.")
        version = self.attributes["schema_version"]
        if not isinstance(version, int | np.integer) or version < 1:
            raise self._bad(f"schema_version is {version!r}")
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema version {version}; this program reads version "
                f"{SCHEMA_VERSION}: run the job again, or use the canal-mpi that wrote it."
            )
        self._items = dict(walk(file, str(path)))
        self._left = allowance(path)

    def run(self) -> Run:
        tables = {
            name: {short: self._array(f"{name}/{short}", c.dtype, 1) for short, c in known.items()}
            for name, known in TABLES.items()
            if name != "evaluation"
        }
        for name, table in tables.items():
            if len({len(column) for column in table.values()}) > 1:
                raise self._bad(f"the columns of '{name}' differ in length")
        order = self._array("agents/order", "S", 2)
        tasks = [str(task) for task in self._array("evaluation/task", "S", 1)]
        score = self._array("evaluation/score", "<f8", 4)
        adjacency = self._array("topology/adjacency", "|u1", 2)
        agents = len(order)
        if not agents or adjacency.shape != (agents, agents) or order.shape[1] < 1:
            raise self._bad("its orders and its topology don't fit")
        if score.shape[:3] != (agents, order.shape[1] + 1, len(tasks)):
            raise self._bad(f"evaluation/score has the shape {score.shape}")
        facts = {name: _plain(value) for name, value in self.attributes.items()}
        run = Run(self.path, facts, tables, order, adjacency, tasks, score)
        self._check_rows(run)
        return run

    def _bad(self, why: str) -> DamagedData:
        return DamagedData(f"{self.path} is not as canal-mpi writes it: {why}.")

    def _array(self, name: str, dtype: str, ndim: int) -> Array:
        data: Any = self._items.get(name)
        if not hasattr(data, "chunks"):
            what = "is a link to somewhere else" if name in self._items else "is missing"
            raise self._bad(f"'{name}' {what}")
        if why := flaw(data):
            raise self._bad(f"'{name}' {why}")
        text = dtype.startswith("S")
        right = data.dtype.kind == "S" if text else data.dtype == np.dtype(dtype)
        if not right or data.ndim != ndim or (text and data.dtype.itemsize > LONGEST_TEXT):
            raise self._bad(f"'{name}' is {data.dtype} with {data.ndim} dimensions")
        self._left -= data.size * data.dtype.itemsize
        if self._left < 0:
            raise self._bad(f"its arrays announce over {allowance(self.path)} bytes")
        try:
            return decoded(data[()])
        except (OSError, RuntimeError) as error:
            raise self._bad(f"'{name}' can't be read") from error

    def _check_rows(self, run: Run) -> None:
        """Agents and rounds must be those of the run, and counts not negative."""
        agents = np.array(run.agents)
        for name in TABLES.keys() - {"agents", "faults", "evaluation"}:  # env servers are no agents
            for short in ("agent", "from", "to"):
                numbers = run[name].get(short, agents)
                if not np.isin(numbers, agents).all():
                    raise self._bad(f"/{name}/{short} names agents that are not in the run")
            if (run[name]["round"] > run.rounds).any():
                raise self._bad(f"/{name} has rows of rounds that are not in the run")
            for short in ("round", "step", "env_steps", "updates", "rows", "length"):
                if (run[name].get(short, agents + 1) < (short == "round")).any():
                    raise self._bad(f"/{name}/{short} holds a number that is too small")


def _plain(value: Any) -> Any:
    """An attribute as a text, a number, or a list of texts."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if np.ndim(value) == 0:
        return value.item() if hasattr(value, "item") else value
    return [str(item) for item in np.ravel(value)[:100]]
