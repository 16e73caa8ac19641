"""A small helper process beside a rank that reports its death if it dies without a word.

Launchers end the other ranks at once when one is killed, and not every launcher says which one it
was. The helper waits on a pipe; when the pipe closes without a goodbye it names the rank. Of
several on one host, only the first to notice speaks: the others were taken down with the job.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from functools import cache
from time import sleep

from canal_mpi.launcher import Launcher, detect

GOODBYE, MUTE = b"goodbye", b"mute"
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
        read, self._write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            os.close(self._write)
            who = f"rank {launcher.rank} on {socket.gethostname()}"
            _watch(read, self._job, f"{who} was ended at the start, without a word.".encode())
        os.close(read)
        os.set_inheritable(self._write, False)

    def set_message(self, message: str) -> None:
        """What to say if the rank dies now."""
        self._send(message.encode()[:400])

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


def _watch(read: int, job: str, words: bytes) -> None:
    """The helper's whole life; it never returns."""
    os.setsid()
    with suppress(OSError):  # only with rights; it sleeps, and wakes before the launcher cleans up
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 2)
    os.closerange(3, read)
    os.closerange(read + 1, 1024)  # a launcher's pipes must close when the rank dies
    held, first = b"", socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # every microsecond counts
    while words != MUTE and (data := os.read(read, 4096)):
        *lines, held = (held + data).split(b"\n")
        words = lines[-1] if lines else words
        if words == GOODBYE:
            os._exit(0)
    try:
        first.bind(job)
    except OSError:
        os._exit(0)
    if words != MUTE:
        os.write(2, b"canal-mpi: " + words + b"\n")
    os.close(2)
    sleep(LINGER)
    os._exit(0)
