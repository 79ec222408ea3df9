"""Pace: an open-loop source of numbered events, each stamped with the moment at which it is due.

Event n of a job is due n / rate seconds after the job began, whatever the job does meanwhile: a job
that stood still gets the events that it missed all at once, and they are late by as much as they
had to wait. (A source that waits for the job would hide that.) When the job began is in a file,
so that a source that is started again keeps to the same timetable; so is the number of the event
that ends it, once somebody has decided that it is enough.

    batch 0 .. p-1   what fills the state before the load, as fast as it goes; due: 0
    batch p ..       `rows` events each; a batch is sent when the last of them is due

Batches go to the tasks of the source in turns.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pyarrow as pa

from statekit.engine.job import Read, Until

_BEGAN, _ENOUGH = "began", "enough"  # files: nanoseconds of time.monotonic(); a number of events
_MARGIN_NS = 500_000_000  # after the first task is ready, for the others
_FILL_ROWS = 20_000

Make = Callable[[Any], dict[str, Any]]


class Timetable:
    """When each event is due."""

    def __init__(self, folder: "str | Path", rate: float) -> None:
        self._folder = Path(folder)
        self._ns = 1e9 / rate if rate else 0.0  # 0: an event is due when it is made

    @property
    def began(self) -> int:
        """When event 0 is due; 0 if nobody knows that yet."""
        return self._number(_BEGAN, 0)

    def begin(self) -> None:
        """The job begins now, unless it has begun already."""
        self._decide(_BEGAN, monotonic_ns() + _MARGIN_NS)

    def records(self, most: int) -> int:
        """How many events there are in all."""
        return min(most, self._number(_ENOUGH, most))

    def end(self, ahead: int) -> None:
        """It is enough. ahead: so many events may have been made before they are due."""
        now = int((monotonic_ns() - self.began) / self._ns)
        self._decide(_ENOUGH, max(now, 0) + ahead)

    def _number(self, name: str, default: int) -> int:
        try:
            return int((self._folder / name).read_text())
        except FileNotFoundError:
            return default

    def _decide(self, name: str, number: int) -> None:
        """Writes a number, unless it is written: by another task, or before this start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mine = self._folder / f"{name}.{secrets.token_hex(8)}"
        mine.write_text(str(number))
        with suppress(FileExistsError):
            os.link(mine, self._folder / name)
        mine.unlink()

    def due(self, began: int, numbers: Any) -> Any:
        if not self._ns:
            return np.full(len(numbers), monotonic_ns())
        return began + (np.asarray(numbers) * self._ns).astype(np.int64)


def paced(
    make: Make,
    folder: "str | Path",
    *,
    records: int,
    rate: float = 0.0,
    rows: int = 100,
    fill: Make | None = None,
    fills: int = 0,
) -> Read:
    """make: the columns of these events. fill: those of what comes before, 0 .. fills-1."""
    timetable = Timetable(folder, rate)
    before = -(-fills // _FILL_ROWS)  # batches

    def read(task: int, tasks: int, start: int) -> Iterator[pa.RecordBatch | Until]:
        for number in range(start * tasks + task, before, tasks):
            assert fill is not None
            some = np.arange(number * _FILL_ROWS, min((number + 1) * _FILL_ROWS, fills))
            yield pa.record_batch({**fill(some), "due": np.zeros(len(some), np.int64)})
        timetable.begin()
        began = timetable.began
        first = max(start - len(range(task, before, tasks)), 0)
        at = (first * tasks + task) * rows
        while at < (last := timetable.records(records)):
            numbers = np.arange(at, min(at + rows, last))
            made = make(numbers)
            due = timetable.due(began, numbers)
            yield Until(due[-1] / 1e9)
            yield pa.record_batch({**made, "due": due})
            at += tasks * rows

    return read


def source_of(numbers: Any, rows: int, tasks: int) -> Any:
    """The task that sends each event."""
    return np.asarray(numbers) // rows % tasks
