"""What is wrong with the hosts of a cluster, told by what each of them said, and what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SAME = {
    "python": "install the same Python (major.minor) everywhere",
    "canal-mpi": "install the same canal-mpi everywhere (the digest tells code that was changed)",
    "torch": "pip install the same torch everywhere; results differ in bits otherwise",
    "mpi": "install the same MPI everywhere; two different ones can't talk",
    "ale-py": "pip install the same ale-py everywhere",
}
CLOCK = 2.0  # seconds that clocks may differ: times in logs and files
SLOW = 1e6  # bytes a second under which lessons take longer than playing


@dataclass
class Report:
    """What is known of one host: what it said, or why it said nothing."""

    host: str
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)
    offset: float = 0.0  # seconds that its clock is ahead of ours
    silence: str = ""  # why there are no facts
    needs_disk: int = 0
    needs_memory: int = 0
    needs_cuda: bool = False


def findings(report: Report, here: Mapping[str, Any]) -> list[str]:
    """What is wrong with a host, each with its remedy; `here` is what this machine said."""
    if report.silence:
        return [report.silence]
    facts = report.facts
    found = [
        f"{name}: {facts[name]['trouble']}"
        for name in facts
        if isinstance(facts[name], dict) and name != "cuda"
    ]
    found += _versions(facts, here)
    found += _room(report)
    cuda = facts.get("cuda")
    if report.needs_cuda and cuda:
        why = cuda["trouble"] if isinstance(cuda, dict) else cuda
        found.append(f'CUDA can\'t be used ({why}): device = "cpu" or "auto" for this host')
    if abs(report.offset) > CLOCK:
        way = "ahead" if report.offset > 0 else "behind"
        words = f"its clock is {abs(report.offset):.0f} s {way}"
        found.append(f"{words}: sudo timedatectl set-ntp true, or chrony")
    return found


def _versions(facts: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    found = []
    for name, remedy in SAME.items():
        mine, theirs = here.get(name), facts.get(name)
        if isinstance(mine, str) and isinstance(theirs, str):
            a, b = (x.rpartition(".")[0] if name == "python" else x for x in (mine, theirs))
            if a != b:
                found.append(f"{name} is {theirs or 'missing'}, here it is {mine}: {remedy}")
    return found


def _room(report: Report) -> list[str]:
    found = []
    for name, needed, remedy in (
        ("disk", report.needs_disk, "free some, or name another folder with --out"),
        ("memory", report.needs_memory, "fewer ranks there, or a smaller replay.capacity"),
    ):
        free = report.facts.get(name)
        if isinstance(free, int) and free < needed:
            found.append(
                f"{size(free)} of {name} free, the job needs up to {size(needed)}: {remedy}"
            )
    return found


def slow_links(links: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    """Links that are slower than playing."""
    return [
        f"{a} to {b}: only {size(rate)}/s: use a cable instead of Wi-Fi, or --network for another"
        for (a, b), (_, rate) in links.items()
        if rate < SLOW
    ]


def size(number: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


VERSIONS = ("machine", "python", "canal-mpi", "torch", "mpi", "ale-py", "games")
COLUMNS = ("host", "ranks", *VERSIONS, "cuda", "cores", "memory", "disk", "clock")


def row(report: Report) -> list[str]:
    """A line of the table."""
    if report.silence:
        return [report.host, str(report.ranks), "silent"]
    words = {k: "?" if isinstance(v, dict) else str(v) for k, v in report.facts.items()}
    cuda = "yes" if words.get("cuda") == "" else "no"
    needs = {"memory": report.needs_memory, "disk": report.needs_disk}
    room = [
        f"{size(v)} (needs {size(need)})" if isinstance(v := report.facts.get(name), int) else "?"
        for name, need in needs.items()
    ]
    texts = [words.get(name, "?") or "none" for name in VERSIONS]
    clock = f"{report.offset:+.1f} s"
    return [report.host, str(report.ranks), *texts, cuda, words.get("cores", "?"), *room, clock]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    full = [(*row, *[""] * (len(COLUMNS) - len(row))) for row in (COLUMNS, *rows)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        " " + "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
        for row in full
    ]
