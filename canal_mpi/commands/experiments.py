"""`canal-mpi compare`, `sweep` and `study`: many runs in one folder. Loads no torch and no MPI."""

from collections.abc import Callable
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from canal_mpi.commands import (
    flags_of,
    job_options,
    max_time,
    network,
    options,
    path_option,
    typed_options,
)
from canal_mpi.errors import RankFailed, Stopped, UsageError, needed_for

if TYPE_CHECKING:
    from canal_mpi.experiments.design import Axis
    from canal_mpi.experiments.points import Point

WITH_RESUME = {"resume", "slots", "max_time", "dry_run"}
PARTS = {"arm": "arms", "steps": "steps", "seed": "seeds"}  # what chooses runs of a study
run_options = options(
    click.option("--slots", type=click.IntRange(1), help="Ranks at once; default: all cores."),
    path_option("--out", "DIR", "Where everything goes."),
    path_option("--resume", "DIR", "Resume what was started in DIR."),
    max_time,
    click.option("--dry-run", is_flag=True, help="Only list what would run, and for how long."),
)


@click.command()
@click.option("--seeds", metavar="N|LIST", help="How many seeds, or which: 3, or 4,7,9.")
@click.option("--topologies", metavar="LIST", help="Topologies, as in full,ring.")
@click.option("--policies", metavar="LIST", help="Sharing policies, as in none,exact.")
@click.option("-n", "ranks", metavar="LIST", help="Numbers of agents, as in 2,5; default 5.")
@click.option("--vary", multiple=True, metavar="KEY=LIST", help="Any setting: learn.lr=0.01,0.001.")
@click.option("--hostfiles", multiple=True, metavar="GLOB", help="Mixes of hosts, one per file.")
@click.option("--emulate", is_flag=True, help="Play those hosts on this machine, slow ones slowly.")
@network
@click.option("--shared-disk", is_flag=True, help="--out is on a disk that those hosts share.")
@run_options
@job_options
def sweep(**given: Any) -> None:
    """Run a job over a grid of seeds and settings.

    Each point is an ordinary run in DIR, named after its settings. The same command again (or
    --resume DIR) leaves finished points alone, resumes stopped ones and repeats broken ones. At
    the end DIR/report.html compares all runs and DIR/table.csv has a row for each. Ctrl-C saves
    and stops.

    \b
    canal-mpi sweep --job quick --policies none,exact --seeds 3
    canal-mpi sweep --job quick --hostfiles 'hostfiles/*.hosts' --emulate --seeds 3
    """
    _execute("sweep", *_opened("sweep", given, lambda: _grid(given)), given)


@click.command()
@click.option("--job", "job_file", default="compare", metavar="NAME|FILE", help="Another job.")
@click.option("--seeds", default="1", metavar="N|LIST", help="How many seeds, or which; default 1.")
@path_option("--out", "DIR", "Where both runs go.")
@click.option("--dry-run", is_flag=True, help="Only tell what would run, and for how long.")
def compare(job_file: str, seeds: str, **given: Any) -> None:
    """Find out in four to seven minutes whether sharing pays here.

    Five agents learn five games without sharing, then with it. At the end one sentence sets scores,
    steps and time beside each other, and DIR/report.html has the pictures. More --seeds make it
    surer; the same command again resumes, or only tells the answer.
    """
    from canal_mpi.experiments import design

    axes = [design.named("policy", "share.policy", ["none", "exact"]), design.seeds(seeds, 1)]
    found = _opened("sweep", given, lambda: design.grid(axes, {}, job_file), "compare")
    _execute("sweep", *found, given)


@click.command()
@click.argument("name", metavar="[STUDY]", default="sharing")
@click.option("--arms", metavar="LIST", help="Run only these arms now.")
@click.option("--steps", metavar="LIST", help="Run only these budgets of the study now.")
@click.option("--seeds", metavar="LIST", help="Run only these seeds of the study now.")
@run_options
def study(**given: Any) -> None:
    """Find out whether sharing pays, on several seeds.

    STUDY is a TOML file with arms, budgets, seeds and settings, or the name of one that comes with
    canal-mpi (default: sharing). Each arm with each budget and seed is a run in DIR, at low
    priority, of which run.h5 and job.toml are kept. Ctrl-C saves and stops; the same command again
    (or --resume DIR) resumes. At the end DIR/report.html shows scores against steps and time.

    \b
    canal-mpi study --dry-run
    canal-mpi study --arms none,share --steps 11000 --seeds 201,202
    canal-mpi report runs/study-sharing
    """
    from canal_mpi.experiments import design
    from canal_mpi.results.files import write_whole

    path = design.find(given["name"])
    name = f"study-{path.stem}"
    folder, points = _opened("study", given, lambda: design.read(path).points(), name)
    if not given["resume"] and not given["dry_run"]:
        write_whole(folder / design.FILE, path.read_bytes())
    chosen = points
    for axis, option in PARTS.items():
        chosen = _part(chosen, axis, option, _words(given[option]))
    _execute("study", folder, points, given, chosen)


