"""Figures of batches, and what is said where something does not arrive."""

import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from streams import Files, Job, count, run_all

import statekit.spark as sks
from statekit.errors import StatefulOpError
from statekit.format.manifest import PACK_HEADER
from statekit.spark.shipping import pack, unpack


def test_the_figures_of_a_batch_are_told_and_stored(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[sks.Progress] = []
    metrics = sks.BatchMetrics(op="orders")

    def tell(progress: sks.Progress) -> None:
        told.append(progress)
        metrics(progress)

    for batch, users in enumerate(("aab", "abcd")):
        job.plan(batch)
        job.run(batch, users, tasks=2 + batch, on_progress=tell)
    job.run(1, "abcd", on_progress=tell)  # a restart
    first, second, again = told
    assert (first.batch_id, first.version, first.parallelism, first.rows, first.keys) == (
        0, 1, 2, 3, 2,
    )  # fmt: skip
    assert (second.rows, second.keys, second.output_rows, second.parallelism) == (4, 4, 4, 3)
    assert first.bytes_read == 0
    packs = sum(path.stat().st_size for path in job.state.glob("*.pack"))
    assert 0 < second.bytes_read <= packs + 3 * PACK_HEADER  # each task reads the header again
    assert 0 < first.bytes_written + second.bytes_written <= packs
    assert not first.is_replay
    assert again.is_replay
    assert (again.batch_id, again.version, again.rows) == (1, 2, 4)
    for one in (first, second):
        assert {"plan", "compute", "publish", "output", "sink", "total"} <= one.seconds.keys()
        assert {"tasks_restore", "tasks_process", "tasks_write"} <= one.seconds.keys()
        assert one.seconds["total"] >= one.seconds["compute"] > 0
    assert "compute" not in again.seconds
    assert "total" in second.as_dict()["seconds"]
    for batch, one in enumerate((first, second)):
        stored = sks.read_progress(job.state, batch)
        assert stored is not None
        assert stored.as_dict() | {"seconds": None} == one.as_dict() | {"seconds": None}
        assert stored.seconds["compute"] == pytest.approx(one.seconds["compute"], abs=1e-5)
    assert sks.read_progress(job.state, 2) is None

    registry = CollectorRegistry()
    registry.register(metrics.collector)
    labels = {"op": "orders"}

    def sample(name: str, **more: str) -> Any:
        return registry.get_sample_value(f"statekit_spark_{name}", labels | more)

    assert sample("batches_total") == 2
    assert sample("replays_total") == 1
    assert sample("rows_total") == 7
    assert sample("keys_total") == 6
    assert sample("parallelism") == 3
    assert sample("bytes_read_total") == second.bytes_read
    total = sum(one.seconds["total"] for one in told)
    assert sample("seconds_total", phase="total") == pytest.approx(total)

    def broken(progress: sks.Progress) -> None:
        raise ZeroDivisionError("of mine")

    job.plan(2)
    with caplog.at_level(logging.WARNING, "statekit"):
        job.run(2, "a", on_progress=broken)  # the batch is done nevertheless
    assert "on_progress failed for batch 2" in caplog.text
    assert job.counts["a"] == 4


def test_a_listener_of_spark_is_told_with_sparks_own_figures(spark: Any, tmp_path: Path) -> None:
    source = Files(tmp_path / "in", "user string")
    op = sks.StatefulOp(
        count,
        key="user",
        output="user string, n long",
        state={"count": int},
        path=tmp_path / "state",
        key_groups=16,
    )
    told: list[tuple[sks.Progress, int]] = []
    both = threading.Event()

    def tell(progress: sks.Progress, event: Any) -> None:
        told.append((progress, event.progress.numInputRows))
        if len(told) == 2:
            both.set()

    listener = sks.listener(tmp_path / "state", tell)
    spark.streams.addListener(listener)
    try:
        source.add(user=["a", "a"])
        source.add(user=["b", "a", "c"])
        function = op.foreach_batch(checkpoint=tmp_path / "cp", parallelism=2)
        run_all(source.stream(spark), function, tmp_path / "cp")
        assert both.wait(300)  # Spark tells listeners in its own time
    finally:
        spark.streams.removeListener(listener)
    assert [(one.batch_id, one.rows, one.keys, rows) for one, rows in told] == [
        (0, 2, 1, 2),
        (1, 3, 3, 3),
    ]


# ---- What is said where something does not arrive


def test_a_path_that_the_driver_sees_otherwise_than_the_executors_is_explained(
    spark: Any, tmp_path: Path
) -> None:
    """The tasks' files are not where the driver looks, as on a disk of each host's own."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class OnAnotherDisk:
        def on_key(self, key: str, rows: Any, st: Any) -> Any:
            yield key, st.count.add(1)

        def close(self) -> None:  # it is called when the part was written
            for path in (tmp_path / "state").iterdir():
                if path.suffix in (".pack", ".part"):
                    path.rename(elsewhere / path.name)

    job = Job(spark, tmp_path, function=OnAnotherDisk())
    job.plan(0)
    with pytest.raises(StatefulOpError, match=r"written on .* as the driver sees it.*must be on"):
        job.run(0, "a", tasks=1)


def test_a_base_that_an_executor_does_not_see_is_explained(spark: Any, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()

    class WithoutTheDisk:
        """Not yet mounted there: the state cannot be read."""

        def open(self) -> None:
            for path in (tmp_path / "state").glob("*.pack"):
                path.rename(hidden / path.name)

        def on_key(self, key: str, rows: Any, st: Any) -> Any:
            yield key, st.count.add(1)

    job = Job(spark, tmp_path)
    job.plan(0)
    job.run(0, "a", tasks=1)
    job.plan(1)
    other = Job(spark, tmp_path / "unused", function=WithoutTheDisk())
    job.op.functions = other.op.functions
    with pytest.raises(Exception, match="must be on storage that the driver and all executors"):
        job.run(1, "a", tasks=1)


def run_elsewhere(code: str, function: Any) -> str:
    """Calls what pack() gave in a process of its own, after some code; its error."""
    from pyspark import cloudpickle

    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import pickle, sys\n{code}\npickle.loads(bytes.fromhex(sys.stdin.read()))()",
        ],
        input=cloudpickle.dumps(function).hex(),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.returncode != 0
    return done.stderr


def test_statekit_that_is_missing_on_an_executor_is_explained() -> None:
    error = run_elsewhere("sys.modules['statekit'] = None", pack("something"))
    assert "statekit cannot be imported on " in error
    assert "install it for " in error
    assert "pip install statekit[spark]==0.1.0" in error


def test_another_statekit_on_an_executor_is_explained() -> None:
    error = run_elsewhere("import statekit; statekit.__version__ = '0.0.1'", pack("something"))
    assert "statekit 0.0.1 is installed on " in error
    assert "the driver has 0.1.0" in error


def test_a_module_that_an_executor_lacks_is_explained() -> None:
    data = pickle.dumps(sks.Progress)
    broken = data.replace(b"statekit.spark.progress", b"statekit.spark.progresx")
    with pytest.raises(ImportError) as caught:
        unpack(broken)
    assert "Send it with spark.addArtifacts" in caught.value.__notes__[0]


def test_a_function_that_cannot_be_pickled_is_explained_at_once() -> None:
    lock = threading.Lock()
    with pytest.raises(StatefulOpError, match=r"cannot be sent to the executors.*open\(\)"):
        pack(lambda: lock)
