"""How a run ends other than by being done: stopped politely, interrupted, or broken."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from math import inf
from time import monotonic, sleep

from canal_mpi.errors import ProtocolError, RankFailed, Stopped
from canal_mpi.log import logger
from canal_mpi.rank import signals
from canal_mpi.rank.launcher import STARTED
from canal_mpi.rank.world import World

INTERRUPTED = 130
GRACE = 15.0  # seconds in which the others save, once a rank has been silent for too long


def who(world: World) -> str:
    """The rank and what it is doing, for a message."""
    p = world.watch.mine
    where = f" in round {p.round} ({p.phase} {p.task})" if p.round else ""
    name = "env server" if world.serves else f"agent {world.agent}"
    return f"{name} ({world.place}){where}"


def complain(message: str, code: int) -> int:
    """Say what is wrong; the code is handed through."""
    if message:
        print(f"canal-mpi: {message}", file=sys.stderr, flush=True)
    return code


def end_together(world: World, message: str, code: int) -> int:
    """Every rank knows what is wrong; rank 0 says it before the first of the others leaves."""
    signals.ignore()
    if world.leads:
        complain(message, code)
    else:
        sleep(0.5)
    world.hush()
    return code


def interrupted(world: World, hint: str) -> int:
    """Stopped at once: rank 0 says so, unless the job is being taken down for another reason."""
    signals.ignore()
    if world.leads and (world.witness is None or world.witness.may_speak()):
        complain(f"interrupted; what was saved is safe.{hint}", INTERRUPTED)
    world.abort(INTERRUPTED)
    return INTERRUPTED


def log_hint() -> str:
    """Where the traceback is, once there is a log."""
    files = [h.baseFilename for h in logger.handlers if isinstance(h, logging.FileHandler)]
    return f"; the traceback is in {files[0]}." if files else "; -v shows the traceback."


def fall(world: World, message: str, code: int) -> int:
    """One rank's trouble: with --ft the others go on, else it ends them all."""
    if not world.ft or len(world.alive) == 1:
        return fail(world, message, code)
    signals.ignore()
    logger.error("%s", message)
    complain(message, code)
    world.hush()
    os.kill(os.getpid(), signal.SIGKILL)  # only a death by signal is noticed
    return code


def fail(world: World, message: str, code: int) -> int:
    """One rank's trouble ends them all."""
    signals.ignore()
    logger.error("%s", message)
    if world.witness is None or world.witness.may_speak():
        complain(message, code)
    world.abort(code)
    return code


class Stopping:
    """Ends a run early, in good order: everybody has saved, and rank 0 says how to go on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hint = ""  # how to go on, once there is something to go on with
        self.code = Stopped.code
        self.mark: Callable[[str, str], None] = lambda status, why: None  # for the files

    def allow(self, command: str, limit: float | None) -> None:
        """From here on the run may be stopped; after `limit` seconds it will be."""
        if self.code == Stopped.code:
            self.hint = f" To go on: {command}"
        self.world.watch.may_stop = signals.may_wait = True
        self.world.watch.end_by = inf if limit is None else STARTED + limit
        signals.on_hurry = self._hurry

    def cant_resume(self) -> None:
        """Agents have died and the others went on: there is no way back to all of them."""
        self.hint = (
            " It went on without agents that died, so it can't be resumed; --lessons can use it."
        )
        self.code = RankFailed.code

    def forbid(self) -> None:
        """The end is near: nothing can be stopped any more."""
        self.world.watch.may_stop = signals.may_wait = False

    def _hurry(self, name: str) -> None:
        """Ctrl-C or SIGTERM: say so now, for the launcher may leave us half a second."""
        world = self.world
        if world.leads and (world.witness is None or world.witness.may_speak()):
            complain(f"{name}: saving; again to stop at once.{self.hint}", 0)
        world.leave()

    def leave(self) -> int:
        """Everybody has saved: say how to go on, and leave together."""
        world, watch = self.world, self.world.watch
        self.forbid()
        signals.ignore()
        watch.mine.phase = "stopped"
        if watch.silence:
            return self._end_in_silence()
        try:
            world.everybody_stopped()
        except Exception as error:
            if not world.has_fallen(error):
                raise  # else: somebody died after it had saved
        if world.leads:
            self.mark("stopped", watch.wish)
            complain(f"stopped: {watch.wish}; everything is saved.{self.hint}", self.code)
        (world.abort if world.fallen else world.stop)(self.code)
        return self.code

    def _end_in_silence(self) -> int:
        """A rank is silent for too long: the others save what they have, then the job ends."""
        watch, deadline = self.world.watch, monotonic() + GRACE
        while watch.others_work() and monotonic() < deadline:
            watch.beat(watch.mine)
            sleep(0.05)
        if self.world.leads:
            self.mark("failed", watch.silence)
        words = f"{watch.silence}. The others saved.{self.hint}"
        return fail(self.world, words, ProtocolError.code)
