"""Windows: against brute force over all records, with records out of order and late ones.

The job that is scaled and killed is at the end; the others drive the operator itself.
"""

import os
import random
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_workloads import TIMEOUT_S, write_job

import statekit as sk
from statekit.engine.event_time import EventTime, clock
from statekit.engine.items import FIRST, LAST
from statekit.engine.job import Job, KeyedOperator
from statekit.engine.records import Key
from statekit.engine.running import start
from statekit.engine.settings import Settings
from statekit.engine.windows import (
    Spans,
    count,
    least,
    most,
    session,
    sliding,
    total,
    tumbling,
    window_operator,
)
from statekit.engine.workloads import workload
from statekit.errors import ArgumentError, EngineError

Record = tuple[str, int, int]  # key, time, amount
AGGREGATES = {"n": count(), "sum": total("amount"), "min": least("amount"), "max": most("amount")}


def drive(
    spans: Spans, steps: list[tuple[list[Record], int]], lateness: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Batches, each followed by a watermark: the rows that come, and the late records by key."""
    made = window_operator(spans, "at", AGGREGATES, lateness, emits_late=True)()
    made.key = Key(("key",), str, 128)
    rows: list[dict[str, Any]] = []
    with sk.open("memory:") as kv:
        made.open(kv)

        def take(batch: pa.RecordBatch | None) -> None:
            if batch is not None:
                rows.extend(batch.to_pylist())

        for records, watermark in [*steps, ([], LAST)]:
            if records:
                keys, times, amounts = zip(*records, strict=True)
                take(made.process(pa.record_batch({"key": keys, "at": times, "amount": amounts})))
            if watermark > made.time:
                made.time = watermark
                take(made.advance(watermark))
        assert len(kv["windows"]) == 0, "windows are left behind"
        assert len(kv["ends"]) == 0, "timers are left behind"
        return rows, dict(kv["late"].items())


def stream(rng: random.Random, disorder: int) -> list[tuple[list[Record], int]]:
    steps, latest = [], FIRST
    for at in range(0, 3000, 100):
        records = [
            (rng.choice("abc"), at + rng.randrange(-disorder, 100), rng.randrange(-50, 50))
            for _ in range(rng.randrange(6))
        ]
        latest = max([latest, *(time for _, time, _ in records)])
        steps.append((records, latest - 100))
    return steps


def summed(records: list[Record]) -> tuple[int, int, int, int]:
    amounts = [amount for _, _, amount in records]
    return len(amounts), sum(amounts), min(amounts), max(amounts)


def check(
    rows: list[dict[str, Any]],
    late: dict[str, int],
    expected: dict[tuple[str, int, int], list[Record]],
    expected_late: list[Record],
) -> None:
    """The last revision of each window is right, and no revision was left out."""
    found: dict[tuple[str, int, int], tuple[int, ...]] = {}
    revisions = defaultdict(list)
    for row in rows:
        if not row["late"]:
            at = row["key"], row["start"], row["end"]
            revisions[at].append(row["revision"])
            found[at] = row["n"], row["sum"], row["min"], row["max"]
    assert found == {at: summed(records) for at, records in expected.items()}
    assert all(sorted(some) == some for some in revisions.values())
    came = [(row["key"], row["start"], row["sum"]) for row in rows if row["late"]]
    assert sorted(came) == sorted(expected_late)
    counted: dict[str, int] = defaultdict(int)
    for key, _, _ in expected_late:
        counted[key] += 1
    assert late == counted


@pytest.mark.parametrize("seed", range(30))
def test_windows_have_their_records_however_late_these_are(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((100, 250, 400))
    slide = rng.choice((size, 100, 70))
    lateness = rng.choice((0, 0, 150, 1000))
    spans = tumbling(size) if slide == size else sliding(size, min(slide, size))
    steps = stream(rng, rng.choice((0, 100, 600)))
    expected: dict[tuple[str, int, int], list[Record]] = defaultdict(list)
    late, watermark = [], FIRST
    for records, after in steps:
        for record in records:
            key, at, _ = record
            ends = [
                end for end in range(at + 1, at + size + 1) if (end - size) % spans.slide_ms == 0
            ]
            kept = [end for end in ends if end > watermark - lateness]
            for end in kept:
                expected[key, end - size, end].append(record)
            if not kept:
                late.append(record)
        watermark = max(watermark, after)
    check(*drive(spans, steps, lateness), expected, late)


@pytest.mark.parametrize("seed", range(30))
def test_sessions_are_what_a_sort_says_if_nothing_is_late(seed: int) -> None:
    """A revision may show a session that is joined with another one later: the last ones count."""
    rng = random.Random(seed)
    gap = rng.choice((20, 60, 150))
    steps = stream(rng, 100)
    records = [record for some, _ in steps for record in some]
    expected: dict[tuple[str, int, int], list[Record]] = {}
    for key in "abc":
        mine = sorted((record for record in records if record[0] == key), key=lambda one: one[1])
        while mine:
            some = [mine.pop(0)]
            while mine and mine[0][1] < some[-1][1] + gap:
                some.append(mine.pop(0))
            expected[key, some[0][1], some[-1][1] + gap] = some
    rows, late = drive(session(gap), steps, 10_000)
    last = {(row["key"], row["start"], row["end"]): row for row in rows}
    for at, some in expected.items():
        assert summed(some) == tuple(last[at][name] for name in AGGREGATES)
    for key, first, end in last.keys() - expected.keys():  # replaced by one that contains it
        assert any(k == key and s <= first and end <= e for k, s, e in expected)
    assert not late


@pytest.mark.parametrize("seed", range(30))
def test_sessions_drop_what_is_late_and_count_it(seed: int) -> None:
    rng = random.Random(seed)
    gap, lateness = rng.choice((40, 150)), rng.choice((0, 100))
    steps = stream(rng, 600)
    kept: dict[str, list[list[Record]]] = defaultdict(list)
    final: dict[tuple[str, int, int], list[Record]] = {}
    late, watermark = [], FIRST

    def span(some: list[Record]) -> tuple[str, int, int]:
        times = [at for _, at, _ in some]
        return some[0][0], min(times), max(times) + gap

    for records, after in steps:
        for record in records:
            key, at, _ = record
            near = [one for one in kept[key] if span(one)[1] < at + gap and at < span(one)[2]]
            joined = [record, *(other for one in near for other in one)]
            if span(joined)[2] <= watermark - lateness:
                late.append(record)
                continue
            kept[key] = [one for one in kept[key] if one not in near] + [joined]
        watermark = max(watermark, after)
        for key, sessions in kept.items():
            for one in sessions:
                if span(one)[2] <= watermark:
                    final[span(one)] = one
            kept[key] = [one for one in sessions if span(one)[2] > watermark - lateness]
    final |= {span(one): one for sessions in kept.values() for one in sessions}
    rows, counted = drive(session(gap), steps, lateness)
    last = {(r["key"], r["start"], r["end"]): r for r in rows if not r["late"]}
    for at, some in final.items():
        assert summed(some) == tuple(last[at][name] for name in AGGREGATES), at
    came = [(row["key"], row["start"], row["sum"]) for row in rows if row["late"]]
    assert sorted(came) == sorted(late)
    assert sum(counted.values()) == len(late)


def test_keys_of_several_columns_and_nulls() -> None:
    made = window_operator(tumbling(10), "at", {"n": count(), "sum": total("x")})()
    made.key = Key(("a", "b"), tuple[str, int], 16)
    with sk.open("memory:", key_groups=16) as kv:
        made.open(kv)
        x = pa.array([None, 2, None, None], pa.int64())
        batch = {"a": ["p", "p", "q", "p"], "b": [1, 1, 1, 2], "at": [0, 1, 2, 3], "x": x}
        assert made.process(pa.record_batch(batch)) is None
        made.time = 10
        found = made.advance(10)
        assert found is not None
        rows = sorted(found.to_pylist(), key=lambda row: (row["a"], row["b"]))
        assert [(r["a"], r["b"], r["n"], r["sum"]) for r in rows] == [
            ("p", 1, 2, 2), ("p", 2, 1, None), ("q", 1, 1, None),
        ]  # fmt: skip


def test_a_window_without_its_columns_says_which() -> None:
    made = window_operator(tumbling(10), "when", {"n": count()})()
    made.key = Key(("key",), str, 128)
    with sk.open("memory:") as kv:
        made.open(kv)
        with pytest.raises(EngineError, match="needs column 'when'"):
            made.process(pa.record_batch({"key": ["a"], "at": [1]}))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tumbling(0), "0 < slide <= size"),
        (lambda: sliding(10, 20), "0 < slide <= size"),
        (lambda: session(0), "pass 1 or more"),
        (lambda: window_operator(tumbling(1), "at", {}), "tells nothing"),
        (lambda: window_operator(tumbling(1), "at", {"end": count()}), "cannot be named 'end'"),
        (lambda: window_operator(tumbling(1), "at", {"n": count()}, -1), "pass 0 or more"),
        (lambda: Job("j").event_time("at"), "comes after source"),
    ],
)
def test_windows_that_cannot_be_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        make()


# ---- The clock of a source


def test_a_watermark_is_the_latest_time_less_the_grace() -> None:
    def at(*times: int) -> pa.RecordBatch:
        return pa.record_batch({"at": pa.array(times, pa.int64())})

    some = clock(EventTime("at", grace_ms=5, interval_ms=0), Settings(), FIRST)
    assert some.after(at(10, 30, 20)) == 25
    assert some.after(at(1)) == 25
    assert some.after(None) is None
    assert some.after(at(40)) == 35
    assert clock(EventTime("at", 5, 0), Settings(), 100).after(at(40)) == 95  # from a checkpoint
    rare = clock(EventTime("at"), Settings(watermark_interval_ms=1 << 40, grace_ms=1), FIRST)
    assert [rare.after(at(time)) for time in (10, 20, 30)] == [9, None, None]
    assert rare.latest == 30
    with pytest.raises(EngineError, match="event time is column 'when'"):
        clock(EventTime("when"), Settings(), FIRST).after(at(1))


# ---- A job


def test_windows_are_exact_though_the_job_is_scaled_and_killed(tmp_path: Path) -> None:
    parameters = {"rate": 2_000, "keys": 50, "size_ms": 500, "slide_ms": 200, "records": 1 << 40}
    work = workload("windowed_sum", **parameters)
    results = tmp_path / "results"
    path = write_job(tmp_path, "windowed_sum", parameters, "[settings]\nwatermark_interval_ms = 20")
    with start(str(path), tmp_path / "job") as job:
        job.scale("sums", 3)
        job.checkpoint()
        os.kill(job.pids["sums-1"], signal.SIGKILL)
        job.checkpoint()
        job.scale("sums", 1)
        work.end(results)
        job.wait(TIMEOUT_S)
    assert work.check(results) > 0


def test_an_operator_knows_the_time() -> None:
    assert KeyedOperator.time == FIRST
