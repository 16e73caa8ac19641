"""Runs seen from outside, by their small files alone: which there are and how far they are.

Nothing in these files is trusted: they may be torn, or not ours. h5py is not loaded.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from math import isfinite, isnan
from pathlib import Path
from time import sleep, time
from typing import Any

from canal_mpi import config
from canal_mpi.errors import CanalError, UsageError, import_extra
from canal_mpi.results import progress
from canal_mpi.results.files import read_attributes, read_bytes, write_whole
from canal_mpi.results.progress import SMALL, clean, duration, number, table, whole

SIGN_OF_LIFE = 30.0  # seconds without a new status.json after which a run counts as dead
REFRESH = 1.0  # seconds


class RunStatus:
    """How a run is, from its small files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = _parsed(folder / "status.json", json.loads)
        self.settings = _parsed(folder / "job.toml", lambda data: config.parse_toml(data, "job"))
        heard = number(self.facts.get("time"))
        if not isfinite(heard) and (folder / "run.h5").exists():
            heard = (folder / "run.h5").stat().st_mtime
        self.age = max(time() - heard, 0.0)  # seconds since it was last heard of
        self.status = str(self.facts.get("status", "unknown"))[:32]
        if self.status == "running" and not locked(folder) and not self.age < SIGN_OF_LIFE:
            self.status = "died"
        self.agents = progress.agents_of(self.facts)  # what each was doing last
        living = [agent for agent in self.agents if agent.get("phase") != "died"]
        self.round = min((whole(agent.get("round")) for agent in living), default=0)
        over = self.status in ("finished", "running", "degraded")
        self.resumable = not over and any((folder / "checkpoints").glob("agent-*/*"))


def status_of(folder: Path) -> str:
    """`finished`, `running`, `stopped` and so on; `missing` or `damaged` where run.h5 is."""
    path = folder / "run.h5"
    if not path.is_file():
        return "missing"
    try:
        return str(read_attributes(path)["status"])
    except (CanalError, LookupError):
        return "damaged"


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    """A small regular file that holds a table; nothing for any other."""
    try:
        found = parse(read_bytes(path, SMALL))
    except (CanalError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run."""
    return (folder / "run.h5").is_file() or (folder / "status.json").is_file()


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is one; newest first."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name one that holds runs.")
    found = [folder] if is_run(folder) else [f for f in folder.iterdir() if is_run(f)]
    return sorted(found, key=lambda run: run.stat().st_mtime, reverse=True)


def locked(folder: Path) -> bool:
    """Whether a process of this host holds the run's lock; asks without taking it."""
    try:
        about = (folder / ".lock").stat()
        table = Path("/proc/locks").read_text()
    except OSError:
        return False
    device, inode = about.st_dev, about.st_ino
    mark = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    return any(mark in line.split() for line in table.splitlines())


def run_lines(runs: Sequence[RunStatus]) -> list[str]:
    """A heading and one line per run."""
    rows = [["run", "status", "agents", "round", "task", "mean HNS", "heard of", "resumable"]]
    for run in runs:
        first = run.agents[0] if run.agents else {}
        hns = number(run.facts.get("mean_hns"))
        row = [clean(run.folder.name), clean(run.status), str(len(run.agents))]
        row += [f"{run.round}/{whole(run.facts.get('rounds'))}", clean(first.get("task"))]
        row += ["–" if isnan(hns) else f"{hns:.1%}"]
        row += [f"{duration(run.age)} ago" if isfinite(run.age) else "–"]
        rows.append([*row, "yes" if run.resumable else "no"])
    return table(rows)


def follow(path: Path, once: bool = False, prometheus: Path | None = None) -> None:
    """Show a run until it ends; also as metrics for Prometheus, where a file is named."""
    folder, drawn = path.parent if path.is_file() else path, 0
    if not is_run(folder):
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}; `canal-mpi ls DIR` lists runs.")
    terminal = sys.stdout.isatty()
    while True:
        seen = RunStatus(folder)
        if prometheus is not None:
            write_whole(prometheus, metrics(seen))
        last = once or seen.status != "running"
        if terminal or last:
            lines = progress.progress_lines(seen.facts, time())
            shown = "\n".join(lines)
            if terminal:
                width = shutil.get_terminal_size().columns
                shown = progress.coloured(lines, width, number(seen.facts.get("done")))
            print(f"\x1b[{drawn}A\x1b[J" if drawn else "", end="")
            since = f"{duration(seen.age)} ago" if isfinite(seen.age) else "at an unknown time"
            words = f"{folder.name}: {clean(seen.status)}, heard of {since}"
            if seen.status == "died":
                words = f"{folder.name} died: no sign of life since {since}, in round {seen.round};"
                words += f" finished rounds are in {folder / 'run.h5'}"
            print(f"{shown}\n {words}", flush=True)
            drawn = len(lines) + 1
        if last:
            return
        sleep(REFRESH)


GAUGES = {
    "round": ("canal_mpi_round", "Round that the agent is in."),
    "total_steps": ("canal_mpi_steps", "Iterations of the training loop so far."),
    "steps_per_second": ("canal_mpi_steps_per_second", "Iterations of the loop per second."),
    "mean_return": ("canal_mpi_return", "Mean return of the last episodes."),
    "loss": ("canal_mpi_loss", "Loss of the newest update."),
    "wait_share": ("canal_mpi_wait_share", "Part of the time spent waiting for others."),
}


def metrics(run: RunStatus) -> bytes:
    """The numbers of status.json as gauges in Prometheus's text format."""
    client, name = import_extra("prometheus_client", "prometheus"), run.folder.resolve().name
    registry = client.CollectorRegistry()
    up = client.Gauge(
        "canal_mpi_up", "Whether the run is alive.", ["run", "status"], registry=registry
    )
    up.labels(name, run.status).set(run.status == "running")
    for key, (metric, about) in GAUGES.items():
        gauge = client.Gauge(metric, about, ["run", "agent"], registry=registry)
        for agent in run.agents:
            if isfinite(value := number(agent.get(key))):
                gauge.labels(name, str(agent.get("agent"))[:200]).set(value)
    return bytes(client.generate_latest(registry))
