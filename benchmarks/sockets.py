"""The original's remote environment: pickles over a socket, an end token, and its sleeps.

Only here, to be measured: nothing of the package pickles.
"""

import pickle
import socket
import threading
from time import sleep

import work

TOKEN = b"<END>"
STEP, RESET = 0.8, 3.0  # seconds that the original sleeps


def send(link: socket.socket, value) -> None:
    """A pickle and the token."""
    link.sendall(pickle.dumps(value) + TOKEN)


def recv(link: socket.socket):
    """Read until the token comes."""
    data = b""
    while not data.endswith(TOKEN):
        data += link.recv(4096)
    return pickle.loads(data[: -len(TOKEN)])


def serve(game: str, listener: socket.socket) -> None:
    """Answer steps and resets."""
    link, env = listener.accept()[0], work.environment(game)
    while True:
        action = recv(link)
        send(link, env.reset() if action is None else env.step(action))


class Remote:
    """The client's side: looks like an environment."""

    def __init__(self, game: str) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve, args=(game, listener), daemon=True).start()
        self.link = socket.create_connection(listener.getsockname())

    def reset(self, seed=None):
        """A new episode."""
        send(self.link, None)
        sleep(RESET)
        return recv(self.link)

    def step(self, action: int):
        """One step."""
        send(self.link, action)
        sleep(STEP)
        return recv(self.link)
