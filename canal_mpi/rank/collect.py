"""The sink of a rank: rows go to rank 0 after every round, arrays to this host's own disk.

In rounds nobody goes on before rank 0 has written everybody's rows. With the free clock rows are
posted, and rank 0 writes them when it comes by; it counts them, so none is missing at the end.
"""

from pathlib import Path
from time import sleep

from canal_mpi.columns import decode, encode
from canal_mpi.log import logger
from canal_mpi.rank.live import View
from canal_mpi.rank.world import ROWS, ROWS_LIMIT, World
from canal_mpi.results.files import file_name
from canal_mpi.results.hdf5 import write_arrays
from canal_mpi.results.store import Store
from canal_mpi.schema import Rows
from canal_mpi.types import Columns


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
    ) -> None:
        super().__init__()
        self.world, self.folder, self.agent = world, folder, agent
        self.store, self.view, self.free = store, view, free
        self._missing = 0  # messages of rows that rank 0 still expects
        self._busy = False  # a message is being received

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Write arrays to a file of this agent."""
        path = self.folder / kind / f"agent-{self.agent}" / f"{file_name(name)}.h5"
        write_arrays(path, columns, {"agent": self.agent, "kind": kind, "name": name})

    def flush(self, round_: int) -> None:
        """Bring this round's rows of all agents together and write run.h5."""
        logger.info("round %d done", round_)
        if self.free and round_:
            self._post(round_)
        else:
            self.finish(round_)

    def _post(self, round_: int) -> None:
        """Hand this round's rows to rank 0 without waiting for it."""
        if self.store is None:
            assert self.world.mail is not None
            self.world.mail.post(encode(self.take()), 0, ROWS)
            return
        self.store.append(self.take(), 0)
        self._missing += self.world.size - 1
        self.write_arrived()
        self.store.write("running")
        if self.view is not None:
            self.view.round_done(round_, self.store)

    def write_arrived(self) -> None:
        """On rank 0: take in rows that agents posted meanwhile, and write them."""
        mail, store, found = self.world.mail, self.store, False
        if not self.free or self._busy or store is None or mail is None:
            return
        self._busy = True  # waiting for a message calls the watch, and that this
        while (rank := mail.waiting(ROWS)) >= 0:
            message = mail.collect(rank, ROWS, ROWS_LIMIT, "the gathering")
            store.append(decode(message, ROWS_LIMIT), rank)
            self._missing, found = self._missing - 1, True
        self._busy = False
        if found:
            store.write("running")

    def finish(self, round_: int) -> None:
        """Everybody's rows of a round, written before anybody goes on."""
        while self._missing > 0 and self.world.mail:
            self.write_arrived()
            self.world.watch.idle(-1, "the last rows")
            sleep(0.01)
        self._busy = True  # what comes now is gathered in order
        messages = self.world.gather(encode(self.take()), ROWS, ROWS_LIMIT)
        if self.store is not None:
            for rank, message in enumerate(messages):
                self.store.append(decode(message, ROWS_LIMIT), rank)
            self.store.write("running")
        self.world.broadcast(b"written")  # nobody goes on before the round is safe
        self._busy = False
        if self.store is not None and self.view is not None:
            self.view.round_done(round_, self.store)
