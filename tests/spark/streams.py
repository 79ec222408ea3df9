"""Streams for tests: files that appear one by one, and queries whose batches are called by hand."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import statekit as sk
import statekit.spark as sks


class Files:
    """A source of a stream: each file is a batch, if maxFilesPerTrigger is 1."""

    def __init__(self, place: Path, schema: str) -> None:
        self.place = place
        self.schema = schema
        self.count = 0
        place.mkdir(parents=True, exist_ok=True)

    def add(self, **columns: Sequence[Any]) -> None:
        """A file of these rows. It appears as a whole."""
        draft = self.place / f".{self.count}.draft"
        pq.write_table(pa.table(columns), draft)
        os.utime(draft, (1_000_000 + self.count,) * 2)  # Spark reads the oldest first
        draft.rename(self.place / f"{self.count:05d}.parquet")
        self.count += 1

    def stream(self, spark: Any) -> Any:
        reader = spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.place))


def run_all(stream: Any, function: Any, checkpoint: Path) -> Any:
    """Runs a query over all that is there, batch by batch; its error, if it fails, is raised."""
    writer = stream.writeStream.foreachBatch(function).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return query


class Query:
    """A query whose batches are called by hand. Its checkpoint has what Spark writes there
    (test_stateful_op.py runs real ones, and so would fail if Spark wrote something else).
    """

    def __init__(self, checkpoint: Path, name: str | None = None) -> None:
        self.checkpoint = checkpoint
        self.id = name or str(uuid.uuid4())
        (checkpoint / "offsets").mkdir(parents=True)
        (checkpoint / "metadata").write_text(json.dumps({"id": self.id}))

    def plan(self, batch: int, watermark: int = 0, stamp: int = 0) -> None:
        """What Spark does before it runs a batch. stamp: when; another time is another plan."""
        about = {"batchWatermarkMs": watermark, "batchTimestampMs": stamp, "conf": {}}
        text = "\n".join(("v1", json.dumps(about), json.dumps({"logOffset": batch})))
        (self.checkpoint / "offsets" / str(batch)).write_text(text)


class Sink:
    """Remembers what it was given: for each call the batch and its rows, sorted."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[tuple[Any, ...]]]] = []

    def __call__(self, df: Any, batch: int) -> None:
        self.calls.append((batch, sorted(tuple(row) for row in df.collect())))

    @property
    def batches(self) -> dict[int, list[tuple[Any, ...]]]:
        """The rows of each batch. Calls for one batch must agree."""
        found: dict[int, list[tuple[Any, ...]]] = {}
        for batch, rows in self.calls:
            assert found.setdefault(batch, rows) == rows, f"batch {batch} was given other rows"
        return found


def count(key: Any, rows: Any, st: Any) -> Iterable[tuple[Any, int]]:
    """An op that counts: the oracle is Counter."""
    yield key, st.count.add(len(rows))


def contents(place: Any, state: str, hint: Any, key: Any = str) -> dict[Any, Any]:
    """A state as it was published last, read without Spark."""
    kv = sk.restore(str(place))
    found = dict(kv.state(state, hint, key=key).items())
    kv.close()
    return found


def digest(place: Path) -> str:
    """Of all manifests: it changes when a version is published."""
    parts = [path.read_bytes() for path in sorted(place.glob("*.manifest"))]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Job:
    """An op and a query, whose batches are called by hand; and what the state should be."""

    def __init__(self, spark: Any, place: Path, **changes: Any) -> None:
        self.spark = spark
        self.place = place
        self.state = place / "state"
        arguments: dict[str, Any] = {"key_groups": 16, **changes}
        function = arguments.pop("function", count)
        self.op = sks.StatefulOp(
            function,
            key="user",
            output="user string, n long",
            state={"count": int},
            path=self.state,
            **arguments,
        )
        self.query = Query(place / "cp")
        self.sink = Sink()

    def plan(self, batch: int, stamp: int = 0) -> None:
        self.query.plan(batch, stamp=stamp)

    def run(self, batch: int, users: str, tasks: int = 2, **arguments: Any) -> None:
        """A batch with one row for each letter."""
        function = self.op.foreach_batch(
            self.sink, checkpoint=self.query.checkpoint, parallelism=tasks, **arguments
        )
        function(self.frame(users), batch)

    def frame(self, users: str) -> Any:
        return self.spark.createDataFrame([(user,) for user in users], "user string")

    @property
    def counts(self) -> dict[str, int]:
        return contents(self.state, "count", int)
