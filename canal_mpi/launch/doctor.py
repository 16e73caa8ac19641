"""`canal-mpi doctor`: checks this machine, or every host of a hostfile, through mpirun.

As a program (`python -m canal_mpi.launch.doctor check FOLDER GAME,GAME`) it checks the host that it
runs on and prints one line of JSON; `status FOLDER` prints what run.h5 in that folder says.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import time
from typing import Any

import psutil
from rich.filesize import decimal

from canal_mpi import __version__
from canal_mpi.config import on_host
from canal_mpi.errors import RankFailed, UsageError
from canal_mpi.launch.hostfile import Host
from canal_mpi.launch.mpirun import INSTALL, Command, build_command, find_mpi
from canal_mpi.launch.supervise import ANSWER, ask_program
from canal_mpi.results.status import status_of
from canal_mpi.settings import Job
from canal_mpi.topology.graphs import edges

MODULE = [sys.executable, "-m", "canal_mpi.launch.doctor"]
REMEDIES = {  # for versions that differ
    "python": "install the same Python (major.minor) everywhere",
    "canal-mpi": "install the same canal-mpi everywhere (the digest tells code that was changed)",
    "torch": "pip install the same torch everywhere; results differ in bits otherwise",
    "mpi": "install the same MPI everywhere; two different ones can't talk",
    "ale-py": "pip install the same ale-py everywhere",
}
ROOM = {
    "memory": "fewer ranks there, or a smaller replay.buffer_size",
    "disk": "free some, or name another folder with --out",
}
COLUMNS = ("machine", *REMEDIES, "games", "cuda", "cores", *ROOM)
MAX_CLOCK_OFFSET = 2.0  # seconds: it shows in the times of logs and files
SLOW_LINK = 1e6  # bytes per second; below, lessons take longer than playing
AT_ONCE = 8  # hosts that are asked at the same time
PROCESS_BYTES = 300 << 20  # of a rank before it has a row
Links = dict[tuple[str, str], list[float]]  # seconds one way, bytes per second


@dataclass
class HostCheck:
    """What is known of one host: the facts that it told, or why it told none."""

    host: str
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)
    no_answer: str = ""  # why there are no facts
    clock_offset: float = 0.0  # seconds that its clock is ahead of ours
    needs: dict[str, int] = field(default_factory=dict)  # bytes of disk and memory
    needs_cuda: bool = False

    def problems(self, here: Mapping[str, Any]) -> list[str]:
        """What is wrong, each with its remedy; `here` are the facts of this machine."""
        if self.no_answer:
            return [self.no_answer]
        facts, troubles = self.facts, dict(self.facts.get("troubles", {}))
        cuda = troubles.pop("cuda", "") or facts.get("cuda")
        found = [f"{name}: {words}" for name, words in troubles.items()]
        for name, remedy in REMEDIES.items():
            if not {name} <= here.keys() & facts.keys():
                continue
            ours, theirs = here[name], facts[name]
            if _version(name, ours) != _version(name, theirs):
                found.append(f"{name} is {theirs or 'missing'}, here it is {ours}: {remedy}")
        for name, remedy in ROOM.items():
            if facts.get(name, inf) < self.needs.get(name, 0):
                free, needed = decimal(facts[name]), decimal(self.needs[name])
                found.append(f"{free} of {name} free, the job needs up to {needed}: {remedy}")
        if self.needs_cuda and cuda:
            found.append(f'CUDA can\'t be used ({cuda}): device = "cpu" or "auto" for this host')
        if abs(self.clock_offset) > MAX_CLOCK_OFFSET:
            way = "ahead" if self.clock_offset > 0 else "behind"
            words = f"its clock is {abs(self.clock_offset):.0f} s {way}"
            found.append(f"{words}: sudo timedatectl set-ntp true, or chrony")
        return found

    def row(self) -> list[str]:
        """A line of the table."""
        if self.no_answer:
            return [self.host, str(self.ranks), "no answer"]
        words = {name: str(value) or "none" for name, value in self.facts.items()}
        words["cuda"] = "yes" if self.facts.get("cuda") == "" else "no"
        for name in ROOM:
            if name in self.facts:
                needed = decimal(self.needs.get(name, 0))
                words[name] = f"{decimal(self.facts[name])} (needs {needed})"
        texts = [words.get(name, "?") for name in COLUMNS]
        return [self.host, str(self.ranks), *texts, f"{self.clock_offset:+.1f} s"]


def _version(name: str, text: str) -> str:
    """What must be the same everywhere: of Python only major and minor version."""
    return text.rpartition(".")[0] if name == "python" else text


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    names = ("host", "ranks", *COLUMNS, "clock")
    full = [(*row, *[""] * (len(names) - len(row))) for row in (names, *rows)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        " " + "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
        for row in full
    ]


@dataclass
class CheckReport:
    """What was found out about all hosts."""

    hosts: list[HostCheck]
    problems: list[tuple[str, str]] = field(default_factory=list)  # host, what is wrong
    links: Links = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[tuple[str, bool]]:
        """The table, the links, notes and problems; each with whether it is about a problem."""
        failed = tuple(f" {host}{end}" for host, _ in self.problems for end in (" ", ":"))
        shown = table([host.row() for host in self.hosts])
        for (a, b), (latency, rate) in self.links.items():
            shown.append(f" {a} to {b}: {latency * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s")
        shown += [f" note: {words}." for words in self.notes]
        shown += [f" {host}: {words}." for host, words in self.problems]
        return [(line, line.startswith(failed)) for line in shown]


@dataclass(frozen=True)
class CheckRequest:
    """What is checked: the hosts (none: this machine), for a job that writes to a folder."""

    job: Job
    folder: Path
    hosts: tuple[Host, ...] = ()
    network: str | None = None
    seconds: float = 60.0  # for each host


def check(request: CheckRequest) -> CheckReport:
    """Check every host, then the links between them if all answered."""
    from canal_mpi.envs.atari import atari_games

    no_mpi = _missing_mpi(request)
    games = ",".join(task for task in request.job.tasks if task in atari_games())
    words = ["check", str(request.folder), games]

    def check_host(host: Host) -> HostCheck:
        there, network = [Host(host.name)], request.network
        command = build_command(1, words, there, network=network, program_=MODULE)
        return _ask(command, HostCheck(host.name, host.ranks), request)

    here = _ask(Command([*MODULE, *words]), HostCheck("this machine", 1), request)
    if here.no_answer or not request.hosts:
        report = CheckReport([here])
    else:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            report = CheckReport(list(pool.map(check_host, request.hosts)))
    for host in report.hosts:
        report.problems += [(host.host, words) for words in host.problems(here.facts)]
        if host.ranks > (cores := host.facts.get("cores", host.ranks)):
            report.notes.append(f"{host.host} has {cores} cores for {host.ranks} ranks")
    if no_mpi:
        report.notes.append(no_mpi)
    elif not any(host.no_answer for host in report.hosts):
        _measure_links(report, request)
    return report


def _missing_mpi(request: CheckRequest) -> str:
    """Why there is no mpirun, which matters only where there are other hosts."""
    try:
        find_mpi()
        return ""
    except UsageError as error:
        if request.hosts or "both" in str(error):
            raise
        return f"no mpirun here: one agent can train; for more, {INSTALL}"


def _ask(command: Command, found: HostCheck, request: CheckRequest) -> HostCheck:
    """Run the check there; add what it told and what the job needs."""
    from canal_mpi.envs import common_spaces

    answer = ask_program(command, request.seconds)
    found.facts, found.no_answer = answer.facts, answer.trouble
    found.clock_offset = float(answer.facts.pop("time", answer.arrived)) - answer.arrived
    job = on_host(request.job, found.host)
    row_bytes = common_spaces(job.tasks, job.task).row_bytes
    lessons = min(job.train.steps, job.share.rows) * 32 * len(job.tasks)
    saved = 3 * (min(job.train.steps, job.replay.buffer_size) + job.rehearsal.rows) * row_bytes
    held = (job.replay.buffer_size + 2 * job.rehearsal.rows) * row_bytes
    found.needs["disk"] = (4 << 20) + found.ranks * (lessons + saved)
    found.needs["memory"] = found.ranks * (PROCESS_BYTES + held)
    found.needs_cuda = job.learn.device == "cuda"
    return found


def _measure_links(report: CheckReport, request: CheckRequest) -> None:
    """Latency and bandwidth between hosts that are neighbors in the job's topology."""
    names, single = [host.name for host in request.hosts], len(request.hosts) < 2
    pairs = [(0, 1)] if single else neighbor_hosts(request)
    if not pairs:
        return
    try:
        found = measure_links(pairs, names, request.seconds, request.network)
    except RankFailed as error:
        report.problems.append(("mpirun", f"ranks don't reach each other: {error}"))
        return
    names = ["a rank", "another one here"] if single else names
    report.links = {(names[a], names[b]): speed for (a, b), speed in found.items()}
    for (a, b), (_, rate) in report.links.items():
        if rate < SLOW_LINK:
            words = f"only {decimal(int(rate))}/s: use a cable instead of Wi-Fi"
            report.problems.append(("network", f"{a} to {b}: {words}, or another --network"))


