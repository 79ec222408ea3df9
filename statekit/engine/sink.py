"""Sink: results as Arrow files, which appear when the checkpoint that they belong to exists.

    .results-0-7.arrow    written between checkpoints 6 and 7, and not there for anybody yet
    results-0-7.arrow     checkpoint 7 exists

A checkpoint that was published makes its files visible by renaming them, which can be repeated: a
restart from it does so first, and removes what belongs to later ones, which will be made again.
"""

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa

ARRIVED = "arrived"  # a column: when a result came, in nanoseconds of time.monotonic()
_HIDDEN = re.compile(r"\.results-(\d+)-(\d+)-\d+\.arrow")


class FileSink:
    """One task's files."""

    def __init__(self, folder: str, task: int) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._task = task
        self._epoch = 1  # the checkpoint that the next records belong to
        self._files = 0  # of this epoch: a file has one schema
        self._writer: Any = None

    def begin(self, restored: int) -> None:
        """After checkpoint `restored`, 0 if there is none: what came later never was."""
        self.publish(restored)
        for path, _ in self._hidden():
            path.unlink()
        self._epoch = restored + 1

    def write(self, batch: pa.RecordBatch) -> None:
        if self._writer is not None and not batch.schema.equals(self._writer[1]):
            self.close()
        if self._writer is None:
            name = f".results-{self._task}-{self._epoch}-{self._files}.arrow"
            self._files += 1
            file = (self._folder / name).open("wb")
            self._writer = file, batch.schema, pa.ipc.new_stream(file, batch.schema)
        self._writer[2].write_batch(batch)

    def cut(self, number: int) -> None:
        """Barrier `number` passes: what comes next belongs to a later checkpoint."""
        self.close()
        self._epoch, self._files = number + 1, 0

    def publish(self, number: int) -> None:
        """Checkpoint `number` exists."""
        for path, epoch in self._hidden():
            if epoch <= number:
                path.rename(self._folder / path.name.removeprefix("."))

    def _hidden(self) -> list[tuple[Path, int]]:
        found = [(path, _HIDDEN.fullmatch(path.name)) for path in self._folder.iterdir()]
        return [
            (path, int(match[2])) for path, match in found if match and int(match[1]) == self._task
        ]

    def close(self) -> None:
        if self._writer is not None:
            file, _, writer = self._writer
            writer.close()
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._writer = None


def publish_all(folder: str) -> None:
    """The job has ended: all results count. It can be repeated."""
    for path in Path(folder).glob(".results-*.arrow"):
        path.rename(path.with_name(path.name.removeprefix(".")))


def read_results(folder: "str | Path") -> list[pa.RecordBatch]:
    """What is visible, in the order of each task's checkpoints."""

    def order(path: Path) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", path.name)]

    found: list[pa.RecordBatch] = []
    for path in sorted(Path(folder).glob("results-*.arrow"), key=order):
        with pa.ipc.open_stream(path) as reader:
            found += reader
    return found
