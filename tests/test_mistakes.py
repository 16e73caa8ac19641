"""What launchers print when a cluster is not set up, as they printed it, and what we make of it."""

import pytest

from canal_mpi.cluster.mistakes import MISTAKES, Noise, Sieve

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


def heard(text: str) -> tuple[str, Noise]:
    noise = Noise()
    sieve = Sieve(noise)
    return sieve.pass_on(text) + sieve.end(), noise


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
@pytest.mark.parametrize(("line", "words"), SSH.items(), ids=list(SSH.values()))
def test_a_mistake_is_one_sentence_with_its_remedy(launcher: str, line: str, words: str) -> None:
    shown, noise = heard(launcher.format(line))
    assert shown == ""
    assert words in noise.diagnosis()
    assert noise.diagnosis().count(": ") >= 1 and noise.diagnosis().endswith(".")


def test_a_program_that_is_missing_is_named_with_its_host() -> None:
    assert heard(NO_PROGRAM)[1].diagnosis().startswith("beta has no /env/bin/canal-mpi: install")
    line = (
        "[proxy:1@beta] HYDU_create_process (x.c:73): execvp error on file /env/bin/canal-mpi (No"
    )
    _, noise = heard(line + " such file or directory)\n")
    assert noise.diagnosis().startswith("beta has no /env/bin/canal-mpi: install")
    assert noise.hopeless


def test_a_helper_that_does_not_answer_points_at_the_network() -> None:
    assert "no answer from its helper on beta" in heard(OPEN_MPI.format(""))[1].diagnosis()
    assert "--network" in heard(MPICH.format(""))[1].diagnosis()


def test_words_that_nobody_knows_are_kept_for_the_user() -> None:
    _, noise = heard("[mpiexec@vm] something new\n")
    assert noise.diagnosis() == "" and noise.lines == ["[mpiexec@vm] something new\n"]


def test_what_ranks_say_goes_on_at_once_in_any_pieces() -> None:
    text = "canal-mpi 0.1 · job\n\x1b[2Around 1/3\n  agent 0\nloading…"
    for size in (1, 3, 100):
        sieve = Sieve(Noise())
        shown = "".join(sieve.pass_on(text[k : k + size]) for k in range(0, len(text), size))
        assert shown + sieve.end() == text
    assert Sieve(Noise()).pass_on("\x1b[2A  half a line") == "\x1b[2A  half a line"


def test_a_border_that_is_never_closed_holds_nothing_back_for_ever() -> None:
    text = "-" * 70 + "\n" + "".join(f"row {k}\n" for k in range(100))
    shown, noise = heard(text)
    assert shown == text and noise.lines == []


def test_a_warning_of_a_rank_is_not_its_last_word() -> None:
    assert not heard("canal-mpi: warning: nano-1 computes on its CPU.\n")[1].spoken
    assert heard("canal-mpi: agent 2 was killed.\n")[1].spoken


def test_every_remedy_says_what_to_do() -> None:
    assert all(remedy for _, _, remedy in MISTAKES)
