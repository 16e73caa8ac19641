"""The whole page, from the answers at the top to the command that repeats the run."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape

import numpy as np

from canal_mpi import __version__
from canal_mpi.report import costs, figures, parts, versus
from canal_mpi.report.answers import answers
from canal_mpi.report.figures import Figure
from canal_mpi.report.style import SCRIPT, sheet
from canal_mpi.report.svg import colour, number
from canal_mpi.report.tables import (
    comparison_rows,
    exchange_rows,
    fault_rows,
    measure_rows,
    task_rows,
)
from canal_mpi.results.compare import Comparison
from canal_mpi.results.reading import Run
from canal_mpi.results.summary import WHOLE_GAME, Measured


def page(comparison: Comparison) -> str:
    """The report as one HTML text."""
    runs = [measured for group in comparison.groups for measured in group.runs]
    many = len(runs) > 1
    title = "Comparison of " + ", ".join(r.run.name for r in runs) if many else runs[0].run.name
    body = [f"<h1>{escape(title)}</h1>", _subtitle(comparison), _notes(runs), answers(comparison)]
    if len(comparison.groups) > 1:
        body.append(compared(comparison))
    for k, measured in enumerate(runs):
        inside = _run(measured, f"run{k}-" if many else "")
        body.append(parts.folded(f"Run {measured.run.name}", inside, k == 0) if many else inside)
    return document(title, "".join(body))


def document(title: str, body: str) -> str:
    """A page of its own, with style and script inside."""
    digest = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)} · canal-mpi</title>'
        f"<style>{sheet()}</style></head><body><main>{body}"
        f'<p class="quiet">Made by canal-mpi {__version__}.</p></main>'
        f"<script>{SCRIPT}</script></body></html>"
    )


def _subtitle(comparison: Comparison) -> str:
    run = comparison.groups[0].runs[0].run
    facts = [
        f"job {run.setting('name', '?')}",
        f"{len(run.tasks)} tasks × {number(float(run.setting('train.frames', 0)))} steps",
        f"scores: {comparison.scale.name}",
    ]
    about = f"Scores are normalised by task: {comparison.scale.about}."
    return f'<p class="sub">{parts.chips(facts)}</p><p class="quiet">{escape(about)}</p>'


def _notes(runs: Sequence[Measured]) -> str:
    told: dict[str, list[str]] = {}
    for measured in runs:
        for words in missing(measured):
            told.setdefault(words, []).append(measured.run.name)
    return "".join(parts.note(f"{', '.join(names)}: {words}") for words, names in told.items())


def missing(measured: Measured) -> list[str]:
    """What a reader should know before reading on."""
    run, found = measured.run, list(measured.run.notes)
    if run.status != "finished":
        done = f"{measured.rounds_done} of {run.rounds} rounds are in the file"
        found.append(f"The run is not finished (status {run.status or 'unknown'}): {done}.")
    if not run.score.size or np.isnan(run.score).all():
        found.append("There are no evaluations: scores, forgetting and transfer can't be told.")
    elif not measured.whole and measured.rounds_done:
        which = run.setting("evaluation.tasks", "current")
        found.append(
            f"Agents were evaluated on '{which}' tasks only; forgetting, transfer and time "
            "advantage need --set evaluation.tasks=all."
        )
    if words := emulation(run):
        found.append(f"{words}: times are those of the emulation.")
    cap = int(run.setting("evaluation.max_steps", WHOLE_GAME))
    if cap < WHOLE_GAME:
        found.append(
            f"Evaluation episodes were cut after {cap} steps: scores are not those of whole games."
        )
    return found


def emulation(run: Run) -> str:
    """Which devices were only played, in a few words; empty where none was."""
    agents = run["agents"]
    slow = agents["speed"] < 1  # NaN in older files: not known to be slow
    pairs = zip(agents["host"][slow], agents["speed"][slow], strict=True)
    names = ", ".join(f"{host} at {speed:g} of full speed" for host, speed in pairs)
    if run.setting("emulate"):
        return "Hosts were emulated on one machine" + (f" ({names})" if names else "")
    return f"Slower devices were emulated ({names})" if names else ""


def compared(comparison: Comparison) -> str:
    """All groups side by side: figures, measures, learning curves."""
    groups = comparison.groups
    key = parts.key((group.label, colour(k)) for k, group in enumerate(groups))
    shown = [versus.progress(comparison)]
    shown += [versus.advantage(comparison)] if comparison.baseline is not None else []
    head = ["measure", *(group.label for group in groups)]
    caption = "Measures of each group; the better value is bold. Click a head to sort."
    return "".join(
        [
            "<h2>Side by side</h2>",
            key,
            parts.row(shown, cls="two"),
            parts.table(caption, head, comparison_rows(comparison), "compared"),
            "<h2>Learning curves, side by side</h2>",
            '<p class="quiet">Means over agents with 95 % bands; evaluations only.</p>',
            key,
            parts.row(versus.task_scores(comparison)),
        ]
    )


def run_figures(measured: Measured) -> dict[str, list[Figure]]:
    """Every figure of one run, by section."""
    run = measured.run
    found = {
        "What ran": [figures.timeline(run), figures.topology(run), figures.flow(run)],
        "Learning curves": figures.curves(measured),
        "Costs": [costs.time_bars(run), costs.edges(run)],
    }
    if np.isfinite(measured.P).any():
        found["Evaluations"] = figures.heat_maps(measured)
    if measured.rounds_done > 1 and not np.isnan(measured.P[:, -1]).all():
        found["Forgetting and transfer"] = [
            figures.forgetting(measured),
            figures.isolated(measured),
        ]
    return found


def _run(measured: Measured, prefix: str) -> str:
    run, shown = measured.run, run_figures(measured)
    agents = parts.key((f"agent {a}", colour(k)) for k, a in enumerate(run.agents))
    wide, *beside = shown["What ran"]
    body = ["<h2>What ran</h2>", _what_ran(run), agents, parts.figure(wide, prefix)]
    body.append(f'<div style="height:12px"></div>{parts.row(beside, prefix, "two")}')
    body.append("<h2>Learning curves</h2>")
    words = "Thin: training episodes. Dots: evaluations. A diamond: learnt from a lesson."
    body += [f'<p class="quiet">{words}</p>', agents, parts.row(shown["Learning curves"], prefix)]
    if "Evaluations" in shown:
        words = "Normalised score on every task after every round; framed where it was learnt."
        body += ["<h2>Evaluations</h2>", f'<p class="quiet">{words}</p>']
        body.append(parts.row(shown["Evaluations"], prefix))
    if "Forgetting and transfer" in shown:
        body.append("<h2>Forgetting and transfer</h2>")
        body.append(parts.row(shown["Forgetting and transfer"], prefix, "two"))
    body += ["<h2>Time and bytes</h2>", parts.key(costs.key())]
    body.append(parts.row(shown["Costs"], prefix, "two"))
    return "".join([*body, _tables(measured, prefix), _repeat(run)])


def _what_ran(run: Run) -> str:
    hosts = sorted({str(host) for host in run["agents"]["host"]})
    facts = [
        f"status {run.status}",
        f"{len(run.agents)} agent{'s' * (len(run.agents) != 1)}",
        f"{len(hosts)} host{'s' * (len(hosts) != 1)}: {', '.join(hosts)[:200]}",
        f"share {run.setting('share.policy', '?')} over {run.setting('share.topology', '?')}",
        f"reuse {run.setting('reuse.mode', '?')}",
        f"seed {run.attributes.get('seed')}",
        f"started {run.attributes.get('started')}",
    ]
    return f"<p>{parts.chips(facts)}</p>"


def _tables(measured: Measured, prefix: str) -> str:
    run = measured.run
    head = ["agent", "round", "task", "source", "own steps", "score", "normalised", "seconds"]
    ledger = ["round", "kind", "donor", "to", "task", "rows", "MB", "before", "after", "reason"]
    tables = [
        "<h2>Measures</h2>",
        parts.table(
            "Means over what each measure is told for, with the meaning of each.",
            ["measure", "value", "low", "high", "meaning"],
            measure_rows(measured),
            f"{prefix}measures",
        ),
        "<h2>Tables</h2>",
        parts.table("Tasks as they were learnt", head, task_rows(measured), f"{prefix}tasks"),
        parts.folded(
            "Lessons, swaps, refusals and drops",
            parts.table("The ledger without offers", ledger, exchange_rows(run)),
        ),
        "<h2>Faults and resumes</h2>",
        parts.table("What did not go as planned", ["when", "what", "details"], fault_rows(run)),
    ]
    return "".join(tables)


def _repeat(run: Run) -> str:
    start = f"mpirun -np {len(run.agents)} " if len(run.agents) > 1 else ""
    alone = f" --agent {run.agents[0]}" if run.agents != list(range(len(run.agents))) else ""
    command = f"{start}canal-mpi train --job {run.folder}/job.toml{alone}"
    versions = "\n".join(f"{name} {version}" for name, version in sorted(run.versions.items()))
    job = str(run.attributes.get("job", ""))
    return (
        f"<h2>Repeat it</h2>{parts.code(command)}"
        f"{parts.folded('Versions', parts.code(versions))}{parts.folded('Job', parts.code(job))}"
    )
