"""Output: each row once, whatever happened, or an error; never silence."""

import random
import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from streams import Job, Query, run_all

import statekit as sk
import statekit.spark as sks
from statekit import failpoints
from statekit.errors import DamagedError, StatefulOpError
from statekit.offline.regroup import regroup
from statekit.spark.output import collect_output, log_output, read_listed, write_output
from statekit.storage import open_storage


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


def test_equal_rows_of_two_tasks_are_two_rows(spark: Any, tmp_path: Path) -> None:
    """Their files have the same contents, and so the same name."""
    job = Job(spark, tmp_path, function=lambda *_: [("x", 1)], output_path=tmp_path / "out")
    job.plan(0)
    job.run(0, "abcdefgh", tasks=8)
    files = sk.checkpoints(job.state)[-1].metadata["spark"]["files"]
    assert len(files) > len({*files})
    assert job.sink.calls == [(0, [("x", 1)] * 8)]
    assert sks.read_output(tmp_path / "out").count() == 8


def test_damaged_output_is_an_error_or_what_it_was(spark: Any, tmp_path: Path) -> None:
    """Also where Spark is told to pass over files that it cannot read."""
    job = Job(spark, tmp_path, function=lambda key, rows, st: ((key, n * n) for n in range(300)))
    job.plan(0)
    job.run(0, "abc", tasks=1)
    (file,) = job.state.glob("*.attachment")
    whole, seed = file.read_bytes(), 1
    dice, refused = random.Random(seed), 0
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        for case in range(12):
            data = bytearray(whole)
            # The pages; what is behind them says where they are.
            data[dice.randrange(4, len(data) * 3 // 4)] ^= 1 << dice.randrange(8)
            file.write_bytes(data if case else data[: len(data) // 2])
            try:
                job.run(0, "abc", tasks=1)
            except Exception:
                refused += 1
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
    assert refused > 6
    assert job.sink.batches.keys() == {0}  # and each time the same rows


def test_damaged_output_of_a_far_storage_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"n": range(100)})
    written = write_output(table, str(tmp_path / "state"), str(tmp_path / "out"), 1, "00000")
    assert written is not None
    listed = pa.record_batch({"url": [str(tmp_path / "out")], "file": [written.file]})
    assert pa.Table.from_batches(read_listed(iter([listed]))) == table
    file = tmp_path / "out" / written.file
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="does not have the contents that its name says"):
        list(read_listed(iter([listed])))


def test_what_dead_attempts_have_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)

    def write(number: int, rows: list[int]) -> str:
        written = write_output(pa.table({"n": rows}), "", str(tmp_path), number, "00000")
        assert written is not None
        return written.file

    kept = set()
    for number in range(1, 9):
        files = [write(number, [number]), write(number, [7])]
        write(number, [number, number])  # of an attempt that failed
        if number < 7:  # 7 and 8 may still be published
            log_output(storage, number, files)
            kept |= {*files}
    (tmp_path / "000000000003-notes.parquet.txt").write_text("of somebody else")
    before = {path.name for path in tmp_path.iterdir()}
    collect_output(storage, 7, 5)
    gone = before - {path.name for path in tmp_path.iterdir()}
    assert [int(name[:12]) for name in sorted(gone)] == [2, 3, 4, 5, 6]
    assert not gone & kept


def test_a_directory_has_the_output_of_one_state(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, output_path=tmp_path / "out")
    for batch in range(2):
        job.plan(batch)
        job.run(batch, "a")
    shutil.copytree(job.state, tmp_path / "copy")
    job.plan(2)
    job.run(2, "a")
    expected = [("a", 1), ("a", 2), ("a", 3)]

    def check() -> None:
        assert sorted(map(tuple, sks.read_output(tmp_path / "out").collect())) == expected

    shutil.rmtree(job.state)
    shutil.copytree(tmp_path / "copy", job.state)
    job.plan(2, stamp=1)
    with pytest.raises(StatefulOpError, match=r"output of version 3 .*, and version 3 is to be"):
        job.run(2, "b")  # the state was brought back from a copy
    check()
    shutil.rmtree(job.state)
    job.query = Query(tmp_path / "cp2")
    job.plan(0)
    with pytest.raises(StatefulOpError, match=r"output of version 3 .*, and version 1 is to be"):
        job.run(0, "b")  # or begins anew
    assert not sk.checkpoints(job.state)
    job.op.output_path = str(tmp_path / "out2")
    job.run(0, "b")
    check()
    (row,) = sks.read_output(tmp_path / "out2").collect()
    assert tuple(row) == ("b", 1)


def test_columns_of_kept_output_cannot_change_but_of_what_came_to_nothing(
    spark: Any, tmp_path: Path
) -> None:
    def other_op(function: Any) -> sks.StatefulOp:
        return sks.StatefulOp(
            function,
            key="user",
            output="user string, n long, more string",
            state={"count": int},
            path=tmp_path / "state",
            output_path=tmp_path / "out",
            key_groups=16,
        )

    def broken(*_: Any) -> Any:
        raise StatefulOpError("broken")

    job = Job(spark, tmp_path, output_path=tmp_path / "out")
    counting, job.op = job.op, other_op(broken)
    job.plan(0)
    with pytest.raises(StatefulOpError, match="broken"):
        job.run(0, "a")
    job.op = counting
    job.run(0, "a")
    job.op = other_op(lambda key, rows, st: [(key, 1, "more")])
    job.plan(1)
    with pytest.raises(StatefulOpError, match=r"of the columns .*n:bigint>.* out .*more:string>"):
        job.run(1, "a")
    assert [*map(tuple, sks.read_output(tmp_path / "out").collect())] == [("a", 1)]


def test_output_whose_driver_died_is_there_when_another_query_goes_on(
    spark: Any, tmp_path: Path
) -> None:
    job = Job(spark, tmp_path, output_path=tmp_path / "out")
    job.plan(0)
    failpoints.configure("spark.published=error")
    with pytest.raises(OSError, match=r"spark\.published"):
        job.run(0, "aa")
    failpoints.configure(None)
    old, job.query = job.query.id, Query(tmp_path / "cp2")
    job.plan(0)
    job.run(0, "a", continue_from=old)
    assert sorted(map(tuple, sks.read_output(tmp_path / "out").collect())) == [("a", 2), ("a", 3)]


def test_output_is_not_doubled_by_a_regroup_before_a_replay(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, output_path=tmp_path / "out")
    job.plan(0)
    failpoints.configure("spark.sunk=error")
    with pytest.raises(OSError, match=r"spark\.sunk"):
        job.run(0, "aa")
    failpoints.configure(None)
    regroup(sk.checkpoints(job.state)[-1], 32)
    job.op.key_groups = 32
    job.run(0, "aa")
    job.plan(1)
    job.run(1, "a")
    assert sorted(map(tuple, sks.read_output(tmp_path / "out").collect())) == [("a", 2), ("a", 3)]
    assert job.sink.batches == {0: [("a", 2)], 1: [("a", 3)]}
