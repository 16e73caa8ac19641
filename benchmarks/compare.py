"""Steps a CPU-second of several ways to train a DQN on the RAM of an Atari game, side by side.

benchmarks/.venv/bin/python benchmarks/compare.py [--games RoadRunner,Krull,Alien] [--repeats 7]
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

KINDS = ("ours", "ours-same", "sb3", "cleanrl", "original")
WARM, SOCKET_STEPS = 400, 5


class Contender:
    """A process that does steps when it is told to."""

    def __init__(self, kind: str, game: str) -> None:
        script = str(Path(__file__).with_name("contender.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, kind, game],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of CPU and of wall time for so many steps."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        cpu, wall = self.process.stdout.readline().split()
        return float(cpu), float(wall)

    def end(self) -> None:
        """Stop it."""
        self.process.kill()
        self.process.wait()


def ratio(others: list[float], own: list[float]) -> float:
    """How much faster we are: the median over blocks that were measured one after the other."""
    return median(a / b for a, b in zip(others, own, strict=True))


def measure(game: str, steps: int, repeats: int) -> None:
    """One line a contender; the ratios are medians over blocks measured one after the other."""
    crowd = {kind: Contender(kind, game) for kind in KINDS}
    for one in crowd.values():
        one.run(WARM)
    times = {kind: [] for kind in KINDS}
    walls = {kind: [] for kind in KINDS}
    for turn in range(repeats):
        for k in range(len(KINDS)):
            kind = KINDS[(k + turn) % len(KINDS)]
            cpu, wall = crowd[kind].run(steps)
            times[kind].append(cpu / steps)
            walls[kind].append(wall / steps)
    for one in crowd.values():
        one.end()
    for kind in KINDS:
        speeds = sorted(1 / t for t in times[kind])
        same, comes = (ratio(times[kind], times[own]) for own in ("ours-same", "ours"))
        print(
            f"{game:<11} {kind:<10} {median(speeds):7.0f} steps per CPU-second "
            f"({speeds[0]:.0f} – {speeds[-1]:.0f})   ours, same work {same:5.2f} ×"
            f"   ours as it comes {comes:5.2f} ×",
            flush=True,
        )
    remote = Contender("original-sockets", game)
    wall = remote.run(SOCKET_STEPS)[1] / SOCKET_STEPS
    remote.end()
    print(
        f"{game:<11} original over its sockets, with its sleeps: {1 / wall:.2f} steps/s of wall "
        f"time, ours {wall / median(walls['ours']):.0f} ×",
        flush=True,
    )


def main() -> None:
    """Measure every game."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", default="RoadRunner,Krull,Alien")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for game in options.games.split(","):
        measure(game, options.steps, options.repeats)


if __name__ == "__main__":
    main()
