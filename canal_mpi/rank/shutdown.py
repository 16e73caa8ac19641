"""How a run ends other than by being done: signals, stopped in good order, interrupted, broken.

Imports little: the program listens for signals before it loads anything that takes time.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from canal_mpi.errors import (
    CanalError,
    ProtocolError,
    RankFailed,
    Stopped,
    StorageError,
    described,
    logger,
)
from canal_mpi.launcher import STARTED, detect

if TYPE_CHECKING:
    from canal_mpi.rank.world import World

INTERRUPTED = 130
GRACE = 3.0  # seconds in which the others save, once a rank has been silent for too long
DEFERENCE = 0.3  # seconds: MPI fails where another rank died, whose reporter may speak first


class CommonError(CanalError):
    """Trouble that every rank knows of; rank 0 reports it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class StopSignals:
    """Signals that ask a run to stop: the first one politely, the second one at once.

    SIGUSR1 always asks politely: it is what batch systems send before they take the machine away,
    and the one signal that every launcher passes on and nobody kills for.
    """

    NUMBERS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = ""  # the first signal that came
        self._urgent = False  # a checkpoint is wanted at once: the launcher may kill very soon
        self._can_wait = False  # whether there is something that can be stopped politely
        self._on_urgent: Callable[[str], None] = lambda name: None

    def listen(self) -> None:
        """Take note of signals from now on; before a run begins they end the program."""
        for number in self.NUMBERS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def forget(self) -> None:
        """The run is over, and another one may follow in this process."""
        self.asked, self._urgent, self._can_wait = "", False, False

    def ignore(self) -> None:
        """The end has begun: a launcher that cleans up must not start another one."""
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def defer(self, on_urgent: Callable[[str], None] = lambda name: None) -> None:
        """From now on the first signal only asks; `on_urgent` is told inside the handler."""
        self._can_wait, self._on_urgent = True, on_urgent

    def end_at_once(self) -> None:
        """From now on signals end the program again."""
        self._can_wait = False

    def take_urgent(self) -> bool:
        """Whether a checkpoint is wanted at once; true once."""
        wanted, self._urgent = self._urgent, False
        return wanted

    def _note(self, number: int, frame: Any) -> None:
        name, first = signal.Signals(number).name, not self.asked
        if number != signal.SIGUSR1 and not (self._can_wait and first):
            raise KeyboardInterrupt
        self.asked = self.asked or name
        if number != signal.SIGUSR1:
            self._urgent = True
            self._on_urgent(name)


stop_signals = StopSignals()  # a process has one set of handlers


def print_error(message: str) -> None:
    """One line for the user, unless the terminal is gone."""
    with suppress(OSError):
        if message:
            print(f"canal-mpi: {message}", file=sys.stderr, flush=True)


