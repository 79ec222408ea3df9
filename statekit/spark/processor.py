"""The same function where Spark keeps the state: applyInPandasWithState, transformWithState.

For queries that cannot use foreachBatch (real-time mode has none), or whose state is to be in
Spark's own checkpoint. All states of a key are one binary value there (packed.py). A batch then is
as exactly-once as Spark makes it, the number of state partitions is fixed when the query first
starts, and each key costs what Spark takes for a call into Python.

    what                Spark's                          is used
    timers              one event-time timer per key     to wake the key when its first timer is due
    event-time TTL      the same timer                   when its last entry expires, if no timer is
    processing TTL      the TTL of the value, or the     if all states have one: an hour after the
                        timeout in processing time       last of them, since its clocks differ

Spark wakes a key when its own timer is *before* the watermark, statekit fires one that is *at* it,
too. So Spark's timer is set a millisecond earlier. Which timers fire, and what has expired, is
decided here, by the value; Spark's timers only say when to look. So one answer holds in all forms:

    1. rows at or before the watermark are late (late="drop")
    2. on_key, if there are rows
    3. on_timer, for each timer that is due at the batch's watermark, in order. What it sets is for
       a later batch

A timer that is set for a time that has passed fires when the watermark moves next; in foreachBatch
it fires in the next batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from statekit.errors import StatefulOpError
from statekit.spark.carried import Field, Pieces, columns_of
from statekit.spark.cursor import Cursor, Fired, Page, State, Timers, make_cursor, set_key
from statekit.spark.output import rows_to_table
from statekit.spark.packed import Scratch
from statekit.spark.rows import Rows, column_of, split_late
from statekit.spark.task import Functions, explained

TTL_SLACK_MS = 3600_000  # after which Spark may remove what has expired here
_BATCH_ID = "streaming.sql.batchId"  # a local property of Spark's tasks

_set_watermark = Cursor.watermark.__set__  # type: ignore[attr-defined]
_set_batch = Cursor.batch_id.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Plan:
    """What a worker is told: the op, and how its rows travel."""

    functions: Functions
    states: dict[str, State | Timers]
    key_type: str
    fields: Sequence[Field]
    output: pa.Schema
    event_time: str | None
    late: str
    is_in_event_time: bool  # there is a watermark, and Spark wakes keys by it


class Outcome(NamedTuple):
    """What is to be done with a key after its function was called."""

    rows: pa.Table
    value: bytes | None  # None: the key has no state any more
    woken: int | None  # when Spark was to wake the key, as it was before, ...
    wake: int | None  # ... and as it is now: event time in ms; None: it need not
    expires: int | None  # by the system's clock, in ms, if all of it does


class Worker:
    """Calls the function of an op for one key after the other, in a Python worker of Spark."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pieces = Pieces(plan.fields)
        self._scratch = Scratch(plan.states, plan.key_type)
        self._cursor = make_cursor(self._scratch.kv, plan.states, None, -1)
        self._is_open = False

    def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            if hasattr(self.plan.functions.instance, "open"):
                self.plan.functions.instance.open()

    def close(self) -> None:
        """Nothing can be called after this."""
        if self._is_open:
            self._is_open = False
            if hasattr(self.plan.functions.instance, "close"):
                self.plan.functions.instance.close()
        self._scratch.kv.close()

    def call(self, key: Any, table: pa.Table, value: bytes | None, watermark: int) -> Outcome:
        """The function of a key. value: its states as they were; watermark: 0 or less if none."""
        plan, scratch, cursor = self.plan, self._scratch, self._cursor
        self.open()
        now = watermark if plan.is_in_event_time and watermark > 0 else None
        if now is not None:
            scratch.kv.advance_watermark(now)
            if plan.event_time is not None and plan.late == "drop" and table.num_rows:
                in_time, late = split_late(table, plan.event_time, now)
                table = table.filter(in_time) if late else table
        try:
            woken = scratch.load(key, value)
            _set_watermark(cursor, now)
            _set_batch(cursor, _batch_id())
            cursor._turn(Page(column_of([key], plan.key_type)))
            set_key(cursor, key)
            for cell in cursor._cells:
                cell._at = 0
            made: list[Any] = []
            if table.num_rows:
                rows = Rows(columns_of(table), 0, table.num_rows)
                made = _rows_of(plan.functions.on_key, "on_key", key, rows, cursor)
            cursor._flush()
            if now is not None:
                made += self._fire(key, now)
            output = rows_to_table(made, plan.output)
            wake, expires = self._times(key, now)
            return Outcome(output, scratch.pack(wake), woken, wake, expires)
        finally:
            scratch.clear(key)

    def _fire(self, key: Any, watermark: int) -> list[Any]:
        due = self._scratch.due(key, watermark)
        if not due:
            return []
        plan, cursor = self.plan, self._cursor
        if plan.functions.on_timer is None:
            raise StatefulOpError(
                f"a timer of key {key!r} is due, and there is no on_timer to be called for it. "
                "Pass on_timer=function(key, timer, st)."
            )
        cursor._turn(cursor._page)  # values are read again: on_key has written them
        made: list[Any] = []
        for at, name in due:
            made += _rows_of(plan.functions.on_timer, "on_timer", key, Fired(name, at), cursor)
        cursor._flush()
        return made

    def _times(self, key: Any, watermark: int | None) -> tuple[int | None, int | None]:
        """When Spark is to wake the key, and when it may forget it."""
        scratch = self._scratch
        if not self.plan.is_in_event_time:
            return None, scratch.expires("processing")
        at = scratch.next_due(key)
        if at is None:
            at = scratch.expires("event")
        if at is None:
            return None, None
        # Before the watermark means at once, and Spark would refuse it or fire it in this batch.
        return max(at - 1, watermark or 1, 1), None


