"""The sink of a rank: rows go to rank 0 after every round, arrays to this host's own disk.

In rounds nobody goes on before rank 0 has written everybody's rows. With the free clock rows are
posted, and rank 0 writes them when it comes by. At the end it gathers them all once more.
With --ft everybody keeps everybody's rows, so that whoever is left can write them.
"""

import struct
from pathlib import Path

import numpy as np

from canal_mpi.columns import decode, encode
from canal_mpi.errors import DamagedData
from canal_mpi.log import logger
from canal_mpi.rank.live import View
from canal_mpi.rank.world import HISTORY, ROWS, World
from canal_mpi.results.files import file_name
from canal_mpi.results.hdf5 import write_arrays
from canal_mpi.results.store import Store
from canal_mpi.schema import ROWS_LIMIT, Rows
from canal_mpi.state import inside, under
from canal_mpi.types import Columns

NUMBER = struct.Struct("<i")  # the round, in front of rows that are posted


class Collector(Rows):
    """Keeps rows until the round ends; rank 0 then writes everybody's into run.h5."""

    def __init__(
        self,
        world: World,
        folder: Path,
        agent: int,
        store: Store | None,
        view: View | None,
        free: bool = False,
        known: dict[int, dict[int, bytes]] | None = None,
    ) -> None:
        super().__init__()
        self.world, self.folder, self.agent = world, folder, agent
        self.store, self.view, self.free = store, view, free
        self._history: dict[int, bytes] = {}  # this agent's rows of every round that is over
        self._known = {} if known is None else known  # with --ft: rows by agent and round
        self._busy = False  # a message is being received

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Write arrays to a file of this agent."""
        path = self.folder / kind / f"agent-{self.agent}" / f"{file_name(name)}.h5"
        write_arrays(path, columns, {"agent": self.agent, "kind": kind, "name": name})

    def flush(self, round_: int) -> None:
        """Bring this round's rows of all agents together and write run.h5."""
        logger.info("round %d done", round_)
        self._history[round_] = encode(self.take(), pack=True)
        if self.free and round_:
            self._post(round_)
        else:
            self._gather(round_)

    def _post(self, round_: int) -> None:
        """Hand this round's rows to whoever writes them, without waiting."""
        world, rows = self.world, self._history[round_]
        message = NUMBER.pack(round_) + rows
        for peer in world.living_agents if world.ft else [world.lead]:
            if peer != world.rank and world.mail is not None:
                world.mail.post(message, peer, ROWS)
        if self.store is None:
            return
        self.store.append(decode(rows, ROWS_LIMIT), world.rank)
        self.write_arrived()
        self.store.write("running")
        if self.view is not None:
            self.view.round_done(round_, self.store)

    def write_arrived(self) -> None:
        """Take in rows that agents posted meanwhile, and write them where that is done."""
        mail, store, found = self.world.mail, self.store, False
        if not self.free or self._busy or mail is None:
            return
        if self.world.watch.stopping:
            return  # nothing may come between this rank and its checkpoint
        self._busy = True  # waiting for a message calls the watch, and that this
        while (rank := mail.waiting(ROWS)) >= 0:
            message = bytes(mail.collect(rank, ROWS, ROWS_LIMIT, "the gathering"))
            if len(message) < NUMBER.size:
                raise DamagedData(f"agent {rank} posted {len(message)} bytes as its rows")
            round_, rows = NUMBER.unpack_from(message)[0], message[NUMBER.size :]
            self._keep(rank, round_, rows)
            if store is not None:
                store.append(decode(rows, ROWS_LIMIT), rank)
                found = True
        self._busy = False
        if found and store is not None:
            store.write("running")

    def _gather(self, round_: int) -> None:
        """Everybody's rows of a round, written before anybody goes on."""
        among, self._busy = self.world.agents, True  # these rows are gathered, not posted
        messages = self.world.gather(self._history[round_], ROWS, ROWS_LIMIT, among)
        self._busy = False
        if self.store is not None:
            for rank, message in messages.items():
                self.store.append(decode(message, ROWS_LIMIT), rank)
            self.store.write("running")
        self._agree(round_, messages)  # nobody goes on before the round is safe
        if self.store is not None and self.view is not None:
            self.view.round_done(round_, self.store)

    def _agree(self, round_: int, messages: dict[int, bytes]) -> None:
        """Go on together; with --ft everybody keeps what was gathered."""
        world = self.world
        for rank, rows in messages.items():
            self._keep(rank, round_, rows)  # before anybody can go on and die
        answer = world.broadcast(encode(_numbered(messages if world.ft else {})), world.agents)
        if not world.leads:
            for name, column in decode(answer, ROWS_LIMIT).items():
                self._keep(int(name), round_, column.tobytes())

    def _keep(self, agent: int, round_: int, rows: bytes) -> None:
        """Rows of an agent that may die later; a round that is done again replaces them."""
        if self.world.ft:
            self._known.setdefault(agent, {})[round_] = rows

    def state(self) -> Columns:
        """All rows of this agent, so that run.h5 can be made again from the agents alone."""
        return super().state() | under("history", _numbered(self._history))

    def restore(self, state: Columns) -> None:
        """Have all rows again that `state` gave, but where the agent runs is as it is now."""
        here = encode(self.take(), pack=True)
        super().restore(state)
        past = inside("history", state).items()
        self._history = {int(round_): rows.tobytes() for round_, rows in past} | {0: here}

    def close(self) -> None:
        """The last rows, after everybody's last round: run.h5 is whole before anybody leaves."""
        late = self.take()
        if late:
            self._history[max(self._history) + 1] = encode(late, pack=True)
        self.rejoin(over=True)

    def rejoin(self, over: bool = False) -> None:
        """Rank 0 makes run.h5 from what every agent knows: after a resume, and at the end."""
        messages = self.world.gather(
            encode(_numbered(self._history)), HISTORY, ROWS_LIMIT, self.world.agents
        )
        if self.store is not None:
            self.write_arrived()  # what was posted is in the histories too
            self.store.clear()
            known = {rank: decode(message, ROWS_LIMIT) for rank, message in messages.items()}
            known |= self._left_behind()
            for round_ in sorted({round_ for past in known.values() for round_ in past}):
                for rank, past in sorted(known.items()):
                    if round_ in past:
                        rows = decode(past[round_].tobytes(), ROWS_LIMIT)
                        self.store.append(rows, rank)
            self.store.write(self.store.end if over else "running")
        self.world.broadcast(b"written", self.world.agents)

    def finished(self, agent: int) -> dict[int, str]:
        """With --ft: the tasks that an agent had finished, by round."""
        found: dict[int, str] = {}
        for rows in self._known.get(agent, {}).values():
            columns = decode(rows, ROWS_LIMIT)
            rounds, tasks = columns.get("tasks/round", ()), columns.get("tasks/task", ())
            found |= {int(r): t.decode() for r, t in zip(rounds, tasks, strict=True)}
        return found

    def _left_behind(self) -> dict[int, Columns]:
        """The rows of agents that died, as far as they were gathered."""
        dead = self._known.keys() - set(self.world.alive)
        return {agent: _numbered(self._known[agent]) for agent in dead}


def _numbered(packed: dict[int, bytes]) -> Columns:
    """Packed rows as columns that are named by their numbers."""
    return {f"{number:06d}": np.frombuffer(rows, np.uint8) for number, rows in packed.items()}
