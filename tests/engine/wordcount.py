"""A job for tests: words are counted, and each count is emitted: 1, 2, 3, ... of each word.

The environment says where results go, and how much there is to do. The source goes on until a file
appears, so that a test decides when it ends, and not a clock.
"""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from statekit.engine.items import Watermark
from statekit.engine.job import Job, KeyedOperator
from statekit.engine.on_key import on_key
from statekit.spark import Timers

FOLDER = Path(os.environ.get("WORDCOUNT_FOLDER", "."))
BATCHES = int(os.environ.get("WORDCOUNT_BATCHES", "40"))  # at least so many from each source
PACE_S = 0.02
ROWS = 50
WORDS = 300


def lines(task: int, start: int) -> pa.RecordBatch:
    """Batch `start` of a source: the same whenever it is made."""
    rng = random.Random(task * 1_000_003 + start)
    return pa.record_batch({"line": [" ".join(draw(rng) for _ in range(3)) for _ in range(ROWS)]})


def draw(rng: random.Random) -> str:
    return f"w{int(WORDS * rng.random() ** 2)}"


def read(task: int, tasks: int, start: int) -> Iterator[pa.RecordBatch | Watermark]:
    while start < BATCHES or not (FOLDER / "enough").exists():
        yield lines(task, start)
        start += 1
        yield Watermark(start * 10)
        if start > BATCHES:
            time.sleep(PACE_S)  # a load, not a flood, however long the test takes
    (FOLDER / f"read-{task}").write_text(str(start))


def words(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch(
        {"word": [w for line in batch["line"].to_pylist() for w in line.split()]}
    )


class Count(KeyedOperator):
    def open(self, kv):  # type: ignore[no-untyped-def]
        self.counts = kv.value("counts", int, default=0)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        counts = self.counts.add_many(batch["word"], returning=True)
        return pa.record_batch({"word": batch["word"], "count": counts.to_arrow()})


class Total(KeyedOperator):
    """Per length of words: how many there were."""

    def open(self, kv):  # type: ignore[no-untyped-def]
        self.totals = kv.value("totals", int, default=0, key=int)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        totals = self.totals.add_many(batch["length"], returning=True)
        return pa.record_batch({"length": batch["length"], "total": totals.to_arrow()})


def lengths(batch: pa.RecordBatch) -> pa.RecordBatch:
    length = pa.array([len(word) for word in batch["word"].to_pylist()], pa.int64())
    return pa.record_batch({"length": length})


two = (
    Job("two")
    .source(read, parallelism=2)
    .map(words)
    .key_by("word")
    .process(Count, parallelism=2, name="count")
    .map(lengths)
    .key_by("length", key=int, key_groups=16)
    .process(Total, parallelism=2, name="total")
    .sink(FOLDER / "results")
)

WINDOW_MS = 50


def clicks(task: int, start: int) -> pa.RecordBatch:
    """Batch `start` of a source of events, out of order, and none before start * 10."""
    rng = random.Random(task * 1_000_003 + start)
    at = [start * 10 + rng.randrange(30) for _ in range(ROWS)]
    return pa.record_batch({"word": [draw(rng) for _ in at], "at": pa.array(at, pa.int64())})


def read_clicks(task: int, tasks: int, start: int) -> Iterator[pa.RecordBatch | Watermark]:
    while start < BATCHES or not (FOLDER / "enough").exists():
        yield clicks(task, start)
        start += 1
        yield Watermark(start * 10)
        if start > BATCHES:
            time.sleep(PACE_S)
    (FOLDER / f"clicked-{task}").write_text(str(start))


def into_windows(word: str, rows, st):  # type: ignore[no-untyped-def]
    for at in rows["at"]:
        end = at // WINDOW_MS * WINDOW_MS + WINDOW_MS
        st.counts[end] = st.counts.get(end, 0) + 1
        st.ends.set(end)


def window_ends(word: str, timer, st):  # type: ignore[no-untyped-def]
    yield word, timer.due, st.counts.pop(timer.due)


windows = (
    Job("windows")
    .source(read_clicks, parallelism=2)
    .key_by("word")
    .process(
        on_key(
            into_windows,
            state={"counts": dict[int, int], "ends": Timers},
            output=pa.schema([("word", pa.string()), ("end", pa.int64()), ("n", pa.int64())]),
            on_timer=window_ends,
        ),
        parallelism=2,
        name="count",
    )
    .sink(FOLDER / "results")
)


class Join(KeyedOperator):
    """Two inputs: how often a word came as a line's word, and as a click."""

    def open(self, kv):  # type: ignore[no-untyped-def]
        self.counts = {name: kv.value(name, int, default=0) for name in ("texts", "clicks")}

    def process_from(self, stage: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        word = batch.column("word" if stage == "texts" else "clicked")
        counts = self.counts[stage].add_many(word, returning=True)
        return pa.record_batch(
            {"word": word, "from": [stage] * len(word), "count": counts.to_arrow()}
        )


def renamed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"clicked": batch["word"]})


joined = (
    Job("joined")
    .source(read, parallelism=2, name="texts")
    .map(words)
    .key_by("word")
    .source(read_clicks, parallelism=2, name="clicks")
    .map(renamed)
    .key_by("clicked")
    .process(Join, parallelism=2, name="count")
    .sink(FOLDER / "results")
)

job = (
    Job("wordcount")
    .source(read, parallelism=2)
    .map(words)
    .key_by("word")
    .process(Count, parallelism=2, name="count")
    .sink(FOLDER / "results")
)
