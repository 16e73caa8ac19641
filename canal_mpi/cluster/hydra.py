"""Why MPICH's mpirun could not start its helper on a host.

It ends as soon as the ssh to a host has ended, at times before it has read what that ssh said. So
the hosts are asked once more, and their names are learnt, which mpirun never tells.
"""

import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from canal_mpi.cluster.hostfile import is_here
from canal_mpi.cluster.mistakes import Noise

FAILED = "Launch proxy failed"
SSH = "-oBatchMode=yes -oConnectTimeout=15"  # Open MPI cuts such words at the =
PATIENCE = 30.0  # seconds for a host to answer
MOST = 32  # hosts that are asked at once
NO_SSH, NO_PROGRAM = 255, (126, 127)


def ways_to_helpers(mpirun: Path, hosts: Iterable[str]) -> dict[str, list[str]]:
    """The command that starts the helper on each other host; none where ssh is not the way."""
    if os.environ.get("HYDRA_LAUNCHER", "ssh") != "ssh" or "SLURM_JOB_ID" in os.environ:
        return {}
    ssh = [os.environ.get("HYDRA_LAUNCHER_EXEC", "ssh"), *shlex.split(ssh_options())]
    helper = str(mpirun.with_name("hydra_pmi_proxy"))
    return {host: [*ssh, host, helper] for host in hosts if not is_here(host)}


def ssh_options() -> str:
    """What the ssh to a host is told: by the user, else never to ask and not to wait for long."""
    return os.environ.get("HYDRA_LAUNCHER_EXTRA_ARGS", SSH)


def ask_again(mpirun: Path, hosts: Iterable[str], noise: Noise) -> None:
    """Where a helper did not start, add to the noise which host it was and what it says."""
    failed = any(FAILED in line for line in noise.lines)
    if ways := ways_to_helpers(mpirun, hosts) if failed else {}:
        with ThreadPoolExecutor(min(len(ways), MOST)) as pool:
            for words in pool.map(_words_of, ways, ways.values()):
                noise.lines += words


def _words_of(host: str, command: Sequence[str]) -> list[str]:
    """What is wrong with a host, in the words of mistakes.py; nothing if its helper starts."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            start_new_session=True,  # ssh asks no questions
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode in NO_PROGRAM:
        return [f"{command[-1]}: not found. Remote host: {host}\n"]
    return [done.stderr.decode(errors="replace")] if done.returncode == NO_SSH else []
