"""The last words of a run: how well each task was learnt, by whom, and where the time went."""

from collections.abc import Callable, Sequence
from math import floor, isnan, nan
from typing import Any, NamedTuple

import numpy as np

from canal_mpi.games import RANDOM_AND_HUMAN, WHOLE_GAME, human_normalised
from canal_mpi.interfaces import Array, Columns
from canal_mpi.results.measures import clearly_above, mean, standard_error
from canal_mpi.results.progress import digits, duration
from canal_mpi.results.store import TIME_PARTS, Store
from canal_mpi.settings import Job

CORE = "waiting for a core"
RULE = "the mean over agents is above by more than its standard error"


class Took(NamedTuple):
    """The seconds of a run, as the rank that writes its results saw them."""

    start: float  # until the agents began
    agents: float  # until the last agent was done, in earlier sittings of the run too
    end: float  # until everything was written

    @property
    def wall(self) -> float:
        """All of them."""
        return self.start + self.agents + self.end


def summary(job: Job, store: Store, took: Took) -> list[str]:
    """Everything that is said of a run when it is over."""
    tasks, final, faults = store.table("tasks"), final_scores(store), store.info.faults
    dead = [int(fault["agent"]) for fault in faults if fault["agent"] >= 0]  # not env servers
    rest = "starts and lost work" if store.info.resumes or faults else "other"
    better = [better_than_random(job, one) for one in (tasks, final) if len(one["task"])]
    lines = ["", *score_table(job, tasks), "", headline(job, tasks, dead, better)]
    lines += [time_line(tasks, dead, took, rest)]
    return lines if len(tasks["agent"]) else lines[-1:]


def compared(job: Job, task: str) -> bool:
    """Whether scores of a task can be compared with those of random play and of humans."""
    whole = job.evaluation.max_steps >= WHOLE_GAME
    return task in RANDOM_AND_HUMAN and whole and job.evaluation.episodes > 0


def score_table(job: Job, tasks: Columns) -> list[str]:
    """One line for each task: scores right after it was learnt, who played it, who was taught."""
    names, agents = _names(job, tasks), len(np.unique(tasks["agent"]))
    refer = any(compared(job, name) for name in names)
    wide = max(map(len, ("task", *names)))
    head = f" {'task':<{wide}}" + f"{'random':>10}{'human':>9}" * refer
    head += f"{f'mean of {agents} agents' if agents > 1 else 'score':>{20 if agents > 1 else 12}}"
    head = f"{head:<{wide + 21 + 19 * refer}}" + f"{'HNS':>8}" * refer
    lines = [f"{head}   {'learnt by':<11} taught to"]
    for name in names:
        here = tasks["task"] == name.encode()
        scores, taught = tasks["score"][here], tasks["source"][here] == b"lesson"
        level, error, hns, pair = mean(scores), standard_error(scores), nan, (nan, nan)
        if compared(job, name):
            hns, pair = human_normalised(name, level), RANDOM_AND_HUMAN[name]
        line = f" {name:<{wide}}" + f"{digits(pair[0], 1):>10}{digits(pair[1], 1):>9}" * refer
        line += f"{digits(level, 1):>12} {f'± {error:.1f}' if error >= 0 else '':<7}"
        line += f"{'–' if isnan(hns) else f'{round(100 * hns)} %':>8}" * refer
        own, others = (ranges(tasks["agent"][here][who]) for who in (~taught, taught))
        lines.append(f"{line}   {own:<11} {others}".rstrip())
    return lines


def final_scores(store: Store) -> Columns:
    """Task and score of every agent's final network."""
    found = store.table("evaluation")
    last = found["after_round"] == found["after_round"].max(initial=0)
    pairs = sorted(set(zip(found["agent"][last], found["task"][last], strict=True)))
    means = [
        mean(found["score"][last & (found["agent"] == agent) & (found["task"] == task)])
        for agent, task in pairs
    ]
    return {"task": np.array([task for _, task in pairs], "S64"), "score": np.array(means)}


def better_than_random(
    job: Job, scores: Columns, rule: Callable[[Any], bool] = clearly_above
) -> int:
    """Games on which the mean over agents is clearly, or by another rule, above random play."""
    return sum(
        rule(scores["score"][scores["task"] == name.encode()] - RANDOM_AND_HUMAN[name][0])
        for name in _names(job, scores)
        if compared(job, name)
    )


def headline(job: Job, tasks: Columns, dead: Sequence[int], better: Sequence[int]) -> str:
    """What the run came to; `better` counts games right after learning, and at the end."""
    names, agents = _names(job, tasks), len(np.unique(tasks["agent"]))
    games = "game" if all(name in RANDOM_AND_HUMAN for name in names) else "task"
    words = f" {count(len(names), games)}, {count(agents, 'agent')}"
    words += f" ({len(dead)} died)" if dead else ""
    known = [name for name in names if compared(job, name)]
    if known:
        of = f" of {len(known)}" if len(known) < len(names) else ""
        above = better_than_random(job, tasks, lambda more: mean(more) > 0)
        clearly = f", clearly on {better[0]}" if better[0] < above else ""
        words += f": better than random play on {above}{of}{clearly}"
        if better[0] != better[-1]:
            words += f" right after learning, on {better[-1]} at the end"
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
    """Where the time of the agents went; `rest` is the name of what nobody measured."""
    parts = time_parts(tasks, dead, took, rest)
    told = [f"{name} {part} %" for name, part in percentages(parts).items() if part]
    return f" {duration(took.wall)}: {' · '.join(told)}"


def time_parts(
    tasks: Columns, dead: Sequence[int], took: Took, rest: str = "other"
) -> dict[str, float]:
    """Seconds of all living agents together, by what they were spent on."""
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
    return parts | {rest: max(total - sum(parts.values()), 0.0)}


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
    found: list[list[int]] = []
    for number in sorted({int(n) for n in numbers}):
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return " ".join(
        f"{row[0]}–{row[-1]}" if len(row) > 2 else " ".join(map(str, row)) for row in found
    )


def _names(job: Job, tasks: Columns) -> list[str]:
    """The tasks that somebody has learnt."""
    learnt = {name.decode() for name in tasks["task"].tolist()}
    return [name for name in job.tasks if name in learnt]


def count(number: int, what: str) -> str:
    """`1 agent`, `2 agents`."""
    return f"{number} {what}{'s' * (number != 1)}"
