"""Operators: what a keyed stage does with its records and its state. Users write them."""

from typing import TYPE_CHECKING

import pyarrow as pa

from statekit.engine.items import FIRST
from statekit.engine.records import Key

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider


class KeyedOperator:
    """What a keyed stage does. Each task has one, with the state of its key-groups.

    A task calls these one after the other, never two at once.
    """

    key: Key  # of its stage; it is set before open() is called
    time: int = FIRST  # how far event time has come

    def open(self, kv: "KVProvider") -> None:
        """The task begins: declare states here, and change nothing."""

    def process(self, batch: pa.RecordBatch) -> "pa.RecordBatch | None":
        """Records of this task's key-groups, in order per key; what it gives goes on."""
        raise NotImplementedError

    def process_from(self, stage: str, batch: pa.RecordBatch) -> "pa.RecordBatch | None":
        """The same, for a stage with several inputs: `stage` is where they come from."""
        return self.process(batch)

    def advance(self, time: int) -> "pa.RecordBatch | None":
        """Event time has come so far: no earlier record will come."""
        return None
