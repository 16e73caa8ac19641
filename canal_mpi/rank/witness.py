"""A small helper process beside a rank that speaks up if the rank dies without a word.

Launchers end the other ranks at once when one is killed, and not every launcher says which one it
was. The helper waits on a pipe; when the pipe closes without a goodbye it names the rank. Of
several on one host, only the first to notice speaks: the others were taken down with the job.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from time import sleep

from canal_mpi.rank.launcher import detect

GOODBYE, HUSH = b"goodbye", b"hush"
LINGER = 0.7  # seconds for which the first to speak silences the others


_standing_by: "Witness | None" = None


def stand_by() -> "Witness | None":
    """The witness of this process, if a launcher started it; made at the first call."""
    global _standing_by
    launcher = detect()
    if launcher and _standing_by is None:
        _standing_by = Witness(launcher.rank, socket.gethostname())
    return _standing_by


class Witness:
    """The rank's end of the pipe."""

    def __init__(self, rank: int, host: str) -> None:
        job = f"\0canal-mpi-{os.getuid()}-{os.getppid()}"
        self._job, self._speech = job, f"{job}-speaks"
        self._floor: socket.socket | None = None
        read, self._write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._write)
            _watch(read, job, f"rank {rank} on {host} was ended at the start, without a word.")
        os.close(read)
        os.set_inheritable(self._write, False)

    def tell(self, words: str) -> None:
        """What to say if the rank dies now; the newest words count."""
        self._send(words.encode()[:400])

    def dismiss(self) -> None:
        """The rank ends in good order."""
        self._send(GOODBYE)

    def may_speak(self) -> bool:
        """Whether no other rank of this host has already said what is wrong, or died."""
        self._floor = self._floor or _claim(self._speech)
        death = _claim(self._job)
        if death is not None:
            death.close()
        return self._floor is not None and death is not None

    def hush(self) -> None:
        """The rank has said itself what is wrong and takes the others down with it."""
        self._send(HUSH)
        sleep(0.1)

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


def _watch(read: int, job: str, first_words: str) -> None:
    """The helper's whole life; it never returns."""
    os.setsid()
    with suppress(OSError):  # only with rights; it sleeps, and wakes before the launcher cleans up
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 2)
    os.closerange(3, read)
    os.closerange(read + 1, 1024)  # a launcher's pipes must close when the rank dies
    words, held = first_words.encode(), b""
    first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # ready: every microsecond counts
    while words != HUSH and (data := os.read(read, 4096)):
        *lines, held = (held + data).split(b"\n")
        words = lines[-1] if lines else words
        if words == GOODBYE:
            os._exit(0)
    try:
        first.bind(job)
    except OSError:
        os._exit(0)
    if words != HUSH:
        os.write(2, b"canal-mpi: " + words + b"\n")
    os.close(2)
    sleep(LINGER)
    os._exit(0)
