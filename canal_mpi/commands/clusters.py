"""Commands for clusters: launch, hosts, doctor. None loads torch or MPI into this process."""

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from canal_mpi.commands import PATH, network, path_option
from canal_mpi.errors import UsageError

hostfile = path_option("--hostfile", "FILE", "Hosts and their ranks; of either MPI, or ours.")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "ranks", type=int, metavar="N", help="Ranks; default: as the hostfile has.")
@hostfile
@network
@click.option("--dry-run", is_flag=True, help="Only print the command.")
@click.argument("arguments", nargs=-1, required=True, metavar="-- train|evaluate …")
@click.pass_context
def launch(ctx: click.Context, /, arguments: tuple[str, ...], **options: Any) -> None:
    """Start train or evaluate with mpirun, everything filled in.

    The MPI of this environment is found; root, more ranks than cores, variables, absolute paths
    and the hostfile's syntax are taken care of, and the command is printed. Ctrl-C lets the ranks
    save and stop (exit code 75); the second one ends them at once. A run counts as done only when
    its run.h5 says so. With `train --max-time` ranks that don't stop in time are killed.

    \b
    canal-mpi launch -n 5 -- train --job quick
    canal-mpi launch --hostfile hostfiles/nano4-xavier1.hosts -- train --job quick
    """
    from canal_mpi.launch import mpirun, supervise
    from canal_mpi.launch.hostfile import read_hosts
    from canal_mpi.results.progress import short_path

    if arguments[0] not in ("train", "evaluate"):
        raise UsageError(
            f"launch starts train or evaluate, not '{arguments[0]}': "
            "canal-mpi launch -n 5 -- train --job quick"
        )
    typed = shlex.join(word for word in sys.argv[1 : -len(arguments)] if word != "--")
    folder, seconds, resume = None, None, ""
    if arguments[0] == "train":
        arguments, folder, seconds = _train_options(arguments)
        resume = f"canal-mpi {typed} -- train --resume {shlex.quote(short_path(folder))}"
    mpirun.refuse_mpirun("launch")
    command = mpirun.build_command(
        options["ranks"], arguments, read_hosts(options["hostfile"]), options["network"]
    )
    click.echo(str(command))
    if not options["dry_run"]:
        ctx.exit(supervise.launch(command, folder, seconds, resume))


def _train_options(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], Path, float | None]:
    """The arguments of train, where the run will be, and the seconds of its --max-time.

    A run without a name gets one here.
    """
    from canal_mpi.cli import train
    from canal_mpi.results.files import file_name

    given = train.make_context("canal-mpi train", list(arguments[1:])).params
    named = given["resume"] or given["out"]
    if not named and not given["name"]:
        job = file_name(Path(given["job_file"] or "default").stem)[:40]
        given["name"] = f"{job}-{datetime.now():%Y%m%d-%H%M%S}"
        arguments += ("--name", given["name"])
    return arguments, Path(named or f"runs/{given['name']}").absolute(), given["max_time"]


@click.command()
@click.argument("file", type=PATH)
@click.option("--mpi", "kind", type=click.Choice(["openmpi", "mpich"]), help="Default: this one.")
def hosts(file: Path, kind: str | None) -> None:
    """Print hosts as a hostfile of Open MPI or MPICH.

    A line of FILE is a host and its number of ranks, as in `nano-[1-4] 1`; `env-server` after it
    gives its ranks to environments (the last ranks of the job).
    """
    from canal_mpi.launch.hostfile import convert, read_text
    from canal_mpi.launch.mpirun import find_mpi

    click.echo(convert(read_text(file), str(file), kind or find_mpi().kind), nl=False)


@click.command()
@hostfile
@network
@click.option("--job", "job_file", metavar="NAME|FILE", help="What is to be run there.")
@click.option("--out", type=PATH, default="runs", metavar="DIR", help="Where runs go.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=60.0, help="For each host; default 60."
)
@click.pass_context
def doctor(ctx: click.Context, /, job_file: str | None, out: Path, **options: Any) -> None:
    """Check whether hosts are fit to run a job.

    Without a hostfile this machine is checked. Each host is asked through mpirun itself: can it be
    reached, has it the same versions of Python, canal-mpi, torch, MPI and ALE, do the games load,
    does the device work, are there memory and disk for the job, is its clock right, do ranks on
    all hosts reach each other. Exit code 1 if something is wrong, with what to do about it.
    """
    from canal_mpi import envs
    from canal_mpi.config import resolve
    from canal_mpi.launch.doctor import check
    from canal_mpi.launch.hostfile import read_hosts

    hosts = read_hosts(options.pop("hostfile"))
    report = check(envs.named(resolve({}, job_file)), out.absolute(), hosts, **options)
    report.print()
    ctx.exit(int(bool(report.problems)))


COMMANDS = (launch, hosts, doctor)
