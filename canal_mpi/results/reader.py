"""Reading `run.h5`: everything is checked before it is used."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canal_mpi import config
from canal_mpi.errors import DamagedData, UsageError, import_extra
from canal_mpi.interfaces import Array, Columns
from canal_mpi.results.files import read
from canal_mpi.results.store import ARRAYS, SCHEMA, SCHEMA_VERSION, TABLES, decoded
from canal_mpi.state import strip_prefix

if TYPE_CHECKING:
    from canal_mpi.evaluation import Policy

LIMIT = 1 << 30  # bytes of a file, and of all its arrays together
COUNTS = ("step", "env_steps", "probe_steps", "updates", "rows", "length")


@dataclass(frozen=True, repr=False)
class Run:
    """A run as read from its file."""

    path: Path
    attributes: dict[str, Any]
    tables: dict[str, Columns]
    order: Array  # [agent, round - 1], names of tasks
    adjacency: Array  # [agent, agent], 1 where the row sends to the column
    tasks: list[str]
    score: Array  # [agent, after_round, task, episode]

    def __repr__(self) -> str:
        """One line."""
        agents, tasks = len(self.order), len(self.tasks)
        return f"Run({str(self.folder)!r}: {self.status}, agents: {agents}, tasks: {tasks})"

    def __getitem__(self, table: str) -> Columns:
        """A table as NumPy columns; evaluations are an array, `score`."""
        if table not in self.tables:
            raise KeyError(f"no table '{table}': there are {', '.join(self.tables)}, and `score`")
        return self.tables[table]

    def frame(self, table: str) -> Any:
        """A table as a pandas.DataFrame."""
        return import_extra("pandas", "frames").DataFrame(self.tables[table])

    def policy(
        self, agent: int | None = None, trust: bool = False, tag: str = "latest"
    ) -> "Policy":
        """An agent's policy as its newest checkpoint has it: `policy.act(task, observation)`.

        With the tag `best`, a task is played by the network of right after it where that scored
        better. Modules that the run's job names are imported only with `trust`.
        """
        from canal_mpi.evaluation import load_policy

        return load_policy(self, self.agents[0] if agent is None else agent, trust, tag)

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

    @cached_property
    def job(self) -> dict[str, Any]:
        """The job's settings by their dotted names."""
        try:
            return config.read_toml(str(self.attributes.get("job", "")).encode(), "its job")
        except UsageError:
            return {}

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the job by its dotted key; the default where it is of another type."""
        found = self.job.get(key, default)
        return found if default is None or isinstance(found, type(default)) else default

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that the run used."""
        try:
            found = json.loads(str(self.attributes.get("versions", "{}")))
        except (ValueError, RecursionError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def load(run: str | Path) -> Run:
    """The tables of a run, from its folder or its run.h5; everything is checked before use."""
    path = run_file(Path(run))
    facts, arrays = read(path, LIMIT, SCHEMA.__contains__)
    _check_version(path, facts)
    for name, column in SCHEMA.items():
        if name not in arrays:
            raise _bad(path, f"'{name}' is missing")
        found, ndim = arrays[name], len(column.dims) or 1
        if found.dtype != np.dtype(column.dtype) or found.ndim != ndim:
            raise _bad(path, f"'{name}' is {found.dtype} with {found.ndim} dimensions")
    arrays = {name: decoded(array) for name, array in arrays.items()}
    rows = {name: array for name, array in arrays.items() if name not in ARRAYS}
    tables = {table: strip_prefix(table, rows) for table in TABLES if table != "evaluation"}
    order, adjacency, tasks, score, _ = (arrays[name] for name in ARRAYS)
    attributes = {name: _plain(value) for name, value in facts.items()}
    found_run = Run(path, attributes, tables, order, adjacency, tasks.tolist(), score)
    for why in _flaws(found_run):
        raise _bad(path, why)
    return found_run


def run_file(path: Path) -> Path:
    """The run.h5 that a user means by a folder or a file."""
    file = path / "run.h5" if path.is_dir() else path
    if not file.exists():
        what = "holds no run.h5" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}; name the folder of a run, as in runs/NAME.")
    return file


def _bad(path: Path, why: str) -> DamagedData:
    return DamagedData(f"{path} is not as canal-mpi writes it: {why}.")


def _check_version(path: Path, facts: dict[str, Any]) -> None:
    if not {"schema_version", "job"} <= facts.keys():
        raise UsageError(f"{path} is a file of canal-mpi, but not the results of a run.")
    version = facts["schema_version"]
    if not isinstance(version, int | np.integer) or version < 1:
        raise _bad(path, f"schema_version is {version!r}")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema version {version}; this program reads version "
            f"{SCHEMA_VERSION}: run the job again, or use the canal-mpi that wrote it."
        )


def _flaws(run: Run) -> Iterator[str]:
    """Where sizes don't fit, rows name agents, rounds or tasks of no run, or counts are negative.

    What comes after a flaw relies on there being none.
    """
    for name, table in run.tables.items():
        if len({len(column) for column in table.values()}) > 1:
            yield f"the columns of '{name}' differ in length"
    shape = agents, rounds = run.order.shape
    if not all(shape) or run.adjacency.shape != (agents, agents):
        yield "its orders and its topology don't fit"
    if run.score.shape[:3] != (agents, rounds + 1, len(run.tasks)):
        yield f"evaluation/score has the shape {run.score.shape}"
    known = dict.fromkeys(("agent", "from", "to"), np.array(run.agents))
    known |= {"round": np.arange(1, rounds + 1), "task": np.array(run.tasks)}
    for name in run.tables.keys() - {"agents", "faults"}:  # env servers are no agents
        for short, column in run[name].items():
            if short in known and not np.isin(column, known[short]).all():
                yield f"/{name}/{short} names what is not in the run"
            if short in COUNTS and (column < 0).any():
                yield f"/{name}/{short} holds a negative number"


def _plain(value: Any) -> Any:
    """An attribute as a text, a number, or a list of texts."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if np.ndim(value) == 0:
        return value.item() if hasattr(value, "item") else value
    return [str(item) for item in np.ravel(value)[:100]]
