"""How far a run is, for people: the numbers of `status.json`, its table, and `events.jsonl`.

Nothing in these files is trusted: they may be torn, or not ours. numpy and h5py are not loaded.
"""

import json
from collections.abc import Iterator, Mapping
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

EVENTS = 1 << 26  # bytes that events.jsonl may have
HEADER = " agent{host}  round  task         source    steps        steps/s   return    loss waits"
BARS = "▁▂▃▄▅▆▇█"


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of events.jsonl that can be read."""
    path = folder / "events.jsonl"
    if not path.is_file() or path.stat().st_size > EVENTS:
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a line that was torn by a crash
            if isinstance(found, dict):
                yield found


def agents_of(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each agent was doing last."""
    found = facts.get("agents")
    return [a for a in found if isinstance(a, dict)] if isinstance(found, list) else []


def progress_lines(facts: Mapping[str, Any], now: float) -> list[str]:
    """The table of a run: one line per agent, then what else is worth knowing."""
    agents = agents_of(facts)
    several = len({str(agent.get("host")) for agent in agents}) > 1
    lines = [HEADER.format(host="  host     " if several else "")]
    lines += [_row(agent, whole(facts.get("rounds")), several) for agent in agents]
    note, saved = clean(facts.get("note", "")), number(facts.get("saved"))
    lines += [f" {note}"] if note else []
    ago = f"checkpoint {duration(max(now - saved, 0))} ago · " if isfinite(saved) else ""
    return [*lines, f" {ago}{remaining(number(facts.get('left')))}"]


def _row(agent: Mapping[str, Any], rounds: int, several: bool) -> str:
    host = f" {clean(agent.get('host')):<10.10}" if several else ""
    donor, peer = (whole(agent.get(name, -1)) for name in ("source", "waits_for"))
    what = clean(agent.get("phase"))
    if what == "training":
        what = f"{whole(agent.get('step'))}/{whole(agent.get('steps'))}"
    elif peer >= 0:
        what = f"waits for {peer}"
    source = f"agent {donor}" if donor >= 0 else "plays"
    rate, share = number(agent.get("steps_per_second")), number(agent.get("wait_share"))
    return (
        f" {whole(agent.get('agent')):>4} {host}  {whole(agent.get('round')):>2}/{rounds:<3} "
        f"{clean(agent.get('task')):<12.12} {source:<9} {what:<12.12} "
        f"{0 if isnan(rate) else rate:>7.0f} {digits(number(agent.get('mean_return')), 1):>8} "
        f"{digits(number(agent.get('loss')), 4):>7} {'–' if isnan(share) else f'{share:.0%}':>5} "
        f"{spark(agent.get('returns'))}"
    ).rstrip()


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


def spark(values: Any) -> str:
    """A few numbers as bars."""
    known = [number(v) for v in values] if isinstance(values, list) else []
    known = [value for value in known[-6:] if isfinite(value)]
    if len(known) < 2:
        return ""
    low, size = min(known), (max(known) - min(known)) or 1.0
    return "".join(BARS[round((value - low) / size * (len(BARS) - 1))] for value in known)
