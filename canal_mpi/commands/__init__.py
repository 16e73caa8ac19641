"""Commands of the command line, a file a group; each loads what it needs when it is called."""

import click
from click.core import ParameterSource


def typed_options() -> dict[str, str]:
    """The parameters that were typed, each with the option as its help shows it."""
    context = click.get_current_context()
    typed = ParameterSource.COMMANDLINE
    return {
        str(part.name): part.opts[0] if isinstance(part, click.Option) else str(part.metavar)
        for part in context.command.params
        if context.get_parameter_source(str(part.name)) is typed
    }
