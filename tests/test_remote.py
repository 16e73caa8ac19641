"""Remote environments without MPI: the worker's answers, the agent's side, the server."""

import queue
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from canal_mpi.config import resolve
from canal_mpi.envs import common_spaces, env_maker
from canal_mpi.envs.client import HEAD, Channel, Message, RemoteMaker, unpack_step
from canal_mpi.envs.server import EnvServer, ServerChannel, WorkerEnvs
from canal_mpi.errors import DamagedData, NotRepeatable, ProtocolError, RankFailed
from canal_mpi.interfaces import TERMINATED, TRUNCATED, Array, Env
from canal_mpi.settings import Job

TASK = "CartPole-v1"


def job_of(games: int, task: str = TASK, **settings: object) -> Job:
    return resolve(
        {"tasks": [task], "train.num_envs": games, "task.max_steps": 30} | settings, environ={}
    )


class Direct:
    """A port straight into a worker's environments."""

    peer = 9

    def __init__(self, job: Job) -> None:
        self.envs = WorkerEnvs(job)

    def post(self, data: bytes) -> None:
        self.held = self.envs.answer(data)

    def poll(self) -> bytes:
        return self.held


def direct(job: Job) -> Channel:
    return Channel(Direct(job), "rank 9 on there", lambda peer, what: None, 60)


def both(job: Job, channels: int) -> tuple[Env, Env]:
    """The same environments at home and elsewhere."""
    spaces = common_spaces(job.tasks, job.task)
    remote = RemoteMaker([direct(job) for _ in range(channels)], job, spaces)
    return tuple(make(job.tasks[0], "train", 0) for make in (env_maker(job, spaces), remote))  # type: ignore[return-value]


