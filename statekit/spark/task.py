"""A task: one range of key-groups, one micro-batch. What runs in Spark's Python workers.

    1. the provider    restored from the base, lazily: only what the batch touches is read, and
                       timers that may be due (due.py)
    2. the rows        grouped by key; the function is called for each key
    3. the timers      that are due at the watermark, on empty batches too
    4. the output      one file
    5. the part        of the next checkpoint; nothing of this task counts before the driver has
                       published it

A task may be killed at any moment, run again, or run twice at once. It writes files named by their
contents and nothing else, and the driver publishes the part of the attempt whose report Spark
gives it. So a function need not be deterministic: the attempt that is published counts.

What is wrong with the data or the function's output would be as wrong in a second attempt. Such an
error travels in the report, so that the user gets it at once and as it is, without Spark's four
attempts and its own stack around it.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import pyarrow as pa

import statekit as sk
from statekit.checkpoint.parts import Part
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import MissingFileError, StatefulOpError, shorten
from statekit.spark.counting import CountingStorage
from statekit.spark.cursor import Cursor, Fired, Page, State, Timers, declare, make_cursor, set_key
from statekit.spark.due import NEVER, Reported, Times, leaves_of, slices_to_read, times_after
from statekit.spark.output import OutputFile, batches_to_table, rows_to_table, write_output
from statekit.spark.rows import Grouped, Rows, column_of, count_nulls, drop_nulls, split_late
from statekit.spark.shipping import unpack
from statekit.storage import Storage, open_storage
from statekit.storage.cached import CACHE_BYTES, CachedStorage, host_directory

REPORT_SCHEMA = "report string"


@dataclass(frozen=True)
class Functions:
    """What the user wants to be called. Made in the driver; the functions travel with it."""

    on_key: Any = None
    on_batch: Any = None
    on_timer: Any = None
    instance: Any = None  # that the functions are methods of: it may have open() and close()


@dataclass(frozen=True)
class Batch:
    """A micro-batch, as its tasks are told about it."""

    functions: Functions
    states: dict[str, State | Timers]
    key: tuple[str, ...]
    key_type: str
    output: pa.Schema
    place: str
    number: int  # of the checkpoint that is being made
    base: Checkpoint | None
    key_groups: int
    subgroups: Any  # int; None in the driver, before it is chosen by size
    ranges: tuple[range, ...]  # of key-groups, one for each partition
    is_empty: bool  # the partitions have no rows of the batch
    batch_id: int
    watermark: int | None
    event_time: str | None
    late: str
    null_keys: str
    compression: str | None
    output_path: str | None
    due: Times = field(default_factory=dict)  # of the base: when timers are due next
    cache: str | None = None  # where each host keeps copies of packs; None: in its usual place
    cache_bytes: int = CACHE_BYTES


@dataclass
class Report:
    """What a task tells the driver."""

    at: int  # the first key-group of its range
    error: str | None = None
    part: str = ""
    output: OutputFile | None = None
    host: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    due: Reported = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        found = cls(**json.loads(text))
        if found.output is not None:
            found.output = OutputFile(*found.output)
        return found


def run(data: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Called by Spark in a worker, for one partition."""
    from pyspark import TaskContext

    batch: Batch = unpack(data)
    context = TaskContext.get()
    assert context is not None, "a task runs in a worker of Spark"
    groups = batch.ranges[context.partitionId()]
    pieces = [piece for piece in batches if piece.num_rows]
    report = run_range(batch, groups, [] if batch.is_empty else pieces)
    yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})


