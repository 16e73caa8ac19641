"""Figures of a benchmark: medians with their spread, for people and as JSON."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

from canal_mpi import __version__


@dataclass(frozen=True)
class Figure:
    """The median of several measurements and the middle half of them."""

    median: float
    low: float
    high: float
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> "Figure":
        """Of measurements."""
        low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return cls(median(values), low, high, unit)

    def __str__(self) -> str:
        """For people."""
        return f"{self.median:9.4g} {self.unit:<22} ({self.low:.4g} – {self.high:.4g})"


def figure_of_ratios(above: Sequence[float], below: Sequence[float], unit: str) -> Figure:
    """Of the ratios of what was measured side by side."""
    return Figure.of([a / b for a, b in zip(above, below, strict=True)], unit)


def machine() -> dict[str, str]:
    """Where it was measured, and with what."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    libraries = {name: version(name) for name in ("torch", "numpy", "ale-py", "h5py", "mpi4py")}
    cores = len(os.sched_getaffinity(0))
    about = {"cpu": model, "cores": str(cores), "load": f"{os.getloadavg()[0]:.1f}"}
    about |= {"python": platform.python_version(), "canal-mpi": __version__}
    return about | libraries


def report(title: str, figures: Mapping[str, Figure], as_json: bool) -> str:
    """All figures, as lines or as one JSON object."""
    about = machine()
    if as_json:
        found = {name: vars(figure) for name, figure in figures.items()}
        return json.dumps({"title": title, "machine": about, "figures": found}, indent=1)
    width = max(map(len, figures))
    lines = [f"  {name:<{width}} {figure}" for name, figure in figures.items()]
    words = ", ".join(f"{name} {value}" for name, value in about.items())
    return "\n".join([title, *lines, f"  median (middle half of the measurements); {words}"])
