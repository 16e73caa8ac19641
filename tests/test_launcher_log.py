"""What launchers print when a cluster is not set up, as they printed it, and what we make of it."""

from pathlib import Path

import pytest

from canal_mpi.launch.mpirun import Command
from canal_mpi.launch.supervise import MAX_BOX, SSH_TROUBLES, Supervisor, ask_hosts

OPEN_MPI = b"""ssh: connect to host beta port 22: Connection refused
------------------------------------------------------------
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable, or the executable was unable to find its
required supporting libraries. In some cases, the daemon was
able to execute, but was unable to complete a TCP connection
back to prterun:

  Local host:    vm
  Remote host:   beta
  Daemon exit status: 255

This may also be caused by a firewall on the remote host.
------------------------------------------------------------
"""
MPICH = b"""sh: 7: /env/bin/hydra_pmi_proxy: not found
[mpiexec@vm] ui_cmd_cb (/mpich-5.0.2/src/pm/hydra/mpiexec/pmiserv_pmci.c:51): Launch proxy failed.
[mpiexec@vm] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error
"""
NO_PROGRAM = (
    b"[proxy:1@beta] HYDU_create_process (x.c:73): execvp error on file /env/bin/canal-mpi\n"
)


def heard(text: bytes) -> tuple[str, Supervisor]:
    log = Supervisor(Command([]))
    return "".join(log.filter(text.splitlines(keepends=True))), log


def test_what_launchers_say_is_held_back_and_points_at_the_network() -> None:
    for text in (OPEN_MPI, MPICH):
        shown, log = heard(text)
        assert shown == "" and "".join(log.lines).encode() == text
        assert "open the firewall between them, or name the network" in log.explanation()


def test_a_host_at_fault_is_named_before_anything_else() -> None:
    log = heard(OPEN_MPI)[1]
    log.host_trouble = "beta has no /env/bin/prted: install it"
    assert log.explanation() == "beta has no /env/bin/prted: install it."


def test_ranks_that_would_wait_for_one_that_can_not_start_are_hopeless() -> None:
    assert heard(NO_PROGRAM)[1].hopeless
    assert heard(NO_PROGRAM + b"canal-mpi: rank 0 was ended.\n")[0] == ""


def test_words_that_nobody_knows_are_kept_for_the_user() -> None:
    _, log = heard(b"[mpiexec@vm] something new\n")
    assert log.explanation() == "" and log.lines == ["[mpiexec@vm] something new\n"]


def test_what_ranks_say_goes_on() -> None:
    text = "canal-mpi 0.1 · job\n\x1b[2Around 1/3\n  agent 0\nloading…"
    shown, log = heard(text.encode())
    assert shown == text and log.lines == []


def test_a_border_that_is_never_closed_holds_nothing_back_for_ever() -> None:
    shown, _ = heard(b"-" * 70 + b"\n" + b"row\n" * 100)
    assert shown == "row\n" * (100 - MAX_BOX)


def test_a_warning_of_a_rank_is_not_its_last_word() -> None:
    assert not heard(b"canal-mpi: warning: nano-1 computes on its CPU.\n")[1].rank_spoke
    assert heard(b"canal-mpi: agent 2 was killed.\n")[1].rank_spoke


PROGRAMS = ["/env/bin/prted", "/env/bin/canal-mpi"]
SSH = {
    "nano-9": "ssh: Could not resolve hostname nano-9: Name or service not known",
    "beta": "ssh: connect to host beta port 22: Connection refused",
    "gamma": "ssh: connect to host gamma port 22: No route to host",
    "delta": "root@delta: Permission denied (publickey,password).",
    "epsilon": "No ED25519 host key is known for epsilon.\nHost key verification failed.",
}
SAID = {
    "nano-9": "host nano-9 is unknown: check",
    "beta": "beta refuses ssh: start sshd",
    "gamma": "gamma does not answer (No route to host): switch",
    "delta": "delta lets nobody in without a password: ssh-copy-id",
    "epsilon": "ssh does not know the key of epsilon: type `ssh epsilon true`",
    "other": "other has no /env/bin/prted: install",
    "nano": "nano has no /env/bin/prted: its glibc 2.27 is older than the 2.28",
    "old": "old has no /env/bin/prted: its Python is 3.6, and canal-mpi needs 3.11",
    "arm": "arm has no /env/bin/prted: it is armv9, and this machine",
}
SURVEYS = {  # what a host without canal-mpi is
    "nano": "machine=aarch64 glibc=glibc 2.27 python=Python 3.6.9",
    "old": "machine=x86_64 glibc=glibc 2.31 python=Python 3.6.9",
    "arm": "machine=armv9 glibc=glibc 2.36 python=Python 3.11.2",
}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of ssh that ends in its own way for each host."""
    path = tmp_path / "ssh"
    cases = "".join(f'{host}) echo "{words}" >&2; exit 255;;\n' for host, words in SSH.items())
    cases += "".join(f'{host}) echo "{words}";;\n' for host, words in SURVEYS.items())
    path.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f"case $1 in\n{cases}"
        f"alpha) printf '{PROGRAMS[0]}\\n{PROGRAMS[1]}\\n';;\n"
        f"*) echo {PROGRAMS[1]}; exit 2;;\nesac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(path))
    for name in ("HYDRA_LAUNCHER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_the_host_at_fault_is_named_with_a_remedy(ssh: Path) -> None:
    for host, words in SAID.items():
        assert ask_hosts(["alpha", host], PROGRAMS).startswith(words)
    assert ask_hosts(["alpha", "localhost"], PROGRAMS) == ""
    assert all(": " in words for words in SSH_TROUBLES.values())


def test_where_ssh_is_not_used_nobody_is_asked(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (("HYDRA_LAUNCHER", "slurm"), ("SLURM_JOB_ID", "12")):
        with monkeypatch.context() as patch:
            patch.setenv(*setting)
            assert ask_hosts(["beta"], PROGRAMS) == ""


def test_a_host_that_can_not_be_asked_changes_nothing(ssh: Path) -> None:
    ssh.unlink()
    assert ask_hosts(["beta"], PROGRAMS) == ""
