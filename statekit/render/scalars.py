"""Plain scalars: one function that reads, one that writes, for each type."""

import datetime
import decimal
import math
import uuid
from typing import Any

import msgspec

from statekit.errors import shorten
from statekit.render.keys import parse_hex
from statekit.render.wire import MisfitError, NoColumnError, Node, PackedMap, Read, Write, pack

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_ODD_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
TEXTS: dict[str, Any] = {
    "date": datetime.date, "time": datetime.time, "timedelta": datetime.timedelta,
    "uuid": uuid.UUID, "decimal": decimal.Decimal,
}  # fmt: skip


def as_int(plain: Any) -> int:
    if plain.__class__ is not int or not _INT_MIN <= plain <= _INT_MAX:
        raise MisfitError(plain, "int of 64 bits" if plain.__class__ is int else "int")
    return int(plain)


def as_float(plain: Any) -> float:
    if plain.__class__ is float:
        return float(plain)
    if isinstance(plain, str) and plain in _ODD_FLOATS:
        return _ODD_FLOATS[plain]
    if plain.__class__ is int:
        try:
            number = float(plain)
        except OverflowError:
            raise MisfitError(plain, "float") from None
        if number == plain:
            return number
        raise MisfitError(plain, f"a number that a float is equal to, such as {number!r}")
    raise MisfitError(plain, "float")


def write_float(plain: Any) -> bytes:
    return pack(as_float(plain))


def read_float(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)  # an int: it was stored before the schema changed to float
    raise ValueError("not a float")


def read_float_json(value: Any) -> float | str:
    number = read_float(value)
    return number if math.isfinite(number) else odd_text(number)


def odd_text(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def write_bytes(plain: Any) -> bytes:
    if isinstance(plain, str):
        data = parse_hex(plain)
        if data is None:
            raise MisfitError(plain, 'bytes in hex, such as "0x6162"')
        return pack(data)
    if isinstance(plain, bytes):
        return pack(plain)
    raise MisfitError(plain, "bytes")


def write_datetime(plain: Any) -> bytes:
    if isinstance(plain, str):
        try:
            plain = datetime.datetime.fromisoformat(plain)
        except ValueError:
            raise MisfitError(plain, "a datetime such as 2026-11-16T12:00:00+00:00") from None
    if not isinstance(plain, datetime.datetime):
        raise MisfitError(plain, "a datetime")
    return pack(plain)


def read_datetime_text(value: Any) -> str:
    """The text of a stored datetime. One without a time zone is stored as text."""
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    text: str = value.isoformat()
    return text


# ---- Columns that are not text. Each holds less than the type in Python does.

DECIMAL_DIGITS, DECIMAL_SCALE = 38, 18  # of a column of decimals: what Spark makes of a Decimal
_SMALLEST = decimal.Decimal(1).scaleb(-DECIMAL_SCALE)
_EXACT = decimal.Context(
    prec=DECIMAL_DIGITS, traps=[decimal.Inexact, decimal.InvalidOperation, decimal.FloatOperation]
)
_MICROSECOND = datetime.timedelta(microseconds=1)


def _datetime_column(value: Any) -> datetime.datetime:
    if isinstance(value, str):
        naive = datetime.datetime.fromisoformat(value)
        why = "has no time zone, and a column of moments has no place for it"
        raise NoColumnError(naive, "datetime", why)
    found: datetime.datetime = value
    return found


def _time_column(value: Any) -> datetime.time:
    found: datetime.time = msgspec.convert(expect_str(value), datetime.time)
    if found.tzinfo is not None:
        raise NoColumnError(found, "time", "has a time zone, which a column of times has not")
    return found


def _timedelta_column(value: Any) -> datetime.timedelta:
    found: datetime.timedelta = msgspec.convert(expect_str(value), datetime.timedelta)
    if not _INT_MIN <= found // _MICROSECOND <= _INT_MAX:
        raise NoColumnError(found, "timedelta", "has more microseconds than fit into 64 bits")
    return found


def _decimal_column(value: Any) -> decimal.Decimal:
    try:
        found = decimal.Decimal(expect_str(value))
    except decimal.InvalidOperation:
        raise ValueError("not a decimal") from None
    try:
        if found.is_finite():
            return _EXACT.quantize(found, _SMALLEST)
    except (decimal.Inexact, decimal.InvalidOperation):
        pass
    columns = f"decimal({DECIMAL_DIGITS}, {DECIMAL_SCALE})"
    raise NoColumnError(found, "decimal", f"does not fit a column of {columns}")


def text_writer(kind: str) -> Write:
    cls = TEXTS[kind]

    def write(plain: Any) -> bytes:
        if isinstance(plain, str) or type(plain) is cls:
            try:
                return pack(msgspec.convert(plain, cls))
            except msgspec.ValidationError:
                pass
        raise MisfitError(plain, f"{kind} in ISO 8601" if kind not in ("uuid", "decimal") else kind)

    return write


def class_reader(*classes: type) -> Read:
    def read(value: Any) -> Any:
        if value.__class__ not in classes:
            raise ValueError(f"{shorten(value)} is no {classes[0].__name__}")
        return value

    return read


def class_writer(cls: type, name: str) -> Write:
    def write(plain: Any) -> bytes:
        if plain.__class__ is not cls:
            raise MisfitError(plain, name)
        try:
            return pack(plain)
        except UnicodeEncodeError:
            raise MisfitError(plain, "text that has a UTF-8 form") from None

    return write


def write_int(plain: Any) -> bytes:
    return pack(as_int(plain))


expect_str = class_reader(str)
expect_list = class_reader(list)
expect_map = class_reader(PackedMap)
SCALARS: dict[str, tuple[Read, Write]] = {
    "int": (class_reader(int), write_int),
    "float": (read_float, write_float),
    "bool": (class_reader(bool), class_writer(bool, "bool")),
    "str": (expect_str, class_writer(str, "str")),
    "bytes": (class_reader(bytes), write_bytes),
    "none": (class_reader(type(None)), class_writer(type(None), "null")),
}


# The types that have columns of their own, and may be text instead; how each is read.
TYPED_COLUMNS: dict[str, Read] = {
    "datetime": _datetime_column,
    "date": lambda value: datetime.date.fromisoformat(expect_str(value)),
    "time": _time_column,
    "timedelta": _timedelta_column,
    "decimal": _decimal_column,
}


def enum_node(name: str, values: list[Any]) -> Node:
    def known(value: Any) -> bool:
        return any(value == one and type(value) is type(one) for one in values)

    def read(value: Any) -> Any:
        if not known(value):
            raise ValueError(f"{shorten(value)} is no value of {name}")
        return value

    def write(plain: Any) -> bytes:
        if not known(plain):
            raise MisfitError(plain, f"one of {', '.join(map(repr, values))}")
        return pack(plain)

    return Node(read, write)
