"""Training speed of this checkout against another one, with the same work: `ours-same` of each.

benchmarks/.venv/bin/python benchmarks/against.py OTHER [--games RoadRunner,Krull] [--repeats 9]

OTHER is a worktree of another commit (`git worktree add ../old ac384a6` for version 0.1). Both take
turns in one run and are timed in seconds of CPU.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent.parent
WARM, STEPS = 400, 300


def start(tree: Path, game: str) -> subprocess.Popen[str]:
    """The training loop of a checkout, which does steps when it is told to."""
    return subprocess.Popen(
        [sys.executable, str(tree / "benchmarks" / "contender.py"), "ours-same", game],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        text=True,
    )


def run(process: subprocess.Popen[str], steps: int) -> float:
    """CPU seconds per step."""
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline().split()[0]) / steps


def main() -> None:
    """One line per game."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--games", default="RoadRunner,Krull")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    trees = [options.other.resolve(), HERE]
    for game in options.games.split(","):
        processes = [start(tree, game) for tree in trees]
        times: list[list[float]] = [[], []]
        for process in processes:
            run(process, WARM)
        for turn in range(options.repeats):
            for k in (0, 1) if turn % 2 else (1, 0):
                times[k].append(run(processes[k], STEPS))
        for process in processes:
            process.kill()
            process.wait()
        speed = median(old / new for old, new in zip(*times, strict=True))
        old, new = (1e3 * median(found) for found in times)
        print(f"{game}: {speed:.2f} of the speed of {trees[0].name} ({new:.2f}, {old:.2f} ms)")


if __name__ == "__main__":
    main()
