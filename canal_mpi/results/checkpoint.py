"""Files of one agent: its checkpoints (when they are due, which are kept, which are whole), and
its lessons under `membuf/`.

A checkpoint is named by its round and by how many there were before it. A resumed run starts from
a round that every agent has (see rank/resume.py), and agents may be one round apart, so the newest
one of the round before stays until the round is over.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any

from canal_mpi import config
from canal_mpi.errors import CanalError, DamagedData, Stopped, StorageError, UsageError, logger
from canal_mpi.interfaces import Columns, Offer, Spaces
from canal_mpi.membuf.lesson import ROWS, Lesson, pack, unpack
from canal_mpi.results import files
from canal_mpi.results.files import MOST, read_arrays, read_attributes
from canal_mpi.settings import CheckpointConfig
from canal_mpi.state import strip_prefix

NAME = re.compile(r"round-([0-9]{4,9})-save-([0-9]{6,12})\.h5")
VERSION = 4
LESSONS = "membuf/agent-*/*.h5"
LESSON_ARRAYS = (*ROWS, "donor", "round", "task", "score", "std_error", "episodes", "network")
LISTED = re.compile(r"(membuf|checkpoints)/agent-[0-9]{1,9}/[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.h5")
MOST_AGENTS = 1 << 16
SPACING = 40  # between two checkpoints passes at least so many times the time that one takes

State = Callable[[], Columns]


@dataclass(frozen=True, order=True)
class Mark:
    """Names a checkpoint of an agent."""

    round: int
    save: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"round-{self.round:04d}-save-{self.save:06d}.h5"


def folder_of(run: Path, agent: int) -> Path:
    """Where an agent's checkpoints lie."""
    return run / "checkpoints" / f"agent-{agent}"


def marks(folder: Path) -> list[Mark]:
    """The checkpoints in a folder, oldest first; whether they are whole is not known yet."""
    found = [NAME.fullmatch(entry.name) for entry in folder.glob("round-*")]
    return sorted(Mark(int(m[1]), int(m[2])) for m in found if m)


def last_saved(run: Path) -> float:
    """When the agent of this host that saved longest ago last did; NaN where none has."""
    newest = []
    for folder in run.glob("checkpoints/agent-*"):
        for mark in marks(folder)[-1:]:
            with suppress(OSError):  # it may go while we look
                newest.append((folder / mark.file).stat().st_mtime)
    return min(newest, default=nan)


