"""Timers that are not due are not read, and none fires late. A model says what must fire when."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_task import GROUPS, batch, rows_of

import statekit as sk
from statekit.checkpoint.parts import Part, publish
from statekit.spark import State, Timers
from statekit.spark.due import NEVER, UNKNOWN, merge, noted, slices_to_read, times_of
from statekit.spark.task import Functions, run_range

KEYS = [f"k{n}" for n in range(60)]


def _on_key(key: str, rows: Any, st: Any) -> Any:
    """rows["at"]: when to set a timer; below zero: to move it; 0: to cancel all."""
    for at in rows["at"]:
        if at > 0:
            st.end.set(at)
        elif at < 0:
            st.end.move(-at)
        else:
            st.end.cancel()


def _on_timer(key: str, timer: Any, st: Any) -> Any:
    st.count.add(1)
    yield key, timer.due


class Stream:
    """Batches with timers, as the driver makes them; without Spark."""

    def __init__(self, place: Path, **changes: Any) -> None:
        self.place = place
        self.base: Any = None
        self.read: list[int] = []  # slices of each batch that were read
        functions = Functions(on_key=_on_key, on_timer=_on_timer)
        states = {"end": Timers(), "count": State(int)}
        self.changes = {"functions": functions, "states": states, **changes}

    def run(self, rows: list[tuple[str, int]], watermark: int, tasks: int) -> list[tuple[str, int]]:
        """Returns what fired."""
        number = 1 if self.base is None else self.base.number + 1
        note = None if self.base is None else self.base.metadata["spark"]
        times = times_of(self.base, note, GROUPS)
        one = batch(
            self.place, self.base, number, tasks=tasks, watermark=watermark, due=times,
            **self.changes,
        )  # fmt: skip
        reports = [run_range(one, groups, _rows(rows, groups)) for groups in one.ranges]
        assert [report.error for report in reports] == [None] * tasks
        self.read.append(
            sum(len(slices_to_read(times.get("end"), g, GROUPS, watermark)) for g in one.ranges)
        )
        parts = [Part.from_json(report.part) for report in reports]
        times = merge(times, (report.due for report in reports), GROUPS)
        note = {"due": noted(times, [part.file for part in parts])}
        self.base = publish(str(self.place), parts, number=number, metadata={"spark": note})
        fired = []
        for report in reports:
            if report.output is not None:
                data = (self.place / report.output.file).read_bytes()
                table = pa.parquet.read_table(pa.BufferReader(data))
                fired += list(zip(*table.to_pydict().values(), strict=True))
        return sorted(fired)

    def times(self) -> list[int]:
        return times_of(self.base, self.base.metadata["spark"], GROUPS)["end"]


def _rows(rows: list[tuple[str, int]], groups: range) -> list[pa.RecordBatch]:
    mine = [row for row in rows if sk.leaf_of(str, row[0], GROUPS, 1) in groups]
    if not mine:
        return []
    return [pa.record_batch({"user": [key for key, _ in mine], "at": [at for _, at in mine]})]


@pytest.mark.parametrize("seed", range(3))
def test_every_timer_fires_with_the_first_watermark_that_reaches_it(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    stream, model = Stream(tmp_path), defaultdict[str, set[int]](set)
    watermark = 0
    for _ in range(20):
        rows = []
        for key in rng.sample(KEYS, rng.choice((0, 1, 1, 5))):
            at = rng.choice((0, 1, 1, -1)) * (watermark + rng.randrange(1, 100))
            rows.append((key, at))
            if at <= 0:
                model[key].clear()
            if at:
                model[key].add(abs(at))
        watermark += rng.choice((0, 3, 3, 20))
        expected = []
        for key, dues in model.items():
            due = {at for at in dues if at <= watermark}
            expected += [(key, at) for at in due]
            dues -= due
        assert stream.run(rows, watermark, tasks=rng.choice((1, 2, 5))) == sorted(expected)
        for at, time in enumerate(stream.times()):
            mine = [k for k in KEYS if sk.leaf_of(str, k, GROUPS, 1) == at]
            assert time <= min((due for k in mine for due in model[k]), default=NEVER)
    stream.run([], NEVER, 2)  # all of them are read now, so all times are exact
    assert stream.times() == [NEVER] * GROUPS


def test_only_slices_with_due_timers_are_read(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.run([(key, 100) for key in KEYS] + [(KEYS[0], 10)], 0, 2)
    assert stream.run([], 5, 2) == []
    assert stream.read[-1] == 0
    assert stream.run([], 10, 2) == [(KEYS[0], 10)]
    assert stream.read[-1] == 1
    assert stream.run([], 11, 2) == []
    assert stream.read[-1] == 0
    assert stream.run([], 100, 2) == sorted((key, 100) for key in KEYS)


def test_timers_that_are_not_read_stay(tmp_path: Path) -> None:
    """Also of keys that a batch changes beside them, and through chains that are written anew."""
    stream = Stream(tmp_path)
    stream.run([(key, 1000) for key in KEYS], 0, 1)
    for number in range(20):
        stream.run([(KEYS[number], 2000)], number, 2)
    with sk.restore(tmp_path) as kv:
        timers = dict(kv.timers("end").items())
    assert timers == {key: (1000, 2000) if at < 20 else (1000,) for at, key in enumerate(KEYS)}


def test_what_another_version_said_is_not_believed(tmp_path: Path) -> None:
    """An edit keeps the metadata, and may have set an earlier timer."""
    stream = Stream(tmp_path)
    stream.run([(KEYS[0], 1000)], 0, 1)
    with sk.restore(tmp_path) as kv:
        kv.timers("end").set(KEYS[1], 5)
        stream.base = kv.checkpoint(tmp_path, metadata=stream.base.metadata)
    assert stream.run([], 6, 2) == [(KEYS[1], 5)]
    assert stream.read[-1] == GROUPS


def test_times_of_states_that_an_op_does_not_have_stay_and_new_ones_are_not_known() -> None:
    before = {"other": [7] * GROUPS}
    assert merge(before, [{"end": [(0, 3)]}], GROUPS) == {
        "other": [7] * GROUPS,
        "end": [3] + [NEVER] * (GROUPS - 1),
    }
    assert slices_to_read(None, range(2, 5), GROUPS, 0) == {2, 3, 4}
    assert slices_to_read(None, range(2, 5), GROUPS, None) == set()
    assert slices_to_read([UNKNOWN] * 128, range(3, 9), 1024, 0) == {0, 1}


def test_a_batch_without_a_watermark_reads_none_and_forgets_none(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.run([(KEYS[0], 5)], 0, 1)
    one = batch(tmp_path, stream.base, 2, tasks=1, **stream.changes)  # nothing is known of timers
    (report,) = [run_range(one, groups, rows_of("", groups)) for groups in one.ranges]
    assert {time for _, time in report.due["end"]} == {UNKNOWN}
