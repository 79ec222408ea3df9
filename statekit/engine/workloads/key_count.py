"""Key-count: how often each key has come. Small state or large, skewed or not, as you like it.

The count of a key is in a value of `value_bytes`: 8 of them are the count, and the rest a pad that
depends on key and count, so that a torn or an old value is noticed whenever it is read.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from statekit.engine.job import Job, KeyedOperator, Read
from statekit.engine.workloads.base import DUE, Workload, in_order, repeats
from statekit.engine.workloads.draws import Ranks, mixed
from statekit.engine.workloads.pace import paced, source_of
from statekit.errors import EngineError

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider


class KeyCount(Workload, frozen=True, kw_only=True):
    name: ClassVar[str] = "key_count"
    stage: ClassVar[str] = "count"
    key: ClassVar[str] = "key"

    keys: int = 10_000
    zipf: float = 0.0  # the exponent of their shares; 0: all alike
    value_bytes: int = 8
    rounds: int = 0  # reads and writes more than there need be, for each record: load of the CPU
    is_filled: bool = False  # every key is there, with the count 0, before the load begins

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys < 1 or self.zipf < 0 or self.rounds < 0:
            raise ValueError("pass keys >= 1, zipf >= 0 and rounds >= 0")
        if not 8 <= self.value_bytes <= 1 << 16 or self.value_bytes % 8:
            raise ValueError(f"value_bytes = {self.value_bytes}: pass 8 to 65536, in eights")

    def events(self, numbers: Any) -> dict[str, Any]:
        ranks = _ranks(self.keys, self.zipf).of(self.seed, numbers, 0)
        return {"key": keys_of(ranks), "seq": numbers}

    def fills(self, ranks: Any) -> dict[str, Any]:
        return {"key": keys_of(ranks), "seq": np.full(len(ranks), -1)}

    def read(self, folder: "str | Path") -> Read:
        if self.input or not self.is_filled:
            return super().read(folder)
        return paced(
            self.events, folder, records=self.records, rate=self.rate, rows=self.rows,
            fill=self.fills, fills=self.keys,
        )  # fmt: skip

    def job(self, folder: "str | Path") -> Job:
        return (
            Job(self.name)
            .source(self.read(folder), parallelism=self.sources)
            .key_by("key", key=int)
            .process(self._operator, parallelism=self.workers, name=self.stage)
            .sink(folder, due=DUE)
        )

    def _operator(self) -> KeyedOperator:
        if self.value_bytes == 8:
            return _Count(self.rounds)
        return _PaddedCount(self.rounds, self.value_bytes)

    def wrong(self, results: pa.Table, records: int) -> str:
        key, count, seq = (results[name].to_numpy() for name in ("key", "count", "seq"))
        if fault := repeats(seq, records):
            return fault
        expected = self.events(np.arange(records))["key"]
        if len(bad := np.flatnonzero(expected[seq] != key)):
            return f"event {seq[bad[0]]} came with key {key[bad[0]]}"
        return in_order(key, count, seq, source_of(seq, self.rows, self.sources))


_RANKS: dict[tuple[int, float], Ranks] = {}  # a table of ten million takes a while


def _ranks(keys: int, zipf: float) -> Ranks:
    if (keys, zipf) not in _RANKS:
        _RANKS[keys, zipf] = Ranks(keys, zipf)
    return _RANKS[keys, zipf]


def keys_of(ranks: Any) -> Any:
    """A bijection, so that frequent keys are in no key-groups of their own."""
    return mixed(ranks).view(np.int64)


class _Count(KeyedOperator):
    """Counts as ints, which the library adds up itself."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def open(self, kv: "KVProvider") -> None:
        self._counts = kv.value("counts", int, default=0, key=int)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        keys, seq = batch.column("key"), batch.column("seq").to_numpy()
        for _ in range(self._rounds):
            self._counts.add_many(keys, 0)
        real = seq >= 0
        is_load = real.all()
        amounts = 1 if is_load else real.astype(np.int64)
        counts = self._counts.add_many(keys, amounts, returning=True)
        assert counts is not None
        made = pa.record_batch(
            {"key": keys, "count": counts.to_arrow(), "seq": seq, "due": batch.column("due")}
        )
        return made if is_load else made.filter(pa.array(real))


class _PaddedCount(KeyedOperator):
    """Counts in large values, which are read and written as a whole."""

    def __init__(self, rounds: int, size: int) -> None:
        self._rounds = rounds
        self._words = size // 8

    def open(self, kv: "KVProvider") -> None:
        self._values = kv.value("values", bytes, key=int)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        keys, seq = batch.column("key").to_numpy(), batch.column("seq").to_numpy()
        real = seq >= 0
        some, at = np.unique(keys, return_inverse=True)
        for _ in range(self._rounds + 1):
            had = self._read(some)
        # The how-manieth of its key each record is, in the order of the batch.
        order = np.argsort(at, kind="stable")
        sums = np.cumsum(real[order])
        starts = np.searchsorted(at[order], np.arange(len(some)))
        base = np.where(starts > 0, sums[starts - 1], 0)
        count = np.empty(len(keys), np.int64)
        count[order] = had[at[order]] + sums - base[at[order]]
        now = had + np.bincount(at, real, len(some)).astype(np.int64)
        for _ in range(self._rounds + 1):
            self._write(some, now)
        made = pa.record_batch(
            {"key": keys, "count": count, "seq": seq, "due": batch.column("due")}
        )
        return made if real.all() else made.filter(pa.array(real))

    def _read(self, keys: Any) -> Any:
        found = self._values.get_many(keys).to_list()
        counts = np.zeros(len(keys), np.int64)
        for at, value in enumerate(found):
            if value is not None:
                counts[at] = int.from_bytes(value[:8], "little")
        expected = self._padded(keys, counts)
        for at, value in enumerate(found):
            if value is not None and value != expected[at]:
                raise EngineError(
                    f"key {keys[at]}: the value of count {counts[at]} is torn, or an old one."
                )
        return counts

    def _write(self, keys: Any, counts: Any) -> None:
        self._values.put_many(keys, self._padded(keys, counts))

    def _padded(self, keys: Any, counts: Any) -> list[bytes]:
        with np.errstate(over="ignore"):
            pad = mixed(keys.view(np.uint64) + counts.astype(np.uint64))
        heads, pads = counts.astype("<i8").tobytes(), pad.tobytes()
        return [
            heads[at : at + 8] + pads[at : at + 8] * (self._words - 1)
            for at in range(0, 8 * len(keys), 8)
        ]
