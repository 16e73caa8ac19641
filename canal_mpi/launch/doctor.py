"""`canal-mpi doctor`: checks this machine, or every host of a hostfile, through mpirun."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from canal_mpi.config import on_host
from canal_mpi.envs import common_spaces
from canal_mpi.errors import UsageError
from canal_mpi.launch.hostfile import Host
from canal_mpi.launch.mpirun import INSTALL, Command, build_command, find_mpi
from canal_mpi.launch.supervise import Answer, ask_program
from canal_mpi.settings import Job
from canal_mpi.topology.graphs import edges

MODULE = [sys.executable, "-m", "canal_mpi.launch.probe"]
VERSIONS = {  # must be the same everywhere
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
COLUMNS = ("machine", *VERSIONS, "games", "device", "cores", *ROOM)
MAX_CLOCK_OFFSET = 2.0  # seconds: it shows in the times of logs and files
SLOW_LINK = 1e6  # bytes per second; below, lessons take longer than playing
AT_ONCE = 8  # hosts that are asked at the same time
PROCESS_BYTES = 300 << 20  # of a rank before it has a row
WIDTH = 200  # characters of a line that no terminal shows


@dataclass
class HostCheck:
    """What is known of one host: the facts that it told, or why it told none."""

    host: str
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)
    no_answer: str = ""  # why there are no facts
    clock_offset: float = 0.0  # seconds that its clock is ahead of ours
    needs: dict[str, int] = field(default_factory=dict)  # bytes of disk and memory

    def problems(self, here: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong, each with its remedy; `here` are the facts of this machine."""
        if self.no_answer:
            yield self.no_answer
        for name, words in self.facts.get("troubles", {}).items():
            yield f"{name}: {words}"
        for name, remedy in VERSIONS.items():
            theirs, ours = self.facts.get(name), here.get(name)
            if None not in (theirs, ours) and theirs != ours:
                yield f"{name} is {theirs or 'missing'}, here it is {ours}: {remedy}"
        for name, remedy in ROOM.items():
            free, needed = self.facts.get(name, inf), self.needs.get(name, 0)
            if free < needed:
                words = f"{decimal(free)} of {name} free, the job needs up to {decimal(needed)}"
                yield f"{words}: {remedy}"
        if abs(self.clock_offset) > MAX_CLOCK_OFFSET:
            way = "ahead" if self.clock_offset > 0 else "behind"
            words = f"its clock is {abs(self.clock_offset):.0f} s {way}"
            yield f"{words}: sudo timedatectl set-ntp true, or chrony"

    def row(self) -> list[str]:
        """A line of the table."""
        if self.no_answer:
            return [self.host, str(self.ranks), "no answer"]
        words = {name: str(value) or "none" for name, value in self.facts.items()}
        for name in ROOM.keys() & self.facts.keys():
            needed = decimal(self.needs.get(name, 0))
            words[name] = f"{decimal(self.facts[name])} (needs {needed})"
        texts = [words.get(name, "?") for name in COLUMNS]
        return [self.host, str(self.ranks), *texts, f"{self.clock_offset:+.1f} s"]


