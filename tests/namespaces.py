"""Three hosts on one machine: network namespaces on a bridge, each with its own name and disk.

An agent stands in for ssh. What is particular about a host (a mount, a variable) is a piece of
shell that the agent runs on that host first; a host that is down is asked by the real ssh.
"""

import fcntl
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from launch import VENVS, Result, run

NAMES = ("alpha", "beta", "gamma")


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")


@contextmanager
def own_number() -> Iterator[int]:
    """A number that no other test on this machine has now, and no bridge that one left behind:
    MPI breaks where two bridges have the same addresses.
    """
    taken = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True).stdout
    free = [number for number in range(255) if f"10.77.{number}." not in taken]
    for number in random.sample(free, len(free)):
        lock = os.open(f"/tmp/canal-subnet-{number}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            yield number
        finally:
            os.close(lock)
        return
    pytest.fail("all subnets 10.77.*.0/24 are taken")


def subnet(hosts: Path) -> str:
    """The first three numbers of every address."""
    return (hosts / "subnet").read_text()


def network(hosts: Path) -> str:
    """The network of the hosts."""
    return f"{subnet(hosts)}.0/24"


def _commands(tag: str, net: str) -> list[str]:
    commands = [f"ip link add {tag}br type bridge", f"ip link set {tag}br up"]
    commands += [f"ip addr add {net}.254/24 dev {tag}br"]
    for k, name in enumerate(NAMES, 1):
        space = f"{tag}{name}"
        commands += [
            f"ip netns add {space}",
            f"ip link add {tag}v{k} type veth peer name eth0 netns {space}",
            f"ip link set {tag}v{k} master {tag}br up",
            f"ip -n {space} addr add {net}.{k}/24 dev eth0",
            f"ip -n {space} link set eth0 up",
            f"ip -n {space} link set lo up",
        ]
    return commands


def _write_agent(path: Path, tag: str, net: str) -> None:
    lines = "".join(f"{net}.{k} {name}\n" for k, name in enumerate((*NAMES, "delta"), 1))
    (path / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
    (path / "ssh_config").touch()
    agent = path / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        "all=$*\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
        f"[ -e /run/netns/{tag}$host ] && ! [ -e {path}/ssh-$host ] ||\n"
        f"exec ssh -F {path}/ssh_config $all\n"
        f'exec ip netns exec {tag}$host unshare --uts --mount --fork --kill-child sh -c "\n'
        f"hostname $host; mount --bind {path}/hosts /etc/hosts\n"
        f"mkdir -p {path}/disk-$host {path}/shared\n"
        f"mount --bind {path}/disk-$host {path}/shared\n"
        f"mount -t tmpfs tmpfs /dev/shm\n"
        f"if [ -e {path}/first-$host ]; then . {path}/first-$host; fi\n"
        '$*"\n'
    )
    agent.chmod(0o755)


def make_hosts(path: Path) -> Iterator[Path]:
    """The body of a fixture: hosts alpha, beta and gamma; delta has an address and is down."""
    needs_root()
    needs("ip")
    with own_number() as number:
        tag, net = f"c{number}", f"10.77.{number}"
        _write_agent(path, tag, net)
        (path / "subnet").write_text(net)
        (path / "shared").mkdir()
        try:
            for command in _commands(tag, net):
                if subprocess.run(command.split(), capture_output=True).returncode:
                    pytest.skip(f"may not make namespaces: {command}")
            yield path
        finally:
            for name in NAMES:
                subprocess.run(["ip", "netns", "del", f"{tag}{name}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{tag}br"], capture_output=True)


def on_host(hosts: Path, name: str, shell: str) -> None:
    """Have the agent run this first, on that host."""
    (hosts / f"first-{name}").write_text(shell + "\n")


def spread(hosts: Path, mpi: str, names: list[str], *arguments: str) -> Result:
    """`canal-mpi train …` under plain mpirun, a rank on each of the named hosts, in that order."""
    command, settings = spread_command(hosts, mpi, names, *arguments)
    return run(command, mpi, timeout=300, **settings)


def spread_command(
    hosts: Path, mpi: str, names: list[str], *arguments: str
) -> tuple[list[str], dict[str, str]]:
    """The command of `spread`, and what it needs in its environment."""
    tolerant = ["--with-ft", "ulfm"] if "--ft" in arguments else []
    program, agent = str(VENVS[mpi] / "bin" / "canal-mpi"), str(hosts / "agent")
    places = [(name, len(list(same))) for name, same in groupby(names)]
    file, ranks = hosts / "hostfile", str(len(names))
    if mpi == "openmpi":
        file.write_text("".join(f"{name} slots={number}\n" for name, number in places))
        launcher = ["mpirun", *tolerant, "--hostfile", str(file), "-x", "PYTHONPATH", "-np", ranks]
        settings = {"PRTE_MCA_plm_ssh_agent": agent, "PRTE_MCA_prte_if_include": network(hosts)}
        settings |= {"OMPI_MCA_btl_tcp_if_include": network(hosts)}
    else:
        file.write_text("".join(f"{name}:{number}\n" for name, number in places))
        launcher = ["mpirun", "-launcher", "ssh", "-launcher-exec", agent, "-f", str(file)]
        launcher += ["-localhost", f"{subnet(hosts)}.254", "-np", ranks]
        settings = {}
    return _seeing_hosts(hosts, [*launcher, program, "train", *arguments]), settings


def canal(hosts: Path, mpi: str, *arguments: str, **extra: str) -> Result:
    """`canal-mpi …` of an environment, with the agent in the place of ssh."""
    agent = str(hosts / "agent")
    settings = {"PRTE_MCA_plm_ssh_agent": agent, "HYDRA_LAUNCHER_EXEC": agent, **extra}
    settings.setdefault("HYDRA_LAUNCHER", "ssh")
    command = _seeing_hosts(hosts, [str(VENVS[mpi] / "bin" / "canal-mpi"), *arguments])
    return run(command, mpi, timeout=300, **settings)


def _seeing_hosts(hosts: Path, command: Sequence[str]) -> list[str]:
    """A command on the machine itself, where the names of the hosts are known."""
    see = f'mount --bind {hosts}/hosts /etc/hosts; exec "$@"'
    return ["unshare", "--mount", "sh", "-c", see, "sh", *command]
