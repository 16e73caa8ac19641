"""The life of an agent, on one screen: act, store, learn, share, record."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, floor, hypot, inf, isnan, nan, sqrt
from time import perf_counter

import numpy as np

from canal_mpi.agent.evaluate import episodes
from canal_mpi.agent.lessons import Sharing
from canal_mpi.agent.recorder import Recorder
from canal_mpi.agent.state import NoCheckpoints, TaskProgress, TaskSchedule, agent_state_dict, best
from canal_mpi.errors import DamagedData, NotRepeatable, Stopped, logger
from canal_mpi.interfaces import Array, Batch, Columns, Env, EnvMaker, Learner, Saver
from canal_mpi.membuf.lesson import Lesson
from canal_mpi.membuf.rehearsal import Rehearsal
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.selection import one_after_another
from canal_mpi.settings import Job
from canal_mpi.state import random_stream


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
        self.sharing, self.record, self.saver = sharing, record, saver or NoCheckpoints()
        self.first_round, self.task = 1, order[0]
        self.std_error = 0.0  # standard error of the newest evaluation
        self.resumed: TaskProgress | None = None  # of the first round, after a resume

    def run(self) -> None:
        """Every task of the order: a round each."""
        if self.job.evaluation.tasks == "all" and not self.resumed:
            self.evaluate_others(0)
        for round_ in range(self.first_round, len(self.order) + 1):
            self.learn_task(self.order[round_ - 1], round_)
            start = perf_counter()
            self.record.sink.flush(round_)
            self.record.late = perf_counter() - start  # waited for the slowest of the round

    def learn_task(self, task: str, round_: int) -> None:
        """One round: take lessons, train, be evaluated, offer what was experienced."""
        attempt = self.resumed or self.begin(task, round_)
        score = self.learn(attempt)
        if attempt.lessons and not self.admitted(attempt, score):
            attempt = self.alone()
            score = self.learn(attempt)
        self.resumed = None
        self.sharing.finish_swaps()
        self.evaluate_others(round_)
        self.remember(attempt.lessons)
        self.sharing.offer(score, self.replay, self.learner, self.stream("offer"))
        self.record.phase("saving")
        self.record.sink.save("checkpoints", "learner", self.learner.state_dict())
        self.record.learnt([lesson.offer.source for lesson in attempt.lessons], score)

    def begin(self, task: str, round_: int) -> TaskProgress:
        """A new task, with what the neighbours have to say about it."""
        self.task, self.looks = task, 0
        self.record.begin(task, round_)
        self.explore, self.draws = self.stream("explore"), self.stream("sample")
        self.learner.set_task(task)
        self.sharing.begin(task, round_)
        lessons, before = self.take_lessons()
        self.record.phase("saving")  # from here to the training: the first checkpoint of the task
        attempt = self.with_lessons(lessons, before) if lessons else self.alone()
        self.saver.start(lambda: agent_state_dict(self))
        return attempt

    def learn(self, attempt: TaskProgress) -> float:
        """Learn the task; the score."""
        if not attempt.trained:
            self.train(attempt)
        return self.evaluate()

    def train(self, attempt: TaskProgress) -> None:
        """Study the lessons first, then play."""
        how = attempt.how
        self.record.phase("training")
        while attempt.studied < how.study:
            self.update(self.rate(attempt.studied / how.study))
            attempt.studied += 1
            self.end_iteration()
        if attempt.playing or (how.steps and not (how.looks and self.reached(how.goal))):
            self.play(attempt)
        if self.record.unwritten:
            self.record.training(self.epsilon(self.record.env_steps))
        attempt.trained = True
        self.saver.end(self.cut())

    def play(self, attempt: TaskProgress) -> None:
        """The training loop: act, learn while the environment works, store."""
        how, done = attempt.how, attempt.done
        attempt.env = env = self.envs(self.task, "train", self.number)
        obs = self.first_look(env, attempt)
        while done < how.steps and not (done and self.reached(how.goal, done)):
            before, done, start = done, done + env.count, perf_counter()
            actions = self.choose_actions(obs, before)
            env.send(actions)
            sent = perf_counter()
            if self.ready:
                for _ in range(self.updates_due(before, done, how.updates)):
                    self.update(self.rate(done / how.steps))
            learnt = perf_counter()
            step = env.recv()
            self.replay.own.add(actions, step)
            self.record.step(step)
            self.sharing.swap(self.replay, self.learner, done)
            obs = attempt.obs = step.start
            attempt.done = done
            self.record.env_seconds += perf_counter() - learnt + sent - start
            self.end_iteration(done - before, done)
        env.close()

    def first_look(self, env: Env, attempt: TaskProgress) -> Array:
        """What the environments show: a first state, or the one that a checkpoint was left in."""
        if not attempt.playing:
            attempt.playing, self.replay.foreign = True, attempt.how.foreign
            self.sharing.restart(self.learner)
            obs = env.reset()
            self.replay.own.start(obs)
            return obs
        try:
            env.load_state_dict(attempt.saved_env)
            return attempt.obs
        except NotRepeatable as error:
            logger.warning("%s; a new episode begins: not the same bits from here on", error)
            obs = env.reset()
            self.replay.own.break_off(obs)
            self.record.break_off()
            return obs

    def update(self, rate: float = 1.0) -> None:
        """One update of the current task and, on top of it, some of old ones."""
        start = perf_counter()
        if self.replay.others and self.draws.random() < self.job.reuse.lesson_fraction:
            batch, average_grad = self.replay.sample_other(self.draws), None
        else:
            batch, average_grad = self.batch_of_the_task(), self.sharing.sync.average_grad
            batch = batch._replace(imitation=self.now.imitate)
        self.record.update(self.learner.update(batch._replace(lr_scale=rate), average_grad))
        # Next to the steep imitation Adam would hardly hear old tasks: they speak up as much.
        weight = 1 + self.now.imitate / self.job.reuse.temperature
        while (
            self.rehearsal.others(self.task) and self.draws.random() >= 1 - self.job.rehearsal.ratio
        ):
            old = self.rehearsal.sample(self.task, self.draws)
            self.learner.update(old._replace(lr_scale=rate, weight=weight))
        self.record.learn_seconds += perf_counter() - start

    def rate(self, over: float) -> float:
        """Part of the learning rate when that part of the training is over: it ends at 0."""
        lr_decay_fraction = self.job.learn.lr_decay_fraction
        return min(max(1 - over, 0.0) / lr_decay_fraction, 1.0) if lr_decay_fraction else 1.0

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
        start = max(self.now.how.epsilon, explore.eps_end)
        return explore.eps_end + (start - explore.eps_end) * exp(-step / explore.eps_decay)

    @property
    def ready(self) -> bool:
        """Whether the replay holds enough to learn from."""
        started = (
            bool(self.replay.lessons) or len(self.replay.own) >= self.job.learn.learning_starts
        )
        return started and self.replay.ready

    def updates_due(self, before: int, done: int, times: float = 1.0) -> int:
        """Updates that belong to the steps from `before` to `done`."""
        ratio = times * self.job.learn.updates_per_step
        return floor(done * ratio) - floor(before * ratio)

    def end_iteration(self, steps: int = 1, done: int = 0) -> None:
        """A turn of the loop is over: beat, and every so often write a row of /train."""
        if self.record.turn(steps, self.job.train.log_interval):
            self.record.training(self.epsilon(done) if done else 0.0)
        self.record.beat()
        self.saver.turn(steps, self.cut())

    def cut(self) -> Callable[[], Columns] | None:
        """The state of the agent, unless neighbours swap rows with it: they can't go back alone."""
        return None if self.sharing.swaps else lambda: agent_state_dict(self)

    # ── lessons ────────────────────────────────────────────────────────────────────────────────

    def take_lessons(self) -> tuple[list[Lesson], float]:
        """Lessons for this task, and the score that the agent has on it before it learns."""
        score, embedding = nan, np.zeros(0, dtype="<f4")
        hears = bool(self.sharing.link.offers())
        if hears and self.sharing.compares:
            embedding = self.probe()
        if hears and (self.job.share.gate == "better"):
            score = self.evaluate()
        lessons = self.sharing.take(self.replay, embedding, score)
        self.record.progress.source = lessons[0].offer.donor if lessons else -1
        if lessons and self.job.reuse.reject_if_worse and isnan(score):
            score = self.evaluate()
        return lessons, score

    def probe(self) -> Array:
        """Play at random for a while to see what this task is like."""
        self.record.phase("probing")
        env, steps = self.envs(self.task, "probe", self.number), self.job.share.probe
        rng, scratch = self.stream("probe"), Replay(self.replay.spaces, steps, self.replay.recipe)
        scratch.own.start(env.reset())
        for _ in range(steps):
            actions = rng.integers(self.replay.spaces.actions, size=env.count)
            env.send(actions)
            scratch.own.add(actions, env.recv())
            self.record.probe_steps += env.count
            self.record.beat()
        env.close()
        return self.sharing.embedding(scratch.own.export_all(), rng)

    def with_lessons(self, lessons: list[Lesson], before: float) -> TaskProgress:
        """Learn the task with lessons."""
        weights = self.learner.state_dict() if self.job.reuse.reject_if_worse else {}
        self.sharing.sync.leave()
        same = self.hold(lessons)
        return self.start_progress(self.schedule_for(same, before), lessons, before, weights)

    def alone(self) -> TaskProgress:
        """Learn the task by playing it."""
        self.hold([])
        return self.start_progress(
            TaskSchedule(self.job.train.steps, epsilon=self.job.explore.eps_start)
        )

    def start_progress(
        self,
        how: TaskSchedule,
        lessons: Sequence[Lesson] = (),
        before: float = nan,
        weights: Columns | None = None,
    ) -> TaskProgress:
        """Begin to learn the task in that way."""
        self.record.plan(how.study + how.steps)
        self.now = TaskProgress(
            how, list(lessons), before, self.std_error, weights or {}, how.imitate
        )
        return self.now

    def hold(self, lessons: list[Lesson]) -> list[Lesson]:
        """Give the replay the rows of lessons; those of this very task."""
        same = [lesson for lesson in lessons if lesson.offer.task == self.task]
        others: dict[str, list[Columns]] = {}
        for lesson in lessons:
            if lesson.offer.task != self.task:
                others.setdefault(lesson.offer.task, []).append(lesson.rows)
        foreign = {task: one_after_another(parts) for task, parts in others.items()}
        self.replay.begin([lesson.rows for lesson in same], foreign)
        return same

    def admitted(self, attempt: TaskProgress, after: float) -> bool:
        """Whether the lessons may stay; where they made the agent worse it is as before.

        Both scores are means of few episodes: worse is what is lower by more than their error.
        """
        least = attempt.before - hypot(attempt.std_error, self.std_error)
        kept = not (self.job.reuse.reject_if_worse and after < least)
        for lesson in attempt.lessons:
            self.record.used(lesson.offer, attempt.before, after, kept)
        if not kept:
            self.learner.load_state_dict(attempt.weights)
            self.learner.set_task(self.task)
        return kept

    def schedule_for(self, lessons: list[Lesson], before: float) -> TaskSchedule:
        """What the chosen mode does with lessons of this very task; without one it plays.

        A donor that scores no more than the agent does `before` is nobody to imitate or stop at.
        """
        reuse, frames = self.job.reuse, self.job.train.steps
        if not lessons:
            return TaskSchedule(frames, epsilon=self.job.explore.eps_start)
        if reuse.mode == "replay":
            return TaskSchedule(0, study=self.updates_due(0, frames))
        donor = best(lessons)
        weak = donor.offer.score <= before
        mixed = TaskSchedule(
            round(reuse.steps * frames),
            updates=reuse.updates,
            foreign=reuse.lesson_fraction,
            goal=inf if isnan(donor.offer.score) else donor.offer.score,
            stops=reuse.stop_early and not weak,
            looks=False,
        )
        if reuse.mode == "mix" or not donor.network or weak:
            return mixed
        try:
            if reuse.mode == "adopt":
                self.learner.set_weights(donor.network)
            self.learner.set_teacher(donor.network)
        except DamagedData as error:
            logger.warning("agent %d's network is not used: %s", donor.offer.donor, error)
            return mixed
        study = round(
            reuse.pretrain_updates * frames
        )  # who adopts needs it too: old tasks get used to it
        looks = bool(study) or reuse.mode == "adopt"
        return replace(mixed, study=study, imitate=reuse.imitation_coef, looks=looks)

    def reached(self, goal: float, done: int = 0) -> bool:
        """Whether a look, if one is due, shows no less than the goal by more than its error.

        Imitation fades as the score nears the goal.
        """
        every = self.job.evaluation.interval if goal == inf else self.job.reuse.check_interval
        if not every or done % every >= self.job.train.num_envs:  # several steps a turn
            return False
        score = self.look()
        self.record.phase("training")
        if goal > 0 and score > 0:
            fades = max(1 - score / goal, self.job.reuse.min_imitation_coef)
            self.now.imitate = self.now.how.imitate * fades
        return self.now.how.stops and score >= goal - self.std_error

    def look(self) -> float:
        """Evaluate between two steps; who is stopped here is saved as it was before the look."""
        looks = self.looks
        try:
            return self.evaluate()
        except Stopped:
            self.looks = looks
            self.saver.turn(0, self.cut())
            raise

    def remember(self, lessons: list[Lesson]) -> None:
        """Keep a part of the task for rehearsal, and which weights mattered (EWC)."""
        self.record.phase("remembering")
        if self.job.rehearsal.rows:
            rows = [lesson.rows for lesson in lessons if lesson.offer.task == self.task]
            if len(self.replay.own):
                rows.append(self.replay.own.export_all())
            values, rng = self.learner.q_values, self.stream("memory")
            self.rehearsal.keep(self.task, one_after_another(rows), values, rng)
        self.replay.foreign = 1.0
        self.learner.consolidate(self.batch_of_the_task)

    def batch_of_the_task(self) -> Batch:
        """A batch of the current task."""
        return self.replay.sample(self.draws)._replace(task=self.task)

    # ── evaluation ─────────────────────────────────────────────────────────────────────────────

    def evaluate(self) -> float:
        """Mean return on the current task; a point of its curve."""
        if not self.job.evaluation.episodes:
            return nan
        exam = self.next_evaluation()
        self.record.evaluated(exam)
        scores = [score for score, _ in exam]
        self.std_error = float(np.std(scores)) / sqrt(max(len(scores) - 1, 1))
        return float(np.mean(scores))

    def next_evaluation(self) -> list[tuple[float, int]]:
        """Episodes of the current task that were not played before."""
        self.looks += 1
        return self.evaluate_policy(self.task, f"evaluate-{self.record.round}-{self.looks}")

    def evaluate_others(self, round_: int) -> None:
        """How the agent does on the job's other tasks now: on those it has seen, or on all."""
        which = {"current": (), "seen": self.order[: round_ - 1], "all": self.job.tasks}
        others = [t for t in which[self.job.evaluation.tasks] if t != self.task or not round_]
        for task in others if self.job.evaluation.episodes else ():
            self.learner.set_task(task)
            self.record.result(task, self.evaluate_policy(task, f"evaluate-{round_}-others"))
        self.learner.set_task(self.task)

    def evaluate_policy(self, task: str, purpose: str) -> list[tuple[float, int]]:
        """Return and length of greedy episodes, from random streams of their own."""
        self.record.phase("evaluating")
        rng = random_stream(self.job.seed, self.number, task, purpose)
        env = self.envs(task, purpose, self.number)
        exam = episodes(env, self.learner.act, rng, self.job.evaluation, self.record.beat)
        env.close()
        return exam

    def stream(self, purpose: str) -> np.random.Generator:
        """A random stream of this agent for one purpose of the current task."""
        return random_stream(self.job.seed, self.number, self.task, purpose)
