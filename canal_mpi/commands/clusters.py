"""Commands for clusters: launch, hosts, doctor. None loads torch or MPI into this process."""

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from canal_mpi.errors import UsageError

HOSTFILE = click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Hosts and their ranks: hostfiles/*.hosts, or a hostfile of either MPI.",
)
NETWORK = click.option(
    "--network",
    metavar="NET",
    help="How hosts reach each other: a subnet (10.0.0.0/24) or an interface (eth0).",
)


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "-n", "ranks", type=int, metavar="N", help="Ranks; default: as many as the hostfile has."
)
@HOSTFILE
@NETWORK
@click.option("--env-server", is_flag=True, help="The last rank runs every environment.")
@click.option("--ft", is_flag=True, help="Go on without ranks that die (Open MPI only).")
@click.option("--dry-run", is_flag=True, help="Only print the command.")
@click.argument("arguments", nargs=-1, required=True, metavar="-- train|evaluate …")
@click.pass_context
def launch(ctx: click.Context, /, **options: Any) -> None:
    """Start train or evaluate with mpirun, with everything filled in that plain mpirun lacks.

    The MPI of this environment is found; root, more ranks than cores, variables, absolute paths
    and the hostfile's syntax are taken care of, and the command is printed. Ctrl-C lets the ranks
    save and stop (exit code 75); the second one ends them at once. A run counts as done only when
    its run.h5 says so.

    \b
    canal-mpi launch -n 5 -- train --job quick
    canal-mpi launch --hostfile hostfiles/nano4-xavier1.hosts -- train --job quick
    """
    from canal_mpi.cluster.start import command_of, start

    wish = _wish(options)
    command = command_of(wish)
    click.echo(str(command))
    if not options["dry_run"]:
        ctx.exit(start(wish, command, _say))


def _say(words: str) -> None:
    click.echo(f"canal-mpi: {words}", err=True)


def _wish(options: dict[str, Any]) -> Any:
    from canal_mpi.cluster.hostfile import read_hosts
    from canal_mpi.cluster.start import Wish, words_of

    arguments = list(options["arguments"])
    if arguments[0] not in ("train", "evaluate"):
        raise UsageError(
            f"launch starts train or evaluate, not '{arguments[0]}': "
            "canal-mpi launch -n 5 -- train --job quick"
        )
    hosts = read_hosts(options["hostfile"]) if options["hostfile"] else []
    names = [("-n", "ranks"), ("--hostfile", "hostfile"), ("--network", "network")]
    names += [("--env-server", "env_server"), ("--ft", "ft")]
    folder = _folder(arguments) if arguments[0] == "train" else None
    return Wish(
        tuple(arguments),
        options["ranks"],
        tuple(hosts),
        int(options["env_server"]),
        options["ft"],
        options["network"],
        folder,
        words_of([(flag, options[name]) for flag, name in names]),
    )


def _folder(arguments: list[str]) -> Path:
    """Where the run will be; a run that nobody named gets its name here."""
    from canal_mpi.cli import train
    from canal_mpi.results.files import file_name

    words = [word for word in arguments[1:] if word != "--ft"]
    given = train.make_context("canal-mpi train", words).params
    named = given["resume"] or given["out"]
    if named:
        return Path(named).absolute()
    if not given["name"]:
        job = file_name(Path(given["job_file"] or "default").stem)[:40]
        given["name"] = f"{job}-{datetime.now():%Y%m%d-%H%M%S}"
        arguments += ["--name", given["name"]]
    return Path("runs", given["name"]).absolute()


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--mpi",
    "kind",
    type=click.Choice(["openmpi", "mpich"]),
    help="For whose mpirun; default: the MPI of this environment.",
)
def hosts(file: Path, kind: str | None) -> None:
    """Print a short description of hosts as a hostfile of Open MPI or MPICH.

    A line of FILE is a host and its number of ranks, as in `nano-[1-4] 1`; `env-server` behind it
    gives its ranks to environments (the last ranks of the job).
    """
    from canal_mpi.cluster.hostfile import convert, read_text
    from canal_mpi.cluster.mpis import find_mpi

    click.echo(convert(read_text(file), str(file), kind or find_mpi().kind), nl=False)


@click.command()
@HOSTFILE
@NETWORK
@click.option("--job", "job_file", metavar="NAME|FILE", help="What is to be run there.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="runs",
    metavar="DIR",
    help="Where runs go; default: runs.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=60.0,
    metavar="S",
    help="How long a host may take to answer; default 60.",
)
@click.pass_context
def doctor(ctx: click.Context, /, job_file: str | None, out: Path, **options: Any) -> None:
    """Say whether this machine, or every host of a hostfile, is fit to run a job.

    Each host is asked through mpirun itself: can it be reached, has it the same versions of Python,
    canal-mpi, torch, MPI and ALE, do the games load, does CUDA work, are there memory and disk for
    the job, is its clock right, how fast are the links between neighbours. Exit code 1 if something
    is wrong; what to do about it is said.
    """
    from canal_mpi import tasks
    from canal_mpi.cluster.doctor import Patient, examine
    from canal_mpi.cluster.hostfile import read_hosts
    from canal_mpi.config import resolve

    job = tasks.named(resolve({}, job_file))
    hosts = tuple(read_hosts(options["hostfile"])) if options["hostfile"] else ()
    found = examine(Patient(job, out.absolute(), hosts, options["network"], options["seconds"]))
    ill = {name for name, _ in found.wrong}
    for line in found.lines():
        bad = any(line.startswith((f" {name} ", f" {name}:")) for name in ill)
        click.secho(line, fg="red" if bad else "green")
    number = len(found.wrong)
    click.echo(f"{number} thing{'s' * (number > 1)} to mend." if number else "Fit to run.")
    ctx.exit(int(bool(found.wrong)))
