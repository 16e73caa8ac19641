"""What can go wrong, and the exit code each kind of trouble has."""


class CanalError(Exception):
    """Trouble with a message for the user; ends the program with `code`."""

    code = 70


class UsageError(CanalError):
    """Something the user asked for can't be done as asked."""

    code = 2


class DamagedData(CanalError):
    """A file or message fails its checks."""

    code = 65


class NotRepeatable(CanalError):
    """An environment can't be brought back to where it was; its episode has to start anew."""


class RankFailed(CanalError):
    """A rank can't go on: its environment or its learner broke."""

    code = 70


class DirectoryInUse(CanalError):
    """Another run writes to this run directory."""

    code = 73


class StorageError(CanalError):
    """Reading or writing a file failed."""

    code = 74


class Stopped(CanalError):
    """The run ends early, in good order; it can be resumed."""

    code = 75


class ProtocolError(CanalError):
    """A peer sent something else than the protocol says, or nothing at all."""

    code = 76


class RanksDiffer(CanalError):
    """The ranks don't run the same code, job or MPI."""

    code = 78
