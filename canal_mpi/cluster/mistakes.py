"""What launchers say when a cluster is not set up, as one sentence with its remedy."""

import re
from collections.abc import Sequence

BORDER = re.compile(r"[-=]{60,}\s*")
HELD = re.compile(
    r"ssh: |no such identity: |No \S+ host key is known for |.*Permission denied \("
    r"|Host key verification failed|Warning: Permanently added"
    r"|\[(mpiexec|proxy|cli)[@_0-9:]|Proxy at|=  |YOUR APPLICATION TERMINATED|This typically refers"
    r"|Please see the FAQ|.*/(prted|hydra_pmi_proxy): |Fatal error in|Abort\("
    r"|\[[^ ]+:\d+\] (plm|PMIX|PRTE)|\[\d+\.\d+\] \[.* UCX "
)
MAY_START = tuple("-=[/sHWPYTFANnbcr")  # a line of these
MOST = 400  # lines that are kept
LONGEST = 40  # lines between two borders; more than that is no text of a launcher
DOCTOR = "`canal-mpi doctor --hostfile FILE` looks at every host"
SAME_PATH = "install canal-mpi with the same MPI at the same path on every host"

# What is found in a launcher's words, what is wrong, what to do.
MISTAKES: Sequence[tuple[str, str, str]] = (
    (
        r"Could not resolve hostname ([^\s:]+):",
        r"host \1 is unknown",
        "check its spelling in the hostfile, or add its address to /etc/hosts of this machine",
    ),
    (
        r"connect to host (\S+) port (\d+): Connection refused",
        r"\1 refuses ssh (nothing listens on port \2)",
        "start sshd there (sudo systemctl enable --now ssh), or name its port in ~/.ssh/config",
    ),
    (
        r"connect to host (\S+) port \d+: ([A-Z][a-z]+( [a-z]+)*)",
        r"\1 does not answer (\2)",
        "switch it on, or look for a firewall and a wrong address; `ping` tells",
    ),
    (
        r"(\S+@)?([^\s@]+): Permission denied \(",
        r"\2 lets nobody in without a password",
        r"ssh-copy-id to it, until `ssh \2 true` asks nothing",
    ),
    (
        r"No \S+ host key is known for (\S+)",
        r"ssh does not know the key of \1",
        r"type `ssh \1 true` once, compare the key and accept it",
    ),
    (
        r"Host key verification failed",
        "ssh does not know the key of a host",
        "type `ssh HOST true` once for every host of the hostfile and accept its key",
    ),
    (
        r"Executable: (\S+) Node: (\S+) while",
        r"\2 has no \1",
        SAME_PATH,
    ),
    (
        r"\[proxy:[^@\]]*@([^\]\s]+)\][^\[]*execvp error on file (\S+)",
        r"\1 has no \2",
        SAME_PATH,
    ),
    (
        r"(\S+/)(prted|hydra_pmi_proxy): .*Remote host: (\S+)",
        r"\3 has no \1\2, the helper of this mpirun (no canal-mpi there, or with another MPI)",
        SAME_PATH,
    ),
    (
        r"(\S+/)(prted|hydra_pmi_proxy): ",
        r"a host has no \1\2, the helper of this mpirun (no canal-mpi there, or another MPI)",
        f"{SAME_PATH}; {DOCTOR}",
    ),
    (
        r"not enough slots",
        "the hosts have fewer slots than ranks are asked for",
        "lower -n, or give a host more ranks in the hostfile",
    ),
    (
        r"unable to (reach each other|complete a TCP connection).*Remote host: (\S+)",
        r"mpirun got no answer from its helper on \2",
        "open the firewall between the hosts, or name the network they share with --network",
    ),
    (
        r"unable to reach each other|Unreachable|Launch proxy failed",
        "mpirun could not bring the hosts together",
        f"name the network that they share with --network 10.0.0.0/24; {DOCTOR}",
    ),
)
HOPELESS = re.compile(r"execvp error on file")  # MPICH's other ranks would wait for minutes


class Noise:
    """Sorts what comes out of mpirun: its own words are kept back, those of ranks go on."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.spoken = False  # whether a rank has said itself what is wrong
        self.hopeless = False  # whether mpirun would only wait for a rank that can't come

    def keeps(self, line: str, inside: bool) -> bool:
        """Whether a line of the output is the launcher's own; `inside`: of a bordered text."""
        if line.startswith("canal-mpi:"):
            self.spoken = self.spoken or "warning:" not in line
            return self.hopeless
        held = inside or HELD.match(line) is not None
        if held and len(self.lines) < MOST:
            self.lines.append(line)
            self.hopeless = self.hopeless or HOPELESS.search(line) is not None
        return held

    def forget(self, lines: Sequence[str]) -> None:
        """These were not the launcher's."""
        for line in lines:
            if line in self.lines:
                self.lines.remove(line)

    def diagnosis(self) -> str:
        """What is wrong and what to do, or nothing where the words are not known."""
        text = " ".join("".join(self.lines).split())
        for pattern, wrong, remedy in MISTAKES:
            found = re.search(pattern, text)
            if found:
                return f"{found.expand(wrong)}: {found.expand(remedy)}."
        return ""


class Sieve:
    """One stream of an mpirun's output: what is not the launcher's own noise goes on at once."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._inside = False
        self._held: list[str] = []  # of the bordered text
        self._rest = ""  # the beginning of a line that may be noise
        self._open = False  # whether the beginning of this line has gone on already

    def pass_on(self, text: str) -> str:
        """What of a piece of output is to be printed now."""
        *lines, last = (self._rest + text).split("\n")
        self._rest, shown = "", ""
        for line in lines:
            shown += self._line(line + "\n")
        if last and (self._open or not (self._inside or last.startswith(MAY_START))):
            self._open = True
            return shown + last
        self._rest = last
        return shown

    def end(self) -> str:
        """What is left when the stream ends."""
        return self._line(self._rest) if self._rest else ""

    def _line(self, line: str) -> str:
        if self._open:
            self._open = False
            return line
        border = BORDER.fullmatch(line) is not None
        held = self._noise.keeps(line, border or self._inside)
        self._inside ^= border
        if not self._inside:
            self._held = []
        elif held:
            self._held.append(line)
        if len(self._held) > LONGEST:
            return self._give_up()
        return "" if held else line

    def _give_up(self) -> str:
        """What was held back was no launcher's: say it after all."""
        shown, self._held, self._inside = self._held, [], False
        self._noise.forget(shown)
        return "".join(shown)
