"""Looking at runs from outside, by their small files alone: which there are, how they are."""

import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

from canal_mpi.errors import UsageError

SIGN_OF_LIFE = 30.0  # seconds without a new status.json after which a run counts as dead
SMALL = 1 << 22  # bytes that status.json and the like may have
EVENTS = 1 << 26


@dataclass(frozen=True)
class Glance:
    """What the small files of a run say."""

    folder: Path
    status: str  # running, finished, stopped, degraded, died, or unknown
    facts: dict[str, Any] = field(default_factory=dict)  # status.json
    settings: dict[str, Any] = field(default_factory=dict)  # job.toml
    age: float = float("nan")  # seconds since the run was last heard of

    @property
    def alive(self) -> bool:
        """Whether something is still going on."""
        return self.status == "running"

    @property
    def agents(self) -> list[dict[str, Any]]:
        """What each agent was doing last."""
        found = self.facts.get("agents")
        return [a for a in found if isinstance(a, dict)] if isinstance(found, list) else []

    @property
    def round(self) -> int:
        """The round of the slowest agent."""
        living = (agent for agent in self.agents if agent.get("phase") != "died")
        return min((whole(agent.get("round")) for agent in living), default=0)

    @property
    def resumable(self) -> bool:
        """Whether the run stopped early and left checkpoints to go on from."""
        done = self.status in ("finished", "running", "degraded")
        return not done and any((self.folder / "checkpoints").glob("agent-*/*"))


def glance(folder: Path) -> Glance:
    """How a run is, from its small files."""
    facts = _json(folder / "status.json")
    try:
        settings = tomllib.loads(_small_text(folder / "job.toml"))
    except (ValueError, RecursionError):
        settings = {}
    heard = number(facts.get("time"))
    if not isfinite(heard) and (folder / "run.h5").exists():
        heard = (folder / "run.h5").stat().st_mtime
    status = str(facts.get("status", "unknown"))[:32]
    age = max(time() - heard, 0.0)
    if status == "running" and not locked(folder) and not age < SIGN_OF_LIFE:
        status = "died"
    return Glance(folder, status, facts, settings, age)


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run."""
    return (folder / "run.h5").is_file() or (folder / "status.json").is_file()


def checked_run(path: Path) -> Path:
    """The folder of a run that a user named."""
    folder = path.parent if path.is_file() else path
    if not is_run(folder):
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}; `canal-mpi ls DIR` lists runs.")
    return folder


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


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of events.jsonl that can be read."""
    path = folder / "events.jsonl"
    if not path.is_file() or path.stat().st_size > EVENTS:
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a line that was torn by a crash
            if isinstance(found, dict):
                yield found


def number(value: Any) -> float:
    """A number of a JSON file; NaN for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and abs(value) < 1e300 else float("nan")


def whole(value: Any) -> int:
    """A whole number of a JSON file; 0 for anything else."""
    found = number(value)
    return int(found) if isfinite(found) else 0


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_small_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _small_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(SMALL).decode(errors="replace")
    except OSError:
        return ""
