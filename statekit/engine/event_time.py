"""Event time: the watermarks of a source, from a column of its records.

The watermark is the latest time that was seen, less a grace: a record may be so much earlier than
the latest one before it, and not be late. It is sent after a batch, and not more often than once
in an interval, for it goes to every task of the next stage. The latest time is part of the source's
position, so that a job that goes on from a checkpoint does not begin before all time.
"""

from time import monotonic
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from statekit.engine.items import FIRST
from statekit.engine.settings import Settings
from statekit.errors import EngineError


class EventTime(NamedTuple):
    """What a job says of the time of its source; None: what Settings say."""

    column: str
    grace_ms: int | None = None
    interval_ms: int | None = None


class Clock:
    """The time of a source without a column: it gives watermarks itself, or has none."""

    latest = FIRST

    def after(self, batch: pa.RecordBatch | None) -> int | None:
        """The watermark to be sent after a batch, if any."""
        return None


class ColumnClock(Clock):
    def __init__(self, column: str, grace_ms: int, interval_ms: int, latest: int) -> None:
        self.latest = latest
        self._column = column
        self._grace = grace_ms
        self._interval_s = interval_ms / 1000
        self._next = 0.0

    def after(self, batch: pa.RecordBatch | None) -> int | None:
        if batch is None or not batch.num_rows:
            return None
        if self._column not in batch.schema.names:
            raise EngineError(
                f"event time is column {self._column!r}, and the records have "
                f"{', '.join(batch.schema.names)}. Name one of these in event_time()."
            )
        found = pc.max(batch.column(self._column).cast(pa.int64())).as_py()
        self.latest = max(self.latest, FIRST if found is None else found)
        now = monotonic()
        if now < self._next or self.latest == FIRST:
            return None
        self._next = now + self._interval_s
        return self.latest - self._grace


def clock(time: EventTime | None, settings: Settings, latest: int) -> Clock:
    """latest: the time that the source had seen where it goes on."""
    if time is None:
        return Clock()
    grace = settings.grace_ms if time.grace_ms is None else time.grace_ms
    interval = settings.watermark_interval_ms if time.interval_ms is None else time.interval_ms
    return ColumnClock(time.column, grace, interval, latest)
