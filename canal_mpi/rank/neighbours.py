"""A rank's part in the exchange: its link to the others, and lessons from before."""

from dataclasses import replace
from typing import Any

from canal_mpi import seeding
from canal_mpi.rank.plan import Plan
from canal_mpi.rank.speed import PACKING, slowest_link
from canal_mpi.rank.world import World
from canal_mpi.topology.desk import Terms
from canal_mpi.topology.link import SoloLink
from canal_mpi.topology.offers import pack_offers, unpack_offers
from canal_mpi.types import Link

HEADS = 1 << 16  # what a message takes beside its arrays


def link_of(world: World, plan: Plan) -> Link:
    """This agent's link, over MPI where there is somebody to share with."""
    share, comm = plan.job.share, world.agents_comm
    if comm is None or world.agents < 2 or not (plan.edges or share.lessons):
        return SoloLink(world.agent)
    from canal_mpi.topology.mpilink import MpiLink

    terms = Terms(share.free, share.relay, share.patience, share.hold_mb << 20, plan.job.tasks)
    limit, idle = (share.limit_mb << 20) + HEADS, world.watch.idle
    return MpiLink(comm, set(plan.edges), idle, limit, terms, plain=world.ft)


def packs(world: World, plan: Plan) -> bool:
    """Whether lessons are packed: where that is faster than sending them as they are."""
    share = plan.job.share
    if share.pack != "auto" or not plan.edges:
        return share.pack == "always"
    return slowest_link(world) < PACKING


def stock(world: World, plan: Plan, agent: Any) -> int:
    """Offer the lessons of an earlier run, which the leading rank reads; how many there are."""
    from canal_mpi.results.lessons import earlier_lessons

    job, share, found, told = plan.job, plan.job.share, [], []
    if world.leads:
        limit, spaces = share.limit_mb << 20, agent.replay.spaces
        found = earlier_lessons(share.lessons, job.tasks, spaces, limit)
    rng = seeding.stream(job.seed, world.agent, "", "lessons")
    for lesson, _ in found:
        embedding = agent.sharing.embedding(lesson.rows, rng)
        told.append(replace(lesson.offer, embedding=embedding))
        world.watch.beat(world.watch.mine)
    offers = unpack_offers(world.broadcast(pack_offers(told), world.agents))
    lessons = {lesson.offer.key: data for lesson, data in found}
    holder = world.lead if world.size > 1 else world.agent
    agent.sharing.link.stock(offers, lessons, holder)
    return len(offers)
