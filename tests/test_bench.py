"""`canal-mpi bench`: it runs and prints its ratios."""

import re

import pytest
from launch import run

pytestmark = pytest.mark.mpi


def test_bench_env_compares_a_server_with_local_environments(mpi: str) -> None:
    command = ["canal-mpi", "bench", "env", "--task", "CartPole-v1", "--steps", "20"]
    result = run([*command, "--repeats", "3"], mpi)
    assert result.code == 0, result.err
    ratios = re.findall(r"(\d) environments? per agent: .* server/local (\d+\.\d\d)", result.out)
    assert [games for games, _ in ratios] == ["1", "4"]
    assert result.out.count("learning while the server plays") == 2


def test_bench_exchange_tells_of_every_topology(mpi: str) -> None:
    result = run(["canal-mpi", "bench", "exchange", "--ranks", "3"], mpi)
    assert result.code == 0, result.err
    rates = re.findall(r"(\w+), 1000 kB: taken in +([0-9.e+]+) MB/s", result.out)
    assert [name for name, _ in rates] == ["full", "ring", "star", "line"]
    assert all(float(rate) > 0 for _, rate in rates)
