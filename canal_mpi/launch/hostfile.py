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
MOST_RANKS, MOST_HOSTS = 4096, 4096
DIGITS = 10  # fewer than that has a number
SLOWEST = 0.05  # speed factor
SHAPE = "expected a name and a number of ranks, as in `nano-1 2` or `nano-[1-4]`"


@dataclass(frozen=True)
class Host:
    """A host, how many ranks it gets, and whether they run environments only."""

    name: str
    ranks: int = 1
    is_env_server: bool = False
    speed: float = 1.0  # of an emulated host, against this machine


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a description or of either MPI's hostfile, in the order of their ranks."""
    return parse_hosts(read_text(path), str(path))


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
        words = line.partition("#")[0].split()
        if words:
            found += _parse_line(words, f"{where}, line {number}")
        if len(found) > MOST_HOSTS:
            raise UsageError(f"{where} names more than the maximum of {MOST_HOSTS} hosts.")
    if not found:
        raise UsageError(f"{where} names no host; {SHAPE}.")
    names = [host.name for host in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"{where}: host {twice[0]} is listed twice; give it one line.")
    first = next((k for k, host in enumerate(found) if host.is_env_server), len(found))
    if not all(host.is_env_server for host in found[first:]):
        raise UsageError(f"{where}: hosts with env-server come last; move {names[first]} down.")
    if first == 0:
        raise UsageError(f"{where}: every host is an env-server; no agent would be left.")
    return found


def _parse_line(words: Sequence[str], where: str) -> list[Host]:
    name, colon, number = words[0].partition(":")
    given = [number] if colon else []
    is_env_server, speed = False, 1.0
    for word in words[1:]:
        if word.isdecimal() or word.startswith("slots="):
            given.append(word.removeprefix("slots="))
        elif word == "env-server":
            is_env_server = True
        elif word.startswith("speed="):
            speed = speed_of(word.removeprefix("speed="), where)
        elif not word.startswith(("max_slots=", "max-slots=")):
            hint = suggestion(word, ["env-server", "slots=1", "speed=0.5"]) or ";"
            raise UsageError(f"{where}: '{word}' is not understood{hint} {SHAPE}.")
    fit = (g.isdecimal() and len(g) < DIGITS and 1 <= int(g) <= MOST_RANKS for g in given)
    if len(given) > 1 or not all(fit):
        raise UsageError(
            f"{where}: '{' '.join(words)}': {SHAPE}, 1 to {MOST_RANKS} ranks per host."
        )
    ranks = int(given[0]) if given else 1
    return [Host(one, ranks, is_env_server, speed) for one in _expand(name, where)]


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
    found = RANGE.fullmatch(name)
    if found:
        low, high = int(found[2]), int(found[3])
        if not low <= high < low + MOST_HOSTS:
            raise UsageError(f"{where}: '{name}': the range must go up, as in nano-[1-4].")
        names = [f"{found[1]}{k:0{len(found[2])}d}{found[4]}" for k in range(low, high + 1)]
    else:
        names = [name]
    if not NAME.fullmatch(names[0]):
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
