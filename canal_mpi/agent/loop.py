"""The life of an agent: run ▸ learn_task ▸ pretrain, play; then remember, share, record."""

from collections import ChainMap
from collections.abc import Callable, Sequence
from math import exp, floor, isfinite
from time import perf_counter

import numpy as np

from canal_mpi.agent.lessons import Sharing
from canal_mpi.agent.recorder import Recorder
from canal_mpi.agent.state import TaskProgress, TaskSchedule, agent_state_dict
from canal_mpi.errors import DamagedData, NotRepeatable, RankFailed, logger
from canal_mpi.games import win_return_of
from canal_mpi.interfaces import (
    TERMINATED,
    TRUNCATED,
    Array,
    Batch,
    Columns,
    Env,
    EnvMaker,
    Learner,
    Saver,
    Step,
)
from canal_mpi.membuf.buffer import Buffer, observations
from canal_mpi.membuf.lesson import Lesson
from canal_mpi.membuf.rehearsal import Rehearsal, with_q_values
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.selection import best_first, hold_out, one_after_another
from canal_mpi.settings import EvaluationConfig, Job
from canal_mpi.state import random_stream, with_prefix

HELD_OUT = (0.05, 1000)  # of the teacher's rows: the part that is held out, and the most of it
CHECK_INTERVAL = 250  # updates between two measurements of the agreement with the teacher
IMPROVEMENT = 0.01  # smaller relative improvements of the KL don't count
MAX_PLATEAUS = 4  # checks without improvement; each halves the learning rate, the last one stops