@dataclass
class CheckReport:
    """What was found out about all hosts."""

    hosts: list[HostCheck]
    problems: list[tuple[str, str]] = field(default_factory=list)  # host, what is wrong
    notes: list[str] = field(default_factory=list)

    def print(self, console: Console | None = None) -> None:
        """Show the table of hosts, then notes and problems."""
        console = console or Console(highlight=False, soft_wrap=True)
        if not console.is_terminal:
            console.width = WIDTH
        failed = {host for host, _ in self.problems}
        table = Table("host", "ranks", *COLUMNS, "clock", box=None, padding=(0, 1))
        for host in self.hosts:
            table.add_row(*host.row(), style="red" if host.host in failed else "green")
        console.print(table)
        for words in self.notes:
            console.print(f" {words}.", markup=False)
        for name, words in self.problems:
            console.print(f" {name}: {words}.", style="red", markup=False)
        number = len(self.problems)
        console.print(f"{number} thing{'s' * (number > 1)} to fix." if number else "Fit to run.")


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
    no_mpi = ""
    try:
        find_mpi()
    except UsageError as error:
        if request.hosts or "both" in str(error):
            raise
        no_mpi = f"note: no mpirun here: one agent can train; for more, {INSTALL}"
    here = _check_host(Host("this machine"), request)
    if here.no_answer or not request.hosts:
        report = CheckReport([here])
    else:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda host: _check_host(host, request), request.hosts)
            report = CheckReport(list(found))
    for host in report.hosts:
        report.problems += [(host.host, words) for words in host.problems(here.facts)]
        if host.ranks > (cores := host.facts.get("cores", host.ranks)):
            report.notes.append(f"note: {host.host} has {cores} cores for {host.ranks} ranks")
    if no_mpi:
        report.notes.append(no_mpi)
    elif not any(host.no_answer for host in report.hosts):
        _measure_links(report, request)
    return report


def _check_host(host: Host, request: CheckRequest) -> HostCheck:
    """Run the check there; add what it told and what the job needs."""
    from canal_mpi.envs.atari import atari_games

    job, found = on_host(request.job, host.name), HostCheck(host.name, host.ranks)
    games = ",".join(task for task in job.tasks if task in atari_games())
    words = ["check", str(request.folder), job.learn.device, games]
    command = Command([*MODULE, *words])
    if request.hosts and host in request.hosts:
        there = [Host(host.name)]
        command = build_command(1, words, there, network=request.network, program_=MODULE)
    answer = ask_program(command, request.seconds)
    found.facts, found.no_answer = answer.facts, answer.trouble
    found.clock_offset = float(answer.facts.pop("time", answer.arrived)) - answer.arrived
    row_bytes = common_spaces(job.tasks, job.task).row_bytes
    lessons = min(job.train.steps, job.share.rows) * 32 * len(job.tasks)
    saved = 3 * (min(job.train.steps, job.replay.buffer_size) + job.rehearsal.rows) * row_bytes
    held = (job.replay.buffer_size + 2 * job.rehearsal.rows) * row_bytes
    found.needs["disk"] = (4 << 20) + found.ranks * (lessons + saved)
    found.needs["memory"] = found.ranks * (PROCESS_BYTES + held)
    return found


def _measure_links(report: CheckReport, request: CheckRequest) -> None:
    """Latency and bandwidth between hosts that are neighbors in the job's topology."""
    names, pairs = ["a rank", "another one here"], [(0, 1)]
    if len(request.hosts) > 1:
        names, pairs = [host.name for host in request.hosts], neighbor_hosts(request)
    if not pairs:
        return
    answer = measure_links(pairs, request.hosts, request.seconds, request.network)
    if answer.trouble:
        report.problems.append(("mpirun", f"ranks don't reach each other: {answer.trouble}"))
    for pair, (latency, rate) in answer.facts.items():
        a, b = (names[int(end)] for end in pair.split("-"))
        report.notes.append(f"{a} to {b}: {latency * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s")
        if rate < SLOW_LINK:
            words = f"only {decimal(int(rate))}/s: use a cable instead of Wi-Fi"
            report.problems.append(("network", f"{a} to {b}: {words}, or another --network"))


def measure_links(
    pairs: Sequence[tuple[int, int]], hosts: Sequence[Host], seconds: float, network: str | None
) -> Answer:
    """Seconds one way and bytes per second by pair, as in `0-1`: of hosts, or of two ranks here."""
    words = ["links", ",".join(f"{a}-{b}" for a, b in pairs)]
    each = [Host(host.name, 2 if len(hosts) == 1 else 1) for host in hosts]
    ranks = max(len(hosts), 2)
    command = build_command(ranks, words, each, network=network, program_=MODULE)
    return ask_program(command, seconds + len(pairs))


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
