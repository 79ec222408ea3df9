"""Random lives of providers, across features, against a plain model: tests/lives says how.

There are two short runs, one from a fixed seed and one from a random seed. With STATEKIT_NIGHTLY=1
they are longer, and `make test-all` goes on for hours. Each is a program of its own, because it
forks, which a process with threads must not do.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IS_NIGHTLY = os.environ.get("STATEKIT_NIGHTLY") == "1"
STEPS = 20_000 if IS_NIGHTLY else 400  # a few minutes, some seconds


def play(*arguments: str) -> str:
    """What a run prints: failures with their seeds and steps, and how to reproduce them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.lives", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout)
    if done.returncode:
        pytest.fail(done.stdout[-20_000:])
    return done.stdout


def test_lives_from_one_seed_are_as_the_model_says() -> None:
    play("--seed", "11", "--steps", str(STEPS))


def test_lives_from_any_seed_are_as_the_model_says() -> None:
    play("--seed", str(random.randrange(10**9)), "--steps", str(STEPS))


def test_a_life_takes_the_same_steps_every_time() -> None:
    """The chosen steps are the same; what threads do meanwhile may differ."""
    first, again = (play("--seed", "12", "--lives", "1", "--trace") for _ in range(2))

    def chosen(told: str) -> list[str]:
        # Names of temporary directories and ports of servers differ.
        lines = [line for line in told.splitlines() if line[:4].strip().isdigit()]
        return [line[:6] + line[6:].split("lives-")[0].split("redis:")[0] for line in lines]

    assert len(chosen(first)) > 50
    assert chosen(first) == chosen(again)
