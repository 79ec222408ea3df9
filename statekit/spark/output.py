"""The output of an op: rows become Arrow columns, these become files, and these a DataFrame.

A task writes its rows as one Parquet file, named by its contents. The file is

    an attachment    of the manifest, in the place of the state: it lives as long as that version
    or output        in a directory of its own (output_path=), for ever. What counts is in its log:
                     the driver adds batch-<number>.json with the names of the files once the
                     version is published. A file that no log entry names is of an attempt that
                     failed: nobody reads it, and it is removed some versions later

So the same rows are read however often the sink is called, and no second job computes them.

Nothing of it may be lost or wrong in silence. Pages have checksums, which whoever reads them
verifies; files that are missing or damaged are errors also where Spark is configured to pass over
them. A directory of output has that of one state only, in the columns that it began with. The log
counts by the numbers of that state's versions, so a state that begins anew needs another one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from statekit.checkpoint.parts import write_attachment
from statekit.errors import (
    ArgumentError,
    DamagedError,
    MissingFileError,
    StatefulOpError,
    shorten,
)
from statekit.format.description import Attachment
from statekit.spark.query import literal
from statekit.storage import Storage, open_storage

_LOG_PREFIX = "batch-"
_SCHEMA_FILE = "output-schema.json"
_SUFFIX = ".parquet"
_FILE_SCHEMA = "url string, file string"
_STRICT = {
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "parquet.page.verify-checksum.enabled": "true",
}


class OutputFile(NamedTuple):
    """A file of output rows that a task has written."""

    name: str  # of the attachment; "" if it is no attachment
    file: str
    size: int
    rows: int


# ---- The columns


def arrow_schema(schema: Any) -> pa.Schema:
    """The columns of Spark as it wants them in Arrow; instants in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # before 4.2, where it is always UTC
        return to_arrow_schema(schema)


def schemas(spark: Any, output: Any) -> tuple[Any, Any]:
    """The schema of the output, for Spark and for Arrow."""
    if isinstance(output, str):
        return _parsed(spark, output, spark.conf.get("spark.sql.timestampType", "TIMESTAMP_LTZ"))
    return output, arrow_schema(output)


_parsed_before: dict[tuple[str, str], tuple[Any, Any]] = {}  # it takes Spark some milliseconds


def _parsed(spark: Any, text: str, timestamps: str) -> tuple[Any, Any]:
    if found := _parsed_before.get((text, timestamps)):
        return found
    try:
        schema = spark.createDataFrame([], text).schema
    except Exception as error:
        raise ArgumentError(
            f"output={text!r} is no schema that Spark understands: {shorten(str(error))}. Write it "
            'as "name type, name type", for example "user string, n long".'
        ) from error
    found = _parsed_before[text, timestamps] = schema, arrow_schema(schema)
    return found


# ---- In a task


