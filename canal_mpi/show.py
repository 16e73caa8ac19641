"""Runs as lines of text: the table of a run that goes on, and the list of runs.

The table is drawn from the facts of `status.json`, so that the run itself and `canal-mpi watch`
show the same. Facts may come from any file: what is not as expected is shown as a dash.
"""

import sys
from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from pathlib import Path
from time import sleep, time
from typing import Any

from canal_mpi.results.files import write_whole
from canal_mpi.results.prometheus import metrics
from canal_mpi.results.runs import Glance, checked_run, glance, number, whole

HEADER = " agent{host}  round  task         source    steps        steps/s   return    loss waits"
BARS = "▁▂▃▄▅▆▇█"
WHOLE_GAME = 3000  # evaluation steps that human scores may be compared with
EVERY = 1.0  # seconds between two looks


def progress_lines(facts: Mapping[str, Any], now: float) -> list[str]:
    """The table of a run: one line an agent, then what else is worth knowing."""
    found = facts.get("agents")
    agents = [a for a in found if isinstance(a, dict)] if isinstance(found, list) else []
    several = len({str(agent.get("host")) for agent in agents}) > 1
    lines = [HEADER.format(host="  host     " if several else "")]
    lines += [_row(agent, whole(facts.get("rounds")), several) for agent in agents]
    note, saved, left = clean(facts.get("note", "")), number(facts.get("saved")), facts.get("left")
    tail = [f"checkpoint {duration(max(now - saved, 0))} ago"] if isfinite(saved) else []
    tail.append(remaining(number(left)))
    lines += [f" {note}"] if note else []
    return [*lines, f" {' · '.join(tail)}"]


def remaining(seconds: float) -> str:
    """How long it will still take, in words."""
    return f"about {duration(seconds)} left" if isfinite(seconds) else "time left: not known yet"


def _row(agent: Mapping[str, Any], rounds: int, several: bool) -> str:
    host = f" {clean(agent.get('host')):<10.10}" if several else ""
    donor, peer = (whole(agent.get(name, -1)) for name in ("source", "waits_for"))
    phase, steps = clean(agent.get("phase")), (whole(agent.get(k)) for k in ("step", "steps"))
    what = "/".join(map(str, steps)) if phase == "training" else phase
    what = f"waits for {peer}" if peer >= 0 and phase != "training" else what
    source = f"agent {donor}" if donor >= 0 else "plays"
    rate = number(agent.get("steps_per_second"))
    return (
        f" {whole(agent.get('agent')):>4} {host}  {whole(agent.get('round')):>2}/{rounds:<3} "
        f"{clean(agent.get('task')):<12.12} {source:<9} {what:<12.12} "
        f"{0 if isnan(rate) else rate:>7.0f} {digits(number(agent.get('mean_return')), 1):>8} "
        f"{digits(number(agent.get('loss')), 4):>7} {_percent(agent.get('wait_share')):>5} "
        f"{spark(agent.get('returns'))}"
    ).rstrip()


def _percent(value: Any) -> str:
    share = number(value)
    return "–" if isnan(share) else f"{share:.0%}"


def spark(values: Any) -> str:
    """A few numbers as bars."""
    known = [number(v) for v in values] if isinstance(values, list) else []
    known = [value for value in known[-6:] if isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    size = (high - low) or 1.0
    return "".join(BARS[round((value - low) / size * (len(BARS) - 1))] for value in known)


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


def run_lines(runs: Sequence[Glance]) -> list[str]:
    """One line a run."""
    width = max([3, *(len(clean(run.folder.name)) for run in runs)])
    head = f"{'run':<{width}}  {'status':<10} {'agents':>6}  {'round':<7} "
    lines = [f"{head}{'task':<14} {'mean HNS':>8}  {'heard of':<16} resumable"]
    for run in runs:
        first = run.agents[0] if run.agents else {}
        cap = number(_inside(run.settings, "evaluation", "max_steps"))
        hns = number(run.facts.get("mean_hns")) if cap >= WHOLE_GAME else float("nan")
        rounds = f"{run.round}/{whole(run.facts.get('rounds'))}"
        heard = f"{duration(run.age)} ago" if isfinite(run.age) else "–"
        lines.append(
            f"{clean(run.folder.name):<{width}}  {clean(run.status):<10} {len(run.agents):>6}  "
            f"{rounds:<7} {clean(first.get('task')):<14.14} "
            f"{'–' if isnan(hns) else f'{hns:.1%}':>8}  {heard:<16} "
            f"{'yes' if run.resumable else 'no'}"
        )
    return lines


def _inside(settings: Mapping[str, Any], section: str, name: str) -> Any:
    part = settings.get(section)
    return part.get(name) if isinstance(part, dict) else None


def follow(path: Path, once: bool = False, prometheus: Path | None = None) -> None:
    """Show a run until it ends; also as metrics for Prometheus, where a file is named."""
    folder, drawn = checked_run(path), 0
    terminal = sys.stdout.isatty()
    while True:
        seen = glance(folder)
        if prometheus is not None:
            write_whole(prometheus, metrics(seen).encode())
        last = once or not seen.alive
        if terminal or last:
            lines = [*progress_lines(seen.facts, time()), _state(seen)]
            print(f"\x1b[{drawn}A\x1b[J" if drawn else "", end="")
            print("\n".join(lines), flush=True)
            drawn = len(lines)
        if last:
            return
        sleep(EVERY)


def _state(run: Glance) -> str:
    since = f"{duration(run.age)} ago" if isfinite(run.age) else "at an unknown time"
    if run.status == "died":
        words = f"died: no sign of life since {since}, in round {run.round}; finished rounds are in"
        return f" {run.folder.name} {words} {run.folder / 'run.h5'}"
    return f" {run.folder.name}: {clean(run.status)}, heard of {since}"
