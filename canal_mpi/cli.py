"""The command line: thin commands that load what they need when they are called.

Help loads neither numpy nor torch nor MPI; sweep, study and those for clusters are in commands/.
"""

import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from canal_mpi import __version__
from canal_mpi.commands import clusters
from canal_mpi.commands.experiments import study, sweep
from canal_mpi.errors import CanalError, StorageError, UsageError
from canal_mpi.launcher import detect

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: one thread per rank

PATH = click.Path(path_type=Path)
NOT_WITH_RESUME = ("job", "out", "name", "force", "agent", "emulate")
COMMANDS = {  # as the help lists them
    "Run": ("train", "launch", "evaluate", "config"),
    "Look": ("watch", "ls", "report", "inspect", "export", "topology"),
    "Compare": ("sweep", "study", "bench"),
    "Clusters": ("doctor", "hosts"),
}

FLAGS = {  # option of train: its setting and its help
    "--preset": ("preset", "Settings to start from: canal is the original's learner."),
    "--seed": ("seed", "The same seed gives bit-identical results."),
    "--steps": ("train.steps", "Agent steps on each task (not emulator frames)."),
    "--tasks": ("tasks", "Games or gymnasium ids, separated by commas."),
    "--order": ("order", "canal, rotate, random, same, or module:function."),
    "--share": (
        "share.policy",
        "Lessons agents take: exact, none, previous, all, simnet, wasserstein …",
    ),
    "--reuse": ("reuse.mode", "How a lesson is used: distill, mix, replay, or adopt."),
    "--topology": ("share.topology", "Who hears whom; `canal-mpi topology --help` names them."),
    "--exchange": ("share.exchange", "rounds: in step, reproducible; free: agents never wait."),
    "--sync": ("sync.mode", "On the same task also share parameters: weights or gradients."),
    "--lessons": ("share.lessons", "Offer the lessons of an earlier run too."),
    "--envs-per-agent": ("train.num_envs", "Environments that an agent plays at once."),
    "--obs": ("task.obs", "What agents see of Atari games: ram or pixels."),
    "--variant": ("task.variant", "fs4 (no-op starts, actions repeated 4 times) or orig."),
}
ALIASES = {"--steps": ("--frames",)}
FLAG_KEYS = {flag[2:].replace("-", "_"): key for flag, (key, _) in FLAGS.items()}
JOB_OPTIONS = [
    click.option("--job", "job_file", metavar="NAME|FILE", help="A named job, or your own TOML."),
    *(
        click.option(flag, *ALIASES.get(flag, ()), flag[2:].replace("-", "_"), help=about)
        for flag, (_, about) in FLAGS.items()
    ),
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Any other setting; `canal-mpi config` lists them.",
    ),
]


def job_options(command: Any) -> Any:
    """The options that describe a job, the same for every command."""
    for option in reversed(JOB_OPTIONS):
        command = option(command)
    return command