def assert_alike(one: Env, other: Env, turns: int, seed: int = 0) -> int:
    """Play both alike; how many episodes ended."""
    rng, ended = np.random.default_rng(seed), 0
    for _ in range(turns):
        actions = rng.integers(one.spaces.actions, size=one.count)
        for env in (one, other):
            env.send(actions)
        a, b = one.recv(), other.recv()
        for mine, theirs in zip(a, b, strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()
        ended += int(((a.flags & (TERMINATED | TRUNCATED)) != 0).sum())
    return ended


def test_remote_games_are_the_local_ones_bit_for_bit() -> None:
    for games, channels in [(1, 1), (1, 3), (5, 1), (5, 2), (4, 4)]:
        local, remote = both(job_of(games), channels)
        assert local.count == remote.count == games
        assert local.reset().tobytes() == remote.reset().tobytes()
        assert assert_alike(local, remote, 80) > games
        remote.close()


@pytest.mark.atari
def test_a_state_moves_between_home_and_server_and_back() -> None:
    for obs in ["ram", "pixels"]:
        local, remote = both(job_of(3, "Krull", **{"task.obs": obs}), 2)
        local.reset()
        remote.reset()
        assert_alike(local, remote, 10)
        here, there = local.state_dict(), remote.state_dict()
        assert {name: c.tobytes() for name, c in here.items()} == {
            name: c.tobytes() for name, c in there.items()
        }
        assert_alike(local, remote, 5, seed=1)
        local.load_state_dict(there)
        remote.load_state_dict(here)
        assert_alike(local, remote, 10, seed=2)
        with pytest.raises(DamagedData):
            remote.load_state_dict({})


def test_games_of_one_agent_differ_from_each_other() -> None:
    local, _ = both(job_of(4), 1)
    assert len({row.tobytes() for row in local.reset()}) == 4


def test_an_error_reaches_the_agent_and_the_environment_can_go_on() -> None:
    local, remote = both(job_of(2), 2)
    for env in (local, remote):
        with pytest.raises(RankFailed, match="stepped before its first reset"):
            env.send(np.array([0, 0]))
            env.recv()
        env.reset()
        for action in (2, -1):
            with pytest.raises(RankFailed, match=f"has the actions 0 to 1, not {action}"):
                env.send(np.array([action, 0]))
                env.recv()
        env.send(np.array([0, 1]))
        assert len(env.recv().reward) == 2


class Drifts(gymnasium.Env[Array, np.int64]):
    """Shows how often it was reset, so that no episode can be played again."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    resets = 0

    def reset(self, **_: object) -> tuple[Array, dict[str, object]]:
        self.resets += 1
        return np.array([self.resets], np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        return np.array([self.resets], np.float32), 0.0, False, False, {}


gymnasium.register("Drifts-v0", lambda **_: Drifts())


def test_an_episode_that_cannot_be_repeated_is_told_as_that_and_begins_anew() -> None:
    for env in both(job_of(3, "Drifts-v0"), 2):
        env.reset()
        with pytest.raises(NotRepeatable, match="the same moves led elsewhere"):
            env.load_state_dict(env.state_dict())
        env.reset()
        env.send(np.array([0, 1, 0]))
        assert len(env.recv().reward) == 3


def test_an_unknown_task_or_environment_is_refused() -> None:
    job = job_of(1)
    spaces = common_spaces(job.tasks, job.task)
    maker = RemoteMaker([direct(job)], job, spaces)
    with pytest.raises(ProtocolError, match="'os:Evil-v0' is no task of this job: CartPole-v1"):
        maker("os:Evil-v0", "train", 0)
    env = maker(TASK, "train", 0)
    env.close()
    with pytest.raises(ProtocolError, match="does not exist: make it first"):
        env.reset()


def test_what_is_no_message_is_refused() -> None:
    for data in [b"", b"CENV", b"x" * 16, HEAD.pack(b"CENV", 99, False, 0)]:
        with pytest.raises(ProtocolError):
            Message.unpack(data)


def test_a_step_that_breaks_its_promise_is_refused() -> None:
    for body, words in [
        (b"x" * 5, "answered by 5 bytes"),
        (np.array([np.nan]).tobytes() + bytes(1 + 16), "not finite"),
        (bytes(8) + b"\x40" + bytes(16), "flags"),
        (bytes(8) + b"\x01" + bytes(16), "flags"),  # an ended episode lacks its next start
    ]:
        _, remote = both(job_of(1), 1)
        with pytest.raises(ProtocolError, match=words):
            unpack_step(body, remote._step)  # type: ignore[attr-defined]


class QueuePort:
    """A port of queues in place of MPI."""

    peer = 0

    def __init__(self, inward: "queue.Queue[bytes]", outward: "queue.Queue[bytes]") -> None:
        self.inward, self.outward = inward, outward

    def post(self, data: bytes) -> None:
        self.outward.put(data)

    def poll(self) -> bytes | None:
        try:
            found = self.inward.get_nowait()
        except queue.Empty:
            return None
        if found == b"gone":
            raise ConnectionError("killed")
        return found


class ThreadServer:
    """An env server with real workers in a thread, and its agents' ends."""

    def __init__(self, jobs: list[Job], folder: Path) -> None:
        self.queues = [(queue.Queue[bytes](), queue.Queue[bytes]()) for _ in jobs]
        self.channels = [
            ServerChannel(k, QueuePort(*self.queues[k]), job, folder / "server.log")
            for k, job in enumerate(jobs)
        ]
        for channel in self.channels:
            channel.ready(lambda: None)
        self.server = EnvServer(self.channels, lambda: None)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.makers = [
            RemoteMaker([self.channel(k)], job, common_spaces(job.tasks, job.task))
            for k, job in enumerate(jobs)
        ]

    def channel(self, k: int) -> Channel:
        port = QueuePort(self.queues[k][1], self.queues[k][0])
        return Channel(port, "rank 9 on there", lambda peer, what: None, 60)


def test_an_environment_that_hangs_blocks_nobody_else_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for the worker's plugins
    server = ThreadServer([job_of(1, "plugins:Hangs-v0"), job_of(1)], tmp_path)
    stuck, fine = (maker(maker.job.tasks[0], "train", 0) for maker in server.makers)
    server.makers[0].channels[0]._timeout = 1.0
    stuck.reset()
    fine.reset()
    with pytest.raises(ProtocolError, match=r"rank 9 on there has not answered for 1 s.*: step of"):
        for _ in range(20):
            stuck.send(np.array([0]))
            stuck.recv()
    for _ in range(50):
        fine.send(np.array([1]))
        fine.recv()
    server.queues[0][0].put(b"gone")  # the agent is killed: its environments are closed
    assert server.channels[0].process.wait(20) == -9
    fine.send(np.array([1]))
    assert fine.recv().reward[0] == 1
    server.makers[1].close()
    server.thread.join(20)
    assert not server.thread.is_alive()
    assert server.channels[1].process.returncode == 0


def test_an_agent_that_breaks_the_rules_is_told_and_left_alone(tmp_path: Path) -> None:
    server = ThreadServer([job_of(1), job_of(1)], tmp_path)
    server.queues[0][0].put(b"nonsense")
    answer = server.queues[0][1].get(timeout=20)
    assert Message.unpack(answer).failed
    fine = server.makers[1](TASK, "train", 1)
    fine.reset()
    fine.send(np.array([1]))
    assert fine.recv().reward[0] == 1
    server.makers[1].close()
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_a_slow_answer_is_waited_for(tmp_path: Path) -> None:
    asked, answered = queue.Queue[bytes](), queue.Queue[bytes]()
    port = QueuePort(answered, asked)
    channel = Channel(port, "there", lambda peer, what: None, 30)
    for pause in (0.0, 0.002, 0.05, 0.0):
        channel.port.post(b"request")
        start = time.monotonic()
        threading.Timer(pause, answered.put, [b"answer"]).start()
        assert channel.answer("something") == b"answer"
        assert time.monotonic() - start >= pause * 0.5
