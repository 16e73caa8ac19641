"""The state of a run as Prometheus text, for the textfile collector of node_exporter."""

from math import isfinite
from typing import Any

from canal_mpi.results.runs import Glance, number

GAUGES = {
    "round": ("canal_mpi_round", "Round that the agent is in."),
    "total_steps": ("canal_mpi_steps", "Turns of the training loop so far."),
    "steps_per_second": ("canal_mpi_steps_per_second", "Turns of the training loop a second."),
    "mean_return": ("canal_mpi_return", "Mean return of the last episodes."),
    "loss": ("canal_mpi_loss", "Loss of the newest update."),
    "wait_share": ("canal_mpi_wait_share", "Part of the time spent waiting for others."),
}


def metrics(run: Glance) -> str:
    """Everything that status.json tells, as gauges."""
    name = run.folder.resolve().name
    lines = [
        "# HELP canal_mpi_up Whether the run is alive.",
        "# TYPE canal_mpi_up gauge",
        f"canal_mpi_up{_labels(run=name, status=run.status)} {int(run.alive)}",
    ]
    for key, (metric, about) in GAUGES.items():
        values = [(agent, number(agent.get(key))) for agent in run.agents]
        rows = [
            f"{metric}{_labels(run=name, agent=agent.get('agent'))} {value!r}"
            for agent, value in values
            if isfinite(value)
        ]
        lines += [f"# HELP {metric} {about}", f"# TYPE {metric} gauge", *rows] if rows else []
    return "\n".join(lines) + "\n"


def _labels(**labels: Any) -> str:
    pairs = [f'{key}="{_escaped(str(value)[:200])}"' for key, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
