"""`canal-mpi launch`: runs an mpirun to its end, stops it politely, and says how it ended."""

import codecs
import json
import os
import shlex
import signal
import socket
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
from canal_mpi.launch.hostfile import Host, total
from canal_mpi.launch.launcher_log import LauncherLog, OutputFilter, ask_hosts
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
    env_servers: int = 0
    ft: bool = False
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
    hosts, arguments = request.hosts, request.arguments
    slots, serving = total(hosts), total(hosts, serving=True)
    if request.ranks is None and not hosts:
        raise UsageError("how many ranks? Give -n 5, or a --hostfile.")
    ranks = slots if request.ranks is None else request.ranks
    if arguments[0] != "train":
        if request.ft or request.env_servers or request.max_time:
            options = "--ft, --env-server and --max-time"
            raise UsageError(f"{options} are for train, not for {arguments[0]}.")
    elif serving and ranks < slots:
        raise UsageError(
            f"-n {ranks}, but the hosts have {slots} ranks, and the last {serving} of "
            "them run environments: leave out -n, or give hosts fewer ranks in the hostfile."
        )
    servers = request.env_servers or serving
    return build_command(ranks, arguments, hosts, servers, request.ft, network=request.network)


@dataclass
class Ended:
    """How an mpirun ended: its code, why it was stopped, and what it said itself."""

    code: int = 0
    stop_signal: str = ""  # the first one that came
    timed_out: bool = False  # whether it had to be ended
    left_behind: int = 0  # processes that had to be ended
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
                ended.left_behind = clean_up(folder)  # also mpirun itself, where it hangs
            ended.code = process.wait()
            for reader in readers:
                reader.join(LAST_OUTPUT)
        ask_hosts(Path(self._command.argv[0]), self._command.hosts, ended.log)
        return ended

    def _read(self, stream: IO[bytes], write: Say) -> None:
        """Pass on what one stream of mpirun says until it closes."""
        passed, decoder = OutputFilter(self._ended.log), codecs.getincrementaldecoder("utf-8")
        decode = decoder("replace").decode
        while data := os.read(stream.fileno(), 1 << 16):
            text = passed.filter(decode(data))
            if not self._ended.timed_out:  # else it is about being killed
                write(text)
            if self._ended.log.hopeless and self._process is not None:
                send_signal(self._process, signal.SIGTERM)
        write(passed.close())

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
        err(f"canal-mpi: {words}\n")

    limit = None if request.max_time is None else request.max_time + SAVE_TIME
    ended = Supervisor(command, limit, say).run(out, err)
    if ended.timed_out:
        say(
            f"the ranks did not stop within {SAVE_TIME:.0f} s after --max-time was over and were "
            f"killed; what was saved before is safe.{request.hint}"
        )
        return ProtocolError.code
    if ended.left_behind and not ended.log.explanation():
        say(f"{ended.left_behind} processes that the job left behind were ended.")
    if ended.code == 0:
        return _check_done(request, say)
    return _explain_failure(request, ended, say)


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


def _check_done(request: LaunchRequest, say: Say) -> int:
    """mpirun also ends with 0 when it has lost a host: only the files tell."""
    if request.folder is None:
        return 0
    status = _status(request, request.folder)
    if status in DONE:
        return 0
    say(
        f"mpirun ended without an error, but {request.folder}/run.h5 is {status}, not finished: "
        f"a rank or a host was lost.{request.hint}"
    )
    return RankFailed.code


def _status(request: LaunchRequest, folder: Path) -> str:
    """What run.h5 says; rank 0 wrote it, possibly on another host's disk."""
    here = status_of(folder)
    first = request.hosts[0].name if request.hosts else "localhost"
    if here in DONE or first in ("localhost", socket.gethostname()):
        return here
    words, ask = ["status", str(folder)], [sys.executable, "-m", "canal_mpi.launch.doctor"]
    there = build_command(1, words, [Host(first)], network=request.network, program_=ask)
    return str(ask_program(there, REMOTE_TIME).facts.get("status", "out of reach"))


def _explain_failure(request: LaunchRequest, ended: Ended, say: Say) -> int:
    log, code = ended.log, ended.code if ended.code in OUR_CODES else 0
    if ended.code == Stopped.code:
        if request.hosts:
            say(request.hint.strip())
        return ended.code
    if ended.stop_signal:
        if not log.rank_spoke:
            say(f"interrupted ({ended.stop_signal}); what was saved is safe.{request.hint}")
        return code or INTERRUPTED
    explanation = log.explanation()
    if explanation and (log.hopeless or not log.rank_spoke):
        say(explanation)
    elif not log.rank_spoke:
        sys.stderr.writelines(log.lines)
        say(f"mpirun ended with {_words_for(ended.code)}.{request.hint}")
    return code or RankFailed.code


def _words_for(code: int) -> str:
    if code == -signal.SIGSEGV:  # seen with Open MPI 5.0.11
        return "a crash; it does that where two interfaces of this machine are in one --network"
    return f"signal {-code}" if code < 0 else f"code {code}"


@dataclass
class Answer:
    """The JSON that a program printed and when it arrived, or why there is none."""

    facts: dict[str, Any] = field(default_factory=dict)
    arrived: float = 0.0
    trouble: str = ""


def ask_program(command: Command, seconds: float) -> Answer:
    """Run a short program, possibly on another host, and wait for the one line it prints."""
    answer, parts = Answer(), list[str]()

    def take(text: str) -> None:
        parts.append(text)
        if not answer.arrived and ANSWER in "".join(parts):
            answer.arrived = time()

    ended = Supervisor(command, seconds).run(take, take)
    rest, _, line = "".join(parts).partition(ANSWER)
    with suppress(ValueError):
        found = json.loads(line.partition("\n")[0])
        answer.facts = found if isinstance(found, dict) else {}
    if not answer.facts:
        late = f"no answer within {seconds:.0f} s: is it busy, or firewalled?"
        words = (rest.strip() or f"the check ended with {ended.code}").splitlines()[-1]
        explained = ended.log.explanation().rstrip(".")
        answer.trouble = explained or (late if ended.timed_out else words)
    return answer
