"""A state as a file, and back: Parquet, Arrow (IPC), JSON lines, CSV.

    key         the key; key_0, key_1 ... for a tuple
    value       the value, in the style "columns" (Parquet, Arrow) or "json" of statekit.render. In
                CSV, text, numbers and times are as they are, and everything else is JSON
    stamp       in a state with a time to live, when the entry was last touched, in ms

The name of the state and its schema go with it. In a Parquet or Arrow file they are in the
metadata, under "statekit". For the other formats they are in a small file beside it, such as
visits.csv.statekit.json, so that other programs can read the CSV like any other. So `import` of a
file that `export` wrote needs no options.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from statekit.cli.options import parse_float, parse_json
from statekit.cli.sources import Source
from statekit.errors import ArgumentError, StateKitError, shorten
from statekit.format.description import Description, DescriptionError
from statekit.keys import KeyCodec, key_codec
from statekit.native.kinds import NO_TIME
from statekit.render import NoColumnError, PlainCodec, key_json, to_json
from statekit.render.columns import Piece, StateColumns, key_names
from statekit.schema import StateSchema, Type

SUFFIXES = {"parquet": ".parquet", "arrow": ".arrow", "jsonl": ".jsonl", "csv": ".csv"}
_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".jsonl": "jsonl",
            ".ndjson": "jsonl", ".csv": "csv"}  # fmt: skip
_ROWS = 65536  # how many are read at a time
# Types that files have as text, so that what is read is what was written: a column of decimals has
# 18 places for all of them, and Parquet has no durations.
_TEXT = ("decimal", "timedelta")
_META = b"statekit"
SIDECAR = ".statekit.json"  # the suffix of the file beside a text, which describes its state
_VERSION = 1
_RAW = frozenset(("str", "bytes", "datetime", "date", "time", "timedelta", "uuid", "decimal"))
_NUMBERS = frozenset(("int", "float", "bool"))
_CELL_BYTES_MAX = 1 << 30  # the default of csv, 128 KiB, is too small for some values

Entry: TypeAlias = tuple[Any, Any, int | None]  # key, value as a Block has it, stamp
OnBytes: TypeAlias = Callable[[int], None]


class FileMeta(NamedTuple):
    """What is stored with the rows."""

    schema: StateSchema
    key_groups: int
    subgroups: int
    watermark: int | None

    def encode(self) -> str:
        found = {"statekit": _VERSION, **self._asdict(), "schema": self.schema._asdict()}
        return to_json(found)

    @classmethod
    def decode(cls, text: str | bytes, file: Path) -> "FileMeta":
        try:
            found = json.loads(text)
            if found.pop("statekit") != _VERSION:
                raise ArgumentError(f"{str(file)!r} is of a newer statekit. Update statekit.")
            # A manifest describes states in the same way, and there everything is checked.
            described: dict[str, Any] = {"base": None, "compression": None, "metadata": {}}
            described |= {"key_groups": [], "watermark": found["watermark"]}
            described["states"] = [found["schema"]]
            checked = Description.read(json.dumps(described).encode(), 1, 1)
            groups, subgroups = found["key_groups"], found["subgroups"]
            if not all(type(number) is int for number in (groups, subgroups)):
                raise ValueError(f"{groups} key-groups of {subgroups}")
            return cls(checked.schemas[0], groups, subgroups, checked.watermark)
        except (ValueError, KeyError, TypeError, AttributeError, DescriptionError) as error:
            if isinstance(error, ArgumentError):
                raise
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ArgumentError(
                f"what {str(file)!r} says about its state cannot be read ({reason}). "
                "Export it again, or remove that and give --state, --key and --type."
            ) from None


def format_of(file: Path) -> str:
    """The format of a file, by its suffix."""
    found = _FORMATS.get(file.suffix.lower())
    if str(file) == "-":
        raise ArgumentError("import reads files, not stdin. Save what comes into one first.")
    if found is None:
        raise ArgumentError(
            f"{str(file)!r} does not end in {', '.join(_FORMATS)}. Rename it to what it is."
        )
    return found


def file_name(state: str, to: str) -> str:
    """The name of a state's file. Slashes in the state's name, and a dot that it starts with, are
    written as %2F and %2E.

    >>> file_name("visits", "csv"), file_name("a/b", "csv"), file_name("..", "csv")
    ('visits.csv', 'a%2Fb.csv', '%2E%2E.csv')
    """
    name = quote(state, safe=" +-_,()[]=@")
    return (name.replace(".", "%2E") if name.startswith(".") else name) + SUFFIXES[to]


# ---- Writing


class Written(NamedTuple):
    """What write_state() has made."""

    entries: int
    files: list[Path]  # the file, and what goes beside it


def write_state(
    source: Source, schema: StateSchema, to: str, file: Path, on_bytes: OnBytes
) -> Written:
    """Writes one state into a file that is complete or not there."""
    meta = FileMeta(schema, source.key_group_count, source.subgroups, source.watermark)
    part = file.with_name(f"{file.name}.part")
    write = {"csv": _write_csv, "jsonl": _write_jsonl}.get(to, _write_columns)
    files = [file]
    try:
        text = set(_TEXT)
        while True:
            try:
                count = write(meta, source.pieces(schema, on_bytes), part, to, text)
                break
            except NoColumnError as error:  # then all values of that type are to be text
                text.add(error.kind)
                on_bytes = _read_before
        if to in ("csv", "jsonl"):
            files.append(_sidecar(file))
            files[1].write_text(meta.encode() + "\n", encoding="utf-8")
        part.rename(file)
    except BaseException as error:
        for beside in files[1:]:
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(file)  # the error of a full disk names no file
        raise
    finally:
        part.unlink(missing_ok=True)
    return Written(count, files)


def _sidecar(file: Path) -> Path:
    return file.with_name(file.name + SIDECAR)


def _read_before(_: int) -> None:
    """on_bytes while rows are read once more."""


def _rows(schema: StateSchema, pieces: Iterator[Piece]) -> Iterator[Entry]:
    decode = key_codec(schema.key).decode
    for piece in pieces:
        for key, value, stamp in piece.each():
            yield decode(key), value, None if stamp == NO_TIME else stamp


def _names(schema: StateSchema) -> list[str]:
    stamp = ["stamp"] if schema.timed else []
    return [*key_names(key_codec(schema.key)), "value", *stamp]


def _write_jsonl(
    meta: FileMeta, pieces: Iterator[Piece], file: Path, to: str, text: Collection[str]
) -> int:
    codec = PlainCodec(meta.schema)
    count = 0
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for key, value, stamp in _rows(meta.schema, pieces):
            count += 1
            line = {"key": key_json(key), "value": codec.read(value)}
            if meta.schema.timed:
                line["stamp"] = stamp
            out.write(to_json(line) + "\n")
    return count


def _write_csv(
    meta: FileMeta, pieces: Iterator[Piece], file: Path, to: str, text: Collection[str]
) -> int:
    codec = PlainCodec(meta.schema)
    is_raw = _is_raw(meta.schema)
    count = 0
    with file.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(_names(meta.schema))
        for key, value, stamp in _rows(meta.schema, pieces):
            count += 1
            plain = codec.read(value)
            cell = plain if is_raw and isinstance(plain, str) else to_json(plain)
            keys = key_json(key if isinstance(key, tuple) else (key,))
            times = ["" if stamp is None else stamp] if meta.schema.timed else []
            lines.writerow([*keys, cell, *times])
    return count


def _is_raw(schema: StateSchema) -> bool:
    """Whether a cell holds the value as it is, not as JSON."""
    kind = schema.type
    return schema.form == "value" and isinstance(kind, str) and kind in _RAW | _NUMBERS


def _write_columns(
    meta: FileMeta, pieces: Iterator[Piece], file: Path, to: str, text: Collection[str]
) -> int:
    import pyarrow
    import pyarrow.parquet

    columns = StateColumns(meta.schema, text=text, stamps=True)
    schema = columns.schema.with_metadata({_META: meta.encode().encode()})
    count = 0
    if to == "parquet":
        writer = pyarrow.parquet.ParquetWriter(file, schema)
    else:
        writer = pyarrow.ipc.new_file(str(file), schema)
    with writer as out:
        for batch in columns.batches(pieces):
            out.write_batch(batch.replace_schema_metadata(schema.metadata))
            count += len(batch)
    return count


# ---- Reading


def read_meta(file: Path) -> FileMeta | None:
    """What `export` wrote about a file; None if another program wrote the file."""
    if format_of(file) in ("csv", "jsonl"):
        beside = _sidecar(file)
        file.stat()  # raises if the file is missing: that must be said first
        return FileMeta.decode(beside.read_bytes(), beside) if beside.exists() else None
    text = (_arrow_schema(file).metadata or {}).get(_META)
    return None if text is None else FileMeta.decode(text, file)


def _arrow_schema(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        if format_of(file) == "parquet":
            return pyarrow.parquet.read_schema(file)
        with pyarrow.OSFile(str(file)) as source:
            return pyarrow.ipc.open_file(source).schema
    except (pyarrow.ArrowException, OSError) as error:
        raise _no_table(file, error) from None


def _no_table(file: Path, error: Exception) -> Exception:
    """What to raise for an error of pyarrow. Its OSErrors may be about the contents of a file."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    reason = " ".join(str(error).split())
    return ArgumentError(f"{str(file)!r} is no {format_of(file)} file ({reason}).")


