"""`canal-mpi launch`: runs an mpirun to its end, stops it politely, and says how it ended.

What mpirun itself prints is held back. Each MPI words a host that can't be used in its own way, or
does not name it, so after a failed start every host is asked by ssh: what ssh says, and which
programs are missing there, names the host at fault.
"""

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from time import time
from types import FrameType
from typing import IO, Any, TextIO

from canal_mpi.errors import ProtocolError, RankFailed, Stopped
from canal_mpi.launch.hostfile import Host, is_here
from canal_mpi.launch.mpirun import (
    Command,
    Process,
    build_command,
    clean_up,
    end_at_once,
    start_process,
    temporary_folder,
)
from canal_mpi.results.status import status_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
OUR_CODES = {0, 2, 65, 70, 73, 74, 75, 76, 78, 130}  # what they mean is in `canal-mpi --help`
INTERRUPTED = 130
LAST_OUTPUT = 3.0  # seconds in which what was printed may still arrive
SAVE_TIME = 60.0  # seconds for the ranks to save and stop after --max-time
REMOTE_TIME = 60.0  # seconds for another host to answer
DONE = ("finished", "degraded")  # the latter: with --ft, without the agents that died
ASK = [sys.executable, "-m", "canal_mpi.launch.doctor"]  # a program for other hosts
ANSWER = "canal-mpi-answer "  # before the JSON that it prints

BORDER = re.compile(r"[-=]{60,}\s*")
LAUNCHER_LINE = re.compile(
    r"ssh: |no such identity: |No \S+ host key is known for |.*Permission denied \("
    r"|Host key verification failed|Warning: Permanently added"
    r"|\[(mpiexec|proxy|cli)[@_0-9:]|Proxy at|=  |YOUR APPLICATION TERMINATED|This typically refers"
    r"|Please see the FAQ|.*/(prted|hydra_pmi_proxy): |Fatal error in|Abort\("
    r"|\[[^ ]+:\d+\] (plm|PMIX|PRTE)|\[\d+\.\d+\] \[.* UCX "
)
MAX_LINES = 400  # that are kept
MAX_BOX = 40  # lines between two borders
HOPELESS = "execvp error on file"  # MPICH's other ranks would wait for minutes
# What mpirun says, and what is then said.
EXPLANATIONS = {
    r"not enough slots": "the hosts have fewer slots than ranks are asked for: lower -n, or give "
    "a host more ranks in the hostfile.",
    r"unable to\s+(reach each other|complete a TCP connection)|Unreachable|Launch proxy failed": ""
    "mpirun could not connect the hosts: open the firewall between them, or name the network that "
    "they share with --network 10.0.0.0/24; `canal-mpi doctor --hostfile FILE` checks every host.",
}
SSH_VARIABLES = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent")
SSH_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=15")
ANSWER_TIME = 30.0  # seconds
AT_ONCE = 32  # hosts
NO_SSH = 255  # exit code of ssh itself
OLDEST_LIBC, OLDEST_PYTHON = (2, 28), (3, 11)
SURVEY = "echo machine=$(uname -m) glibc=$(getconf GNU_LIBC_VERSION) python=$(python3 --version)"
SURVEYED = re.compile(r"machine=(\S*) glibc=\D*(\d+)\.(\d+)\S* python=\D*(\d+)\.(\d+)")
# What ssh says of a host, and what is then said: what is wrong and what to do.
SSH_TROUBLES = {
    "Could not resolve hostname": "host {host} is unknown: check its spelling in the hostfile, or "
    "add its address to /etc/hosts of this machine",
    "Connection refused": "{host} refuses ssh: start sshd there (sudo systemctl enable --now ssh), "
    "or name its port in ~/.ssh/config",
    "Permission denied": "{host} lets nobody in without a password: ssh-copy-id to it, until "
    "`ssh {host} true` asks nothing",
    "Host key verification failed": "ssh does not know the key of {host}: type `ssh {host} true` "
    "once, compare the key and accept it",
    "": "{host} does not answer ({reason}): switch it on, or look for a firewall and a wrong "
    "address; `ping` tells",
}

