"""Where `canal-mpi` starts: a witness first, everything that takes time to load after it."""

import sys

from canal_mpi.rank import signals, witness

INTERRUPTED = 130


def main() -> None:
    """Run the command line; every trouble is one line and an exit code."""
    watched = None
    if sys.argv[1:2] == ["train"]:
        watched = witness.stand_by()
        signals.listen()
    try:
        from canal_mpi.cli import run

        sys.exit(run())
    except KeyboardInterrupt:
        if watched is None or watched.may_speak():
            print("canal-mpi: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
