"""`canal-mpi train` on every rank: agree on the job, build this rank's part, run it, leave."""

import json
import os
import platform
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import canal_mpi
from canal_mpi import config
from canal_mpi.agent.loop import Agent
from canal_mpi.agent.state import restore
from canal_mpi.config import on_host
from canal_mpi.envs import env_maker
from canal_mpi.envs.client import RemoteMaker
from canal_mpi.errors import Stopped, StorageError, UsageError, log_to_file, logger
from canal_mpi.interfaces import Key, Progress
from canal_mpi.launcher import Throttle
from canal_mpi.rank import build, recover, resume
from canal_mpi.rank.collect import Collector
from canal_mpi.rank.display import Display, greeting, next_steps, remarks, resume_command
from canal_mpi.rank.plan import Device, Plan, Request, devices, env_servers, make_plan
from canal_mpi.rank.resume import ResumePoint
from canal_mpi.rank.shutdown import Shutdown, print_error, run_guarded, stop_signals
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import Checkpoints
from canal_mpi.results.files import RunDirectory, write_whole
from canal_mpi.results.progress import events
from canal_mpi.results.store import RunInfo, Store
from canal_mpi.topology.exchange import Exchange

LIBRARIES = ("numpy", "torch", "gymnasium", "ale-py", "h5py")  # results may depend on them


def train(request: Request) -> int:
    """The whole program on one rank; returns its exit code."""
    return run_guarded(partial(_train, request), request.verbosity)


def _train(request: Request, shutdown: Shutdown) -> None:
    """Everything a user can get wrong is found before the first environment is made."""
    world = shutdown.world
    world.handshake(json.dumps(asdict(request), sort_keys=True, default=str))
    world.assign_env_servers(world.from_root(lambda: env_servers(request, world.size)))
    if request.ft:
        world.run_on_all(lambda: recover.check_ft(world.launcher))
    directory, point = resume.open_run(world, request) if request.resume else (None, None)
    plan = Plan.from_dict(world.from_root(lambda: _plan(world, request, point, directory)))
    if point and point.nothing_is_left(plan):
        if world.is_root:
            print(f"{plan.folder} is finished; more rounds or tasks would go on with it.")
        world.finish()
        return
    world.agent = plan.first_agent + world.rank
    played = devices(plan.job, world.hosts)
    world.host_labels = [device.host for device in played]
    world.heartbeat.timeout = plan.job.timeout
    directory = directory or RunDirectory(plan.folder)
    world.run_on_all(lambda: _prepare_folder(world, request, plan, point, directory))
    log_file = world.run_on_all(lambda: _open_log(world, plan.folder, request.verbosity > 0))
    TrainingRun(shutdown, request, plan, point, played, log_file).run()


def _plan(
    world: World, request: Request, point: ResumePoint | None, directory: RunDirectory | None
) -> dict[str, Any]:
    hosts = world.hosts[: world.agents]
    if point is None or directory is None:
        return make_plan(request, hosts, world.size).to_dict()
    return resume.resumed_plan(request, point, directory.path, hosts).to_dict()


def _prepare_folder(
    world: World, request: Request, plan: Plan, point: ResumePoint | None, directory: RunDirectory
) -> None:
    """The run directory on rank 0; on every host, no checkpoints but those to resume from."""
    if point:
        resume.clean_up(world, plan.folder, point)
        for flaw in point.damaged if world.is_root else ():
            print_error(f"warning: {flaw} The run is resumed without it.")
    elif world.is_root:
        rows = min(plan.job.train.steps, plan.job.share.rows)
        needed = (4 << 20) + rows * 32 * len(plan.orders[0]) * world.agents
        directory.create(request.force, needed)
    if world.is_root:
        write_whole(plan.folder / "job.toml", config.to_toml(plan.job, explain=True).encode())


def _open_log(world: World, folder: Path, verbose: bool) -> Path:
    """On every host, the logs of its own ranks."""
    role, number = "agent", world.agent
    if world.is_env_server:
        role, number = "env-server", world.ranks[world.rank]
    path = folder / "logs" / f"{role}-{number}.log"
    try:
        log_to_file(path, verbose)
    except OSError as error:
        raise StorageError(f"can't write to {folder}: {error.strerror}.") from error
    logger.info("%s %d is %s, process %d", role, number, world.place, os.getpid())
    return path


