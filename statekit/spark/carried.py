"""Rows on their way through Spark's conversions to pandas and to Row, with nothing lost.

Where Spark keeps the state, it also makes the rows that a function is given, and on the way an int
beside a null becomes a float, an instant a time without zone, a null a NaN. So columns travel in a
form that comes through as it is, and become Arrow columns again in the worker:

    ints, floats, booleans    without nulls; which rows are null says a column of bits, `nulls`
    instants, dates           the same, as microseconds and days since 1970
    texts, binary, decimals   as they are

Names are c0, c1, ...; the key k0, k1, ... A column with a watermark is sent as it is, too, because
Spark looks for it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statekit.errors import ArgumentError
from statekit.spark.output import arrow_schema
from statekit.spark.routing import plan_routing, quoted
from statekit.spark.rows import Columns

_WATERMARK = "spark.watermarkDelayMs"  # in the metadata of a column
_NULLS_MAX = 63  # bits

# How a type travels: SQL in which {} is the column, and what stands for a null.
_INTS = {"tinyint", "smallint", "int", "bigint"}
_EXPRESSIONS = {
    "boolean": ("{}", "false"),
    "float": ("{}", "float(0)"),
    "double": ("{}", "0D"),
    "date": ("unix_date({})", "0"),
    "timestamp": ("unix_micros({})", "0L"),
    "timestamp_ntz": ("timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01 00:00:00', {})", "0L"),
}
_AS_THEY_ARE = ("string", "binary", "decimal", "char", "varchar")


class Field(NamedTuple):
    """A column of the input, as a worker makes it again."""

    name: str
    type: pa.DataType
    is_whole: bool  # it travels without nulls


class Carried(NamedTuple):
    """How the rows of an op travel."""

    frame: Any  # the DataFrame that Spark is to group
    key: list[str]  # columns of it
    key_type: str
    fields: list[Field]
    has_watermark: bool


def carry(df: Any, key: Sequence[str], null_keys: str) -> Carried:
    """ArgumentError if a column is of a type that does not come through."""
    from pyspark.sql import functions as F  # noqa: N812

    routing = plan_routing(df.schema, key)
    casts = dict(routing.casts)
    if null_keys == "drop":
        for name in key:
            df = df.where(F.col(quoted(name)).isNotNull())
    columns, fields, watermarks = [], [], []
    nulls: list[str] = []
    types = arrow_schema(df.schema)
    for at, field in enumerate(df.schema.fields):
        text, column = field.dataType.simpleString(), quoted(field.name)
        is_whole = not text.startswith(_AS_THEY_ARE)
        kind, wanted = types.field(field.name).type, casts.get(field.name)
        if wanted is not None:  # as in foreachBatch, where a key is cast before it is sent
            kind = {"bigint": pa.int64(), "string": pa.string(), "binary": pa.binary()}[wanted]
            text, column, is_whole = wanted, f"cast({column} as {wanted})", wanted == "bigint"
        if is_whole:
            form, zero = _EXPRESSIONS.get(text, ("{}", "0") if text in _INTS else ("", ""))
            if not form:
                raise ArgumentError(
                    f"the column {field.name!r} is of type {text}, which does not come through "
                    "Spark's conversions to Python as it is. Select what you need of it as columns "
                    "of their own, make it text with F.to_json(), or leave it out."
                )
            nulls.append(f"if({column} is null, {1 << len(nulls)}L, 0L)")
            column = f"coalesce({form.format(column)}, {zero})"
        columns.append(F.expr(column).alias(f"c{at}"))
        fields.append(Field(field.name, kind, is_whole))
        if _WATERMARK in (field.metadata or {}):
            watermarks.append(F.col(quoted(field.name)).alias(f"w{at}"))
    if len(nulls) > _NULLS_MAX:
        raise ArgumentError(
            f"the rows have {len(nulls)} columns of numbers, times and booleans; here there can be "
            f"{_NULLS_MAX}. Select those that the function looks at."
        )
    keys = [
        F.expr(
            f"coalesce(cast({quoted(name)} as {_key_type(letter)}), cast(raise_error('A row has a "
            "null in its key. Drop such rows, or give them a key, before the StatefulOp; or pass "
            f"null_keys=\"drop\" to have them left out.') as {_key_type(letter)}))"
        ).alias(f"k{at}")
        for at, (name, letter) in enumerate(
            zip(key, routing.key_type.strip("()"), strict=True)
        )
    ]  # fmt: skip
    bits = F.expr(" + ".join(nulls) if nulls else "0L").alias("nulls")
    frame = df.select(*keys, *columns, bits, *watermarks)
    names = [f"k{at}" for at in range(len(keys))]
    return Carried(frame, names, routing.key_type, fields, bool(watermarks))


def _key_type(letter: str) -> str:
    return {"i": "bigint", "s": "string", "b": "binary"}[letter]


# ---- In a worker


class Pieces:
    """The rows of one key as they came: from DataFrames of pandas, or from Rows."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self.names = [*(f"c{at}" for at in range(len(fields))), "nulls"]

    def from_frames(self, frames: Iterable[Any]) -> pa.Table:
        """frames: DataFrames of pandas."""
        pieces = [frame for frame in frames if len(frame)]
        return self._table(
            [np.concatenate([piece[name].to_numpy() for piece in pieces]) for name in self.names]
            if pieces
            else []
        )

    def from_rows(self, rows: Iterable[Any]) -> pa.Table:
        """rows: Rows of Spark."""
        found = [*rows]
        return self._table([[row[name] for row in found] for name in self.names] if found else [])

    def _table(self, columns: list[Any]) -> pa.Table:
        schema = pa.schema([(field.name, field.type) for field in self._fields])
        if not columns:
            return schema.empty_table()
        *values, bits = columns
        nulls = np.asarray(bits, np.int64)
        arrays, bit = [], 0
        for field, items in zip(self._fields, values, strict=True):
            if field.is_whole:
                mask = (nulls >> bit) & 1 != 0
                bit += 1
                arrays.append(_whole(field.type, items, mask))
            else:
                arrays.append(_as_it_was(field.type, items))
        return pa.Table.from_arrays(arrays, schema=schema)


def _whole(kind: pa.DataType, items: Any, mask: Any) -> pa.Array:
    """A column that came without its nulls."""
    travelled = kind
    if pa.types.is_timestamp(kind):
        travelled = pa.int64()
    elif pa.types.is_date(kind):
        travelled = pa.int32()
    found = pa.array(np.asarray(items, travelled.to_pandas_dtype()), travelled, mask=mask)
    return found.cast(kind) if travelled is not kind else found


def _as_it_was(kind: pa.DataType, items: Any) -> pa.Array:
    """A column of texts, binary or decimals; None is null."""
    if pa.types.is_binary(kind):
        items = [None if item is None else bytes(item) for item in items]
    return pa.array(list(items), kind)


def columns_of(table: pa.Table) -> Columns:
    """The rows of a key, as Rows wants them."""
    return Columns(table, None)
