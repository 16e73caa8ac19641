"""What mpirun itself prints: held back, and turned into one sentence that names the host at fault.

MPICH's mpirun ends as soon as the ssh to a host has ended, at times before it has read what that
ssh said, and it never names the host. So `ask_hosts` tries each host's ssh once more.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from canal_mpi.launch.hostfile import is_here

BORDER = re.compile(r"[-=]{60,}\s*")
LAUNCHER_LINE = re.compile(
    r"ssh: |no such identity: |No \S+ host key is known for |.*Permission denied \("
    r"|Host key verification failed|Warning: Permanently added"
    r"|\[(mpiexec|proxy|cli)[@_0-9:]|Proxy at|=  |YOUR APPLICATION TERMINATED|This typically refers"
    r"|Please see the FAQ|.*/(prted|hydra_pmi_proxy): |Fatal error in|Abort\("
    r"|\[[^ ]+:\d+\] (plm|PMIX|PRTE)|\[\d+\.\d+\] \[.* UCX "
)
FIRST_LETTERS = tuple("-=[/sHWPYTFANnbcr")  # of such lines
MAX_LINES = 400  # that are kept
MAX_BOX = 40  # lines between two borders; longer boxes are not a launcher's
HOPELESS = re.compile(r"execvp error on file")  # MPICH's other ranks would wait for minutes
DOCTOR = "`canal-mpi doctor --hostfile FILE` checks every host"
SAME_PATH = "install canal-mpi with the same MPI at the same path on every host"

# What is found in a launcher's output, and what is then said: what is wrong and what to do.
MISTAKES = {
    r"Could not resolve hostname ([^\s:]+):": r"host \1 is unknown: check its spelling in the "
    "hostfile, or add its address to /etc/hosts of this machine",
    r"connect to host (\S+) port (\d+): Connection refused": r"\1 refuses ssh (nothing listens on "
    r"port \2): start sshd there (sudo systemctl enable --now ssh), or name its port in "
    "~/.ssh/config",
    r"connect to host (\S+) port \d+: ([A-Z][a-z]+( [a-z]+)*)": r"\1 does not answer (\2): switch "
    "it on, or look for a firewall and a wrong address; `ping` tells",
    r"(\S+@)?([^\s@]+): Permission denied \(": r"\2 lets nobody in without a password: "
    r"ssh-copy-id to it, until `ssh \2 true` asks nothing",
    r"No \S+ host key is known for (\S+)": r"ssh does not know the key of \1: type `ssh \1 true` "
    "once, compare the key and accept it",
    r"Host key verification failed": "ssh does not know the key of a host: type `ssh HOST true` "
    "once for every host of the hostfile and accept its key",
    r"Executable: (\S+) Node: (\S+) while": rf"\2 has no \1: {SAME_PATH}",
    r"\[proxy:[^@\]]*@([^\]\s]+)\][^\[]*execvp error on file (\S+)": rf"\1 has no \2: {SAME_PATH}",
    r"(\S+/)(prted|hydra_pmi_proxy): .*Remote host: (\S+)": r"\3 has no \1\2, the helper of this "
    rf"mpirun (no canal-mpi there, or with another MPI): {SAME_PATH}",
    r"(\S+/)(prted|hydra_pmi_proxy): ": r"a host has no \1\2, the helper of this mpirun (no "
    f"canal-mpi there, or another MPI): {SAME_PATH}; {DOCTOR}",
    r"not enough slots": "the hosts have fewer slots than ranks are asked for: lower -n, or give a "
    "host more ranks in the hostfile",
    r"unable to (reach each other|complete a TCP connection).*Remote host: (\S+)": "mpirun got no "
    r"answer from its helper on \2: open the firewall between the hosts, or name the network they "
    "share with --network",
    r"unable to reach each other|Unreachable|Launch proxy failed": "mpirun could not connect the "
    f"hosts: name the network that they share with --network 10.0.0.0/24; {DOCTOR}",
}


class LauncherLog:
    """Collects what mpirun itself says, from both of its streams."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rank_spoke = False  # whether a rank has said itself what is wrong
        self.hopeless = False  # whether mpirun would only wait for a rank that can't start

    def takes(self, line: str, inside: bool) -> bool:
        """Whether a line is mpirun's own, and was kept; `inside`: it is part of a box."""
        if line.startswith("canal-mpi:"):
            self.rank_spoke = self.rank_spoke or "warning:" not in line
            return self.hopeless
        taken = inside or LAUNCHER_LINE.match(line) is not None
        if taken and len(self.lines) < MAX_LINES:
            self.lines.append(line)
            self.hopeless = self.hopeless or HOPELESS.search(line) is not None
        return taken

    def explanation(self) -> str:
        """What is wrong and what to do, as one sentence; empty where the words are unknown."""
        text = " ".join("".join(self.lines).split())
        for pattern, words in MISTAKES.items():
            if found := re.search(pattern, text):
                return f"{found.expand(words)}."
        return ""


