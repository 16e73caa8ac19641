"""`canal-mpi bench train`, `learn`, `exchange` and `all`."""

from typing import Any

import click

GAME = click.option("--game", default="RoadRunner", show_default=True, help="What is played.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
STEPS = click.option("--steps", type=click.IntRange(1), default=100, help="Of a block; 100.")
REPEATS = click.option("--repeats", type=click.IntRange(2), default=15, help="Blocks; 15.")


@click.command()
@GAME
@STEPS
@REPEATS
@AS_JSON
def train(game: str, steps: int, repeats: int, as_json: bool) -> None:
    """The training loop against its floor, per second of one core.

    The floor is the emulator's bare `act` and the bare matrix products of an update; blocks of
    all of them take turns. Steps are the agent's; a step is several frames of the emulator.
    """
    from canal_mpi.bench import train as part
    from canal_mpi.bench.tell import report

    found = part.train(game, part.Size(steps, repeats))
    click.echo(report(f"training on {game}, {repeats} blocks of {steps} steps", found, as_json))


@click.command()
@GAME
@STEPS
@REPEATS
@AS_JSON
def learn(game: str, steps: int, repeats: int, as_json: bool) -> None:
    """The learner alone: where the time of an update goes."""
    from canal_mpi.bench import train as part
    from canal_mpi.bench.tell import report

    found = part.learn(game, part.Size(steps, repeats))
    click.echo(report(f"the learner, {repeats} blocks of {steps} updates", found, as_json))


@click.command()
@click.option("--ranks", type=click.IntRange(2), default=5, show_default=True)
@AS_JSON
@click.pass_context
def exchange(ctx: click.Context, /, ranks: int, as_json: bool) -> None:
    """Lessons among ranks of this machine: seconds and bytes a second, by topology.

    Starts its own ranks where no launcher did.
    """
    from canal_mpi.bench import exchange as part

    ctx.exit(part.run(ranks, as_json))


@click.command("all")
@GAME
@AS_JSON
@click.pass_context
def everything(ctx: click.Context, /, game: str, as_json: bool) -> None:
    """Everything: training, learner, memory, logging, start-up, several ranks, lessons.

    Takes some minutes; nothing else should run meanwhile.
    """
    from canal_mpi.bench import costs, lesson
    from canal_mpi.bench import train as part
    from canal_mpi.bench.tell import report

    def tell(title: str, figures: Any) -> None:
        click.echo(report(title, figures, as_json))

    tell(f"training on {game}", part.train(game, part.Size()))
    tell("the learner", part.learn(game, part.Size()))
    tell("memory and growth", costs.growth(game))
    tell("logging", costs.logging())
    tell("start-up", costs.start_up())
    tell(f"several agents on {game}", costs.scaling(game))
    rows = lesson.played(game, 20_000)
    click.echo("\n".join(lesson.report(game, "of random play", lesson.measure(game, rows))))
    ctx.invoke(exchange, ranks=5, as_json=as_json)
