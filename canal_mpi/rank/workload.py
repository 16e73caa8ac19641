"""How much work a run is, roughly: to say how long it takes before the first step, and at any time.

The speeds are those of an ordinary core, the console's RAM and the default network; once a run is
on its way only their ratios count.
"""

from collections.abc import Sequence

import numpy as np

from canal_mpi.interfaces import Progress
from canal_mpi.rank.plan import Plan
from canal_mpi.settings import Job

PLAYED = 1000  # agent steps a second, with an update each
TAUGHT = 1500  # updates a second on lessons
EVALUATED = 2000  # steps of evaluations a second
EPISODE = 1000  # steps of an evaluation episode
START = 10.0  # seconds until all ranks are there


class Workload:
    """Seconds that every agent's rounds and its evaluation take on a core of its own."""

    def __init__(self, plan: Plan) -> None:
        job, learnt = plan.job, set[str]()
        self.rounds = np.zeros((len(plan.orders), len(plan.orders[0])))  # [agent, round - 1]
        for r, tasks in enumerate(zip(*plan.orders, strict=True)):
            play = job.train.steps / PLAYED
            self.rounds[:, r] = [_taught(job) if task in learnt else play for task in tasks]
            learnt.update(tasks if plan.edges else ())
        count = self.rounds.shape[1]
        final, all_ = count, (count + 1) * len(job.tasks)
        networks = {"final": final, "after": 2 * final, "all": all_}[job.evaluation.tasks]
        steps = job.evaluation.episodes * min(job.evaluation.max_steps, EPISODE)
        self.evaluation = networks * steps / EVALUATED
        usual = job.learn.algorithm == "dqn" and job.learn.network == "mlp"
        self.known = usual and job.task.obs == "ram"  # whether the speeds above hold

    def seconds(self, cores: int, speeds: Sequence[float]) -> float:
        """How long it takes on so many cores, for agents at these parts of full speed."""
        slowed = self.rounds / np.array(speeds)[:, None]
        rounds = np.maximum(slowed.max(axis=0), self.rounds.sum(axis=0) / cores).sum()
        agents = len(self.rounds)
        return START + float(rounds) + self.evaluation * max(1 / min(speeds), agents / cores)

    def done(self, agents: Sequence[Progress]) -> float:
        """The fraction that living agents have behind them."""
        done = total = 0.0
        for rounds, p in zip(self.rounds, agents, strict=True):
            if p.phase != "died":
                total += rounds.sum() + self.evaluation
                part, evaluates = p.step / max(p.steps, 1), p.phase == "evaluating"
                over = len(rounds) if evaluates else max(p.round - 1, 0)
                done += rounds[:over].sum() + part * [*rounds, self.evaluation][over]
        return done / total if total else 0.0


def _taught(job: Job) -> float:
    """Seconds of learning a task from a lesson."""
    reuse, steps = job.reuse, job.train.steps
    own = reuse.steps * steps if reuse.mode != "replay" else 0.0
    teaches = reuse.mode in ("distill", "adopt")
    updates = reuse.pretrain_updates * steps if teaches else steps * (own == 0)
    return own / PLAYED + updates / TAUGHT
