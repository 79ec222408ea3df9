"""StatefulOp: a function with typed state under each key, applied to the batches of a query.

The op describes what is to be done, and holds nothing else: it is pickled with the function that
foreachBatch is given, which Spark Connect unpickles elsewhere, and it may be used in several
sessions. batches.py does the work.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from statekit.errors import ArgumentError, StatefulOpError, package, shorten
from statekit.failpoints import visit
from statekit.format.compression import check_compression
from statekit.provider.open import open as open_provider
from statekit.spark import batches
from statekit.spark.cursor import Timers, check_states, declare
from statekit.spark.query import QueryBatch, read_batch
from statekit.spark.routing import plan_routing
from statekit.spark.task import Batch, Functions
from statekit.storage import open_storage
from statekit.storage.cached import CACHE_BYTES
from statekit.version import __version__

Parallelism: TypeAlias = int | Callable[[int], int] | None
Sink: TypeAlias = Callable[[Any, int], object]

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
    path: where the state is kept: a directory or URL that the driver and all executors reach.
    output_path: where the output is kept for ever, for read_output(). Unless given, output is kept
        as long as the version of the state.
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
        path: "str | os.PathLike[str]",
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
        self.path = _place(path)
        self.output_path = None if output_path is None else _place(output_path)
        if self.output_path == self.path:
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
        """
        return ForeachBatch(
            self, sink, os.fspath(checkpoint), parallelism, _accepts(accept, continue_from)
        )

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
        return self._process(df, wanted, parallelism, _accepts(accept, continue_from))

    def backfill(self, df: Any, name: str, *, parallelism: Parallelism = None) -> Any:
        """Applies the op to a DataFrame that is no stream: to make the state that a query begins
        with. Returns the output.

        name: names this piece of work, such as "history 2025". A backfill that is there already is
        not done again, so a job that failed can be repeated. Once a query has gone on from the
        state, there is no backfill any more.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{shorten(name)} is no name of a backfill. Pass a str.")
        wanted = QueryBatch(batches.BACKFILL, 0, name, None)
        return self._process(df, wanted, parallelism, batches.Accepts())

    def _process(
        self,
        df: Any,
        wanted: QueryBatch,
        parallelism: Parallelism,
        accepts: batches.Accepts,
        is_output_wanted: bool = True,
    ) -> Any:
        spark = df.sparkSession
        schema, arrow = _schemas(spark, self.output)
        if self.event_time is not None:
            _check_event_time(df.schema, self.event_time)
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
            df, wanted, batch, tasks, accepts, keep, schema, _ship, is_output_wanted
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
        return f"<StatefulOp by {', '.join(self.key)}: {states}; in {self.path!r}>"


@dataclass(frozen=True)
class ForeachBatch:
    """A function for writeStream.foreachBatch(); see StatefulOp.foreach_batch()."""

    op: StatefulOp
    sink: Sink | None
    checkpoint: str
    parallelism: Parallelism
    accepts: batches.Accepts

    def __call__(self, df: Any, batch_id: int) -> None:
        wanted = read_batch(df.sparkSession, self.checkpoint, batch_id)
        is_wanted = self.sink is not None  # else no DataFrame is made, which takes some 10 ms
        output = self.op._process(df, wanted, self.parallelism, self.accepts, is_wanted)
        visit("spark.sink")
        if self.sink is not None:
            self.sink(output, batch_id)
        visit("spark.sunk")


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


def _accepts(accept: str | Sequence[str], continue_from: str | None) -> batches.Accepts:
    given = (accept,) if isinstance(accept, str) else tuple(accept)
    for one in given:
        if one not in _ACCEPTED:
            raise ArgumentError(
                f"accept={shorten(one)} is nothing that could be accepted. Pass "
                f"{' or '.join(map(repr, _ACCEPTED))}."
            )
    return batches.Accepts("gap" in given, "rollback" in given, continue_from)


def _check_event_time(schema: Any, name: str) -> None:
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if types.get(name) not in ("timestamp", "timestamp_ntz"):
        raise ArgumentError(
            f"event_time={name!r} is {types.get(name, 'no column of the batch')}. Name the column "
            "of timestamps that withWatermark() was given."
        )


# ---- What travels


def _schemas(spark: Any, output: Any) -> tuple[Any, Any]:
    """The schema of the output, for Spark and for Arrow."""
    if isinstance(output, str):
        return _parsed(spark, output, spark.conf.get("spark.sql.timestampType", "TIMESTAMP_LTZ"))
    from pyspark.sql.pandas.types import to_arrow_schema

    return output, to_arrow_schema(output)


_parsed_before: dict[tuple[str, str], tuple[Any, Any]] = {}  # it takes Spark some milliseconds


def _parsed(spark: Any, text: str, timestamps: str) -> tuple[Any, Any]:
    from pyspark.sql.pandas.types import to_arrow_schema

    if found := _parsed_before.get((text, timestamps)):
        return found
    try:
        schema = spark.createDataFrame([], text).schema
    except Exception as error:
        raise ArgumentError(
            f"output={text!r} is no schema that Spark understands: {shorten(str(error))}. Write it "
            'as "name type, name type", for example "user string, n long".'
        ) from error
    found = _parsed_before[text, timestamps] = schema, to_arrow_schema(schema)
    return found


def _ship(batch: Batch) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that Spark calls in its workers.

    Spark pickles it by value, since it is made here; so it can tell what is wrong where statekit
    cannot be imported.
    """
    package("pyarrow", "a StatefulOp")
    from pyspark import cloudpickle

    try:
        data = cloudpickle.dumps(batch)
    except Exception as error:  # of any __reduce__
        raise StatefulOpError(
            f"the function of the StatefulOp cannot be sent to the executors: {error} It, or "
            "something that it refers to from outside, cannot be pickled: a session, a "
            "connection, a lock, an open file. Make that inside the function, or in open() of the "
            "class form, which is called in the executor."
        ) from error
    version = __version__

    def run(pieces: Iterator[Any]) -> Iterator[Any]:
        try:
            import statekit
        except ImportError as error:
            import socket
            import sys

            raise RuntimeError(
                f"statekit cannot be imported on {socket.gethostname()} ({error}). A StatefulOp "
                f"needs statekit {version} where its tasks run, too: install it for "
                f"{sys.executable} on all executors, for example with "
                f"`pip install statekit[spark]=={version}`."
            ) from None
        if statekit.__version__ != version:
            import socket

            raise RuntimeError(
                f"statekit {statekit.__version__} is installed on {socket.gethostname()}, and the "
                f"driver has {version}. Install the same version on the driver and all executors."
            )
        from statekit.spark.task import run as run_task

        return run_task(data, pieces)

    return run
