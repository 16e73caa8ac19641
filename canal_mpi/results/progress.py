"""How far a run is, for people: the numbers of `status.json`, its table, and `events.jsonl`.

Nothing in these files is trusted: they may be torn, or not ours. numpy and h5py are not loaded.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

EVENTS = 1 << 26  # bytes that events.jsonl may have
SMALL = 1 << 22  # bytes that one of its lines, status.json and the like may have
WORDS = {"", "run", "status", "host", "task", "source", "steps", "heard of", "resumable"}
WORDS |= {"learnt by", "taught to"}  # columns that begin aligned


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of events.jsonl that can be read."""
    path = folder / "events.jsonl"
    if not path.is_file() or path.stat().st_size > EVENTS:
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line[:SMALL])
            except (ValueError, RecursionError):
                continue  # a line that was torn by a crash
            if isinstance(found, dict):
                yield found


def agents_of(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each agent was doing last."""
    found = facts.get("agents")
    return [a for a in found if isinstance(a, dict)] if isinstance(found, list) else []


def sittings(folder: Path) -> tuple[float, float]:
    """When a run first started (NaN: never), and how many seconds it has been running since."""
    first = begun = last = nan
    total = 0.0
    for event in events(folder):
        when = number(event.get("time"))
        if event.get("event") in ("start", "resume"):
            when = number(event.get("began", when))
            total += last - begun if isfinite(begun) else 0.0
            first, begun = when if isnan(first) else first, when
        last = when
    return first, total + (last - begun if isfinite(begun) else 0.0)


def progress_lines(facts: Mapping[str, Any], now: float) -> list[str]:
    """The table of a run: one line per agent, then what else is worth knowing."""
    agents = agents_of(facts)
    cells = [_cells(agent, whole(facts.get("rounds"))) for agent in agents]
    names = list(_cells({}, 0))
    if len({row["host"] for row in cells}) < 2:
        names.remove("host")
    lines = table([names, *([row[name] for name in names] for row in cells)])
    note, saved, done = (facts.get(name) for name in ("note", "saved", "done"))
    lines += [f" {clean(note)}"] if note else []
    parts = [f"{100 * number(done):.0f} % done"] if number(done) >= 0 else []
    if isfinite(number(saved)):
        parts.append(f"checkpoint {duration(max(now - number(saved), 0))} ago")
    if not number(done) >= 1:
        parts.append(remaining(number(facts.get("left"))))
    return [*lines, f" {' · '.join(parts)}"]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns; the first row has their names, columns of numbers end aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if name in WORDS else ">" for name in rows[0]]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return [f" {'  '.join(map(format, row, forms))}".rstrip() for row in rows]


def _cells(agent: Mapping[str, Any], rounds: int) -> dict[str, str]:
    """The line of an agent, column by column."""
    donor, peer = (whole(agent.get(name, -1)) for name in ("source", "waits_for"))
    what = clean(agent.get("phase"))
    if what == "training":
        what = f"{whole(agent.get('step'))}/{whole(agent.get('steps'))}"
    elif peer >= 0:
        what = f"waits for {peer}"
    rate, share = number(agent.get("steps_per_second")), number(agent.get("wait_share"))
    return {
        "agent": str(whole(agent.get("agent"))),
        "host": clean(agent.get("host")),
        "round": f"{whole(agent.get('round'))}/{rounds}",
        "task": clean(agent.get("task")),
        "source": f"agent {donor}" if donor >= 0 else "plays",
        "steps": what,
        "steps/s": f"{0 if isnan(rate) else rate:.0f}",
        "return": digits(number(agent.get("mean_return")), 1),
        "loss": digits(number(agent.get("loss")), 4),
        "waits": "–" if isnan(share) else f"{share:.0%}",
    }


def coloured(lines: Sequence[str], width: int, done: float = nan, wrap: bool = False) -> str:
    """Lines as a terminal of that width shows them; in front of the last one a bar, if any.

    What is too long is cut, or goes on in the next line where it may `wrap`: commands, which
    stand far in, wherever the line ends, so that they can be copied; other lines between words.
    """
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console(width=width, force_terminal=True, color_system="standard", emoji=False)
    with console.capture() as shown:
        for line in lines if isnan(done) else lines[:-1]:
            command = wrap and line.startswith("   ")
            console.print(line, markup=False, no_wrap=not wrap, soft_wrap=command, crop=not wrap)
        if not isnan(done):
            console.print(ProgressBar(1.0, done, width=24))
            console.print(lines[-1][: max(width - 24, 0)], markup=False, highlight=False)
    return shown.get().rstrip("\n")


def number(value: Any) -> float:
    """A number of a JSON file; NaN for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and abs(value) < 1e300 else nan


def whole(value: Any) -> int:
    """A whole number of a JSON file; 0 for anything else."""
    found = number(value)
    return int(found) if isfinite(found) else 0


def clean(value: Any) -> str:
    """A text of a file, without anything that a terminal would obey."""
    return "".join(c for c in str(value)[:200] if c.isprintable()) if value is not None else ""


def digits(value: float, places: int) -> str:
    """A number with so many places, or a dash."""
    return "–" if isnan(value) else f"{value:.{places}f}"


def duration(seconds: float) -> str:
    """A time as people say it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def remaining(seconds: float) -> str:
    """How long it will still take, in words."""
    return f"about {duration(seconds)} left" if isfinite(seconds) else "time left: not known yet"


def short_path(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