def report_again(folder: Path, kind: str) -> None:
    """Make page, figures and table of a sweep or study again from its finished runs."""
    from canal_mpi.experiments import page, runner
    from canal_mpi.experiments.points import load_points

    if others := [option for name, option in typed_options().items() if name != "runs"]:
        raise UsageError(f"the report of a {kind} goes into its own folder: leave out {others[0]}.")
    points = load_points(folder, kind)
    work = runner.Runner(folder, points, runner.cores())
    click.echo("\n".join([*runner.table(work), *page.collect(folder, kind, points)]))


def _opened(
    kind: str, given: dict[str, Any], make: "Callable[[], list[Point]]", name: str = ""
) -> "tuple[Path, list[Point]]":
    """The folder of an experiment and its points: those of `make`, or what --resume names.

    What would fail later is refused: a launcher around it, or no library that draws the page.
    """
    from canal_mpi.experiments import points as index
    from canal_mpi.launch.mpirun import refuse_mpirun

    command = str(click.get_current_context().info_name)
    refuse_mpirun(command)
    with needed_for(f"the page of a {command}"):
        for library in ("jinja2", "matplotlib"):
            import_module(library)
    if given.get("resume"):
        may = WITH_RESUME | set(PARTS.values() if kind == "study" else ())
        if odd := [option for name, option in typed_options().items() if name not in may]:
            raise UsageError(f"--resume takes everything from the {kind}: leave out {odd[0]}.")
        folder: Path = given["resume"].absolute()
        return folder, index.load_points(folder, kind)
    points = make()
    folder = (given["out"] or Path("runs", name or f"{kind}-{points[0].job.name}")).absolute()
    index.kind_of(folder, kind)
    if given["dry_run"]:
        index.check_points(folder, points)
    else:
        index.save(folder, kind, points)
    return folder, points


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _part(points: "list[Point]", axis: str, option: str, wanted: list[str]) -> "list[Point]":
    """The points with one of these values; random play gives the scale of all."""
    known = dict.fromkeys(point.settings[axis] for point in points)
    if odd := [word for word in wanted if word not in known]:
        raise UsageError(f"--{option} {odd[0]}: the study has {', '.join(known)}.")
    if not wanted:
        return points
    return [p for p in points if p.settings[axis] in wanted or p.settings["arm"] == "random"]


def _grid(given: dict[str, Any]) -> "list[Point]":
    """The grid that was asked for."""
    from canal_mpi.config import resolve
    from canal_mpi.experiments import design
    from canal_mpi.experiments.points import NETWORK

    flags, job_file, files = flags_of(given), given["job_file"], given["hostfiles"]
    network, shared = given["network"] or "", given["shared_disk"]
    if given["emulate"] and not files:
        raise UsageError("--emulate: which hosts? Give --hostfiles 'hostfiles/*.hosts'.")
    if files and given["ranks"]:
        raise UsageError("-n and --hostfiles both say how many agents; give one of them.")
    if (network or shared) and (given["emulate"] or not files):
        raise UsageError("--network and --shared-disk go with --hostfiles, without --emulate.")
    if not NETWORK.fullmatch(network):
        raise UsageError(f"--network {network}: expected 10.0.0.0/24 or eth0.")
    axes: list[Axis] = [design.hostfiles(files, given["emulate"], shared)] if files else []
    axes += [design.agents(given["ranks"])] if given["ranks"] else []
    for axis, option in (("topology", "topologies"), ("policy", "policies")):
        values = _words(given[option])
        axes += [design.named(axis, f"share.{axis}", values)] if values else []
    axes += [design.varied(text) for text in given["vary"]]
    if given["seeds"]:
        axes.append(design.seeds(given["seeds"], resolve(flags, job_file).seed))
    return design.grid(axes, flags, job_file, network)


def _execute(
    kind: str,
    folder: Path,
    points: "list[Point]",
    given: dict[str, Any],
    chosen: "list[Point] | None" = None,
) -> None:
    """List or run an experiment, or the chosen points of it, and report."""
    from canal_mpi.experiments import page, runner
    from canal_mpi.results.progress import short_path

    slots, chosen = given.get("slots") or runner.cores(), points if chosen is None else chosen
    work = runner.Runner(folder, chosen, slots, of_study=kind == "study")
    if given["dry_run"]:
        return click.echo("\n".join(runner.dry_run(work, folder)))
    runner.show(work, given.get("max_time") or inf)
    click.echo("\n".join(runner.table(work)))
    again = f"canal-mpi {kind} --resume {short_path(folder)}"
    if work.stop_reason or work.having(runner.STOPPED):
        done = f"{len(work.having('finished'))} of {len(chosen)} points are finished"
        reason = work.stop_reason or "a point was stopped"
        raise Stopped(f"stopped: {reason}; {done}, the others are saved. To go on: {again}")
    click.echo("\n".join(page.collect(folder, kind, points)))
    if broken := work.having(runner.BROKEN):
        raise RankFailed(
            f"{len(broken)} of {len(chosen)} points broke; first {broken[0].point.name}: "
            f"{broken[0].reason} The log is {broken[0].log}. To repeat them: {again}"
        )


COMMANDS = (compare, sweep, study)
