"""A real Slurm on loopback: one controller and two emulated nodes, stopped by their process ids."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from launch import ROOT, VENVS, environment

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("n1", "n2")
CONF = """\
ClusterName=canal
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=2
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=10 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 State=UP
"""


def why_not() -> str:
    """Why no Slurm can be started here; empty where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed here ({', '.join(missing)}): tools/debian-packages does"
    return "" if os.geteuid() == 0 else "starting Slurm's daemons needs root"


class Slurm:
    """The daemons, and jobs handed to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in NODES)):
            (folder / name).mkdir(parents=True)
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, ports=free_ports(3)))
        loopback = {"OMPI_MCA_btl_tcp_if_include": "lo"}  # other interfaces may come and go
        self.env = environment("openmpi", SLURM_CONF=str(conf), **loopback)
        self.daemons = [self._start("slurmctld", "-D")]
        for node in NODES:
            self.daemons.append(self._start("slurmd", "-D", "-N", node, PMIX_HOSTNAME=node))
        self.wait_for(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", 30)

    def _start(self, *command: str, **extra: str) -> "subprocess.Popen[bytes]":
        log = (self.folder / f"{'-'.join(command)}.out").open("wb")
        return subprocess.Popen(
            command, env=self.env | extra, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def stop(self) -> None:
        """Cancel what runs, then end the daemons, nodes first."""
        subprocess.run(["scancel", "-u", "root"], env=self.env, capture_output=True)
        deadline = time.monotonic() + 15
        while self.ask("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        """What a command of Slurm says."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout

    def submit(self, *arguments: str, **extra: str) -> str:
        """`sbatch` from the project's folder; the number of the job."""
        venv = {"VENV": str(VENVS["openmpi"])}
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={self.folder}/%A_%a.out", *arguments],
            env=self.env | venv | extra,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> str:
        """What the jobs of this number printed so far."""
        return "".join(p.read_text() for p in sorted(self.folder.glob(f"{job}_*.out")))

    def state(self, job: str) -> set[str]:
        """The states of a job, or of the jobs of an array."""
        lines = self.ask("scontrol", "show", "job", job, "-o").splitlines()
        fields = [dict(f.split("=", 1) for f in line.split() if "=" in f) for line in lines]
        return {field["JobState"] for field in fields if "JobState" in field}

    def finish(self, job: str, timeout: float = 120) -> str:
        """Wait until a job has completed; its output."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        self.wait_for(lambda: (found := self.state(job)) != set() and found <= over, timeout)
        assert self.state(job) == {"COMPLETED"}, self.output(job)
        return self.output(job)

    def wait_for(self, happened: Callable[[], bool], timeout: float) -> None:
        """Wait for something, or fail with what the controller logged last."""
        deadline = time.monotonic() + timeout
        while not happened():
            log = self.folder / "slurmctld.log"
            last = log.read_text()[-2000:] if log.exists() else "no log"
            assert time.monotonic() < deadline, f"not within {timeout} s; slurmctld: {last}"
            assert all(daemon.poll() is None for daemon in self.daemons), last
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