def run_range(batch: Batch, groups: range, pieces: list[pa.RecordBatch]) -> Report:
    """One range of key-groups. Everything but Spark."""
    report = Report(groups.start, host=socket.gethostname())
    storage = _storage(batch)
    try:
        slices = _slices_to_read(batch, groups)
        reads = CountingStorage(storage)
        started = perf_counter()
        with _provider(batch, groups, cast(Storage, reads), slices) as kv:
            restored = perf_counter()
            _Run(batch, kv, report, storage).run(pieces)
            report.figures["bytes_read"] = reads.bytes_read
            report.figures["restore_seconds"] = restored - started
            report.due = {
                name: times_after(
                    kv[name]._raw, batch.due.get(name), was_read, groups, batch.key_groups,
                    batch.subgroups,
                )
                for name, was_read in slices.items()
            }  # fmt: skip
    except StatefulOpError as error:
        report.error = str(error)
    except MissingFileError as error:
        error.add_note(
            f"This task ran on {report.host}. If that file is there in the driver, this host does "
            f"not see the same {batch.place!r}: the path of a StatefulOp must be on storage that "
            "the driver and all executors reach under the same name."
        )
        raise
    return report


def _storage(batch: Batch) -> Storage:
    """Where the state is. Of a storage that is not here, with copies on this host."""
    storage = open_storage(batch.place)
    if storage.is_local or not batch.cache_bytes:
        return storage
    return CachedStorage(storage, batch.cache or host_directory(), batch.cache_bytes)


def _slices_to_read(batch: Batch, groups: range) -> dict[str, set[int]]:
    """Of each state of timers: where some may be due. Without a base there are none, which are as
    good as read.
    """
    watermark = NEVER if batch.base is None else batch.watermark
    return {
        name: slices_to_read(batch.due.get(name), groups, batch.key_groups, watermark)
        for name, spec in batch.states.items()
        if isinstance(spec, Timers)
    }


def _provider(batch: Batch, groups: range, storage: Storage, slices: dict[str, set[int]]) -> Any:
    if batch.base is None:
        kv = sk.open(
            "memory:", key_groups=batch.key_groups, subgroups=batch.subgroups, owned=groups
        )
    else:
        base = batch.base.through(storage)
        kv = sk.restore(base, key_groups=groups, subgroups=batch.subgroups, background=False)
    leaves = {
        name: leaves_of(some, groups, batch.key_groups, batch.subgroups)
        for name, some in slices.items()
    }
    declare(kv, batch.states, batch.key_type, leaves)
    if batch.watermark is not None:
        kv.advance_watermark(batch.watermark)
    return kv


