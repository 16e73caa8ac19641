"""Puts a rank together: its agent and link, or its env server."""

import fcntl
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import numpy as np

from canal_mpi.agent.lessons import Sharing
from canal_mpi.agent.loop import Agent
from canal_mpi.agent.recorder import Recorder
from canal_mpi.config import on_host
from canal_mpi.envs import common_spaces, env_maker
from canal_mpi.envs.client import LIMIT, Channel, RemoteMaker
from canal_mpi.envs.server import EnvServer, ServerChannel
from canal_mpi.errors import CanalError, DamagedData, UsageError, lookup
from canal_mpi.interfaces import (
    Array,
    Beat,
    Columns,
    Embed,
    EnvMaker,
    Learner,
    Link,
    OnTransfer,
    Progress,
    Saver,
    Sink,
    Spaces,
    Step,
)
from canal_mpi.learn import ALGORITHMS
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.lesson import Lesson, pack, pack_offers, unpack, unpack_offers
from canal_mpi.membuf.rehearsal import Rehearsal
from canal_mpi.membuf.replay import Replay, Sampler
from canal_mpi.membuf.selection import POLICIES, play_embedding
from canal_mpi.rank.plan import Plan
from canal_mpi.rank.world import World
from canal_mpi.results.files import read_arrays, read_finite
from canal_mpi.settings import Job
from canal_mpi.state import random_stream, seed_integer, strip_prefix, while_compiling
from canal_mpi.topology import Tag
from canal_mpi.topology.exchange import Exchange, alone

if TYPE_CHECKING:
    from canal_mpi.topology.transport import MpiPort

logger = logging.getLogger(__name__)

LARGEST = 1 << 30  # bytes of a learner
COMPILED_WITHIN = 60.0  # seconds
HEADS = 1 << 16  # what a message takes beside its arrays


def make_learner(job: Job, agent: int, spaces: Spaces, first_task: str) -> Learner:
    """The learner that the job names, with this agent's first weights."""
    make = lookup("algorithm", job.learn.algorithm, ALGORITHMS)
    made: Learner = make(spaces, job, partial(seed_integer, job.seed, agent, ""))
    made.set_task(first_task)
    made.act(np.zeros((1, *spaces.shape), dtype=spaces.dtype))  # what can't work fails here
    return made


def compile_ahead(job: Job, spaces: Spaces, beat: Callable[[], None]) -> None:
    """Compile what training calls, before anybody's silence counts.

    That takes many seconds on a slow device, once: the first process of a host compiles, the others
    wait for it and find the machine code on disk. A learner of another kind compiles for itself.
    """
    if job.learn.algorithm != "dqn":
        return
    with _compiling_alone(beat), while_compiling(beat):
        learner = make_learner(job, 0, spaces, job.tasks[0])
        replay = Replay(spaces, 2 * job.learn.n_step, replace(job.learn, batch_size=2))
        obs, zero = np.zeros((1, *spaces.shape), dtype=spaces.dtype), np.zeros(1)
        replay.own.start(obs)
        for _ in range(2 * job.learn.n_step):
            step = Step(obs, zero.astype(np.float32), zero.astype(np.uint8), obs)
            replay.own.add(zero.astype(np.int64), step)
        batch = replay.sample(np.random.default_rng(0))._replace(task=job.tasks[0])
        learner.update(batch)
        told = np.zeros((2, spaces.actions), dtype=np.float32)
        learner.update(batch._replace(stored_q=told, distill=1.0))


@contextmanager
def _compiling_alone(beat: Callable[[], None]) -> Iterator[None]:
    """One process of this host at a time; where files can't be locked, all at once.

    Nobody waits longer than a minute: the one that compiles may be stopped.
    """
    deadline = monotonic() + COMPILED_WITHIN
    with Path(__file__).open("rb") as file:
        while monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                beat()
                sleep(0.02)
                continue
            except OSError as error:
                logger.info("%s can't be locked: %s", file.name, error)
            break
        yield