def measure_links(
    pairs: Sequence[tuple[int, int]], names: Sequence[str], seconds: float, network: str | None
) -> dict[tuple[int, int], list[float]]:
    """Seconds one way and bytes per second between pairs of hosts, or of two ranks on one."""
    program = [sys.executable, "-m", "canal_mpi.launch.links"]
    words = ",".join(f"{a}-{b}" for a, b in pairs)
    hosts = [Host(name, 2 if len(names) == 1 else 1) for name in names]
    ranks = max(len(names), 2)
    command = build_command(ranks, [words], hosts, network=network, program_=program)
    answer = ask_program(command, seconds + len(pairs))
    if not answer.facts:
        raise RankFailed(answer.trouble)
    ends = {pair: pair.split("-") for pair in answer.facts}
    return {(int(a), int(b)): answer.facts[pair] for pair, (a, b) in ends.items()}


def neighbor_hosts(request: CheckRequest) -> list[tuple[int, int]]:
    """Pairs of hosts whose agents hear each other."""
    hosts, job = request.hosts, request.job
    of_rank = [k for k, host in enumerate(hosts) for _ in range(host.ranks)]
    agents = [k for k in of_rank if not hosts[k].is_env_server]
    names = [hosts[k].name for k in agents]
    joined = edges(job.share.topology, len(agents), job.seed, names)
    serving = [(k, s) for k in agents for s in of_rank if hosts[s].is_env_server]
    pairs = [(agents[a], agents[b]) for a, b in joined] + serving
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


