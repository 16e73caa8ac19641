"""The sink of a rank: rows go to rank 0 after every round, arrays to this host's own disk.

In rounds no agent goes on before rank 0 has written everybody's rows; with the free clock rank 0
writes them when it comes by. At the end it gathers them all once more. With --ft everybody keeps
everybody's rows, so that whoever is left can write them.
"""

import struct
from pathlib import Path
from time import monotonic

import numpy as np

from canal_mpi.errors import DamagedData, logger
from canal_mpi.interfaces import Columns
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.rank.display import Display
from canal_mpi.rank.world import World
from canal_mpi.results.files import digest, file_name, write_arrays
from canal_mpi.results.store import ROWS_LIMIT, Rows
from canal_mpi.state import strip_prefix, with_prefix
from canal_mpi.topology import Tag

NUMBER = struct.Struct("<i")  # the round, in front of its rows
RowsByRound = dict[int, bytes]  # packed


class Collector(Rows):
    """Keeps rows until the round ends; rank 0, which has a display, then writes everybody's.

    `known` has the rows of the other agents with --ft: it outlives this collector when a rank dies.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        display: Display | None,
        free: bool,
        known: dict[int, RowsByRound],
    ) -> None:
        super().__init__()
        self.world, self.folder, self.free = world, folder, free
        self.display, self.store = display, display.store if display else None
        self._history: RowsByRound = {}  # this agent's rows of every round that is over
        self._known = known
        self._busy = False  # whether the rows of a round are being received

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Write arrays to a file of this agent; run.h5 will tell its digest."""
        agent = self.world.agent
        path = f"{kind}/agent-{agent}/{file_name(name)}.h5"
        write_arrays(self.folder / path, columns, {"agent": agent, "kind": kind, "name": name})
        self.add("files", agent=agent, path=path, sha256=digest(columns))

    def flush(self, round_: int) -> None:
        """Hand on this round's rows; in rounds they are in run.h5 when this returns."""
        logger.info("round %d done", round_)
        start, world, rows = monotonic(), self.world, encode(self.take(), pack=True)
        self._history[round_] = rows
        for peer in self._keepers():
            if peer != world.rank:
                world.polled.post(NUMBER.pack(round_) + rows, peer, Tag.ROWS)
        self._take_in(world.rank, round_, rows)
        waits = not self.free or round_ == 0
        if waits and world.rank in self._keepers():
            self._busy = True  # beats must not take what is expected here
            for peer in world.living_agents:
                if peer != world.rank:
                    phase = "the gathering"
                    self._open(peer, world.polled.collect(peer, Tag.ROWS, ROWS_LIMIT, phase))
            self._busy = False
        if self.store is not None:
            self.write_arrived()
            self.store.write("running")
        if waits:
            world.broadcast(b"written", world.agents)
        if self.display is not None:
            self.display.round_done(round_, monotonic() - start)

    def _keepers(self) -> list[int]:
        """Who gets every agent's rows."""
        return self.world.living_agents if self.world.ft else [self.world.root]

    def _open(self, agent: int, message: bytes) -> None:
        if len(message) < NUMBER.size:
            raise DamagedData(f"agent {agent} sent {len(message)} bytes as its rows")
        self._take_in(agent, NUMBER.unpack_from(message)[0], message[NUMBER.size :])

    def _take_in(self, agent: int, round_: int, rows: bytes) -> None:
        """Rows of an agent that may die later; a round that is done again replaces them."""
        if self.world.ft:
            self._known.setdefault(agent, {})[round_] = rows
        if self.store is not None:
            self.store.append(decode(rows, ROWS_LIMIT), agent)

    def write_arrived(self) -> None:
        """With the free clock: take in rows that have come, and write them where that is done."""
        world, found = self.world, False
        if not self.free or self._busy or world.size == 1 or world.heartbeat.stopping:
            return  # nothing may come between a rank that stops and its checkpoint
        for message in world.polled.poll(Tag.ROWS, ROWS_LIMIT):
            self._open(message.source, b"" if message.error else bytes(message.data))
            found = True
        if found and self.store is not None:
            self.store.write("running")

    def state_dict(self) -> Columns:
        """All rows of this agent, so that run.h5 can be made again from the agents alone."""
        return super().state_dict() | with_prefix("history", _numbered(self._history))

    def load_state_dict(self, state: Columns) -> None:
        """Have all rows again that `state` gave, but where the agent runs is as it is now."""
        here = encode(self.take(), pack=True)
        super().load_state_dict(state)
        past = strip_prefix("history", state).items()
        self._history = {int(round_): rows.tobytes() for round_, rows in past} | {0: here}

    def close(self) -> None:
        """The last rows, after everybody's last round: run.h5 is whole before any rank leaves."""
        late = self.take()
        if late:
            self._history[max(self._history) + 1] = encode(late, pack=True)
        self.rebuild(self.store.end if self.store else "")

    def rebuild(self, status: str = "running") -> None:
        """Rank 0 makes run.h5 from what every agent knows: after a resume, and at the end."""
        world, history = self.world, encode(_numbered(self._history))
        messages = world.gather(history, Tag.HISTORY, ROWS_LIMIT, world.agents)
        if self.store is not None:
            self.write_arrived()  # what was posted is in the histories too
            self.store.clear()
            known = {rank: decode(message, ROWS_LIMIT) for rank, message in messages.items()}
            dead = self._known.keys() - set(world.alive)
            known |= {agent: _numbered(self._known[agent]) for agent in dead}
            for round_ in sorted({round_ for past in known.values() for round_ in past}):
                for rank, past in sorted(known.items()):
                    if round_ in past:
                        self.store.append(decode(past[round_].tobytes(), ROWS_LIMIT), rank)
            self.store.write(status)
        world.broadcast(b"written", world.agents)

    def finished(self, agent: int) -> dict[int, str]:
        """With --ft: the tasks that an agent had finished, by round."""
        found: dict[int, str] = {}
        for rows in self._known.get(agent, {}).values():
            columns = decode(rows, ROWS_LIMIT)
            rounds, tasks = columns.get("tasks/round", ()), columns.get("tasks/task", ())
            found |= {int(r): t.decode() for r, t in zip(rounds, tasks, strict=True)}
        return found


def _numbered(packed: RowsByRound) -> Columns:
    """Packed rows as columns that are named by their numbers."""
    return {f"{number:06d}": np.frombuffer(rows, np.uint8) for number, rows in packed.items()}
