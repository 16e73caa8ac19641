"""`run.h5`, the results of a run: its tables with type, unit and meaning of every column, the rows
that agents collect for them, and the file, which is rewritten whole after every round."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.results.files import write_arrays
from canal_mpi.results.measures import Evaluations, Measure, Scale, natural_scale
from canal_mpi.state import with_prefix

ROWS_LIMIT = 1 << 32  # bytes of the rows of one round
SCHEMA_VERSION = 7
TEXT = "S64"
VOLATILE_ATTRIBUTES = ("run_id", "versions", "status", "started", "finished", "resumes")


@dataclass(frozen=True)
class Column:
    """A column of a table, or an array with `dims`; `volatile` may differ between equal runs."""

    dtype: str
    about: str
    unit: str = ""
    volatile: bool = False
    dims: tuple[str, ...] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        """What run.h5 says about it."""
        facts = {"unit": self.unit, "volatile": self.volatile, "dims": list(self.dims)}
        return {"description": self.about} | {name: fact for name, fact in facts.items() if fact}


_volatile = partial(Column, volatile=True)
_seconds = partial(Column, "<f8", unit="s", volatile=True)
_steps = partial(Column, "<i8", unit="agent steps")
_points = partial(Column, "<f8", unit="game points")
AGENT = Column("<i4", "agent, counted from 0")
ROUND = Column("<i4", "round, counted from 1")
TASK = Column(TEXT, "task")
PLACE = {"agent": AGENT, "round": ROUND, "task": TASK}

TABLES: dict[str, dict[str, Column]] = {
    "agents": {
        "agent": AGENT,
        "rank": _volatile("<i4", "MPI rank"),
        "host": _volatile(TEXT, "host name"),
        "machine": _volatile(TEXT, "processor architecture"),
        "device": _volatile(TEXT, "where the network computes"),
        "threads": _volatile("<i4", "compute threads of the rank"),
        "role": Column(TEXT, "what the rank does"),
        "speed": _volatile("<f8", "part of full speed it was held to: 1 freely, less if slowed"),
    },
    "tasks": {
        **PLACE,
        "source": Column(TEXT, "env: learnt by playing; lesson: from a lesson, maybe also played"),
        "donors": Column(TEXT, "agents whose lessons were used, separated by commas"),
        "env_steps": _steps("own training steps in the environment"),
        "probe_steps": _steps("steps spent on choosing lessons"),
        "evaluation_steps": _steps("steps of evaluations inside the task and of its networks"),
        "updates": Column("<i8", "updates of the network"),
        "score": _points("mean evaluation right after the task, else at the end, else NaN"),
        "seconds": _seconds("wall time since the task before, with evaluations: the parts below"),
        "cpu_seconds": _seconds("CPU time of the rank, without evaluations after the last round"),
        "core_seconds": _seconds("ready to work without a core; as of cpu_seconds"),
        "env_seconds": _seconds("choosing actions and playing"),
        "learn_seconds": _seconds("updates while playing"),
        "pretrain_seconds": _seconds("updates on lessons before the first own step"),
        "probe_seconds": _seconds("random steps to compare tasks"),
        "exchange_seconds": _seconds("giving and taking, without waiting"),
        "remember_seconds": _seconds("keeping rows for rehearsal, and EWC"),
        "save_seconds": _seconds("checkpoints and other files"),
        "evaluate_seconds": _seconds("evaluations"),
        "wait_seconds": _seconds("waiting for others, and for run.h5 after the round before"),
    },
    "episodes": {
        **PLACE,
        "episode": Column("<i8", "training episode of the task, counted from 1"),
        "step": _steps("own training steps of the task when it ended"),
        "return": _points("sum of the rewards as the game gives them"),
        "length": _steps("steps of the episode"),
    },
    "train": {
        **PLACE,
        "step": Column("<i8", "iteration of the training loop, counted from 1"),
        "loss": Column("<f8", "mean loss since the row before"),
        "epsilon": Column("<f8", "probability of a random action"),
        "return_mean": _points("mean return of the last 100 episodes"),
        "env_seconds": _seconds("time in the environment since the row before"),
        "learn_seconds": _seconds("time in updates since the row before"),
        "wait_seconds": _seconds("time waited for others since the row before"),
    },
    "curve": {
        **PLACE,
        "env_steps": _steps("own training steps of the task so far"),
        "score": _points("mean return of an evaluation inside the task"),
        "seconds": _seconds("wall time since the task before"),
    },
    "exchange": {
        "kind": Column(TEXT, "offer, request, transfer, lesson (used), refusal or swap"),
        "round": ROUND,
        "donor": Column("<i4", "agent that played"),
        "from": Column("<i4", "agent that sent it"),
        "to": Column("<i4", "agent that received it"),
        "task": TASK,
        "rows": Column("<i8", "rows of play"),
        "bytes": _volatile("<i8", "bytes of the lesson on the wire", "B"),
        "raw_bytes": Column("<i8", "bytes of the same rows unpacked", "B"),
        "seconds": _seconds("time from request to arrival"),
        "score": _points("mean return of the donor's late training episodes (NaN: unknown)"),
        "kl": Column("<f8", "KL(donor || student) after pretraining, on the donor's held-out rows"),
        "agreement": Column("<f8", "fraction of equal greedy actions on them"),
        "reason": Column("S200", "why it was refused"),
    },
    "files": {
        "agent": AGENT,
        "path": Column("S200", "file that the agent wrote, in the folder of the run"),
        "sha256": Column(TEXT, "digest of its arrays; the newest row of a path holds"),
    },
    "faults": {
        "agent": _volatile("<i4", "agent that died; the others went on without it"),
        "round": _volatile("<i4", "round that it was in, 0 if nobody knows"),
        "task": _volatile(TEXT, "task that it was learning"),
        "phase": _volatile(TEXT, "what it was doing"),
        "rank": _volatile("<i4", "MPI rank"),
        "host": _volatile(TEXT, "host name"),
        "time": _volatile("<f8", "when that was noticed, since 1970", "s"),
        "lost": _volatile("S200", "lessons that nobody else had"),
    },
    "evaluation": {
        "agent": AGENT,
        "after_round": Column("<i4", "rounds that the agent had finished"),
        "task": TASK,
        "episode": Column("<i4", "episode of the evaluation, counted from 0"),
        "score": _points("return of the episode"),
        "length": _steps("steps of the episode"),
        "seconds": _seconds("wall time of the episode, on average"),
    },
}

TIME_PARTS = {  # what the seconds of /tasks are spent on
    "environment": ("env_seconds", "probe_seconds"),
    "learning": ("learn_seconds", "pretrain_seconds", "remember_seconds"),
    "evaluation": ("evaluate_seconds",),
    "exchange": ("exchange_seconds",),
    "waiting for agents": ("wait_seconds",),
    "start and files": ("save_seconds",),
}

EPISODES = ("agent", "after_round", "task", "episode")
ARRAYS = {
    "agents/order": Column(TEXT, "tasks of each agent [agent, round - 1]", dims=("agent", "round")),
    "topology/adjacency": Column("|u1", "1: [row] sends to [column]", dims=("agent", "agent")),
    "evaluation/task": Column(TEXT, "names along the dimension 'task'", dims=("task",)),
    "evaluation/score": _points("return of each episode; NaN where there was none", dims=EPISODES),
    "evaluation/length": _steps("steps of each episode; 0 where there was none", dims=EPISODES),
}
# Every dataset of run.h5 but the measures; evaluations come as rows and are written as an array.
SCHEMA = ARRAYS | {
    f"{table}/{name}": column
    for table, columns in TABLES.items()
    if table != "evaluation"
    for name, column in columns.items()
}


class Rows:
    """A Sink in memory: rows as they come, columns when they are taken."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Array]] = {}  # columns `table/column` of earlier rows
        self._rows: dict[str, list[dict[str, float | int | str]]] = {}

    def add(self, table: str, **values: float | int | str) -> None:
        """Add one row; it must have exactly the table's columns."""
        if odd := values.keys() ^ TABLES[table].keys():
            raise KeyError(f"row for '{table}' differs from its schema in {sorted(odd)}")
        self._rows.setdefault(table, []).append(values)

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Nowhere to keep arrays: this sink has no files."""

    def flush(self, round_: int) -> None:
        """Nothing to hand on to: `take` empties this sink."""

    def take(self) -> Columns:
        """All rows since the last call, as columns named `table/column`."""
        taken = self._columns()
        self._parts.clear()
        self._rows.clear()
        return taken

    def table(self, table: str) -> Columns:
        """All rows of a table so far."""
        rows, found = self._rows.get(table, []), {}
        for name, column in TABLES[table].items():
            new = _column([row[name] for row in rows], column.dtype)
            found[name] = np.concatenate([*self._parts.get(f"{table}/{name}", ()), new])
        return found

    def _columns(self) -> Columns:
        tables = {*self._rows, *(name.partition("/")[0] for name in self._parts)}
        parts = [with_prefix(table, self.table(table)) for table in TABLES if table in tables]
        return {name: column for part in parts for name, column in part.items()}

    def append(self, columns: Columns, whose: str) -> None:
        """Take in rows; refuse what is not in the schema (`agent 1 sent`, or who else has it)."""
        for name, column in columns.items():
            table, _, short = name.partition("/")
            known = TABLES.get(table, {}).get(short)
            if known is None or column.dtype != np.dtype(known.dtype) or column.ndim != 1:
                raise DamagedData(f"{whose} the column '{name}' ({column.dtype.str})")
        for table in {name.partition("/")[0] for name in columns}:
            parts = [columns.get(f"{table}/{short}") for short in TABLES[table]]
            if len({None if p is None else len(p) for p in parts}) != 1:
                raise DamagedData(f"{whose} unequal columns for '{table}'")
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)

    def state_dict(self) -> Columns:
        """The rows that were not taken yet."""
        return {"rows": np.frombuffer(encode(self._columns(), pack=True), dtype=np.uint8)}

    def load_state_dict(self, state: Columns) -> None:
        """Have the rows of a `state_dict`."""
        self._parts, self._rows = {}, {}
        self.append(decode(state["rows"].tobytes(), ROWS_LIMIT), "a checkpoint has")


def _column(values: Sequence[float | int | str], dtype: str) -> Array:
    """Values as an array; texts as UTF-8, never clipped inside a character."""
    if dtype.startswith("S"):
        clipped = (str(value).encode()[: int(dtype[1:])] for value in values)
        values = [text.decode(errors="ignore").encode() for text in clipped]  # type: ignore[misc]
    return np.array(values, dtype=dtype)


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
    started: str = field(default_factory=lambda: timestamp(time()))
    resumes: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)  # rows of agents that died

    @property
    def agents(self) -> int:
        """How many agents the run has."""
        return len(self.orders)


def timestamp(seconds: float) -> str:
    """A time, for people and for programs."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class Store:
    """Collects the rows of all agents and writes them as one file."""

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.path, self.info, self._rows = path, info, Rows()

    def clear(self) -> None:
        """Forget all rows but those of agents that died."""
        self._rows = Rows()
        for fault in self.info.faults:
            self._rows.add("faults", **{name: fault[name] for name in TABLES["faults"]})

    @property
    def end(self) -> str:
        """The status of a run that came to its end."""
        return "degraded" if self.info.faults else "finished"

    def append(self, columns: Columns, agent: int) -> None:
        """Take in rows from one agent; anything that is not in the schema is refused."""
        self._rows.append(columns, f"agent {agent} sent")

    def table(self, name: str) -> Columns:
        """A table as it is now; the ledger in an order that does not depend on timing."""
        columns = self._rows.table(name)
        if name == "tasks":
            self._add_evaluations(columns)
        if name != "exchange":
            return columns
        keys = ("rows", "from", "kind", "donor", "to", "round")
        order = np.lexsort([columns[key] for key in keys])
        return {short: column[order] for short, column in columns.items()}

    def _add_evaluations(self, tasks: Columns) -> None:
        """Give every task its score, and the costs of measuring the networks of its round."""
        found = self.table("evaluation")
        after = found["after_round"]
        for k, round_ in enumerate(tasks["round"]):
            mine = found["agent"] == tasks["agent"][k]
            here = mine & (np.maximum(after, 1) == round_)  # before any: counts for the first
            tasks["evaluation_steps"][k] += found["length"][here].sum()
            tasks["evaluate_seconds"][k] += found["seconds"][here].sum()
            tasks["seconds"][k] += found["seconds"][here].sum()
            mine &= (found["task"] == tasks["task"][k]) & (after >= round_)
            if mine.any():
                tasks["score"][k] = found["score"][mine & (after == after[mine].min())].mean()

    def write(self, status: str) -> None:
        """Replace run.h5 by one with everything so far."""
        info, (score, length) = self.info, self.evaluations()
        own = ("run_id", "agents", "first_agent", "resumes", "seed", "job", "started")
        facts = {name: getattr(info, name) for name in own}
        facts |= {
            "description": "A run of canal-mpi. Each group is a table: columns of one length.",
            "schema_version": SCHEMA_VERSION,
            "versions": json.dumps(info.versions, sort_keys=True),
            "status": status,
            "finished": timestamp(time()) if status == self.end else "",
            "volatile": list(VOLATILE_ATTRIBUTES),
        }
        adjacency = np.zeros((info.agents, info.agents), dtype=np.uint8)
        adjacency[tuple(np.array(info.edges, dtype=int).reshape(-1, 2).T)] = 1
        arrays = (_texts(info.orders), adjacency, _texts(info.tasks), score, length)
        content: Columns = dict(zip(ARRAYS, arrays, strict=True))
        tables = {name: self.table(name) for name in TABLES if name != "evaluation"}
        for name, columns in tables.items():
            content |= with_prefix(name, columns)
        about = {name: SCHEMA[name].attributes for name in content}
        if status != "running":
            scale, measures = self._measures(tables["tasks"], score)
            about["measures"] = {"scale": scale.name, "description": scale.about}
            for name, one in measures.items():
                content[f"measures/{name}"] = one.value
                about[f"measures/{name}"] = {"description": one.about, "dims": list(one.dims)}
        write_arrays(self.path, content, facts, about=about)

    def _measures(self, rows: Columns, score: Array) -> tuple[Scale, dict[str, Measure]]:
        """What the evaluations come to, so that nobody has to compute it again."""
        info = self.info
        agents = range(info.first_agent, info.first_agent + info.agents)
        max_steps = tomllib.loads(info.job).get("evaluation", {}).get("max_steps", 0)
        scale = natural_scale(info.tasks, [score], max_steps)
        texts = {name: decoded(column) for name, column in rows.items()}
        return scale, Evaluations(agents, info.tasks, texts, score, scale).measures()

    def evaluations(self) -> tuple[Array, Array]:
        """[agent, after_round, task, episode]: return and length of every evaluation episode."""
        rows, tasks = self.table("evaluation"), list(self.info.tasks)
        rounds = max(len(order) for order in self.info.orders)
        episodes = int(rows["episode"].max()) + 1 if len(rows["episode"]) else 0
        score = np.full((self.info.agents, rounds + 1, len(tasks), episodes), np.nan)
        length = np.zeros(score.shape, dtype="<i8")
        place = {task.encode(): k for k, task in enumerate(tasks)}
        where = [place[task] for task in rows["task"].tolist()]
        at = (rows["agent"] - self.info.first_agent, rows["after_round"], where, rows["episode"])
        score[at], length[at] = rows["score"], rows["length"]
        return score, length


def decoded(column: Array) -> Array:
    """A column of UTF-8 texts as str; others as they are."""
    return np.char.decode(column, "utf-8", "replace") if column.dtype.kind == "S" else column


def _texts(names: Sequence[Any]) -> Array:
    """Names, or lists of names, as an array of UTF-8 texts."""
    return np.char.encode(np.array(names, dtype=str), "utf-8").astype(TEXT)
