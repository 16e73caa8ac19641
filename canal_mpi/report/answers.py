"""The questions that a report answers first, each in a few words; and what a reader must know."""

from dataclasses import dataclass

import numpy as np

from canal_mpi.interfaces import Array
from canal_mpi.report.tables import PARTS, Mix, mixes, number, seconds, steps_played
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Comparison, Group, Measured
from canal_mpi.results.measures import WHOLE_GAME
from canal_mpi.results.reader import Run


@dataclass(frozen=True)
class Card:
    """A question, its answer in large, and a sentence; the tone is good, bad or nothing."""

    question: str
    answer: str
    words: str
    tone: str = ""


def answers(comparison: Comparison) -> list[Card]:
    """Of mixes of hosts first; did it learn, did sharing help, did it forget, what took time."""
    group = next((g for g in comparison.groups if g.shares), comparison.groups[0])
    measured, found = group.runs[0], mixes(comparison)
    cards = [learnt(measured), shared(comparison, group), forgot(measured), spent(measured)]
    return [fastest(found), waiting(found), *cards] if found else cards


def learnt(measured: Measured) -> Card:
    """Scores right after each task against random play, or those before any task."""
    question, scale, after = "Did it learn?", measured.scale, measured.learnt
    before, what, means = measured.P[:, 0, :], "the score before the first task", True
    if scale.name == "HNS":
        before, what = np.zeros_like(after), "random play"
    elif np.isnan(before).all():
        before, what, means = _first_episodes(measured), "that of the first episodes", False
    both = ~np.isnan(after) & ~np.isnan(before)
    tasks = np.flatnonzero(both.any(axis=0))
    if not len(tasks):
        words = "Scores need finished tasks and evaluations: --set evaluation.episodes=30."
        return Card(question, "not known yet", words)
    pairs = np.array([[x[both[:, i], i].mean() for x in (before, after)] for i in tasks])
    better, (first, last) = int((pairs[:, 1] > pairs[:, 0]).sum()), pairs.mean(axis=0)
    words = f"Tasks whose mean score over agents, right after learning, is above {what}."
    words += f" Mean over tasks ({scale.name}): {number(first)} → {number(last)}." if means else ""
    tone = "good" if better > len(tasks) / 2 else "" if better else "bad"
    return Card(question, f"better on {better} of {len(tasks)}", words, tone)


def _first_episodes(measured: Measured) -> Array:
    """[agent, task]: mean return of each agent's first ten training episodes, nearly random."""
    run, table = measured.run, measured.run["episodes"]
    found = np.full((len(run.agents), len(run.tasks)), np.nan)
    for i, task in enumerate(run.tasks):
        here = [(table["agent"] == agent) & (table["task"] == task) for agent in run.agents]
        found[:, i] = m.mean([m.mean(table["return"][own][:10]) for own in here])
    return measured.scale(found)


def shared(comparison: Comparison, group: Group) -> Card:
    """What lessons saved, and what they gained where a baseline is there."""
    question, run, base = "Did sharing help?", group.runs[0].run, comparison.baseline
    if not group.shares:
        words = "Agents of this run don't hear each other; --share exact makes them share."
        return Card(question, "no sharing", words)
    table, played = run["tasks"], steps_played(run)
    lessons, tasks = int((table["source"] == "lesson").sum()), len(table["source"])
    full = float(tasks * int(run.setting("train.steps", 0)))
    times, tone = full / played if played else np.nan, ""
    words = f"{lessons} of {tasks} tasks were learnt from a lesson: {played:,.0f} steps played "
    words += f"where {full:,.0f} would have been without sharing."
    if base is None:
        words += " Whether scores are as good, only a run with --share none beside it can tell."
        return Card(question, fewer(times), words)
    found, name = comparison.versus(group), "probability of improvement"
    chance, low, high = (found[f"{name}{end}"] for end in ("", ", low", ", high"))
    if not np.isnan(chance):
        words += f" A score right after a task is better than without with probability {chance:.0%}"
        words += f" ({low:.0%} to {high:.0%})."
    if min(len(group.runs), len(base.runs)) == 1:
        words += " One seed each: a difference may be luck."
    if not np.isnan(found["TA_mean(80%)"]):
        times = found["TA_mean(80%)"]
        words = f"To 80 % of the final score without sharing. {words}"
    if high < 0.5 or times < 1:
        tone = "bad"
    elif low > 0.5 or times > 1.1:
        tone = "good"
    return Card(question, fewer(times), words, tone)


