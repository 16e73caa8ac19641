"""What `sweep` and `study` have in common: options, and running, listing and reporting points."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from canal_mpi.errors import RankFailed, Stopped, UsageError

if TYPE_CHECKING:
    from canal_mpi.sweep.grid import Point

FOLDER = click.Path(path_type=Path)


def folder_options(what: str) -> Callable[[Any], Any]:
    """The options about the folder of a sweep or a study, and about running it."""
    options = [
        click.option(
            "--slots", type=click.IntRange(1), help="Ranks at once; default: this machine's cores."
        ),
        click.option("--out", type=FOLDER, metavar="DIR", help="Where everything goes."),
        click.option(
            "--resume",
            type=FOLDER,
            metavar="DIR",
            help=f"Go on with a {what}; everything about it is in its folder.",
        ),
        click.option(
            "--report", is_flag=True, help="With --resume: start nothing, only show and report."
        ),
        click.option(
            "--max-time", metavar="TIME", help="Save and stop after so long, as in 90s, 20m, 2h."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Only list the points, and how long they may take."
        ),
    ]

    def added(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return added


def words_of(text: str | None) -> list[str]:
    """The words of a list with commas; none where nothing was given."""
    return [] if text is None else [word.strip() for word in text.split(",")]


def known_points(
    options: dict[str, Any], own: Sequence[str], what: str
) -> "tuple[Path, list[Point]]":
    """The folder that `--resume` names and its points; no points without it."""
    from canal_mpi.rank.launcher import refuse_mpirun
    from canal_mpi.sweep.folder import load_points

    refuse_mpirun(what)
    if options["resume"] is None:
        if options["report"]:
            raise UsageError(f"--report: of which {what}? Give --resume DIR too.")
        return Path(), []
    _nothing_else(options, own, what)
    folder = options["resume"].absolute()
    is_there(folder, what)
    return folder, load_points(folder)


def is_there(folder: Path, what: str) -> bool:
    """Whether a sweep or a study was started here; never both, so UsageError if it is the other."""
    from canal_mpi.sweep.folder import holds

    found = holds(folder)
    if found not in ("", what):
        raise UsageError(f"{folder} holds a {found}: `canal-mpi {found} --resume` goes on with it.")
    return bool(found)


def _nothing_else(options: dict[str, Any], own: Sequence[str], what: str) -> None:
    """What goes on is what it was."""
    from canal_mpi.cli import FLAG_KEYS

    names = (*own, *FLAG_KEYS, "job_file", "assignments")
    given = [name for name in names if options.get(name)]
    if given:
        word = {"job_file": "job", "ranks": "n", "assignments": "set"}.get(given[0], given[0])
        word = word.replace("_", "-")
        raise UsageError(f"--resume takes everything from the {what}: leave out --{word}.")


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
    from canal_mpi.sweep.engine import WAITING, Engine, cores

    engine = Engine(folder, points, cores())
    engine.look()
    for work in engine.of(WAITING):
        work.status = work.found()
    Board(engine).close()
    click.echo("\n".join(collect(folder, points)))


def list_points(folder: Path, points: "Sequence[Point]", options: dict[str, Any]) -> None:
    """The points, and how long they take; UsageError where the folder has runs of other jobs."""
    from canal_mpi.show import duration
    from canal_mpi.sweep import estimate
    from canal_mpi.sweep.engine import cores
    from canal_mpi.sweep.folder import check_points

    check_points(folder, points)
    slots = options["slots"] or cores()
    done = estimate.finished_seconds(folder, points)
    left = [point for point in points if point.name not in done]
    times = estimate.seconds_of_all(left) if left else {}
    width = max(5, *(len(point.name) for point in points))
    click.echo(f" {'point':<{width}}  ranks  time")
    for point in points:
        time = times.get(point.name)
        words = f"about {duration(time)}" if time is not None else "is finished"
        click.echo(f" {point.name:<{width}}  {point.ranks:>5}  {words}")
    total = estimate.together(left, [times[point.name] for point in left], slots)
    click.echo(
        f" {len(points)} points, {len(done)} finished · with {slots} slots about "
        f"{duration(total)} (as if no lesson helped) · {folder}"
    )