def _rows_of(function: Any, name: str, key: Any, given: Any, cursor: Any) -> list[Any]:
    found = None
    try:
        found = function(key, given, cursor)
        return [] if found is None else list(found)
    except Exception as error:
        raise explained(error, name, key, found) from None


def _batch_id() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(_BATCH_ID)
    return -1 if text is None else int(text)


def key_of(parts: Any, key_type: str) -> Any:
    """A key as Spark gives it, as an op has it."""
    letters = key_type.strip("()")
    found = tuple(
        bytes(part) if letter == "b" else int(part) if letter == "i" else str(part)
        for part, letter in zip(tuple(parts), letters, strict=True)
    )
    return found[0] if len(letters) == 1 and not key_type.startswith("(") else found


def to_frames(table: pa.Table) -> Iterator[Any]:
    """Output rows as pandas; nothing for none."""
    if table.num_rows:
        yield table.to_pandas(integer_object_nulls=True, date_as_object=True)


# ---- applyInPandasWithState


def call_with_state(worker: Worker, parts: Any, frames: Iterable[Any], state: Any) -> Iterator[Any]:
    """The function that applyInPandasWithState() calls. state: its GroupState."""
    plan = worker.plan
    key = key_of(parts, plan.key_type)
    table = worker.pieces.from_frames(frames)
    watermark = state.getCurrentWatermarkMs() if plan.is_in_event_time else 0
    value = bytes(state.get[0]) if state.exists else None
    outcome = worker.call(key, table, value, watermark)
    if outcome.value is None:
        if state.exists:
            state.remove()
    else:
        state.update((outcome.value,))
        if outcome.wake is not None:
            state.setTimeoutTimestamp(outcome.wake)
        elif outcome.expires is not None:
            left = outcome.expires + TTL_SLACK_MS - state.getCurrentProcessingTimeMs()
            state.setTimeoutDuration(max(left, 1))
    yield from to_frames(outcome.rows)


# ---- transformWithState


class Steps:
    """What a StatefulProcessor does, apart from being one."""

    def __init__(self, worker: Worker, state: Any, handle: Any) -> None:
        self.worker = worker
        self._state = state  # a ValueState of one binary column
        self._handle = handle

    def run(self, parts: Any, table: pa.Table, timer_values: Any) -> pa.Table:
        worker = self.worker
        key = key_of(parts, worker.plan.key_type)
        stored = self._state.get()
        value = None if stored is None else bytes(stored[0])
        in_event_time = worker.plan.is_in_event_time
        watermark = timer_values.getCurrentWatermarkInMs() if in_event_time else 0
        outcome = worker.call(key, table, value, watermark)
        if outcome.value is None:
            if stored is not None:
                self._state.clear()
        elif outcome.value != value:
            self._state.update((outcome.value,))
        if outcome.wake != outcome.woken:
            # (One that fires now is before the watermark, and the next one is not: never the same.)
            if outcome.woken is not None:
                self._handle.deleteTimer(outcome.woken)
            if outcome.wake is not None:
                self._handle.registerTimer(outcome.wake)
        return outcome.rows
