"""Exchanges of several agents in one process, and the lessons that reachability gives them."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from threading import RLock
from time import sleep
from typing import Any, ParamSpec, TypeVar

import networkx

from canal_mpi.interfaces import Key, Link, OnTransfer
from canal_mpi.settings import ShareConfig
from canal_mpi.topology.exchange import Exchange, Message, Transport
from canal_mpi.topology.graphs import Edges

IN_ROUNDS = ShareConfig()
Args = ParamSpec("Args")
Result = TypeVar("Result")


class Threads(Transport):
    """Brings messages among threads; a thread that waits answers for all others meanwhile."""

    def __init__(self, mesh: "list[ThreadLink]", lock: Any) -> None:
        self.mesh, self.lock = mesh, lock
        self.inbox: deque[Message] = deque()

    def send(self, to: int, message: Message) -> None:
        self.mesh[to].threads.inbox.append(message)

    def poll(self) -> list[Message]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def wait(self, done: Callable[[], object], peer: int, phase: str, limit: float = 0.0) -> bool:
        while not done():
            for link in self.mesh:
                link.poll()
            self.lock.release()  # the only place where another thread gets its turn
            sleep(0.0002)
            self.lock.acquire()
        return True


def in_turn(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """One thread of a mesh at a time."""

    @wraps(method)
    def call(*args: Args.args, **named: Args.kwargs) -> Result:
        link: Any = args[0]
        with link.threads.lock:
            return method(*args, **named)

    return call


class ThreadLink(Exchange):
    """The exchange of one of several agents in this process."""

    def __init__(self, agent: int, edges: Edges, threads: Threads, share: ShareConfig) -> None:
        super().__init__(agent, edges, threads, share)
        self.threads = threads

    begin = in_turn(Exchange.begin)
    publish = in_turn(Exchange.publish)
    offers = in_turn(Exchange.offers)
    fetch = in_turn(Exchange.fetch)
    trade = in_turn(Exchange.trade)
    leave = in_turn(Exchange.leave)
    poll = in_turn(Exchange.poll)

    @classmethod
    def mesh(
        cls, size: int, edges: Edges, share: ShareConfig = IN_ROUNDS
    ) -> "Sequence[ThreadLink]":
        """One link per agent, joined to each other."""
        links: list[ThreadLink] = []
        lock = RLock()
        links += [cls(agent, edges, Threads(links, lock), share) for agent in range(size)]
        return links


def given(link: Any) -> Callable[[OnTransfer], Link]:
    """Lets an agent have a link that exists already."""

    def connect(on_transfer: OnTransfer) -> Link:
        link.on_transfer = on_transfer
        made: Link = link
        return made

    return connect


def distances(edges: Edges, size: int) -> list[list[int]]:
    """Hops from each agent (row) to each other, as networkx counts them; -1 without a path."""
    graph = networkx.empty_graph(size, networkx.DiGraph)
    graph.add_edges_from(edges)
    found = dict(networkx.all_pairs_shortest_path_length(graph))
    return [[found[a].get(b, -1) for b in range(size)] for a in range(size)]


def known(edges: Edges, size: int, agent: int, round_: int) -> set[Key]:
    """Lessons (donor, round) that an agent can know of when it begins a round."""
    hops = distances(edges, size)
    return {
        (donor, published)
        for donor in range(size)
        for published in range(1, round_)
        if donor != agent and 0 < hops[donor][agent] <= round_ - published
    }
