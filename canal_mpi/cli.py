"""The command line: train, config, topology, bench; others in commands/. Help loads no torch."""

import os
import re
import traceback
from pathlib import Path
from typing import Any

import click

from canal_mpi import __version__
from canal_mpi.commands import bench as benches
from canal_mpi.commands import clusters, look
from canal_mpi.commands.evaluate import evaluate
from canal_mpi.commands.groups import Grouped
from canal_mpi.commands.study import STUDIED, study
from canal_mpi.commands.sweep import sweep
from canal_mpi.errors import CanalError, UsageError

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: one thread a rank

JOB_OPTIONS = [
    click.option("--job", "job_file", metavar="NAME|FILE", help="A named job, or your own TOML."),
    click.option("--preset", help="Settings to start from: canal is the original's learner."),
    click.option("--seed", type=int, help="The same seed gives the same bits."),
    click.option("--frames", type=int, help="Agent steps on each task (not emulator frames)."),
    click.option("--tasks", help="Games or gymnasium ids, separated by commas."),
    click.option("--order", help="canal, rotate, random, same, or module:function."),
    click.option(
        "--share",
        "policy",
        help="Lessons agents take: exact, none, previous, all, simnet, wasserstein …",
    ),
    click.option("--reuse", help="How a lesson is used: distill, mix, replay, or adopt."),
    click.option("--topology", help="Who hears whom; `canal-mpi topology --help` names them."),
    click.option("--exchange", help="rounds: in step, reproducible; free: nobody ever waits."),
    click.option("--sync", help="On the same task also share parameters: blend or gradients."),
    click.option("--lessons", metavar="RUN", help="Offer the lessons of an earlier run too."),
    click.option("--envs-per-agent", type=int, help="Environments an agent plays at once."),
    click.option("--obs", help="What agents see of Atari games: ram or pixels."),
    click.option("--variant", help="fs4 (no-op starts, actions repeated 4 times) or orig."),
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Any other setting; `canal-mpi config` lists them.",
    ),
]
FLAG_KEYS = {
    "preset": "preset",
    "seed": "seed",
    "frames": "train.frames",
    "tasks": "tasks",
    "order": "order",
    "policy": "share.policy",
    "reuse": "reuse.mode",
    "topology": "share.topology",
    "exchange": "share.exchange",
    "sync": "sync.mode",
    "lessons": "share.lessons",
    "envs_per_agent": "train.envs",
    "obs": "task.obs",
    "variant": "task.variant",
}


def job_options(command: Any) -> Any:
    """The options that describe a job, the same for every command."""
    for option in reversed(JOB_OPTIONS):
        command = option(command)
    return command


