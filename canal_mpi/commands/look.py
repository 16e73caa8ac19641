"""Commands that look at runs: ls, watch, inspect, report, export. None loads torch or MPI."""

from pathlib import Path
from typing import Any

import click

RUN = click.argument("run", type=click.Path(path_type=Path))


@click.command()
@click.argument("folder", default="runs", type=click.Path(path_type=Path), metavar="[DIR]")
def ls(folder: Path) -> None:
    """List the runs in DIR (default: runs), newest first."""
    from canal_mpi.results.runs import glance, runs_in
    from canal_mpi.show import run_lines

    found = [glance(run) for run in runs_in(folder)]
    click.echo("\n".join(run_lines(found)) if found else f"{folder} holds no runs.")


@click.command()
@RUN
@click.option("--once", is_flag=True, help="Show the newest state and end.")
@click.option(
    "--prometheus",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also keep FILE up to date for Prometheus (the textfile collector of node_exporter).",
)
def watch(run: Path, once: bool, prometheus: Path | None) -> None:
    """Show what the agents of RUN do, from any terminal; reads only its files.

    Goes on until the run ends; Ctrl-C leaves the run alone.
    """
    from canal_mpi.show import follow

    follow(run, once, prometheus)


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="RUN|FILE")
@click.option("--verify", is_flag=True, help="Check form, checksums and ranges; exit 1 if wrong.")
@click.option(
    "--same-as",
    "other",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Say whether two runs are equal but for volatile columns; exit 1 where they differ.",
)
@click.pass_context
def inspect(ctx: click.Context, path: Path, verify: bool, other: Path | None) -> None:
    """Show what is in the files of a run: every table with shapes, units and meaning."""
    from canal_mpi.results import verify as checks
    from canal_mpi.results.tree import differences, tree

    if verify:
        files = checks.files_of(path)
        wrong = [words for file in files for words in checks.verify(file)]
        click.echo("\n".join(wrong) if wrong else f"{len(files)} files are whole.")
        ctx.exit(int(bool(wrong)))
    if other is None:
        click.echo("\n".join(tree(path)))
        return
    found = differences(path, other)
    same = "the same: every column that is not volatile has the same bits"
    click.echo("\n".join(found) if found else same)
    ctx.exit(int(bool(found)))


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN…")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the page goes; default: report.html in the first run.",
)
@click.option(
    "--experts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="A run of one agent on one task, to normalise by; may be given several times.",
)
@click.option("--csv", is_flag=True, help="Also write the tables as CSV, beside the page.")
@click.option("--json", "as_json", is_flag=True, help="Also write the measures as JSON.")
@click.option("--png", is_flag=True, help="Also write every figure as PNG (extra: png).")
def report(runs: tuple[Path, ...], **options: Any) -> None:
    """Make one HTML page of a RUN, or of several to compare them.

    Runs that differ only in their seed are taken together; a run without sharing is the baseline,
    a run of one agent the single agent of ILA, TLA and TA.
    """
    from canal_mpi.report.write import write_report

    for path in write_report(runs, **options):
        click.echo(path)


@click.command()
@RUN
@click.option(
    "--to",
    "kind",
    required=True,
    type=click.Choice(["csv", "parquet", "tensorboard"]),
    help="What to write; parquet and tensorboard are extras of the package.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where to; default: inside the run.")
def export(run: Path, kind: str, out: Path | None) -> None:
    """Write the tables of RUN in another format."""
    from canal_mpi.results.export import export

    for path in export(run, kind, out):
        click.echo(path)