class Shutdown:
    """Ends a run early: in good order where everybody can save, with one line in any case."""

    def __init__(self, world: "World", started: float = STARTED) -> None:
        self.world, self.started = world, started
        self.hint = ""  # how to resume, once there is something to resume
        self._mark: Callable[[str, str], None] = lambda status, why: None

    def allow(self, command: str, limit: float | None, mark: Callable[[str, str], None]) -> None:
        """From here on the run may be stopped; after `limit` seconds it will be.

        `mark(status, why)` writes into the files of the run that it is not over.
        """
        self.hint, self._mark = f" To go on: {command}", mark
        self.world.death_reporter.tell(hint=self.hint)
        self.world.heartbeat.allow_stop(inf if limit is None else self.started + limit)
        stop_signals.defer(self._on_urgent)

    def forbid(self) -> None:
        """The end is near: nothing can be stopped any more."""
        self.world.heartbeat.may_stop = False
        stop_signals.end_at_once()

    def _on_urgent(self, name: str) -> None:
        """Ctrl-C or SIGTERM: say so now, for the launcher may leave us half a second."""
        if self.world.is_root and self.world.death_reporter.may_speak():
            print_error(f"{name}: saving; again to stop at once.{self.hint}")
        self.world.death_reporter.tell(words="")

    def stop(self) -> int:
        """Everybody has saved: say how to resume, and leave together."""
        world, heartbeat = self.world, self.world.heartbeat
        self.forbid()
        stop_signals.ignore()
        heartbeat.mine.phase = "stopped"
        if heartbeat.silence:
            return self._end_in_silence()
        try:
            world.all_stopped()
        except Exception as error:
            if not world.has_failed(error):
                raise  # else: somebody died after it had saved
        if world.is_root:
            self._mark_files("stopped", heartbeat.stop_reason)
            print_error(f"stopped: {heartbeat.stop_reason}; everything is saved.{self.hint}")
        (world.abort if world.failed else world.stop)(Stopped.code)
        return Stopped.code

    def _end_in_silence(self) -> int:
        """A rank is silent for too long: the others save what they have, then the job ends."""
        heartbeat, deadline = self.world.heartbeat, monotonic() + GRACE
        while heartbeat.others_work() and monotonic() < deadline:
            heartbeat.beat(heartbeat.mine)
            sleep(0.05)
        saved = "What was saved is safe."
        if self.world.is_root:
            self._mark_files("failed", heartbeat.silence)
            saved = saved if heartbeat.others_work() else "The others saved."
        return self.fail(f"{heartbeat.silence}. {saved}", ProtocolError.code)

    def _mark_files(self, status: str, why: str) -> None:
        try:
            self._mark(status, why)
        except (StorageError, OSError) as error:
            logger.warning("%s", error)

    def end_together(self, error: CommonError) -> int:
        """Every rank knows what is wrong; rank 0 says it before the first of the others leaves."""
        stop_signals.ignore()
        if self.world.is_root:
            print_error(str(error))
        else:
            sleep(0.5)
        self.world.death_reporter.mute()
        return error.code

    def interrupt(self) -> int:
        """Stopped at once: rank 0 says so, unless the job is taken down for another reason."""
        stop_signals.ignore()
        if self.world.is_root and self.world.death_reporter.may_speak():
            print_error(f"interrupted; what was saved is safe.{self.hint}")
        self.world.abort(INTERRUPTED)
        return INTERRUPTED

    def fail(self, message: str, code: int, survivable: bool = False) -> int:
        """One rank's trouble ends them all; with --ft, where that helps, only this one."""
        world = self.world
        dies_alone = survivable and world.ft and len(world.alive) > 1
        stop_signals.ignore()
        logger.error("%s", message)
        if dies_alone or world.death_reporter.may_speak():
            print_error(f"{message}{self.hint}")
        if dies_alone:
            world.death_reporter.mute()
            os.kill(os.getpid(), signal.SIGKILL)  # only a death by signal is noticed
        world.abort(code)
        return code


def run_guarded(program: Callable[[Shutdown], object], verbosity: int = 0) -> int:
    """Run a program on this rank of the world; errors print one line and give an exit code."""
    from canal_mpi.rank.world import World, open_mpi

    launcher = detect()
    shutdown = Shutdown(World(launcher))  # speaks for this rank until MPI is there
    stop_signals.listen()
    try:
        try:
            if launcher:
                shutdown = Shutdown(World(launcher, open_mpi(launcher)))
            program(shutdown)
            code = 0
        except Stopped:
            code = shutdown.stop()
    except CommonError as error:
        if verbosity > 0 and isinstance(error.__cause__, RankFailed):
            traceback.print_exception(error.__cause__)
        code = shutdown.end_together(error)
    except KeyboardInterrupt:
        code = shutdown.interrupt()
    except (Exception, SystemExit) as error:
        code = _report(shutdown, error, verbosity)
    world = shutdown.world
    if world.ft and (world.failed or world.shrank or not code):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # MPI_Finalize would wait for the dead, also for those that die inside it
    return code


def _report(shutdown: Shutdown, error: BaseException, verbosity: int) -> int:
    """Say who failed in which way, and where the traceback is."""
    who = shutdown.world.describe()
    logger.error("%s", "".join(traceback.format_exception(error)))
    if verbosity > 0:
        traceback.print_exception(error)
    if isinstance(error, CanalError):
        others_share_it = isinstance(error, StorageError)  # the disk
        return shutdown.fail(f"{who}: {error}", error.code, survivable=not others_share_it)
    if type(error).__module__.startswith("mpi4py"):
        sleep(DEFERENCE)
    files = [h.baseFilename for h in logger.handlers if isinstance(h, logging.FileHandler)]
    where = f"the traceback is in {files[0]}." if files else "-v shows the traceback."
    message = f"{who} failed: {described(error)}; {where}"
    return shutdown.fail(message, RankFailed.code, survivable=True)
