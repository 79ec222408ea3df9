"""Rows: an entry as its home keeps it.

    [ d7 ad stamp ] value        stamp: 8 bytes, big endian, ms; only in states with a time to live

The value is MessagePack, so that a home can be read without statekit: an int as d3 and 8 bytes,
a float as cb and 8 bytes, all else as it was encoded. (Timers are their due times, 8 bytes each.)
d7 ad opens an extension type below zero, which MessagePack keeps for itself and no value has.
"""

from collections.abc import Callable
from struct import Struct, error
from typing import Any

from statekit.errors import CorruptBlockError, shorten
from statekit.kinds import KINDS
from statekit.native import Block

STAMP_MARK = b"\xd7\xad"
_STAMP = Struct(">q")
_STAMPED = len(STAMP_MARK) + _STAMP.size
_INT = Struct(">Bq")
_FLOAT = Struct(">Bd")
_NATIVE_INT = Struct("<q")
_NATIVE_FLOAT = Struct("<d")
_INT_HEAD, _FLOAT_HEAD = KINDS["i64"].head, KINDS["f64"].head
NUMBER_KINDS = frozenset({"i64", "f64"})  # whose rows are not as the store has them


def _pack_int(value: int) -> bytes:
    return _INT.pack(_INT_HEAD, value)


def _pack_float(value: float) -> bytes:
    return _FLOAT.pack(_FLOAT_HEAD, value)


# From the value as a Block gives it.
_PACK: dict[str, Callable[[Any], bytes]] = {"i64": _pack_int, "f64": _pack_float}


def block_rows(block: Block) -> list[bytes | None]:
    """The rows of a block's entries; None for a deletion."""
    values = block.value_list()
    pack = _PACK.get(block.kind)
    if pack is not None:
        values = [None if value is None else pack(value) for value in values]
    if block.stamps is not None:
        values = [
            None if value is None else STAMP_MARK + _STAMP.pack(stamp) + value
            for value, stamp in zip(values, block.stamps, strict=True)
        ]
    return values


def split_stamp(kind: str, row: bytes) -> tuple[bytes, int | None]:
    """The value of a row and its stamp; None if it was written without a time to live."""
    if row[:2] != STAMP_MARK or not KINDS[kind].may_expire:  # due times may begin with any bytes
        return row, None
    if len(row) < _STAMPED:
        raise _damaged(row)
    return row[_STAMPED:], _STAMP.unpack_from(row, len(STAMP_MARK))[0]


def read_value(kind: str, value: bytes) -> Any:
    """The value as a Block gives it. An int is good for a float: the schema may have changed."""
    if kind != "i64" and kind != "f64":
        return value
    try:
        head, number = (_INT if value[:1] == b"\xd3" else _FLOAT).unpack(value)
    except error:
        raise _damaged(value) from None
    if kind == "f64" and head in (_INT_HEAD, _FLOAT_HEAD):
        return float(number)
    if kind == "i64" and head == _INT_HEAD:
        return number
    raise _damaged(value)


def native_value(kind: str, value: bytes) -> bytes:
    """The encoded value that the store takes."""
    if kind == "i64":
        return _NATIVE_INT.pack(read_value(kind, value))
    if kind == "f64":
        return _NATIVE_FLOAT.pack(read_value(kind, value))
    return value


def native_read(kind: str, encoded: bytes) -> Any:
    """The value as a Block gives it, from what the store encodes."""
    if kind == "i64":
        return _NATIVE_INT.unpack(encoded)[0]
    return _NATIVE_FLOAT.unpack(encoded)[0] if kind == "f64" else encoded


def _damaged(row: bytes) -> CorruptBlockError:
    return CorruptBlockError(
        f"{shorten(row)} is no row that statekit wrote. "
        "Check whether another program wrote to this home, or restore it from a checkpoint."
    )
