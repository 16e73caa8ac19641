"""Hosts of a job: one short description, from which both MPIs' hostfiles are made.

A line is `nano-[1-4]  1`: a name, perhaps with a range, and how many ranks it gets (1 if nothing is
said); `env-server` behind it gives its ranks to environments, and `speed=0.25` is how fast it is
played where the host is emulated. Lines of Open MPI (`nano-1 slots=2`) and MPICH (`nano-1:2`) are
understood too.
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canal_mpi import pick
from canal_mpi.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
RANGE = re.compile(r"(.*)\[(\d{1,5})-(\d{1,5})\](.*)")
MOST_RANKS, MOST_HOSTS = 4096, 4096
DIGITS = 10  # fewer than that has a number
SLOWEST = 0.05  # speed factor: below it, stops would be too long for heartbeats
SHAPE = "expected a name and a number of ranks, as in `nano-1 2` or `nano-[1-4]`"


@dataclass(frozen=True)
class Host:
    """A host, how many ranks it gets, and whether they run environments only."""

    name: str
    ranks: int = 1
    serves: bool = False
    speed: float = 1.0  # of an emulated host, against this machine


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a description or of either MPI's hostfile, in the order of their ranks."""
    return parse_hosts(read_text(path), str(path))


def read_text(path: Path) -> str:
    """What is in a hostfile."""
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
            found += _line(words, f"{where}, line {number}")
        if len(found) > MOST_HOSTS:
            raise UsageError(f"{where} names more than the {MOST_HOSTS} hosts that are possible.")
    if not found:
        raise UsageError(f"{where} names no host; {SHAPE}.")
    names = [host.name for host in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(
            f"{where}: host {twice[0]} is there twice; give it one line with a number."
        )
    first = next((k for k, host in enumerate(found) if host.serves), len(found))
    if not all(host.serves for host in found[first:]):
        raise UsageError(f"{where}: hosts with env-server come last; move {names[first]} down.")
    if first == 0:
        raise UsageError(f"{where}: every host is an env-server; no agent would be left.")
    return found


def _line(words: Sequence[str], where: str) -> list[Host]:
    name, colon, number = words[0].partition(":")
    given = [number] if colon else []
    serves, speed = False, 1.0
    for word in words[1:]:
        if word.isdecimal() or word.startswith("slots="):
            given.append(word.removeprefix("slots="))
        elif word == "env-server":
            serves = True
        elif word.startswith("speed="):
            speed = speed_of(word.removeprefix("speed="), where)
        elif not word.startswith(("max_slots=", "max-slots=")):
            hint = pick.suggestion(word, ["env-server", "slots=1", "speed=0.5"]) or ";"
            raise UsageError(f"{where}: '{word}' is not understood{hint} {SHAPE}.")
    fit = (g.isdecimal() and len(g) < DIGITS and 1 <= int(g) <= MOST_RANKS for g in given)
    if len(given) > 1 or not all(fit):
        raise UsageError(f"{where}: '{' '.join(words)}': {SHAPE}, 1 to {MOST_RANKS} ranks a host.")
    ranks = int(given[0]) if given else 1
    return [Host(one, ranks, serves, speed) for one in _names(name, where)]


def speed_of(text: str, where: str) -> float:
    """A speed factor, above 0 and at most 1."""
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not SLOWEST <= speed <= 1:
        raise UsageError(f"{where}: speed {text}: expected a number from {SLOWEST} to 1.")
    return speed


def _names(name: str, where: str) -> list[str]:
    found = RANGE.fullmatch(name)
    if found:
        low, high = int(found[2]), int(found[3])
        if not low <= high < low + MOST_HOSTS:
            raise UsageError(f"{where}: '{name}': the range must go up, as in nano-[1-4].")
        names = [f"{found[1]}{k:0{len(found[2])}d}{found[4]}" for k in range(low, high + 1)]
    else:
        names = [name]
    if not NAME.fullmatch(names[0]):
        raise UsageError(f"{where}: '{name}' is no name of a host; {SHAPE}.")
    return names


def is_here(name: str) -> bool:
    """Whether a name, or an address, is that of this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_ours(family, address) for family, _, _, _, address in found)


def _is_ours(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # works with an address of our own only
        return True
    except OSError:
        return False


def render(hosts: Sequence[Host], kind: str) -> str:
    """The hosts as a hostfile of Open MPI or MPICH."""
    form = "{} slots={}" if kind == "openmpi" else "{}:{}"
    return "".join(form.format(host.name, host.ranks) + "\n" for host in hosts)


def convert(text: str, where: str, kind: str) -> str:
    """A description as a hostfile of one MPI; the comment at its top is kept."""
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line + "\n")
    return "".join(comment) + render(parse_hosts(text, where), kind)


def total(hosts: Sequence[Host], serving: bool = False) -> int:
    """Ranks on all hosts, or on those that run environments only."""
    return sum(host.ranks for host in hosts if host.serves or not serving)
