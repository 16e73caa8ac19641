"""Python in place of the command line: `canal_mpi.train` and `canal_mpi.evaluate`.

Without mpirun they run one agent in this process, errors are exceptions, and the process goes on
as it was. As a rank under mpirun, a script behaves as the command does: errors print one line and
end it with the exit code.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from canal_mpi.commands import FLAG_KEYS
from canal_mpi.errors import Stopped, UsageError, close_log, suggestion
from canal_mpi.evaluation import EvaluationRequest, evaluate_rank
from canal_mpi.interfaces import Columns
from canal_mpi.launcher import detect
from canal_mpi.rank.plan import Request
from canal_mpi.rank.shutdown import Shutdown, run_guarded, stop_signals
from canal_mpi.rank.train import train_rank
from canal_mpi.rank.world import World
from canal_mpi.results.files import release_locks
from canal_mpi.results.reader import Run, load
from canal_mpi.results.store import decoded

T = TypeVar("T")
SIGNALS = (*stop_signals.NUMBERS, signal.SIGUSR2)  # that a run listens to
PathLike = str | Path


def train(
    job: PathLike | None = None,
    *,
    out: PathLike | None = None,
    name: str | None = None,
    force: bool = False,
    agent: int | None = None,
    resume: PathLike | None = None,
    env_servers: int = 0,
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run | None:
    """Train the agents of a job and return the run; None on other ranks than the first.

    `job` is a named job or a TOML file. `options` are those of `canal-mpi train` that name
    settings (steps, tasks, seed, share, topology …); `settings` reaches all others by their dotted
    names, as in {"learn.lr": 1e-3}. Modules and gymnasium ids of this program can be named.
    """
    if unknown := options.keys() - FLAG_KEYS.keys():
        word = min(unknown)
        hint = suggestion(word, FLAG_KEYS) or "; settings={'section.key': value} reaches every one."
        raise UsageError(f"train() knows no '{word}'{hint}")
    given = {"job": job, "out": out, "name": name, "force": force or None, "agent": agent}
    if resume and (odd := [key for key, value in given.items() if value is not None]):
        raise UsageError(f"resume takes everything from the run: leave out {odd[0]}.")
    request = Request(
        flags={FLAG_KEYS[key]: value for key, value in options.items()} | dict(settings or {}),
        job_file=_text(job),
        out=_text(out),
        name=name,
        force=force,
        agent=agent,
        env_servers=env_servers,
        verbosity=-1 if quiet else 0,
        resume=_text(resume),
    )
    folder = _run(partial(train_rank, request))
    launcher = detect()
    return load(folder) if launcher is None or launcher.rank == 0 else None


def evaluate(
    run: PathLike | Run,
    *,
    agents: Sequence[int] = (),
    tasks: Sequence[str] = (),
    episodes: int = 20,
    max_steps: int | None = None,
    video: bool = False,
    out: PathLike | None = None,
    trust: bool = True,
    tag: str = "latest",
) -> Columns:
    """Let agents of a run play again; the columns of all episodes (empty on ranks but the first).

    Without `agents` or `tasks`: all of them. `trust` imports modules that the run's job names. The
    tag `best` plays each task by the network that scored best after it.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    to = None if out is None else Path(out)
    request = EvaluationRequest(
        folder, agents, tasks, episodes, max_steps, video, out=to, trust=trust, tag=tag
    )
    columns = _run(partial(evaluate_rank, request))
    return {column: decoded(values) for column, values in columns.items()}


def _text(path: PathLike | None) -> str | None:
    return None if path is None else str(path)


def _run(program: Callable[[Shutdown], T]) -> T:
    """Run a program on this rank: as the command does under mpirun, else for a caller."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("train() and evaluate() listen to signals: call them in the main thread.")
    if detect() is None:
        with _undone():
            shutdown = Shutdown(World(None), monotonic())
            stop_signals.listen()
            try:
                return program(shutdown)
            except Stopped as error:
                shutdown.stop()
                raise Stopped(f"stopped; everything is saved.{shutdown.hint}") from error
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_finalized():
        raise UsageError("under mpirun a script can call train() or evaluate() once.")
    found: list[T] = []
    if code := run_guarded(lambda shutdown: found.append(program(shutdown))):
        sys.exit(code)
    return found[0]


@contextmanager
def _undone() -> Iterator[None]:
    """Leave the process as it was: its signal handlers, no log file, no folder locked."""
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        stop_signals.forget()
        close_log()
        release_locks()
