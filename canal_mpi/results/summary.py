"""The last words of a run: how well each task was learnt, by whom, and where the time went."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import floor, isnan, nan
from typing import Any, NamedTuple

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN, WHOLE_GAME, human_normalised
from canal_mpi.interfaces import Array, Columns
from canal_mpi.results.measures import clearly_above, episode_means, mean, standard_error
from canal_mpi.results.progress import digits, duration, table
from canal_mpi.results.store import TIME_PARTS, Store
from canal_mpi.settings import Job

CORE = "waiting for a core"
Scores = Mapping[str, Array]  # of agents, by task
RULE = "the mean over agents is above by more than its standard error"


class Took(NamedTuple):
    """The seconds of a run, as the rank that writes its results saw them."""

    start: float  # until the agents began
    agents: float  # until the last agent was done, in earlier sittings of the run too
    end: float  # until everything was written


def summary(job: Job, store: Store, took: Took) -> list[str]:
    """Everything that is said of a run when it is over."""
    tasks, faults = store.table("tasks"), store.info.faults
    dead = [int(fault["agent"]) for fault in faults if fault["agent"] >= 0]  # not env servers
    rest = "starts and lost work" if store.info.resumes or faults else "other"
    time = time_line(tasks, dead, took, rest)
    rows = {name: tasks["task"] == name.encode() for name in job.tasks}
    rows = {name: here for name, here in rows.items() if here.any()}  # somebody has learnt it
    if not rows:
        return [time]
    scores = {name: tasks["score"][here] for name, here in rows.items()}
    words = headline(job, tasks, scores, final_scores(store) or scores, dead)
    return ["", *score_table(job, tasks, rows), "", words, time]


def compared(job: Job, task: str) -> bool:
    """Whether scores of a task can be compared with those of random play and of humans."""
    whole = job.evaluation.max_steps >= WHOLE_GAME
    return task in RANDOM_AND_HUMAN and whole and job.evaluation.episodes > 0


def score_table(job: Job, tasks: Columns, rows: Mapping[str, Array]) -> list[str]:
    """One line for each task: scores right after it was learnt, who played it, who was taught."""
    agents, refer = len(np.unique(tasks["agent"])), any(compared(job, name) for name in rows)
    mean_of = f"mean of {agents} agents" if agents > 1 else "score"
    lines = [["task", "random", "human", mean_of, "", "HNS", "learnt by", "taught to"]]
    for name, here in rows.items():
        scores, taught = tasks["score"][here], tasks["source"][here] == b"lesson"
        level, error, hns, pair = mean(scores), standard_error(scores), nan, (nan, nan)
        if compared(job, name):
            hns, pair = human_normalised(name, level), RANDOM_AND_HUMAN[name]
        line = [name, *(digits(score, 1) for score in (*pair, level))]
        line += [f"± {error:.1f}" * (error >= 0), "–" if isnan(hns) else f"{round(100 * hns)} %"]
        lines.append(line + [ranges(tasks["agent"][here][who]) for who in (~taught, taught)])
    shown = [k for k in range(len(lines[0])) if refer or k not in (1, 2, 5)]
    return table([[line[k] for k in shown] for line in lines])


def final_scores(store: Store) -> dict[str, Array]:
    """[agent] scores of the final networks on every task; nothing where none was evaluated."""
    means = episode_means(store.evaluations()[0])
    rounds = np.flatnonzero(~np.isnan(means).all(axis=(0, 2)))
    return dict(zip(store.info.tasks, means[:, rounds[-1]].T, strict=True)) if len(rounds) else {}


def better_than_random(
    job: Job, scores: Scores, rule: Callable[[Any], bool] = clearly_above
) -> int:
    """Games on which the mean over agents is clearly, or by another rule, above random play."""
    known = [name for name in scores if compared(job, name)]
    return sum(rule(scores[name] - RANDOM_AND_HUMAN[name][0]) for name in known)


def headline(job: Job, tasks: Columns, scores: Scores, final: Scores, dead: Sequence[int]) -> str:
    """What the run came to, by scores right after learning and at the end."""
    agents = len(np.unique(tasks["agent"]))
    games = "game" if all(name in RANDOM_AND_HUMAN for name in scores) else "task"
    words = f" {count(len(scores), games)}, {count(agents, 'agent')}"
    words += f" ({len(dead)} died)" if dead else ""
    known = [name for name in scores if compared(job, name)]
    if known:
        of = f" of {len(known)}" if len(known) < len(scores) else ""
        above = better_than_random(job, scores, lambda more: mean(more) > 0)
        clearly, at_end = (better_than_random(job, one) for one in (scores, final))
        words += f": better than random play on {above}{of}"
        words += f", clearly on {clearly}" if clearly < above else ""
        words += f" right after learning, on {at_end} at the end" if clearly != at_end else ""
        words += f" ({RULE})" if agents > 1 else ""
    played, full = int((tasks["env_steps"] + tasks["probe_steps"]).sum()), job.train.steps
    words += f".\n Played {played:,} steps"
    if (tasks["source"] == b"lesson").any():
        words += f"; without sharing it would have been {full * len(tasks['agent']):,}"
    if not job.evaluation.episodes:
        words += ". No scores: evaluation.episodes is 0"
    elif job.evaluation.max_steps < WHOLE_GAME:
        words += f". Evaluation episodes were limited to {job.evaluation.max_steps} steps"
    return f"{words}."


def time_line(tasks: Columns, dead: Sequence[int], took: Took, rest: str = "other") -> str:
    """Where the time of all living agents went; `rest` is the name of what nobody measured."""
    agents = [agent for agent in np.unique(tasks["agent"]) if agent not in dead]
    each = seconds_by_part(tasks, agents)
    parts = {name: float(seconds.sum()) for name, seconds in each.items()}
    spent = sum(each.values())
    # Agents begin and end together: who was done before the slowest one waited for it.
    slowest = float(np.max(spent, initial=0.0))
    parts["waiting for agents"] += float(np.sum(slowest - spent))
    parts["start and files"] += (took.start + took.end) * len(agents)
    if len(agents) == 1:  # there is nobody to wait for but the disk
        parts["start and files"] += parts.pop("waiting for agents")
    parts.pop("other")
    total = (took.start + max(took.agents, slowest) + took.end) * len(agents)
    parts[rest] = max(total - sum(parts.values()), 0.0)
    told = [f"{name} {part} %" for name, part in percentages(parts).items() if part]
    return f" {duration(took.start + took.agents + took.end)}: {' · '.join(told)}"


def seconds_by_part(tasks: Columns, agents: Sequence[int]) -> dict[str, Array]:
    """Seconds inside tasks by what they were spent on, for each of these agents.

    Whoever works waits for a core in every phase. How much is not known of the evaluations after
    the last round: as much as before.
    """

    def spent(*columns: str) -> Array:
        rows = [tasks["agent"] == agent for agent in agents]
        return np.array([sum(np.nansum(tasks[name][own]) for name in columns) for own in rows])

    parts = {part: spent(*columns) for part, columns in TIME_PARTS.items()}
    other = np.maximum(spent("seconds") - sum(parts.values()), 0.0)
    waiting = parts["waiting for agents"]
    busy = np.asarray(sum(parts.values()) - waiting)
    measured = np.maximum(busy - parts["evaluation"], 1e-9)
    core = np.minimum(spent("core_seconds") / measured, 1.0)  # part of the work
    work = {part: seconds * (1 - core) for part, seconds in parts.items()}
    return work | {"waiting for agents": waiting, CORE: busy * core, "other": other}


def percentages(parts: dict[str, float]) -> dict[str, int]:
    """Whole percentages that add up to 100: what rounding leaves goes where it matters most."""
    total = max(sum(parts.values()), 1e-9)
    exact = {name: 100 * part / total for name, part in parts.items()}
    found = {name: floor(part) for name, part in exact.items()}
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[
        : 100 - sum(found.values())
    ]:
        found[name] += 1
    return found


def ranges(numbers: Array) -> str:
    """Numbers of agents, three and more in a row as a range."""
    steps = enumerate(np.unique(numbers).tolist())
    rows = [[n for _, n in row] for _, row in groupby(steps, lambda pair: pair[1] - pair[0])]
    return " ".join(
        f"{row[0]}–{row[-1]}" if len(row) > 2 else " ".join(map(str, row)) for row in rows
    )


def count(number: int, what: str) -> str:
    """`1 agent`, `2 agents`."""
    return f"{number} {what}{'s' * (number != 1)}"
