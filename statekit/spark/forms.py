"""StatefulOp.apply_in_pandas_with_state() and .transform_with_state(), in the driver.

processor.py says what the workers do, carried.py how rows get there.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from statekit.errors import ArgumentError, MissingPackageError
from statekit.native.ttl import as_ttl
from statekit.spark.carried import Carried, carry
from statekit.spark.cursor import State, Timers
from statekit.spark.dataframes import spark_version
from statekit.spark.output import schemas
from statekit.spark.processor import TTL_SLACK_MS, Plan
from statekit.spark.routing import check_event_time
from statekit.spark.shipping import pack

if TYPE_CHECKING:
    from statekit.spark.op import StatefulOp

_VALUE = "value binary"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"


def apply_in_pandas_with_state(op: "StatefulOp", df: Any, output_mode: str) -> Any:
    carried, plan, schema = _plan(op, df)
    arrived = pack(plan)
    workers: list[Any] = []

    def call(key: Any, frames: Iterable[Any], state: Any) -> Iterator[Any]:
        if not workers:
            data = arrived()
            from statekit.spark.processor import Worker
            from statekit.spark.shipping import unpack

            workers.append(Worker(unpack(data)))
        from statekit.spark.processor import call_with_state

        return call_with_state(workers[0], key, frames, state)

    timeout = "NoTimeout"
    if plan.is_in_event_time:
        timeout = "EventTimeTimeout"
    elif _all_live(op, "processing") is not None:
        timeout = "ProcessingTimeTimeout"
    return carried.frame.groupBy(*carried.key).applyInPandasWithState(
        call, schema, _VALUE, output_mode, timeout
    )


def transform_with_state(op: "StatefulOp", df: Any, output_mode: str, pandas: bool) -> Any:
    major, minor = spark_version()
    if (major, minor) < (4, 0) or (not pandas and (major, minor) < (4, 1)):
        what = (
            "transformWithState, which came with 4.0"
            if major < 4
            else "transformWithState of Rows, which came with 4.1; pass pandas=True"
        )
        raise MissingPackageError(
            f"PySpark {major}.{minor} has no {what}. Use foreach_batch() or "
            "apply_in_pandas_with_state(), or update PySpark."
        )
    _check_provider(df.sparkSession)
    carried, plan, schema = _plan(op, df)
    lives = None if plan.is_in_event_time else _all_live(op, "processing")
    mode = "none"
    if plan.is_in_event_time:
        mode = "eventtime"
    elif lives is not None:
        mode = "processingtime"
    grouped = carried.frame.groupBy(*carried.key)
    method = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
    processor = _processor(plan, pandas, None if lives is None else lives + TTL_SLACK_MS)
    return method(processor, schema, output_mode, mode)


def _processor(plan: Plan, pandas: bool, ttl_ms: int | None) -> Any:
    from pyspark.sql.streaming import StatefulProcessor

    arrived = pack(plan)

    class OpProcessor(StatefulProcessor):  # type: ignore[misc]
        """Pickled by value; see shipping.py."""

        def init(self, handle: Any) -> None:
            data = arrived()
            from statekit.spark.processor import Steps, Worker
            from statekit.spark.shipping import unpack

            self.worker = Worker(unpack(data))
            value = handle.getValueState("statekit", _VALUE, ttl_ms)
            self.steps = Steps(self.worker, value, handle)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: N802, N803
            pieces = self.worker.pieces
            table = pieces.from_frames(rows) if pandas else pieces.from_rows(rows)
            return self._given(self.steps.run(key, table, timerValues))

        def handleExpiredTimer(  # noqa: N802
            self,
            key: Any,
            timerValues: Any,  # noqa: N803
            expiredTimerInfo: Any,  # noqa: N803
        ) -> Any:
            table = self.worker.pieces.from_rows(())
            return self._given(self.steps.run(key, table, timerValues))

        def _given(self, table: Any) -> Any:
            if pandas:
                from statekit.spark.processor import to_frames

                return to_frames(table)
            from pyspark.sql import Row

            return iter([Row(**row) for row in table.to_pylist()])

        def close(self) -> None:
            self.worker.close()

    return OpProcessor()


# ---- What both need


def _plan(op: "StatefulOp", df: Any) -> tuple[Carried, Plan, Any]:
    if op.functions.on_key is None:
        raise ArgumentError(
            "a function of whole batches cannot run where Spark keeps the state: it is called for "
            "one key at a time there. Give the StatefulOp an on_key, or use foreach_batch()."
        )
    if op.event_time is not None:
        check_event_time(df.schema, op.event_time)
    if not df.isStreaming:
        raise ArgumentError("this DataFrame is no stream. For a batch, use backfill().")
    schema, arrow = schemas(df.sparkSession, op.output)
    carried = carry(df, op.key, op.null_keys)
    needs = op.event_time is not None or _needs_event_time(op)
    if needs and not carried.has_watermark:
        raise ArgumentError(
            "the StatefulOp has timers, a time to live in event time, or event_time=, and the "
            "stream has no watermark. Call withWatermark(column, delay) on it first."
        )
    plan = Plan(
        op.functions,
        op.states,
        carried.key_type,
        carried.fields,
        arrow,
        op.event_time,
        op.late,
        needs,
    )
    return carried, plan, schema


def _needs_event_time(op: "StatefulOp") -> bool:
    return any(
        isinstance(spec, Timers) or ((ttl := as_ttl(spec.ttl)) is not None and ttl.time == "event")
        for spec in op.states.values()
    )


def _all_live(op: "StatefulOp", clock: str) -> int | None:
    """The longest time to live, in ms, if all states have one by this clock."""
    longest = 0
    for spec in op.states.values():
        life = as_ttl(spec.ttl) if isinstance(spec, State) else None
        if life is None or life.time != clock:
            return None
        longest = max(longest, life.after_ms)
    return longest or None


def _check_provider(spark: Any) -> None:
    name = str(spark.conf.get(_PROVIDER, ""))
    if "RocksDB" not in name:
        raise ArgumentError(
            f"transformWithState needs Spark's RocksDB state store, and {_PROVIDER} is "
            f"{name or 'not set'}. Set it to org.apache.spark.sql.execution.streaming.state."
            "RocksDBStateStoreProvider before the query first starts."
        )
