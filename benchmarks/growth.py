"""What an exchange costs as the number of agents grows: bytes and seconds for each topology.

    python benchmarks/growth.py --sizes 4,8,16,32,64 --topologies ring,hypercube,random:3,full

Every run is the smoke job, on this one machine.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import h5py
import numpy as np

JOB = ["--job", "smoke", "--set", "share.pack=always"]
JOB += ["--set", "share.donors=1", "--frames", "100", "--set", "evaluation.episodes=0", "-q"]


def measure(topology: str, size: int, folder: Path) -> dict[str, float]:
    """One run: what each agent sent and received, and its time in exchange."""
    out = folder / f"{topology.replace(':', '-')}-{size}"
    command = ["mpirun", "-np", str(size), "canal-mpi", "train", *JOB, "--topology", topology]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{topology} on {size} agents: exit {done.returncode}\n{done.stderr}")
    with h5py.File(out / "run.h5") as file:
        ledger = {name: column[()] for name, column in file["exchange"].items()}
        exchange = file["tasks/exchange_seconds"][()]
        rounds = int(file["tasks/round"][()].max())
    kinds = ledger["kind"]
    offers, taken = (kinds == b"offer"), (kinds == b"transfer")
    return {
        "offers": offers.sum() / size / rounds,
        "lessons": taken.sum() / size / rounds,
        "bytes": ledger["bytes"][taken].sum() / size / rounds,
        "seconds": float(np.median(exchange)),
    }


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default="4,8,16,32,64")
    parser.add_argument("--topologies", default="ring,hypercube,random:3,full")
    args = parser.parse_args()
    print("| topology | agents | offers sent | lessons taken | bytes | seconds |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for topology in args.topologies.split(","):
            for size in map(int, args.sizes.split(",")):
                found = measure(topology, size, Path(folder))
                print(
                    f"| {topology} | {size} | {found['offers']:.2f} | {found['lessons']:.2f} "
                    f"| {found['bytes']:.0f} | {found['seconds']:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
