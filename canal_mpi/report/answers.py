"""The four answers at the top: did it learn, did sharing help, did it forget, at what cost."""

import numpy as np

from canal_mpi.report.costs import PARTS, seconds
from canal_mpi.report.parts import card
from canal_mpi.report.svg import number
from canal_mpi.results import measures as m
from canal_mpi.results.compare import Comparison, Group
from canal_mpi.results.summary import Measured


def answers(comparison: Comparison) -> str:
    """Four cards, about the group that shares where there is one."""
    group = next((g for g in comparison.groups if g.shares), comparison.groups[0])
    measured = group.runs[0]
    cards = [learnt(measured), shared(comparison, group), forgot(measured), spent(measured)]
    return f'<div class="cards">{"".join(cards)}</div>'


def learnt(measured: Measured) -> str:
    """Scores before any task against scores right after each."""
    before, after = measured.P[:, 0, :], measured.learnt
    first, last = m.mean(before), m.mean(after)
    name = measured.scale.name
    if np.isnan(last):
        return card("Did it learn?", "–", "No evaluations yet.")
    if np.isnan(first):
        words = f"Mean score right after each task ({name}); the start was not evaluated."
        return card("Did it learn?", number(last), words)
    both = ~np.isnan(before) & ~np.isnan(after)
    better, count = int((after > before)[both].sum()), int(both.sum())
    words = (
        f"Mean score ({name}) before any task and right after each; better in {better} of "
        f"{count} agent and task pairs."
    )
    tone = "good" if last > first else "bad"
    return card("Did it learn?", f"{number(first)} → {number(last)}", words, tone)


def shared(comparison: Comparison, group: Group) -> str:
    """What lessons saved, and what they gained where a baseline is there."""
    question, table = "Did sharing help?", group.runs[0].run["tasks"]
    lessons, tasks = int((table["source"] == "lesson").sum()), len(table["source"])
    if not group.shares:
        return card(question, "no sharing", "The agents of this run don't hear each other.")
    played = float((table["env_steps"] + table["probe_steps"]).sum())
    full = float(tasks * int(group.runs[0].run.setting("train.frames", 0)))
    saved = f"{1 - played / full:.0%} fewer own steps" if full else "–"
    words = f"{lessons} of {tasks} tasks were learnt from a lesson, with {saved} in all."
    if comparison.baseline is None:
        words += " Whether it pays, only a run without sharing beside it can tell."
        return card(question, f"{lessons} of {tasks}", words)
    found = comparison.versus(group)
    chance = found["probability of improvement"]
    low, high = (found[f"probability of improvement, {side}"] for side in ("low", "high"))
    advantage = found["TA_mean(80%)"]
    words += (
        f" A score right after a task is better than without sharing with probability {chance:.0%} "
        f"({low:.0%} to {high:.0%})."
    )
    if min(len(group.runs), len(comparison.baseline.runs)) == 1:
        words += " One seed each: a difference may be luck."
    tone = "good" if low > 0.5 else "bad" if high < 0.5 else ""
    if np.isnan(advantage):
        return card(question, f"P = {chance:.0%}", words, tone)
    words = f"Environment steps to 80 % of the baseline's final score, without / with. {words}"
    return card(question, f"TA = {advantage:.1f}", words, tone)


def forgot(measured: Measured) -> str:
    """Scores right after tasks against scores at the end."""
    question, lost = "Did it forget?", m.mean(m.forgetting(measured.P, measured.when))
    kept = m.mean(m.maintenance(measured.P, measured.when))
    if np.isnan(lost) or np.isnan(kept):
        return card(question, "–", "Not known: evaluation.tasks = all (or seen) tells.")
    words = (
        f"Score lost between the end of a task and the end of the run ({measured.scale.name}, mean "
        f"over tasks and agents). Performance maintenance {number(kept)}."
    )
    return card(question, number(lost), words, "bad" if lost > 0.05 else "good")


def spent(measured: Measured) -> str:
    """The largest parts of the time."""
    parts = seconds(measured.run).sum(axis=0)
    total = float(parts.sum())
    if not total:
        return card("Where did the time go?", "–", "No task is finished yet.")
    order = np.argsort(-parts)
    told = [f"{PARTS[k]} {parts[k] / total:.0%}" for k in order if parts[k] / total >= 0.01]
    return card("Where did the time go?", told[0], ", ".join(told[1:]) + ".")