class Columns(NamedTuple):
    """Which columns of a file are what: those that `export` writes, or as options say."""

    keys: tuple[str, ...]
    value: str | None  # None: all others, as the fields of a record
    stamp: str | None


def read_rows(
    file: Path, schema: StateSchema, columns: Columns, *, is_ours: bool
) -> Iterator[tuple[Any, bytes, int | None]]:
    """Key, encoded value and stamp of every row. is_ours: as `export` wrote them."""
    to = format_of(file)
    in_columns = is_ours and to in ("parquet", "arrow")
    codec = PlainCodec(schema, "columns" if in_columns else "json")
    if in_columns and schema.form == "timers":
        codec = PlainCodec(schema)
    records = {"csv": _read_csv, "jsonl": _read_jsonl}.get(to, _read_columns)(file)
    for at, record in enumerate(records, 1):
        try:
            key = _key_of(record, columns.keys, codec.key, to)
            plain = _value_of(record, columns, schema)
            if to == "csv":
                plain = _from_cell(plain, schema, has_value=columns.value is not None)
            stamp = record.get(columns.stamp) if columns.stamp else None
            yield key, codec.write(plain), None if stamp in (None, "") else int(stamp)
        except KeyError as error:
            raise ArgumentError(
                f"{str(file)!r}, row {at} has no {error.args[0]!r}; it has {', '.join(record)}. "
                "Name the columns with --key and --value."
            ) from None
        except (StateKitError, ValueError, TypeError) as error:
            raise ArgumentError(f"{str(file)!r}, row {at}: {error}") from None


