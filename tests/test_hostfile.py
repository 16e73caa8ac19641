"""One description of hosts, read from three ways of writing it, written in two."""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT

from canal_mpi.errors import UsageError
from canal_mpi.launch.hostfile import Host, convert, is_here, parse_hosts, read_hosts, total

DESCRIPTIONS = sorted((ROOT / "hostfiles").glob("*.hosts"))


def test_the_hostfiles_that_lie_here_are_those_of_their_description() -> None:
    for path in DESCRIPTIONS:
        plain = [(host.name, host.ranks) for host in read_hosts(path)]
        for kind in ("openmpi", "mpich"):
            made = path.with_suffix(f".{kind}").read_text()
            assert made == convert(path.read_text(), str(path), kind)
            assert [(host.name, host.ranks) for host in parse_hosts(made, "made")] == plain


def test_no_hostfile_is_without_its_description() -> None:
    made = {path.stem for kind in ("openmpi", "mpich") for path in ROOT.glob(f"hostfiles/*.{kind}")}
    assert made == {path.stem for path in DESCRIPTIONS}
    assert {"laptop", "nano5", "xavier1", "nano4-xavier1", "nano3-xavier2", "x86-2"} <= made


def test_hosts_are_read_from_every_syntax() -> None:
    for text, hosts in [
        ("a\nb 2 # two\n\n# nothing", [Host("a"), Host("b", 2)]),
        ("a slots=3 max_slots=4", [Host("a", 3)]),
        ("a:3\nb:1", [Host("a", 3), Host("b")]),
        ("n-[08-10] 2", [Host("n-08", 2), Host("n-09", 2), Host("n-10", 2)]),
        ("n[1-2].lab", [Host("n1.lab"), Host("n2.lab")]),
        ("a\nx 2 env-server", [Host("a"), Host("x", 2, True)]),
    ]:
        assert parse_hosts(text, "file") == hosts


def test_ranks_are_counted_all_together_or_those_that_serve() -> None:
    hosts = parse_hosts("a 3\nx 2 env-server", "file")
    assert (total(hosts), total(hosts, serving=True)) == (5, 2)


def test_a_wrong_line_is_named_with_what_was_expected() -> None:
    for text, words in [
        ("", "names no host for the first agent"),
        ("a\na", "host a is listed twice"),
        ("a two", "line 1: 'two' is not understood"),
        ("a env-sever", "did you mean 'env-server'"),
        ("a 0", "line 1: '0' is not understood; expected a name and 1 to 4096 ranks"),
        ("a " + "9" * 5000, "1 to 4096 ranks"),
        ("a-[1-4000]\nb-[1-4000]\n" * 99, "more than the maximum of 4096 hosts"),
        ("a 1 2", "'2' is not understood"),
        ("a:b", "'b' is not understood"),
        ("a\n-oProxyCommand=x", "line 2: '-oProxyCommand=x' is not a host name"),
        ("n-[3-1]", "'n-[3-1]' is not a host name"),
        ("x env-server\na", "names no host for the first agent"),
        ("b\nx env-server\na", "come last; move x down"),
        ("x env-server", "names no host for the first agent"),
    ]:
        with pytest.raises(UsageError, match=words.replace("[", r"\[")):
            parse_hosts(text, "file")


def test_this_machine_is_known_by_name_and_address() -> None:
    assert is_here("localhost") and is_here("127.0.0.1") and is_here(socket.gethostname())
    assert not is_here("192.0.2.7") and not is_here("nano-1.invalid")


def test_a_mark_at_the_start_of_a_file_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("nano-1 2\n", encoding="utf-8-sig")
    assert read_hosts(tmp_path / "hosts") == [Host("nano-1", 2)]


def test_a_file_that_is_missing_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read: No such file"):
        read_hosts(tmp_path / "none")
    (tmp_path / "odd").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UsageError, match="it is not text"):
        read_hosts(tmp_path / "odd")


@given(st.text(max_size=60))
def test_any_text_gives_hosts_or_a_usage_error(text: str) -> None:
    try:
        hosts = parse_hosts(text, "file")
    except UsageError:
        return
    for kind in ("openmpi", "mpich"):
        again = parse_hosts(convert(text, "file", kind), "file")
        assert [(h.name, h.ranks) for h in again] == [(h.name, h.ranks) for h in hosts]
