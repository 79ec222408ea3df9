"""Versions of a state: which are kept, what they say, what their output is, and the first ones."""

import json
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from streams import Job, run_all

import statekit as sk
import statekit.spark as sks
from statekit import failpoints
from statekit.errors import StatefulOpError

# ---- What is kept


def test_old_versions_are_removed_and_the_rest_stays_readable(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, keep=3)
    for batch in range(10):
        job.plan(batch)
        job.run(batch, "ab", tasks=1 + batch % 3)
    assert [one.number for one in sk.checkpoints(job.state)] == [8, 9, 10]
    assert [*job.state.glob("000000000001-*")] == []
    job.run(9, "ab")
    assert job.sink.calls[-1] == (9, [("a", 10), ("b", 10)])
    job.plan(10)
    job.run(10, "a")
    assert job.counts == {"a": 11, "b": 10}


def test_output_is_read_exactly_once_as_a_table_and_as_a_stream(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, output_path=tmp_path / "out", keep=2)
    with pytest.raises(sk.StateKitError, match="no output in"):
        sks.read_output(tmp_path / "out")
    for batch, users in enumerate(["ab", "", "aac"]):
        job.plan(batch)
        if batch == 2:
            failpoints.configure("spark.computed=error")
            with pytest.raises(OSError, match=r"spark\.computed"):
                job.run(batch, "aazz")  # its files lie in the directory, and do not count
            failpoints.configure("spark.published=error")
            with pytest.raises(OSError, match=r"spark\.published"):
                job.run(batch, users)
            failpoints.configure(None)
        job.run(batch, users)
        job.run(batch, users)
    expected = [("a", 1), ("a", 3), ("b", 1), ("c", 1)]
    assert sorted(map(tuple, sks.read_output(tmp_path / "out").collect())) == expected
    assert job.sink.calls[-1] == (2, [("a", 3), ("c", 1)])
    found: list[Any] = []
    stream = sks.read_output(tmp_path / "out", stream=True)
    for _ in range(2):
        run_all(stream, lambda df, _: found.extend(map(tuple, df.collect())), tmp_path / "reader")
    assert sorted(found) == expected
    assert len([*(tmp_path / "out").glob("*.parquet")]) > len(expected) - 2


def test_times_are_put_out_as_they_came_in(spark: Any, tmp_path: Path) -> None:
    start = datetime(2026, 3, 29, 0, 59, 59, 123456, tzinfo=UTC)
    rows = [("a", start + timedelta(hours=at), date(2026, 1, at + 1)) for at in range(3)]
    op = sks.StatefulOp(
        lambda key, rows, st: [(key, row.at, row.day) for row in rows],
        key="user",
        output="user string, at timestamp, day date",
        state={"count": int},
        path=tmp_path / "state",
        output_path=tmp_path / "out",
    )
    frame = spark.createDataFrame(rows, "user string, at timestamp, day date")
    expected = sorted((int(at.timestamp() * 1e6), day) for _, at, day in rows)
    found: list[Any] = []

    def plain(df: Any) -> list[Any]:
        return [tuple(row) for row in df.selectExpr("unix_micros(at)", "day").collect()]

    assert sorted(plain(op.backfill(frame, "all", parallelism=2))) == expected
    assert sorted(plain(sks.read_output(tmp_path / "out"))) == expected
    stream = sks.read_output(tmp_path / "out", stream=True)
    run_all(stream, lambda df, _: found.extend(plain(df)), tmp_path / "reader")
    assert sorted(found) == expected


def test_a_version_is_replayed_from_where_its_output_was(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)
    job.plan(0)
    job.run(0, "ab")
    job.op.output_path = str(tmp_path / "out")  # the program was changed, and restarted
    job.run(0, "ab")
    job.plan(1)
    job.run(1, "a")
    assert job.sink.calls[1:] == [(0, [("a", 1), ("b", 1)]), (1, [("a", 2)])]
    assert [*map(tuple, sks.read_output(tmp_path / "out").collect())] == [("a", 2)]


# ---- The beginning


def test_a_query_goes_on_from_a_backfill_which_is_done_once(job: Job) -> None:
    history = job.frame("aaabz")
    found = job.op.backfill(history, "history", parallelism=3)
    assert sorted(map(tuple, found.collect())) == [("a", 3), ("b", 1), ("z", 1)]
    job.op.backfill(history, "history", parallelism=2)
    job.op.backfill(job.frame("z"), "more")
    job.plan(0)
    job.run(0, "ab")
    assert job.counts == Counter("aaabzzab")
    with pytest.raises(StatefulOpError, match="A backfill comes before the first batch"):
        job.op.backfill(history, "late")


def test_a_query_goes_on_from_any_checkpoint(job: Job) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=1)
    kv.value("count", int).update({"a": 10, "q": 1})
    kv.checkpoint(job.state)
    kv.close()
    job.plan(0)
    job.run(0, "ab")
    assert job.counts == {"a": 11, "b": 1, "q": 1}


def test_the_metadata_of_a_version_say_which_batch_it_is(job: Job) -> None:
    job.plan(0)
    job.run(0, "ab")
    (version,) = sk.checkpoints(job.state)
    note = json.loads(json.dumps(version.metadata))["spark"]
    assert (note["query"], note["batch"], note["rows"]) == (job.query.id, 0, 2)


def test_a_function_of_ones_own_may_ask_for_the_output_as_often_as_it_likes(job: Job) -> None:
    job.plan(0)
    for _ in range(2):  # two actions, or two calls: the batch is applied once
        output = job.op.process(job.frame("aab"), 0, checkpoint=job.query.checkpoint, parallelism=2)
        assert sorted(map(tuple, output.collect())) == [("a", 2), ("b", 1)]
        assert output.count() == 2
    assert job.counts == Counter("aab")
