"""Remote environments without MPI: the worker's answers, the agent's side, the switchboard."""

import queue
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from canal_mpi.config import resolve
from canal_mpi.errors import DamagedData, ProtocolError, RankFailed
from canal_mpi.job import Job
from canal_mpi.rank import envwire as wire
from canal_mpi.rank.build import env_maker, games_maker
from canal_mpi.rank.envserver import EnvServer, Seat, Worker
from canal_mpi.rank.envworker import Host
from canal_mpi.rank.remote import Lane, RemoteMaker
from canal_mpi.tasks import common_spaces
from canal_mpi.types import CUT, ENDED, Env

TASK = "CartPole-v1"


def job_of(games: int, task: str = TASK, **settings: object) -> Job:
    return resolve(
        {"tasks": [task], "train.envs": games, "task.max_steps": 30} | settings, environ={}
    )


class Direct:
    """A channel straight into a worker's host."""

    name = "rank 9 on there"

    def __init__(self, job: Job) -> None:
        spaces = common_spaces(job.tasks, job.task)
        self.host = Host(job, spaces, games_maker(job, spaces))

    def ask(self, request: bytes) -> None:
        self.held = self.host.answer(request)

    def answer(self, what: str) -> bytes:
        return self.held

    def close(self) -> None: ...


def both(job: Job, lanes: int) -> tuple[Env, Env]:
    """The same environments at home and elsewhere."""
    spaces = common_spaces(job.tasks, job.task)
    remote = RemoteMaker([Direct(job) for _ in range(lanes)], job, spaces)
    return tuple(make(job.tasks[0], "train", 0) for make in (env_maker(job, spaces), remote))  # type: ignore[return-value]


def assert_alike(one: Env, other: Env, turns: int, seed: int = 0) -> int:
    """Play both alike; how many episodes ended."""
    rng, ended = np.random.default_rng(seed), 0
    for _ in range(turns):
        actions = rng.integers(one.spaces.actions, size=one.count)
        for env in (one, other):
            env.send(actions)
        a, b = one.receive(), other.receive()
        for mine, theirs in zip(a, b, strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()
        ended += int(((a.flags & (ENDED | CUT)) != 0).sum())
    return ended


@pytest.mark.parametrize(("games", "lanes"), [(1, 1), (1, 3), (5, 1), (5, 2), (4, 4)])
def test_remote_games_are_the_local_ones_bit_for_bit(games: int, lanes: int) -> None:
    local, remote = both(job_of(games), lanes)
    assert local.count == remote.count == games
    assert local.reset().tobytes() == remote.reset().tobytes()
    assert assert_alike(local, remote, 80) > games
    remote.close()


@pytest.mark.atari
@pytest.mark.parametrize("obs", ["ram", "pixels"])
def test_a_state_moves_between_home_and_server_and_back(obs: str) -> None:
    local, remote = both(job_of(3, "Krull", **{"task.obs": obs}), 2)
    local.reset()
    remote.reset()
    assert_alike(local, remote, 10)
    here, there = local.state(), remote.state()
    assert {name: c.tobytes() for name, c in here.items()} == {
        name: c.tobytes() for name, c in there.items()
    }
    assert_alike(local, remote, 5, seed=1)
    local.restore(there)
    remote.restore(here)
    assert_alike(local, remote, 10, seed=2)
    with pytest.raises(DamagedData):
        remote.restore({})


def test_games_of_one_agent_differ_from_each_other() -> None:
    local, _ = both(job_of(4), 1)
    assert len({row.tobytes() for row in local.reset()}) == 4


def test_an_error_reaches_the_agent_and_the_environment_can_go_on() -> None:
    local, remote = both(job_of(2), 2)
    for env in (local, remote):
        with pytest.raises(RankFailed, match="stepped before its first reset"):
            env.send(np.array([0, 0]))
            env.receive()
        env.reset()
        for action in (2, -1):
            with pytest.raises(RankFailed, match=f"has the actions 0 to 1, not {action}"):
                env.send(np.array([action, 0]))
                env.receive()
        env.send(np.array([0, 1]))
        assert len(env.receive().reward) == 2


def test_an_unknown_task_or_environment_is_refused() -> None:
    job = job_of(1)
    spaces = common_spaces(job.tasks, job.task)
    maker = RemoteMaker([Direct(job)], job, spaces)
    with pytest.raises(ProtocolError, match="'os:Evil-v0' is no task of this job: CartPole-v1"):
        maker("os:Evil-v0", "train", 0)
    env = maker(TASK, "train", 0)
    env.close()
    with pytest.raises(ProtocolError, match="does not exist: make it first"):
        env.reset()


@pytest.mark.parametrize("data", [b"", b"CENV", b"x" * 16, wire.HEAD.pack(b"CENV", 99, 0, 0, 0)])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.read_head(data)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"x" * 5, "answered by 5 bytes"),
        (np.array([np.nan]).tobytes() + bytes(1 + 16), "not finite"),
        (bytes(8) + b"\x40" + bytes(16), "flags"),
        (bytes(8) + b"\x01" + bytes(16), "flags"),  # an ended episode lacks its next start
    ],
)
def test_a_step_that_breaks_its_promise_is_refused(body: bytes, words: str) -> None:
    _, remote = both(job_of(1), 1)
    landing = remote._landings[0]  # type: ignore[attr-defined]
    with pytest.raises(ProtocolError, match=words):
        landing.take(memoryview(body))


