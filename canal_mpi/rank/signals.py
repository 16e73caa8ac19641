"""Signals that ask a run to stop: the first one politely, the second one at once.

SIGUSR1 always asks politely: it is what batch systems send before they take the machine away, and
the one signal that every launcher passes on and nobody kills for.
"""

import signal
from collections.abc import Callable
from typing import Any

POLITE = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)

asked = ""  # the first signal that came
urgent = False  # whether a checkpoint is wanted at once: the launcher may kill very soon
may_wait = False  # whether there is something that can be stopped politely
on_hurry: Callable[[str], None] | None = None  # told the signal, inside the handler


def listen() -> None:
    """Take note of signals from now on; before a run begins they end the program."""
    for number in POLITE:
        signal.signal(number, _note)


def ignore() -> None:
    """The end has begun: a launcher that cleans up must not start another one."""
    for number in POLITE:
        signal.signal(number, signal.SIG_IGN)


def hurry() -> bool:
    """Whether a checkpoint is wanted at once; true once."""
    global urgent
    wanted, urgent = urgent, False
    return wanted


def _note(number: int, frame: Any) -> None:
    global asked, urgent
    name, first = signal.Signals(number).name, not asked
    if number != signal.SIGUSR1 and not (may_wait and first):
        raise KeyboardInterrupt
    asked = asked or name
    if number != signal.SIGUSR1:
        urgent = True
        if on_hurry:
            on_hurry(name)