Say = Callable[[str], None]


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While inside, signals that ask to stop go to a function; nohup's SIGHUP stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [n for n in STOP_SIGNALS if not (n == signal.SIGHUP and ignored)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Supervisor:
    """Runs one mpirun, ends it after `limit` seconds, and knows then how it ended.

    With `say` it handles signals: the first one reaches the ranks as SIGUSR1, which asks them to
    save and stop; the second one ends them at once.
    """

    def __init__(
        self, command: Command, limit: float | None = None, say: Say | None = None
    ) -> None:
        self._command, self._limit, self._say = command, limit, say
        self._process: Process | None = None
        self._urgent = False  # whether a second signal came
        self.code = 0
        self.stop_signal = ""  # the first one that came
        self.timed_out = False  # whether it had to be ended
        self.lines: list[str] = []  # what mpirun said itself, on both of its streams
        self.rank_spoke = False  # whether a rank has said itself what is wrong
        self.hung = False  # whether one was ended because it hung
        self.hopeless = False  # whether mpirun would only wait for a rank that can't start
        self.host_trouble = ""  # what is wrong with a host

    def run(self, out: Say, err: Say) -> None:
        """Start it, pass on what its ranks print, and wait for its end."""
        with temporary_folder() as folder, signals_to(self._note) if self._say else nullcontext():
            self._process = process = start_process(self._command, folder)
            self._pass_on_signal()  # one may have come before
            streams = ((process.stdout, out), (process.stderr, err))
            readers = [Thread(target=self._read, args=pair, daemon=True) for pair in streams]
            for reader in readers:
                reader.start()
            try:
                process.wait(self._limit)
            except subprocess.TimeoutExpired:
                self.timed_out = True
                process.terminate()
            finally:
                clean_up(folder)  # also mpirun itself, where it hangs
            self.code = process.wait()
            for reader in readers:
                reader.join(LAST_OUTPUT)
        if self.code and (self.hopeless or not (self.rank_spoke or self.stop_signal)):
            self.host_trouble = ask_hosts(self._command.hosts, self._command.programs)

    def filter(self, stream: Iterable[bytes]) -> Iterator[str]:
        """The lines of one stream; empty in the place of those that are mpirun's own."""
        box = 0  # lines that mpirun may still print before the border that ends its box
        for data in stream:
            line = data.decode(errors="replace")
            border = BORDER.fullmatch(line) is not None
            if line.startswith("canal-mpi:"):
                self.rank_spoke |= "warning:" not in line
                self.hung |= line.endswith("it hangs.\n")
                yield "" if self.hopeless or self.timed_out else line  # it is about being killed
            elif border or box or LAUNCHER_LINE.match(line):
                self.lines += [line] if len(self.lines) < MAX_LINES else []
                self.hopeless |= HOPELESS in line
                box = MAX_BOX * (box == 0) if border else max(box - 1, 0)
                yield ""
            else:
                yield line

    def explanation(self) -> str:
        """What is wrong and what to do, as one sentence; empty where the words are unknown."""
        if self.host_trouble:
            return f"{self.host_trouble}."
        text = "".join(self.lines)
        found = (words for sign, words in EXPLANATIONS.items() if re.search(sign, text))
        return next(found, "")

    def _read(self, stream: IO[bytes], write: Say) -> None:
        """Pass on what one stream of mpirun says until it closes."""
        for line in self.filter(stream):
            write(line)
            if self.hopeless and self._process is not None:
                self._process.terminate()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name, words = signal.Signals(number).name, "ending at once."
        if not self.stop_signal:
            self.stop_signal = name
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
        elif self._process is not None and self.stop_signal:
            self._process.send_signal(signal.SIGUSR1)


def launch(
    command: Command, folder: Path | None, max_time: float | None = None, resume: str = ""
) -> int:
    """Run the command; the exit code of `canal-mpi launch`.

    `folder` is where the run goes, if it is one, and `resume` how it is resumed. After `max_time`
    seconds the ranks save and stop.
    """
    out, err = writer(sys.stdout), writer(sys.stderr)

    def say(words: str) -> None:
        err(f"canal-mpi: {words}\n" if words else "")

    ended = Supervisor(command, None if max_time is None else max_time + SAVE_TIME, say)
    ended.run(out, err)
    hint = f" To resume: {resume}" if resume else ""
    code, words = judge(ended, command, folder, hint)
    if words.startswith("mpirun ended"):
        err("".join(ended.lines))
    say(words)
    return code


