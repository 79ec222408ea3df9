"""Windows: aggregates of the records of a key, by event time. An operator on maps and timers.

    job.key_by("user").window(tumbling(60_000), time="at", aggregates={"n": count()})

    tumbling(size)          one window after the other
    sliding(size, slide)    windows that overlap: a record is in several
    session(gap)            a window lasts until no record has come for `gap`; windows that a record
                            joins become one

A window has the records with start <= time < end. It fires when the watermark has come to its end.
It is kept for `lateness_ms` more: a record that comes then is counted, and the window fires at once
again, with the next `revision`; the highest revision of a window is the right one. (If a record
joins sessions that have fired, the window that they become replaces them.) A record is *late* if
all its windows are gone. Late records are counted in the state `late`, by key; or they come out as
rows of their own, with late = true and start = end = their time.

A key's windows are a map: start -> [end, revision, whether it has changed since it fired,
aggregates]. Its timers are set for the ends of windows, and for when these are to go.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from statekit.engine.items import FIRST
from statekit.engine.operators import KeyedOperator
from statekit.errors import ArgumentError, EngineError, shorten
from statekit.keys import key_type_text

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider

_TYPES = {"s": pa.string(), "b": pa.binary(), "i": pa.int64()}


class Spans(NamedTuple):
    """Windows of one size. slide: from one to the next; 0: sessions, and the size is their gap."""

    size_ms: int
    slide_ms: int


def tumbling(size_ms: int) -> Spans:
    return sliding(size_ms, size_ms)


def sliding(size_ms: int, slide_ms: int) -> Spans:
    if type(size_ms) is not int or type(slide_ms) is not int or not 0 < slide_ms <= size_ms:
        raise ArgumentError(
            f"windows of {shorten(size_ms)} ms every {shorten(slide_ms)} ms: pass whole numbers, "
            "0 < slide <= size."
        )
    return Spans(size_ms, slide_ms)


def session(gap_ms: int) -> Spans:
    if type(gap_ms) is not int or gap_ms <= 0:
        raise ArgumentError(f"sessions with a gap of {shorten(gap_ms)} ms: pass 1 or more.")
    return Spans(gap_ms, 0)


class Aggregate(NamedTuple):
    arrow: str  # what Arrow calls it
    column: str | None
    combine: Callable[[Any, Any], Any]


def count() -> Aggregate:
    return Aggregate("count_all", None, lambda a, b: a + b)


def total(column: str) -> Aggregate:
    return Aggregate("sum", column, lambda a, b: a + b)


def least(column: str) -> Aggregate:
    return Aggregate("min", column, min)


def most(column: str) -> Aggregate:
    return Aggregate("max", column, max)


class _Window:
    """A window of a key, decoded. None of an aggregate: its column had nulls only."""

    def __init__(self, start: int, end: int, revision: int, is_new: bool, found: list[Any]) -> None:
        self.start, self.end, self.revision, self.is_new = start, end, revision, is_new
        self.found = found

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode([self.end, self.revision, self.is_new, self.found])


_Rows: TypeAlias = list[tuple[Any, int, int, bool, int, list[Any]]]


def window_operator(
    spans: Spans,
    time: str,
    aggregates: Mapping[str, Aggregate],
    lateness_ms: int = 0,
    emits_late: bool = False,
) -> Callable[[], KeyedOperator]:
    """What process() takes; see Job.window()."""
    if not aggregates:
        raise ArgumentError("a window without aggregates tells nothing: name one, such as count().")
    if wrong := [name for name in aggregates if name in ("start", "end", "late", "revision")]:
        raise ArgumentError(f"an aggregate cannot be named {wrong[0]!r}: each window has that.")
    if lateness_ms < 0:
        raise ArgumentError(f"lateness_ms={lateness_ms}: pass 0 or more.")
    return lambda: WindowOperator(spans, time, aggregates, lateness_ms, emits_late)


class WindowOperator(KeyedOperator):
    def __init__(
        self,
        spans: Spans,
        time: str,
        aggregates: Mapping[str, Aggregate],
        lateness_ms: int,
        emits_late: bool,
    ) -> None:
        self._spans = spans
        self._at = time
        self._aggregates = aggregates
        self._lateness = lateness_ms
        self._emits_late = emits_late

    def open(self, kv: "KVProvider") -> None:
        key = self.key.type
        self._windows = kv.map("windows", int, bytes, key=key)
        self._ends = kv.timers("ends", key=key)
        self._late = kv.value("late", int, default=0, key=key)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        columns = [one.column for one in self._aggregates.values() if one.column]
        for name in (self._at, *columns):
            if name not in batch.schema.names:
                raise EngineError(
                    f"a window needs column {name!r}, and the records have "
                    f"{', '.join(batch.schema.names)}."
                )
        rows: _Rows = []
        groups = self._sessions(batch) if not self._spans.slide_ms else self._grouped(batch, rows)
        for key, start, end, found in groups:
            self._add(key, start, end, found, rows)
        return self._batch(rows)

    def advance(self, time: int) -> pa.RecordBatch | None:
        rows: _Rows = []
        for key in dict.fromkeys(timer.key for timer in self._ends.pop_due(time)):
            for window in self._of(key):
                if window.end <= time and window.is_new:
                    self._fire(key, window, rows)
                self._keep_until(key, window, time)
        rows.sort(key=lambda row: (row[2], row[1]))
        return self._batch(rows)

    # ---- Records

    def _grouped(
        self, batch: pa.RecordBatch, rows: _Rows
    ) -> Iterator[tuple[Any, int, int, list[Any]]]:
        """What a batch adds to each window: key, start, end and aggregates."""
        size, slide = self._spans
        times = self._times(batch)
        last = times // slide * slide  # the start of the last window of each record
        starts = np.concatenate([last - back for back in range(0, size, slide)])
        of = np.tile(np.arange(len(times)), -(-size // slide))
        is_in = starts + size > times[of]
        is_kept = is_in & ~self._is_gone(starts + size)
        self._note_late(batch, ~np.isin(np.arange(len(times)), of[is_kept]), rows)
        keys = [*self.key.columns]
        table = pa.Table.from_batches([batch.take(pa.array(of[is_kept]))])
        table = table.append_column("__start", pa.array(starts[is_kept]))
        wanted: list[tuple[Any, str]] = [
            (column or [], how)
            for column, how in dict.fromkeys(
                (one.column, one.arrow) for one in self._aggregates.values()
            )
        ]
        grouped = table.group_by([*keys, "__start"], use_threads=False).aggregate(wanted)
        found = [
            grouped[f"{one.column}_{one.arrow}" if one.column else one.arrow].to_pylist()
            for one in self._aggregates.values()
        ]
        starts_of = grouped["__start"].to_pylist()
        for at, key in enumerate(_keys(grouped, self.key.columns)):
            start = starts_of[at]
            yield key, start, start + size, [column[at] for column in found]

    def _sessions(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, int, int, list[Any]]]:
        """A session of its own for each record: _add() joins them."""
        singles = self._singles(batch)
        keys = _keys(batch, self.key.columns)
        for key, at, found in zip(keys, self._times(batch).tolist(), singles, strict=True):
            yield key, at, at + self._spans.size_ms, found

    def _add(self, key: Any, start: int, end: int, found: list[Any], rows: _Rows) -> None:
        windows = self._windows[key]
        if self._spans.slide_ms:
            stored = windows.get(start)
            joined = [] if stored is None else [_decoded(start, stored)]
        else:
            joined = [one for one in self._of(key) if one.start < end and start < one.end]
        window = _Window(start, end, 0, True, found)
        for one in joined:
            window.start, window.end = min(window.start, one.start), max(window.end, one.end)
            window.revision = max(window.revision, one.revision)
            window.found = [
                b if a is None else a if b is None else how.combine(a, b)
                for how, a, b in zip(
                    self._aggregates.values(), one.found, window.found, strict=True
                )
            ]
        if not self._spans.slide_ms and self._is_gone(window.end):
            self._late.add(key, 1)
            if self._emits_late:
                rows.append((key, start, start, True, 0, found))
            return
        for one in joined:
            if one.start != window.start:
                del windows[one.start]
        windows[window.start] = window.encoded()
        if window.end <= self.time:  # it has fired, and does so again
            self._fire(key, window, rows)
            self._keep_until(key, window, self.time)
        else:
            self._ends.set(key, window.end)

    def _note_late(self, batch: pa.RecordBatch, is_late: Any, rows: _Rows) -> None:
        if not is_late.any():
            return
        some = batch.filter(pa.array(is_late))
        times = self._times(some).tolist()
        for key, at, found in zip(
            _keys(some, self.key.columns), times, self._singles(some), strict=True
        ):
            self._late.add(key, 1)
            if self._emits_late:
                rows.append((key, at, at, True, 0, found))

    def _singles(self, batch: pa.RecordBatch) -> Iterator[list[Any]]:
        """The aggregates of each record alone."""
        columns = [
            batch.column(one.column).to_pylist() if one.column else [1] * batch.num_rows
            for one in self._aggregates.values()
        ]
        return map(list, zip(*columns, strict=True))

    def _times(self, batch: pa.RecordBatch) -> Any:
        return batch.column(self._at).cast(pa.int64()).to_numpy()

    # ---- Windows

    def _is_gone(self, end: Any) -> Any:
        """Whether a window with this end is not kept any more."""
        return end <= max(self.time - self._lateness, FIRST)

    def _of(self, key: Any) -> list[_Window]:
        return [_decoded(start, stored) for start, stored in self._windows[key].items()]

    def _fire(self, key: Any, window: _Window, rows: _Rows) -> None:
        window.revision += 1
        window.is_new = False
        rows.append((key, window.start, window.end, False, window.revision, window.found))
        self._windows[key][window.start] = window.encoded()

    def _keep_until(self, key: Any, window: _Window, time: int) -> None:
        """A window is removed, or looked at again when it is to be."""
        if window.end <= time - self._lateness:
            windows = self._windows[key]
            del windows[window.start]
            if not windows:
                self._windows.discard(key)
        elif window.end <= time:
            self._ends.set(key, window.end + self._lateness)

    def _batch(self, rows: _Rows) -> pa.RecordBatch | None:
        if not rows:
            return None
        keys, starts, ends, late, revisions, found = zip(*rows, strict=True)
        columns: dict[str, Any] = {}
        types = [_TYPES[letter] for letter in key_type_text(self.key.type).strip("()")]
        for at, (name, of_type) in enumerate(zip(self.key.columns, types, strict=True)):
            one = [key[at] for key in keys] if len(types) > 1 else keys
            columns[name] = pa.array(one, of_type)
        columns |= {"start": pa.array(starts, pa.int64()), "end": pa.array(ends, pa.int64())}
        columns |= {"late": pa.array(late), "revision": pa.array(revisions, pa.int64())}
        for name, values in zip(self._aggregates, zip(*found, strict=True), strict=True):
            columns[name] = pa.array(values)
        return pa.record_batch(columns)


def _keys(batch: Any, columns: tuple[str, ...]) -> list[Any]:
    parts = [batch.column(name).to_pylist() for name in columns]
    return parts[0] if len(parts) == 1 else [*zip(*parts, strict=True)]


def _decoded(start: int, stored: bytes) -> _Window:
    return _Window(start, *msgspec.msgpack.decode(stored))
