"""Runs an mpirun to its end: stops it politely, hears what it says, leaves nothing behind."""

import codecs
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from types import FrameType
from typing import IO, TextIO, TypeAlias

from canal_mpi.cluster.launch import Launch
from canal_mpi.cluster.mistakes import Noise, Sieve

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PATIENCE = 10.0  # seconds for mpirun to end its ranks after a second signal
LAST_WORDS = 3.0  # seconds in which what was printed may still arrive
GRACE = 2.0  # seconds in which processes of a job that is over end by themselves

Process: TypeAlias = "subprocess.Popen[bytes]"


@dataclass
class Ended:
    """How an mpirun ended: its code, the first signal that asked it to, what it complained of."""

    code: int
    asked: str = ""
    noise: Noise = field(default_factory=Noise)
    left: int = 0  # processes that had to be ended


def supervise(launch: Launch, say: Callable[[str], None]) -> Ended:
    """Run the command to its end. The first Ctrl-C or SIGTERM reaches the ranks as SIGUSR1, which
    asks them to save and stop; the second one ends them at once."""
    with scratch() as folder:
        process = subprocess.Popen(
            launch.argv,
            env=launch.environment() | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal must not reach mpirun
        )
        ended = Ended(0)
        readers = [
            Thread(target=_listen, args=(process, ended.noise, *pair), daemon=True)
            for pair in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        with _asked(process, ended, say):
            for reader in readers:
                reader.start()
            ended.code = process.wait()
            ended.left = clean_up(folder)
            for reader in readers:
                reader.join(LAST_WORDS)
    return ended


@contextmanager
def scratch() -> Iterator[str]:
    """A short folder of one mpirun's own, removed in the end.

    A killed mpirun leaves a folder that is named after its process id; a later one that gets the
    same id then fails to start. Its path goes into a socket's name, which must be short.
    """
    base = "/tmp" if os.access("/tmp", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="canal-", dir=base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _listen(process: Process, noise: Noise, stream: IO[bytes], out: TextIO) -> None:
    """Pass on what one stream of mpirun says, until it closes."""
    sieve, decoder = Sieve(noise), codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(stream.fileno(), 1 << 16):
        out.write(sieve.pass_on(decoder.decode(data)))
        out.flush()
        if noise.hopeless:
            _send(process, signal.SIGTERM)
    out.write(sieve.end())
    out.flush()


@contextmanager
def _asked(process: Process, ended: Ended, say: Callable[[str], None]) -> Iterator[None]:
    """While inside, signals are wishes for mpirun."""

    def note(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not ended.asked:
            ended.asked = name
            say(f"{name}: the ranks save and stop; again to end them at once.")
            _send(process, signal.SIGUSR1)
        elif number != signal.SIGUSR1:
            say("ending at once.")
            end_at_once(process)

    before = {number: signal.signal(number, note) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(process: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def end_at_once(process: Process) -> None:
    """Let mpirun end its ranks; it is killed if that takes long. Returns at once."""
    _send(process, signal.SIGTERM)
    Thread(target=_insist, args=(process,), daemon=True).start()


def _insist(process: Process) -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        _send(process, signal.SIGKILL)


def clean_up(folder: str) -> int:
    """End the processes that a job left on this host, known by its folder; how many there were."""
    left = _waited_for(folder, GRACE)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in _processes_of(folder):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        _waited_for(folder, GRACE)
    return len(left)


def _waited_for(folder: str, seconds: float) -> list[int]:
    """The processes of a job that are still there after so long."""
    end = monotonic() + seconds
    while (found := _processes_of(folder)) and monotonic() < end:
        sleep(0.05)
    return found


def _processes_of(folder: str) -> list[int]:
    """Living processes that were started with this TMPDIR."""
    mark = f"TMPDIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
                dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if ours and not dead:
                found.append(int(entry.name))
    return found
