"""The emulator alone, without anything of ours around it: the floor of an environment."""

from collections.abc import Callable

import numpy as np

from canal_mpi.tasks.atari import Emulator


def raw_player(task: str, frame_skip: int) -> Callable[[], None]:
    """Plays one step at random: `act` for every frame, a reset where the game is over."""
    emulator = Emulator.of(task)
    ale = emulator.ale
    moves = [int(action.value) for action in ale.getLegalActionSet()]
    drawn = np.random.default_rng(1).integers(len(moves), size=4096).tolist()
    place = 0

    def play() -> None:
        nonlocal place
        place = (place + 1) % len(drawn)
        action = moves[drawn[place]]
        for _ in range(frame_skip):
            ale.act(action)
        if ale.game_over():
            emulator.restart()

    return play
