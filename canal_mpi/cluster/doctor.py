"""`canal-mpi doctor`: look at this machine, or at every host of a hostfile, through mpirun."""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canal_mpi.cluster import check
from canal_mpi.cluster.asking import hear
from canal_mpi.cluster.findings import Report, findings, row, slow_links, table
from canal_mpi.cluster.hostfile import Host
from canal_mpi.cluster.launch import Launch, plan_launch
from canal_mpi.cluster.mpis import INSTALL, Mpi, find_mpi
from canal_mpi.errors import UsageError
from canal_mpi.hosts import on_host
from canal_mpi.job import Job
from canal_mpi.topology.graphs import edges

LINKS = "canal-mpi-links "  # what canal_mpi.rank.links prints
AT_ONCE = 8  # hosts that are asked at the same time
PROCESS = 300 << 20  # bytes of a rank before it has a row
Links = dict[tuple[str, str], list[float]]


@dataclass
class Diagnosis:
    """What the doctor says."""

    reports: list[Report]
    wrong: list[tuple[str, str]] = field(default_factory=list)  # host, finding
    links: Links = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The table, the links, and what was found."""
        shown = table([row(report) for report in self.reports])
        for (a, b), (latency, rate) in self.links.items():
            shown.append(f" {a} to {b}: {latency * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s")
        shown += [f" note: {words}." for words in self.notes]
        return shown + [f" {host}: {words}." for host, words in self.wrong]


@dataclass(frozen=True)
class Patient:
    """What is looked at: the hosts (none: this machine), for a job that writes to a folder."""

    job: Job
    folder: Path
    hosts: tuple[Host, ...] = ()
    network: str | None = None
    seconds: float = 60.0  # for each host


def examine(patient: Patient) -> Diagnosis:
    """Look at every host, then at the links between those that answered."""
    mpi = _mpi(patient)
    arguments = [str(patient.folder), ",".join(_games(patient.job))]
    command = [sys.executable, "-m", "canal_mpi.cluster.check"]
    here = _ask(Launch([*command, *arguments]), Report("this machine", 1), patient.seconds)
    if here.silence:
        return Diagnosis([here], [(here.host, here.silence)])
    reports = [here]
    if patient.hosts:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reports = list(
                pool.map(lambda h: _examine(h, patient, command, arguments), patient.hosts)
            )
    for report in reports:
        _needs(report, patient)
    found = Diagnosis(reports)
    for report in reports:
        found.wrong += [(report.host, words) for words in findings(report, here.facts)]
    _crowds(found)
    if isinstance(mpi, str):
        found.notes.append(mpi)
    elif not any(report.silence for report in reports):
        _measure(found, patient)
    return found


def _mpi(patient: Patient) -> Mpi | str:
    """The launcher, or why there is none, which matters only where there are other hosts."""
    try:
        return find_mpi()
    except UsageError as error:
        if patient.hosts or "both" in str(error):
            raise
        return f"no mpirun here: one agent can train; for more, {INSTALL}"


def _games(job: Job) -> list[str]:
    from canal_mpi.tasks.atari import atari_games

    return [task for task in job.tasks if task in atari_games()]


def _examine(
    host: Host, patient: Patient, command: Sequence[str], arguments: Sequence[str]
) -> Report:
    launch = plan_launch(1, arguments, [Host(host.name)], network=patient.network, command=command)
    return _ask(launch, Report(host.name, host.ranks), patient.seconds)


def _ask(launch: Launch, report: Report, seconds: float) -> Report:
    """Run the check; its answer, or the reason why there is none, goes into the report."""
    answer = hear(launch, check.SIGN, seconds)
    if answer.facts is None:
        report.silence = answer.trouble
    else:
        report.facts, ours = answer.facts, answer.heard
        report.offset = float(answer.facts.pop("time", ours)) - ours
    return report


def _needs(report: Report, patient: Patient) -> None:
    """What the job will need of a host."""
    from canal_mpi.tasks import common_spaces

    job = on_host(patient.job, report.host)
    spaces = common_spaces(job.tasks, job.task)
    rows = min(job.train.frames, job.replay.capacity)
    lessons = min(job.train.frames, job.share.rows) * 32 * len(job.tasks)
    checkpoints = 3 * (rows + job.memory.rows) * spaces.row_bytes
    report.needs_disk = (4 << 20) + report.ranks * (lessons + checkpoints)
    held = (job.replay.capacity + 2 * job.memory.rows) * spaces.row_bytes
    report.needs_memory = report.ranks * (PROCESS + held)
    report.needs_cuda = job.learn.device == "cuda"


def _crowds(found: Diagnosis) -> None:
    for report in found.reports:
        cores = report.facts.get("cores")
        if isinstance(cores, int) and report.ranks > cores:
            found.notes.append(f"{report.host} has {cores} cores for {report.ranks} ranks")


def _measure(found: Diagnosis, patient: Patient) -> None:
    """Latency and bandwidth between hosts that are neighbours in the job's topology."""
    names = [host.name for host in patient.hosts]
    pairs = neighbours(patient) if len(names) > 1 else [(0, 1)]
    if not pairs:
        return
    words = ",".join(f"{a}-{b}" for a, b in pairs)
    one_each = [Host(name) for name in names] if len(names) > 1 else [Host(n, 2) for n in names]
    command = [sys.executable, "-m", "canal_mpi.rank.links"]
    launch = plan_launch(
        max(len(names), 2), [words], one_each, network=patient.network, command=command
    )
    answer = hear(launch, LINKS, patient.seconds + len(pairs))
    who = names if len(names) > 1 else ["a rank", "another one here"]
    if answer.facts is None:
        found.wrong.append(("mpirun", f"ranks don't reach each other: {answer.trouble}"))
        return
    found.links = _by_host(answer.facts, who)
    found.wrong += [("network", words) for words in slow_links(found.links)]


def _by_host(facts: Mapping[str, Any], names: Sequence[str]) -> Links:
    links: Links = {}
    for pair, (latency, rate) in facts.items():
        a, b = map(int, pair.split("-"))
        links[names[a], names[b]] = [float(latency), float(rate)]
    return links


def neighbours(patient: Patient) -> list[tuple[int, int]]:
    """Pairs of hosts whose agents hear each other."""
    places = [k for k, host in enumerate(patient.hosts) for _ in range(host.ranks)]
    agents = [k for k in places if not patient.hosts[k].serves]
    names = [patient.hosts[k].name for k in agents]
    share = patient.job.share
    joined = edges(share.topology, len(agents), patient.job.seed, names)
    serving = [(k, s) for k in agents for s in places if patient.hosts[s].serves]
    pairs = [(agents[a], agents[b]) for a, b in joined] + serving
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
