"""`canal-mpi bench`."""

import click


@click.command()
@click.argument("parts", nargs=-1, metavar="[train|env|learn|lesson|exchange]...")
@click.option("--task", default="RoadRunner", show_default=True, help="What is played.")
@click.option("--repeats", type=click.IntRange(2), default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def bench(parts: tuple[str, ...], task: str, repeats: int, as_json: bool) -> None:
    """Measure how fast this machine is: all parts, or those named.

    train: steps of a real run; env: steps of the environment alone; learn: an update against its
    bare matrix products; lesson: size and packing; exchange: messages between two ranks. Takes
    about a minute; nothing else should run meanwhile.
    """
    from canal_mpi import bench as benches
    from canal_mpi import envs
    from canal_mpi.errors import UsageError

    if unknown := [part for part in parts if part not in benches.PARTS]:
        raise UsageError(f"bench {unknown[0]}: expected some of {', '.join(benches.PARTS)}.")
    name = envs.canonical(task)
    found = benches.measure(parts or list(benches.PARTS), name, repeats)
    click.echo(benches.report(name, found, as_json))
