"""Executors that are processes of their own: killed, idle. Each batch counts once.

(Spark runs a speculative copy only on another host, so test_task.py has copies of a task.)
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from streams import contents

import statekit as sk

HERE = Path(__file__).resolve().parent


def run(place: Path, what: str) -> list[list[list[Any]]]:
    done = subprocess.run(
        [sys.executable, HERE / "cluster_job.py", place, what],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[list[list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    assert [[row[:2] for row in batch] for batch in found] == [
        [["a", 1], ["b", 1]],
        [["a", 2], ["b", 2], ["c", 1]],
        [["a", 3], ["d", 1]],
    ]
    assert contents(place / "state", "count", int) == Counter("ababcad")
    assert [one.number for one in sk.checkpoints(place / "state")] == [1, 2, 3]
    return found


@pytest.mark.nightly
def test_an_executor_that_is_killed_changes_nothing_twice(tmp_path: Path) -> None:
    run(tmp_path, "executor")
    assert (tmp_path / "killed").exists()


@pytest.mark.nightly
def test_a_worker_that_was_idle_for_more_than_a_minute_is_replaced(tmp_path: Path) -> None:
    run(tmp_path, "idle")
