"""The driver dies by kill -9, and another process goes on."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from killed_driver import SCHEMA, run
from streams import Files, contents

import statekit.spark as sks

HERE = Path(__file__).resolve().parent
BATCHES = [["a", "b", "a"], ["b", "c"], ["a"], ["c", "c", "d"]]


def fill(place: Path) -> tuple[dict[str, str], Counter[str]]:
    """The source; what the sink should have for each batch, and the state at the end."""
    source = Files(place / "in", SCHEMA)
    total: Counter[str] = Counter()
    expected = {}
    for at, users in enumerate(BATCHES):
        source.add(user=users)
        total.update(users)
        expected[f"batch-{at}"] = "\n".join(sorted(f"{user} {total[user]}" for user in set(users)))
    return expected, total


def kill_driver(place: Path, point: str, master: str) -> None:
    """Runs a driver until it kills itself at the second visit of a fail point."""
    done = subprocess.run(
        [sys.executable, HERE / "killed_driver.py", place, master],
        env=os.environ | {"STATEKIT_FAILPOINTS": f"{point}=kill@2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def check(spark: Any, place: Path, point: str, master: str = "local[2]") -> None:
    expected, total = fill(place)
    kill_driver(place, point, master)
    calls = (place / "calls").read_text().split()
    assert calls == (["0", "1"] if point == "spark.sunk" else ["0"])
    run(spark, place, 3)
    calls = (place / "calls").read_text().split()
    assert calls == ["0", "1", *(["1"] if point == "spark.sunk" else []), "2", "3"]
    assert {path.name: path.read_text() for path in place.glob("batch-*")} == expected
    assert contents(place / "state", "count", int) == total
    rows = [f"{row.user} {row.n}" for row in sks.read_output(place / "out").collect()]
    assert sorted(rows) == sorted("\n".join(expected.values()).split("\n"))


# Before the manifest; after it; after the sink, and before Spark has recorded it.
@pytest.mark.parametrize("point", ["spark.computed", "parts.published", "spark.sunk"])
def test_a_driver_that_is_killed_is_replaced_and_each_batch_counts_once(
    spark: Any, tmp_path: Path, point: str
) -> None:
    check(spark, tmp_path, point)


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["spark.base", "parts.publish", "spark.published", "spark.sink"])
def test_a_driver_that_is_killed_elsewhere(spark: Any, tmp_path: Path, point: str) -> None:
    check(spark, tmp_path, point)


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["spark.computed", "parts.published", "spark.sunk"])
def test_a_driver_of_executors_of_their_own_is_killed(
    spark: Any, tmp_path: Path, point: str
) -> None:
    check(spark, tmp_path, point, "local-cluster[2,1,1024]")
