"""The command line: `train` and `config`; the other commands are in commands/.

Each loads what it needs when it is called: help loads neither numpy nor torch nor MPI.
"""

import os
import shlex
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from canal_mpi import __version__, commands
from canal_mpi.commands import clusters, experiments, look
from canal_mpi.errors import CanalError, StorageError, UsageError
from canal_mpi.launcher import detect

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: one thread per rank
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")  # it ends with an ESC[0m

# Parameters that a Request takes as they were typed.
AS_TYPED = ("job_file", "out", "name", "force", "agent", "resume", "max_time", "ft")
NOT_WITH_RESUME = ("job_file", "out", "name", "agent", "emulate")
COMMANDS = {  # as the help lists them
    "Run": ("train", "launch", "evaluate", "config"),
    "Look": ("watch", "ls", "report", "inspect", "export", "topology"),
    "Compare": ("compare", "sweep", "study", "bench"),
    "Clusters": ("doctor", "hosts"),
}


class GroupedCommands(click.Group):
    """Lists its commands in groups, in the order in which one meets them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help."""
        for title, names in COMMANDS.items():
            width = formatter.width - 16
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=12)


def install_completion(context: click.Context, option: click.Parameter, shell: str | None) -> None:
    """Let a shell complete commands, options and their values from its next start on."""
    if shell is None:
        return
    from click.shell_completion import get_completion_class

    from canal_mpi.results.files import write_whole

    shell = Path(os.environ.get("SHELL", "")).name if shell == "auto" else shell
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"--install-completion: found '{shell}'; expected bash, zsh or fish.")
    script = kind(context.command, {}, "canal-mpi", "_CANAL_MPI_COMPLETE").source()
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = settings / "canal-mpi" / f"completion.{shell}"
    if shell == "fish":  # it reads every file of this folder
        path = settings / "fish" / "completions" / "canal-mpi.fish"
    write_whole(path, script.encode())
    start, line = Path.home() / f".{shell}rc", f". {shlex.quote(str(path))}"
    before = start.read_text() if start.exists() else ""
    if shell != "fish" and line not in before.splitlines():
        with start.open("a") as file:
            file.write(f"\n{line}\n")
    click.echo(f"{shell} completes canal-mpi from its next start on ({path}).")
    context.exit()


@click.group(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="canal-mpi")
@click.option(
    "--install-completion",
    metavar="[bash|zsh|fish]",
    is_flag=False,
    flag_value="auto",
    is_eager=True,
    expose_value=False,
    callback=install_completion,
    help="Let your shell complete commands and options.",
)
def cli() -> None:
    """Lifelong reinforcement learning agents that share what they learnt, on MPI.

    Start five agents with `mpirun -np 5 canal-mpi train --job quick`.

    Exit codes: 0 done, 1 doctor or inspect found something, 2 usage, 65 damaged data, 70 a rank
    failed, 73 run directory in use, 74 input or output, 75 stopped and resumable, 76 a rank hung
    or broke the protocol, 78 ranks or jobs differ, 130 interrupted.
    """


@cli.command()
@commands.job_options
@click.option("--out", metavar="DIR", help="Where the run goes; must not hold a run yet.")
@click.option("--name", help="Name of the run, under runs/; default: job and time.")
@click.option(
    "--force", is_flag=True, help="Replace a run; with --resume: go on with fewer agents."
)
@click.option("--agent", type=click.IntRange(0, 4095), help="Without mpirun: be agent K.")
@click.option("--resume", metavar="RUN", help="Resume a run that stopped early.")
@commands.max_time
@click.option("--ft", is_flag=True, help="Continue without ranks that die (mpirun --with-ft ulfm).")
@click.option("--env-server", is_flag=True, help="The last rank runs all environments, no agent.")
@click.option("--env-servers", type=int, metavar="N", help="The last N ranks do.")
@click.option("--emulate", metavar="FILE", help="Play the hosts of a hostfile, slow ones slowly.")
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

    typed = commands.typed_options()
    if empty := [option for name, option in typed.items() if options[name] == ""]:
        raise UsageError(f"{empty[0]} can't be empty.")
    ignored = [option for name, option in typed.items() if name in NOT_WITH_RESUME]
    if options["resume"] and ignored:
        raise UsageError(f"--resume takes everything from the run: leave out {ignored[0]}.")
    flags = commands.flags_of(options)
    servers = options["env_servers"] or int(options["env_server"])
    if options["emulate"] is not None:
        hosts = read_hosts(Path(options["emulate"]))
        flags["emulate"] = emulated(hosts)
        servers = servers or total(hosts, serving=True)
    request = Request(
        flags=flags,
        env_servers=servers,
        verbosity=-1 if options["quiet"] else int(options["verbose"]),
        **{name: options[name] for name in AS_TYPED},
    )
    ctx.exit(train(request))


@cli.command()
@commands.job_options
@click.option("--list-tasks", is_flag=True, help="List every Atari game and gymnasium id.")
def config(list_tasks: bool, **options: Any) -> None:
    """Print a job with all its settings, as TOML.

    It is what options, environment and files make together; --job takes it again. Flags win over
    environment variables (CANAL_SEED, CANAL_LEARN_LR, …), those over the job file, that over the
    preset, that over the defaults.
    """
    from canal_mpi import envs
    from canal_mpi.config import resolve, to_toml

    if list_tasks:
        click.echo("\n".join(envs.known()))
        return
    job = envs.named(resolve(commands.flags_of(options), options["job_file"]))
    click.echo(to_toml(job, explain=True), nl=False)


for group in (look, experiments, clusters):
    for command in group.COMMANDS:
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
