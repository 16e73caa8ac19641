"""The tables of a run: every column with its type, unit and meaning, for writers and readers."""

from dataclasses import dataclass

import numpy as np

from canal_mpi.columns import decode, encode
from canal_mpi.types import Array, Columns

ROWS_LIMIT = 1 << 32  # bytes of the rows of one round
SCHEMA_VERSION = 4
TEXT = "S64"


@dataclass(frozen=True)
class Column:
    """One column; `volatile` ones may differ between two equal runs."""

    dtype: str
    about: str
    unit: str = ""
    volatile: bool = False


def _seconds(about: str) -> Column:
    return Column("<f8", about, "s", volatile=True)


def _volatile(dtype: str, about: str, unit: str = "") -> Column:
    return Column(dtype, about, unit, volatile=True)


AGENT = Column("<i4", "agent, counted from 0")
ROUND = Column("<i4", "round, counted from 1")
TASK = Column(TEXT, "task")
SCORE = Column("<f8", "mean return of the evaluation (NaN: not evaluated)", "game points")

TABLES: dict[str, dict[str, Column]] = {
    "agents": {
        "agent": AGENT,
        "rank": Column("<i4", "MPI rank", volatile=True),
        "host": Column(TEXT, "host name", volatile=True),
        "machine": Column(TEXT, "processor architecture", volatile=True),
        "device": Column(TEXT, "where the network computes", volatile=True),
        "threads": Column("<i4", "compute threads of the rank", volatile=True),
        "role": Column(TEXT, "what the rank does"),
        "speed": _volatile("<f8", "how fast it was let run: 1 freely, less as a slower device"),
    },
    "tasks": {
        "agent": AGENT,
        "round": ROUND,
        "task": TASK,
        "source": Column(TEXT, "env: learnt by playing; lesson: from a lesson that was kept"),
        "donors": Column(TEXT, "agents whose lessons were used, separated by commas"),
        "env_steps": Column("<i8", "own training steps in the environment", "agent steps"),
        "probe_steps": Column("<i8", "steps spent on choosing lessons", "agent steps"),
        "updates": Column("<i8", "updates of the network"),
        "score": SCORE,
        "seconds": _seconds("wall time of the task, evaluation and exchange included"),
        "wait_seconds": _seconds("part of it spent waiting for others"),
        "evaluate_seconds": _seconds("part of it spent on evaluation"),
        "exchange_seconds": _seconds("part of it spent on giving and taking, without waiting"),
        "save_seconds": _seconds("part of it spent on saving checkpoints"),
    },
    "episodes": {
        "agent": AGENT,
        "round": ROUND,
        "task": TASK,
        "episode": Column("<i8", "training episode of the task, counted from 1"),
        "step": Column("<i8", "own training steps of the task when it ended", "agent steps"),
        "return": Column("<f8", "sum of the rewards as the game gives them", "game points"),
        "length": Column("<i8", "steps of the episode", "agent steps"),
    },
    "train": {
        "agent": AGENT,
        "round": ROUND,
        "task": TASK,
        "step": Column("<i8", "turn of the training loop, counted from 1"),
        "loss": Column("<f8", "mean loss since the row before"),
        "epsilon": Column("<f8", "probability of a random action"),
        "return_mean": Column("<f8", "mean return of the last 100 episodes", "game points"),
        "env_seconds": _seconds("time in the environment since the row before"),
        "learn_seconds": _seconds("time in updates since the row before"),
        "wait_seconds": _seconds("time waited for others since the row before"),
    },
    "curve": {
        "agent": AGENT,
        "round": ROUND,
        "task": TASK,
        "env_steps": Column("<i8", "own training steps of the task so far", "agent steps"),
        "score": SCORE,
        "seconds": _seconds("wall time since the task began"),
    },
    "exchange": {
        "kind": Column(TEXT, "offer, request, transfer, lesson (used), drop, refusal or swap"),
        "round": ROUND,
        "donor": Column("<i4", "agent that played"),
        "from": Column("<i4", "agent that sent it"),
        "to": Column("<i4", "agent that received it"),
        "task": TASK,
        "rows": Column("<i8", "rows of play"),
        "bytes": Column("<i8", "bytes of the lesson on the wire", "B", volatile=True),
        "raw_bytes": Column("<i8", "bytes of the same rows unpacked", "B"),
        "seconds": _seconds("time from request to arrival"),
        "wait_seconds": _seconds("part of it spent waiting for the sender"),
        "score_before": Column("<f8", "student's score before it learnt", "game points"),
        "score_after": Column("<f8", "student's score after it learnt", "game points"),
        "kept": Column("|b1", "whether the lesson was kept"),
        "reason": Column("S200", "why it was refused or dropped"),
    },
    "relays": {
        "agent": _volatile("<i4", "agent that passed a lesson on"),
        "round": _volatile("<i4", "round of the agent that asked for it"),
        "donor": _volatile("<i4", "agent that played"),
        "from": _volatile("<i4", "agent that sent it"),
        "task": _volatile(TEXT, "task"),
        "bytes": _volatile("<i8", "bytes of the lesson on the wire", "B"),
        "seconds": _seconds("time from request to arrival"),
        "reason": _volatile("S200", "why it was not passed on"),
    },
    "faults": {
        "agent": _volatile("<i4", "agent that died and was gone on without"),
        "round": _volatile("<i4", "round that it was in, 0 if nobody knows"),
        "task": _volatile(TEXT, "task that it was at"),
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
        "score": Column("<f8", "return of the episode", "game points"),
        "length": Column("<i8", "steps of the episode", "agent steps"),
    },
}


