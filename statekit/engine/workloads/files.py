"""Files: the events of a workload, for sources that read files. The same events in any format."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv

from statekit.engine.workloads.base import Workload
from statekit.errors import ArgumentError

_ROWS = 10_000  # of a piece that is made at once


def write_files(work: Workload, folder: Path, kind: str, files: int) -> list[Path]:
    """Event by event in turns of work.rows, as the tasks of a source would have them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{work.name}-{at:03}.{kind}" for at in range(files)]
    if there := [path for path in paths if path.exists()]:
        raise ArgumentError(f"{str(there[0])!r} is there already: name another folder.")
    for at, path in enumerate(paths):
        numbers = np.arange(work.records)
        mine = numbers[numbers // work.rows % files == at]
        pieces = [mine[first : first + _ROWS] for first in range(0, max(len(mine), 1), _ROWS)]
        _write(path, kind, [pa.record_batch(_columns(work, piece)) for piece in pieces])
    return paths


def _columns(work: Workload, numbers: Any) -> dict[str, Any]:
    return {**work.events(numbers), "due": np.zeros(len(numbers), np.int64)}


def _write(path: Path, kind: str, batches: list[pa.RecordBatch]) -> None:
    if kind == "arrow":
        with pa.ipc.new_file(path, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    elif kind == "csv":
        with pa.csv.CSVWriter(path, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    else:
        with path.open("wb") as file:
            for batch in batches:
                file.writelines(msgspec.json.encode(row) + b"\n" for row in batch.to_pylist())
