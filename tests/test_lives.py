"""Random lives of providers, across features, against a plain model: tests/lives says how.

There are two short runs, one from a fixed seed and one from a random seed. With STATEKIT_NIGHTLY=1
they are longer, and `make test-all` goes on for hours. Each is a program of its own, because it
forks, which a process with threads must not do.
"""

import os
import random
import re
import subprocess
import sys
from itertools import takewhile
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
    """The chosen steps are the same; what threads do meanwhile may differ.

    Up to the first hand-over or kill: what has come then depends on threads.
    """
    first, again = (play("--seed", "26", "--lives", "1", "--trace") for _ in range(2))

    def chosen(told: str) -> list[str]:
        # Names of temporary directories and ports of servers differ.
        lines = [line for line in told.splitlines() if line[:4].strip().isdigit()]
        lines = [
            *takewhile(lambda line: not re.search("killed|fetches|migrates|ahead", line), lines)
        ]
        return [line[:6] + line[6:].split("lives-")[0].split("redis:")[0] for line in lines]

    assert len(chosen(first)) > 20
    assert chosen(first) == chosen(again)


# ---- The order of locks, which lives watch

LOCKS = """
import sys, threading
from tests.lives import lock_order
lock_order.watch()
scope = {"__name__": "statekit.example", "threading": threading}
exec("first = threading.Lock()\\nsecond = threading.Condition()\\nthird = threading.RLock()", scope)
first, second, third = scope["first"], scope["second"], scope["third"]
assert type(threading.Event()._cond._lock) is not type(first), "locks of others are not watched"
def work():
    exec(sys.argv[1], scope)
thread = threading.Thread(target=work)
thread.start()
thread.join()
exec(sys.argv[2], scope)
print(len(lock_order.circles(lock_order.edges())))
"""


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("with first, second: pass", "with first, second: pass", 0),
        ("with first, second: pass", "with second, first: pass", 1),
        ("with first, second, third: pass", "with third, first: pass", 2),
        ("with third, third, first: pass", "with third, first: pass", 0),
        ("with first, second: pass", "with second: first.acquire(blocking=False)", 0),
        ("with first, second: second.wait(0)", "with first: pass", 0),
        ("with second, third: second.wait(0)", "with second: pass", 1),
    ],
)
def test_locks_that_are_taken_in_a_circle_are_found(one: str, other: str, found: int) -> None:
    """Nothing hangs here: each thread is done before the other begins. The order is enough."""
    done = subprocess.run(
        [sys.executable, "-c", LOCKS, one, other], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"{found}\n", done.stderr