def judge(ended: Supervisor, command: Command, folder: Path | None, hint: str) -> tuple[int, str]:
    """The exit code of a job that ended, and what is said about it beside what its ranks said."""
    code = ProtocolError.code if ended.hung else RankFailed.code
    code = ended.code if ended.code in OUR_CODES else code
    if ended.timed_out:
        words = f"the ranks did not stop within {SAVE_TIME:.0f} s after --max-time was over and "
        words += f"were killed; what was saved before is safe.{hint}"
        return ProtocolError.code, words
    if code == 0:
        status = DONE[0] if folder is None else _status(command, folder)
        words = f"mpirun ended without an error, but {folder}/run.h5 is {status}, not "
        words += f"finished: a rank or a host was lost.{hint}"
        return (0, "") if status in DONE else (RankFailed.code, words)
    if code == Stopped.code:
        return code, hint.strip() if command.hosts else ""
    if ended.stop_signal:
        words = f"interrupted ({ended.stop_signal}); what was saved is safe.{hint}"
        return code if code == ended.code else INTERRUPTED, "" if ended.rank_spoke else words
    if ended.rank_spoke and not ended.hopeless:
        return code, ""
    number = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    return code, ended.explanation() or f"mpirun ended with {number}.{hint}"


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


def _status(command: Command, folder: Path) -> str:
    """What run.h5 says, as mpirun also ends with 0 when it has lost a host; on rank 0's disk."""
    here = status_of(folder)
    if here in DONE or not command.hosts or is_here(command.hosts[0]):
        return here
    words, first = ["status", str(folder)], [Host(command.hosts[0])]
    there = build_command(1, words, first, command.network, program_=ASK)
    return str(ask_program(there, REMOTE_TIME)[0].get("status", "out of reach"))


def ask_program(command: Command, seconds: float) -> tuple[dict[str, Any], str]:
    """Run a short program, possibly on another host: the facts that it prints as a line of JSON,
    with the seconds that its `clock` is ahead of ours; or none, and why."""
    facts, said = dict[str, Any](), list[str]()

    def take(line: str) -> None:
        if line.startswith(ANSWER):
            with suppress(ValueError, TypeError, KeyError):
                facts.update(json.loads(line.removeprefix(ANSWER)))
                facts["clock"] -= time()
        elif line.strip():
            said.append(line.strip())

    asked = Supervisor(command, seconds)
    asked.run(take, take)
    if facts:
        return facts, ""
    late = f"no answer within {seconds:.0f} s: is it busy, or firewalled?"
    words = late if asked.timed_out else (said or [f"the check ended with {asked.code}"])[-1]
    return {}, asked.explanation().rstrip(".") or words


def ask_hosts(hosts: Iterable[str], programs: Sequence[str]) -> str:
    """What is wrong with the first other host that ssh can't reach or that lacks a program."""
    if "SLURM_JOB_ID" in os.environ or os.environ.get("HYDRA_LAUNCHER", "ssh") != "ssh":
        return ""  # ssh is not what starts ranks there
    others = [host for host in hosts if not is_here(host)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda host: _ask(host, programs), others)
        return next(filter(None, found), "")


def _ask(host: str, programs: Sequence[str]) -> str:
    ssh = next(filter(None, map(os.environ.get, SSH_VARIABLES)), "ssh")
    question = f"{shlex.join(['ls', *programs])}; {SURVEY}"
    command = [*shlex.split(ssh), *SSH_OPTIONS, host, question]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_TIME,
            text=True,
            errors="replace",
            start_new_session=True,  # no terminal, so ssh can't ask for a password
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == NO_SSH:
        reason = done.stderr.strip().rpartition(": ")[2]
        words = next(words for sign, words in SSH_TROUBLES.items() if sign in done.stderr)
        return words.format(host=host, reason=reason)
    missing = [program for program in programs if program not in done.stdout.splitlines()]
    return f"{host} has no {missing[0]}: {_remedy(done.stdout)}" if missing else ""


def _remedy(told: str) -> str:
    """How to install canal-mpi on a host that has told what it is."""
    machine, *numbers = found.groups() if (found := SURVEYED.search(told)) else ("", 9, 9, 9, 9)
    libc_major, libc_minor, major, minor = map(int, numbers)
    if (libc_major, libc_minor) < OLDEST_LIBC:
        return (
            f"its glibc {libc_major}.{libc_minor} is older than the 2.28 that wheels of MPI need; "
            "use a container with Debian 12 there, or build MPI"
        )
    if (major, minor) < OLDEST_PYTHON:
        return (
            f"its Python is {major}.{minor}, and canal-mpi needs 3.11; get one by "
            "`uv venv --python 3.11`, or a container, then install canal-mpi at the same path"
        )
    if machine and machine != platform.machine():
        return (
            f"it is {machine}, and this machine {platform.machine()}; install canal-mpi there by "
            "pip, at the same path: wheels of one don't run on the other"
        )
    return "install canal-mpi with the same MPI at the same path on every host"
