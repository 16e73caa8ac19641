"""Hosts of a job: one short description, from which both MPIs' hostfiles are made.

A line is `nano-[1-4]  1`: a name, possibly with a range, and its number of ranks (default 1);
`env-server` gives the ranks to environments, and `speed=0.25` is the speed at which the host is
emulated. Lines of Open MPI (`nano-1 slots=2`) and MPICH (`nano-1:2`) are understood too.
"""

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from canal_mpi.errors import UsageError, suggestion

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
RANGE = re.compile(r"(.*)\[(\d{1,5})-(\d{1,5})\](.*)")
WORD = re.compile(r"(slots=)?(?P<ranks>\d{1,4})|env-server|speed=(?P<speed>\S+)|max[_-]slots=\d+")
MOST_RANKS = 4096  # on a host; also the most hosts
SLOWEST = 0.05  # speed factor
SHAPE = f"expected a name and 1 to {MOST_RANKS} ranks, as in `nano-1 2` or `nano-[1-4]`"


@dataclass(frozen=True)
class Host:
    """A host, how many ranks it gets, and whether they run environments only."""

    name: str
    ranks: int = 1
    is_env_server: bool = False
    speed: float = 1.0  # of an emulated host, against this machine


def read_hosts(path: Path | None) -> list[Host]:
    """The hosts of a description or of either MPI's hostfile, in the order of their ranks."""
    return parse_hosts(read_text(path), str(path)) if path else []


def read_text(path: Path) -> str:
    """The text of a hostfile; UsageError where it can't be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"hostfile {path} can't be read: {reason}.") from error


def parse_hosts(text: str, where: str) -> list[Host]:
    """Hosts from the text of a hostfile; UsageError names the line that is wrong."""
    found: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(":", " ", 1).split()
        if words:
            found += _parse_line(words, f"{where}, line {number}")
        if len(found) > MOST_RANKS:
            raise UsageError(f"{where} names more than the maximum of {MOST_RANKS} hosts.")
    names = [host.name for host in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}: host {twice[0]} is listed twice; give it one line.")
    if not found or found[0].is_env_server:
        raise UsageError(f"{where} names no host for the first agent; {SHAPE}.")
    serving = [host.is_env_server for host in found]
    if serving != sorted(serving):
        name = names[serving.index(True)]
        raise UsageError(f"{where}: hosts with env-server come last; move {name} down.")
    return found


def _parse_line(words: Sequence[str], where: str) -> list[Host]:
    name, *options = words
    ranks, speed = 0, 1.0
    for word in options:
        found = WORD.fullmatch(word)
        if not found or (found["ranks"] and (ranks or not 1 <= int(found["ranks"]) <= MOST_RANKS)):
            hint = suggestion(word, ["env-server", "slots=1", "speed=0.5"]) or ";"
            raise UsageError(f"{where}: '{word[:50]}' is not understood{hint} {SHAPE}.")
        ranks = int(found["ranks"] or ranks)
        speed = speed_of(found["speed"], where) if found["speed"] else speed
    serves = "env-server" in options
    return [Host(one, ranks or 1, serves, speed) for one in _expand(name, where)]


def speed_of(text: str, where: str) -> float:
    """A speed factor, above 0 and at most 1."""
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not SLOWEST <= speed <= 1:
        raise UsageError(f"{where}: speed {text}: expected a number from {SLOWEST} to 1.")
    return speed


def _expand(name: str, where: str) -> list[str]:
    """The names that a name with a range stands for."""
    names = [name]
    if found := RANGE.fullmatch(name):
        first, low, high, last = found.groups()
        numbers = range(int(low), int(high) + 1)
        names = [f"{first}{number:0{len(low)}d}{last}" for number in numbers]
    if not names or not NAME.fullmatch(names[0]):
        raise UsageError(f"{where}: '{name}' is not a host name; {SHAPE}.")
    return names


def is_here(name: str) -> bool:
    """Whether a name, or an address, is that of this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # works only with an address of this machine
            return True
    return False


def emulated(hosts: Sequence[Host]) -> tuple[str, ...]:
    """The setting `emulate`, by which each rank of one machine plays one of these hosts."""
    names = [f"{h.name}@{h.speed:g}" if h.speed < 1 else h.name for h in hosts]
    return tuple(name for name, h in zip(names, hosts, strict=True) for _ in range(h.ranks))


def convert(text: str, where: str, kind: str) -> str:
    """A description as a hostfile of Open MPI or MPICH; the comment at its top is kept."""
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    line = "{} slots={}" if kind == "openmpi" else "{}:{}"
    hosts = (line.format(host.name, host.ranks) for host in parse_hosts(text, where))
    return "".join(f"{words}\n" for words in (*comment, *hosts))


def total(hosts: Sequence[Host], serving: bool = False) -> int:
    """Ranks on all hosts, or on those that run environments only."""
    return sum(host.ranks for host in hosts if host.is_env_server or not serving)
