"""Records as Arrow batches: their key-groups, and who gets which.

A batch is dealt out with one stable sort and one take, whatever the number of receivers: stable,
so that records of a key keep their order. The key-groups of a batch are computed when somebody
asks, and once.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from statekit.errors import EngineError
from statekit.keys import KeyType, key_codec
from statekit.native.columns import route


@dataclass(frozen=True)
class Key:
    """Which columns are the key of a stage, and how many key-groups it has."""

    columns: tuple[str, ...]
    type: KeyType
    key_groups: int

    def groups_of(self, batch: pa.RecordBatch) -> Any:
        """The key-group of each record: a NumPy array."""
        for name in self.columns:
            if name not in batch.schema.names:
                raise EngineError(
                    f"the key is column {name!r}, and the records have "
                    f"{', '.join(batch.schema.names) or 'no columns'}. Name one of these in "
                    "key_by()."
                )
        some = tuple(batch.column(name) for name in self.columns)
        codec = key_codec(self.type)
        return np.asarray(route(some if codec.is_tuple else some[0], codec, self.key_groups))


class ArrowRecords:
    """A batch on its way to a keyed stage."""

    def __init__(self, batch: pa.RecordBatch, key: Key) -> None:
        self.batch = batch
        self.key = key

    @property
    def bytes(self) -> int:
        return int(self.batch.get_total_buffer_size())

    @cached_property
    def _groups(self) -> Any:
        return self.key.groups_of(self.batch)

    def groups(self) -> set[int]:
        return set(np.unique(self._groups).tolist())

    def split(self, groups: Collection[int]) -> "tuple[ArrowRecords | None, ArrowRecords | None]":
        is_in = np.isin(self._groups, np.fromiter(groups, np.uint32, len(groups)))
        return self._only(is_in), self._only(~is_in)

    def _only(self, is_in: Any) -> "ArrowRecords | None":
        if is_in.all():
            return self
        return ArrowRecords(self.batch.filter(pa.array(is_in)), self.key) if is_in.any() else None


class Router:
    """Deals batches out by the owners of key-groups."""

    def __init__(self, key: Key, owners: Sequence[str], counts: Any = None) -> None:
        """counts: an array of records by key-group, to be added to."""
        self.key = key
        self._counts = np.zeros(len(owners), np.int64) if counts is None else counts
        self._names = [*dict.fromkeys(owners)]
        at = {name: index for index, name in enumerate(self._names)}
        # Sixteen bits: NumPy's stable sort of these is a radix sort.
        self._index = np.array([at[owner] for owner in owners], np.uint16)

    def deal(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The part of each receiver, in the order of the batch."""
        if batch.num_rows == 0:
            return
        groups = self.key.groups_of(batch)
        self._counts += np.bincount(groups, minlength=len(self._counts))
        to = self._index[groups]
        counts = np.bincount(to, minlength=len(self._names))
        if counts.max() == batch.num_rows:
            yield self._names[int(to[0])], batch
            return
        dealt = batch.take(pa.array(np.argsort(to, kind="stable")))
        start = 0
        for name, count in zip(self._names, counts.tolist(), strict=True):
            if count:
                yield name, dealt.slice(start, count)
            start += count
