"""Asks a short program on another host, or here, for one line of JSON behind a sign."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from time import monotonic, time
from typing import Any

from canal_mpi.cluster.hydra import ask_again
from canal_mpi.cluster.launch import Launch
from canal_mpi.cluster.mistakes import Noise, Sieve
from canal_mpi.cluster.supervise import Process, begin, clean_up, scratch


@dataclass
class Answer:
    """What a program said behind its sign, when it was heard, or why nothing came."""

    facts: dict[str, Any] | None = None
    heard: float = 0.0
    trouble: str = ""


def hear(launch: Launch, sign: str, seconds: float) -> Answer:
    """Run a short program and wait for its one line of JSON."""
    answer, noise, rest = Answer(), Noise(), ""
    with scratch() as folder:
        process = begin(launch, folder, subprocess.PIPE, subprocess.STDOUT)
        end = monotonic() + seconds
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_read, process, sign, answer, Sieve(noise))
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                answer.trouble = f"no answer within {seconds:.0f} s: is it busy, or firewalled?"
            clean_up(folder)
            process.kill()
            rest = reading.result(max(end - monotonic(), 5.0))
    if answer.facts is None:
        ask_again(Path(launch.argv[0]), launch.hosts, noise)
        words = (rest.strip() or f"the check ended with {process.returncode}").splitlines()[-1]
        answer.trouble = noise.diagnosis().rstrip(".") or answer.trouble or words
    return answer


def _read(process: Process, sign: str, answer: Answer, sieve: Sieve) -> str:
    rest = ""
    assert process.stdout is not None
    for line in TextIOWrapper(process.stdout, "utf-8", "replace"):
        _, found, words = line.partition(sign)
        if found and answer.facts is None:
            answer.heard = time()
            answer.facts = _facts(words)
        else:
            rest += sieve.pass_on(line)
    return rest + sieve.end()


def _facts(words: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(words)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) else None
