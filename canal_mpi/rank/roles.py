"""`canal-mpi train` on every rank: agree on the job, find the role, live it, leave together."""

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from canal_mpi import config, log
from canal_mpi.errors import CanalError, Stopped, StorageError, UsageError
from canal_mpi.hosts import on_host
from canal_mpi.job import Job
from canal_mpi.log import logger
from canal_mpi.rank import neighbours, regroup, resume, signals, words
from canal_mpi.rank.emulate import devices
from canal_mpi.rank.ending import (
    Stopping,
    complain,
    end_together,
    fail,
    fall,
    interrupted,
    log_hint,
    who,
)
from canal_mpi.rank.live import View
from canal_mpi.rank.places import check_checkpoint
from canal_mpi.rank.plan import Plan, Request, env_servers, make_plan, orders_of
from canal_mpi.rank.throttle import pace
from canal_mpi.rank.world import Agreed, World, library_versions
from canal_mpi.results.checkpoint import Checkpoints
from canal_mpi.results.files import RunDirectory, write_whole
from canal_mpi.types import EnvMaker, Key, Spaces

DEFERENCE = 0.3  # seconds: MPI fails where another rank has died, whose witness may speak first


def train(request: Request) -> int:
    """The whole program on one rank; returns its exit code."""
    world = World()
    stopping = Stopping(world)
    code = conduct(stopping, Run(stopping, request).go, request.verbosity)
    if world.ft and (world.fallen or len(world.alive) < world.size):
        world.vanish(code)
    return code


def conduct(stopping: Stopping, program: Callable[[], None], verbosity: int = 0) -> int:
    """Run a program on this rank of the world; trouble is one line and an exit code."""
    world = stopping.world
    signals.listen()
    try:
        try:
            world.open()
            program()
        except Stopped:
            return stopping.leave()
    except Agreed as error:
        return end_together(world, str(error), error.code)
    except KeyboardInterrupt:
        return interrupted(world, stopping.hint)
    except StorageError as error:  # others share the disk
        return fail(world, f"{who(world)}: {error}{stopping.hint}", error.code)
    except CanalError as error:
        return fall(world, f"{who(world)}: {error}{stopping.hint}", error.code)
    except (Exception, SystemExit) as error:
        logger.error("%s", traceback.format_exc())
        if verbosity > 0:
            traceback.print_exc()
        if type(error).__module__.startswith("mpi4py"):
            sleep(DEFERENCE)
        trouble = f"{who(world)} failed: {type(error).__name__}: {error}"
        return fall(world, f"{trouble}{log_hint()}{stopping.hint}", 70)
    return 0


