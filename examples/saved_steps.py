"""A measure of one's own, from the files of a run: what part of the steps did lessons save?

python saved_steps.py runs/a
"""

import sys

import canal_mpi
from canal_mpi.results.reader import Run


def saved_steps(run: Run) -> dict[int, float]:
    """For each agent: 1 - (its own steps) / (steps without any lesson)."""
    tasks = run.frame("tasks")  # pandas; run["tasks"] has the same columns as NumPy arrays
    own = tasks.groupby("agent")[["env_steps", "probe_steps"]].sum().sum(axis=1)
    alone = tasks.groupby("agent").size() * run.setting("train.steps")
    return {int(agent): float(part) for agent, part in (1 - own / alone).items()}


if __name__ == "__main__":
    for agent, part in saved_steps(canal_mpi.load(sys.argv[1])).items():
        print(f"agent {agent}: {part:.0%} of its steps saved")
