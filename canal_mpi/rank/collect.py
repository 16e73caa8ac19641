"""The sink of a rank: rows go to rank 0 after every round, arrays to this host's own disk."""

from pathlib import Path

import numpy as np

from canal_mpi.columns import decode, encode
from canal_mpi.log import logger
from canal_mpi.rank.live import View
from canal_mpi.rank.world import ROWS, World
from canal_mpi.results.files import file_name
from canal_mpi.results.hdf5 import write_arrays
from canal_mpi.results.store import Store
from canal_mpi.schema import ROWS_LIMIT, Rows
from canal_mpi.state import inside, under
from canal_mpi.types import Columns


class Collector(Rows):
    """Keeps rows until the round ends; rank 0 then writes everybody's into run.h5."""

    def __init__(
        self, world: World, folder: Path, agent: int, store: Store | None, view: View | None
    ) -> None:
        super().__init__()
        self.world, self.folder, self.agent = world, folder, agent
        self.store, self.view = store, view
        self._history: dict[int, bytes] = {}  # this agent's rows of every round that is over

    def save(self, kind: str, name: str, columns: Columns) -> None:
        """Write arrays to a file of this agent."""
        path = self.folder / kind / f"agent-{self.agent}" / f"{file_name(name)}.h5"
        write_arrays(path, columns, {"agent": self.agent, "kind": kind, "name": name})

    def flush(self, round_: int) -> None:
        """Bring this round's rows of all agents together and write run.h5."""
        logger.info("round %d done", round_)
        self._history[round_] = encode(self.take(), pack=True)
        messages = self.world.gather(self._history[round_], ROWS, ROWS_LIMIT)
        if self.store is not None:
            for rank, message in enumerate(messages):
                self.store.append(decode(message, ROWS_LIMIT), rank)
            self.store.write("running")
        self.world.broadcast(b"written")  # nobody goes on before the round is safe
        if self.store is not None and self.view is not None:
            self.view.round_done(round_, self.store)

    def state(self) -> Columns:
        """All rows of this agent, so that run.h5 can be made again from the agents alone."""
        past = {
            f"{round_:06d}": np.frombuffer(rows, dtype=np.uint8)
            for round_, rows in self._history.items()
        }
        return super().state() | under("history", past)

    def restore(self, state: Columns) -> None:
        """Have all rows again that `state` gave, but where the agent runs is as it is now."""
        here = encode(self.take(), pack=True)
        super().restore(state)
        past = inside("history", state).items()
        self._history = {int(round_): rows.tobytes() for round_, rows in past} | {0: here}

    def rejoin(self) -> None:
        """After a resume: rank 0 makes run.h5 from what every agent knows."""
        past = {
            f"{r:06d}": np.frombuffer(rows, dtype=np.uint8) for r, rows in self._history.items()
        }
        messages = self.world.gather(encode(past), ROWS, ROWS_LIMIT)
        if self.store is not None:
            known = [decode(message, ROWS_LIMIT) for message in messages]
            for round_ in sorted({round_ for past in known for round_ in past}):
                for rank, past in enumerate(known):
                    if round_ in past:
                        rows = decode(past[round_].tobytes(), ROWS_LIMIT)
                        self.store.append(rows, rank)
            self.store.write("running")
        self.world.broadcast(b"written")