def rows_to_table(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """What a function yielded. StatefulOpError names the first row and column that do not fit."""
    width = len(schema)
    try:
        columns = list(zip(*rows, strict=True)) if rows else [()] * width
        if len(columns) != width or str in set(map(type, rows)):
            raise TypeError
        arrays = [pa.array(items, field.type) for items, field in zip(columns, schema, strict=True)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise _misfit(rows, schema) from None
    return pa.Table.from_arrays(arrays, schema=schema)


def _misfit(rows: Sequence[Any], schema: pa.Schema) -> StatefulOpError:
    """Finds the row that did not fit."""
    declared = ", ".join(f"{field.name} {field.type}" for field in schema)
    advice = f"Declared is output of ({declared}). Yield one tuple of these for each row."
    for row in rows:
        if not isinstance(row, tuple | list):
            return StatefulOpError(
                f"the function gave {shorten(row)}, of type {type(row).__name__}, as a row. "
                f"{advice}"
            )
        if len(row) != len(schema):
            return StatefulOpError(
                f"the function gave the row {shorten(row)}, which has {len(row)} columns and not "
                f"{len(schema)}. {advice}"
            )
        for value, field in zip(row, schema, strict=True):
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                return StatefulOpError(
                    f"the function gave the row {shorten(row)}: its column {field.name!r} is "
                    f"{shorten(value)}, of type {type(value).__name__}, and not {field.type} "
                    f"({str(error).rstrip('.')}). {advice}"
                )
    return StatefulOpError(f"the rows that the function gave do not fit together. {advice}")


def batches_to_table(given: Any, schema: pa.Schema) -> pa.Table:
    """What a function of whole batches gave: a table, a record batch, or an iterable of these."""
    if given is None:
        return schema.empty_table()
    pieces = [given] if isinstance(given, pa.Table | pa.RecordBatch | Mapping) else given
    if not isinstance(pieces, Iterable):
        raise _no_table(given, schema)
    return pa.concat_tables([schema.empty_table(), *(_as_table(one, schema) for one in pieces)])


def _as_table(given: Any, schema: pa.Schema) -> pa.Table:
    try:
        if isinstance(given, Mapping):
            given = pa.table(dict(given))
        if isinstance(given, pa.RecordBatch):
            given = pa.Table.from_batches([given])
        if isinstance(given, pa.Table):
            return given.select(schema.names).cast(schema)
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        shown = ", ".join(f"{name}" for name in getattr(given, "column_names", []))
        declared = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise StatefulOpError(
            f"the function gave a table of columns ({shown}) that does not fit: {error}. Declared "
            f"is output of ({declared})."
        ) from None
    raise _no_table(given, schema)


def _no_table(given: Any, schema: pa.Schema) -> StatefulOpError:
    return StatefulOpError(
        f"the function gave {shorten(given)}, of type {type(given).__name__}. A function of whole "
        f"batches gives None, a pyarrow Table or RecordBatch with the columns "
        f"{', '.join(schema.names)}, or yields several of them."
    )


def write_output(
    table: pa.Table, place: str, output_path: str | None, number: int, task: str
) -> OutputFile | None:
    """Writes the rows of a task as a file; None if there are none."""
    if not table.num_rows:
        return None
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    if output_path is None:
        attached = write_attachment(place, f"output-{task}", data, number=number)
        return OutputFile(attached.name, attached.file, attached.size, table.num_rows)
    storage = open_storage(output_path)
    file = f"{number:012d}-{hashlib.sha256(data).hexdigest()}{_SUFFIX}"
    with storage.writing():
        storage.write(file, [data])
        storage.sync()
    return OutputFile("", file, len(data), table.num_rows)


# ---- In the driver


def attachments_of(files: Iterable[OutputFile]) -> list[Attachment]:
    """The files that are attachments, as publish() takes them."""
    return [Attachment(one.name, one.file, one.size) for one in files if one.name]


def read_files(spark: Any, storage: Storage, files: Sequence[str], schema: Any) -> Any:
    """The rows of some files as a DataFrame."""
    if not files:
        return spark.createDataFrame([], schema)
    if storage.is_local:
        urls = (local_url(storage, one) for one in files)
        return spark.read.options(**_STRICT).schema(schema).parquet(*urls)
    # Spark may lack the classes or the credentials of this storage; its Python workers have ours.
    listed = spark.createDataFrame([(storage.url, one) for one in files], _FILE_SCHEMA)
    return listed.repartition(len(files)).mapInArrow(_reader(), schema)


def unreadable(spark: Any, schema: Any, why: str) -> Any:
    """A DataFrame that is an error as soon as somebody wants its rows."""

    def fail(_: Iterator[Any]) -> Iterator[Any]:
        raise RuntimeError(why)

    return spark.range(1).mapInArrow(fail, schema)


def local_url(storage: Storage, file: str = "") -> str:
    return literal(f"file://{storage.url}/{file}")


def _reader() -> Any:
    def read(batches: Iterator[Any]) -> Iterator[Any]:
        from statekit.spark.output import read_listed

        return read_listed(batches)

    return read


def read_listed(batches: Iterator[Any]) -> Iterator[Any]:
    """In a task: the rows of the files that the batches name."""
    for batch in batches:
        for row in batch.to_pylist():
            storage = open_storage(row["url"])
            data = storage.read(row["file"])
            if hashlib.sha256(data).hexdigest() not in row["file"]:
                name = storage.file(row["file"])
                raise DamagedError(
                    f"{name} is damaged: it does not have the contents that its name says.",
                    file=name,
                    offset=0,
                )
            yield from pq.read_table(pa.BufferReader(data)).to_batches()


# ---- The log of a directory of output


def _log_name(number: int) -> str:
    return f"{_LOG_PREFIX}{number:012d}.json"


def _found(storage: Storage, name: str) -> bytes | None:
    """The contents of a file. (A listing would be slower with every batch.)"""
    try:
        return storage.read(name)
    except MissingFileError:
        return None


def _logged(storage: Storage, name: str) -> list[str]:
    """The files of an entry of the log."""
    data = storage.read(name)
    try:
        files = json.loads(data)["files"]
        if not isinstance(files, list) or not all(isinstance(one, str) for one in files):
            raise ValueError("it names no files")
    except (ValueError, KeyError, TypeError) as error:
        file = storage.file(name)
        raise DamagedError(f"{file} is damaged: {error}.", file=file, offset=0) from None
    return files


def prepare_output(storage: Storage, number: int, schema: Any, is_new: bool) -> None:
    """Called before a version is computed. StatefulOpError if its output does not belong there.

    is_new: the version before had its output elsewhere, or there is none.
    """
    known = _known_schema(storage)
    is_other = known is not None and known.simpleString() != schema.simpleString()
    numbers = [number] if _found(storage, _log_name(number)) is not None else []
    if is_new or is_other:
        numbers = [
            int(entry.name[len(_LOG_PREFIX) :].partition(".")[0])
            for entry in storage.list()
            if entry.name.startswith(_LOG_PREFIX)
        ]
    if any(one >= number for one in numbers):
        raise StatefulOpError(
            f"{storage.shown!r} has output of version {max(numbers)} of a state already, and "
            f"version {number} is to be made now: it is the output of another op, or of this one "
            "before its state was deleted or brought back from a copy. One directory can have the "
            "output of one state only. Give this op another output_path; or delete that one, if "
            "its output is not needed any more."
        )
    if is_other and numbers:
        assert known is not None
        raise StatefulOpError(
            f"{storage.shown!r} has output of the columns {known.simpleString()}, and this op puts "
            f"out {schema.simpleString()}. Give it another output_path: what is in this one stays "
            "readable."
        )
    if known is None or is_other:  # the other one is of an attempt that came to nothing
        _write(storage, _SCHEMA_FILE, schema.json().encode())


def _known_schema(storage: Storage) -> Any:
    """The columns of a directory of output; None if there is none yet."""
    from pyspark.sql.types import StructType

    data = _found(storage, _SCHEMA_FILE)
    if data is None:
        return None
    try:
        return StructType.fromJson(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        file = storage.file(_SCHEMA_FILE)
        raise DamagedError(f"{file} is damaged: {error}.", file=file, offset=0) from None


def _write(storage: Storage, name: str, data: bytes) -> None:
    """All at once, so that a stream that reads the log never finds half an entry."""
    with storage.writing():
        storage.write(name, [data])
        storage.sync()


def log_output(storage: Storage, number: int, files: Sequence[str]) -> None:
    """Makes the files of a version count. May be repeated."""
    name = _log_name(number)
    if _found(storage, name) is None:
        line = json.dumps({"number": number, "files": list(files)}) + "\n"
        _write(storage, name, line.encode())
    elif _logged(storage, name) != list(files):
        raise StatefulOpError(
            f"{storage.file(name)!r} names the output of another op, which has the same "
            "output_path. Start this op anew, with a path and an output_path of its own."
        )


def collect_output(storage: Storage, number: int, count: int) -> None:
    """Removes what dead attempts at the `count` versions before `number` have left. Nobody can
    publish these any more, and nobody reads a file that the log does not name.
    """
    names = {entry.name for entry in storage.list()}
    for one in range(max(1, number - count), number):
        if _log_name(one) in names:
            named = {*_logged(storage, _log_name(one))}
            prefix = f"{one:012d}-"
            ours = {name for name in names if name.startswith(prefix) and name.endswith(_SUFFIX)}
            storage.delete(sorted(ours - named))


def read_output(path: "str | PathLike[str]", *, stream: bool = False) -> Any:
    """What an op with output_path=path has put out, each row once, as a DataFrame.

    stream: as a streaming DataFrame, which gives the rows of each batch when it is published.
    """
    from pyspark.sql import SparkSession

    spark = SparkSession.active()
    storage = open_storage(path)
    entries = [one.name for one in storage.list() if one.name.startswith(_LOG_PREFIX)]
    schema = _known_schema(storage)
    if schema is None or not entries:
        raise ArgumentError(
            f"there is no output in {storage.shown!r}. Pass the output_path of a StatefulOp; it is "
            "there once a first batch was published."
        )
    if not stream:
        files = [file for name in entries for file in _logged(storage, name)]
        return read_files(spark, storage, files, schema)
    from pyspark.sql import functions as F  # noqa: N812

    if not storage.is_local:
        raise ArgumentError(
            f"{storage.shown!r} cannot be read as a stream: Spark's file source may not reach it. "
            "Read it as a table."
        )
    log = (
        spark.readStream.schema("number long, files array<string>")
        .options(**_STRICT, mode="FAILFAST", pathGlobFilter=f"{_LOG_PREFIX}*.json")
        .json(local_url(storage))
    )
    listed = log.select(F.lit(storage.url).alias("url"), F.explode("files").alias("file"))
    return listed.mapInArrow(_reader(), schema)
