"""`canal-mpi sweep`: a grid of runs, one report at the end. Loads no torch and no MPI."""

from collections.abc import Sequence
from dataclasses import replace
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
from canal_mpi.errors import UsageError

if TYPE_CHECKING:
    from canal_mpi.sweep.grid import Axis, Point

GRID = ("ranks", "hostfiles", "emulate", "topologies", "policies", "seeds", "vary", "out")
HOSTS = ("network", "shared_disk")


@click.command()
@click.option("--seeds", metavar="N|LIST", help="How many seeds, or which: 3, or 4,7,9.")
@click.option("--topologies", metavar="LIST", help="Topologies, as in full,ring.")
@click.option("--policies", metavar="LIST", help="Sharing policies, as in none,exact.")
@click.option("-n", "ranks", metavar="LIST", help="Numbers of agents, as in 2,5; default 5.")
@click.option(
    "--vary",
    multiple=True,
    metavar="KEY=LIST",
    help="Values of any setting, as in learn.lr=0.001,0.0005; may be repeated.",
)
@click.option(
    "--hostfiles",
    multiple=True,
    metavar="GLOB",
    help="Mixes of hosts, one a file, as in 'hostfiles/*.hosts'; may be repeated.",
)
@click.option("--emulate", is_flag=True, help="Play those hosts on this machine, slow ones slowly.")
@click.option(
    "--network",
    metavar="NET",
    help="How hosts reach each other: a subnet (10.0.0.0/24) or an interface (eth0).",
)
@click.option("--shared-disk", is_flag=True, help="--out is on a disk that those hosts share.")
@folder_options("sweep")
@click.option(
    "--slurm",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Don't run it: write FILE, an array of Slurm jobs.",
)
@click.option("--point", type=int, metavar="K", help="Only point K, counted from 0 (array jobs).")
@click.pass_context
def sweep(ctx: click.Context, /, **options: Any) -> None:
    """Run a job over a grid: seeds, topologies, policies, mixes of hosts, any setting.

    Each point is an ordinary run in DIR, named after its settings. The same command again (or
    --resume DIR) leaves finished points alone, goes on with stopped ones and repeats broken ones.
    At the end DIR/report.html compares all runs and DIR/sweep.h5 has a row for each. Ctrl-C saves
    and stops.

    \b
    canal-mpi sweep --job quick --policies none,exact --seeds 3
    canal-mpi sweep --job quick --hostfiles 'hostfiles/*.hosts' --emulate --seeds 3
    """
    from canal_mpi.sweep import collect
    from canal_mpi.sweep.folder import save

    folder, points = known_points(options, (*GRID, *HOSTS), "sweep")
    if not points:
        points = _points(options)
        folder = (options["out"] or Path("runs", f"sweep-{points[0].job.name}")).absolute()
        if is_there(folder, "sweep"):
            _tell_of_others(folder, points)
        if not options["dry_run"]:
            save(folder, points)
    if options["dry_run"]:
        return list_points(folder, points, options)
    if options["report"]:
        return report_points(folder, points, collect.collect)
    if options["slurm"] is not None:
        return _write_script(options["slurm"], folder, points)
    ctx.exit(_run(folder, points, options))


def _tell_of_others(folder: Path, points: "list[Point]") -> None:
    """What an earlier sweep of this folder has besides is left there, and no part of this one."""
    from canal_mpi.sweep.folder import load_points

    names = {point.name for point in points}
    others = [point.name for point in load_points(folder) if point.name not in names]
    if others:
        words = f"{len(others)} points of an earlier sweep ({others[0]} …) are no part of this one"
        click.echo(f"canal-mpi: warning: {words}; their runs stay in {folder}.", err=True)


def _points(options: dict[str, Any]) -> "list[Point]":
    """The grid that was asked for."""
    from canal_mpi.cli import flags_of
    from canal_mpi.config import resolve
    from canal_mpi.sweep import grid
    from canal_mpi.sweep.folder import NETWORK

    flags, job_file = flags_of(options), options["job_file"]
    if options["emulate"] and not options["hostfiles"]:
        raise UsageError("--emulate: which hosts? Give --hostfiles 'hostfiles/*.hosts'.")
    if options["hostfiles"] and options["ranks"]:
        raise UsageError("-n and --hostfiles both say how many agents; give one of them.")
    network, shared = options["network"] or "", options["shared_disk"]
    if (network or shared) and (options["emulate"] or not options["hostfiles"]):
        raise UsageError("--network and --shared-disk go with --hostfiles, without --emulate.")
    if not NETWORK.fullmatch(network):
        raise UsageError(f"--network {network}: expected 10.0.0.0/24 or eth0.")
    axes: list[Axis] = []
    if options["hostfiles"]:
        axes.append(grid.hostfiles(options["hostfiles"], options["emulate"], shared))
    if options["ranks"]:
        axes.append(grid.agents(options["ranks"]))
    for name, key, given in (
        ("topology", "share.topology", options["topologies"]),
        ("policy", "share.policy", options["policies"]),
    ):
        if given:
            axes.append(grid.named(name, key, words_of(given)))
    axes += [grid.varied(text) for text in options["vary"]]
    if options["seeds"]:
        axes.append(grid.seeds(options["seeds"], resolve(flags, job_file).seed))
    return [replace(p, network=network) for p in grid.points_of(axes, flags, job_file)]


def _run(folder: Path, points: "Sequence[Point]", options: dict[str, Any]) -> int:
    """Run what is not finished, then write the report."""
    from canal_mpi.sweep import collect

    chosen, only = list(points), options["point"]
    if only is not None:
        if not 0 <= only < len(points):
            raise UsageError(f"--point {only}: the sweep has points 0 to {len(points) - 1}.")
        chosen = [points[only]]

    def report() -> list[str]:
        whole = only is None or collect.all_finished(folder, points)
        return collect.collect(folder, points) if whole else []

    return run_points("sweep", folder, chosen, options, report)


def _write_script(file: Path, folder: Path, points: "Sequence[Point]") -> None:
    from canal_mpi.sweep.slurm import write_script

    write_script(file, folder, points)
    click.echo(f"{len(points)} points. To run them: sbatch {file}")
