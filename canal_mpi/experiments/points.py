"""The points of an experiment, and the folder that remembers them.

A point is one run with its whole job. `experiment.json` lists the points and `jobs/` holds their
jobs; whatever resumes an experiment checks what it reads.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.errors import CanalError, DamagedData, UsageError
from canal_mpi.launch.hostfile import MOST_RANKS
from canal_mpi.rank.plan import plan_of
from canal_mpi.results.files import NAME, file_name, read_attributes, write_whole
from canal_mpi.results.reader import Run, load
from canal_mpi.results.status import status_of
from canal_mpi.settings import Job, Layer

INDEX = "experiment.json"
KINDS = ("sweep", "study")
ANEW = f"remove {INDEX} and give the whole command again, finished runs are kept"
NETWORK = re.compile(r"([A-Za-z0-9][A-Za-z0-9.:/_@,-]{0,99})?")
MAX_POINTS, MAX_INDEX_BYTES = 10_000, 1 << 26
FINISHED = "finished"
PLAIN_AXES = {"arm", "hosts", "topology", "policy"}  # whose values need no name before them


@dataclass(frozen=True)
class Point:
    """One run of an experiment; on the hosts of `hostfile`, or on this machine without one."""

    name: str
    job: Job
    ranks: int
    settings: dict[str, str] = field(default_factory=dict)  # axis -> value
    servers: int = 0  # how many of the ranks run environments
    hostfile: str = ""
    network: str = ""  # by which hosts reach each other

    @property
    def agents(self) -> int:
        """How many of the ranks are agents."""
        return self.ranks - self.servers

    @property
    def group(self) -> str:
        """The name without the seed: what all seeds of a setting have in common."""
        rest = {axis: value for axis, value in self.settings.items() if axis != "seed"}
        return name_of(rest) or self.job.name


def name_of(settings: dict[str, str]) -> str:
    """A folder name made of settings, as in `nano4-xavier1_ring_lr-0.001_seed-2`."""
    name = "_".join(
        value if axis in PLAIN_AXES else f"{axis.rpartition('.')[2]}-{value}"
        for axis, value in settings.items()
    )
    if not name or NAME.fullmatch(name):
        return name
    return f"{file_name(name)[:55]}-{sha256(name.encode()).hexdigest()[:8]}"


def resolved(flags: Layer, job_file: str | None = None, environ: Any = None) -> Job:
    """The job as a run of it would write it down; all runs together get one report."""
    from canal_mpi import envs

    job = replace(envs.named(config.resolve(flags, job_file, environ)), report=False)
    if not job.share.lessons:
        return job
    lessons = str(Path(job.share.lessons).absolute())
    return replace(job, share=replace(job.share, lessons=lessons))


def checked(points: list[Point]) -> list[Point]:
    """The points; UsageError where they are too many, or two have the same name."""
    if len(points) > MAX_POINTS:
        raise UsageError(f"{len(points)} points; at most {MAX_POINTS} are possible.")
    names = [point.name for point in points]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"two points are called '{twice}': name each value once.")
    return points


# ── the folder ─────────────────────────────────────────────────────────────────────────────────


def save(folder: Path, kind: str, points: Sequence[Point]) -> None:
    """Write down what the experiment is."""
    check_points(folder, points)
    for point in points:
        write_whole(
            folder / "jobs" / f"{point.name}.toml", config.to_toml(point.job, explain=True).encode()
        )
    entries = [{k: v for k, v in vars(point).items() if k != "job"} for point in points]
    write_whole(folder / INDEX, json.dumps({"kind": kind, "points": entries}, indent=1).encode())


def check_points(folder: Path, points: Sequence[Point]) -> None:
    """Refuse points that could not start, and a folder that has runs of other jobs."""
    for point in points:
        plan_of(point.job, folder, "", 0, ["here"] * point.agents)
        check_same_job(folder / point.name, point)


def job_file(folder: Path, name: str) -> Path:
    """Where the job of a point is; a published experiment has it beside its run.h5 only."""
    path, beside = folder / "jobs" / f"{name}.toml", folder / name / "job.toml"
    return beside if beside.is_file() and not path.is_file() else path


def kind_of(folder: Path, wanted: str = "") -> str:
    """The kind of experiment that was started here before, or nothing; UsageError for another."""
    kind = str(_index(folder)["kind"]) if (folder / INDEX).is_file() else ""
    if kind and wanted not in ("", kind):
        raise UsageError(f"{folder} holds a {kind}: `canal-mpi {kind} --resume` resumes it.")
    return kind


def load_points(folder: Path, kind: str) -> list[Point]:
    """The points of an experiment that was started here before."""
    if not kind_of(folder, kind):
        raise UsageError(f"{folder} holds no {kind}: there is no {INDEX} in it.")
    with _checking(folder / INDEX):
        return checked([_read(folder, entry) for entry in _index(folder)["points"]])


def _index(folder: Path) -> dict[str, Any]:
    with _checking(folder / INDEX):
        facts: dict[str, Any] = json.loads((folder / INDEX).read_bytes()[:MAX_INDEX_BYTES])
        if facts["kind"] not in KINDS or not facts["points"]:
            raise ValueError("an unknown kind of experiment, or no points")
    return facts


@contextmanager
def _checking(path: Path) -> Iterator[None]:
    """DamagedData that names the file for whatever goes wrong: anybody may have edited it."""
    try:
        yield
    except DamagedData:
        raise
    except Exception as error:
        words = str(error).rstrip(".") if isinstance(error, CanalError | OSError) else repr(error)
        raise DamagedData(f"{path} is not as canal-mpi writes it: {words}; {ANEW}.") from error


def _read(folder: Path, entry: dict[str, Any]) -> Point:
    point = Point(job=Job(), **entry)
    texts = [point.name, point.hostfile, *point.settings, *point.settings.values()]
    if not NAME.fullmatch(point.name) or not 0 <= point.servers < point.ranks <= MOST_RANKS:
        raise ValueError(f"the point '{point.name[:80]}' with {point.ranks} ranks")
    if not all(map(str.isprintable, texts)) or not NETWORK.fullmatch(point.network):
        raise ValueError(f"the settings or the network of '{point.name}'")
    path = job_file(folder, point.name)
    with _checking(path):
        return replace(point, job=config.from_toml(path.read_text(encoding="utf-8")))


# ── its runs ───────────────────────────────────────────────────────────────────────────────────


def check_same_job(run: Path, point: Point) -> str:
    """The status of a run; UsageError where it is one of another job than the point's."""
    status, agents = status_of(run), point.agents
    try:
        if status in ("missing", "damaged"):
            text = (run / "job.toml").read_text(encoding="utf-8")
        else:
            facts = read_attributes(run / "run.h5")
            text, agents = str(facts["job"]), int(facts["agents"])
        there = config.from_toml(text)
    except (OSError, LookupError, CanalError, UnicodeDecodeError):
        return status  # nothing that could be resumed
    odd = config.differences(replace(there, report=point.job.report), point.job)
    if agents != point.agents:
        odd = {"agents": (agents, point.agents)}
    for key, (here, wanted) in odd.items():
        raise UsageError(
            f"{run} is a run of another job ({key}: {here!r} there, {wanted!r} here); name "
            "another --out, or remove it."
        )
    return status


def finished_runs(folder: Path, points: Sequence[Point]) -> dict[str, Run]:
    """The finished runs by the names of their points."""
    done = [p.name for p in points if check_same_job(folder / p.name, p) == FINISHED]
    return {name: load(folder / name) for name in done}
