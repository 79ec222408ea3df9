"""Sources: files as the source of a job. (Kafka: kafka.py. A socket: lines.py.)

    job.source(files("/data/clicks-*.arrow"), parallelism=2)

Each task reads some of the files, one after the other, in the order of their names. Its position is
a file and a batch of it, so a restart reads nothing again but that file.
"""

from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from statekit.engine.job import Placed, Read
from statekit.errors import EngineError

KINDS = (".arrow", ".csv", ".jsonl")


def files(pattern: "str | Path", *, rows: int = 1000, schema: pa.Schema | None = None) -> Read:
    """Arrow files (or streams), CSV, or JSON lines, by their names.

    pattern: as a shell has them; a folder means all of its files. rows: of a batch. schema: of CSV
    and JSON lines, instead of what their first lines look like.
    """
    place = str(pattern)

    def read(task: int, tasks: int, start: Any) -> Iterator[Placed]:
        first, done = start or (0, 0)
        mine = list_files(place)[task::tasks]
        for at, path in enumerate(mine[first:], first):
            for number, batch in enumerate(_batches(path, rows, schema), 1):
                if number > done:
                    yield Placed(batch, (at, number))
            done = 0

    return read


def list_files(pattern: str) -> list[Path]:
    """EngineError if there are none, or other ones."""
    if Path(pattern).is_dir():
        pattern += "/*"
    found = [Path(name) for name in sorted(glob(pattern)) if Path(name).is_file()]
    if not found:
        raise EngineError(f"no file is named {pattern!r}: there is nothing to read.")
    for path in found:
        if path.suffix not in KINDS:
            raise EngineError(
                f"{str(path)!r} is none that can be read: its name ends in none of "
                f"{', '.join(KINDS)}."
            )
    return found


def _batches(path: Path, rows: int, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix == ".arrow":
            pieces = _arrow(path)
        elif path.suffix == ".csv":
            types = None if schema is None else dict(zip(schema.names, schema.types, strict=True))
            options = pa.csv.ConvertOptions(column_types=types)
            pieces = iter(pa.csv.open_csv(path, convert_options=options))
        else:
            parse = pa.json.ParseOptions(explicit_schema=schema)
            whole = pa.json.ReadOptions(block_size=max(path.stat().st_size, 1))
            found = pa.json.read_json(path, read_options=whole, parse_options=parse)
            pieces = iter(found.to_batches())
        for piece in pieces:
            for at in range(0, piece.num_rows, rows):
                yield piece.slice(at, rows)
    except pa.ArrowException as error:
        raise EngineError(f"{str(path)!r} cannot be read: {error}") from None


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            for at in range(reader.num_record_batches):
                yield reader.get_batch(at)
        else:
            yield from pa.ipc.open_stream(file)
