"""The help of `canal-mpi`: commands in groups, in the order in which one meets them."""

import click

GROUPS = {
    "Run": ("train", "launch", "evaluate", "config"),
    "Look": ("watch", "ls", "report", "inspect", "export", "topology"),
    "Compare": ("sweep", "study", "bench"),
    "Clusters": ("doctor", "hosts"),
}


class Grouped(click.Group):
    """Lists its commands by group; those of no group come last."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help."""
        told = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in self.commands if name not in told)
        for title, names in (GROUPS | {"Others": others}).items():
            here = [(name, self.commands[name]) for name in names if name in self.commands]
            if here:
                width = formatter.width - 16
                rows = [(name, command.get_short_help_str(width)) for name, command in here]
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=12)
