"""Who hears whom: graphs as pure functions, and the exchange of offers and lessons over them."""

from enum import IntEnum


class Tag(IntEnum):
    """Every MPI tag of the program; here, because rank 0 alone needs no MPI library."""

    MESSAGE = 11  # offers, requests, lessons and rows between agents
    HEARTBEAT = 21
    CONTROL = 31  # what rank 0 gathers and broadcasts
    ROWS = 32  # of the results
    END = 33
    FILE = 34  # a checkpoint that another host holds
    STOP = 35
    HISTORY = 36  # rows of earlier rounds, after a death
    ENV_REQUEST = 100  # these two plus the number of the channel
    ENV_ANSWER = 300
