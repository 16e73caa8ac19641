"""What launchers say when a cluster is not set up, as one sentence with its remedy."""

import re
from collections.abc import Sequence

DASHES = re.compile(r"-{60,}\s*")
HELD = re.compile(
    r"ssh: |.*Permission denied \(|Host key verification failed|Warning: Permanently added"
    r"|\[(mpiexec|proxy|cli)[@_0-9:]|Proxy at|=  |={20,}|YOUR APPLICATION TERMINATED|.*prted"
    r"|.*hydra_pmi_proxy|Fatal error in|Abort\(|\[[^ ]+:\d+\] "
)
MOST = 400  # lines that are kept

# What is found in a launcher's words, what is wrong, what to do.
MISTAKES: Sequence[tuple[str, str, str]] = ()


class Noise:
    """Sorts what comes out of mpirun: its own words are kept back, those of ranks go on."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.spoken = False  # whether a rank has said itself what is wrong
        self._inside = False

    def hear(self, line: str) -> str:
        """What of a line is to be printed now."""
        border = DASHES.fullmatch(line) is not None
        held = border or self._inside or HELD.match(line) is not None
        self._inside ^= border
        if line.startswith("canal-mpi:"):
            held, self.spoken = False, self.spoken or "warning:" not in line
        if held and len(self.lines) < MOST:
            self.lines.append(line)
        return "" if held else line

    def diagnosis(self) -> str:
        """What is wrong and what to do, or nothing where the words are not known."""
        text = " ".join("".join(self.lines).split())
        for pattern, wrong, remedy in MISTAKES:
            found = re.search(pattern, text)
            if found:
                return f"{found.expand(wrong)}: {remedy}"
        return ""
