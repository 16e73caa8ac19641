"""The sink of a rank: rows go to rank 0 after every round, arrays to this host's own disk."""

from pathlib import Path

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
        self, world: World, folder: Path, agent: int, store: Store | None, view: View | None
    ) -> None:
        super().__init__()
        self.world, self.folder, self.agent = world, folder, agent
        self.store, self.view = store, view

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Write arrays to a file of this agent."""
        path = self.folder / kind / f"agent-{self.agent}" / f"{file_name(name)}.h5"
        write_arrays(path, columns, {"agent": self.agent, "kind": kind, "name": name})

    def flush(self, round_: int) -> None:
        """Bring this round's rows of all agents together and write run.h5."""
        logger.info("round %d done", round_)
        among = self.world.agents
        messages = self.world.gather(encode(self.take()), ROWS, ROWS_LIMIT, among)
        if self.store is not None:
            for rank, message in enumerate(messages):
                self.store.append(decode(message, ROWS_LIMIT), rank)
            self.store.write("running")
        self.world.broadcast(b"written", among)  # nobody goes on before the round is safe
        if self.store is not None and self.view is not None:
            self.view.round_done(round_, self.store)
