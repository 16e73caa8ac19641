"""Plays a slower device: a helper process that stops and continues a rank, again and again.

Every second in which the rank is busy then takes 1 / speed seconds. Waiting is not slowed: a slow
device waits no longer than a fast one. This file is also the helper's program, by itself.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

PATIENCE = 1.0  # seconds in which a busy rank must be seen to be busy
TICK = 0.004  # seconds between two looks
LONGEST = 0.2  # seconds for which a rank is stopped at once: heartbeats come every half second


@contextmanager
def pace(speed: float) -> Iterator[None]:
    """Slow this process and its children meanwhile; at speed 1 nothing is done."""
    if speed == 1:
        yield
        return
    _check_clock(speed)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), repr(speed)]
    quiet = subprocess.DEVNULL
    helper = subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        if helper.poll() is not None:
            words = f"the helper that held this rank to {speed:g} of its speed was ended early"
            print(f"canal-mpi: warning: {words}: times mean little.", file=sys.stderr, flush=True)
        helper.terminate()
        helper.wait()


def _check_clock(speed: float) -> None:
    """UsageError where the kernel does not tell how busy a process is."""
    from canal_mpi.errors import UsageError  # the helper runs without the package

    try:
        before, end, moves = _busy(os.getpid()), monotonic() + PATIENCE, False
        while not moves and monotonic() < end:
            moves = _busy(os.getpid()) > before
    except (OSError, ValueError):
        moves = False
    if not moves:
        raise UsageError(
            f"speed {speed:g}: /proc/PID/schedstat of this kernel does not tell how busy a rank "
            "is: leave out speed and --emulate, or use a kernel with CONFIG_SCHED_INFO."
        )


def slow_down(rank: int, speed: float) -> None:
    """The helper's whole life: hold the rank back for what its busy time owes."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    guard = _guard()
    held: list[int] = []  # what is stopped, or was
    try:
        owed, used = 0.0, busy_seconds(rank)
        while os.getppid() == rank:
            sleep(TICK)
            now = busy_seconds(rank)
            busiest = max(now[process] - used.get(process, 0.0) for process in now)
            owed, used = owed + busiest * (1 / speed - 1), now
            if owed > TICK / 2:
                if held != list(now):
                    held = list(now)
                    os.write(guard, f"{' '.join(map(str, held))}\n".encode())
                start = monotonic()
                _tell(held, signal.SIGSTOP)
                sleep(min(owed, LONGEST))
                _tell(held, signal.SIGCONT)
                owed -= monotonic() - start
    except OSError:
        pass  # the rank is gone
    finally:
        _tell(held, signal.SIGCONT)
        os.write(guard, b"\n")


def _guard() -> int:
    """Make a process that continues whoever is held should this one be killed.

    It hears on a pipe whom that is: a line of process ids; where to write them is returned.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        return write
    os.close(write)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held, rest = b"", b""
    while data := os.read(read, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        held = lines[-1] if lines else held
    _tell([int(word) for word in held.split()], signal.SIGCONT)
    os._exit(0)


def busy_seconds(rank: int) -> dict[int, float]:
    """Busy time of a process and of its children; OSError where the process is gone.

    Helpers are left out: they have sessions of their own.
    """
    found = {rank: _busy(rank)}
    with suppress(OSError):
        children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
        session = os.getsid(rank)
        mine = [int(name) for name in children if os.getsid(int(name)) == session]
        found |= {child: _busy(child) for child in mine}
    return found


def _busy(process: int) -> float:
    """Seconds that a process computed, or wanted to while others had the core."""
    running, waiting, _ = Path(f"/proc/{process}/schedstat").read_text().split()
    return (int(running) + int(waiting)) / 1e9


def _tell(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]))
