"""`canal-mpi bench lesson`: what a lesson costs, against the same rows as pickled tuples."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np

from canal_mpi import seeding
from canal_mpi.columns import decode, encode
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.job import TaskConfig
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import ROWS, pack, unpack
from canal_mpi.types import LAST, Columns, Offer, Spaces

# What pickle (protocol 5) adds to the two states of a row (state, action, reward, next state, done)
# of NumPy arrays and scalars; a test pickles rows to hold it. Nothing is pickled here.
PICKLE_ADDS = 82
LIMIT = 1 << 36
HOLD = 0.75  # probability that random play holds its last action


@dataclass(frozen=True)
class Figures:
    """What one lesson costs: bytes, and the median seconds of a core for each part."""

    rows: int
    pickled: int
    raw: int
    packed: int
    pack: float
    unpack: float
    hash: float  # SHA-256 of the packed message, done by either side
    plain: float  # both sides together, without packing

    @property
    def pays_below(self) -> float:
        """The speed of a link, in bytes a second, above which packing costs more than it saves."""
        extra = self.pack + self.unpack - self.plain
        return (self.raw - self.packed) / extra if extra > 0 else inf


def rows_of_file(file: str) -> Columns:
    """The rows in a file that a run left under membuf/."""
    from canal_mpi.results.hdf5 import read_arrays

    found = read_arrays(Path(file))
    if not set(ROWS) <= found.keys():
        raise DamagedData(f"{file} has {sorted(found)}; expected rows of play: {sorted(ROWS)}.")
    return {name: found[name] for name in ROWS}


def played(task: str, steps: int) -> Columns:
    """Rows of random play in which actions are held for a while."""
    from canal_mpi.tasks import common_spaces, make_game
    from canal_mpi.tasks.local import LocalEnvs

    if steps < 2:
        raise UsageError(f"--steps {steps}: expected at least 2.")
    config, rng = TaskConfig(), seeding.stream(1, 0, task, "bench")
    spaces = common_spaces([task], config)
    game = make_game(task, config, seeding.sequence(1, 0, task, "bench-env"))
    env, buffer = LocalEnvs(task, [game], spaces), Buffer(spaces, steps + steps // 10 + 10)
    buffer.start(env.reset())
    actions = rng.integers(spaces.actions, size=1)
    for _ in range(steps):
        if rng.random() >= HOLD:
            actions = rng.integers(spaces.actions, size=1)
        env.send(actions)
        buffer.add(actions, env.receive())
    env.close()
    return buffer.export_all()


def pickled_bytes(rows: Columns) -> int:
    """What a list of tuples of these rows takes as a pickle."""
    state = rows["state"].nbytes // len(rows["state"])
    moves = int(((rows["flags"] & LAST) == 0).sum())
    return moves * (2 * state + PICKLE_ADDS)


def measure(task: str, rows: Columns, repeats: int = 7) -> Figures:
    """Pack and unpack a lesson of these rows several times."""
    state = rows["state"]
    spaces = Spaces(state.shape[1:], state.dtype.newbyteorder("<").str, 256)
    data = pack(0, 1, task, rows, {})
    offer = Offer(0, 1, task, 0.0, len(state), len(data))
    message = encode(rows)
    parts: dict[str, Callable[[], object]] = {
        "pack": lambda: pack(0, 1, task, rows, {}),
        "unpack": lambda: unpack(data, offer, spaces, LIMIT),
        "hash": lambda: sha256(data).digest(),
        "plain": lambda: (encode(rows), decode(message, LIMIT)),
    }
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, part in parts.items():
            start = process_time()
            part()
            taken[name].append(process_time() - start)
    seconds = {name: max(median(times), 1e-9) for name, times in taken.items()}
    raw = sum(column.nbytes for column in rows.values())
    return Figures(len(state), pickled_bytes(rows), raw, len(data), **seconds)


def report(task: str, source: str, found: Figures) -> list[str]:
    """The figures, in lines."""

    def line(what: str, size: int, more: str = "") -> str:
        return f"  {what:<15}{size / 1e6:8.2f} MB {size / found.rows:8.2f} bytes a row{more}"

    def part(what: str, seconds: float) -> str:
        return f"  {what:<15}{seconds:8.4f} s  {found.raw / seconds / 1e6:8.0f} MB/s"

    limit, hashed = found.pays_below * 8 / 1e9, found.packed / found.hash / 1e6
    pays = f"below {limit:.2g} Gbit/s" if np.isfinite(limit) else "on every link"
    return [
        f"{task} · {found.rows:,} rows {source}",
        line("pickled tuples", found.pickled),
        line("typed columns", found.raw),
        line("packed", found.packed, f", 1/{found.pickled / found.packed:.1f} of pickled tuples"),
        part("pack", found.pack),
        part("unpack", found.unpack),
        f"  {'SHA-256':<15}{found.hash:8.4f} s  {hashed:8.0f} MB/s, in either",
        f"  {'not packed':<15}{found.plain:8.4f} s  both sides together",
        f"  {'together':<15}{found.pack + found.unpack:8.4f} s  of one core, pack and unpack",
        f"  packing pays {pays} to one receiver",
    ]
