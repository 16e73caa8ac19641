"""`canal-mpi train` on every rank: agree on the job, find the role, live it, leave together."""

import json
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from canal_mpi import __version__, config, log
from canal_mpi.errors import CanalError, StorageError, UsageError
from canal_mpi.log import logger
from canal_mpi.rank.live import View
from canal_mpi.rank.plan import Plan, Request, make_plan
from canal_mpi.rank.world import Agreed, World, library_versions
from canal_mpi.results.files import RunDirectory, write_whole
from canal_mpi.topology.graphs import lonely
from canal_mpi.topology.link import SoloLink
from canal_mpi.types import Link

INTERRUPTED = 130


def train(request: Request) -> int:
    """The whole program on one rank; returns its exit code."""
    return conduct(lambda world: Run(world, request).go(), request.verbosity)


def conduct(program: Callable[[World], None], verbosity: int = 0) -> int:
    """Run a program on this rank of the world; trouble is one line and an exit code."""
    world = World()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        world.open()
        program(world)
    except Agreed as error:
        return _end_together(world, str(error), error.code)
    except KeyboardInterrupt:
        return _interrupted(world)
    except CanalError as error:
        return _fail(world, f"{_who(world)}: {error}", error.code)
    except (Exception, SystemExit) as error:
        logger.error("%s", traceback.format_exc())
        if verbosity > 0:
            traceback.print_exc()
        words = f"{_who(world)} failed: {type(error).__name__}: {error}"
        return _fail(world, f"{words}{_log_hint()}", 70)
    return 0


def _who(world: World) -> str:
    p = world.watch.mine
    where = f" in round {p.round} ({p.phase} {p.task})" if p.round else ""
    return f"agent {world.agent} (rank {world.rank} on {world.host}){where}"


def _complain(message: str, code: int) -> int:
    if message:
        print(f"canal-mpi: {message}", file=sys.stderr, flush=True)
    return code


def _end_together(world: World, message: str, code: int) -> int:
    """Every rank knows what is wrong; rank 0 says it before the first of the others leaves."""
    _ignore_signals()
    if world.rank == 0:
        _complain(message, code)
    else:
        sleep(0.5)
    world.hush()
    return code


def _interrupted(world: World) -> int:
    """Ctrl-C or SIGTERM: rank 0 says so, unless the job is being taken down for another reason."""
    _ignore_signals()
    if world.rank == 0 and (world.witness is None or world.witness.may_speak()):
        _complain("interrupted; finished rounds are safe.", INTERRUPTED)
    world.abort(INTERRUPTED)
    return INTERRUPTED


def _ignore_signals() -> None:
    """The end has begun: a launcher that cleans up must not start another one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _log_hint() -> str:
    """Where the traceback is, once there is a log."""
    files = [h.baseFilename for h in logger.handlers if isinstance(h, logging.FileHandler)]
    return f"; the traceback is in {files[0]}." if files else "; -v shows the traceback."


def _fail(world: World, message: str, code: int) -> int:
    """One rank's trouble ends them all."""
    _ignore_signals()
    logger.error("%s", message)
    if world.witness is None or world.witness.may_speak():
        _complain(message, code)
    world.abort(code)
    return code


