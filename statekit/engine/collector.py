"""Collector: records that wait to be sent in larger batches. One for each sender; no sockets.

A batch of a source, dealt out to many receivers, becomes small batches, and each costs as much as a
large one. So a sender may collect them by size and time. What is not about records (watermarks,
barriers, marks) is sent after all that is collected: outputs.py takes it first.
"""

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import pyarrow as pa

Taken = list[tuple[str, pa.RecordBatch]]


class _Some(NamedTuple):
    """Of one receiver."""

    parts: list[pa.RecordBatch]
    rows: int

    def joined(self) -> pa.RecordBatch:
        if len(self.parts) == 1:
            return self.parts[0]
        return pa.Table.from_batches(self.parts).combine_chunks().to_batches()[0]


class Collector:
    def __init__(
        self, rows: int, timeout_ms: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """rows: of a batch that is large enough; 0: every batch is."""
        self._rows = rows
        self._timeout_s = timeout_ms / 1000
        self._clock = clock
        self._kept: dict[str, _Some] = {}
        self._due: float | None = None  # when the oldest has waited long enough

    def add(self, to: str, batch: pa.RecordBatch) -> Taken:
        """What is to be sent now."""
        if not self._rows:
            return [(to, batch)]
        some = self._kept.pop(to, _Some([], 0))
        taken: Taken = []
        if some.parts and not some.parts[0].schema.equals(batch.schema):
            taken, some = [(to, some.joined())], _Some([], 0)
        some = _Some([*some.parts, batch], some.rows + batch.num_rows)
        if some.rows >= self._rows:
            return [*taken, (to, some.joined())]
        self._kept[to] = some
        if self._due is None:
            self._due = self._clock() + self._timeout_s
        return taken

    def take(self) -> Taken:
        """Everything."""
        taken = [(to, some.joined()) for to, some in self._kept.items()]
        self._kept, self._due = {}, None
        return taken

    def take_due(self) -> Taken:
        """Everything, if it has waited long enough."""
        return self.take() if self.left == 0 else []

    @property
    def left(self) -> float | None:
        """Seconds until something has waited long enough; None if nothing waits."""
        return None if self._due is None else max(0.0, self._due - self._clock())
