"""A small helper process beside a rank that reports its death, and ends a rank that hangs.

Launchers end the other ranks at once when one is killed, and not every launcher says which one it
was. The helper waits on a pipe; when the pipe closes without a goodbye it names the rank. Of
several on one host, only the first to notice speaks: the others were taken down with the job.
A rank that sends no sign of life for too long, or whose launcher is gone, is ended from outside.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil, inf
from pathlib import Path
from threading import Timer
from time import monotonic, sleep

from canal_mpi.errors import ProtocolError
from canal_mpi.launcher import Launcher, detect

MOST = 400  # characters of a text for the helper
TICK = 1.0  # seconds between two looks at the rank and its launcher
GRACE = 5.0  # seconds for a rank to end by itself, once its launcher is gone
INSTANT = 1.0  # seconds for a rank that hangs to end the job; longer only where it holds the GIL
LINGER = 0.7  # seconds for which the first to speak silences the others ...
TAKEDOWN = 20.0  # ... after its launcher has ended them all, which takes long on a busy host

_reporters: list["DeathReporter"] = []  # of this process: one at most


def start_reporter(alone: bool = False) -> "DeathReporter":
    """The reporter of this process; made at the first call.

    `alone`: a process without a launcher gets a helper too, which ends it where it hangs. Nobody
    wants that in a notebook.
    """
    if not _reporters:
        _reporters.append(DeathReporter(detect(), alone))
    return _reporters[0]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """For calls inside which MPI would wait for a silent rank for ever: they end this rank."""

    def end() -> None:
        reporter = start_reporter()
        waited = f"{reporter.who} has waited {seconds:.0f} s for the others inside MPI"
        reporter.tell(words=f"{waited}: one of them hangs.")
        os._exit(ProtocolError.code)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ceil(seconds) + 2)  # MPI_Init lets no thread of Python run
    try:
        yield
    finally:
        timer.cancel()
        signal.alarm(0)


class DeathReporter:
    """The rank's end of the pipe to its helper, if it has one."""

    def __init__(self, launcher: Launcher | None, alone: bool = False) -> None:
        self._job = f"\0canal-mpi-{os.getuid()}-{os.getppid()}" if launcher else ""
        self._claimed: socket.socket | None = None
        self._write, self._dismissed = -1, False
        self.who = f"rank {launcher.rank if launcher else 0} on {socket.gethostname()}"
        if launcher is None and not alone:
            return
        (read, self._write), parent = os.pipe(), os.getppid()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            os.close(self._write)
            Helper(read, self._job, self.who, os.getppid(), parent if launcher else 0).watch()
        os.close(read)
        os.set_inheritable(self._write, False)

    def tell(self, **facts: str | float) -> None:
        """What the helper should know from now on (see `Helper`); every call is a sign of life."""
        short = {name: f[:MOST] if isinstance(f, str) else f for name, f in facts.items()}
        if self._write >= 0:
            try:
                os.write(self._write, json.dumps(short).encode() + b"\n")
            except BrokenPipeError:
                self._write = -1

    def dismiss(self, within: float = inf) -> None:
        """The rank ends in good order; one that has a launcher is killed after `within` seconds."""
        if not self._dismissed:
            self._dismissed = True
            self.tell(words="", over=True, limit=within)

    def mute(self) -> None:
        """What is wrong has been said: the ranks that are taken down now need no report."""
        self.tell(muted=True)
        if self._job:
            sleep(0.1)

    def may_speak(self) -> bool:
        """Whether no other rank of this host has already said what is wrong, or died."""
        if not self._job:
            return True
        self._claimed = self._claimed or _claim(f"{self._job}-speaks")
        death = _claim(self._job)
        if death is not None:
            death.close()
        return self._claimed is not None and death is not None