def _read_csv(file: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_CELL_BYTES_MAX)
    with file.open(encoding="utf-8-sig", newline="") as source:  # some programs write a BOM first
        try:
            rows = csv.DictReader(source)
            names = rows.fieldnames or ()
            if not names:
                raise ArgumentError(
                    f"{str(file)!r} is empty: the first line of a CSV has the names of its columns."
                )
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ArgumentError(
                    f"{str(file)!r} has the column {twice[0]!r} twice. Rename one of them."
                )
            for at, row in enumerate(rows, 1):
                if None in row:
                    raise ArgumentError(
                        f"{str(file)!r}, row {at} has more cells than there are columns: "
                        f"{', '.join(names)}."
                    )
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ArgumentError(f"{str(file)!r} is no CSV in UTF-8 ({error}).") from None


def _read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8-sig") as source:
        for at, line in enumerate(_decoded(source, file), 1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ArgumentError(f"{str(file)!r}, line {at} is no JSON ({error}).") from None
            if not isinstance(record, dict):
                raise ArgumentError(f"{str(file)!r}, line {at} is no JSON object.")
            yield record


def _decoded(lines: Iterable[str], file: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{str(file)!r} is no text in UTF-8 ({error}).") from None


def _read_columns(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        if format_of(file) == "parquet":
            with pyarrow.parquet.ParquetFile(file) as source:
                for batch in source.iter_batches(_ROWS):
                    yield from batch.to_pylist()
            return
        with pyarrow.OSFile(str(file)) as data:
            reader = pyarrow.ipc.open_file(data)
            for at in range(reader.num_record_batches):
                yield from reader.get_batch(at).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _no_table(file, error) from None


def _key_of(record: dict[str, Any], names: tuple[str, ...], codec: KeyCodec, to: str) -> Any:
    from statekit.render import key_from_json, parse_key

    if len(names) == 1 and not (codec.is_tuple and to == "csv"):
        value = record[names[0]]
        is_text = to == "csv" or (isinstance(value, str) and codec.text == "i")
        return parse_key(codec, value) if is_text else key_from_json(codec, value)
    parts = [record[name] for name in names]
    if to == "csv":
        parts = [
            int(part) if letter == "i" else part
            for letter, part in zip(codec.parts, parts, strict=False)
        ]
    return key_from_json(codec, parts)


def _value_of(record: dict[str, Any], columns: Columns, schema: StateSchema) -> Any:
    if columns.value is not None:
        return record[columns.value]
    fields: dict[str, Any] = schema.type[2]  # type: ignore[assignment]
    return {name: record[name] for name in fields if name in record}


def _from_cell(plain: Any, schema: StateSchema, *, has_value: bool) -> Any:
    """The value that the text of a CSV cell stands for."""
    if not has_value:
        fields: dict[str, Any] = schema.type[2]  # type: ignore[assignment]
        return {name: _scalar_cell(cell, fields[name][0]) for name, cell in plain.items()}
    if _is_raw(schema):
        return _scalar_cell(plain, schema.type)
    return _cell_json(plain)


def _scalar_cell(cell: Any, kind: Type) -> Any:
    if not isinstance(cell, str):
        raise ArgumentError("the row has fewer cells than columns.")
    match kind:
        case "int" | "float":
            try:
                return int(cell) if kind == "int" else parse_float(cell)
            except ValueError:
                raise ArgumentError(
                    f"{shorten(cell)} is no {kind}. Correct it, or give another --type."
                ) from None
        case "bool" if cell.lower() in ("true", "false"):
            return cell.lower() == "true"
        case ["union", *parts] if "none" in parts:
            others = [part for part in parts if part != "none"]
            return None if not cell else _scalar_cell(cell, others[0])
        case str() if kind in _RAW:
            return cell
        case _:
            return _cell_json(cell)


def _cell_json(cell: str) -> Any:
    try:
        return parse_json(cell)
    except ValueError as error:
        raise ArgumentError(f"{shorten(cell)} is no JSON ({error}).") from None


def infer_key_type(file: Path, names: tuple[str, ...]) -> str:
    """The key type that the columns of a file suggest, in the letters of the native store."""
    to = format_of(file)
    if to == "csv":
        letters = "s" * len(names)
    else:
        records = _read_jsonl(file) if to == "jsonl" else _read_columns(file)
        first = next(records, None)
        if first is None:
            raise ArgumentError(f"{str(file)!r} has no rows. Give --key-type.")
        kinds: dict[type, str] = {str: "s", int: "i", bytes: "b"}
        found = [kinds.get(type(first.get(name)), "?") for name in names]
        if "?" in found:
            raise ArgumentError(
                f"the column {names[found.index('?')]!r} of {str(file)!r} holds no keys: it has "
                f"{', '.join(first)}. Name one of text, ints or bytes with --key."
            )
        letters = "".join(found)
    return f"({letters})" if len(names) > 1 else letters
