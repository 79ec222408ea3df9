"""Workload: what all of them have in common: parameters, a job, and an oracle.

The fields of a workload are its parameters. A TOML file, `statekit workgen` and the experiment set
them by name; what is wrong with them is said here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from statekit.engine.job import Job, Read
from statekit.engine.sink import read_results
from statekit.engine.sources import files
from statekit.engine.workloads.pace import Timetable, paced
from statekit.errors import ArgumentError, EngineError

DUE = "due"  # a column: when an event was due, for latencies


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every event is one record with a number of its own, `seq`, from 0 on."""

    name: ClassVar[str]
    stage: ClassVar[str]  # that is to be scaled
    key: ClassVar[str]  # the column that is its key

    records: int = 100_000
    rate: float = 0.0  # records a second; 0: as fast as it goes
    rows: int = 100  # of a batch of the source
    seed: int = 42
    sources: int = 2  # processes
    workers: int = 2
    input: str = ""  # files that `statekit workgen` has written, instead of the generator

    def __post_init__(self) -> None:
        for name, least in (("records", 0), ("rate", 0), ("rows", 1), ("seed", 0), ("sources", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: pass {least} or more")

    def events(self, numbers: Any) -> dict[str, Any]:
        """The columns of these events: the same whenever and wherever they are made."""
        raise NotImplementedError

    def job(self, folder: "str | Path") -> Job:
        """The job, with its results in `folder`."""
        raise NotImplementedError

    def wrong(self, results: pa.Table, records: int) -> str:
        """What is wrong with the results of so many events; "" if nothing is. The oracle."""
        raise NotImplementedError

    def read(self, folder: "str | Path") -> Read:
        """The source: the generator, or the files."""
        if self.input:
            return files(self.input, rows=self.rows)
        return paced(self.events, folder, records=self.records, rate=self.rate, rows=self.rows)

    def timetable(self, folder: "str | Path") -> Timetable:
        return Timetable(folder, self.rate)

    def end(self, folder: "str | Path") -> None:
        """The load of a job that runs is enough: its sources come to their end."""
        self.timetable(folder).end(2 * self.rows * self.sources)

    def check(self, folder: "str | Path") -> int:
        """Compares the results of a job that has ended with the oracle; how many there were."""
        batches = read_results(folder)
        results = pa.Table.from_batches(batches) if batches else pa.table({})
        records = self.timetable(folder).records(self.records)
        if fault := self.wrong(results, records) if batches else "nothing came" * bool(records):
            raise EngineError(
                f"{self.name}: the results in {str(folder)!r} are wrong: {fault}. The parameters "
                f"were {self}."
            )
        return int(results.num_rows)


W = TypeVar("W", bound=Workload)


def configure(kind: type[W], parameters: Mapping[str, Any]) -> W:
    """A workload with these parameters; the others are as usual."""
    try:
        return msgspec.convert(dict(parameters), kind)
    except msgspec.ValidationError as error:
        raise ArgumentError(
            f"workload {kind.name!r}: {error}. It has {', '.join(kind.__struct_fields__)}."
        ) from None


# ---- For oracles


def repeats(seqs: Any, records: int) -> str:
    """What is wrong if each event should have given one result."""
    found = np.bincount(np.clip(seqs, 0, records), minlength=records + 1)
    if len(outside := seqs[(seqs < 0) | (seqs >= records)]):
        return f"event {outside[0]} came, which there is not"
    if len(lost := np.flatnonzero(found[:records] == 0)):
        return f"{len(lost)} events are lost, event {lost[0]} the first of them"
    if len(twice := np.flatnonzero(found[:records] > 1)):
        return f"{len(twice)} events counted more than once, event {twice[0]} the first of them"
    return ""


def in_order(keys: Any, counts: Any, seqs: Any, senders: Any) -> str:
    """What is wrong if the counts of a key should be 1, 2, 3, ..., in the order of each sender."""
    order = np.lexsort((counts, keys))
    key, count = keys[order], counts[order]
    starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    expected = np.arange(len(key)) - np.repeat(starts, np.diff(np.r_[starts, len(key)])) + 1
    if len(bad := np.flatnonzero(count != expected)):
        at = bad[0]
        return f"key {key[at]!s}: count {count[at]} came where {expected[at]} belongs"
    order = np.lexsort((seqs, senders, keys))
    key, sender, count = keys[order], senders[order], counts[order]
    same = (key[1:] == key[:-1]) & (sender[1:] == sender[:-1])
    if len(bad := np.flatnonzero(same & (count[1:] <= count[:-1]))):
        return f"key {key[bad[0]]!s}: event {seqs[order][bad[0] + 1]} was overtaken"
    return ""
