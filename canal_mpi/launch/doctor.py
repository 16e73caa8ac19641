"""`canal-mpi doctor`: checks this machine, or every host of a hostfile, through mpirun.

mpirun starts this module on each host as a program that prints one line of JSON: `check FOLDER
DEVICE GAME,GAME` tells what a job depends on there, `status FOLDER` what run.h5 in that folder
says, `meet` (a rank on each host) whether the ranks reach each other.
"""

import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from canal_mpi import __version__, envs
from canal_mpi.config import on_host
from canal_mpi.envs.atari import atari_games
from canal_mpi.errors import UsageError
from canal_mpi.launch.hostfile import Host
from canal_mpi.launch.mpirun import INSTALL, Command, build_command, find_mpi
from canal_mpi.launch.supervise import ANSWER, ASK, ask_program
from canal_mpi.results.status import status_of
from canal_mpi.settings import Job, TaskConfig
from canal_mpi.topology import Tag

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
COLUMNS = ("machine", *VERSIONS, "games", "device", "cores", *ROOM, "clock")
MAX_CLOCK_OFFSET = 2.0  # seconds: it shows in the times of logs and files
AT_ONCE = 8  # hosts that are asked at the same time
PROCESS_BYTES = 300 << 20  # of a rank before it has a row
LITTLE_MEMORY = 4.5e9  # bytes of a board that needs swap beside it
CPU = Path("/sys/devices/system/cpu")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one on every running machine
SELF_SCALING = ("intel_pstate", "amd-pstate-epp")  # drivers whose `powersave` is fast under load
FULL_POWER = "`sudo nvpmodel -m 0 && sudo jetson_clocks` on a Jetson, elsewhere see `cpupower`"
WIDTH = 200  # characters of a line that no terminal shows