def flags_of(options: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given as flags."""
    from canal_mpi.config import parse_assignment

    given = {
        FLAG_KEYS[name]: v for name, v in options.items() if name in FLAG_KEYS and v is not None
    }
    return given | dict(parse_assignment(text) for text in options["assignments"])


def seconds_of(text: str | None) -> float | None:
    """A length of time such as 90s, 20m or 2h; plain numbers are seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not found or float(found[1]) == 0:
        raise UsageError(f"--max-time {text}: expected a time such as 90s, 20m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@click.group(
    cls=Grouped, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
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
@click.option("--agent", type=int, help="Without mpirun: take the order and seeds of agent K.")
@click.option("--resume", metavar="RUN", help="Go on with a run that stopped, wherever it stopped.")
@click.option("--max-time", metavar="TIME", help="Save and stop after so long, as in 90s, 20m, 2h.")
@click.option(
    "--ft", is_flag=True, help="Go on without ranks that die (mpirun --with-ft ulfm; Open MPI)."
)
@click.option(
    "--env-server", is_flag=True, help="The last rank runs every environment, and no agent."
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
    """Train agents: one a rank under mpirun, a single one without.

    Each agent learns the job's tasks in its own order. After each task agents offer what they
    experienced to their neighbours; whoever comes to that task later learns from it instead of
    playing from scratch. Results are in RUN/run.h5.
    """
    from canal_mpi.rank.plan import Request
    from canal_mpi.rank.roles import train

    named = tuple(options["env_server_rank"])
    request = Request(
        flags=flags_of(options),
        job_file=options["job_file"],
        out=options["out"],
        name=options["name"],
        force=options["force"],
        agent=options["agent"],
        resume=options["resume"],
        max_time=seconds_of(options["max_time"]),
        ft=options["ft"],
        emulate=options["emulate"],
        env_servers=options["env_servers"] or int(options["env_server"] and not named),
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
    from canal_mpi import tasks
    from canal_mpi.config import resolve, to_toml

    if list_tasks:
        click.echo("\n".join(tasks.known()))
        return
    job = tasks.named(resolve(flags_of(options), options["job_file"]))
    click.echo(to_toml(job, explain=True), nl=False)


@cli.command()
@click.argument("name")
@click.option("-n", "size", type=int, metavar="N", help="Number of agents; default 5.")
@click.option("--seed", type=int, default=1, help="For random:K; default 1, as in a job.")
@click.option("--hosts", metavar="LIST", help="Where agents run, as in nano-1:2,xavier:3.")
@click.option("--lesson-mb", type=float, default=1.0, help="Size of a lesson; default 1 MB.")
@click.option("--svg", "file", metavar="FILE", help="Also draw it into an SVG file.")
def topology(
    name: str, size: int | None, seed: int, hosts: str | None, lesson_mb: float, file: str | None
) -> None:
    """Draw who hears whom, and say what a lesson costs there.

    NAME is full, ring, line, star, tree, grid, torus, hypercube, random:K, hosts, none, a file with
    one directed edge (0 -> 1) a line, or module:function.
    """
    from canal_mpi.results.files import write_whole
    from canal_mpi.topology import draw, graphs

    places = draw.host_of_each(hosts, size) if hosts else []
    size = draw.checked(size if size is not None else len(places) or 5, seed, lesson_mb)
    edges = graphs.edges(name, size, seed, places)
    lines = draw.summary(name, edges, size, lesson_mb)
    click.echo("\n".join([*draw.picture(name, edges, size, places), "", *lines]))
    if file is not None:
        write_whole(Path(file), draw.svg(name, edges, size, lines, places).encode())
        click.echo(f"  drawn       {file}")


@cli.group()
def bench() -> None:
    """Measure how fast a part is, against its floor, in one run."""


@bench.command("env")
@click.option("--task", default="RoadRunner", show_default=True, help="What is played.")
@click.option("--obs", type=click.Choice(["ram", "pixels"]), default="ram", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True, help="Of a block.")
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@click.pass_context
def bench_env(ctx: click.Context, /, task: str, obs: str, steps: int, repeats: int) -> None:
    """Steps per second through an env server against local environments.

    Starts two ranks of its own and gives each a core. Local and remote blocks take turns, and
    the ratio is the median over neighbours.
    """
    from canal_mpi.bench import env

    ctx.exit(env.run(task, obs, env.Size(steps, repeats)))


@bench.command("lesson")
@click.option("--game", default="RoadRunner", help="The task; default RoadRunner.")
@click.option("--rows", "file", metavar="FILE", help="Rows of a run: RUN/membuf/agent-0/….h5.")
@click.option("--steps", type=int, default=100_000, help="Without FILE: steps that are played.")
def bench_lesson(game: str, file: str | None, steps: int) -> None:
    """Bytes and seconds of a lesson, against pickled tuples of the same rows.

    Rows of a trained agent come from a file of a run; without one the game is played at random,
    each action held for a while, which packs differently.
    """
    from canal_mpi import tasks
    from canal_mpi.bench import lesson

    task = tasks.canonical(game)
    rows = lesson.rows_of_file(file) if file else lesson.played(task, steps)
    source = f"from {file}" if file else "of random play (a trained agent's: --rows FILE)"
    click.echo("\n".join(lesson.report(task, source, lesson.measure(task, rows))))


for command in (benches.train, benches.learn, benches.exchange, benches.everything):
    bench.add_command(command)
for option in JOB_OPTIONS:
    option(sweep)
    option(study)
study.params = [p for p in study.params if p.name not in STUDIED]
for command in (look.watch, look.ls, look.report, look.inspect, look.export, evaluate):
    cli.add_command(command)
for command in (sweep, study, clusters.launch, clusters.hosts, clusters.doctor):
    cli.add_command(command)


def run() -> int:
    """Run the command line; its exit code."""
    try:
        code = cli(prog_name="canal-mpi", standalone_mode=False)
    except CanalError as error:
        click.echo(f"canal-mpi: {error}", err=True)
        return error.code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except Exception:  # a mistake of ours; 1 would mean that doctor or verify found something
        traceback.print_exc()
        return CanalError.code
    return int(code or 0)
