"""States as Arrow: the columns that follow from a state's declared type, whatever it contains.

    key         one column; key_0, key_1 ... for a tuple. str: string, bytes: binary, int: int64
    value       see below
    stamp       (if asked for, of a state with a time to live) when the entry was last touched, in
                ms: int64, null where that is not known

    type                        Arrow
    int, float, bool            int64, double, bool
    str, bytes, None            string, binary, null
    datetime                    timestamp[us, UTC]; an error for one without a time zone
    date, time                  date32, time64[us]; an error for a time with a time zone
    timedelta                   duration[us]; an error beyond 64 bits
    Decimal                     decimal128(38, 18); an error for one that does not fit exactly
    UUID                        string
    Enum, Literal, Flag         string, int64 or bool: that of its values
    list, tuple[T, ...], set    list. Sets are sorted
    dict                        map
    tuple[A, B]                 struct with the fields "0", "1"
    dataclass, NamedTuple, ...  struct; null for a field that is not stored
    T | None                    as T, with nulls
    timers                      list of int64, in ms
    Any, dict[Any, T], other unions, records inside themselves or without fields, a Literal of
    text and numbers            string: JSON, as render/__init__.py describes it

Where an error is said above, text=["datetime"] makes all datetimes text, which holds every value.

Values are not turned into Python objects, but unpacked in one pass (native/unpack.py). Only a part
that needs thought (text that JSON makes, sets, timedeltas) is read one by one. What does not fit
its type is read again, the slow way, as PlainCodec reads it: that knows what is wrong, and where.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from statekit.errors import CorruptBlockError, package, where
from statekit.keys import KeyCodec, key_codec
from statekit.kinds import KINDS
from statekit.native.block import Block
from statekit.native.kinds import NO_TIME
from statekit.native.unpack import Items, KeyUnpacking
from statekit.render.codec import PlainCodec
from statekit.render.trees import (
    Array,
    Tree,
    arrow_type,
    check_text,
    compile_type,
    flat_array,
)
from statekit.schema import StateSchema, Type

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 65536
_BYTES_MAX = 1 << 29  # of keys or values of a batch: offsets of a column count to 2 GiB

Stored: TypeAlias = tuple[Any, Any, int | None]  # encoded key, value as a Block has it, stamp


def key_names(codec: KeyCodec) -> list[str]:
    """The names of the key columns."""
    return [f"key_{at}" for at in range(len(codec.parts))] if codec.is_tuple else ["key"]


# ---- Rows, before they are columns


class Piece(NamedTuple):
    """Rows start to stop of some columns of a block, without those that `skip` marks with 1."""

    keys: memoryview  # of ints: 'q'
    key_offsets: memoryview | None
    values: memoryview  # of numbers: 'q' or 'd'
    value_offsets: memoryview | None
    stamps: memoryview | None
    start: int
    stop: int
    skip: Any = None  # a byte per row of the block

    @property
    def rows(self) -> int:
        rows = self.stop - self.start
        return rows if self.skip is None else rows - int(self.skip[self.start : self.stop].sum())

    @property
    def bytes(self) -> int:
        """Those of the larger of its two columns."""
        return max(
            _length(self.keys, self.key_offsets, self.start, self.stop),
            _length(self.values, self.value_offsets, self.start, self.stop),
        )

    def each(self) -> Iterator[Stored]:
        """The rows, one by one."""
        for row in range(self.start, self.stop):
            if self.skip is None or not self.skip[row]:
                key = _item(self.keys, self.key_offsets, row)
                value: Any = self.values[row] if self.value_offsets is None else None
                if self.value_offsets is not None:
                    value = _item(self.values, self.value_offsets, row)
                yield key, value, None if self.stamps is None else self.stamps[row]


def _item(column: memoryview, offsets: memoryview | None, row: int) -> bytes:
    if offsets is None:
        return column[row : row + 1].tobytes()
    return column[offsets[row] : offsets[row + 1]].tobytes()


def _length(column: memoryview, offsets: memoryview | None, start: int, stop: int) -> int:
    if offsets is None:
        return int((stop - start) * column.itemsize)
    return int(offsets[stop]) - int(offsets[start])


def piece_of(block: Block, schema: StateSchema, skip: Any = None) -> Piece:
    """All rows of a block. It must be of the state, or of the state before it became float."""
    if block.codec.text != schema.key or block.kind not in (schema.kind, _before(schema.kind)):
        raise CorruptBlockError(f"{block!r} is no block of {schema}{where(schema.name)}.")
    return Piece(
        block.key_column,
        block.key_offsets,
        block.value_column,
        block.value_offsets,
        block.stamps,
        0,
        block.entries,
        skip,
    )


def _before(kind: str) -> str:
    return "i64" if kind == "f64" else kind


def piece_of_rows(rows: Sequence[tuple[Any, ...]], schema: StateSchema) -> Piece:
    """Rows of encoded key, value as a Block gives it and (perhaps) stamp."""
    keys = Items.of([row[0] for row in rows])
    key_column, key_offsets = memoryview(keys.data), keys.offsets
    code = KINDS[schema.kind].code
    if code:
        values, offsets = memoryview(array(code, [row[1] for row in rows])), None
    else:
        items = Items.of([row[1] for row in rows])
        values, offsets = memoryview(items.data), items.offsets
    stamps = None
    if rows and len(rows[0]) > 2:
        stamps = memoryview(array("q", [NO_TIME if row[2] is None else row[2] for row in rows]))
    if schema.key == "i":
        return Piece(key_column.cast("q"), None, values, offsets, stamps, 0, len(rows))
    return Piece(key_column, key_offsets, values, offsets, stamps, 0, len(rows))


# ---- Columns


class StateColumns:
    """Makes record batches of the rows of one state."""

    def __init__(
        self, schema: StateSchema, *, text: Collection[str] = (), stamps: bool = False
    ) -> None:
        """text: types that are to be text. stamps: with the column of stamps."""
        package("numpy", f"state {schema.name!r} as Arrow")
        package("pyarrow", f"state {schema.name!r} as Arrow")
        import pyarrow

        self.state = schema
        self.text = check_text(text)
        self._codec = key_codec(schema.key)
        self._is_number = bool(KINDS[schema.kind].code)
        self._has_stamps = stamps and schema.timed
        self._tree: Tree | None = None
        value = pyarrow.list_(pyarrow.int64())
        if schema.form != "timers":
            value = arrow_type(schema.type, self.text)
            if not self._is_number:
                is_live = schema.form in ("list", "map", "set")
                self._tree = compile_type(schema.type, self.text, is_live)
        letters = {"s": pyarrow.string(), "b": pyarrow.binary(), "i": pyarrow.int64()}
        keys = [letters[letter] for letter in self._codec.parts]
        fields = [*zip(key_names(self._codec), keys, strict=True), ("value", value)]
        if self._has_stamps:
            fields.append(("stamp", pyarrow.int64()))
        #: The columns.
        self.schema: pyarrow.Schema = pyarrow.schema(fields)

    def batches(
        self, pieces: Iterable[Piece], batch_rows: int = BATCH_ROWS
    ) -> "Iterator[pyarrow.RecordBatch]":
        """Batches of batch_rows rows, of fewer at the end or where they would be too large."""
        held: list[Piece] = []
        rows = size = 0
        for piece in pieces:
            for part in _parts(piece):
                rest = part
                while rest.rows:
                    one, rest = _cut(rest, batch_rows - rows)
                    held.append(one)
                    rows += one.rows
                    size += one.bytes
                    if rows == batch_rows or size >= _BYTES_MAX:
                        yield self.batch(held)
                        held, rows, size = [], 0, 0
        if rows:
            yield self.batch(held)

    def batch(self, pieces: Sequence[Piece]) -> "pyarrow.RecordBatch":
        """All rows of some pieces."""
        import pyarrow

        arrays = [*self._keys(pieces), self._values(pieces)]
        if self._has_stamps:
            arrays.append(_stamps(pieces))
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _keys(self, pieces: Sequence[Piece]) -> list[Array]:
        if self._codec.text == "i":
            return [_numbers([(piece.keys, piece) for piece in pieces], "q")]
        keys = KeyUnpacking(self._codec)
        for piece in pieces:
            assert piece.key_offsets is not None
            keys.add(Items(piece.keys, piece.key_offsets), piece.start, piece.stop, piece.skip)
        return [flat_array(self.schema.field(at).type, one) for at, one in enumerate(keys.take())]

    def _values(self, pieces: Sequence[Piece]) -> Array:
        kind = self.schema.field("value").type
        if self._is_number:
            code = KINDS[self.state.kind].code
            return _numbers([(piece.values, piece) for piece in pieces], code)
        if self._tree is None:
            return self._plain(pieces, kind)
        columns = []
        for piece in pieces:
            assert piece.value_offsets is not None
            items = Items(piece.values, piece.value_offsets)
            columns.append((items, piece.start, piece.stop, piece.skip))
        found = self._tree.unpacked(columns)
        return self._plain(pieces, kind) if found is None else found

    def _plain(self, pieces: Sequence[Piece], kind: Any) -> Array:
        """The values one by one: what is not of its type is an error that says so."""
        codec = PlainCodec(self.state, "columns", text=self.text)
        values = [codec.read(value) for piece in pieces for _, value, _ in piece.each()]
        return _plain_array(values, kind, self.state)


def value_array(
    kind: Type, items: Sequence[bytes | None], text: Collection[str] = ()
) -> "pyarrow.Array":
    """Encoded values of a type as one array; null where there is None."""
    pyarrow = package("pyarrow", "to_arrow()")
    package("numpy", "to_arrow()")
    text = check_text(text)
    there = [item for item in items if item is not None]
    found = compile_type(kind, text, True).unpacked([(Items.of(there), 0, len(there), None)])
    if found is None:
        schema = StateSchema("", "value", "s", kind)
        codec = PlainCodec(schema, "columns", text=text)
        values = [codec.read(item) for item in there]
        found = _plain_array(values, arrow_type(kind, text), schema)
    if len(there) == len(items):
        return found
    places = iter(range(len(there)))
    return found.take(
        pyarrow.array([None if item is None else next(places) for item in items], pyarrow.int64())
    )


def _plain_array(values: list[Any], kind: Any, state: StateSchema) -> Array:
    import pyarrow

    try:
        return pyarrow.array(values, kind)
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:
        raise CorruptBlockError(
            f"what is stored does not fit a column of {kind} ({error})"
            f"{where(state.name or None)}. Its schema and its values do not agree."
        ) from None


def _cut(piece: Piece, rows: int) -> tuple[Piece, Piece]:
    """The first so many rows of a piece, and the rest."""
    if rows >= piece.rows:
        return piece, piece._replace(start=piece.stop)
    at = piece.start + rows
    if piece.skip is not None:
        kept = (piece.skip[piece.start : piece.stop] == 0).cumsum()
        at = piece.start + int(kept.searchsorted(rows)) + 1
    return piece._replace(stop=at), piece._replace(start=at)


def _parts(piece: Piece) -> Iterator[Piece]:
    """A piece in parts whose columns have at most _BYTES_MAX bytes, or a single row."""
    if piece.stop - piece.start <= 1 or piece.bytes <= _BYTES_MAX:
        yield piece
        return
    middle = (piece.start + piece.stop) // 2
    yield from _parts(piece._replace(stop=middle))
    yield from _parts(piece._replace(start=middle))


def _numbers(columns: Sequence[tuple[memoryview, Piece]], code: str) -> Array:
    """Numbers of 8 bytes, each column in one copy (or, if there is only one, in none)."""
    import numpy
    import pyarrow

    kind = pyarrow.int64() if code == "q" else pyarrow.float64()
    parts = []
    for column, piece in columns:
        part = numpy.frombuffer(column, column.format)[piece.start : piece.stop]
        if piece.skip is not None:
            part = part[piece.skip[piece.start : piece.stop] == 0]
        parts.append(part if column.format == code else part.astype(code))
    whole = parts[0] if len(parts) == 1 else numpy.concatenate([numpy.empty(0, code), *parts])
    return pyarrow.Array.from_buffers(kind, len(whole), [None, pyarrow.py_buffer(whole)])


def _stamps(pieces: Sequence[Piece]) -> Array:
    import pyarrow

    unknown = memoryview(array("q", [NO_TIME]) * max(piece.stop for piece in pieces))
    columns = [(unknown if one.stamps is None else one.stamps, one) for one in pieces]
    found = _numbers(columns, "q").to_numpy()
    return pyarrow.array(found, mask=found == NO_TIME)
