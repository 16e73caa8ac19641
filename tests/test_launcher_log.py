"""What launchers print when a cluster is not set up, as they printed it, and what we make of it."""

from pathlib import Path

import pytest

from canal_mpi.launch.launcher_log import (
    MISTAKES,
    PROXY_FAILED,
    LauncherLog,
    OutputFilter,
    ask_hosts,
    helper_commands,
)

OPEN_MPI = """{}
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
MPICH = """{}
[mpiexec@vm] ui_cmd_cb (/mpich-5.0.2/src/pm/hydra/mpiexec/pmiserv_pmci.c:51): Launch proxy failed.
[mpiexec@vm] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error
"""
NO_PROGRAM = """-----------------------------------------------------------------------
prterun was unable to launch the specified application as it could not
access an executable:

   Executable: /env/bin/canal-mpi
   Node: beta

while attempting to start process rank 1.
-----------------------------------------------------------------------
"""
SSH = {
    "ssh: Could not resolve hostname nano-9: Name or service not known": "host nano-9 is unknown: ",
    "ssh: connect to host beta port 22: Connection refused": "beta refuses ssh (nothing listens",
    "ssh: connect to host beta port 22: No route to host": "beta does not answer (No route to host",
    "root@beta: Permission denied (publickey,password).": "beta lets nobody in without a password:",
    "No ED25519 host key is known for beta and you have requested strict checking.\n"
    "Host key verification failed.": "ssh does not know the key of beta: type `ssh beta true`",
    "bash: line 1: /env/bin/prted: No such file or directory": "has no /env/bin/prted, the helper",
    "sh: 7: /env/bin/hydra_pmi_proxy: not found": "has no /env/bin/hydra_pmi_proxy, the helper",
}


def heard(text: str) -> tuple[str, LauncherLog]:
    log = LauncherLog()
    output = OutputFilter(log)
    return output.filter(text) + output.close(), log


def test_a_mistake_is_one_sentence_with_its_remedy() -> None:
    for launcher in (OPEN_MPI, MPICH):
        for line, words in SSH.items():
            shown, log = heard(launcher.format(line))
            assert shown == ""
            assert words in log.explanation()
            assert log.explanation().count(": ") >= 1 and log.explanation().endswith(".")


def test_a_program_that_is_missing_is_named_with_its_host() -> None:
    assert heard(NO_PROGRAM)[1].explanation().startswith("beta has no /env/bin/canal-mpi: install")
    line = (
        "[proxy:1@beta] HYDU_create_process (x.c:73): execvp error on file /env/bin/canal-mpi (No"
    )
    _, log = heard(line + " such file or directory)\n")
    assert log.explanation().startswith("beta has no /env/bin/canal-mpi: install")
    assert log.hopeless


def test_a_helper_that_does_not_answer_points_at_the_network() -> None:
    assert "no answer from its helper on beta" in heard(OPEN_MPI.format(""))[1].explanation()
    assert "--network" in heard(MPICH.format(""))[1].explanation()


def test_words_that_nobody_knows_are_kept_for_the_user() -> None:
    _, log = heard("[mpiexec@vm] something new\n")
    assert log.explanation() == "" and log.lines == ["[mpiexec@vm] something new\n"]


def test_what_ranks_say_goes_on_at_once_in_any_pieces() -> None:
    text = "canal-mpi 0.1 · job\n\x1b[2Around 1/3\n  agent 0\nloading…"
    for size in (1, 3, 100):
        output = OutputFilter(LauncherLog())
        shown = "".join(output.filter(text[k : k + size]) for k in range(0, len(text), size))
        assert shown + output.close() == text
    assert OutputFilter(LauncherLog()).filter("\x1b[2A  half a line") == "\x1b[2A  half a line"


def test_a_border_that_is_never_closed_holds_nothing_back_for_ever() -> None:
    text = "-" * 70 + "\n" + "".join(f"row {k}\n" for k in range(100))
    shown, log = heard(text)
    assert shown == text and log.lines == []


def test_a_warning_of_a_rank_is_not_its_last_word() -> None:
    assert not heard("canal-mpi: warning: nano-1 computes on its CPU.\n")[1].rank_spoke
    assert heard("canal-mpi: agent 2 was killed.\n")[1].rank_spoke


def test_every_remedy_says_what_to_do() -> None:
    assert all(": " in words for words in MISTAKES.values())


MPIRUN = Path("/env/bin/mpirun")
GENERAL = "mpirun could not connect the hosts: "


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of ssh that ends in its own way for each host."""
    path = tmp_path / "ssh"
    path.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "case $1 in\n"
        "alpha) exit 7;;\n"  # the helper starts and finds no mpirun to talk to
        "beta) exit 127;;\n"
        'gamma) echo "ssh: connect to host gamma port 22: Connection refused" >&2; exit 255;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(path))
    for name in ("HYDRA_LAUNCHER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return path


def explanation(*hosts: str, said: str = f"[mpiexec@vm] ui_cmd_cb: {PROXY_FAILED}.\n") -> str:
    log = LauncherLog()
    log.lines = [said]
    ask_hosts(MPIRUN, hosts, log)
    return log.explanation()


def test_the_host_at_fault_is_named(ssh: Path) -> None:
    """MPICH's mpirun may end without a word of why a helper did not start: the hosts are asked."""
    helper = "beta has no /env/bin/hydra_pmi_proxy, the helper of this mpirun"
    refused = "gamma refuses ssh (nothing listens on port 22): start sshd"
    assert explanation("alpha", "beta").startswith(helper)
    assert explanation("gamma", "alpha").startswith(refused)
    assert explanation("alpha", "localhost").startswith(GENERAL)


def test_nobody_is_asked_without_need(ssh: Path) -> None:
    assert explanation("beta", said="[mpiexec@vm] something else\n") == ""


def test_where_ssh_is_not_used_nobody_is_asked(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (("HYDRA_LAUNCHER", "slurm"), ("SLURM_JOB_ID", "12")):
        with monkeypatch.context() as patch:
            patch.setenv(*setting)
            assert helper_commands(MPIRUN, ["beta"]) == {}


def test_a_host_that_can_not_be_asked_changes_nothing(ssh: Path) -> None:
    ssh.unlink()
    assert explanation("beta").startswith(GENERAL)
