"""The folder of a sweep: its points in `sweep.json` and `jobs/`, a run directory for each.

Everything that goes on with a sweep, or starts one point of it on another node, reads these files;
what they say is checked before it is used.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.cluster.hostfile import MOST_RANKS, Host, parse_hosts
from canal_mpi.cluster.marker import marks_of
from canal_mpi.errors import CanalError, DamagedData, UsageError
from canal_mpi.games import ORDERS
from canal_mpi.job import Job
from canal_mpi.results.files import NAME, write_whole
from canal_mpi.sweep.grid import MOST_POINTS, Point

INDEX = "sweep.json"  # also of a study
ANEW = f"remove {INDEX} and give the whole command again, finished runs are kept"
REHEARSES = "reuse.temperature"  # old tasks are imitated with it, too
NETWORK = re.compile(r"([A-Za-z0-9][A-Za-z0-9.:/_@,-]{0,99})?")
LARGEST = 1 << 26  # bytes of sweep.json


def check_points(folder: Path, points: Sequence[Point]) -> None:
    """Refuse points that could not start, and a folder that has runs of other jobs."""
    if len(points) > MOST_POINTS:
        raise UsageError(f"{len(points)} points, with those that are there: at most {MOST_POINTS}.")
    for point in points:
        if order := ORDERS.get(point.job.order):
            order(point.job.tasks, 0, point.job.seed)
        check_same_job(folder / point.name, point)


def save(folder: Path, points: Sequence[Point]) -> None:
    """Write down what the sweep is."""
    check_points(folder, points)
    for point in points:
        text = config.to_toml(point.job, explain=True)
        write_whole(job_file(folder, point), text.encode())
    facts = {"points": [_facts(point) for point in points]}
    write_whole(folder / INDEX, json.dumps(facts, indent=1).encode())


def job_file(folder: Path, point: Point) -> Path:
    """Where the job of a point is."""
    return folder / "jobs" / f"{point.name}.toml"


def _facts(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "ranks": point.ranks,
        "servers": point.servers,
        "settings": point.settings,
        "network": point.network,
        "hosts": [f"{h.name} {h.ranks}{' env-server' * h.serves}" for h in point.hosts],
    }


def load_points(folder: Path) -> list[Point]:
    """The points of a sweep that was started here before."""
    if not (folder / INDEX).is_file():
        raise UsageError(f"{folder} holds no sweep: there is no {INDEX} in it.")
    with _as_written(folder / INDEX):
        entries = _entries(folder)
        if len({entry["name"] for entry in entries}) < len(entries):
            raise ValueError("a point is there twice")
        if len({"arm" in entry["settings"] for entry in entries}) > 1:
            raise ValueError("some points are of a study, some are not")
        return [_read(folder, entry) for entry in entries]


def holds(folder: Path) -> str:
    """What was started here before: a `sweep`, a `study`, or nothing."""
    if not (folder / INDEX).is_file():
        return ""
    with _as_written(folder / INDEX):
        return "study" if any("arm" in entry["settings"] for entry in _entries(folder)) else "sweep"


def _entries(folder: Path) -> list[dict[str, Any]]:
    facts = json.loads((folder / INDEX).read_bytes()[:LARGEST])
    found: list[dict[str, Any]] = facts["points"]
    if not 1 <= len(found) <= MOST_POINTS:
        raise ValueError(f"{len(found)} points")
    return found


@contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """What goes wrong inside is a damaged index."""
    try:
        yield
    except (
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise DamagedData(f"{path} is not as canal-mpi writes it: {error!r}; {ANEW}.") from error


def _read(folder: Path, entry: dict[str, Any]) -> Point:
    name, ranks, servers = str(entry["name"]), int(entry["ranks"]), int(entry["servers"])
    if not NAME.fullmatch(name) or not 0 <= servers < ranks <= MOST_RANKS:
        raise ValueError(f"the point '{name[:80]}' with {ranks} ranks")
    settings = {str(axis): str(label) for axis, label in entry["settings"].items()}
    if not all(word.isprintable() for pair in settings.items() for word in pair):
        raise ValueError(f"the settings of '{name}'")
    lines = [str(line) for line in entry["hosts"]]
    hosts = tuple(parse_hosts("\n".join(lines), "sweep.json")) if lines else tuple[Host, ...]()
    network = str(entry.get("network", ""))
    if not NETWORK.fullmatch(network):
        raise ValueError(f"the network '{network[:80]}'")
    job = _job_in(folder / "jobs" / f"{name}.toml")
    return Point(name, job, ranks, settings, servers, hosts, network)


def _job_in(path: Path) -> Job:
    """The job of a point, as its file has it."""
    try:
        return config.from_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedData(f"{path} can't be read: {error.strerror or error}; {ANEW}.") from error
    except (CanalError, UnicodeDecodeError) as error:
        words = str(error).rstrip(".")
        raise DamagedData(f"{path} is not as canal-mpi writes it: {words}; {ANEW}.") from error


def check_same_job(run: Path, point: Point) -> str:
    """Refuse to go on with a run of another job, else its status; UsageError says what differs."""
    status, agents = marks_of(run)
    try:
        there = config.from_toml((run / "job.toml").read_text(encoding="utf-8"))
    except (OSError, CanalError, UnicodeDecodeError):
        there = point.job  # nothing that could be gone on with
    words = what_differs(there, agents, point)
    if words and status not in ("missing", "damaged"):
        raise UsageError(
            f"{run} is a run of another job ({words}); name another --out, or remove it."
        )
    return status


def what_differs(there: Job, agents: int, point: Point) -> str:
    """The first thing that makes a run one of another job than the point's; empty where nothing.

    How lessons are used says nothing without sharing; 0 agents: their number is not known.
    """
    odd = config.differences(there, point.job)
    if there.share.policy == point.job.share.policy == "none":
        odd = {key: both for key, both in odd.items() if not only_of_lessons(key)}
    if agents and agents != point.ranks - point.servers:
        odd = {"agents": (agents, point.ranks - point.servers)}
    return next((f"{key}: {a!r} there, {b!r} here" for key, (a, b) in odd.items()), "")


def only_of_lessons(key: str) -> bool:
    """Whether a setting means nothing to agents that don't share."""
    return key.startswith("reuse.") and key != REHEARSES