class Rows:
    """A Sink in memory: rows as they come, columns when they are taken."""

    def __init__(self) -> None:
        self._tables: dict[str, list[dict[str, float | int | str]]] = {}

    def add(self, table: str, **values: float | int | str) -> None:
        """Note one row; it must have exactly the table's columns."""
        if values.keys() != TABLES[table].keys():
            odd = values.keys() ^ TABLES[table].keys()
            raise KeyError(f"row for '{table}' differs from its schema in {sorted(odd)}")
        self._tables.setdefault(table, []).append(values)

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Nowhere to keep arrays: this sink has no files."""

    def flush(self, round_: int) -> None:
        """Nothing to hand on to: `take` empties this sink."""

    def take(self) -> Columns:
        """All rows since the last call, as columns named `table/column`."""
        taken = self._columns()
        self._tables.clear()
        return taken

    def _columns(self) -> Columns:
        return {
            f"{table}/{name}": _column([row[name] for row in rows], column.dtype)
            for table, rows in self._tables.items()
            for name, column in TABLES[table].items()
        }

    def state(self) -> Columns:
        """The rows that nobody took yet."""
        return {"rows": np.frombuffer(encode(self._columns(), pack=True), dtype=np.uint8)}

    def restore(self, state: Columns) -> None:
        """Have the rows that `state` gave."""
        columns = decode(state["rows"].tobytes(), ROWS_LIMIT)
        self._tables.clear()
        for table in {name.partition("/")[0] for name in columns}:
            names = list(TABLES[table])
            values = [_values(columns[f"{table}/{name}"]) for name in names]
            rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
            self._tables[table] = rows


def _values(column: Array) -> list[float | int | str]:
    return [v.decode() if isinstance(v, bytes) else v for v in column.tolist()]


def _column(values: list[float | int | str], dtype: str) -> Array:
    if dtype.startswith("S"):
        most = int(dtype[1:])
        return np.array([_clip(str(value), most) for value in values], dtype=dtype)
    return np.array(values, dtype=dtype)


def _clip(text: str, most: int) -> bytes:
    """UTF-8 in at most that many bytes, never cut inside a character."""
    return text.encode()[:most].decode(errors="ignore").encode()