class TrainingRun:
    """This rank's part of a run, from the plan to the last line."""

    def __init__(
        self,
        shutdown: Shutdown,
        request: Request,
        plan: Plan,
        point: ResumePoint | None,
        played: list[Device],
        log_file: Path,
    ) -> None:
        self.shutdown, self.world, self.request = shutdown, shutdown.world, request
        self.plan, self.point, self.devices, self.log_file = plan, point, played, log_file
        self.speed = played[self.world.rank].speed
        self.faults: list[recover.Fault] = []  # ranks that died
        self._known: dict[int, dict[int, bytes]] = {}  # with --ft: everybody's rows
        self._reported = -1  # the round that the death reporter knows of
        self.store: Store | None = None
        self.view: Display | None = None
        if self.world.is_root:
            self._open_results()

    def run(self) -> None:
        """Do this rank's work; with --ft again, in a smaller world, when others die."""
        world, died = self.world, False
        world.ft = self.request.ft and world.size > 1
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
        self._close_results()

    def _learn(self) -> None:
        """An agent's work."""
        world = self.world
        agent, link, sink = world.run_on_all(self._build)
        earlier = build.offer_earlier_lessons(world, self.plan, link, agent)
        if self.view and not self.faults:
            self._greet(self.view, agent, earlier)
        world.heartbeat.attach(poll=link.poll, on_beat=partial(self._on_beat, sink))
        world.keep_alive(link.transport, agent.envs)
        self._restore(agent, link, sink)
        command = resume_command(world, self.plan.folder)
        self.shutdown.allow(command, self.request.max_time, self._mark)
        agent.run()
        link.settle()
        if isinstance(agent.envs, RemoteMaker):
            agent.envs.close()
        self._leave(sink)

    def _serve(self) -> None:
        """An env server's work."""
        world, folder = self.world, self.plan.folder
        world.death_reporter.set_message(
            f"the env server ({world.place}) was killed or left without a word; without it no "
            f"agent can play. What was saved is safe in {folder}."
        )
        job, log_file = self.plan.job, self.log_file
        server = world.run_on_all(lambda: build.make_env_server(world, job, log_file, self.speed))
        if self.point and self.point.round:
            resume.send_checkpoints(world, folder, self.point)
        stop_signals.defer()  # a signal only asks here too: agents have to save
        try:
            server.serve()
        finally:
            server.close()
        self._leave(None)

    def _leave(self, sink: Collector | None) -> None:
        """Everybody is done: write the last rows, and close MPI together."""
        self.world.barrier()  # who is done answers other agents until all are
        self.shutdown.forbid()
        if sink is not None:
            sink.close()
        try:
            self.world.finish()
        except Exception as error:
            if not self.world.has_failed(error):
                raise  # else: everything is done and written, whoever died

    def _build(self) -> tuple[Agent, Exchange, Collector]:
        """This rank's agent, its link and its sink."""
        plan, world = self.plan, self.world
        job, free = on_host(plan.job, world.host_labels[world.rank]), plan.job.share.free
        sink = Collector(world, plan.folder, self.store, self.view, free, self._known)
        packs, new_link = build.should_compress(world, plan), build.make_link(world, plan)
        remote = world.agents < world.size
        try:
            agent = build.make_agent(
                job,
                world.agent,
                plan.orders[world.rank],
                new_link,
                sink,
                self._beat,
                partial(plan.peers, world.agent),
                packs,
                self._checkpoints(),
                partial(build.make_remote_envs, world) if remote else env_maker,
                Throttle(self.speed).tick,
            )
        except MemoryError as error:
            raise UsageError(
                f"not enough memory: {error}; lower replay.buffer_size or learn.widths."
            ) from error
        self._describe(sink, agent.learner)
        link = agent.sharing.link
        assert isinstance(link, Exchange)
        return agent, link, sink

    def _describe(self, sink: Collector, learner: Any) -> None:
        """The agent's row of /agents; a warning where it falls back to the CPU."""
        world, device = self.world, str(getattr(learner, "device", ""))
        wanted = on_host(self.plan.job, world.host_labels[world.rank]).learn
        sink.add(
            "agents",
            agent=world.agent,
            rank=world.ranks[world.rank],
            host=world.host_labels[world.rank],
            machine=world.host_info[world.rank]["machine"],
            device=device or "cpu",
            threads=wanted.threads,
            role="agent",
            speed=self.speed,
        )
        if device == "cpu" and wanted.device == "auto" and world.speaks_for_host():
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
        if not (point and point.round):
            self._log_deaths(sink, held)
            sink.flush(0)
            return
        world.run_on_all(lambda: self._load_checkpoint(agent, point), world.agents)
        if self.faults or self.plan.job.share.free:
            held = recover.resync_offers(world, link)
        self._log_deaths(sink, held)
        sink.rebuild()

    def _load_checkpoint(self, agent: Agent, point: ResumePoint) -> None:
        state = resume.fetch_checkpoint(self.world, self.plan.folder, point)
        resume.check_num_envs(state, agent.job.train.num_envs, agent.number, self.world.host)
        restore(agent, state)
        agent.record.progress.total_steps = 0  # steps per second count from here
        if self.view:
            self.view.done_before = (point.round - 1) * len(point.marks)
        logger.info("resumed in round %d from %s", point.round, point.marks)

    def _beat(self, progress: Progress) -> None:
        """Called by the agent at every step."""
        world, training = self.world, progress.phase == "training"
        world.heartbeat.progress[world.rank] = progress
        if progress.round != self._reported:
            self._reported = progress.round
            saved = f"What was saved is safe in {self.plan.folder}.{self.shutdown.hint}"
            world.death_reporter.set_message(
                f"agent {world.agent} ({world.place}) was killed or left without a word in round "
                f"{progress.round}. {'The others go on.' if world.ft else saved}"
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
        if self.view:
            self.view.refresh()
        if self.view or self.world.ft:
            sink.write_arrived()

    def _recover(self) -> None:
        """Shrink the world to the living, and go back to what all of them have saved."""
        world, plan = self.world, self.plan
        self.faults[:] = recover.shrink(world, self.faults, self.shutdown.hint)
        self.plan = replace(plan, edges=recover.remaining_edges(world, plan))
        self.point = resume.go_back(world, self.plan)
        resume.clean_up(world, plan.folder, self.point)
        if world.is_root and not self.store:  # who wrote the results is gone
            RunDirectory(plan.folder).reopen()
            self._open_results()
        if self.store:
            self.store.clear()

    def _log_deaths(self, sink: Collector, held: set[Key]) -> None:
        """Say who died and what was lost, once."""
        for fault in self.faults:
            recover.note_lost(fault, sink.finished(fault["agent"]), held)
            if self.view and not fault["reported"] and self.point:
                facts = {name: value for name, value in fault.items() if name != "reported"}
                self.view.event("death", **facts)
                self.view.say(
                    f"{fault['role']} (rank {fault['rank']} on {fault['host']}) died in round "
                    f"{fault['round']}; the others go on from round {max(self.point.round, 1)}"
                )
            fault["reported"] = True
        if self.faults:
            self.shutdown.cannot_resume()

    def _open_results(self) -> None:
        plan, world = self.plan, self.world
        before = sum(event.get("event") == "resume" for event in events(plan.folder))
        info = RunInfo(
            plan.run_id,
            plan.job.seed,
            config.to_toml(plan.job),
            plan.job.tasks,
            plan.first_agent,
            plan.orders,
            plan.edges,
            library_versions(world.comm),
            resumes=before + bool(self.request.resume),
            faults=self.faults,
        )
        self.store = Store(plan.folder / "run.h5", info)
        hosts, rounds = world.host_labels[: world.agents], len(plan.orders[0])
        self.view = Display(world.heartbeat, plan.folder, hosts, rounds, self.request.verbosity)

    def _greet(self, view: Display, agent: Agent, earlier: int) -> None:
        """The first lines."""
        world, plan = self.world, self.plan
        room = (agent.replay.nbytes, agent.rehearsal.nbytes)
        view.say(greeting(world, plan, self.devices, room, earlier))
        for line in remarks(world, plan, self.request):
            view.say(line)
        if self.point:
            view.say(f"Resumed in round {max(self.point.round, 1)}.")
        kind, job = "resume" if self.point else "start", plan.job
        view.event(kind, agents=world.agents, job=job.name, seed=job.seed, hosts=world.host_labels)

    def _mark(self, status: str, why: str) -> None:
        """Let the files say that the run is not over, and why."""
        assert self.store and self.view
        try:
            self.store.write(status)
            self.view.write_status(status)
            self.view.event(status, why=why)
        except (StorageError, OSError) as error:
            logger.warning("%s", error)

    def _close_results(self) -> None:
        if not (self.store and self.view):
            return
        self.store.write(self.store.end)
        self.view.write_status(self.store.end)
        self.view.event(self.store.end)
        job = self.plan.job
        self.view.summarise(self.store, job.train.steps, job.evaluation.max_steps)
        self.view.say(next_steps(self.world, self.plan))


def library_versions(comm: Any) -> dict[str, str]:
    """Versions of everything that results may depend on."""
    found = {name: version(name) for name in LIBRARIES}
    found |= {"canal-mpi": canal_mpi.__version__, "python": platform.python_version()}
    if comm is not None:
        from mpi4py import MPI

        found["mpi"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    return found
