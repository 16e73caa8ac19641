"""What mpirun itself prints is held back, and a start that failed becomes one sentence.

Each MPI words a host that can't be used in its own way, or does not name it. So every host is asked
once more by ssh: what ssh says, and which programs are missing there, names the host at fault.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from canal_mpi.launch.hostfile import is_here

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
SLOTS = "not enough slots"
UNREACHABLE = re.compile(
    r"unable to\s+(reach each other|complete a TCP connection)|Unreachable|Launch proxy failed"
)
SSH_VARIABLES = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent")
SSH_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=15")
ANSWER_TIME = 30.0  # seconds
AT_ONCE = 32  # hosts
NO_SSH = 255  # exit code of ssh itself

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


class LauncherLog:
    """Collects what mpirun itself says, from both of its streams."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rank_spoke = False  # whether a rank has said itself what is wrong
        self.hopeless = False  # whether mpirun would only wait for a rank that can't start
        self.host_trouble = ""  # what is wrong with a host

    def filter(self, stream: Iterable[bytes]) -> Iterator[str]:
        """The lines of one stream; empty in the place of those that are mpirun's own."""
        box = 0  # lines that mpirun may still print before the border that ends its box
        for data in stream:
            line = data.decode(errors="replace")
            border = BORDER.fullmatch(line) is not None
            if line.startswith("canal-mpi:"):
                self.rank_spoke = self.rank_spoke or "warning:" not in line
                yield "" if self.hopeless else line
            elif border or box or LAUNCHER_LINE.match(line):
                self.lines += [line] if len(self.lines) < MAX_LINES else []
                self.hopeless = self.hopeless or HOPELESS in line
                box = MAX_BOX * (box == 0) if border else max(box - 1, 0)
                yield ""
            else:
                yield line

    def explanation(self) -> str:
        """What is wrong and what to do, as one sentence; empty where the words are unknown."""
        text = "".join(self.lines)
        if self.host_trouble:
            return f"{self.host_trouble}."
        if SLOTS in text:
            return (
                "the hosts have fewer slots than ranks are asked for: lower -n, or give a host "
                "more ranks in the hostfile."
            )
        if UNREACHABLE.search(text):
            return (
                "mpirun could not connect the hosts: open the firewall between them, or name the "
                "network that they share with --network 10.0.0.0/24; `canal-mpi doctor --hostfile "
                "FILE` checks every host."
            )
        return ""


def ask_hosts(hosts: Iterable[str], programs: Sequence[str]) -> str:
    """What is wrong with the first other host that ssh can't reach or that lacks a program."""
    if "SLURM_JOB_ID" in os.environ or os.environ.get("HYDRA_LAUNCHER", "ssh") != "ssh":
        return ""  # ssh is not what starts ranks there
    others = [host for host in hosts if not is_here(host)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda host: _ask(host, programs), others)
        return next(filter(None, found), "")


def _ask(host: str, programs: Sequence[str]) -> str:
    set_by = [os.environ.get(name) for name in SSH_VARIABLES]
    ssh = next(filter(None, set_by), "ssh")
    command = [*shlex.split(ssh), *SSH_OPTIONS, host, shlex.join(["ls", *programs])]
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
    where = "install canal-mpi with the same MPI at the same path on every host"
    return f"{host} has no {missing[0]}: {where}" if missing else ""
