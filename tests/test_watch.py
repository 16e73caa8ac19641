"""Who decides that a run stops, and what silence means."""

from time import monotonic

import pytest

from canal_mpi.errors import ProtocolError, Stopped
from canal_mpi.rank import signals
from canal_mpi.rank import watch as module
from canal_mpi.rank.watch import Watch, _pack, _unpack
from canal_mpi.types import Progress


def watch_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The watch of one rank of three, without MPI."""
    watch = Watch(None, timeout=10.0)
    watch.rank, watch.size, watch.leads = rank, 3, rank == 0
    peers = (1, 2) if rank == 0 else (0,)
    watch.heard = dict.fromkeys(peers, monotonic())
    watch.names = [f"rank {k} on host" for k in range(3)]
    watch.progress = [Progress("training") for _ in range(3)]
    monkeypatch.setattr(module, "EVERY", 0.0)
    monkeypatch.setattr(signals, "asked", "")
    return watch


def test_rank_0_stops_at_its_own_wish_and_others_only_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, stops in ((0, True), (1, False)):
        watch = watch_of(rank, monkeypatch)
        watch.may_stop = True
        monkeypatch.setattr(signals, "asked", "SIGUSR1")
        watch.beat(watch.mine)
        assert watch.stopping is stops
        assert watch.wish == f"rank {rank} on host got SIGUSR1"


def test_nothing_stops_before_there_is_something_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(0, monkeypatch)
    watch.end_by = 0.0
    watch.idle(1, "the start")
    assert not watch.stopping
    watch.may_stop = True
    with pytest.raises(Stopped):
        watch.idle(1, "the exchange")
    assert watch.wish == "its time is over (--max-time)"


@pytest.mark.parametrize(("rank", "other"), [(0, 2), (1, 0)])
def test_silence_stops_the_run_with_a_name(
    rank: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(rank, monkeypatch)
    watch.heard[other] -= 20
    with pytest.raises(ProtocolError, match=f"rank {other} on host has been silent for 20 s"):
        watch.idle(other, "the start")
    watch.may_stop = True
    watch.beat(watch.mine)
    assert watch.stopping
    assert watch.silence.startswith(f"rank {other} on host has been silent for 20 s in training")


def test_rank_0_waits_until_everybody_who_can_be_heard_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = watch_of(0, monkeypatch)
    assert watch.others_work()
    watch.progress[1].phase = "stopped"
    assert watch.others_work()
    watch.heard[2] -= 20
    assert not watch.others_work()
    assert watch_of(1, monkeypatch).others_work(), "only rank 0 knows"


@pytest.mark.parametrize("stop", [True, False])
def test_a_beat_carries_progress_and_the_stop(stop: bool) -> None:
    progress = Progress("training", 3, "Krull", 1, 5, 10, 100, 1.5, 0.25, 0.1)
    assert _unpack(bytearray(_pack(progress, stop))) == (progress, stop)
