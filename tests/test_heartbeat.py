"""Who decides that a run stops, and what silence means."""

from collections.abc import Iterator
from time import monotonic

import pytest

from canal_mpi.errors import ProtocolError, Stopped
from canal_mpi.interfaces import Progress
from canal_mpi.rank import heartbeat as module
from canal_mpi.rank.heartbeat import Heartbeat, _pack, _unpack


@pytest.fixture(autouse=True)
def beats_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "EVERY", 0.0)
    yield


def heartbeat_of(rank: int, signal: str = "") -> Heartbeat:
    """The heartbeat of one rank of three, without MPI."""
    heartbeat = Heartbeat(None, 10.0, lambda: signal)
    heartbeat.rank, heartbeat.size, heartbeat.is_root = rank, 3, rank == 0
    peers = (1, 2) if rank == 0 else (0,)
    heartbeat.heard = dict.fromkeys(peers, monotonic())
    heartbeat.names = [f"rank {k} on host" for k in range(3)]
    heartbeat.progress = [Progress("training") for _ in range(3)]
    return heartbeat


def test_rank_0_stops_when_asked_and_others_only_ask() -> None:
    for rank, stops in ((0, True), (1, False)):
        heartbeat = heartbeat_of(rank, "SIGUSR1")
        heartbeat.allow_stop()
        heartbeat.beat(heartbeat.mine)
        assert heartbeat.stopping is stops
        assert heartbeat.stop_reason == f"rank {rank} on host got SIGUSR1"


def test_nothing_stops_before_there_is_something_to_stop() -> None:
    heartbeat = heartbeat_of(0)
    heartbeat.end_by = 0.0
    heartbeat.idle(1, "the start")
    assert not heartbeat.stopping
    heartbeat.allow_stop(0.0)
    with pytest.raises(Stopped):
        heartbeat.idle(1, "the exchange")
    assert heartbeat.stop_reason == "its time is over (--max-time)"


def test_silence_stops_the_run_and_names_the_rank() -> None:
    for rank, other in ((0, 2), (1, 0)):
        heartbeat = heartbeat_of(rank)
        heartbeat.heard[other] -= 20
        silent = f"rank {other} on host has been silent for 20 s"
        with pytest.raises(ProtocolError, match=silent):
            heartbeat.idle(other, "the start")
        heartbeat.allow_stop()
        heartbeat.beat(heartbeat.mine)
        assert heartbeat.stopping
        assert heartbeat.silence.startswith(f"{silent} in training")


def test_rank_0_waits_until_everybody_who_can_be_heard_has_saved() -> None:
    heartbeat = heartbeat_of(0)
    assert heartbeat.others_work()
    heartbeat.progress[1].phase = "stopped"
    assert heartbeat.others_work()
    heartbeat.heard[2] -= 20
    assert not heartbeat.others_work()
    assert heartbeat_of(1).others_work(), "only rank 0 knows"


def test_after_a_death_the_first_living_rank_hears_the_others() -> None:
    heartbeat, calls = heartbeat_of(0), []
    heartbeat.attach(lambda: calls.append("poll"), lambda: calls.append("beat"))
    heartbeat.beat(heartbeat.mine)
    assert calls == ["poll", "beat"]
    heartbeat.allow_stop()
    heartbeat.restart(None, [0, 2])
    assert (heartbeat.is_root, list(heartbeat.heard)) == (True, [2])
    assert [p.phase for p in heartbeat.progress] == ["training", "died", "training"]
    assert not heartbeat.may_stop
    heartbeat.beat(heartbeat.mine)
    assert len(calls) == 2, "who died is not called"


def test_a_beat_carries_progress_and_the_stop() -> None:
    progress = Progress("training", 3, "Krull", 1, 5, 10, 100, 1.5, 0.25, 0.1)
    for stop in (True, False):
        assert _unpack(bytearray(_pack(progress, stop))) == (progress, stop)
