"""`canal-mpi bench`: how fast this machine is, told by a short training run.

Comparisons with other libraries, and with what the hardware could do, are scripts in benchmarks/.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi import __version__
from canal_mpi.errors import RankFailed
from canal_mpi.interfaces import Array
from canal_mpi.results.reader import load

BLOCK = 100  # steps of one measurement
WARM_UP = 5  # blocks before the first one: things are loaded and compiled, learning begins


def figure(values: Array, unit: str) -> dict[str, Any]:
    """The median of several measurements and the middle half of them."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "low": low, "high": high, "unit": unit}


def measure(task: str, blocks: int) -> dict[str, Any]:
    """A real run of one agent with one update per step, as its files tell, and where it ran."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["train", "-q", "--tasks", task, "--frames", str(BLOCK * (WARM_UP + blocks))]
        words += ["--set", "evaluation.episodes=0", "--set", f"train.log_interval={BLOCK}"]
        command = [sys.executable, "-m", "canal_mpi", *words, "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RankFailed(f"the training run failed: {done.stderr.strip()}")
        rows = load(run)["train"]
    env, learn = (rows[name][WARM_UP:] for name in ("env_seconds", "learn_seconds"))
    figures = {
        "training": figure(BLOCK / (env + learn), "steps/s, one update per step"),
        "environment": figure(BLOCK / env, "steps/s"),
        "update": figure(1e6 * learn / BLOCK, "µs"),
    }
    where = {"canal-mpi": __version__, "cpu": platform.processor() or platform.machine()}
    where |= {"cores": str(len(os.sched_getaffinity(0))), "load": f"{os.getloadavg()[0]:.1f}"}
    return {"task": task, "machine": where, "figures": figures}


def lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    rows = [
        f"  {name:<26} {one['median']:9.4g} {one['unit']}"
        + (f" ({one['low']:.4g} – {one['high']:.4g})" if one["low"] < one["high"] else "")
        for name, one in found["figures"].items()
    ]
    return [f"{found['task']} · {about} · median (middle half of the measurements)", *rows]
