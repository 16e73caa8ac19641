"""The sink of a rank: rows go to rank 0 after every round, arrays to this host's own disk.

In rounds no agent goes on before rank 0 has written everybody's rows. With the free clock rows are
posted, and rank 0 writes them when it comes by. At the end it gathers them all once more.
With --ft everybody keeps everybody's rows, so that whoever is left can write them.
"""

import struct
from pathlib import Path

import numpy as np

from canal_mpi.errors import DamagedData, logger
from canal_mpi.interfaces import Columns
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.rank.display import Display
from canal_mpi.rank.world import World
from canal_mpi.results.files import digest, file_name, write_arrays
from canal_mpi.results.store import ROWS_LIMIT, Rows, Store
from canal_mpi.state import strip_prefix, with_prefix
from canal_mpi.topology import Tag

NUMBER = struct.Struct("<i")  # the round, in front of rows that are posted
RowsByRound = dict[int, bytes]


class Collector(Rows):
    """Keeps rows until the round ends; rank 0, which has a store, then writes everybody's.

    `known` has the rows of all agents with --ft: it outlives this collector when a rank dies.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        store: Store | None,
        view: Display | None,
        free: bool = False,
        known: dict[int, RowsByRound] | None = None,
    ) -> None:
        super().__init__()
        self.world, self.folder, self.agent = world, folder, world.agent
        self.store, self.view, self.free = store, view, free
        self._history: RowsByRound = {}  # this agent's rows of every round that is over
        self._known = {} if known is None else known
        self._busy = False  # a message is being received

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Write arrays to a file of this agent; run.h5 will tell its digest."""
        path = f"{kind}/agent-{self.agent}/{file_name(name)}.h5"
        about = {"agent": self.agent, "kind": kind, "name": name}
        write_arrays(self.folder / path, columns, about)
        self.add("files", agent=self.agent, path=path, sha256=digest(columns))

    def flush(self, round_: int) -> None:
        """Bring this round's rows of all agents together and write run.h5."""
        logger.info("round %d done", round_)
        self._history[round_] = encode(self.take(), pack=True)
        if self.free and round_:
            self._post(round_)
        else:
            self._gather(round_)
        if self.store is not None and self.view is not None:
            self.view.round_done(round_, self.store)

    def _post(self, round_: int) -> None:
        """Hand this round's rows to whoever writes them, without waiting."""
        world, rows = self.world, self._history[round_]
        for peer in world.living_agents if world.ft else [world.root]:
            if peer != world.rank and world.polled is not None:
                world.polled.post(NUMBER.pack(round_) + rows, peer, Tag.ROWS)
        if self.store is not None:
            self.store.append(decode(rows, ROWS_LIMIT), world.rank)
            self.write_arrived()
            self.store.write("running")

    def write_arrived(self) -> None:
        """Take in rows that agents posted meanwhile, and write them where that is done."""
        polled, store, found = self.world.polled, self.store, False
        if not self.free or self._busy or polled is None:
            return
        if self.world.heartbeat.stopping:
            return  # nothing may come between this rank and its checkpoint
        for message in polled.poll(Tag.ROWS, ROWS_LIMIT):
            rank, data = message.source, bytes(message.data)
            if message.error or len(data) < NUMBER.size:
                raise DamagedData(f"agent {rank} posted {len(data)} bytes as its rows")
            round_, rows = NUMBER.unpack_from(data)[0], data[NUMBER.size :]
            self._keep(rank, round_, rows)
            if store is not None:
                store.append(decode(rows, ROWS_LIMIT), rank)
                found = True
        if found and store is not None:
            store.write("running")

    def _gather(self, round_: int) -> None:
        """Everybody's rows of a round, written before any agent goes on."""
        world, self._busy = self.world, True  # these rows are gathered, not posted
        messages = world.gather(self._history[round_], Tag.ROWS, ROWS_LIMIT, world.agents)
        self._busy = False
        if self.store is not None:
            for rank, message in messages.items():
                self.store.append(decode(message, ROWS_LIMIT), rank)
            self.store.write("running")
        for rank, rows in messages.items():
            self._keep(rank, round_, rows)  # before anybody can go on and die
        answer = world.broadcast(encode(_numbered(messages if world.ft else {})), world.agents)
        if not world.is_root:
            for name, column in decode(answer, ROWS_LIMIT).items():
                self._keep(int(name), round_, column.tobytes())

    def _keep(self, agent: int, round_: int, rows: bytes) -> None:
        """Rows of an agent that may die later; a round that is done again replaces them."""
        if self.world.ft:
            self._known.setdefault(agent, {})[round_] = rows

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
        self.rebuild(over=True)

    def rebuild(self, over: bool = False) -> None:
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
            self.store.write(self.store.end if over else "running")
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
