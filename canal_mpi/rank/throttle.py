"""Plays a slower device: a helper process that stops and continues a rank, again and again.

Every CPU second of the rank then takes 1 / speed seconds. Waiting is not slowed, as a slow device
waits no longer than a fast one. This file is also the helper's program; it needs no other module.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import clock_gettime, monotonic, sleep

TICK = 0.004  # seconds between two looks
LONGEST = 0.1  # seconds for which a rank is stopped at once: heartbeats come every half second
SLOWEST = 0.01


class Throttle:
    """The rank's end: slows this process and its children until it ends."""

    def __init__(self, speed: float) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), repr(speed)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def end(self) -> None:
        """Run at full speed again."""
        self.process.terminate()
        self.process.wait()


def slow_down(rank: int, speed: float) -> None:
    """The helper's whole life: hold the rank back for what its CPU time owes."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    owed, used = 0.0, cpu_seconds(rank)
    held: list[int] = []
    try:
        while True:
            sleep(TICK)
            now = cpu_seconds(rank)
            owed, used = owed + (now - used) * (1 / speed - 1), now
            if owed > TICK / 2:
                start, held = monotonic(), family(rank)
                _tell(held, signal.SIGSTOP)
                sleep(min(owed, LONGEST))
                _tell(held, signal.SIGCONT)
                owed -= monotonic() - start
    except OSError:
        pass  # the rank is gone
    finally:
        _tell(held, signal.SIGCONT)


def cpu_seconds(rank: int) -> float:
    """CPU time of a process and of its children that play environments."""
    return clock_gettime((~rank << 3) | 2) + sum(_clock(child) for child in family(rank)[1:])


def _clock(process: int) -> float:
    try:
        return clock_gettime((~process << 3) | 2)  # as clock_getcpuclockid(3) names it
    except OSError:
        return 0.0


def family(rank: int) -> list[int]:
    """The process and its children, without helpers, which have sessions of their own."""
    found = [rank]
    with suppress(OSError):
        names = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
        session = os.getsid(rank)
        found += [int(name) for name in names if os.getsid(int(name)) == session]
    return found


def _tell(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]))