class _Run:
    """What is done with the provider of a range."""

    def __init__(self, batch: Batch, kv: Any, report: Report, storage: Storage) -> None:
        self.batch = batch
        self.storage = storage
        self.kv = kv
        self.report = report
        self.figures: dict[str, float] = {}
        self.cursor: Cursor = make_cursor(kv, batch.states, batch.watermark, batch.batch_id)
        self.made: list[Any] = []  # rows that functions of a key gave
        self.tables: list[pa.Table] = []  # what a function of whole batches gave

    def run(self, pieces: list[pa.RecordBatch]) -> None:
        batch, instance = self.batch, self.batch.functions.instance
        started = perf_counter()
        if hasattr(instance, "open"):
            instance.open()
        try:
            if pieces:
                self._process(pa.Table.from_batches(pieces))
            self._fire()
            table = rows_to_table(self.made, batch.output)
            table = pa.concat_tables([*self.tables, table])
            processed = perf_counter()
            at = f"{self.report.at:05d}"
            self.report.output = write_output(
                table, batch.place, batch.output_path, batch.number, at
            )
            part: Part = self.kv.write_part(
                self.storage, number=batch.number, compression=batch.compression
            )
        finally:
            if hasattr(instance, "close"):
                instance.close()
        self.report.part = part.to_json()
        self.figures["bytes"] = part.bytes
        self.figures["output_rows"] = table.num_rows
        if isinstance(self.storage, CachedStorage):
            self.figures["cache_hits"] = self.storage.hits
            self.figures["cache_misses"] = self.storage.misses
        self.report.figures = {
            **self.figures,
            "process_seconds": processed - started,
            "write_seconds": perf_counter() - processed,
        }

    def _process(self, table: pa.Table) -> None:
        batch = self.batch
        self.figures["rows"] = table.num_rows
        if nulls := count_nulls(table, batch.key):
            if batch.null_keys == "error":
                raise StatefulOpError(
                    f"{nulls} of {table.num_rows} rows of a task have a null in their key "
                    f"({', '.join(batch.key)}). Drop them, or give them a key, before the "
                    'StatefulOp; or pass null_keys="drop" to have them left out.'
                )
            self.figures["null_keys"] = nulls
            table = drop_nulls(table, batch.key)
        if batch.event_time is not None and batch.watermark is not None and batch.late == "drop":
            in_time, late = split_late(table, batch.event_time, batch.watermark)
            if late:
                self.figures["late"] = late
                table = table.filter(in_time)
        if not table.num_rows:
            return
        if batch.functions.on_batch is not None:
            self._call_batch(table)
        else:
            self._call_keys(Grouped(table, batch.key))

    def _call_batch(self, table: pa.Table) -> None:
        batch = self.batch
        table = table.combine_chunks()
        columns = [table.column(name).combine_chunks() for name in batch.key]
        keys = columns[0] if len(columns) == 1 else tuple(columns)
        given = batch.functions.on_batch(keys, table, _States(self.kv, batch.states))
        self.tables.append(batches_to_table(given, batch.output))

    def _call_keys(self, grouped: Grouped) -> None:
        on_key, cursor, made = self.batch.functions.on_key, self.cursor, self.made
        keys, bounds, columns = grouped.keys(), grouped.bounds, grouped.columns
        self.figures["keys"] = len(keys)
        cursor._turn(Page(grouped.column))
        cells = cursor._cells
        given = None
        try:
            for at, key in enumerate(keys):
                set_key(cursor, key)
                for cell in cells:
                    cell._at = at
                given = on_key(key, Rows(columns, bounds[at], bounds[at + 1]), cursor)
                if given is not None:
                    made.extend(given)
        except Exception as error:
            raise explained(error, "on_key", key, given) from None
        cursor._flush()

    def _fire(self) -> None:
        """Calls on_timer for what is due. What that sets is for the next batch."""
        batch, cursor = self.batch, self.cursor
        if batch.watermark is None:
            return
        due = [
            (timer.due, name, timer.key)
            for name, spec in batch.states.items()
            if isinstance(spec, Timers)
            for timer in self.kv[name].pop_due(batch.watermark)
        ]
        if not due:
            return
        on_timer = batch.functions.on_timer
        if on_timer is None:
            raise StatefulOpError(
                f"{len(due)} timers are due, and there is no on_timer to be called for them. Pass "
                "on_timer=function(key, timer, st)."
            )
        due.sort()
        keys: dict[Any, int] = {}
        for _, _, key in due:
            keys.setdefault(key, len(keys))
        self.figures["timers"] = len(due)
        cursor._turn(Page(column_of([*keys], batch.key_type)))
        given = None
        try:
            for at, name, key in due:
                set_key(cursor, key)
                for cell in cursor._cells:
                    cell._at = keys[key]
                given = on_timer(key, Fired(name, at), cursor)
                if given is not None:
                    self.made.extend(given)
        except Exception as error:
            raise explained(error, "on_timer", key, given) from None
        cursor._flush()


def explained(error: Exception, function: str, key: Any, given: Any) -> Exception:
    """The error of a function of a key, with the key. given: what it gave last."""
    if given is not None and not hasattr(given, "__iter__"):
        return StatefulOpError(
            f"{function} of key {shorten(key)} gave {shorten(given)}. It must yield rows, or "
            "return a list of rows or None; a row is a tuple of the declared output columns."
        )
    error.add_note(f"This was {function} of key {shorten(key)}.")
    return error


class _States:
    """The states of an op as attributes, for on_batch: each with all keys of the task."""

    def __init__(self, kv: Any, names: Any) -> None:
        self._kv = kv
        self._names = [*names]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(
                f"there is no state {name!r}. Declared are: {', '.join(self._names)}."
            )
        return self._kv[name]

    def __getitem__(self, name: str) -> Any:
        return self._kv[name]
