"""Where `canal-mpi` starts: the death reporter first, everything that takes time to load later."""

import sys
from contextlib import suppress
from pathlib import Path

INTERRUPTED = 130


def main() -> None:
    """Run the command line; errors print one line and exit non-zero."""
    reporter = None
    with suppress(OSError):
        sys.path.append(str(Path.cwd()))  # `module:name` finds the user's own files
    if sys.argv[1:2] == ["train"]:
        from canal_mpi.rank.death_reporter import start_reporter
        from canal_mpi.rank.shutdown import stop_signals

        reporter = start_reporter(alone=True)
        stop_signals.listen()
    try:
        from canal_mpi.cli import run

        code = run()
        if reporter is not None:  # what is wrong has been said
            (reporter.mute if code else reporter.dismiss)()
        sys.exit(code)
    except KeyboardInterrupt:
        if reporter is None or reporter.may_speak():
            print("canal-mpi: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