def _claim(name: str) -> socket.socket | None:
    """A name that one process at a time can hold, until it ends; None if another has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(name)
    except OSError:
        return None
    return claim


def _is_stopped(process: int) -> bool:
    """Whether a process is held by a signal: then it can't move, and need not."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class Helper:
    """The helper process of one rank; without a launcher (0) it only ends one that hangs.

    What `DeathReporter.tell` may set: `words` to say if the rank dies now (none where the reason is
    known), the `limit` of seconds without a call after which the rank is ended (SIGUSR2, then
    SIGKILL), what it is `doing` and a `hint` how to resume, which are said then, and for how long
    the others are silenced, because they are taken down as well (`takedown`).
    """

    def __init__(self, read: int, job: str, who: str, rank: int, launcher: int) -> None:
        self.read, self.job, self.who, self.rank, self.launcher = read, job, who, rank, launcher
        self.words = (
            f"{who} was ended at the start: killed, or after two minutes inside MPI, where it "
            "waited for a rank that hangs."
        )
        self.limit, self.heard, self.doing = inf, monotonic(), "the start"
        self.hint, self.takedown = "", TAKEDOWN
        self.over = self.muted = False  # whether everything is done but leaving, or was said
        self._held = b""
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # every microsecond counts

    def watch(self) -> None:
        """The whole life of the helper; it never returns."""
        os.setsid()
        with suppress(OSError):  # only with rights; it sleeps, and wakes before launchers clean up
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 2)
        kept = sorted((self.read, self._claim.fileno()))
        for low, high in ((3, kept[0]), (kept[0] + 1, kept[1]), (kept[1] + 1, 1024)):
            os.closerange(low, high)  # a launcher's pipes must close when the rank dies
        while True:
            pause = min(TICK, max(self.heard + self.limit - monotonic(), 0.01))
            if not select.select([self.read], [], [], pause)[0]:
                self._check()
            elif data := os.read(self.read, 4096):
                self._hear(data)
            elif self.words and self.launcher:
                self._leave(self.words)
            else:
                os._exit(0)

    def _hear(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        self.heard = monotonic()
        for line in lines:
            facts = json.loads(line)
            vars(self).update(facts)
            if self.muted:
                self._leave("")
            if "over" in facts and (not self.launcher or self.limit == inf):
                os._exit(0)

    def _check(self) -> None:
        """End the rank where it hangs, or where nobody else would: its launcher is gone."""
        silent = monotonic() - self.heard
        if self.launcher and not Path(f"/proc/{self.launcher}").exists():
            self._end(signal.SIGTERM, GRACE)
        elif _is_stopped(self.launcher if self.over else self.rank):
            self.heard = monotonic()
        elif silent > self.limit and self.over:
            self._speak(f"{self.who} has not ended {silent:.0f} s after all was done and saved.")
            self._end(signal.SIGKILL, INSTANT)
        elif silent > self.limit:
            moved = f"{self.who} has not moved for {silent:.0f} s in {self.doing}"
            self._speak(f"{moved}: it hangs.{self.hint}")
            self._end(signal.SIGUSR2, INSTANT)

    def _speak(self, words: str) -> None:
        """Say something, unless another helper on this host already has."""
        try:
            self._claim.bind(self.job)
        except OSError:
            return
        if words:
            os.write(2, f"canal-mpi: {words}\n".encode())
        os.close(2)

    def _leave(self, words: str) -> None:
        """The last word about this rank; it silences the other helpers for a while."""
        self._speak(words)
        self._linger()

    def _end(self, number: int, grace: float) -> None:
        """Ask the rank to end; make it where it does not."""
        deadline = monotonic() + grace
        with suppress(ProcessLookupError):
            os.kill(self.rank, number)
            while (left := deadline - monotonic()) > 0:
                if select.select([self.read], [], [], left)[0] and not os.read(self.read, 4096):
                    break  # it has ended
            else:
                os.kill(self.rank, signal.SIGKILL)
        self._linger()

    def _linger(self) -> None:
        """Keep what was claimed until the others are gone; it never returns."""
        with suppress(OSError):
            os.close(2)  # launchers wait for its end
        deadline = monotonic() + self.takedown
        while self.launcher and Path(f"/proc/{self.launcher}").exists() and monotonic() < deadline:
            sleep(0.05)
        sleep(LINGER)
        os._exit(0)
