"""Commands of the command line, a file a group, and options that several of them have.

Each loads what it needs when it is called.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from canal_mpi.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)

FLAGS = {  # option of train: its setting and its help
    "--preset": ("preset", "Settings to start from: canal is the original's learner."),
    "--seed": ("seed", "The same seed gives bit-identical results."),
    "--steps": ("train.steps", "Agent steps on each task (not emulator frames)."),
    "--tasks": ("tasks", "Games or gymnasium ids, separated by commas."),
    "--order": ("order", "canal, rotate, random, same, or module:function."),
    "--share": ("share.policy", "Lessons agents take: exact, none, previous, all, simnet …"),
    "--reuse": ("reuse.mode", "How a lesson is used: distill, mix, replay, or adopt."),
    "--topology": ("share.topology", "Who hears whom; `canal-mpi topology --help` names them."),
    "--exchange": ("share.exchange", "rounds: in step, reproducible; free: agents never wait."),
    "--lessons": ("share.lessons", "Offer the lessons of an earlier run too."),
    "--init": ("init", "Start from the learners of an earlier run's agents."),
    "--envs-per-agent": ("train.num_envs", "Environments that an agent plays at once."),
    "--obs": ("task.obs", "What agents see of Atari games: ram or pixels."),
    "--track": ("track", "Feed tensorboard, wandb or prometheus while it runs."),
    "--variant": ("task.variant", "fs4 (no-op starts, actions repeated 4 times) or orig."),
}
ALIASES = {"--steps": ("--frames",)}
FLAG_KEYS = {flag[2:].replace("-", "_"): key for flag, (key, _) in FLAGS.items()}


def options(*several: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Gives a command these options, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(several):
            command = option(command)
        return command

    return decorate


def path_option(name: str, metavar: str, about: str, **more: Any) -> Callable[[Command], Command]:
    """An option that names a file or folder."""
    return click.option(name, type=PATH, metavar=metavar, help=about, **more)


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """A length of time such as 90s, 20m or 2h; plain numbers are seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not found or float(found[1]) == 0:
        raise UsageError(f"--max-time {text}: expected a time such as 90s, 20m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


max_time = click.option(
    "--max-time",
    metavar="TIME",
    callback=_seconds,
    help="Save and stop after so long, as in 90s, 20m, 2h.",
)
network = click.option(
    "--network", metavar="NET", help="How hosts reach each other: 10.0.0.0/24, or eth0."
)
job_options = options(
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
)


def flags_of(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given as options."""
    found = {key: given[name] for name, key in FLAG_KEYS.items() if given[name] is not None}
    return found | dict(parse_assignment(text) for text in given["assignments"])


def parse_assignment(text: str) -> tuple[str, Any]:
    """`learn.lr=0.001` as key and value."""
    from canal_mpi.config import parse_value

    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: expected section.key=value, as in learn.lr=0.001.")
    return key.strip(), parse_value(value.strip())


def typed_options() -> dict[str, str]:
    """The parameters that were typed, each with the option as its help shows it."""
    context = click.get_current_context()
    typed = ParameterSource.COMMANDLINE
    return {
        str(part.name): part.opts[0] if isinstance(part, click.Option) else str(part.metavar)
        for part in context.command.params
        if context.get_parameter_source(str(part.name)) is typed
    }
