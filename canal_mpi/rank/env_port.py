"""One end of a channel to an env server over MPI: whole messages; nothing blocks or spins."""

from mpi4py import MPI

from canal_mpi.envs import wire
from canal_mpi.errors import ProtocolError
from canal_mpi.topology import Tag

CHUNK = 1 << 26


class MpiPort:
    """Sends and receives messages of one channel; a receive for the next one is always posted."""

    def __init__(self, comm: MPI.Intracomm, peer: int, tags: tuple[int, int, int], size: int):
        self.comm, self.peer, self._size = comm, peer, size
        self._in, self._out, self._bulk = tags
        self._buffer = bytearray(size)
        self._head: wire.Head | None = None
        self._parts: list[MPI.Request] = []
        self._large = bytearray()
        self._leaving: list[tuple[MPI.Request, wire.Bytes]] = []
        self._status = MPI.Status()
        self._coming = self._expect()

    @classmethod
    def of_agent(cls, comm: MPI.Intracomm, server: int, channel: int, size: int) -> "MpiPort":
        """The agent's end."""
        return cls(
            comm,
            server,
            (Tag.ENV_ANSWER + channel, Tag.ENV_REQUEST + channel, Tag.ENV_BULK + channel),
            size,
        )

    @classmethod
    def of_server(cls, comm: MPI.Intracomm, agent: int, channel: int, size: int) -> "MpiPort":
        """The server's end."""
        return cls(
            comm,
            agent,
            (Tag.ENV_REQUEST + channel, Tag.ENV_ANSWER + channel, Tag.ENV_BULK + channel),
            size,
        )

    def _expect(self) -> MPI.Request:
        return self.comm.Irecv([self._buffer, MPI.BYTE], self.peer, self._in)

    def post(self, data: wire.Bytes, most: int) -> None:
        """Start sending a message; the other end has room for `most` bytes, more goes in parts."""
        self._leaving = [part for part in self._leaving if not part[0].Test()]
        if len(data) <= most:
            self._send(data, self._out)
            return
        view = memoryview(data)
        self._send(view[: wire.HEAD.size], self._out)
        for start in range(wire.HEAD.size, len(view), CHUNK):
            self._send(view[start : start + CHUNK], self._bulk)

    def _send(self, data: wire.Bytes, tag: int) -> None:
        self._leaving.append((self.comm.Isend([data, MPI.BYTE], self.peer, tag), data))

    def poll(self) -> wire.Bytes | None:
        """The next message if it is here; ProtocolError where it breaks its promise."""
        try:
            if self._head is not None:
                return self._large_message()
            if not self._coming.Test(self._status):
                return None
        except MPI.Exception as error:  # with fault tolerance a dead peer is told like this
            raise wire.PeerGone(str(error)) from error
        count = self._status.Get_count(MPI.BYTE)
        data = bytes(memoryview(self._buffer)[:count])
        self._coming = self._expect()
        head = wire.read_head(data)
        if head.size == count - wire.HEAD.size:
            return data
        if count != wire.HEAD.size or count + head.size <= self._size:
            raise ProtocolError(f"a message announces {head.size} bytes and has {count}")
        self._head = head
        self._large = bytearray(data) + bytearray(head.size)
        view = memoryview(self._large)
        for start in range(count, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._parts.append(self.comm.Irecv([part, MPI.BYTE], self.peer, self._bulk))
        return None

    def _large_message(self) -> wire.Bytes | None:
        if not MPI.Request.Testall(self._parts):
            return None
        self._parts, self._head, whole = [], None, self._large
        return whole

    def close(self) -> None:
        """Take back the receive that is posted: nothing more will come."""
        self._coming.Cancel()
        self._coming.Wait()