def check_here(folder: Path, games: Sequence[str]) -> dict[str, Any]:
    """What a job depends on at this host; what can't be found out is under `troubles`."""
    questions: dict[str, Callable[[], Any]] = {
        "canal-mpi": _code,
        "torch": lambda: version("torch"),
        "mpi": _mpi,
        "ale-py": lambda: version("ale-py"),
        "games": lambda: _load_games(games),
        "cuda": _cuda,
        "cores": lambda: len(os.sched_getaffinity(0)),
        "memory": lambda: int(psutil.virtual_memory().available),
        "disk": lambda: _disk(folder),
    }
    facts: dict[str, Any] = {"machine": platform.machine(), "python": platform.python_version()}
    troubles = {}
    for name, question in questions.items():
        try:
            facts[name] = question()
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            troubles[name] = f"{type(error).__name__}: {first}"[:300]
    return facts | {"troubles": troubles}


def _code() -> str:
    from canal_mpi.rank.world import code_digest

    return f"{__version__} {code_digest()}"


def _mpi() -> str:
    from canal_mpi.rank.world import mpi_library

    try:
        return mpi_library()
    except (ImportError, RuntimeError):
        return ""


def _load_games(games: Sequence[str]) -> int:
    """How many of the games load, each for real."""
    import numpy as np

    from canal_mpi.envs import make_game
    from canal_mpi.settings import TaskConfig

    for game in games:
        make_game(game, TaskConfig(), np.random.SeedSequence(0)).close()
    return len(games)


def _cuda() -> str:
    """Why CUDA can't be used; empty where it can."""
    from canal_mpi.learn.networks import cuda_trouble

    return cuda_trouble()


def _disk(folder: Path) -> int:
    """Bytes that are free where the run goes."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{there} can't be written to")
    return shutil.disk_usage(there).free


def main() -> None:
    """Answer a question about this host; the time comes last, for who compares clocks."""
    question, folder, *rest = sys.argv[1:]
    if question == "status":
        facts: dict[str, Any] = {"status": status_of(Path(folder))}
    else:
        facts = check_here(Path(folder), [name for name in rest[0].split(",") if name])
    print(f"{ANSWER}{json.dumps(facts | {'time': time()})}", flush=True)


if __name__ == "__main__":
    main()
