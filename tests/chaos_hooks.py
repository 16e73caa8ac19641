"""A sharing policy like `exact`, by which tools/chaos kills a rank inside a phase of its work.

The file that CHAOS_TRIGGER names says where: `exchanging 1` kills rank 1 inside its next exchange.
"""

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from canal_mpi.agent.recorder import Recorder
from canal_mpi.interfaces import Offer
from canal_mpi.launcher import detect
from canal_mpi.membuf import selection
from canal_mpi.membuf.selection import Need

LATEST = 0.03  # seconds after the beginning of the phase
_phase = Recorder.phase


def phase(self: Recorder, name: str, clock: str = "") -> None:
    """What an agent calls when it begins something else."""
    trigger, launcher = Path(os.environ.get("CHAOS_TRIGGER", "/nowhere")), detect()
    if trigger.exists() and trigger.read_text() == f"{name} {launcher.rank if launcher else 0}":
        trigger.unlink()
        kill = (os.getpid(), signal.SIGKILL)
        threading.Timer(random.uniform(0, LATEST), os.kill, kill).start()
    _phase(self, name, clock)


Recorder.phase = phase  # type: ignore[method-assign]


def exact(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """The default policy."""
    return selection.exact(need, offers)
