"""Bytes and seconds of a lesson, against the same rows as pickled tuples and as plain columns.

python benchmarks/lesson.py --game Krull [--rows RUN/membuf/agent-0/round-01-Krull.h5]

Rows of a trained agent come from a file of a run; without one the game is played at random.
"""

import argparse
import pickle
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median

import numpy as np
from measuring import in_turn, played

from canal_mpi import config, envs
from canal_mpi.interfaces import LAST, TERMINATED, Offer, Spaces
from canal_mpi.membuf.lesson import ROWS, pack, unpack
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.results.files import read_arrays

LIMIT = 1 << 36


def pickled(rows):
    """The rows as (state, action, reward, next state, done), as the original sends them."""
    state, flags = rows["state"], rows["flags"]
    return pickle.dumps(
        [
            (state[k].copy(), np.int64(rows["action"][k]), float(rows["reward"][k]),
             state[k + 1].copy(), bool(flags[k] & TERMINATED))
            for k in np.flatnonzero((flags & LAST) == 0)
        ],
        pickle.HIGHEST_PROTOCOL,
    )  # fmt: skip


def measure(task, rows, repeats):
    """Pack and unpack a lesson of these rows several times, and print what that takes."""
    state = rows["state"]
    spaces = Spaces(state.shape[1:], state.dtype.newbyteorder("<").str, 256)
    data, message, tuples = pack(0, 1, task, rows, {}), encode(rows), len(pickled(rows))
    offer, raw = Offer(0, 1, task, 0.0, len(state), len(data)), sum(c.nbytes for c in rows.values())
    works = {
        "pack": lambda: pack(0, 1, task, rows, {}),
        "unpack": lambda: unpack(data, offer, spaces, LIMIT),
        "SHA-256 in either": lambda: sha256(data).digest(),
        "not packed": lambda: (encode(rows), decode(message, LIMIT)),
    }
    times = {n: median(t) for n, t in zip(works, in_turn(works.values(), repeats, 1), strict=True)}
    for name, size in {"pickled tuples": tuples, "columns": raw, "packed": len(data)}.items():
        print(f"  {name:<18}{size / 1e6:8.2f} MB {size / len(state):8.2f} bytes per row")
    print(f"  packed: 1/{tuples / len(data):.1f} of pickled tuples")
    for name, seconds in times.items():
        print(f"  {name:<18}{seconds:8.4f} s of one core")
    extra = times["pack"] + times["unpack"] - times["not packed"]
    limit = (raw - len(data)) / extra * 8 / 1e9 if extra > 0 else inf
    print(f"  packing pays below {limit:.2g} Gbit/s to one receiver")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", default="RoadRunner")
    parser.add_argument("--rows")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    task = envs.canonical(options.game)
    job = envs.named(config.resolve({"tasks": [task]}))
    rows = read_arrays(Path(options.rows)) if options.rows else None
    rows = {n: rows[n] for n in ROWS} if rows else played(job, options.steps).own.export()
    print(f"{task} · {len(rows['state']):,} rows {options.rows or 'of random play'}")
    measure(task, rows, options.repeats)


if __name__ == "__main__":
    main()
