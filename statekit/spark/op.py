"""StatefulOp: a function with typed state under each key, applied to the batches of a query.

The op describes what is to be done, and holds nothing else: it is pickled with the function that
foreachBatch is given, which Spark Connect unpickles elsewhere, and it may be used in several
sessions. batches.py does the work.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from statekit.errors import ArgumentError, shorten
from statekit.failpoints import visit
from statekit.format.compression import check_compression
from statekit.provider.open import open as open_provider
from statekit.spark import batches, forms
from statekit.spark.cursor import Timers, check_states, declare
from statekit.spark.output import schemas, unreadable
from statekit.spark.progress import Measured, Progress, tell
from statekit.spark.query import QueryBatch, read_batch
from statekit.spark.routing import check_event_time, plan_routing
from statekit.spark.shipping import pack
from statekit.spark.standing import BACKFILL, Accepts, BackfillGoneError
from statekit.spark.task import Batch, Functions
from statekit.storage import open_storage
from statekit.storage.cached import CACHE_BYTES

Parallelism: TypeAlias = int | Callable[[int], int] | None
Sink: TypeAlias = Callable[[Any, int], object]
OnProgress: TypeAlias = Callable[[Progress], object] | None

_ACCEPTED = ("gap", "rollback")
_METHODS = ("on_key", "on_batch", "on_timer")


class StatefulOp:
    """Applies a function with typed state to each key of a stream, exactly once.

    function: on_key(key, rows, st), called once for each key of a batch; it yields output rows.
        rows are the records of the key (len(rows), rows["column"], for row in rows), and st has
        the states under this key. Or an object with a method on_key or on_batch, and if you like
        on_timer, open() and close(), which are called around the work of each task.
    on_batch: instead, on_batch(keys, table, state) on all rows of a task, as an Arrow table; state
        has the states under all keys. It gives tables.
    on_timer: on_timer(key, timer, st), called for each timer that Spark's watermark has reached.
    key: the column, or columns, whose values are the key.
    output: the columns of the output, as Spark writes a schema: "user string, n long".
    state: the states by name: types, State(...) or Timers().
    path: where the state is kept: a directory or URL that the driver and all executors reach. Not
        needed where Spark keeps it: apply_in_pandas_with_state(), transform_with_state().
    output_path: where the output is kept for ever, for read_output(): a directory of its own.
        Unless given, output is kept as long as the version of the state.
    key_groups: a power of two. The parallelism can be at most that.
    subgroups: into how many leaves each key-group is cut, a power of two. Unless told, one, and
        more when the state has grown (geometry.py).
    event_time: the column with a row's time. Rows at or before the watermark are late: they are
        dropped (late="drop"), or not (late="keep").
    null_keys: "error", or "drop" to leave out rows with a null in their key.
    keep: how many versions are kept; as many as Spark keeps batches
        (spark.sql.streaming.minBatchesToRetain) unless told.
    cache, cache_bytes: if the path is not on a file system, each executor's host keeps copies of
        packs in this directory of its own (of temporary files, unless told), at most so many bytes.
        cache_bytes=0 keeps none.
    """

    def __init__(
        self,
        function: Any = None,
        *,
        key: str | Sequence[str],
        output: Any,
        state: Mapping[str, Any],
        path: "str | os.PathLike[str] | None" = None,
        on_batch: Any = None,
        on_timer: Any = None,
        output_path: "str | os.PathLike[str] | None" = None,
        key_groups: int = 128,
        subgroups: int | None = None,
        event_time: str | None = None,
        late: Literal["drop", "keep"] = "drop",
        null_keys: Literal["error", "drop"] = "error",
        keep: int | None = None,
        compression: str | None = None,
        cache: "str | os.PathLike[str] | None" = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.functions = _functions(function, on_batch, on_timer)
        self.key = (key,) if isinstance(key, str) else tuple(key) if _is_listing(key) else ()
        if not self.key or not all(isinstance(name, str) for name in self.key):
            raise ArgumentError(
                f"key={shorten(key)} names no column. Pass the name of one, or a list of names."
            )
        self.output = output
        self.states = check_states(state)
        if self.functions.on_timer is not None and not self._timers:
            raise ArgumentError(
                "there is an on_timer, but no state of timers that it could be called for. Add "
                'one, as in state={"expiry": statekit.spark.Timers()}.'
            )
        self.path = None if path is None else _place(path)
        self.output_path = None if output_path is None else _place(output_path)
        if self.output_path is not None and self.output_path == self.path:
            raise ArgumentError(
                f"path and output_path are both {self.path!r}. Give the output its own."
            )
        _check_choice("late", late, ("drop", "keep"))
        _check_choice("null_keys", null_keys, ("error", "drop"))
        check_compression(compression)
        self.key_groups = key_groups
        self.subgroups = subgroups
        self.event_time = event_time
        self.late = late
        self.null_keys = null_keys
        if keep is not None and (type(keep) is not int or keep < 2):
            raise ArgumentError(f"keep={shorten(keep)} is too little. Keep 2 versions or more.")
        self.keep = keep
        self.compression = compression
        self.cache = None if cache is None else os.path.abspath(cache)
        if type(cache_bytes) is not int or cache_bytes < 0:
            raise ArgumentError(
                f"cache_bytes={shorten(cache_bytes)} is no size. Pass an int, 0 to keep no copies."
            )
        self.cache_bytes = cache_bytes
        # Finds what is wrong with the states here, and not in a worker.
        with open_provider("memory:", key_groups=key_groups, subgroups=subgroups or 1) as kv:
            declare(kv, self.states, "s" if len(self.key) == 1 else f"({'s' * len(self.key)})")

    @property
    def _timers(self) -> list[str]:
        return [name for name, spec in self.states.items() if isinstance(spec, Timers)]

    # ---- In a query

    def foreach_batch(
        self,
        sink: Sink | None = None,
        *,
        checkpoint: "str | os.PathLike[str]",
        parallelism: Parallelism = None,
        accept: str | Sequence[str] = (),
        continue_from: str | None = None,
        on_progress: OnProgress = None,
    ) -> "ForeachBatch":
        """What writeStream.foreachBatch() is to be given.

        sink: sink(df, batch_id) is called with the output of each batch. After a crash it may be
        called again for the last batch, with exactly the same rows; write by batch id, then.
        checkpoint: the same as .option("checkpointLocation", ...).
        parallelism: the number of tasks, at most key_groups; or a function of the batch id that
        returns it. It may change with every batch. Unless given, spark.sql.shuffle.partitions.
        accept: "gap" if batches may be missing in the state, "rollback" if the state is to go back
        when Spark's checkpoint was rolled back.
        continue_from: the id of another query, whose state this query is to go on with.
        on_progress: on_progress(progress) is called after each batch, with its figures.
        """
        accepts = _accepts(accept, continue_from)
        return ForeachBatch(self, sink, os.fspath(checkpoint), parallelism, accepts, on_progress)

    def process(
        self,
        df: Any,
        batch_id: int,
        *,
        checkpoint: "str | os.PathLike[str]",
        parallelism: Parallelism = None,
        accept: str | Sequence[str] = (),
        continue_from: str | None = None,
    ) -> Any:
        """The output of a batch as a DataFrame, for a foreachBatch function of your own.

        The state is changed when this returns. The other arguments: see foreach_batch().
        """
        wanted = read_batch(df.sparkSession, os.fspath(checkpoint), batch_id)
        accepts = _accepts(accept, continue_from)
        return self._process(df, wanted, parallelism, accepts, Measured())[0]

    def backfill(self, df: Any, name: str, *, parallelism: Parallelism = None) -> Any:
        """Applies the op to a DataFrame that is no stream: to make the state that a query begins
        with. Returns the output.

        name: names this piece of work, such as "history 2025". A backfill that is there already is
        not done again, so a job that failed can be repeated; when the version that it made is kept
        no longer, only reading its output is an error. Once a query has gone on from the state,
        there is no other backfill any more.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{shorten(name)} is no name of a backfill. Pass a str.")
        wanted = QueryBatch(BACKFILL, 0, name, None)
        try:
            return self._process(df, wanted, parallelism, Accepts(), Measured())[0]
        except BackfillGoneError as error:
            spark = df.sparkSession
            return unreadable(spark, schemas(spark, self.output)[0], str(error))

    # ---- Where Spark keeps the state

    def apply_in_pandas_with_state(self, df: Any, output_mode: str = "append") -> Any:
        """The output as a streaming DataFrame, by Spark's applyInPandasWithState().

        All states of a key are one binary value in Spark's own state store; path is not used.
        PySpark 3.5 has it, too.
        """
        return forms.apply_in_pandas_with_state(self, df, output_mode)

    def transform_with_state(
        self, df: Any, output_mode: str = "append", *, pandas: bool = False
    ) -> Any:
        """The output as a streaming DataFrame, by Spark's transformWithState(); in real-time mode,
        too.

        All states of a key are one binary value in Spark's own state store (RocksDB); path is not
        used. pandas: by transformWithStateInPandas(), which PySpark 4.0 has already.
        """
        return forms.transform_with_state(self, df, output_mode, pandas)

    def _process(
        self,
        df: Any,
        wanted: QueryBatch,
        parallelism: Parallelism,
        accepts: Accepts,
        measured: Measured,
        is_output_wanted: bool = True,
    ) -> tuple[Any, Progress]:
        spark = df.sparkSession
        if self.path is None:
            raise ArgumentError(
                "this StatefulOp has no path where its state is kept. Pass path=, or use "
                "transform_with_state() or apply_in_pandas_with_state(), where Spark keeps it."
            )
        schema, arrow = schemas(spark, self.output)
        if self.event_time is not None:
            check_event_time(df.schema, self.event_time)
        batch = Batch(
            functions=self.functions,
            states=self.states,
            key=self.key,
            key_type=plan_routing(df.schema, self.key).key_type,
            output=arrow,
            place=self.path,
            number=0,
            base=None,
            key_groups=self.key_groups,
            subgroups=self.subgroups,  # None: by size
            ranges=(),
            is_empty=False,
            batch_id=wanted.batch,
            watermark=wanted.watermark,
            event_time=self.event_time,
            late=self.late,
            null_keys=self.null_keys,
            compression=self.compression,
            output_path=self.output_path,
            cache=self.cache,
            cache_bytes=self.cache_bytes,
        )
        tasks = self._tasks(spark, parallelism, wanted.batch)
        keep = self.keep
        if keep is None:
            keep = int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100")) + 1
        return batches.run_batch(
            df, wanted, batch, tasks, accepts, keep, schema, _ship, measured, is_output_wanted
        )

    def _tasks(self, spark: Any, parallelism: Parallelism, batch_id: int) -> int:
        if parallelism is None:
            chosen = int(spark.conf.get("spark.sql.shuffle.partitions", "200"))
            return min(chosen, self.key_groups)
        found = parallelism(batch_id) if callable(parallelism) else parallelism
        if type(found) is not int or not 1 <= found <= self.key_groups:
            raise ArgumentError(
                f"parallelism={shorten(found)} for batch {batch_id}. Pass an int from 1 to "
                f"{self.key_groups}, which is the number of key-groups, or a function of the batch "
                "id that returns one."
            )
        return found

    def __repr__(self) -> str:
        states = ", ".join(self.states)
        place = "Spark's own store" if self.path is None else repr(self.path)
        return f"<StatefulOp by {', '.join(self.key)}: {states}; in {place}>"


