"""`canal-mpi study`: does sharing pay? Loads no torch and no MPI."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from canal_mpi.commands.points import (
    folder_options,
    is_there,
    known_points,
    list_points,
    report_points,
    run_points,
    words_of,
)

if TYPE_CHECKING:
    from canal_mpi.sweep.grid import Point

STUDIED = ("policy", "reuse", "topology")  # options of a job that the arms choose
GRID = ("arms", "seeds", "other_seeds", "agents", "topologies", "out")


@click.command()
@click.option(
    "--arms",
    metavar="LIST",
    help="Ways to share: none, replay, mix, distill, all, adopt; default: all of them.",
)
@click.option("--seeds", metavar="N|LIST", help="How many seeds, or which; default 3.")
@click.option(
    "--other-seeds",
    type=click.IntRange(0),
    metavar="N",
    help="Seeds of arms other than none and distill; default: as many.",
)
@click.option(
    "--agents", metavar="LIST", help="Agents of all arms, then other numbers to try; default 5."
)
@click.option(
    "--topologies", metavar="LIST", help="That of all arms, then others to try; default full."
)
@folder_options("study")
@click.pass_context
def study(ctx: click.Context, /, **options: Any) -> None:
    """Find out whether sharing pays: every way to share, on the same seeds and orders.

    Each arm with each seed is an ordinary run in DIR; besides, single-task experts and random play
    give the scale. Ctrl-C saves and stops; the same command again (or --resume DIR) goes on. At
    the end DIR/summary.md and DIR/report.html compare the arms, and DIR/study.h5 has the numbers.

    \b
    canal-mpi study --dry-run
    canal-mpi study --arms none,distill --frames 20000 --seeds 3
    canal-mpi study --arms none,distill --agents 5,2,3 --topologies full,ring
    """
    from canal_mpi.study import write
    from canal_mpi.sweep.folder import save

    folder, points = known_points(options, GRID, "study")
    if not points:
        points = _points(options)
        folder = (options["out"] or Path("runs", f"study-{points[0].job.name}")).absolute()
        if is_there(folder, "study"):
            points = _with_others(folder, points)
    if options["report"]:
        return report_points(folder, points, write.collect)
    if options["dry_run"]:
        return list_points(folder, points, options)
    if options["resume"] is None:
        save(folder, points)
    ctx.exit(run_points("study", folder, points, options, lambda: write.collect(folder, points)))


def _points(options: dict[str, Any]) -> "list[Point]":
    """Every run of the study that was asked for."""
    from canal_mpi.cli import flags_of
    from canal_mpi.config import resolve
    from canal_mpi.study import arms
    from canal_mpi.sweep import grid

    flags, job_file = flags_of(options), options["job_file"]
    seeds = grid.seeds(options["seeds"] or "3", resolve(flags, job_file).seed)
    others = options["other_seeds"]
    return arms.points_of_study(
        words_of(options["arms"]) or list(arms.ARMS),
        seeds,
        len(seeds.choices) if others is None else others,
        arms.numbers("5" if options["agents"] is None else options["agents"]),
        words_of(options["topologies"]) or ["full"],
        flags,
        job_file,
    )


def _with_others(folder: Path, points: "list[Point]") -> "list[Point]":
    """Also the runs that an earlier study of this folder has: they count as well."""
    from canal_mpi.study.arms import check_alike
    from canal_mpi.sweep.folder import load_points

    names = {point.name for point in points}
    points = [*points, *(point for point in load_points(folder) if point.name not in names)]
    check_alike(points)
    return points
