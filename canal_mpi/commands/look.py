"""Commands that look at runs, let their agents play again, and measure the machine."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from canal_mpi.commands import PATH, path_option
from canal_mpi.commands.experiments import report_again
from canal_mpi.errors import UsageError, needed_for

TAGS = ["best", "latest"]
FORMATS = ["csv", "parquet"]


@click.command()
@click.argument("name")
@click.option("-n", "size", type=click.IntRange(1, 256), metavar="N", help="Agents; default 5.")
@click.option("--seed", type=click.IntRange(0), default=1, help="For random graphs; default 1.")
@click.option("--hosts", metavar="LIST", help="Where agents run, as in nano-1:2,xavier:3.")
@click.option("--lesson-mb", type=float, default=1.0, help="Size of a lesson; default 1 MB.")
def topology(name: str, size: int | None, seed: int, hosts: str | None, lesson_mb: float) -> None:
    """Print who hears whom, and what a lesson costs there.

    NAME is full, ring, line, star, tree, grid, torus, hypercube, random:K, hosts, none, a generator
    of networkx (watts_strogatz_graph:k=2,p=0.1), a file with one directed edge per line (0 -> 1),
    or module:function.
    """
    from canal_mpi.launch.hostfile import parse_hosts
    from canal_mpi.topology import graphs, spread

    if not 0 < lesson_mb < 1e9:
        raise UsageError(f"--lesson-mb {lesson_mb}: expected a positive number of megabytes.")
    listed = parse_hosts(hosts.replace(",", "\n"), f"--hosts {hosts}") if hosts else []
    host_of = [host.name for host in listed for _ in range(host.ranks)]
    if host_of and size not in (None, len(host_of)):
        raise UsageError(f"--hosts {hosts} names {len(host_of)} agents, but -n says {size}.")
    size = size or len(host_of) or 5
    edges = graphs.edges(name, size, seed, host_of)
    lines = spread.summary(name, edges, size, lesson_mb)
    click.echo("\n".join([*spread.neighbour_table(edges, size), "", *lines]))


@click.command()
@click.argument("folder", default="runs", type=PATH, metavar="[DIR]")
def ls(folder: Path) -> None:
    """List the runs in DIR (default: runs), newest first."""
    from canal_mpi.results.status import RunStatus, run_lines, runs_in

    found = [RunStatus(run) for run in runs_in(folder)]
    click.echo("\n".join(run_lines(found)) if found else f"{folder} holds no runs.")


@click.command()
@click.argument("run", type=PATH)
@click.option("--once", is_flag=True, help="Show the newest state and end.")
@path_option("--prometheus", "FILE", "Keep FILE up to date for node_exporter's textfile collector.")
def watch(run: Path, once: bool, prometheus: Path | None) -> None:
    """Show what the agents of RUN do; reads only its files.

    Continues until the run ends; Ctrl-C leaves the run alone.
    """
    from canal_mpi.results.status import follow

    follow(run, once, prometheus)


@click.command()
@click.argument("path", type=PATH, metavar="RUN|FILE")
@click.option("--verify", is_flag=True, help="Check form, checksums and ranges; exit 1 if wrong.")
@path_option("--same-as", "RUN", "Compare all but volatile columns; exit 1 where they differ.")
@click.pass_context
def inspect(ctx: click.Context, path: Path, verify: bool, same_as: Path | None) -> None:
    """Show what is in the files of a run, or check them.

    Prints every table with shapes, units and meaning.
    """
    from canal_mpi.results import inspect as files

    if verify:
        count, wrong = files.verify_all(path)
        click.echo("\n".join(wrong) if wrong else f"{count} files are whole.")
        ctx.exit(int(bool(wrong)))
    if same_as is None:
        click.echo("\n".join(files.tree(path)))
        return
    differing = files.differences(path, same_as)
    same = "the same: every column that is not volatile is bit-identical"
    click.echo("\n".join(differing) if differing else same)
    ctx.exit(int(bool(differing)))


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN…")
@path_option("--out", "FILE", "Where the page goes; default: report.html in the first run.")
@path_option(
    "--experts", "RUN", "One agent on one task, to normalise by; repeatable.", multiple=True
)
@path_option("--figures", "DIR", "Also write every figure as PDF, SVG and PNG, for a paper.")
def report(runs: tuple[Path, ...], **options: Any) -> None:
    """Make one HTML page of a RUN, or of several to compare them.

    Runs that differ only in their seed are taken together; a run without sharing is the baseline,
    a run of one agent the single agent of ILA, TLA and TA. The folder of a sweep or study gets its
    page, figures and table again.
    """
    with needed_for("a report"):
        from canal_mpi.experiments.points import kind_of
        from canal_mpi.report.report import write_report

        if len(runs) == 1 and (kind := kind_of(runs[0])):
            return report_again(runs[0].absolute(), kind)
        for path in write_report(runs, **options):
            click.echo(path)


@click.command()
@click.argument("run", type=PATH)
@click.option("--to", "kind", required=True, type=click.Choice(FORMATS), help="What to write.")
@path_option("--out", "DIR", "Where to; default: inside the run.")
def export(run: Path, kind: str, out: Path | None) -> None:
    """Write the tables of RUN as CSV or Parquet."""
    from canal_mpi.results.inspect import export

    for path in export(run, kind, out):
        click.echo(path)


@click.command()
@click.argument("run", type=PATH)
@click.option("--agent", "agents", multiple=True, type=int, help="Only this agent; repeatable.")
@click.option("--task", "tasks", multiple=True, help="Only this task, or all (default).")
@click.option("--episodes", type=click.IntRange(1), default=20, help="Episodes of each pair.")
@click.option("--max-steps", type=click.IntRange(1), help="Of an episode; default: the job's.")
@click.option("--video", is_flag=True, help="Film the first episode of each pair (extra: video).")
@click.option("--save-steps", is_flag=True, help="Also save every action, reward and state.")
@click.option("--tag", type=click.Choice(TAGS), default="latest", help="Which networks play.")
@click.option("--trust", is_flag=True, help="Import modules that the run's job names.")
@path_option("--out", "DIR", "Where files go; default: evaluations/ in the run.")
@click.pass_context
def evaluate(ctx: click.Context, /, **options: Any) -> None:
    """Let the agents of RUN play again, and print their scores.

    They play as their newest checkpoints have them, or (--tag best) each task by the network of
    right after the task where that scored better in the run's evaluations. Under mpirun the pairs
    of agent and task are spread over the ranks; the scores are the same on any number of them, and
    written as HDF5.
    """
    from canal_mpi.evaluation import EvaluationRequest, evaluate_rank
    from canal_mpi.rank.shutdown import run_guarded

    ctx.exit(run_guarded(partial(evaluate_rank, EvaluationRequest(**options))))


@click.command()
@click.option("--task", default="RoadRunner", show_default=True, help="What is played.")
@click.option("--blocks", type=click.IntRange(2), default=30, help="Of 100 steps; default 30.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def bench(task: str, blocks: int, as_json: bool) -> None:
    """Measure how fast this machine trains.

    Takes less than a minute; nothing else should run meanwhile.
    Comparisons with other libraries are scripts in benchmarks/.
    """
    from canal_mpi import bench, envs

    found = bench.measure(envs.canonical(task), blocks)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(bench.lines(found)))


COMMANDS = (topology, ls, watch, inspect, report, export, evaluate, bench)