@dataclass
class HostCheck:
    """What is known of one host: the facts that it told, or why it told none."""

    host: str
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)
    no_answer: str = ""  # why there are no facts
    needs: dict[str, int] = field(default_factory=dict)  # bytes of disk and memory

    def problems(self, here: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong, each with its remedy; `here` are the facts of this machine."""
        if self.no_answer:
            yield self.no_answer
        for name, words in self.facts.get("troubles", {}).items():
            yield f"{name}: {words}"
        for name, remedy in VERSIONS.items():
            theirs, ours = self.facts.get(name), here.get(name)
            small = name == "torch" and not theirs and self.facts.get("device") == "cpu"
            if None not in (theirs, ours) and theirs != ours and not small:
                yield f"{name} is {theirs or 'missing'}, here it is {ours}: {remedy}"
        for name, remedy in ROOM.items():
            free, needed = self.facts.get(name, inf), self.needs.get(name, 0)
            if free < needed:
                words = f"{decimal(free)} of {name} free, the job needs up to {decimal(needed)}"
                yield f"{words}: {remedy}"
        if self.facts.get("swap") == 0 and self.facts["total memory"] < LITTLE_MEMORY:
            words = f"no swap beside {decimal(self.facts['total memory'])} of memory"
            yield f"{words}: sudo fallocate -l 4G /swap && sudo mkswap /swap && sudo swapon /swap"
        if abs(ahead := self.facts.get("clock", 0.0)) > MAX_CLOCK_OFFSET:
            words = f"its clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
            yield f"{words}: sudo timedatectl set-ntp true, or chrony"

    def row(self) -> list[str]:
        """A line of the table."""
        if self.no_answer:
            return [self.host, str(self.ranks), "no answer"]
        words = {name: str(value) or "none" for name, value in self.facts.items()}
        for name in ROOM.keys() & self.facts.keys():
            needed = decimal(self.needs.get(name, 0))
            words[name] = f"{decimal(self.facts[name])} (needs {needed})"
        words["clock"] = f"{self.facts.get('clock', 0.0):+.1f} s"
        return [self.host, str(self.ranks), *(words.get(name, "?") for name in COLUMNS)]


@dataclass
class CheckReport:
    """What was found out about all hosts."""

    hosts: list[HostCheck]
    problems: list[tuple[str, str]] = field(default_factory=list)  # host, what is wrong
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        """Show the table of hosts, then notes and problems."""
        console = Console(highlight=False, soft_wrap=True)
        if not console.is_terminal:
            console.width = WIDTH
        failed = {host for host, _ in self.problems}
        table = Table("host", "ranks", *COLUMNS, box=None, padding=(0, 1))
        for host in self.hosts:
            table.add_row(*host.row(), style="red" if host.host in failed else "green")
        console.print(table)
        for words in self.notes:
            console.print(f" note: {words}.", markup=False)
        for name, words in self.problems:
            console.print(f" {name}: {words}.", style="red", markup=False)
        number = len(self.problems)
        console.print(f"{number} thing{'s' * (number > 1)} to fix." if number else "Fit to run.")


def check(
    job: Job, folder: Path, hosts: Sequence[Host], network: str | None, seconds: float
) -> CheckReport:
    """Check every host (without any: this machine) for a job that writes to a folder.

    If all answered within so many seconds, also whether ranks on them reach each other.
    """

    def check_host(host: Host) -> HostCheck:
        mine = on_host(job, host.name)
        games = ",".join(task for task in mine.tasks if task in atari_games())
        words = ["check", str(folder), mine.learn.device, games]
        command = Command([*ASK, *words])
        if host in hosts:
            command = build_command(1, words, [Host(host.name)], network, program_=ASK)
        facts, trouble = ask_program(command, seconds)
        if module := re.search(r"No module named '(\w+)", trouble):
            trouble = f"{module[1]} is missing there: pip install --force-reinstall canal-mpi"
        return HostCheck(host.name, host.ranks, facts, trouble, _needs(mine, host.ranks))

    no_mpi = ""
    try:
        find_mpi()
    except UsageError as error:
        if hosts or "both" in str(error):
            raise
        no_mpi = f"no mpirun here: one agent can train; for more, {INSTALL}"
    here = check_host(Host("this machine"))
    report = CheckReport([here])
    if hosts and not here.no_answer:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            report.hosts = list(pool.map(check_host, hosts))
    for host in report.hosts:
        report.problems += [(host.host, words) for words in host.problems(here.facts)]
        if limits := host.facts.get("power"):
            report.notes.append(f"{host.host} is in a low power mode ({limits}): {FULL_POWER}")
        if host.ranks > (cores := host.facts.get("cores", host.ranks)):
            report.notes.append(f"{host.host} has {cores} cores for {host.ranks} ranks")
    report.problems += same_names(report.hosts)
    if no_mpi:
        report.notes.append(no_mpi)
    elif not any(host.no_answer for host in report.hosts):
        each = [Host(host.name, 2 if len(hosts) == 1 else 1) for host in hosts]
        together = build_command(max(len(each), 2), ["meet"], each, network, program_=ASK)
        if trouble := ask_program(together, seconds)[1]:
            report.problems.append(("mpirun", f"ranks don't reach each other: {trouble}"))
    return report


def _needs(job: Job, ranks: int) -> dict[str, int]:
    """Bytes of disk and memory that a job may take with so many ranks."""
    row_bytes = envs.common_spaces(job.tasks, job.task).row_bytes
    lessons = min(job.train.steps, job.share.rows) * 32 * len(job.tasks)
    saved = 3 * (min(job.train.steps, job.replay.buffer_size) + job.rehearsal.rows) * row_bytes
    held = (job.replay.buffer_size + 2 * job.rehearsal.rows) * row_bytes
    return {
        "disk": (4 << 20) + ranks * (lessons + saved),
        "memory": ranks * (PROCESS_BYTES + held),
    }


def same_names(hosts: Sequence[HostCheck]) -> Iterator[tuple[str, str]]:
    """Hosts that call themselves as one before them does, with the remedy."""
    first: dict[str, HostCheck] = {}
    for host in hosts:
        name = host.facts.get("host")
        if name is None or (before := first.setdefault(name, host)) is host:
            continue
        if host.facts.get("boot") == before.facts.get("boot"):
            words = f"it is {before.host} under another name"
            yield host.host, f"{words}: leave it out, and give {before.host} its ranks"
        else:
            words = f"it calls itself {name}, and so does {before.host}"
            yield host.host, f"{words}: sudo hostnamectl set-hostname {host.host}, there"


def check_here(folder: Path, device: str, games: Sequence[str]) -> dict[str, Any]:
    """What a job depends on at this host; what can't be found out is under `troubles`."""
    from canal_mpi.rank.world import code_digest, mpi_library

    questions: dict[str, Callable[[], Any]] = {
        "host": socket.gethostname,
        "boot": BOOT.read_text,
        "machine": platform.machine,
        "python": lambda: ".".join(platform.python_version_tuple()[:2]),
        "canal-mpi": lambda: f"{__version__} {code_digest()}",
        "torch": lambda: version("torch"),
        "mpi": mpi_library,
        "ale-py": lambda: version("ale-py"),
        "games": lambda: _load(games),
        "device": lambda: _device(device),
        "power": power_limits,
        "cores": lambda: len(os.sched_getaffinity(0)),
        "memory": lambda: int(psutil.virtual_memory().available),
        "total memory": lambda: int(psutil.virtual_memory().total),
        "swap": lambda: int(psutil.swap_memory().total),
        "disk": lambda: _disk(folder),
    }
    facts, troubles = dict[str, Any](), {}
    for name, question in questions.items():
        try:
            facts[name] = question()
        except Exception as error:
            if name in VERSIONS and isinstance(error, ImportError | RuntimeError):
                facts[name] = ""  # it is missing
                continue
            line = (str(error) or type(error).__name__).splitlines()[0]
            troubles[name] = f"{type(error).__name__}: {line}"[:300]
    return facts | {"troubles": troubles}


def _load(games: Sequence[str]) -> int:
    for game in games:
        envs.make_game(game, TaskConfig(), np.random.SeedSequence(0)).close()
    return len(games)


def _device(name: str) -> str:
    """Where the job computes on this host; raises where that does not work."""
    if name == "cpu":
        return name  # a network of the default kind needs no torch
    from canal_mpi.learn.networks import choose_device

    return choose_device(name)


def power_limits(cpu: Path = CPU) -> str:
    """How its power mode slows this host, as far as the kernel tells; empty where it does not."""

    def told(path: Path) -> str:
        with suppress(OSError):
            return path.read_text().strip()
        return ""

    cores, found = sorted(cpu.glob("cpu[0-9]*")), []
    off = sum(told(core / "online") == "0" for core in cores)
    if off and told(cpu / "smt" / "control") not in ("off", "forceoff"):
        found.append(f"{off} of {len(cores)} cores are off")
    for core in cores:
        limit, able = (
            told(core / "cpufreq" / f"{name}_max_freq") for name in ("scaling", "cpuinfo")
        )
        if limit and able and int(limit) < int(able):
            found.append(f"{core.name} runs at {int(limit) // 1000} of {int(able) // 1000} MHz")
            break
    governor, driver = (
        told(cpu / f"cpu0/cpufreq/scaling_{name}") for name in ("governor", "driver")
    )
    if governor == "powersave" and driver not in SELF_SCALING:
        found.append("cpufreq's governor is powersave")
    return ", ".join(found)


def _disk(folder: Path) -> int:
    """Bytes that are free where the run goes."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{there} can't be written to")
    return shutil.disk_usage(there).free


def meet() -> int:
    """On every rank: exchange a word with every other one."""
    from canal_mpi.rank.shutdown import Shutdown, run_guarded

    def exchange(shutdown: Shutdown) -> None:
        world = shutdown.world
        others = [rank for rank in range(world.size) if rank != world.rank]
        for peer in others:
            world.polled.post(b"", peer, Tag.FILE)
        for peer in others:
            world.polled.collect(peer, Tag.FILE, 0, "meeting")
        world.finish()
        if world.is_root:
            print(f"{ANSWER}{json.dumps({'met': world.size})}", flush=True)

    return run_guarded(exchange)


def main() -> None:
    """Answer a question about this host; the time comes last, for who compares clocks."""
    question, *rest = sys.argv[1:]
    if question == "meet":
        sys.exit(meet())
    if question == "status":
        facts: dict[str, Any] = {"status": status_of(Path(rest[0]))}
    else:
        folder, device, games = rest
        facts = check_here(Path(folder), device, [name for name in games.split(",") if name])
    print(f"{ANSWER}{json.dumps(facts | {'clock': time()})}", flush=True)


if __name__ == "__main__":
    main()