class Checkpoints:
    """Writes an agent's checkpoints; `stopping`: the run has to end, `hurry`: save at once."""

    def __init__(
        self,
        run: Path,
        about: dict[str, Any],
        settings: CheckpointConfig,
        stopping: Callable[[], bool] = lambda: False,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self.about = folder_of(run, about["agent"]), about
        self.settings, self.stopping, self.hurry = settings, stopping, hurry
        self.save = max((mark.save for mark in marks(self.folder)), default=0)
        self._turns, self._last, self._cost = 0, monotonic(), 0.0
        self.failed, self.seconds = False, 0.0

    def start(self, state: State) -> None:
        """A round begins; nobody could resume it without this checkpoint, so it must succeed."""
        self._write(state)
        if self.stopping():
            raise Stopped("stopped")

    def turn(self, steps: int, state: State | None) -> None:
        """An iteration of the training loop is over; raises Stopped if the run has to end."""
        self._turns += steps
        stopping, now = self.stopping(), monotonic()
        interval, seconds = self.settings.interval, self.settings.seconds
        due = bool(interval) and self._turns >= interval
        due |= bool(seconds) and now - self._last >= max(seconds, SPACING * self._cost)
        if state is not None and (stopping or self.hurry() or due):
            self._try(state)
        if stopping:
            raise Stopped("stopped")

    def end(self, state: State | None) -> None:
        """Training is over; evaluation and exchange come next."""
        if state is not None and monotonic() - self._last >= SPACING * self._cost:
            self._try(state)
        self.turn(0, None)

    def _try(self, state: State) -> None:
        """A checkpoint that may fail: the one before it is whole, and training continues."""
        try:
            self._write(state)
            self.failed = False
        except StorageError as error:
            self._turns, self._last = 0, monotonic()
            logger.warning("%s", error)
            if not self.failed:
                words = f"agent {self.about['agent']}: {error} Training continues without it."
                print(f"canal-mpi: warning: {words}", file=sys.stderr, flush=True)
            self.failed = True

    def _write(self, state: State) -> None:
        start = monotonic()
        columns = state()
        mark = Mark(int(columns["round"][0]), self.save + 1)
        about = self.about | {"kind": "checkpoint", "version": VERSION}
        about |= {"round": mark.round, "save": mark.save}
        files.write_arrays(self.folder / mark.file, columns, about, pack=False)
        self.save = mark.save
        found = marks(self.folder)
        before = [other for other in found if other.round < mark.round]
        for other in set(found) - {*found[-2:], *before[-1:]}:  # the newest two, and one before
            _remove(self.folder / other.file)
        self._turns, self._last, self._cost = 0, monotonic(), monotonic() - start
        self.seconds += self._cost
        logger.info("checkpoint %s in %.3f s, %.3f s in all", mark.file, self._cost, self.seconds)


@dataclass(frozen=True)
class Found:
    """A whole checkpoint on this host."""

    agent: int
    mark: Mark
    run_id: str
    agents: int
    first_agent: int
    job: str


def survey(run: Path) -> tuple[list[Found], list[str]]:
    """Every whole checkpoint of every agent on this host, and what is wrong with other files."""
    found, wrong = [], []
    for path in sorted(run.glob("*/agent-*/round-*.h5")):  # checkpoints, membuf
        try:
            if path.parts[-3] == "checkpoints":
                found.append(checked(path))
            else:
                read_attributes(path)
        except (DamagedData, StorageError) as error:
            wrong.append(str(error))
    if (run / "run.h5").exists():
        try:
            wrong += strangers(run)
        except CanalError as error:
            wrong.append(str(error))
    return found, list(dict.fromkeys(wrong))


def strangers(run: Path) -> Iterator[str]:
    """Files on this host that are not those of run.h5's manifest, /files, or are missing.

    Agents without a folder were on other hosts. Whoever ends inside a round leaves a newer
    learner.h5 than run.h5 knows.
    """
    wanted = ("files/path", "files/sha256", "faults/agent")
    facts, listed = files.read(run / "run.h5", wanted=wanted.__contains__)
    try:
        paths, digests, gone = (listed[name].tolist() for name in wanted)
        newest = dict(zip(paths, digests, strict=True))
    except (LookupError, ValueError) as error:
        raise DamagedData(f"{run / 'run.h5'} lists no files: {error!r}.") from error
    over = facts.get("status") in ("finished", "degraded")
    inside = [f"agent-{agent}" for agent in gone]
    for name, sha256 in newest.items():
        text = name.decode(errors="replace")
        path = run / text
        if not LISTED.fullmatch(text):
            raise DamagedData(f"{run / 'run.h5'} lists {text!r} among its files.")
        final = path.name != "learner.h5" or (over and path.parent.name not in inside)
        if path.parent.is_dir() and final:
            try:
                if files.digest(read_arrays(path)).encode() != sha256:
                    yield f"{path} is not the one that this run wrote."
            except (DamagedData, StorageError) as error:
                yield str(error) if path.exists() else f"{path} is missing."


def checked(path: Path) -> Found:
    """What a checkpoint says of itself; DamagedData where that is not what its name says."""
    about = read_attributes(path)
    try:
        agent, version = int(about["agent"]), int(about["version"])
        mark = Mark(int(about["round"]), int(about["save"]))
        facts = (str(about["run_id"]), int(about["agents"]), int(about["first_agent"]))
        job = str(about["job"])
        config.parse_toml(job.encode(), "its job")
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise DamagedData(f"{path} is no checkpoint: {error!r}.") from error
    if (f"agent-{agent}", mark.file, version) != (*path.parts[-2:], VERSION):
        raise DamagedData(f"{path} holds {mark.file} of agent {agent}, version {version}.")
    if not 0 <= agent - facts[2] < facts[1] <= MOST_AGENTS:
        raise DamagedData(f"{path} is of agent {agent} of {facts[1]}, from {facts[2]} on.")
    return Found(agent, mark, *facts, job)


def load_state(path: Path) -> Columns:
    """The arrays of a checkpoint."""
    state = files.read_finite(path, prefix="learner/")
    if not any(name.startswith("learner/") for name in state):
        raise DamagedData(f"{path} holds no network.")
    return state


def remove_all(run: Path) -> None:
    """Remove every checkpoint on this host: the run is over, nobody will resume it."""
    for path in run.glob("checkpoints/agent-*/round-*.h5"):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a file; a folder in its place is none of ours."""
    with suppress(IsADirectoryError):
        path.unlink(missing_ok=True)


def tidy(run: Path, chosen: dict[int, Mark]) -> None:
    """Remove checkpoints newer than the chosen ones, and files that crashes left half written."""
    for agent, mark in chosen.items():
        folder = folder_of(run, agent)
        newer = [folder / other.file for other in marks(folder) if other > mark]
        places = (folder, run / "membuf" / folder.name)
        for path in (*newer, *(rest for place in places for rest in place.glob(".*.new"))):
            _remove(path)


# ── lessons ────────────────────────────────────────────────────────────────────────────────────


def check_folder(run: str) -> None:
    """UsageError where a folder holds no lessons."""
    if not any(Path(run).glob(LESSONS)):
        raise UsageError(
            f"--lessons {run}: no lessons there; expected the folder of a run, with "
            "membuf/agent-0/round-01-… in it."
        )


def earlier_lessons(
    run: str, tasks: tuple[str, ...], spaces: Spaces, limit: int
) -> list[tuple[Lesson, bytes]]:
    """The lessons of these tasks, packed and checked; files that fail are left out by name."""
    found = []
    for path in sorted(Path(run).glob(LESSONS)):
        try:
            lesson, data = read_lesson(path, spaces, limit)
        except CanalError as error:
            logger.warning("%s is not offered: %s", path, error)
            continue
        if lesson.offer.task in tasks:
            found.append((lesson, data))
    return found


def read_lesson(
    path: Path, spaces: Spaces | None = None, limit: int = MOST
) -> tuple[Lesson, bytes]:
    """The lesson in a file and its packed bytes, checked as those of a neighbour are.

    Without `spaces` the states may have any shape. Its round is negative: it is of another run.
    """
    columns = read_arrays(path, limit, lambda name: name.partition("/")[0] in LESSON_ARRAYS)
    try:
        donor, round_ = int(columns["donor"][0]), int(columns["round"][0])
        task, score = columns["task"][0].decode(), float(columns["score"][0])
        rows = {name: columns[name] for name in ROWS}
        spaces = spaces or Spaces(rows["state"].shape[1:], rows["state"].dtype.str, 256)
        data = pack(donor, -round_, task, rows, strip_prefix("network", columns))
        std_error, episodes = float(columns["std_error"][0]), int(columns["episodes"][0])
        offer = Offer(donor, -round_, task, score, len(rows["action"]), len(data))
        offer = replace(offer, std_error=std_error, episodes=episodes)
    except (LookupError, ValueError, AttributeError, TypeError, ArithmeticError) as error:
        raise DamagedData(f"no lesson: {error}") from error
    return unpack(data, offer, spaces, limit), data
