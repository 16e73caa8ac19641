"""Processes that play a slower device: slowed, never stopped for long, left alone afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canal_mpi.errors import UsageError
from canal_mpi.rank import throttle
from canal_mpi.rank.throttle import busy_seconds, pace


def work(seconds: float) -> tuple[float, float]:
    """Compute until so many CPU seconds are used; wall seconds, and the longest standstill."""
    start = last = time.monotonic()
    begun, longest = time.process_time(), 0.0
    while time.process_time() - begun < seconds:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return time.monotonic() - start, longest


def children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_every_busy_second_takes_four_at_a_quarter_of_the_speed() -> None:
    with pace(0.25):
        time.sleep(0.2)  # until the helper looks
        wall, longest = work(0.3)
    assert wall > 0.9 * 0.3 / 0.25
    assert longest < 0.5  # a heartbeat is due every half second


def test_waiting_takes_no_longer() -> None:
    with pace(0.1):
        start = time.monotonic()
        for _ in range(20):
            time.sleep(0.02)
        assert time.monotonic() - start < 2  # 4 s if waiting were slowed


def test_full_speed_needs_no_helper_and_a_helper_ends_with_its_work() -> None:
    before = children()
    with pace(1.0):
        assert children() == before
    with pace(0.5):
        assert children() == before + 1
    assert children() == before


def test_a_helper_ends_when_its_process_is_killed_and_leaves_nobody_stopped() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from canal_mpi.rank.throttle import pace\n"
        "with pace(0.2):\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    while True: pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        helper = int(rank.stdout.readline())
        time.sleep(0.3)
        rank.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{helper}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{helper}").exists()


HELPED = """
import os
from canal_mpi.rank.throttle import pace
with pace(0.05):
    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)
    end = os.times().user + 0.5
    while os.times().user < end: pass
"""


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_goes_on_when_its_helper_is_killed_and_says_so() -> None:
    command = [sys.executable, "-c", HELPED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        helper = int(rank.stdout.readline())
        deadline = time.monotonic() + 30
        while state(rank.pid) != "T":
            assert time.monotonic() < deadline
        os.kill(helper, signal.SIGKILL)
        _, said = rank.communicate(timeout=30)
    assert rank.returncode == 0 and b"warning: the helper that held this rank to 0.05" in said


def test_a_kernel_that_does_not_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "_busy", lambda process: 0.0)
    with pytest.raises(UsageError, match="schedstat"), pace(0.5):
        pass


def test_children_are_slowed_too_but_not_helpers_with_a_session_of_their_own() -> None:
    sleep = ["sleep", "30"]
    with subprocess.Popen(sleep) as ours, subprocess.Popen(sleep, start_new_session=True) as own:
        found = busy_seconds(os.getpid())
        ours.kill()
        own.kill()
    assert ours.pid in found and own.pid not in found and os.getpid() in found
