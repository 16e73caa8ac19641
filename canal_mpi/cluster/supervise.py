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

from canal_mpi.cluster.hydra import ask_again
from canal_mpi.cluster.launch import Launch
from canal_mpi.cluster.mistakes import Noise, Sieve

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PATIENCE = 10.0  # seconds for mpirun to end its ranks after a second signal
LAST_WORDS = 3.0  # seconds in which what was printed may still arrive
GRACE = 2.0  # seconds in which processes of a job that is over end by themselves
INSTANT = 0.1  # seconds

Process: TypeAlias = subprocess.Popen[bytes]


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
    ended = Ended(0)
    with scratch() as folder, _asked(ended, say) as signals:
        process = begin(launch, folder, subprocess.PIPE, subprocess.PIPE)
        signals.reach(process)
        readers = [
            Thread(target=_listen, args=(process, ended.noise, *pair), daemon=True)
            for pair in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for reader in readers:
            reader.start()
        ended.code = process.wait()
        ended.left = clean_up(folder)
        for reader in readers:
            reader.join(LAST_WORDS)
    ask_again(Path(launch.argv[0]), launch.hosts, ended.noise)
    return ended


def begin(launch: Launch, folder: str, out: int | IO[bytes], err: int | IO[bytes]) -> Process:
    """Start a command in a folder of its own; it saves and stops should this process be killed."""
    setpriv = shutil.which("setpriv")
    return subprocess.Popen(
        [*([setpriv, "--pdeathsig", "USR1", "--"] if setpriv else []), *launch.argv],
        env=launch.environment() | {"TMPDIR": folder},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,  # no Ctrl-C reaches mpirun, and ssh asks no questions
    )


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
    """Pass on what one stream of mpirun says, until it closes; also where nobody listens to us."""
    sieve, decoder = Sieve(noise), codecs.getincrementaldecoder("utf-8")("replace")
    heard = True
    while data := os.read(stream.fileno(), 1 << 16):
        words = sieve.pass_on(decoder.decode(data))
        heard = heard and _print(words, out)
        if noise.hopeless:
            _send(process, signal.SIGTERM)
    if heard:
        _print(sieve.end(), out)


def _print(words: str, out: TextIO) -> bool:
    """Whether it could be said."""
    try:
        out.write(words)
        out.flush()
    except (OSError, ValueError):  # a closed pipe, a full disk
        return False
    return True


class Signals:
    """Signals as wishes for mpirun; those that come before it is there reach it then."""

    def __init__(self, ended: Ended, say: Callable[[str], None]) -> None:
        self._ended, self._say = ended, say
        self._process: Process | None = None
        self._urgent = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first one asks, the second one ends."""
        name = signal.Signals(number).name
        if not self._ended.asked:
            self._ended.asked = name
            self._say(f"{name}: the ranks save and stop; again to end them at once.")
        elif number != signal.SIGUSR1:
            self._urgent = True
            self._say("ending at once.")
        else:
            return
        self._pass_on()

    def reach(self, process: Process) -> None:
        """From here on there is somebody to tell."""
        self._process = process
        self._pass_on()

    def _pass_on(self) -> None:
        if self._process is None or not self._ended.asked:
            return
        if self._urgent:
            end_at_once(self._process)
        else:
            _send(self._process, signal.SIGUSR1)


@contextmanager
def _asked(ended: Ended, say: Callable[[str], None]) -> Iterator[Signals]:
    """While inside, signals are wishes for mpirun."""
    signals = Signals(ended, say)
    before = {number: signal.signal(number, signals.note) for number in ASKING}
    try:
        yield signals
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
    if not left:  # one that is just being started shows no environment for an instant
        sleep(INSTANT)
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
        sleep(INSTANT)
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