def load_learner(learner: Learner, job: Job, agent: int) -> None:
    """What an agent of an earlier run has learnt; agents beyond its own begin again at its first.

    Only the learner is taken: neither rows nor anything that is rehearsed.
    """
    found = sorted(Path(job.init).glob("checkpoints/agent-*"), key=lambda one: int(one.name[6:]))
    path = found[agent % len(found)] / "learner.h5" if found else Path(job.init)
    if not path.is_file():
        raise UsageError(f"--init {job.init}: agent {agent} finds no {path} on its host.")
    try:
        learner.load_state_dict(read_finite(path, LARGEST))
    except (DamagedData, LookupError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--init {job.init}: what agent {agent} has learnt there does not fit this job's "
            f"network and observations: {error}."
        ) from error


def embedder(job: Job, spaces: Spaces) -> Embed:
    """How the policy turns play into an embedding."""
    if job.share.policy == "wasserstein":
        return lambda rows, rng: play_embedding(rows, spaces.actions)

    sampler = Sampler(spaces, replace(job.learn, gamma=0.0, n_step=1))

    def simnet(rows: Columns, rng: np.random.Generator) -> Array:
        from canal_mpi.learn.simnet import train_simnet

        parts = [(Buffer.of_lesson(spaces, rows), job.learn.batch_size)]
        return train_simnet(spaces, job, lambda: sampler.sample(parts, rng))

    return simnet


def make_agent(
    job: Job,
    number: int,
    order: Sequence[str],
    new_link: Callable[[OnTransfer], Link],
    sink: Sink,
    beat: Beat,
    peers: Callable[[int, str], Sequence[int]] = lambda round_, task: (),
    packs: bool = True,
    saver: Saver | None = None,
    envs: Callable[[Job, Spaces], EnvMaker] = env_maker,
    throttle: Callable[[], None] = lambda: None,
    spaces: Spaces | None = None,
) -> Agent:
    """An agent with everything it needs; `envs` says who plays its environments."""
    spaces = spaces or common_spaces(job.tasks, job.task)
    replay = Replay(spaces, job.replay.buffer_size, job.learn, job.train.num_envs)
    record = Recorder(sink, beat, number, spaces.row_bytes, throttle)
    link, policy = new_link(record.moved), lookup("policy", job.share.policy, POLICIES)
    return Agent(
        job,
        number,
        order,
        envs=envs(job, spaces),
        learner=make_learner(job, number, spaces, order[0]),
        replay=replay,
        rehearsal=Rehearsal(spaces, job.rehearsal.rows, replay.sampler),
        sharing=Sharing(job, number, link, policy, record, embedder(job, spaces), peers, packs),
        record=record,
        saver=saver,
    )


def make_link(world: World, plan: Plan) -> Callable[[OnTransfer], Link]:
    """Connects this agent, over MPI where there is somebody to share with; what makes its link."""
    share, comm = plan.job.share, world.agents_comm
    if comm is None or world.agents < 2 or not (plan.edges or share.lessons):
        return partial(alone, agent=world.agent)
    from canal_mpi.topology.transport import MpiTransport

    limit, idle = (share.max_message_mb << 20) + HEADS, world.heartbeat.idle
    transport = MpiTransport(comm, idle, limit)
    return partial(Exchange, world.agent, set(plan.edges), transport, share, plan.job.tasks)


def should_compress(world: World, plan: Plan) -> bool:
    """Whether lessons are packed: between hosts, unless the job says something else."""
    pack = plan.job.share.pack
    return pack == "always" or (pack == "auto" and len(set(world.hosts[: world.agents])) > 1)