class OutputFilter:
    """One stream of mpirun's output: what ranks say passes at once, mpirun's own lines don't."""

    def __init__(self, log: LauncherLog) -> None:
        self._log = log
        self._inside = False
        self._box: list[str] = []  # lines since the border
        self._rest = ""  # the beginning of a line that may be the launcher's
        self._open = False  # whether the beginning of this line has passed already

    def filter(self, text: str) -> str:
        """The part of a piece of output that is to be printed now."""
        *lines, last = (self._rest + text).split("\n")
        shown = "".join([self._line(line + "\n") for line in lines])
        self._rest = last
        if last and (self._open or not (self._inside or last.startswith(FIRST_LETTERS))):
            self._open, self._rest = True, ""
            shown += last
        return shown

    def close(self) -> str:
        """What is left when the stream ends."""
        return self._line(self._rest) if self._rest else ""

    def _line(self, line: str) -> str:
        if self._open:
            self._open = False
            return line
        border = BORDER.fullmatch(line) is not None
        taken = self._log.takes(line, border or self._inside)
        self._inside ^= border
        if not self._inside:
            self._box = []
        elif taken:
            self._box.append(line)
        return self._release() if len(self._box) > MAX_BOX else "" if taken else line

    def _release(self) -> str:
        """Print a box after all: it was not the launcher's."""
        shown, self._box, self._inside = self._box, [], False
        for line in shown:
            if line in self._log.lines:
                self._log.lines.remove(line)
        return "".join(shown)


PROXY_FAILED = "Launch proxy failed"
SSH_OPTIONS = "-oBatchMode=yes -oConnectTimeout=15"  # Open MPI cuts such words at the =
ANSWER_TIME = 30.0  # seconds
AT_ONCE = 32  # hosts
NO_SSH, NO_PROGRAM = 255, (126, 127)  # exit codes


def ssh_options() -> str:
    """Options of ssh: the user's, else never to ask for input and not to wait for long."""
    return os.environ.get("HYDRA_LAUNCHER_EXTRA_ARGS", SSH_OPTIONS)


def helper_commands(mpirun: Path, hosts: Iterable[str]) -> dict[str, list[str]]:
    """The command that starts MPICH's helper on each other host; empty where ssh is not used."""
    if os.environ.get("HYDRA_LAUNCHER", "ssh") != "ssh" or "SLURM_JOB_ID" in os.environ:
        return {}
    ssh = [os.environ.get("HYDRA_LAUNCHER_EXEC", "ssh"), *shlex.split(ssh_options())]
    helper = str(mpirun.with_name("hydra_pmi_proxy"))
    return {host: [*ssh, host, helper] for host in hosts if not is_here(host)}


def ask_hosts(mpirun: Path, hosts: Iterable[str], log: LauncherLog) -> None:
    """Where a helper did not start, add to the log which host it was and what it says."""
    failed = any(PROXY_FAILED in line for line in log.lines)
    if commands := helper_commands(mpirun, hosts) if failed else {}:
        with ThreadPoolExecutor(min(len(commands), AT_ONCE)) as pool:
            log.lines += pool.map(_trouble_of, commands, commands.values())


def _trouble_of(host: str, command: Sequence[str]) -> str:
    """What is wrong with a host, in words that MISTAKES knows; empty if its helper starts."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_TIME,
            start_new_session=True,  # no terminal, so ssh can't ask for a password
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode in NO_PROGRAM:
        return f"{command[-1]}: not found. Remote host: {host}\n"
    return done.stderr.decode(errors="replace") if done.returncode == NO_SSH else ""
