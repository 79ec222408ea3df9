"""What a user may write, and how a job is found; messages of the coordinator; small parts."""

import socket
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import wordcount

from statekit.engine.checkpoints import JobCheckpoint, newest
from statekit.engine.control import Control
from statekit.engine.job import Job, KeyedOperator
from statekit.engine.loading import load_job
from statekit.engine.sink import FileSink, publish_all, read_results
from statekit.engine.strategies import RESTART, STRATEGIES, How
from statekit.errors import ArgumentError, EngineError


def read(task: int, tasks: int, start: int) -> Any:
    return iter(())


# ---- Jobs


def test_a_plan_shows_what_was_written_and_what_runs() -> None:
    shown = wordcount.job.plan()
    assert "(source | words) -> [count by word] -> (sink)" in shown
    assert "count        2 process(es): count-0, count-1  ==[all]==> sink" in shown
    assert "source-0, source-1  ==[128 key-groups]==> count" in shown


def test_a_plan_with_two_inputs_shows_both() -> None:
    shown = wordcount.joined.plan()
    assert (
        "{ (texts | words) ; (clicks | renamed) } -> [count by word or clicked] -> (sink)" in shown
    )
    assert "clicks-0, clicks-1  ==[128 key-groups]==> count" in shown


def new() -> Job:
    return Job("j").source(read)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Job("no name"), "is no name of a job or stage"),
        (lambda: Job("j").key_by("a"), "after source"),
        (lambda: Job("j").map(print), "after source"),
        (lambda: Job("j").sink("x"), "comes last"),
        (lambda: new().source(read), "has a source already"),
        (lambda: new().process(KeyedOperator), "needs a key"),
        (lambda: new().key_by(), "was given 0 columns"),
        (lambda: new().key_by("a", "b"), "was given 2 columns"),
        (lambda: new().key_by("a", key_groups=100), "power of two"),
        (lambda: new().key_by("a").key_by("b"), "once for each stage"),
        (lambda: new().key_by("a").process(7), "makes no KeyedOperator"),  # type: ignore[arg-type]
        (lambda: new().key_by("a", key_groups=4).process(KeyedOperator, parallelism=5), "5 tasks"),
        (lambda: new().key_by("a").process(KeyedOperator, parallelism=0), "pass 1 to 256"),
        (lambda: new().key_by("a").process(KeyedOperator, name="source"), "two stages named"),
        (lambda: new().sink("x").sink("y"), "comes last"),
        (lambda: new().sink("x").map(print), "comes after source"),
        (lambda: new().key_by("a").sink("x"), "comes last"),
        (lambda: new().key_by("a").source(read, name="b").process(KeyedOperator), "needs a key"),
        (
            lambda: new().key_by("a").source(read, name="b").key_by("c", key=int),
            "must have keys of one type",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_where_it_is_written(build: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        build()


def test_a_job_is_found_by_file_and_by_module(tmp_path: Path) -> None:
    assert load_job(f"{wordcount.__file__}").name == "wordcount"
    assert load_job("wordcount:job") is wordcount.job
    with pytest.raises(EngineError, match="there is no module 'no_such_jobs'"):
        load_job("no_such_jobs")
    with pytest.raises(EngineError, match="there is no file"):
        load_job(f"{tmp_path}/none.py")
    with pytest.raises(EngineError, match="has no Job named 'words'"):
        load_job("wordcount:words")
    (tmp_path / "half.py").write_text(
        "from statekit.engine.job import Job\njob = Job('half').source(lambda a, b, c: iter(()))\n"
    )
    with pytest.raises(EngineError, match="has no sink"):
        load_job(f"{tmp_path}/half.py")
    with pytest.raises(EngineError, match=r"has no stage 'x'. It has source, count, sink"):
        wordcount.job.stage("x")


def test_a_strategy_that_does_not_exist_names_those_that_do() -> None:
    for name in (*STRATEGIES, RESTART):
        How(name).check()
    with pytest.raises(EngineError, match="There are seamless, "):
        How("magic").check()


# ---- Messages


@pytest.fixture
def pair() -> Any:
    one, other = socket.socketpair()
    with Control(one) as left, Control(other) as right:
        yield left, right


def test_messages_come_as_they_were_sent(pair: Any) -> None:
    left, right = pair
    left.send("hello", task="ä", number=2**62, parts=[{"a": None}])
    left.send("bye")
    assert right.receive() == {
        "kind": "hello", "task": "ä", "number": 2**62, "parts": [{"a": None}]
    }  # fmt: skip
    assert right.receive() == {"kind": "bye"}
    left.close()
    assert right.receive() is None


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 1 << 31), struct.pack("<I", 2) + b"[]", struct.pack("<I", 1) + b"{",
        struct.pack("<I", 10) + b'{"kind":1}', b"\x01", struct.pack("<I", 5) + b"ab",
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_is_an_error(pair: Any, data: bytes) -> None:
    left, right = pair
    left._socket.sendall(data)
    left.close()
    with pytest.raises(EngineError):
        right.receive()


# ---- Results and checkpoints of a job


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


def visible(folder: Path) -> list[int]:
    return [n for batch in read_results(folder) for n in batch["n"].to_pylist()]


def test_results_appear_with_their_checkpoint_and_what_was_not_published_goes(
    tmp_path: Path,
) -> None:
    sink = FileSink(str(tmp_path), 0)
    sink.begin(0)
    sink.write(rows(1, 2))
    sink.cut(1)
    sink.write(rows(3))
    assert visible(tmp_path) == []
    sink.publish(1)
    assert visible(tmp_path) == [1, 2]
    sink.cut(2)  # and the process is killed, before or after checkpoint 2 was published
    sink.write(rows(4))
    sink.cut(3)
    again = FileSink(str(tmp_path), 0)
    again.begin(2)
    assert visible(tmp_path) == [1, 2, 3]
    again.write(rows(4))
    again.write(pa.record_batch({"n": ["of another type"]}))
    again.close()
    assert visible(tmp_path) == [1, 2, 3]
    for _ in range(2):  # it can be repeated
        publish_all(str(tmp_path))
        assert visible(tmp_path) == [1, 2, 3, 4, "of another type"]


def test_what_comes_after_the_checkpoint_of_a_restart_never_was(tmp_path: Path) -> None:
    sink = FileSink(str(tmp_path), 0)
    sink.begin(0)
    sink.write(rows(1))
    sink.cut(1)
    sink.write(rows(2))
    sink.cut(2)
    again = FileSink(str(tmp_path), 0)
    again.begin(1)
    again.write(rows(20))
    again.cut(2)
    again.publish(2)
    assert visible(tmp_path) == [1, 20]


def test_the_newest_checkpoint_of_a_job(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for number in (9, 10):
        JobCheckpoint(number, {"source-0": number}, {}).write(tmp_path)
    found = newest(tmp_path)
    assert found is not None
    assert (found.number, found.positions) == (10, {"source-0": 10})
    (tmp_path / "job-11.json").write_text('{"number": 11}')
    with pytest.raises(EngineError, match="is damaged"):
        newest(tmp_path)