class Run:
    """One run, from the handshake to the last line."""

    def __init__(self, world: World, request: Request) -> None:
        self.world, self.request = world, request
        self._told = -1  # the round that the witness knows of

    def go(self) -> None:
        """Everything a user can get wrong is found before the first environment is made."""
        world, request = self.world, self.request
        world.handshake(json.dumps(asdict(request), sort_keys=True, default=str))
        self.plan = Plan.from_json(
            world.from_root(lambda: make_plan(request, world.size).to_json())
        )
        self.number = world.agent = self.plan.first_agent + world.rank
        world.watch.timeout = self.plan.job.timeout
        self.directory = RunDirectory(self.plan.folder)
        world.together(self._create_folder)
        world.together(self._open_log)
        if world.rank == 0:
            self._open_results()
        agent = world.together(self._build)
        if world.rank == 0:
            self._greet(agent.replay.nbytes, agent.memory.nbytes)
            world.watch.on_beat = self.view.refresh
        agent.record.sink.flush(0)
        agent.run()
        world.finish()
        if world.rank == 0:
            self._close_results()

    def _create_folder(self) -> None:
        """The run directory, on rank 0."""
        job, folder = self.plan.job, self.plan.folder
        if self.world.rank == 0:
            rows = min(job.train.frames, job.share.rows)
            needed = (4 << 20) + rows * 32 * len(self.plan.orders[0]) * self.world.size
            self.directory.create(self.request.force, needed)
            write_whole(folder / "job.toml", config.to_toml(job, explain=True).encode())

    def _open_log(self) -> None:
        """On every host, the files of its own agents."""
        folder = self.plan.folder
        try:
            log.to_file(folder / "logs" / f"agent-{self.number}.log", self.request.verbosity > 0)
        except OSError as error:
            raise StorageError(f"can't write to {folder}: {error.strerror}.") from error
        place = (self.number, self.world.rank, self.world.host, os.getpid())
        logger.info("agent %d is rank %d on %s, process %d", *place)

    def _open_results(self) -> None:
        from canal_mpi.results.store import RunInfo, Store

        plan, world = self.plan, self.world
        info = RunInfo(
            plan.run_id,
            plan.job.seed,
            config.to_toml(plan.job),
            plan.job.tasks,
            plan.first_agent,
            plan.orders,
            plan.edges,
            library_versions(world.comm),
        )
        self.store = Store(plan.folder / "run.h5", info)
        self.view = View(
            world.watch,
            plan.folder,
            world.hosts,
            len(plan.orders[0]),
            plan.job.train.frames,
            self.request.verbosity,
        )

    def _build(self) -> Any:
        """This rank's agent."""
        from canal_mpi.rank import build
        from canal_mpi.rank.collect import Collector

        plan, world, root = self.plan, self.world, self.world.rank == 0
        store, view = (self.store, self.view) if root else (None, None)
        sink = Collector(world, plan.folder, self.number, store, view)
        sink.add(
            "agents",
            agent=self.number,
            rank=world.rank,
            host=world.host,
            machine=world.cards[world.rank]["machine"],
            device=plan.job.learn.device,
            role="agent",
        )
        beat = self._beat
        order = plan.orders[world.rank]
        peers = partial(plan.peers, self.number)
        try:
            return build.agent(plan.job, self.number, order, self._link(), sink, beat, peers)
        except MemoryError as error:
            raise UsageError(
                f"not enough memory: {error}; lower replay.capacity or learn.widths."
            ) from error

    def _link(self) -> Link:
        if self.world.comm is None or not self.plan.edges:
            return SoloLink(self.number)
        from canal_mpi.topology.mpilink import MpiLink

        limit = self.plan.job.share.limit_mb << 20
        return MpiLink(self.world.comm, set(self.plan.edges), self.world.watch.idle, limit)

    def _beat(self, progress: Any) -> None:
        self.world.watch.progress[self.world.rank] = progress
        if self.world.witness and progress.round != self._told:
            self._told = progress.round
            world, plan = self.world, self.plan
            self.world.witness.tell(
                f"agent {self.number} (rank {world.rank} on {world.host}) was killed or left "
                f"without a word in round {progress.round}. Finished rounds are safe in "
                f"{plan.folder}/run.h5."
            )
        self.world.watch.beat(progress)

    def _greet(self, replay_bytes: int, memory_bytes: int) -> None:
        """The first lines: what runs, where, and what it costs."""
        plan, job, world = self.plan, self.plan.job, self.world
        size, hosts = world.size, len(set(world.hosts))
        sharing = f"{job.share.policy} over {job.share.topology}" if plan.edges else "no sharing"
        self.view.say(
            f"canal-mpi {__version__} · job {job.name} · {size} agent{'s' * (size > 1)} on "
            f"{hosts} host{'s' * (hosts > 1)} · {sharing} · seed {job.seed} · "
            f"{len(plan.orders[0])} tasks × {job.train.frames:,} steps · "
            f"replay {replay_bytes / 1e6:.0f} MB and memory {memory_bytes / 1e6:.0f} MB an agent · "
            f"{plan.folder}"
        )
        file = self.request.job_file
        job_flag = f" --job {shlex.quote(file)}" if file else ""
        if world.launcher is None:
            self.view.say(
                f"One agent (agent {self.number}), no sharing; five that share: "
                f"mpirun -np 5 canal-mpi train{job_flag}"
            )
        alone = lonely(set(plan.edges), size) if job.share.policy != "none" and size > 1 else []
        if alone:
            self.view.say(f"warning: no edge touches agent {', '.join(map(str, alone))}.")
        self.view.event("start", agents=size, job=job.name, seed=job.seed, hosts=world.hosts)

    def _close_results(self) -> None:
        self.store.write("finished")
        self.view.write_status("finished")
        self.view.event("finished")
        job = self.plan.job
        self.view.ending(self.store, job.train.frames, job.evaluation.max_steps)
        folder = _short_path(self.plan.folder)
        again = f"canal-mpi train --job {shlex.quote(f'{folder}/job.toml')}"
        start = f"mpirun -np {self.world.size} " if self.world.launcher else ""
        sharing = bool(self.plan.edges)
        other = f"{start}{again} --share none" if sharing else f"mpirun -np 5 {again} --share exact"
        self.view.say(
            f"Results: {folder}/run.h5\nNext:\n"
            f"  {other}   ({'the same without sharing' if sharing else 'five that share'})"
        )


def _short_path(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
