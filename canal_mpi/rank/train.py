"""`canal-mpi train` on every rank: agree on the job, build this rank's part, run it, leave."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from time import monotonic, time
from typing import Any

import canal_mpi
from canal_mpi import config
from canal_mpi.agent.loop import Agent
from canal_mpi.agent.state import restore
from canal_mpi.config import on_host
from canal_mpi.envs import common_spaces, env_maker
from canal_mpi.envs.client import RemoteMaker
from canal_mpi.errors import (
    DamagedData,
    Stopped,
    StorageError,
    UsageError,
    log_to_file,
    logger,
)
from canal_mpi.interfaces import Key, Progress, Spaces
from canal_mpi.launcher import Throttle
from canal_mpi.rank import build, recover, resume
from canal_mpi.rank.collect import Collector
from canal_mpi.rank.display import Display, Trackers, greeting, next_steps, resume_command
from canal_mpi.rank.plan import Plan, Request, check_env_servers, devices, make_plan
from canal_mpi.rank.resume import ResumePoint
from canal_mpi.rank.shutdown import CommonError, Shutdown, print_error, run_guarded, stop_signals
from canal_mpi.rank.world import START_TIMEOUT, World, mpi_library
from canal_mpi.results.checkpoint import Checkpoints, remove_all
from canal_mpi.results.files import RunDirectory, write_whole
from canal_mpi.results.progress import events, sittings
from canal_mpi.results.store import RunInfo, Store, timestamp
from canal_mpi.topology.exchange import Exchange

REPORT_WITHIN = 300.0  # seconds
TRACKERS_WITHIN = 60.0
LIBRARIES = ("numpy", "torch", "gymnasium", "ale-py", "h5py")  # results may depend on them


def train(request: Request) -> int:
    """The whole program on one rank; returns its exit code."""
    return run_guarded(partial(train_rank, request), request.verbosity)


def train_rank(request: Request, shutdown: Shutdown) -> Path:
    """Everything a user can get wrong is found before the first environment is made.

    Returns the folder of the run.
    """
    world = shutdown.world
    world.set_timeout(START_TIMEOUT)
    world.handshake(json.dumps(asdict(request), sort_keys=True, default=str))
    world.run_on_all(lambda: check_env_servers(request.env_servers, world.size))
    world.assign_env_servers(request.env_servers)
    if request.ft:
        world.run_on_all(lambda: recover.check_ft(world.launcher))
    directory, point = resume.open_run(world, request) if request.resume else (None, None)
    plan = Plan.from_dict(world.from_root(lambda: _plan(world, request, point)))
    for flaw in point.damaged if point and world.is_root else ():
        print_error(f"warning: {flaw} The run is resumed without it.")
    if point and point.nothing_is_left(plan):
        if world.is_root:
            print(f"{plan.folder} is finished; more rounds or tasks would go on with it.")
        world.finish()
        return plan.folder
    if point and point.gone:
        plan = replace(plan, edges=recover.remaining_edges(world, plan))
    world.agent = plan.first_agent + world.rank
    world.devices = devices(plan.job, world.hosts)
    world.set_timeout(plan.job.timeout)
    directory = directory or world.run_on_all(lambda: RunDirectory(plan.folder))
    world.run_on_all(lambda: _prepare_folder(world, request, plan, point, directory))
    name = f"env-server-{world.rank}" if world.is_env_server else f"agent-{world.agent}"
    log_file = plan.folder / "logs" / f"{name}.log"  # on every host, those of its own ranks
    try:
        world.run_on_all(lambda: _open_log(world, log_file, request.verbosity > 0))
        TrainingRun(shutdown, request, plan, point, log_file).run()
    except (CommonError, KeyboardInterrupt):
        if not (point or shutdown.hint):  # there is nothing to resume
            _leave_nothing(world, directory, log_file)
        raise
    return plan.folder


def _plan(world: World, request: Request, point: ResumePoint | None) -> dict[str, Any]:
    hosts = world.hosts[: world.agents]
    if point is None:
        return make_plan(request, hosts, world.size).to_dict()
    return resume.resumed_plan(request, point, hosts).to_dict()


def _prepare_folder(
    world: World, request: Request, plan: Plan, point: ResumePoint | None, directory: RunDirectory
) -> None:
    """The run directory on rank 0; on every host, no checkpoints but those to resume from."""
    if point:
        resume.clean_up(world, plan.folder, point)
    elif world.is_root:
        rows = min(plan.job.train.steps, plan.job.share.rows)
        needed = (4 << 20) + rows * 32 * len(plan.orders[0]) * world.agents
        directory.create(request.force, needed)
    if world.is_root:
        write_whole(plan.folder / "job.toml", config.to_toml(plan.job, explain=True).encode())


def _leave_nothing(world: World, directory: RunDirectory, log_file: Path) -> None:
    """A start that failed leaves no folder that was not there before."""
    if world.is_root:
        directory.discard()
    with suppress(OSError):
        log_file.unlink(missing_ok=True)
        log_file.parent.rmdir()
        if not directory.existed:
            directory.path.rmdir()


def _open_log(world: World, path: Path, verbose: bool) -> None:
    try:
        log_to_file(path, verbose)
    except OSError as error:
        raise StorageError(f"can't write to {path.parent}: {error.strerror}.") from error
    logger.info("%s is %s, process %d", path.stem, world.place, os.getpid())


class TrainingRun:
    """This rank's part of a run, from the plan to the last line."""

    def __init__(
        self,
        shutdown: Shutdown,
        request: Request,
        plan: Plan,
        point: ResumePoint | None,
        log_file: Path,
    ) -> None:
        self.shutdown, self.world, self.request = shutdown, shutdown.world, request
        self.plan, self.point, self.log_file = plan, point, log_file
        self.job = on_host(plan.job, self.world.device.host)
        self.faults = list(point.gone) if point else []  # ranks that died
        self._greeted = False
        self._known: dict[int, dict[int, bytes]] = {}  # with --ft: everybody's rows
        self._reported = -1  # the round that the death reporter knows of
        self.began = time()
        self.trackers = Trackers(plan.folder, lambda words: print_error(f"warning: {words}"))
        self.display = self._open_results() if self.world.is_root else None

    def run(self) -> None:
        """Do this rank's work; with --ft again, in a smaller world, when others die."""
        world, died = self.world, False
        world.ft = self.request.ft and world.size > 1
        if world.ft:
            world.death_reporter.tell(takedown=0.0)
        while True:
            try:
                if died:
                    self._recover()
                if world.is_env_server:
                    self._serve()
                else:
                    self._learn()
                break
            except Exception as error:
                if not world.has_failed(error):
                    raise
                died = True
        if self.display:
            self.display.end(self.display.store.end)
            self.display.summarise(self.shutdown.started)
            world.close()
            self.trackers.check(TRACKERS_WITHIN)
            self.display.say(next_steps(world, self.plan, self._write_report()))

    def _write_report(self) -> bool:
        """Whether there is a page about the run now: a process of its own writes it."""
        if not self.plan.job.report or self.request.verbosity < 0:
            return False
        command = [sys.executable, "-m", "canal_mpi", "report", str(self.plan.folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_WITHIN)
            logger.info("report: %d %s", done.returncode, done.stderr.strip())
            return done.returncode == 0
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("no report: %s", error)
            return False

    def _learn(self) -> None:
        """An agent's work: build it, put it where its checkpoint was taken, and let it run."""
        world = self.world
        world.death_reporter.tell(doing=f"making {', '.join(self.job.tasks)[:80]}")
        spaces = world.run_on_all(self._compile)
        world.set_timeout(self.plan.job.timeout)
        agent, link, sink = world.run_on_all(partial(self._build, spaces))
        earlier = build.offer_earlier_lessons(world, self.plan, link, agent)
        if self.display and not self._greeted:
            self._greet(self.display, agent, earlier)
        world.heartbeat.attach(poll=link.poll, on_beat=partial(self._on_beat, sink))
        world.keep_alive(link.transport, agent.envs)
        self._restore(agent, link, sink)
        command = resume_command(world, self.plan.folder)
        self.shutdown.allow(command, self.request.max_time, self._mark)
        begin = monotonic()
        agent.run()
        ran = monotonic() - begin
        link.settle()
        if isinstance(agent.envs, RemoteMaker):
            agent.envs.close()
        self._leave(sink, (begin, ran))

    def _serve(self) -> None:
        """An env server's work."""
        world, folder = self.world, self.plan.folder
        world.death_reporter.tell(
            words=f"an env server ({world.place}) was killed or left without a word; its agents "
            f"can't play. What was saved is safe in {folder}."
        )
        world.run_on_all(lambda: world.set_timeout(self._patience))  # agents compile
        world.set_timeout(self.plan.job.timeout)
        server = world.run_on_all(
            lambda: build.make_env_server(world, self.plan.job, self.log_file)
        )
        if self.point and self.point.round:
            resume.send_checkpoints(world, folder, self.point)
        stop_signals.defer()  # a signal only asks here too: agents have to save
        try:
            server.serve()
            self._leave(None)
        finally:
            server.close()  # agents don't wait for the end of its workers

    def _leave(self, sink: Collector | None, times: Sequence[float] = ()) -> None:
        """Everybody is done: write the last rows, and close MPI together.

        An agent's times are when it began, and how long it ran.
        """
        self.world.barrier()  # who is done answers other agents until all are
        self.shutdown.forbid()
        if sink is not None:
            all_times = self.world.gather_json(times, self.world.agents).values()
            if self.display:  # it takes the agents a moment to part
                longest = max(ran for _, ran in all_times)
                self.display.began, self.display.agents_done = times[0], times[0] + longest
            sink.close()
            if self.world.speaks_for_host() and not (self.job.checkpoint.keep or self.faults):
                remove_all(self.plan.folder)
        try:
            self.world.finish()
        except Exception as error:
            if not self.world.has_failed(error):
                raise
            self.world.death_reporter.dismiss()  # everything is done and written, whoever died

    def _compile(self) -> Spaces:
        """Have the learner's loops compiled, in which a slow device is silent for long.

        Returns the spaces of the job's tasks, for which some environments have to be made.
        """
        spaces, heartbeat = common_spaces(self.job.tasks, self.job.task), self.world.heartbeat
        self.world.set_timeout(self._patience)
        build.compile_ahead(self.job, spaces, lambda: heartbeat.beat(heartbeat.mine))
        return spaces

    @property
    def _patience(self) -> float:
        return max(self.plan.job.timeout, START_TIMEOUT)

    def _build(self, spaces: Spaces) -> tuple[Agent, Exchange, Collector]:
        """This rank's agent, its link and its sink."""
        plan, world, job = self.plan, self.world, self.job
        sink = Collector(world, plan.folder, self.display, job.share.free, self._known)
        remote = world.agents < world.size
        try:
            agent = build.make_agent(
                job,
                world.agent,
                plan.orders[world.rank],
                build.make_link(world, plan),
                sink,
                self._beat,
                partial(plan.peers, world.agent),
                build.should_compress(world, plan),
                self._checkpoints(),
                partial(build.make_remote_envs, world) if remote else env_maker,
                Throttle(world.device.speed).tick,
                spaces,
            )
        except MemoryError as error:
            raise UsageError(
                f"not enough memory: {error}; lower replay.buffer_size or learn.widths."
            ) from error
        if job.init and not self.point:
            build.load_learner(agent.learner, job, world.agent)
        self._describe(sink, agent.learner)
        link = agent.sharing.link
        assert isinstance(link, Exchange)
        return agent, link, sink

    def _describe(self, sink: Collector, learner: Any) -> None:
        """The agent's row of /agents; a warning where it falls back to the CPU."""
        world, device = self.world, str(getattr(learner, "device", ""))
        sink.add(
            "agents",
            agent=world.agent,
            rank=world.rank,
            host=world.device.host,
            machine=world.host_info[world.rank]["machine"],
            device=device or "cpu",
            threads=self.job.learn.threads,
            role="agent",
            speed=world.device.speed,
        )
        if device == "cpu" and self.job.learn.device == "auto" and world.speaks_for_host():
            print_error(f"warning: {world.host} computes on its CPU; its log says why.")

    def _checkpoints(self) -> Checkpoints:
        plan, world = self.plan, self.world
        about = {
            "agent": world.agent,
            "run_id": plan.run_id,
            "agents": len(plan.orders),
            "first_agent": plan.first_agent,
            "job": config.to_toml(plan.job),
        }
        return Checkpoints(
            plan.folder,
            about,
            plan.job.checkpoint,
            lambda: world.heartbeat.stopping or world.failed,
            stop_signals.take_urgent,
        )

    def _restore(self, agent: Agent, link: Exchange, sink: Collector) -> None:
        """Put a resumed agent where its checkpoint was taken; tell of ranks that died."""
        world, point, held = self.world, self.point, set[Key]()
        resumed = bool(point and point.round)
        if point and point.past:
            rows = recover.rows_of_gone(world, self.plan.folder, point.past, point.holders)
            self._known.update(rows)
        if point and resumed:
            world.run_on_all(lambda: self._load_checkpoint(agent, point), world.agents)
            if self.faults or self.plan.job.share.free:
                held = recover.resync_offers(world, link)
        if self.faults:
            self._log_deaths(sink, held)
        if resumed:
            sink.rebuild()
        else:
            sink.flush(0)

    def _load_checkpoint(self, agent: Agent, point: ResumePoint) -> None:
        state = resume.fetch_checkpoint(self.world, self.plan.folder, point)
        resume.check_num_envs(state, agent.job.train.num_envs, agent.number, self.world.host)
        try:
            restore(agent, state)
        except DamagedData as error:
            raise DamagedData(f"{point.marks[agent.number].file}: {error}.") from error
        agent.record.progress.total_steps = 0  # steps per second count from here
        if self.display:
            self.display.resumed_in(point.round)
        logger.info("resumed in round %d from %s", point.round, point.marks)

    def _beat(self, progress: Progress) -> None:
        """Called by the agent at every step."""
        world, training = self.world, progress.phase == "training"
        world.heartbeat.progress[world.rank] = progress
        if progress.round != self._reported:
            self._reported = progress.round
            saved = f"What was saved is safe in {self.plan.folder}.{self.shutdown.hint}"
            world.death_reporter.tell(
                words=f"agent {world.agent} ({world.place}) was killed or left without a word in "
                f"round {progress.round}. {'The others go on.' if world.ft else saved}"
            )
        try:
            world.heartbeat.beat(progress)
        except Exception as error:
            if not training or not world.has_failed(error):
                raise  # in training the agent saves first: see `_checkpoints`
        if world.heartbeat.stopping and world.heartbeat.may_stop and not training:
            raise Stopped("stopped")

    def _on_beat(self, sink: Collector) -> None:
        """Twice a second."""
        if self.display:
            self.display.refresh()
            self.trackers.check()
        if self.display or self.world.ft:
            sink.write_arrived()

    def _recover(self) -> None:
        """Shrink the world to the living, and go back to what all of them have saved."""
        world, plan = self.world, self.plan
        self.faults[:] = recover.shrink(world, self.faults, self.shutdown.hint)
        self.plan = replace(plan, edges=recover.remaining_edges(world, plan))
        self.point = resume.go_back(world, self.plan)
        resume.clean_up(world, plan.folder, self.point)
        if world.is_root and not self.display:  # who wrote the results is gone
            RunDirectory(plan.folder).reopen()
            self.display = self._open_results()
        if self.display:
            self.display.store.clear()

    def _log_deaths(self, sink: Collector, held: set[Key]) -> None:
        """Say who died and what was lost, once."""
        for fault in self.faults:
            recover.note_lost(fault, sink.finished(fault["agent"]), held)
            if self.display and not fault["reported"] and self.point:
                facts = {name: value for name, value in fault.items() if name != "reported"}
                self.display.event("death", **facts)
                self.display.say(
                    f"{fault['role']} (rank {fault['rank']} on {fault['host']}) died in round "
                    f"{fault['round']}; the others go on from round {max(self.point.round, 1)}"
                )
            fault["reported"] = True

    def _open_results(self) -> Display:
        plan, resumed = self.plan, bool(self.request.resume)
        (first, before), self.began = sittings(plan.folder), time()
        info = RunInfo(
            plan.run_id,
            plan.job.seed,
            config.to_toml(plan.job),
            plan.job.tasks,
            plan.first_agent,
            plan.orders,
            plan.edges,
            library_versions(self.world),
            timestamp(first if isfinite(first) else self.began),
            resumes=resumed + sum(e.get("event") == "resume" for e in events(plan.folder)),
            faults=self.faults,
        )
        store = Store(plan.folder / "run.h5", info)
        before = before if resumed and not self.faults else 0.0
        return Display(self.world, plan, store, self.request.verbosity, before)

    def _greet(self, display: Display, agent: Agent, earlier: int) -> None:
        """The first lines."""
        world, plan, self._greeted = self.world, self.plan, True
        for line in greeting(world, plan, agent.replay.nbytes, agent.rehearsal.nbytes, earlier):
            display.say(line)
        if self.point:
            display.say(f"Resumed in round {max(self.point.round, 1)}.")
        kind, job = "resume" if self.point else "start", plan.job
        hosts = [device.host for device in world.devices]
        more = {"began": self.began} | ({"gone": self.point.gone} if self.point else {})
        display.event(kind, agents=world.agents, job=job.name, seed=job.seed, hosts=hosts, **more)
        display.write_status("running")
        self.trackers.start(job.track)

    def _mark(self, status: str, why: str) -> None:
        """Let the files say that the run is not over, and why."""
        if self.display:
            self.display.store.write(status)
            self.display.end(status, why=why)


def library_versions(world: World) -> dict[str, str]:
    """Versions of everything that results may depend on."""
    found = dict[str, str]()
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):  # an mlp on the CPU needs no torch
            found[name] = version(name)
    found |= {"canal-mpi": canal_mpi.__version__, "python": platform.python_version()}
    return found | ({"mpi": mpi_library()} if world.comm else {})