@dataclass(frozen=True)
class ForeachBatch:
    """A function for writeStream.foreachBatch(); see StatefulOp.foreach_batch()."""

    op: StatefulOp
    sink: Sink | None
    checkpoint: str
    parallelism: Parallelism
    accepts: Accepts
    on_progress: OnProgress = None

    def __call__(self, df: Any, batch_id: int) -> None:
        measured = Measured()
        is_wanted = self.sink is not None  # else no DataFrame is made, which takes some 10 ms
        with measured.phase("total"):
            with measured.phase("plan"):
                wanted = read_batch(df.sparkSession, self.checkpoint, batch_id)
            output, progress = self.op._process(
                df, wanted, self.parallelism, self.accepts, measured, is_wanted
            )
            visit("spark.sink")
            if self.sink is not None:
                with measured.phase("sink"):
                    self.sink(output, batch_id)
            visit("spark.sunk")
        if self.on_progress is not None:
            tell(self.on_progress, replace(progress, seconds=dict(measured.seconds)))


# ---- What is checked


def _functions(function: Any, on_batch: Any, on_timer: Any) -> Functions:
    instance = None
    on_key = function
    if function is not None and (hasattr(function, "on_key") or hasattr(function, "on_batch")):
        if isinstance(function, type):
            raise ArgumentError(
                f"{function.__name__} is a class. Pass an object of it: {function.__name__}(...)."
            )
        instance = function
        on_key = getattr(function, "on_key", None)
        on_batch = getattr(function, "on_batch", on_batch)
        on_timer = getattr(function, "on_timer", on_timer)
    if (on_key is None) == (on_batch is None):
        raise ArgumentError(
            "a StatefulOp has one function: on_key(key, rows, st), or "
            "on_batch=function(keys, table, state). Pass one of them."
        )
    for name, one in zip(_METHODS, (on_key, on_batch, on_timer), strict=True):
        if one is not None and not callable(one):
            raise ArgumentError(f"{name}={shorten(one)} is no function.")
    return Functions(on_key, on_batch, on_timer, instance)


def _is_listing(key: object) -> bool:
    return isinstance(key, Sequence) and not isinstance(key, bytes | bytearray)


def _place(path: Any) -> str:
    """A path as all processes will understand it: absolute."""
    return open_storage(path).url


def _check_choice(name: str, given: Any, choices: Sequence[str]) -> None:
    if given not in choices:
        raise ArgumentError(f"{name}={shorten(given)} is neither {' nor '.join(choices)}.")


def _accepts(accept: str | Sequence[str], continue_from: str | None) -> Accepts:
    given = (accept,) if isinstance(accept, str) else tuple(accept)
    for one in given:
        if one not in _ACCEPTED:
            raise ArgumentError(
                f"accept={shorten(one)} is nothing that could be accepted. Pass "
                f"{' or '.join(map(repr, _ACCEPTED))}."
            )
    return Accepts("gap" in given, "rollback" in given, continue_from)


# ---- What travels


def _ship(batch: Batch) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that Spark calls in its workers."""
    arrived = pack(batch)

    def run(pieces: Iterator[Any]) -> Iterator[Any]:
        data = arrived()
        from statekit.spark.task import run as run_task

        return run_task(data, pieces)

    return run