class Run:
    """One run, from the handshake to the last line."""

    def __init__(self, stopping: Stopping, request: Request) -> None:
        self.stopping, self.world, self.request = stopping, stopping.world, request
        self._told = -1  # the round that the witness knows of
        self._known: dict[int, dict[int, bytes]] = {}  # with --ft: everybody's rows
        self._faults: list[dict[str, Any]] = []  # rows of agents that died

    def go(self) -> None:
        """Everything a user can get wrong is found before the first environment is made."""
        world, request = self.world, self.request
        world.handshake(json.dumps(asdict(request), sort_keys=True, default=str))
        servers = world.from_root(lambda: json.dumps(env_servers(request, world.size)).encode())
        world.seat(json.loads(servers))
        if request.ft:
            world.from_root(self._check_ft)
        self.choice = self._choose() if request.resume else None
        self.plan = Plan.from_json(world.from_root(lambda: self._make_plan().to_json()))
        if self.choice and self._nothing_is_left(self.choice):
            return
        self.number = world.agent = self.plan.first_agent + world.rank
        self.devices = devices(self.plan.job, world.hosts)
        world.places = [device.host for device in self.devices]
        world.watch.timeout = self.plan.job.timeout
        world.together(self._create_folder)
        world.together(self._open_log)
        if world.leads:
            self._open_results()
        world.ft = request.ft and world.size > 1
        died = False
        while True:
            try:
                if died:
                    self._go_on_without()
                self._live()
                break
            except Exception as error:
                if not world.has_fallen(error):
                    raise
                died = True
        if world.leads:
            self._close_results()

    def _live(self) -> None:
        """The rank's part, from here to the end of the run."""
        world = self.world
        if world.serves:
            self._serve()
        else:
            agent = world.together(self._build)
            with pace(self.devices[world.rank].speed):
                self._learn(agent)
        world.meet()  # who is done answers letters until all are
        self.stopping.forbid()
        if not world.serves:
            self.sink.close()
        try:
            world.finish()
        except Exception as error:
            if not world.has_fallen(error):
                raise  # else: everything is done and written, whoever died

    def _serve(self) -> None:
        """An env server's life."""
        server = self.world.together(self._build_server)
        if self.choice and self.choice.round:
            resume.hand_over(self.world, self.plan.folder, self.choice)
        signals.may_wait = True  # a signal is a wish here too: agents have to save
        try:
            with pace(self.devices[self.world.rank].speed):
                server.serve()
        finally:
            server.close()

    def _learn(self, agent: Any) -> None:
        """An agent's life."""
        world = self.world
        before = neighbours.stock(world, self.plan, agent) if self.plan.job.share.lessons else 0
        if world.leads and not self._faults:
            self._greet((agent.replay.nbytes, agent.memory.nbytes), before)
        world.watch.on_beat = self._refresh
        world.watch.serve = agent.sharing.link.poll
        world.past += [agent.sharing.link.carrier, agent.envs]  # their buffers outlive a death
        held: set[Key] = set()
        if self.choice and self.choice.round:
            world.together(lambda: self._take_up(agent), world.agents)
            if self._faults or self.plan.job.share.free:
                held = regroup.reacquaint(world, agent.sharing.link)
            self._mourn(held)
            self.sink.rejoin()
        else:
            self._mourn(held)
            self.sink.flush(0)
        self.stopping.allow(words.resume_command(world, self.plan.folder), self.request.max_time)
        agent.run()
        agent.sharing.link.settle()
        if world.agents < world.size:
            agent.envs.close()

    # ── ranks that died (--ft) ─────────────────────────────────────────────────────────────────

    def _check_ft(self) -> bytes:
        regroup.check(self.world.launcher)
        return b""

    def _go_on_without(self) -> None:
        """Shrink the world to the living, and go back to what all of them have saved."""
        world, plan = self.world, self.plan
        self._faults = regroup.shrink(world, self._faults)
        regroup.check_left(world, self.stopping.hint)
        self.plan = replace(plan, edges=regroup.edges_left(world, plan))
        self.choice = resume.go_back(world, self.plan)
        resume.clean_up(world, plan.folder, self.choice)
        if not world.leads:
            return
        if not hasattr(self, "store"):  # who wrote the results is gone
            self.directory = RunDirectory(plan.folder)
            self.directory.reopen()
            self._open_results()
        self.view.watch, self.store.info.faults = world.watch, self._faults
        self.store.clear()

    def _mourn(self, held: set[Key]) -> None:
        """Say who died and what was lost, once."""
        for fault in self._faults:
            regroup.note_lost(fault, self.sink.finished(fault["agent"]), held)
            if self.world.leads and not fault["told"] and self.choice:
                facts = {name: fault[name] for name in fault if name != "told"}
                self.view.event("death", **facts)
                self.view.say(
                    f"{fault['role']} (rank {fault['rank']} on {fault['host']}) died in round "
                    f"{fault['round']}; the others go on from round {max(self.choice.round, 1)}"
                )
            fault["told"] = True
        if self._faults:
            self.stopping.cant_resume()

    def _make_plan(self) -> Plan:
        hosts = self.world.hosts[: self.world.agents]
        if self.choice is None:
            return make_plan(self.request, hosts, self.world.size)
        return resume.resumed_plan(self.request, self.choice, self.directory.path, hosts)

    def _choose(self) -> resume.Choice:
        """Where the run that is to go on is taken up; its folder is ours from here on."""
        world, request = self.world, self.request
        path = world.from_root(lambda: str(resume.folder_to_resume(request)).encode())
        folder = Path(path.decode())
        self.directory = RunDirectory(folder)
        world.together(lambda: self.directory.reopen() if world.leads else None)
        try:
            return resume.choose(world, folder)
        except Agreed:
            if world.leads:
                self.directory.give_back()
            raise

    def _nothing_is_left(self, choice: resume.Choice) -> bool:
        """Whether the run is finished, and stays so with the job as it is now."""
        old = orders_of(config.from_toml(choice.job), choice.first_agent, choice.agents)
        if not choice.finished or old != self.plan.orders:
            return False
        if self.world.leads:
            print(f"{self.plan.folder} is finished; more rounds or tasks would go on with it.")
        self.world.finish()
        return True

    def _take_up(self, agent: Any) -> None:
        """Put the agent where its checkpoint was taken."""
        from canal_mpi import position

        assert self.choice is not None
        state = resume.fetch(self.world, self.plan.folder, self.choice)
        check_checkpoint(state, agent.job.train.envs, self.number, self.world.host)
        position.restore(agent, state)
        agent.record.progress.total_steps = 0  # steps a second count from here
        if self.world.leads:
            self.view.done_before = (self.choice.round - 1) * len(self.choice.marks)
        logger.info("resumed in round %d from %s", self.choice.round, self.choice.marks)

    def _mark(self, status: str, why: str) -> None:
        """Let the files say that the run is not over, and why."""
        try:
            self.store.write(status)
            self.view.write_status(status)
            self.view.event(status, why=why)
        except (StorageError, OSError) as error:
            logger.warning("%s", error)

    def _create_folder(self) -> None:
        """The run directory, on rank 0."""
        job, folder = self.plan.job, self.plan.folder
        if self.choice:
            resume.clean_up(self.world, folder, self.choice)
            for flaw in self.choice.damaged if self.world.leads else ():
                complain(f"warning: {flaw} An older checkpoint is used.", 0)
        elif self.world.leads:
            self.directory = RunDirectory(folder)
            rows = min(job.train.frames, job.share.rows)
            needed = (4 << 20) + rows * 32 * len(self.plan.orders[0]) * self.world.agents
            self.directory.create(self.request.force, needed)
        if self.world.leads:
            write_whole(folder / "job.toml", config.to_toml(job, explain=True).encode())

    def _open_log(self) -> None:
        """On every host, the files of its own agents."""
        folder = self.plan.folder
        try:
            log.to_file(self._log_file(), self.request.verbosity > 0)
        except OSError as error:
            raise StorageError(f"can't write to {folder}: {error.strerror}.") from error
        who = "env server" if self.world.serves else f"agent {self.number}"
        logger.info("%s is %s, process %d", who, self.world.place, os.getpid())

    def _log_file(self) -> Path:
        world, name = self.world, f"agent-{self.number}"
        if world.serves:
            name = f"env-server-{world.ranks[world.rank]}"
        return self.plan.folder / "logs" / f"{name}.log"

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
            resumes=_resumes(plan.folder) + bool(self.request.resume),
            faults=self._faults,
        )
        self.store = Store(plan.folder / "run.h5", info)
        self.stopping.mark = self._mark
        self.view = View(
            world.watch,
            plan.folder,
            world.places[: world.agents],
            len(plan.orders[0]),
            plan.job.train.frames,
            self.request.verbosity,
        )

    def _build(self) -> Any:
        """This rank's agent."""
        from canal_mpi.rank import build
        from canal_mpi.rank.collect import Collector

        plan, world, known = self.plan, self.world, self._known
        store, view = (self.store, self.view) if world.leads else (None, None)
        folder, free, job = plan.folder, plan.job.share.free, self._job_here()
        self.sink = sink = Collector(world, folder, self.number, store, view, free, known)
        beat = self._beat
        order = plan.orders[world.rank]
        peers, packs = partial(plan.peers, self.number), neighbours.packs(world, plan)
        envs = build.env_maker if world.agents == world.size else self._remote
        try:
            agent = build.agent(
                job,
                self.number,
                order,
                neighbours.link_of(world, plan),
                sink,
                beat,
                peers,
                packs,
                self._saver(),
                envs,
            )
        except MemoryError as error:
            raise UsageError(
                f"not enough memory: {error}; lower replay.capacity or learn.widths."
            ) from error
        sink.add(
            "agents",
            agent=self.number,
            rank=world.ranks[world.rank],
            host=world.places[world.rank],
            machine=world.cards[world.rank]["machine"],
            device=str(getattr(agent.learner, "device", "cpu")),
            threads=int(getattr(agent.learner, "threads", 1)),
            role="agent",
            speed=self.devices[world.rank].speed,
        )
        on_cpu = str(getattr(agent.learner, "device", "")) == "cpu"
        if on_cpu and job.learn.device == "auto" and world.speaks_for_host():
            complain(f"warning: {world.host} computes on its CPU; its log says why.", 0)
        return agent

    def _job_here(self) -> Job:
        """The job as it is on the host that this rank runs on, or plays."""
        return on_host(self.plan.job, self.world.places[self.world.rank])

    def _remote(self, job: Job, spaces: Spaces) -> EnvMaker:
        """Environments that an env server plays for this agent."""
        from canal_mpi.rank.remote import RemoteMaker
        from canal_mpi.rank.seating import lanes_of_agent

        return RemoteMaker(lanes_of_agent(self.world, job, spaces), job, spaces)

    def _build_server(self) -> Any:
        """This rank's env server."""
        from canal_mpi.rank.seating import server

        if self.world.witness:
            self.world.witness.tell(
                f"the env server ({self.world.place}) was killed or left without a word; without "
                f"it no agent can play. What was saved is safe in {self.plan.folder}."
            )
        return server(self.world, self.plan.job, self._log_file())

    def _saver(self) -> Checkpoints:
        plan, watch = self.plan, self.world.watch
        about = {
            "agent": self.number,
            "run_id": plan.run_id,
            "agents": len(plan.orders),
            "first_agent": plan.first_agent,
            "job": config.to_toml(plan.job),
        }
        settings, world = plan.job.checkpoint, self.world

        def stopping() -> bool:
            return watch.stopping or world.fallen

        return Checkpoints(plan.folder, about, settings, stopping, signals.hurry)

    def _beat(self, progress: Any) -> None:
        self.world.watch.progress[self.world.rank] = progress
        if self.world.witness and progress.round != self._told:
            self._told = progress.round
            self.world.witness.tell(
                f"agent {self.number} ({self.world.place}) was killed or left "
                f"without a word in round {progress.round}. {self._consolation()}"
            )
        try:
            self.world.watch.beat(progress)
        except Exception as error:
            if progress.phase != "training" or not self.world.has_fallen(error):
                raise  # in training the agent saves first: see `_saver`
        if self.world.watch.stopping and self.world.watch.may_stop and progress.phase != "training":
            raise Stopped("stopped")

    def _consolation(self) -> str:
        """What remains when this rank is gone."""
        if self.world.ft:
            return "The others go on."
        return f"What was saved is safe in {self.plan.folder}.{self.stopping.hint}"

    def _refresh(self) -> None:
        """Twice a second."""
        if self.world.leads:
            self.view.refresh()
        if self.world.leads or self.world.ft:
            self.sink.write_arrived()

    def _greet(self, room: tuple[int, int], before: int) -> None:
        """The first lines."""
        world, plan, view = self.world, self.plan, self.view
        view.say(words.greeting(world, plan, self.devices, room, before))
        for line in words.remarks(world, plan, self.request):
            view.say(line)
        if self.choice:
            view.say(f"Resumed in round {max(self.choice.round, 1)}.")
        kind, job = "resume" if self.choice else "start", plan.job
        view.event(kind, agents=world.agents, job=job.name, seed=job.seed, hosts=world.places)

    def _close_results(self) -> None:
        self.store.write(self.store.end)
        self.view.write_status(self.store.end)
        self.view.event(self.store.end)
        job = self.plan.job
        self.view.ending(self.store, job.train.frames, job.evaluation.max_steps)
        self.view.say(words.next_steps(self.world, self.plan))


def _resumes(folder: Path) -> int:
    """How often the run has been resumed so far, as its events tell."""
    try:
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return sum('"event": "resume"' in line for line in lines)
