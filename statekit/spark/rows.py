"""The rows of a task, grouped by key: sliced and converted only where somebody looks.

Keys are numbered in the order in which they first appear. A stable argsort of these numbers brings
the rows of a key together, in the order in which they came; it is made when a column is first
read, and a function that only counts its rows never needs it. A column becomes Python objects once
for the whole task, when it is first asked for; the rows of a key are a slice of that list.
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statekit.errors import ArgumentError


class Columns:
    """The columns of a task, sorted by key."""

    def __init__(self, table: pa.Table, order: Any) -> None:
        self.names: list[str] = table.column_names
        self._table = table
        self._unsorted: Any = order  # called for the order; None once the table is sorted
        self._lists: dict[str, list[Any]] = {}
        self._row_type: Any = None

    @property
    def table(self) -> pa.Table:
        if self._unsorted is not None:
            self._table = self._table.take(self._unsorted()).combine_chunks()
            self._unsorted = None
        return self._table

    def items(self, name: str) -> list[Any]:
        """A column as Python objects."""
        found = self._lists.get(name)
        if found is None:
            if name not in self.names:
                raise ArgumentError(
                    f"the rows have no column {name!r}. They have {', '.join(self.names)}."
                )
            column = self.table.column(name)
            is_number = pa.types.is_integer(column.type) or pa.types.is_float64(column.type)
            if is_number and not column.null_count:
                found = column.to_numpy().tolist()  # many times as fast as to_pylist()
            else:
                found = column.to_pylist()
            self._lists[name] = found
        return found

    @property
    def make(self) -> Any:
        """The type of a row."""
        if self._row_type is None:
            self._row_type = _row_type(self.names)
        return self._row_type


def _row_type(names: list[str]) -> Any:
    return namedtuple("Row", names, rename=True)


class Rows(Sequence[Any]):
    """The rows of one key, in the order in which they came.

    len(rows); rows["amount"], a column as a list; for row in rows, a named tuple of all columns;
    to_arrow() and to_pandas(). What is not looked at is never converted.
    """

    __slots__ = ("_columns", "_start", "_stop")

    def __init__(self, columns: Columns, start: int, stop: int) -> None:
        self._columns = columns
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, at: Any) -> Any:
        """A column by its name, or a row by its position."""
        if at.__class__ is str:
            return self._columns.items(at)[self._start : self._stop]
        if isinstance(at, slice):
            return list(self)[at]
        where = range(self._start, self._stop)[at]
        columns = self._columns
        return columns.make(*(columns.items(name)[where] for name in columns.names))

    def __iter__(self) -> Iterator[Any]:
        columns = self._columns
        return map(columns.make._make, zip(*(self[name] for name in columns.names), strict=True))

    def to_arrow(self) -> pa.Table:
        """These rows as a table, without a copy."""
        return self._columns.table.slice(self._start, len(self))

    def to_pandas(self) -> Any:
        return self.to_arrow().to_pandas()

    def __repr__(self) -> str:
        return f"<Rows: {len(self)} rows of {', '.join(self._columns.names)}>"


class Grouped:
    """The keys of a task, each once, and the rows of each."""

    def __init__(self, table: pa.Table, key: Sequence[str]) -> None:
        codes, firsts = _codes(table, key)
        columns = [_flat(table.column(name).take(firsts)) for name in key]
        #: The keys as a column that a state takes: an array, or for several columns a tuple of them
        self.column: Any = columns[0] if len(key) == 1 else tuple(columns)
        ends = np.cumsum(np.bincount(codes, minlength=len(firsts)))
        self.bounds: list[int] = [0, *ends.tolist()]
        self.columns = Columns(table, lambda: np.argsort(codes, kind="stable"))

    def keys(self) -> list[Any]:
        return keys_of(self.column)


def keys_of(column: Any) -> list[Any]:
    """A column of keys as Python objects."""
    if isinstance(column, tuple):
        return list(zip(*(part.to_pylist() for part in column), strict=True))
    items: list[Any] = column.to_pylist()
    return items


def column_of(keys: Sequence[Any], key_type: str) -> Any:
    """Python objects as a column of keys; the inverse of keys_of()."""
    types = {"s": pa.string(), "b": pa.binary(), "i": pa.int64()}
    if key_type in types:
        return pa.array(keys, types[key_type])
    parts = zip(*keys, strict=True)
    return tuple(
        pa.array(part, types[letter]) for letter, part in zip(key_type[1:-1], parts, strict=True)
    )


def _codes(table: pa.Table, key: Sequence[str]) -> tuple[Any, Any]:
    """The number of each row's key, and the row in which each number appears first."""
    codes, count = None, 1
    for name in key:
        encoded = _flat(table.column(name)).dictionary_encode()
        part = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        if codes is None:
            codes, count = part, len(encoded.dictionary)
        else:
            # Numbered anew after each column, so that the product cannot pass 64 bits.
            joined = pa.array(codes * len(encoded.dictionary) + part).dictionary_encode()
            codes = joined.indices.to_numpy().astype(np.int64, copy=False)
            count = len(joined.dictionary)
    assert codes is not None
    firsts = np.empty(count, np.int64)
    firsts[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last one written is the first row
    return codes, firsts


def _flat(column: Any) -> Any:
    """A chunked column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def count_nulls(table: pa.Table, key: Sequence[str]) -> int:
    """How many rows have a null in their key."""
    whole = int(_has_key(table, key).sum())
    return int(table.num_rows) - whole


def drop_nulls(table: pa.Table, key: Sequence[str]) -> pa.Table:
    """The rows whose keys are whole."""
    return table.filter(pa.array(_has_key(table, key)))


def _has_key(table: pa.Table, key: Sequence[str]) -> Any:
    found = np.ones(table.num_rows, bool)
    for name in key:
        column = table.column(name)
        if column.null_count:
            found &= _flat(pc.is_valid(column)).to_numpy(zero_copy_only=False)
    return found


def split_late(table: pa.Table, event_time: str, watermark: int) -> tuple[Any, int]:
    """Which rows are not late, and how many are. A row is late at or before the watermark, as for
    Spark's own operators; a row without a time is not.
    """
    column = table.column(event_time)
    at = pa.scalar(watermark, pa.timestamp("ms")).cast(pa.timestamp(column.type.unit))
    plain = column.cast(pa.timestamp(column.type.unit))  # UTC, without its zone
    late = pc.fill_null(pc.less_equal(plain, at), False)
    count = int(pc.sum(late).as_py() or 0)
    return pc.invert(late), count
