"""`canal-mpi evaluate`: scores of any checkpoint, alone or under mpirun."""

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--agent", "agents", multiple=True, type=int, help="Only this agent; may be repeated."
)
@click.option("--task", "tasks", multiple=True, help="Only this task, or all (default).")
@click.option("--episodes", type=click.IntRange(1), default=20, help="Episodes of each pair.")
@click.option(
    "--max-steps", type=click.IntRange(1), help="Steps of an episode; default: the job's."
)
@click.option("--video", is_flag=True, help="Film the first episode of each pair (extra: video).")
@click.option("--save-steps", is_flag=True, help="Also save every action, reward and state.")
@click.option("--trust", is_flag=True, help="Import modules that the run's job names.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where files go; default: evaluations/ in the run.",
)
@click.pass_context
def evaluate(ctx: click.Context, /, **options: Any) -> None:
    """Let the agents of RUN play again, as their newest checkpoints have them.

    Under mpirun the pairs of agent and task are spread over the ranks; the scores are the same on
    any number of them. They are written as HDF5, and printed as a table.
    """
    from canal_mpi.rank.evaluate import Wish, evaluate

    ctx.exit(evaluate(Wish(**options)))