class Agent:
    """Learns its tasks one after the other, from play or from neighbours' lessons."""

    def __init__(
        self,
        job: Job,
        number: int,
        order: Sequence[str],
        *,
        envs: EnvMaker,
        learner: Learner,
        replay: Replay,
        rehearsal: Rehearsal,
        sharing: Sharing,
        record: Recorder,
        saver: Saver | None = None,
    ) -> None:
        self.job, self.number, self.order = job, number, order
        self.envs, self.learner, self.replay, self.rehearsal = envs, learner, replay, rehearsal
        self.sharing, self.record, self.saver = sharing, record, saver
        self.first_round, self.task = 1, order[0]
        self.progress = TaskProgress(TaskSchedule(0))
        self.teacher: Lesson | None = None  # the lesson whose donor is imitated
        self.held_out = np.zeros(0)  # states on which a student is compared with its teacher
        self.networks: dict[int, Columns] = {}  # by round, to be evaluated after the last one
        self.resumed: TaskProgress | None = None  # of the first round, after a resume

    def run(self) -> None:
        """Every task of the order, a round each; then the evaluations, which decide nothing."""
        if not self.resumed:
            self.record.start()
            if self.job.evaluation.tasks == "all":
                self.keep_network(0)
        for round_ in range(self.first_round, len(self.order) + 1):
            self.learn_task(self.order[round_ - 1], round_)
            self.record.sink.flush(round_)
        self.evaluate_networks()

    def learn_task(self, task: str, round_: int) -> None:
        """One round: take lessons, learn from them, play, offer what was experienced."""
        progress = self.resumed or self.begin(task, round_)
        if not progress.trained:
            self.train(progress)
        self.require_finite(self.learner.is_finite())
        self.resumed = None
        self.sharing.finish_swaps()
        self.remember(progress.lessons)
        self.sharing.offer(self.replay, self.learner, self.stream("offer"))
        self.record.phase("saving")
        self.record.sink.save("checkpoints", "learner", self.learner.policy_state_dict())
        if round_ < len(self.order):
            self.keep_network(round_)
        self.record.learnt([lesson.offer.source for lesson in progress.lessons])

    def begin(self, task: str, round_: int) -> TaskProgress:
        """A new task, with what the neighbours have to say about it."""
        self.set_task(task, round_)
        self.record.phase("exchanging")
        lessons = self.take_lessons()
        self.record.phase("saving")  # from here to the training: the first checkpoint of the task
        self.progress = TaskProgress(self.schedule_for(lessons), lessons)
        self.take_in(self.progress)
        self.record.plan(self.progress.schedule.pretrain + self.progress.schedule.steps)
        if self.saver:
            self.saver.start(self.finite_state_dict)
        return self.progress

    def set_task(self, task: str, round_: int) -> None:
        """Turn to the task of a round; what was counted of the one before is gone."""
        self.task = task
        self.record.begin(task, round_)
        self.explore, self.draws = self.stream("explore"), self.stream("sample")
        self.learner.set_task(task)
        self.sharing.begin(task, round_)

    def train(self, progress: TaskProgress) -> None:
        """Learn from the lessons first, then play."""
        self.record.phase("training", "pretraining")
        self.pretrain(progress)
        if progress.schedule.steps:
            self.play(progress)
        if self.record.unwritten:
            self.record_training()
        for lesson in progress.lessons:
            taught = (progress.kl, progress.agreement) if lesson is self.teacher else ()
            self.record.used(lesson, *taught)
        progress.trained = True
        if self.saver:
            self.saver.end(self.snapshot())

    def pretrain(self, progress: TaskProgress) -> None:
        """Learn from lessons until the agreement with the teacher no longer improves."""
        most = progress.schedule.pretrain
        while progress.updates < most and progress.plateaus < MAX_PLATEAUS:
            self.update(self.lr_scale(progress.updates / most) / 2**progress.plateaus)
            progress.updates += 1
            if progress.updates % CHECK_INTERVAL == 0 or progress.updates == most:
                self.check_agreement(progress)
            self.end_iteration()
            self.record.clock.switch("pretraining")

    def check_agreement(self, progress: TaskProgress) -> None:
        """Compare the student with its teacher on rows that it does not learn from."""
        if not self.teacher:
            return
        progress.kl, progress.agreement = self.learner.agreement(self.held_out)
        if progress.kl >= (1 - IMPROVEMENT) * progress.best_kl:  # never where it is not known
            progress.plateaus += 1
        else:
            progress.best_kl = progress.kl

    def play(self, progress: TaskProgress) -> None:
        """The training loop: act, learn while the environment works, store."""
        clock = self.record.clock
        clock.switch("environment")
        env = progress.env = self.envs(self.task, "train", self.number)
        obs = self.first_obs(env, progress)
        enough = win_return_of(self.job.train.win_return, self.task)
        while progress.steps < progress.schedule.steps and not self.record.has_won(enough):
            self.evaluate_if_due(progress)
            clock.switch("environment")
            actions = self.choose_actions(obs, progress.steps)
            env.send(actions)  # the environment works ...
            clock.switch("learning")
            self.update_if_due(progress, env.count)  # ... while the agent learns
            clock.switch("environment")
            step = env.recv()
            self.replay.own.add(actions, step)
            self.record.step(step)
            progress.steps += env.count
            self.sharing.swap(self.replay, progress.steps)
            obs = progress.obs = step.start
            self.end_iteration(env.count)
        env.close()

    def first_obs(self, env: Env, progress: TaskProgress) -> Array:
        """What the environments show: a first state, or the one that a checkpoint was left in."""
        if progress.playing:
            try:
                env.load_state_dict(progress.saved_env)
                return progress.obs
            except NotRepeatable as error:
                logger.warning("%s; a new episode begins: not the same bits from here on", error)
                self.record.break_off()
        else:
            progress.playing = True
            self.replay.lesson_fraction = progress.schedule.lesson_fraction
        obs = env.reset()
        self.replay.own.start(obs)
        return obs

    def update_if_due(self, progress: TaskProgress, count: int) -> None:
        """The updates that belong to the next `count` steps, if the replay holds enough rows."""
        replay, steps = self.replay, progress.steps + count
        started = replay.lessons or len(replay.own) >= self.job.learn.learning_starts
        if started and replay.ready:
            for _ in range(self.updates_due(progress.steps, steps)):
                self.update(self.lr_scale(steps / progress.schedule.steps))

    def updates_due(self, before: int, after: int) -> int:
        """Updates that belong to the steps from `before` to `after`."""
        ratio = self.job.learn.updates_per_step
        return floor(after * ratio) - floor(before * ratio)

    def update(self, lr_scale: float = 1.0) -> None:
        """One update, of the current task or a lesson of another, and some of old tasks on top."""
        if self.replay.others and self.draws.random() < self.job.reuse.lesson_fraction:
            batch = self.replay.sample_other(self.draws)
        else:
            batch = self.batch_of_the_task()
            coef, stored = self.progress.imitation, batch.stored_q
            known = stored is not None and stored.size > 0  # else the learner asks its teacher
            batch = batch._replace(distill=coef) if known else batch._replace(imitation=coef)
        self.record.update(self.learner.update(batch._replace(lr_scale=lr_scale)))
        past, settings = self.rehearsal.others(self.task), self.job.rehearsal
        while past and self.draws.random() >= 1 - settings.ratio:
            old = self.rehearsal.sample(self.task, self.draws)
            self.learner.update(old._replace(lr_scale=lr_scale, distill=settings.distill_coef))

    def lr_scale(self, over: float) -> float:
        """Part of the learning rate when that part of the training is over: it ends at 0."""
        decay = self.job.learn.lr_decay_fraction
        return min(max(1 - over, 0.0) / decay, 1.0) if decay else 1.0

    def choose_actions(self, obs: Array, step: int) -> Array:
        """Greedy, or at random with the probability that the schedule gives."""
        count, actions = len(obs), self.replay.spaces.actions
        draws = self.explore.random(2 * count).tolist()
        chosen = [int(draw * actions) for draw in draws[count:]]
        epsilon = self.epsilon(step)
        greedy = [k for k in range(count) if draws[k] >= epsilon]
        if greedy:
            best = self.learner.act(obs).tolist()
            for k in greedy:
                chosen[k] = best[k]
        return np.array(chosen)

    def epsilon(self, step: int) -> float:
        """Probability of a random action after that many steps of the task."""
        explore = self.job.explore
        start = max(self.progress.schedule.epsilon, explore.eps_end)
        return explore.eps_end + (start - explore.eps_end) * exp(-step / explore.eps_decay)

    def end_iteration(self, steps: int = 1) -> None:
        """An iteration of the loop is over: beat, and every so often write a row of /train."""
        if self.record.turn(steps, self.job.train.log_interval):
            self.require_finite(not self.record.updates or isfinite(self.record.progress.loss))
            self.record_training()
        self.record.beat()
        self.record.clock.switch("saving")
        if self.saver:
            self.saver.turn(steps, self.snapshot())

    def record_training(self) -> None:
        """A row of /train; who has no own step yet takes no random action."""
        steps = self.progress.steps
        self.record.training(self.epsilon(steps) if steps else 0.0)

    def require_finite(self, finite: bool) -> None:
        """Stop before broken numbers reach other tasks, other agents or the disk."""
        if not finite:
            donors = [lesson.offer.source for lesson in self.progress.lessons]
            origin = f"lessons of agents {', '.join(donors)}" if donors else "own play"
            raise RankFailed(
                f"agent {self.number}'s network is no longer finite in round {self.record.round}, "
                f"task '{self.task}', after {self.record.env_steps} steps and {self.record.updates}"
                f" updates on {origin}: the last loss was {self.record.progress.loss}. "
                f"A smaller learn.lr (now {self.job.learn.lr}) or learn.reward = clip may help."
            )

    def snapshot(self) -> Callable[[], Columns] | None:
        """The state of the agent, unless neighbours swap rows with it: they can't go back alone."""
        return None if self.sharing.swaps else self.finite_state_dict

    def finite_state_dict(self) -> Columns:
        """Everything for a checkpoint; one with a broken network could never be resumed."""
        self.require_finite(self.learner.is_finite())
        return agent_state_dict(self)

    # ── lessons ────────────────────────────────────────────────────────────────────────────────

    def take_lessons(self) -> list[Lesson]:
        """Lessons for this task; where the policy compares tasks, some random steps come first."""
        embedding = np.zeros(0, dtype="<f4")
        if self.sharing.compares and self.sharing.link.offers():
            embedding = self.probe()
        lessons = self.sharing.take(self.replay, embedding)
        self.record.progress.source = lessons[0].offer.donor if lessons else -1
        return lessons

    def probe(self) -> Array:
        """Play at random for a while to see what this task is like."""
        self.record.phase("probing")
        env, steps = self.envs(self.task, "probe", self.number), self.job.share.probe
        rng, scratch = self.stream("probe"), Buffer(self.replay.spaces, steps)
        scratch.start(env.reset())
        for _ in range(steps):
            actions = rng.integers(self.replay.spaces.actions, size=env.count)
            env.send(actions)
            scratch.add(actions, env.recv())
            self.record.probe_steps += env.count
            self.record.beat()
        env.close()
        return self.sharing.embedding(scratch.export(), rng)

    def schedule_for(self, lessons: list[Lesson]) -> TaskSchedule:
        """What the chosen mode does with lessons of this very task; without one it plays."""
        reuse, steps = self.job.reuse, self.job.train.steps
        if not any(lesson.offer.task == self.task for lesson in lessons):
            return TaskSchedule(steps, epsilon=self.job.explore.eps_start)
        own = round(reuse.steps * steps) if reuse.mode != "replay" else 0
        if reuse.mode in ("distill", "adopt") and self.can_be_taught(lessons):
            pretrain = round(reuse.pretrain_updates * steps)
            return TaskSchedule(own, pretrain, reuse.lesson_fraction, reuse.imitation_coef)
        if own:
            return TaskSchedule(own, lesson_fraction=reuse.lesson_fraction)
        return TaskSchedule(0, self.updates_due(0, steps))  # rows alone, without own steps

    def can_be_taught(self, lessons: list[Lesson]) -> bool:
        """Whether there is a donor's network that fits; with `adopt` its weights are copied."""
        teacher = self.teacher_of(lessons)
        if teacher is None:
            return False
        try:
            if self.job.reuse.mode == "adopt":
                self.learner.set_weights(teacher.network)
            self.learner.set_teacher(teacher.network)
        except DamagedData as error:
            logger.warning("agent %d's network is not used: %s", teacher.offer.donor, error)
            return False
        return True

    def teacher_of(self, lessons: list[Lesson]) -> Lesson | None:
        """The lesson with the network of the best donor of this very task."""
        able = {one.offer.key: one for one in lessons if one.network}
        offers = [one.offer for one in able.values() if one.offer.task == self.task]
        return able[best_first(offers)[0].key] if offers else None

    def take_in(self, progress: TaskProgress) -> None:
        """Give the replay the rows of the lessons, except a held-out part of the teacher's."""
        self.teacher = self.teacher_of(progress.lessons) if progress.schedule.imitation else None
        by_task: dict[str, list[Columns]] = {}
        for lesson in progress.lessons:
            rows = lesson.rows
            if lesson is self.teacher:
                self.learner.set_teacher(lesson.network)
                rows, held = hold_out(rows, *HELD_OUT, self.stream("hold out"))
                self.held_out = observations(held, self.replay.spaces)
            by_task.setdefault(lesson.offer.task, []).append(rows)
        same = by_task.pop(self.task, [])
        if self.teacher:
            q_values = self.learner.teacher_q_values
            same = [with_q_values(rows, self.replay.spaces, q_values) for rows in same]
        self.replay.begin(same, {task: one_after_another(rows) for task, rows in by_task.items()})

    def remember(self, lessons: list[Lesson]) -> None:
        """Keep a part of the task for rehearsal, and which weights mattered (EWC)."""
        self.record.phase("remembering")
        if self.job.rehearsal.rows:
            rows = [lesson.rows for lesson in lessons if lesson.offer.task == self.task]
            if len(self.replay.own):
                rows.append(self.replay.own.export())
            values, rng = self.learner.q_values, self.stream("memory")
            self.rehearsal.keep(self.task, one_after_another(rows), values, rng)
        self.replay.lesson_fraction = 1.0
        self.learner.consolidate(self.batch_of_the_task)

    def batch_of_the_task(self) -> Batch:
        """A batch of the current task."""
        return self.replay.sample(self.draws)._replace(task=self.task)

    # ── evaluation ─────────────────────────────────────────────────────────────────────────────

    def evaluate_if_due(self, progress: TaskProgress) -> None:
        """A point of the task's curve, where evaluations inside tasks are asked for."""
        every, steps = self.job.evaluation.interval, progress.steps
        if every and steps % every < self.job.train.num_envs:  # several steps an iteration
            self.record.clock.switch("evaluating")
            self.record.curve(self.evaluate(self.task, f"evaluate-{self.record.round}-{steps}"))

    def keep_network(self, round_: int) -> None:
        """Keep what it takes to evaluate the agent as it is now when its last round is over."""
        evaluation = self.job.evaluation
        if not evaluation.episodes or evaluation.tasks == "final":
            return
        weights = self.learner.get_weights() if evaluation.tasks == "after" else {}
        state = weights or self.learner.state_dict()
        self.networks[round_] = {name: column.copy() for name, column in state.items()}

    def evaluate_networks(self) -> None:
        """After the last round: the networks of right after each task, and the final one."""
        learner, which = self.learner, self.job.evaluation.tasks
        if not self.job.evaluation.episodes:
            return
        everything = self.job.tasks if which == "all" else ()
        learnt = [*dict.fromkeys(self.order)]
        self.record.plan(len(everything or "1") * len(self.networks) + len(everything or learnt))
        self.record.phase("evaluating")
        final, alone = learner.state_dict(), which == "after" and bool(learner.get_weights())
        right_after: dict[str, tuple[float, Columns]] = {}
        for round_, network in sorted(self.networks.items()):
            task = self.order[round_ - 1]
            learner.set_task(task)
            (learner.set_weights if alone else learner.load_state_dict)(network)
            right_after[task] = self.evaluate_tasks(everything or [task], round_)[task], network
        learner.load_state_dict(final)
        at_end = self.evaluate_tasks(everything or learnt, len(self.order))
        learner.set_task(self.task)
        if alone:
            better = {t: net for t, (score, net) in right_after.items() if score > at_end[t]}
            kept = [with_prefix(task, network) for task, network in better.items()]
            self.record.sink.save("checkpoints", "best", dict(ChainMap(*kept)))

    def evaluate_tasks(self, tasks: Sequence[str], after_round: int) -> dict[str, float]:
        """How the agent does on these tasks with the network that its learner has now."""
        means = {}
        for task in tasks:
            self.learner.set_task(task)
            start = perf_counter()
            found = self.evaluate(task, f"evaluate-{after_round}")
            self.record.evaluated(task, after_round, found, perf_counter() - start)
            self.record.progress.step += 1
            means[task] = sum(total for total, _ in found) / len(found)
        return means

    def evaluate(self, task: str, purpose: str) -> list[tuple[float, int]]:
        """Return and length of greedy episodes, from random streams of their own."""
        rng = random_stream(self.job.seed, self.number, task, purpose)
        env = self.envs(task, purpose, self.number)
        found = episodes(env, self.learner.act, rng, self.job.evaluation, self.record.beat)
        env.close()
        return found

    def stream(self, purpose: str) -> np.random.Generator:
        """A random stream of this agent for one purpose of the current task."""
        return random_stream(self.job.seed, self.number, self.task, purpose)


def episodes(
    env: Env,
    act: Callable[[Array], Array],
    rng: np.random.Generator,
    settings: EvaluationConfig,
    beat: Callable[[], None],
    seen: Callable[[Array, Step], None] | None = None,
) -> list[tuple[float, int]]:
    """Return and length of each greedy episode; now and then an action is drawn from `rng`.

    `seen` is shown every action and what followed.
    """
    found = []
    for _ in range(settings.episodes):
        obs, total, length, over = env.reset(), 0.0, 0, False
        while not over and length < settings.max_steps:
            actions = act(obs)
            if rng.random() < settings.epsilon:
                actions[0] = rng.integers(env.spaces.actions)
            env.send(actions)
            step = env.recv()
            if seen is not None:
                seen(actions, step)
            obs, total, length = step.start, total + float(step.reward[0]), length + 1
            over = bool(step.flags[0] & (TERMINATED | TRUNCATED))
            beat()
        found.append((total, length))
    return found
