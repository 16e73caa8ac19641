"""Commands of canal-mpi, each in a fork of one process that has loaded everything: starting Python
for each of them would take most of the time. Peak memory, time and output are told."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ALL = 16 << 30  # bytes of address space: a command that wants more fails instead of the machine


@dataclass
class Done:
    """How a command ended; `code` is None where it had to be killed."""

    code: int | None
    out: str
    err: str
    mb: float  # most memory that it had

    @property
    def complaints(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("canal-mpi:")]


class Forks:
    """The other end: starts the process, and sends it commands."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, *words: object, seconds: float = 60) -> Done:
        """One command, killed after so many seconds."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        json.dump({"words": [str(word) for word in words], "seconds": seconds}, process.stdin)
        process.stdin.write("\n")
        process.stdin.flush()
        return Done(**json.loads(process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)


def _child(words: list[str], out: IO[bytes], err: IO[bytes]) -> None:
    """The fork: become the command."""
    from canal_mpi.entry import main

    with Path(os.devnull).open() as nothing:
        for target, source in enumerate((nothing.fileno(), out.fileno(), err.fileno())):
            os.dup2(source, target)
    resource.setrlimit(resource.RLIMIT_AS, (ALL, ALL))
    sys.argv = ["canal-mpi", *words]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str], seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            _child(words, out, err)
        end = time.monotonic() + seconds
        found, status, usage = os.wait4(child, os.WNOHANG)
        while not found:
            time.sleep(0.01)
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                found, status, usage = os.wait4(child, 0)
                break
            found, status, usage = os.wait4(child, os.WNOHANG)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None
    return {"code": code, "out": texts[0], "err": texts[1], "mb": usage.ru_maxrss / 1024}


def serve() -> None:
    """Load everything, then fork for every line."""
    from canal_mpi import cli, envs, evaluation  # noqa: F401
    from canal_mpi.learn import dqn, fast_mlp  # noqa: F401
    from canal_mpi.rank import train  # noqa: F401
    from canal_mpi.report import report  # noqa: F401
    from canal_mpi.results import inspect  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