def flags_of(options: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given as flags."""
    from canal_mpi.config import parse_assignment

    given = {key: options[name] for name, key in FLAG_KEYS.items() if options[name] is not None}
    return given | dict(parse_assignment(text) for text in options["assignments"])


def seconds_of(text: str | None) -> float | None:
    """A length of time such as 90s, 20m or 2h; plain numbers are seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not found or float(found[1]) == 0:
        raise UsageError(f"--max-time {text}: expected a time such as 90s, 20m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


class GroupedCommands(click.Group):
    """Lists its commands in groups, in the order in which one meets them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help."""
        for title, names in COMMANDS.items():
            width = formatter.width - 16
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=12)


@click.group(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="canal-mpi")
def cli() -> None:
    """Lifelong reinforcement learning agents that share what they learnt, on MPI.

    Start five agents with `mpirun -np 5 canal-mpi train --job quick`.

    Exit codes: 0 done, 1 doctor or verify found something, 2 usage, 65 damaged data, 70 a rank
    failed, 73 run directory in use, 74 input or output, 75 stopped and resumable, 76 a peer broke
    the protocol, 78 ranks or jobs differ, 130 interrupted.
    """


@cli.command()
@job_options
@click.option("--out", metavar="DIR", help="Where the run goes; must not hold a run yet.")
@click.option("--name", help="Name of the run, under runs/; default: job and time.")
@click.option("--force", is_flag=True, help="Replace a run that is there already.")
@click.option(
    "--agent",
    type=click.IntRange(0, 4095),
    help="Without mpirun: take the order and seeds of agent K.",
)
@click.option("--resume", metavar="RUN", help="Resume a run that stopped early.")
@click.option("--max-time", metavar="TIME", help="Save and stop after so long, as in 90s, 20m, 2h.")
@click.option(
    "--ft", is_flag=True, help="Continue without ranks that die (mpirun --with-ft ulfm; Open MPI)."
)
@click.option(
    "--env-server", is_flag=True, help="The last rank runs all environments and no agent."
)
@click.option("--env-servers", type=int, metavar="N", help="The last N ranks do.")
@click.option(
    "--env-server-rank", type=int, multiple=True, metavar="R", help="Rank R does; may be repeated."
)
@click.option(
    "--emulate",
    metavar="FILE",
    help="Let ranks play the hosts of FILE (as in hostfiles/*.hosts), slow ones slowly.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say more, also in the logs.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Train agents: one per rank under mpirun, a single one without.

    Each agent learns the job's tasks in its own order. After each task agents offer what they
    experienced to their neighbours; whoever comes to that task later learns from it instead of
    playing from scratch. Results are in RUN/run.h5.
    """
    from canal_mpi.launch.hostfile import emulated, read_hosts, total
    from canal_mpi.rank.plan import Request
    from canal_mpi.rank.train import train

    given = {n.removesuffix("_file"): v for n, v in options.items() if v is not None}
    if empty := [name for name, value in given.items() if value == ""]:
        raise UsageError(f"--{empty[0].replace('_', '-')} can't be empty.")
    ignored = [name for name in NOT_WITH_RESUME if given.get(name, False) is not False]
    if options["resume"] and ignored:
        raise UsageError(f"--resume takes everything from the run: leave out --{ignored[0]}.")
    flags, named = flags_of(options), tuple(options["env_server_rank"])
    servers = options["env_servers"] or int(options["env_server"] and not named)
    if options["emulate"] is not None:
        hosts = read_hosts(Path(options["emulate"]))
        flags["emulate"] = emulated(hosts)
        servers = servers or (0 if named else total(hosts, serving=True))
    request = Request(
        flags=flags,
        job_file=options["job_file"],
        out=options["out"],
        name=options["name"],
        force=options["force"],
        agent=options["agent"],
        resume=options["resume"],
        max_time=seconds_of(options["max_time"]),
        ft=options["ft"],
        env_servers=servers,
        env_server_ranks=named,
        verbosity=-1 if options["quiet"] else int(options["verbose"]),
    )
    ctx.exit(train(request))


@cli.command()
@job_options
@click.option("--list-tasks", is_flag=True, help="List every Atari game and gymnasium id.")
def config(list_tasks: bool, **options: Any) -> None:
    """Print the job that options, environment and files make together, as TOML.

    The output can be fed back with --job. Flags win over environment variables (CANAL_SEED,
    CANAL_LEARN_LR, …), those over the job file, that over the preset, that over the defaults.
    """
    from canal_mpi import envs
    from canal_mpi.config import resolve, to_toml

    if list_tasks:
        click.echo("\n".join(envs.known()))
        return
    job = envs.named(resolve(flags_of(options), options["job_file"]))
    click.echo(to_toml(job, explain=True), nl=False)


@cli.command()
@click.argument("name")
@click.option("-n", "size", type=click.IntRange(1, 256), metavar="N", help="Agents; default 5.")
@click.option("--seed", type=click.IntRange(0), default=1, help="For random graphs; default 1.")
@click.option("--hosts", metavar="LIST", help="Where agents run, as in nano-1:2,xavier:3.")
@click.option("--lesson-mb", type=float, default=1.0, help="Size of a lesson; default 1 MB.")
@click.option("--svg", "file", metavar="FILE", help="Also draw it into an SVG file.")
def topology(
    name: str, size: int | None, seed: int, hosts: str | None, lesson_mb: float, file: str | None
) -> None:
    """Print who hears whom, and what a lesson costs there.

    NAME is full, ring, line, star, tree, grid, torus, hypercube, random:K, hosts, none, a generator
    of networkx (watts_strogatz_graph:k=2,p=0.1), a file with one directed edge per line (0 -> 1),
    or module:function.
    """
    from canal_mpi.results.files import write_whole
    from canal_mpi.topology import graphs, spread

    if not 0 < lesson_mb < 1e9:
        raise UsageError(f"--lesson-mb {lesson_mb}: expected a positive number of megabytes.")
    host_of = spread.host_of_each(hosts, size) if hosts else []
    size = size or len(host_of) or 5
    edges = graphs.edges(name, size, seed, host_of)
    lines = spread.summary(name, edges, size, lesson_mb)
    click.echo("\n".join([*spread.neighbour_table(edges, size), "", *lines]))
    if file is not None:
        write_whole(Path(file), spread.draw_topology(edges, size, host_of, lines[0]))
        click.echo(f"  drawn       {file}")


@cli.command()
@click.argument("folder", default="runs", type=PATH, metavar="[DIR]")
def ls(folder: Path) -> None:
    """List the runs in DIR (default: runs), newest first."""
    from canal_mpi.results.status import run_lines, run_status, runs_in

    found = [run_status(run) for run in runs_in(folder)]
    click.echo("\n".join(run_lines(found)) if found else f"{folder} holds no runs.")


@cli.command()
@click.argument("run", type=PATH)
@click.option("--once", is_flag=True, help="Show the newest state and end.")
@click.option(
    "--prometheus",
    type=PATH,
    metavar="FILE",
    help="Also keep FILE up to date for node_exporter's textfile collector (extra: prometheus).",
)
def watch(run: Path, once: bool, prometheus: Path | None) -> None:
    """Show what the agents of RUN do, from any terminal; reads only its files.

    Continues until the run ends; Ctrl-C leaves the run alone.
    """
    from canal_mpi.results.status import follow

    follow(run, once, prometheus)


@cli.command()
@click.argument("path", type=PATH, metavar="RUN|FILE")
@click.option("--verify", is_flag=True, help="Check form, checksums and ranges; exit 1 if wrong.")
@click.option(
    "--same-as",
    "other",
    type=PATH,
    metavar="RUN",
    help="Say whether two runs are equal but for volatile columns; exit 1 where they differ.",
)
@click.pass_context
def inspect(ctx: click.Context, path: Path, verify: bool, other: Path | None) -> None:
    """Show what is in the files of a run: every table with shapes, units and meaning."""
    from canal_mpi.results import inspect as files

    if verify:
        count, wrong = files.verify_all(path)
        click.echo("\n".join(wrong) if wrong else f"{count} files are whole.")
        ctx.exit(int(bool(wrong)))
    if other is None:
        click.echo("\n".join(files.tree(path)))
        return
    differing = files.differences(path, other)
    same = "the same: every column that is not volatile is bit-identical"
    click.echo("\n".join(differing) if differing else same)
    ctx.exit(int(bool(differing)))


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN…")
@click.option(
    "--out",
    type=PATH,
    metavar="FILE",
    help="Where the page goes; default: report.html in the first run.",
)
@click.option(
    "--experts",
    multiple=True,
    type=PATH,
    metavar="RUN",
    help="A run of one agent on one task, to normalise by; may be given several times.",
)
@click.option(
    "--figures",
    type=PATH,
    metavar="DIR",
    help="Also write every figure as PDF, SVG and PNG into DIR, a column of a paper wide.",
)
def report(runs: tuple[Path, ...], **options: Any) -> None:
    """Make one HTML page of a RUN, or of several to compare them.

    Runs that differ only in their seed are taken together; a run without sharing is the baseline,
    a run of one agent the single agent of ILA, TLA and TA.
    """
    from canal_mpi.report.report import write_report

    for path in write_report(runs, **options):
        click.echo(path)


@cli.command()
@click.argument("run", type=PATH)
@click.option(
    "--to",
    "kind",
    required=True,
    type=click.Choice(["csv", "parquet", "tensorboard"]),
    help="What to write; parquet and tensorboard are extras of the package.",
)
@click.option("--out", type=PATH, help="Where to; default: inside the run.")
def export(run: Path, kind: str, out: Path | None) -> None:
    """Write the tables of RUN in another format."""
    from canal_mpi.results.inspect import export

    for path in export(run, kind, out):
        click.echo(path)


@cli.command()
@click.argument("run", type=PATH)
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
    type=PATH,
    metavar="DIR",
    help="Where files go; default: evaluations/ in the run.",
)
@click.pass_context
def evaluate(ctx: click.Context, /, **options: Any) -> None:
    """Let the agents of RUN play again, as their newest checkpoints have them.

    Under mpirun the pairs of agent and task are spread over the ranks; the scores are the same on
    any number of them. They are written as HDF5, and printed as a table.
    """
    from canal_mpi.evaluation import EvaluationRequest, evaluate

    ctx.exit(evaluate(EvaluationRequest(**options)))


@cli.command()
@click.option("--task", default="RoadRunner", show_default=True, help="What is played.")
@click.option("--blocks", type=click.IntRange(2), default=30, help="Of 100 steps; default 30.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def bench(task: str, blocks: int, as_json: bool) -> None:
    """Measure how fast this machine trains, and how fast two ranks talk.

    Takes about a minute; nothing else should run meanwhile. Comparisons with other libraries are
    scripts in benchmarks/.
    """
    import json

    from canal_mpi import bench, envs

    name = envs.canonical(task)
    found = bench.measure(name, blocks)
    report = json.dumps(bench.report(name, found), indent=1)
    click.echo(report if as_json else "\n".join(bench.lines(name, found)))


for option in JOB_OPTIONS:
    option(sweep)
for command in (sweep, study, clusters.launch, clusters.hosts, clusters.doctor):
    cli.add_command(command)


def run() -> int:
    """Run the command line; its exit code. Of several ranks the first one says what is wrong."""
    launcher = detect()
    speaks = launcher is None or launcher.rank == 0
    try:
        code = cli(prog_name="canal-mpi", standalone_mode=False)
        sys.stdout.flush()
    except CanalError as error:
        click.echo(f"canal-mpi: {error}" if speaks else "", err=True, nl=speaks)
        return error.code
    except click.ClickException as error:
        if speaks:
            error.show()
        return error.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except OSError as error:
        with suppress(OSError, ValueError):  # else Python's own last flush fails
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"canal-mpi: {error}", err=True)
        return StorageError.code
    except Exception:  # a bug; 1 would mean that doctor or verify found something
        traceback.print_exc()
        return CanalError.code
    return int(code or 0)