def fewer(times: float) -> str:
    """How many times fewer steps, in words."""
    if not times > 0:
        return "not known yet"
    return f"{times:.1f} × fewer steps" if times >= 1 else f"{1 / times:.1f} × more steps"


def forgot(measured: Measured) -> Card:
    """Scores right after tasks against scores at the end."""
    question = "Did it forget?"
    after, end = m.just_after(measured.P, measured.when), measured.P[:, -1, :]
    later = ~np.isnan(after) & ~np.isnan(end) & (measured.when < measured.rounds_done)
    if not later.any():
        words = "Old tasks were not evaluated again: --set evaluation.tasks=all does it."
        return Card(question, "not measured", words)
    first, last = float(after[later].mean()), float(end[later].mean())
    change = f"{number(first)} → {number(last)}"
    words = f"Mean score ({measured.scale.name}) right after tasks and at the end: {change}."
    answer = f"keeps {last / first:.0%}" if first > 0.05 and last >= 0 else change
    return Card(question, answer, words, "bad" if first - last > 0.05 else "good")


def spent(measured: Measured) -> Card:
    """The largest parts of the time."""
    question, parts = "Where did the time go?", seconds(measured.run).sum(axis=0)
    total = float(parts.sum())
    if not total:
        return Card(question, "no task is finished", "Times are known when a task ends.")
    order = [k for k in np.argsort(-parts) if parts[k] / total >= 0.005]
    told = [f"{PARTS[k]} {parts[k] / total:.0%}" for k in order]
    words = f"{', '.join(told[1:])}; {number(measured.run.seconds)} s in tasks, slowest agent."
    return Card(question, told[0], words)


def fastest(found: list[Mix]) -> Card:
    """Which mix of hosts needs the least wall time."""
    first, *others = sorted(found, key=lambda one: one.wall)
    told = [f"{one.hosts}, {one.clock} {one.wall / first.wall:.1f}\u00a0×" for one in others[:6]]
    words = f"{number(first.wall)} s in tasks, score {number(first.score)}. Time of the others: "
    answer = f"{first.hosts}, {first.clock}"
    return Card("Which mix is fastest?", answer, f"{words}{'; '.join(told)}.", "good")


def waiting(found: list[Mix]) -> Card:
    """Who waits for whom."""
    question, most = "Who waits for whom?", max(found, key=lambda one: max(one.waits.values()))
    who, part = max(most.waits.items(), key=lambda item: item[1])
    whom = min(most.waits, key=lambda kind: most.waits[kind])
    told = [f"{one.hosts}, {one.clock}: {one.waits_told}" for one in found[:6]]
    words = f"Part of its time that a host waits for others: {'; '.join(told)}."
    answer = f"{who} for {whom}: {part:.0%}" if part >= 0.02 else "nobody"
    return Card(question, answer, words)


def missing(measured: Measured) -> list[str]:
    """What a reader should know before reading on."""
    run, found = measured.run, list[str]()
    cap = int(run.setting("evaluation.max_steps", WHOLE_GAME))
    if run.status != "finished":
        done = f"{measured.rounds_done} of {run.rounds} rounds are in the file"
        found.append(f"The run is not finished (status {run.status or 'unknown'}): {done}.")
    if not run.score.size or np.isnan(run.score).all():
        found.append("There are no evaluations: scores, forgetting and transfer can't be told.")
    elif not measured.whole and measured.rounds_done:
        which = f"Agents were evaluated on '{run.setting('evaluation.tasks', 'current')}' tasks"
        need = "forgetting, transfer and time advantage need --set evaluation.tasks=all"
        found.append(f"{which} only; {need}.")
    if words := emulation(run):
        found.append(f"{words}: times are those of the emulation.")
    if cap < WHOLE_GAME:
        words = f"Evaluation episodes were cut after {cap} steps"
        found.append(f"{words}: scores are not those of whole games.")
    return found


def emulation(run: Run) -> str:
    """Which devices were only played, in a few words; empty where none was."""
    agents = run["agents"]
    slow = agents["speed"] < 1  # NaN in older files: not known to be slow
    pairs = zip(agents["host"][slow], agents["speed"][slow], strict=True)
    names = ", ".join(f"{host} at {speed:g} of full speed" for host, speed in pairs)
    if run.setting("emulate"):
        return "Hosts were emulated on one machine" + (f" ({names})" if names else "")
    return f"Slower devices were emulated ({names})" if names else ""
