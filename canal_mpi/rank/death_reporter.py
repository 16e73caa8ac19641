"""A small helper process beside a rank that reports its death, and ends a rank that hangs.

Launchers end the other ranks at once when one is killed, and not every launcher says which one it
was. The helper waits on a pipe; when the pipe closes without a goodbye it names the rank. Of
several on one host, only the first to notice speaks: the others were taken down with the job.
A rank that sends no sign of life for too long, or whose launcher is gone, is ended from outside.
"""

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from time import monotonic, sleep

from canal_mpi.launcher import Launcher, detect

GOODBYE, MUTE, LIMIT, ALIVE = b"goodbye", b"mute", b"limit ", b"alive "
TICK = 1.0  # seconds between two looks at the rank and its launcher
GRACE = 5.0  # seconds for a rank to end by itself, once its launcher is gone or it was told to
LINGER = 0.7  # seconds for which the first to speak silences the others


@cache
def start_reporter() -> "DeathReporter":
    """The reporter of this process; made at the first call."""
    return DeathReporter(detect())


class DeathReporter:
    """The rank's end of the pipe; without a launcher there is no helper and nothing to report."""

    def __init__(self, launcher: Launcher | None) -> None:
        self._job = f"\0canal-mpi-{os.getuid()}-{os.getppid()}" if launcher else ""
        self._claimed: socket.socket | None = None
        self._write = -1
        if launcher is None:
            return
        (read, self._write), launcher_process = os.pipe(), os.getppid()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            os.close(self._write)
            who = f"rank {launcher.rank} on {socket.gethostname()}"
            Helper(read, self._job, who, os.getppid(), launcher_process).watch()
        os.close(read)
        os.set_inheritable(self._write, False)

    def set_message(self, message: str) -> None:
        """What to say if the rank dies now."""
        self._send(message.encode()[:400])

    def set_limit(self, seconds: float) -> None:
        """End the rank (SIGUSR2, then SIGKILL) when `alive` was not called for so long."""
        self._send(LIMIT + repr(seconds).encode())

    def alive(self, doing: str) -> None:
        """The rank has moved; what it does now."""
        self._send(ALIVE + doing.encode()[:100])

    def dismiss(self) -> None:
        """The rank ends in good order: from here on its silence means nothing."""
        self._send(GOODBYE)

    def mute(self) -> None:
        """What is wrong has been said: the ranks that are taken down now need no report."""
        self._send(MUTE)
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

    def _send(self, words: bytes) -> None:
        if self._write >= 0:
            try:
                os.write(self._write, words + b"\n")
            except BrokenPipeError:
                self._write = -1


def _claim(name: str) -> socket.socket | None:
    """A name that one process at a time can hold, until it ends; None if another has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(name)
    except OSError:
        return None
    return claim


class Helper:
    """The helper process of one rank."""

    def __init__(self, read: int, job: str, who: str, rank: int, launcher: int) -> None:
        self.read, self.job, self.who, self.rank, self.launcher = read, job, who, rank, launcher
        self.words = f"{who} was ended at the start, without a word.".encode()
        self.limit, self.heard, self.doing = inf, monotonic(), "the start"
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
        while self.words != MUTE:
            if not select.select([self.read], [], [], TICK)[0]:
                self._check()
            elif data := os.read(self.read, 4096):
                self._hear(data)
            else:
                break
        self._speak(self.words)
        sleep(LINGER)
        os._exit(0)

    def _hear(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        self.heard = monotonic()
        for line in lines:
            if line == GOODBYE:
                os._exit(0)
            elif line.startswith(LIMIT):
                self.limit = float(line.removeprefix(LIMIT))
            elif line.startswith(ALIVE):
                self.doing = line.removeprefix(ALIVE).decode(errors="replace")
            else:
                self.words = line

    def _check(self) -> None:
        """End the rank where it hangs, or where nobody else would: its launcher is gone."""
        silent = monotonic() - self.heard
        if not Path(f"/proc/{self.launcher}").exists():
            self._end(signal.SIGTERM)
        elif silent > self.limit and not self._is_stopped():
            words = f"{self.who} has not moved for {silent:.0f} s in {self.doing}: it hangs."
            self._speak(words.encode())
            self._end(signal.SIGUSR2)

    def _is_stopped(self) -> bool:
        """Whether the rank is held by a signal: then it can't move, and need not."""
        with suppress(OSError):
            return Path(f"/proc/{self.rank}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def _speak(self, words: bytes) -> None:
        """Say something, unless another helper on this host already has."""
        try:
            self._claim.bind(self.job)
        except OSError:
            return
        if words != MUTE:
            os.write(2, b"canal-mpi: " + words + b"\n")
        os.close(2)

    def _end(self, number: int) -> None:
        """Ask the rank to end; make it where it does not."""
        deadline = monotonic() + GRACE
        with suppress(ProcessLookupError):
            os.kill(self.rank, number)
            while (left := deadline - monotonic()) > 0:
                if select.select([self.read], [], [], left)[0] and not os.read(self.read, 4096):
                    break  # it has ended
            else:
                os.kill(self.rank, signal.SIGKILL)
        sleep(LINGER)
        os._exit(0)
