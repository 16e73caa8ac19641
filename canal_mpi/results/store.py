"""`run.h5`: the results of a run, rewritten whole after every round."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.results.files import write_whole
from canal_mpi.results.hdf5 import image, write_dataset
from canal_mpi.schema import SCHEMA_VERSION, TABLES, TEXT, Rows
from canal_mpi.types import Array, Columns

VOLATILE_ATTRIBUTES = ("run_id", "versions", "status", "started", "finished", "resumes")


@dataclass
class RunInfo:
    """What is known about a run before it starts."""

    run_id: str
    seed: int
    job: str
    tasks: Sequence[str]
    first_agent: int
    orders: Sequence[Sequence[str]]
    edges: Sequence[tuple[int, int]]
    versions: dict[str, str]
    started: str = field(default_factory=lambda: now())
    resumes: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)  # rows of agents that died

    @property
    def agents(self) -> int:
        """How many agents the run has."""
        return len(self.orders)


def now() -> str:
    """The time, for people and for programs."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Store:
    """Collects the rows of all agents and writes them as one file."""

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.path, self.info = path, info
        self._parts: dict[str, list[Array]] = {}

    def clear(self) -> None:
        """Forget all rows but who died."""
        self._parts.clear()
        rows = Rows()
        for fault in self.info.faults:
            rows.add("faults", **{name: fault[name] for name in TABLES["faults"]})
        self.append(rows.take(), self.info.first_agent)

    @property
    def end(self) -> str:
        """What a run that came to its end is called."""
        return "degraded" if self.info.faults else "finished"

    def append(self, columns: Columns, agent: int) -> None:
        """Take in rows from one agent; anything that is not in the schema is refused."""
        for name, column in columns.items():
            table, _, short = name.partition("/")
            known = TABLES.get(table, {}).get(short)
            if known is None or column.dtype != np.dtype(known.dtype) or column.ndim != 1:
                raise DamagedData(f"agent {agent} sent the column '{name}' ({column.dtype.str})")
        for table in {name.partition("/")[0] for name in columns}:
            parts = {short: columns.get(f"{table}/{short}") for short in TABLES[table]}
            if len({None if p is None else len(p) for p in parts.values()}) != 1:
                raise DamagedData(f"agent {agent} sent unequal columns for '{table}'")
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)

    def table(self, name: str) -> Columns:
        """A table as it is now; the ledger in an order that does not depend on timing."""
        columns = {
            short: np.concatenate(
                [np.zeros(0, dtype=known.dtype), *self._parts.get(f"{name}/{short}", [])]
            )
            for short, known in TABLES[name].items()
        }
        if name != "exchange":
            return columns
        keys = ("rows", "from", "kind", "donor", "to", "round")
        order = np.lexsort([columns[key] for key in keys])
        return {short: column[order] for short, column in columns.items()}

    def write(self, status: str) -> None:
        """Replace run.h5 by one with everything so far."""
        write_whole(self.path, image(lambda file: self._fill(file, status)))

    def _fill(self, file: Any, status: str) -> None:
        self._fill_attributes(file, status)
        for name in TABLES:
            if name != "evaluation":
                self._fill_table(file.create_group(name), name)
        self._fill_orders(file["agents"])
        self._fill_topology(file.create_group("topology"))
        self._fill_evaluation(file.create_group("evaluation"))
        if status != "running":
            self._fill_measures(file.create_group("measures"))

    def _fill_attributes(self, file: Any, status: str) -> None:
        info = self.info
        file.attrs.update(
            {
                "description": "A run of canal-mpi. Each group is a table: columns of one length.",
                "schema_version": SCHEMA_VERSION,
                "run_id": info.run_id,
                "agents": info.agents,
                "first_agent": info.first_agent,
                "resumes": info.resumes,
                "seed": info.seed,
                "versions": json.dumps(info.versions, sort_keys=True),
                "job": info.job,
                "status": status,
                "started": info.started,
                "finished": now() if status == self.end else "",
                "volatile": list(VOLATILE_ATTRIBUTES),
            }
        )

    def _fill_table(self, group: Any, name: str) -> None:
        for short, column in self.table(name).items():
            known = TABLES[name][short]
            marks: dict[str, Any] = {"description": known.about}
            marks |= {"unit": known.unit} if known.unit else {}
            marks |= {"volatile": True} if known.volatile else {}
            write_dataset(group, short, column, **marks)

    def _fill_orders(self, group: Any) -> None:
        orders = np.array([[t.encode() for t in order] for order in self.info.orders], dtype=TEXT)
        write_dataset(group, "order", orders, description="tasks of each agent [agent, round - 1]")

    def _fill_measures(self, group: Any) -> None:
        """What the evaluations come to, so that nobody has to compute it again."""
        from canal_mpi.results.reading import of_tables
        from canal_mpi.results.summary import Measured

        tables = {name: self.table(name) for name in TABLES if name != "evaluation"}
        facts = {"job": self.info.job}
        score = self._scores()
        info = self.info
        run = of_tables(self.path, facts, tables, info.orders, info.tasks, self._adjacency(), score)
        measured = Measured(run)
        group.attrs.update({"scale": measured.scale.name, "description": measured.scale.about})
        for name, measure in measured.measures().items():
            family, _, short = name.partition("/")
            marks: dict[str, Any] = {"description": measure.about, "dims": list(measure.dims)}
            write_dataset(group.require_group(family), short, measure.value, **marks)

    def _adjacency(self) -> Array:
        adjacency = np.zeros((self.info.agents, self.info.agents), dtype=np.uint8)
        for sender, receiver in self.info.edges:
            adjacency[sender, receiver] = 1
        return adjacency

    def _fill_topology(self, group: Any) -> None:
        adjacency = self._adjacency()
        about = "1 where agent [row] sends to agent [column]"
        write_dataset(group, "adjacency", adjacency, description=about)

    def _scores(self) -> Array:
        """[agent, after_round, task, episode]: the return of every evaluation episode."""
        rows, tasks = self.table("evaluation"), list(self.info.tasks)
        rounds = max(len(order) for order in self.info.orders)
        episodes = int(rows["episode"].max()) + 1 if len(rows["episode"]) else 0
        score = np.full((self.info.agents, rounds + 1, len(tasks), episodes), np.nan)
        place = {task.encode(): k for k, task in enumerate(tasks)}
        where = [place[task] for task in rows["task"].tolist()]
        agent = rows["agent"] - self.info.first_agent
        score[agent, rows["after_round"], where, rows["episode"]] = rows["score"]
        return score

    def _fill_evaluation(self, group: Any) -> None:
        score, tasks = self._scores(), self.info.tasks
        about = "return of each evaluation episode; NaN where there was none"
        dims = ["agent", "after_round", "task", "episode"]
        write_dataset(group, "score", score, description=about, unit="game points", dims=dims)
        names = np.array([task.encode() for task in tasks], dtype=TEXT)
        write_dataset(group, "task", names, description="names along the dimension 'task'")
