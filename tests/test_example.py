"""The examples of docs/reading.md, run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, environment, run
from madeup import write_run

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reading.md").read_text(), re.S)


def execute(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment("openmpi"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_h5py_pandas_and_xarray_read_a_run_without_our_code(tmp_path: Path) -> None:
    for library in ("pandas", "xarray", "matplotlib"):
        pytest.importorskip(library, reason=f"{library} is not installed (extra: look)")
    write_run(tmp_path / "runs" / "a")
    out = execute(BLOCKS[0], tmp_path)
    assert "305.0" in out
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_a_real_run_is_loaded_and_its_policy_acts(tmp_path: Path) -> None:
    program = ["canal-mpi", "train", "--job", "smoke", "-q", "--out", str(tmp_path / "runs" / "a")]
    assert run(program, timeout=300).code == 0
    out = execute(f"import numpy as np\n{BLOCKS[1]}", tmp_path)
    assert out.splitlines()[0].startswith("finished [0] ['CartPole-v1'")
    assert int(out.splitlines()[-1]) in (0, 1, 2)