def offer_earlier_lessons(world: World, plan: Plan, link: Exchange, agent: Agent) -> int:
    """Offer the lessons of an earlier run, which the root reads; how many there are."""
    from canal_mpi.results.checkpoint import earlier_lessons

    job, share, found, mine = plan.job, plan.job.share, [], []
    if not share.lessons:
        return 0
    if world.is_root:
        limit, spaces = share.max_message_mb << 20, agent.replay.spaces
        found = earlier_lessons(share.lessons, job.tasks, spaces, limit)
        if share.lessons_tag:
            found = [_with_network(job, spaces, lesson, limit) for lesson, _ in found]
    rng = random_stream(job.seed, world.agent, "", "lessons")
    for lesson, _ in found:
        embedding = agent.sharing.embedding(lesson.rows, rng)
        mine.append(replace(lesson.offer, embedding=embedding))
        world.heartbeat.beat(world.heartbeat.mine)
    offers = unpack_offers(world.broadcast(pack_offers(mine), world.agents))
    lessons = {lesson.offer.key: data for lesson, data in found}
    holder = world.root if world.size > 1 else world.agent
    link.stock(offers, lessons, holder)
    return len(offers)


def _with_network(job: Job, spaces: Spaces, lesson: Lesson, limit: int) -> tuple[Lesson, bytes]:
    """A lesson of an earlier run with the network that its donor had at the end, or its best."""
    offer, tag = lesson.offer, job.share.lessons_tag
    folder = Path(job.share.lessons) / "checkpoints" / f"agent-{offer.donor}"
    try:
        network: Columns = {}
        if tag == "best" and (folder / "best.h5").is_file():
            network = strip_prefix(offer.task, read_arrays(folder / "best.h5", LARGEST))
        if not network:  # nothing was better than the newest
            learner = make_learner(job, offer.donor, spaces, offer.task)
            learner.load_state_dict(read_arrays(folder / "learner.h5", LARGEST))
            learner.set_task(offer.task)
            network = learner.get_weights()
    except (CanalError, LookupError, ValueError, RuntimeError) as error:
        raise UsageError(f"--lessons {job.share.lessons}: no {tag} network: {error}") from error
    data = pack(offer.donor, offer.round, offer.task, lesson.rows, network)
    return unpack(data, replace(offer, bytes=len(data)), spaces, limit), data


def env_server_of(world: World, agent: int) -> int:
    """The rank that plays for an agent: agents are dealt over the servers in turn."""
    servers = [rank for rank in world.alive if rank >= world.agents]
    return servers[agent % len(servers)]


def make_ports(world: World, agent: int, games: int) -> "list[MpiPort]":
    """This rank's ends of the channels between an agent and its env server.

    There are so many that the server's cores are used and no game waits needlessly.
    """
    from canal_mpi.topology.transport import MpiPort

    server = env_server_of(world, agent)
    served = [one for one in world.living_agents if env_server_of(world, one) == server]
    cores = int(world.host_info[server]["cores"])
    tags, peer = (Tag.ENV_ANSWER, Tag.ENV_REQUEST), server
    if world.is_env_server:
        tags, peer = (Tag.ENV_REQUEST, Tag.ENV_ANSWER), agent
    return [
        MpiPort(world.polled, peer, tags[0] + k, tags[1] + k, LIMIT)
        for k in range(max(1, min(games, cores // len(served), 64)))
    ]


def make_remote_envs(world: World, job: Job, spaces: Spaces) -> RemoteMaker:
    """Makes environments that an env server plays; `job` as it is on the agent's host."""
    heartbeat, ports = world.heartbeat, make_ports(world, world.rank, job.train.num_envs)
    name = heartbeat.names[env_server_of(world, world.rank)]
    channels = [Channel(port, name, heartbeat.attend, job.timeout) for port in ports]
    return RemoteMaker(channels, job, spaces)


def make_env_server(world: World, job: Job, log_file: Path) -> EnvServer:
    """This rank's server, its workers loaded; they play at the speed of its device."""
    channels = []
    for agent in world.living_agents:
        if env_server_of(world, agent) == world.rank:
            here = on_host(job, world.devices[agent].host)
            for port in make_ports(world, agent, here.train.num_envs):
                channels.append(ServerChannel(agent, port, here, log_file, world.device.speed))
    for channel in channels:
        channel.ready(lambda: world.heartbeat.beat(world.heartbeat.mine))
    world.heartbeat.progress[world.rank] = Progress("serving")
    return EnvServer(channels, lambda: world.heartbeat.idle(world.root, "serving"))
