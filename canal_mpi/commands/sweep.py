"""`canal-mpi sweep`: a grid of runs, one report at the end. Loads no torch and no MPI."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from canal_mpi.errors import RankFailed, Stopped, UsageError

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
@click.option(
    "--slots", type=click.IntRange(1), help="Ranks at once; default: this machine's cores."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where everything goes."
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with a sweep; everything about it is in its folder.",
)
@click.option("--report", is_flag=True, help="With --resume: start nothing, only show and report.")
@click.option("--max-time", metavar="TIME", help="Save and stop after so long, as in 90s, 20m, 2h.")
@click.option("--dry-run", is_flag=True, help="Only list the points, and how long they may take.")
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
    from canal_mpi.rank.launcher import refuse_mpirun
    from canal_mpi.sweep import collect
    from canal_mpi.sweep.folder import load_points, save

    refuse_mpirun("sweep")
    if options["report"] and options["resume"] is None:
        raise UsageError("--report: of which sweep? Give --resume DIR too.")
    if options["resume"] is not None:
        nothing_else(options, (*GRID, *HOSTS), "sweep")
        folder = options["resume"].absolute()
        points = load_points(folder)
        if any("arm" in point.settings for point in points):
            raise UsageError(f"{folder} holds a study: `canal-mpi study --resume` goes on with it.")
    else:
        points = _points(options)
        folder = (options["out"] or Path("runs", f"sweep-{points[0].job.name}")).absolute()
        if options["dry_run"]:
            return list_points(folder, points, options)
        save(folder, points)
    if options["dry_run"]:
        return list_points(folder, points, options)
    if options["report"]:
        return report_points(folder, points, collect.collect)
    if options["slurm"] is not None:
        return _write_script(options["slurm"], folder, points)
    ctx.exit(_run(folder, points, options))


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
            axes.append(grid.named(name, key, [word.strip() for word in given.split(",")]))
    axes += [grid.varied(text) for text in options["vary"]]
    if options["seeds"]:
        axes.append(grid.seeds(options["seeds"], resolve(flags, job_file).seed))
    return [replace(p, network=network) for p in grid.points_of(axes, flags, job_file)]


def nothing_else(options: dict[str, Any], own: Sequence[str], what: str) -> None:
    """What goes on is what it was."""
    from canal_mpi.cli import FLAG_KEYS

    names = (*own, *FLAG_KEYS, "job_file", "assignments")
    given = [name for name in names if options.get(name)]
    if given:
        word = {"job_file": "job", "ranks": "n", "assignments": "set"}.get(given[0], given[0])
        word = word.replace("_", "-")
        raise UsageError(f"--resume takes everything from the {what}: leave out --{word}.")


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


def run_points(
    command: str,
    folder: Path,
    points: "Sequence[Point]",
    options: dict[str, Any],
    report: Callable[[], list[str]],
) -> int:
    """Run what is not finished, then report; the exit code."""
    from canal_mpi.cli import seconds_of
    from canal_mpi.sweep.board import Board, going_on
    from canal_mpi.sweep.engine import BROKEN, FINISHED, Engine, cores

    engine = Engine(folder, points, options["slots"] or cores())
    board = Board(engine)
    engine.tell = board.tell
    engine.run(board.refresh, seconds_of(options["max_time"]) or inf)
    board.close()
    done, again = len(engine.of(FINISHED)), going_on(folder, command)
    if engine.asked or engine.of("stopped"):
        why = engine.asked or "a point was stopped"
        words = f"{done} of {len(points)} points are finished, the others are saved"
        raise Stopped(f"stopped: {why}; {words}. To go on: {again}")
    click.echo("\n".join(report()))
    if broken := engine.of(BROKEN):
        raise RankFailed(
            f"{len(broken)} of {len(points)} points broke; first {broken[0].point.name}: "
            f"{broken[0].why} The log is {broken[0].log}. To repeat them: {again}"
        )
    return 0


def report_points(
    folder: Path, points: "Sequence[Point]", collect: "Callable[[Path, Sequence[Point]], list[str]]"
) -> None:
    """How far the runs are, and what is known of those that are finished; starts nothing."""
    from canal_mpi.sweep.board import Board
    from canal_mpi.sweep.engine import Engine, cores

    engine = Engine(folder, points, cores())
    engine.look()
    Board(engine).close()
    click.echo("\n".join(collect(folder, points)))


def list_points(folder: Path, points: "Sequence[Point]", options: dict[str, Any]) -> None:
    """The points, and at most how long they take."""
    from canal_mpi.show import duration
    from canal_mpi.sweep import estimate
    from canal_mpi.sweep.engine import cores

    slots = options["slots"] or cores()
    done = estimate.finished_seconds(folder, points)
    left = [point for point in points if point.name not in done]
    times = estimate.seconds_of_all(left) if left else {}
    width = max(5, *(len(point.name) for point in points))
    click.echo(f" {'point':<{width}}  ranks  time")
    for point in points:
        time = times.get(point.name)
        words = f"about {duration(time)} or less" if time is not None else "is finished"
        click.echo(f" {point.name:<{width}}  {point.ranks:>5}  {words}")
    total = estimate.together(left, [times[point.name] for point in left], slots)
    click.echo(
        f" {len(points)} points, {len(done)} finished · with {slots} slots about "
        f"{duration(total)} or less (as if no lesson helped) · {folder}"
    )


def _write_script(file: Path, folder: Path, points: "Sequence[Point]") -> None:
    from canal_mpi.sweep.slurm import write_script

    write_script(file, folder, points)
    click.echo(f"{len(points)} points. To run them: sbatch {file}")
