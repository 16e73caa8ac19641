"""`canal-mpi launch`: runs an mpirun to its end, stops it politely, and says how it ended."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import time
from types import FrameType
from typing import IO, Any, TextIO

from canal_mpi.errors import ProtocolError, RankFailed, Stopped, UsageError
from canal_mpi.launch.hostfile import Host, is_here, total
from canal_mpi.launch.launcher_log import LauncherLog, ask_hosts
from canal_mpi.launch.mpirun import (
    Command,
    Process,
    build_command,
    clean_up,
    end_at_once,
    send_signal,
    start_process,
    temporary_folder,
)
from canal_mpi.launcher import refuse_mpirun
from canal_mpi.results.status import status_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
OUR_CODES = {0, 2, 65, 70, 73, 74, 75, 76, 78, 130}  # what they mean is in the README
INTERRUPTED = 130
LAST_OUTPUT = 3.0  # seconds in which what was printed may still arrive
SAVE_TIME = 60.0  # seconds for the ranks to save and stop after --max-time
REMOTE_TIME = 60.0  # seconds for another host to answer
ANSWER = "canal-mpi-answer "  # before the JSON that a program on another host prints
DONE = ("finished", "degraded")  # the latter: with --ft, without the agents that died

Say = Callable[[str], None]


@dataclass(frozen=True)
class LaunchRequest:
    """What `launch` was asked for; `folder` is where the run goes, if it is a run."""

    arguments: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    network: str | None = None
    max_time: float | None = None  # seconds after which the ranks save and stop
    folder: Path | None = None
    typed: str = "launch"  # `launch` and its options, as they were typed

    @property
    def hint(self) -> str:
        """How to resume the run, as one would type it."""
        if self.folder is None:
            return ""
        here = Path.cwd()
        short = self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder
        run = shlex.quote(str(short))
        return f" To resume: canal-mpi {self.typed} -- train --resume {run}"


def command_for(request: LaunchRequest) -> Command:
    """The command that does what was asked for; UsageError where that does not go together."""
    refuse_mpirun("launch")
    slots, serving = total(request.hosts), total(request.hosts, serving=True)
    ranks = request.ranks if request.ranks is not None else slots
    if request.ranks is None and not request.hosts:
        raise UsageError("how many ranks? Give -n 5, or a --hostfile.")
    if request.arguments[0] == "train" and serving and ranks < slots:
        raise UsageError(
            f"-n {ranks}, but the hosts have {slots} ranks, and the last {serving} of "
            "them run environments: leave out -n, or give hosts fewer ranks in the hostfile."
        )
    return build_command(ranks, request.arguments, request.hosts, serving, network=request.network)


@dataclass
class Ended:
    """How an mpirun ended: its code, why it was stopped, and what it said itself."""

    code: int = 0
    stop_signal: str = ""  # the first one that came
    timed_out: bool = False  # whether it had to be ended
    log: LauncherLog = field(default_factory=LauncherLog)


class Supervisor:
    """Runs one mpirun and ends it after `limit` seconds.

    With `say` it handles signals: the first one reaches the ranks as SIGUSR1, which asks them to
    save and stop; the second one ends them at once.
    """

    def __init__(self, command: Command, limit: float | None, say: Say | None = None) -> None:
        self._command, self._limit, self._say = command, limit, say
        self._process: Process | None = None
        self._urgent = False
        self._ended = Ended()

    def run(self, out: Say, err: Say) -> Ended:
        """Start it, pass on what its ranks print, and wait for its end."""
        ended, pipe = self._ended, subprocess.PIPE
        with temporary_folder() as folder, self._signals() if self._say else nullcontext():
            self._process = process = start_process(self._command, folder, pipe, pipe)
            self._pass_on_signal()  # one may have come before
            streams = ((process.stdout, out), (process.stderr, err))
            readers = [Thread(target=self._read, args=pair, daemon=True) for pair in streams]
            for reader in readers:
                reader.start()
            try:
                process.wait(self._limit)
            except subprocess.TimeoutExpired:
                ended.timed_out = True
                send_signal(process, signal.SIGTERM)
            finally:
                clean_up(folder)  # also mpirun itself, where it hangs
            ended.code = process.wait()
            for reader in readers:
                reader.join(LAST_OUTPUT)
        silent = ended.log.hopeless or not (ended.log.rank_spoke or ended.stop_signal)
        if ended.code and silent:
            ended.log.host_trouble = ask_hosts(self._command.hosts, self._command.programs)
        return ended

    def _read(self, stream: IO[bytes], write: Say) -> None:
        """Pass on what one stream of mpirun says until it closes."""
        for line in self._ended.log.filter(stream):
            if not self._ended.timed_out:  # else it is about being killed
                write(line)
            if self._ended.log.hopeless and self._process is not None:
                send_signal(self._process, signal.SIGTERM)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """While inside, signals are requests to mpirun."""
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name, words = signal.Signals(number).name, "ending at once."
        if not self._ended.stop_signal:
            self._ended.stop_signal = name
            words = f"{name}: the ranks save and stop; again to end them at once."
        elif number != signal.SIGUSR1:
            self._urgent = True
        else:
            return
        if self._say:
            self._say(words)
        self._pass_on_signal()

    def _pass_on_signal(self) -> None:
        if self._process is not None and self._urgent:
            end_at_once(self._process)
        elif self._process is not None and self._ended.stop_signal:
            send_signal(self._process, signal.SIGUSR1)


def launch(request: LaunchRequest, command: Command) -> int:
    """Run the command; the exit code of `canal-mpi launch`."""
    out, err = writer(sys.stdout), writer(sys.stderr)

    def say(words: str) -> None:
        err(f"canal-mpi: {words}\n" if words else "")

    limit = None if request.max_time is None else request.max_time + SAVE_TIME
    ended = Supervisor(command, limit, say).run(out, err)
    code, words = judge(request, ended)
    if words.startswith("mpirun ended"):
        err("".join(ended.log.lines))
    say(words)
    return code


def judge(request: LaunchRequest, ended: Ended) -> tuple[int, str]:
    """The exit code of a job that ended, and what is said about it beside what its ranks said."""
    log, code = ended.log, ended.code if ended.code in OUR_CODES else RankFailed.code
    if ended.timed_out:
        words = f"the ranks did not stop within {SAVE_TIME:.0f} s after --max-time was over and "
        words += f"were killed; what was saved before is safe.{request.hint}"
        return ProtocolError.code, words
    if code == 0:
        status = DONE[0] if request.folder is None else _status(request, request.folder)
        words = f"mpirun ended without an error, but {request.folder}/run.h5 is {status}, not "
        words += f"finished: a rank or a host was lost.{request.hint}"
        return (0, "") if status in DONE else (RankFailed.code, words)
    if code == Stopped.code:
        return code, request.hint.strip() if request.hosts else ""
    if ended.stop_signal:
        words = f"interrupted ({ended.stop_signal}); what was saved is safe.{request.hint}"
        return code if code == ended.code else INTERRUPTED, "" if log.rank_spoke else words
    if log.rank_spoke and not log.hopeless:
        return code, ""
    number = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    return code, log.explanation() or f"mpirun ended with {number}.{request.hint}"


def writer(out: TextIO) -> Say:
    """Writes to a stream; once that fails (a closed terminal or pipe) it is silently dropped."""

    def write(text: str) -> None:
        try:
            out.write(text)
            out.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), open(os.devnull, "w") as null:  # noqa: PTH123
                os.dup2(null.fileno(), out.fileno())  # else Python's own last flush fails

    return write


def _status(request: LaunchRequest, folder: Path) -> str:
    """What run.h5 says, as mpirun also ends with 0 when it has lost a host; on rank 0's disk."""
    here = status_of(folder)
    if here in DONE or not request.hosts or is_here(request.hosts[0].name):
        return here
    words, ask = ["status", str(folder)], [sys.executable, "-m", "canal_mpi.launch.probe"]
    first = [Host(request.hosts[0].name)]
    there = build_command(1, words, first, network=request.network, program_=ask)
    return str(ask_program(there, REMOTE_TIME).facts.get("status", "out of reach"))


@dataclass
class Answer:
    """The JSON that a program printed and when it arrived, or why there is none."""

    facts: dict[str, Any] = field(default_factory=dict)
    arrived: float = 0.0
    trouble: str = ""


def ask_program(command: Command, seconds: float) -> Answer:
    """Run a short program, possibly on another host, and wait for the one line it prints."""
    answer, said = Answer(), list[str]()

    def take(line: str) -> None:
        if line.startswith(ANSWER):
            answer.arrived = time()
            with suppress(ValueError, TypeError):
                answer.facts = dict(json.loads(line.removeprefix(ANSWER)))
        elif line.strip():
            said.append(line.strip())

    ended = Supervisor(command, seconds).run(take, take)
    if not answer.facts:
        late = f"no answer within {seconds:.0f} s: is it busy, or firewalled?"
        words = late if ended.timed_out else (said or [f"the check ended with {ended.code}"])[-1]
        answer.trouble = ended.log.explanation().rstrip(".") or words
    return answer