class Wire:
    """A port of queues in place of MPI."""

    peer = 0

    def __init__(self, inward: "queue.Queue[bytes]", outward: "queue.Queue[bytes]") -> None:
        self.inward, self.outward = inward, outward

    def post(self, data: wire.Bytes, most: int) -> None:
        self.outward.put(bytes(data))

    def poll(self) -> bytes | None:
        try:
            found = self.inward.get_nowait()
        except queue.Empty:
            return None
        if found == b"gone":
            raise wire.Vanished("killed")
        return found

    def close(self) -> None: ...


class Board:
    """A switchboard with real workers in a thread, and its agents' ends."""

    def __init__(self, jobs: list[Job], folder: Path) -> None:
        workers = [Worker(job, folder / "server.log") for job in jobs]
        for worker in workers:
            worker.ready(lambda: None)
        self.queues = [(queue.Queue[bytes](), queue.Queue[bytes]()) for _ in jobs]
        seats = [
            Seat(k, Wire(*self.queues[k]), worker, 1 << 20)  # type: ignore[arg-type]
            for k, worker in enumerate(workers)
        ]
        self.workers, self.server = workers, EnvServer(seats, lambda: None)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.makers = [
            RemoteMaker([self.lane(k)], job, common_spaces(job.tasks, job.task))
            for k, job in enumerate(jobs)
        ]

    def lane(self, k: int, timeout: float = 60) -> Lane:
        port = Wire(self.queues[k][1], self.queues[k][0])
        return Lane(port, "rank 9 on there", 1 << 20, lambda peer, what: None, timeout)  # type: ignore[arg-type]


def test_an_environment_that_hangs_blocks_nobody_else_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for the worker's plugins
    board = Board([job_of(1, "plugins:Hangs-v0"), job_of(1)], tmp_path)
    stuck, fine = (maker(maker.job.tasks[0], "train", 0) for maker in board.makers)
    board.makers[0].channels[0]._timeout = 1.0  # type: ignore[attr-defined]
    stuck.reset()
    fine.reset()
    with pytest.raises(ProtocolError, match=r"rank 9 on there has not answered for 1 s.*: step of"):
        for _ in range(20):
            stuck.send(np.array([0]))
            stuck.receive()
    for _ in range(50):
        fine.send(np.array([1]))
        fine.receive()
    board.queues[0][0].put(b"gone")  # the agent is killed: its environments are closed
    board.workers[0].process.wait(20)
    assert board.workers[0].process.returncode == -9
    fine.send(np.array([1]))
    assert fine.receive().reward[0] == 1
    board.makers[1].close()
    board.thread.join(20)
    assert not board.thread.is_alive()
    assert board.workers[1].process.returncode == 0


def test_an_agent_that_breaks_the_rules_is_told_and_left_alone(tmp_path: Path) -> None:
    board = Board([job_of(1), job_of(1)], tmp_path)
    board.queues[0][0].put(b"nonsense")
    answer = board.queues[0][1].get(timeout=20)
    assert wire.read_head(answer).failed
    fine = board.makers[1](TASK, "train", 1)
    fine.reset()
    fine.send(np.array([1]))
    assert fine.receive().reward[0] == 1
    board.makers[1].close()
    board.thread.join(20)
    assert not board.thread.is_alive()


def test_a_slow_answer_is_waited_for(tmp_path: Path) -> None:
    asked, answered = queue.Queue[bytes](), queue.Queue[bytes]()
    lane = Lane(Wire(answered, asked), "there", 100, lambda peer, what: None, 30)  # type: ignore[arg-type]
    for pause in (0.0, 0.002, 0.05, 0.0):
        lane.ask(b"request")
        start = time.monotonic()
        threading.Timer(pause, answered.put, [b"answer"]).start()
        assert lane.answer("something") == b"answer"
        assert time.monotonic() - start >= pause * 0.5
