"""Exact values: scalars and Any, and the error for what does not fit. See fit.py."""

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import index
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from msgspec.msgpack import Decoder, Encoder, Ext

from statekit.errors import shorten
from statekit.schema import Type, show

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

# What converting, packing or decoding a value may raise if the value does not fit.
VALUE_FAULTS = (
    TypeError,
    ValueError,  # UnicodeEncodeError and msgspec.ValidationError are ValueErrors
    OverflowError,
    AttributeError,
    RecursionError,
)


class InexactError(ValueError):
    """A number that no float is equal to."""

    advice = "Pass float(x), which rounds it, or declare the state with Decimal."


def exact_float(value: Any) -> float:
    """The float that is equal to a number; any NaN for one that is not equal to itself."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError("no number: float() would parse it")
    number = float(value)
    if number != value and value == value:
        raise InexactError(f"has no equal float; the nearest one is {number!r}")
    return number


class MisfitError(TypeError):
    """A value that is not of its type. Each level on the way out adds its step to the path."""

    def __init__(self, value: Any, kind: Type, why: str = "", advice: str = "") -> None:
        super().__init__(why)
        self.value = value
        self.type = kind
        self.why = why  # "" if the value is just of another class
        self.advice = advice
        self.is_too_large = False  # a number that has more than 64 bits
        self.role = ""  # "a key", "a member": of what the path leads to
        self.path: list[str] = []  # innermost first

    def enter(self, step: str, role: str = "") -> None:
        """Called by each level that the value is in."""
        self.path.append(step)
        self.role = self.role or role

    def problem(self) -> str:
        """What is wrong: the words that follow the value in a sentence."""
        if self.why:
            return self.why
        given, wanted = type(self.value).__name__, show(self.type)
        if given == wanted:
            return f"is of another class that is called {given}"
        return f"is of type {given}, not {wanted}"

    def place(self) -> str:
        """Where the value is in what was given; "" if it is all that was given."""
        at = "".join(reversed(self.path))
        if not at and not self.role:
            return ""
        words = [self.role, f"at {at}" if at else "", "of what was given"]
        return f", {' '.join(word for word in words if word)},"

    def what_to_do(self) -> str:
        return self.advice or f"Pass a value of type {show(self.type)}."


Field: TypeAlias = tuple[str, type | None, Callable[[Any], bool] | None]


class Fit(NamedTuple):
    """How values of one type are checked before they are packed."""

    kind: Type
    is_exact: Callable[[Any], bool]  # may raise VALUE_FAULTS: then the value is not exact
    convert: Callable[[Any], Any]  # gives what is packed in its place, or raises MisfitError
    # If a value is exact whenever it is of one of these classes: the classes. Then checking a whole
    # container costs no call for each of its items.
    classes: frozenset[type] | None = None
    # The source of is_exact(value) and the names in it, for callers that generate a function.
    source: tuple[str, dict[str, Any]] | None = None
    # The same of a record, for C: its class; for each field the name, and the class that its value
    # must have, or what tests it.
    record: tuple[type, tuple[Field, ...]] | None = None


def view_copy(value: Any) -> Any:
    """A plain copy of a live view; the value itself if it is not a view."""
    copy = getattr(value.__class__, "_plain", None)
    return value if copy is None else copy(value)


def _pack_view(value: Any) -> Any:
    copy = view_copy(value)
    if copy is value:
        raise TypeError(f"objects of type {type(value).__name__} cannot be stored")
    return copy


pack: Callable[[Any], bytes] = Encoder(enc_hook=_pack_view).encode


# ---- Scalars


def convert_int(value: Any) -> int:
    try:
        number = int(index(value))
        is_equal = bool(number == value)
    except (TypeError, ValueError):
        raise MisfitError(value, "int") from None
    if not is_equal:
        raise MisfitError(value, "int")
    if not INT_MIN <= number <= INT_MAX:
        misfit = MisfitError(
            value,
            "int",
            "does not fit into 64 bits, which is -2**63 to 2**63 - 1",
            "Declare it as Decimal, float or str, or pass a smaller int.",
        )
        misfit.is_too_large = True
        raise misfit
    return number


def convert_float(value: Any) -> float:
    try:
        return exact_float(value)
    except InexactError as fault:
        raise MisfitError(value, "float", str(fault), fault.advice) from None
    except OverflowError:
        misfit = MisfitError(value, "float", "is larger than any float", "Declare it as Decimal.")
        misfit.is_too_large = True
        raise misfit from None
    except (TypeError, ValueError):
        raise MisfitError(value, "float") from None


def _convert_member_float(value: Any) -> float:
    return convert_float(value) + 0.0


def convert_bool(value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    if getattr(getattr(value, "dtype", None), "kind", "") == "b" and not value.shape:
        return bool(value)  # NumPy's
    raise MisfitError(value, "bool")


def convert_str(value: Any) -> str:
    if not isinstance(value, str):
        raise MisfitError(value, "str")
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MisfitError(
            value, "str", "has no UTF-8 form", "Remove its lone surrogates, or use bytes."
        ) from None
    return text


def convert_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        if data == value:  # else it is a memoryview of numbers
            return data
    raise MisfitError(value, "bytes")


def _convert_none(value: Any) -> None:
    if value is not None:
        raise MisfitError(value, "none")


def convert_datetime(value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise MisfitError(value, "datetime")
    try:
        plain = datetime(
            value.year, value.month, value.day, value.hour, value.minute, value.second,
            value.microsecond, value.tzinfo, fold=value.fold,
        )  # fmt: skip
        offset = plain.utcoffset()
    except (TypeError, ValueError):  # pandas.NaT
        raise MisfitError(value, "datetime") from None
    if getattr(value, "nanosecond", 0):
        raise MisfitError(
            value, "datetime", "has nanoseconds, which a datetime has not",
            "Round it to microseconds, or store its .value as an int.",
        )  # fmt: skip
    if offset is not None:
        try:
            return plain.astimezone(UTC)
        except OverflowError:
            raise MisfitError(
                value, "datetime", "is not between the years 1 and 9999 in UTC",
                "Leave its time zone out, or pass another time.",
            ) from None  # fmt: skip
    if plain.tzinfo is not None or plain.fold:
        raise MisfitError(
            value, "datetime", "has fold=1 or a time zone without an offset, which are not kept",
            "Pass it with a time zone, which tells which moment it is, or with fold=0.",
        )  # fmt: skip
    return plain


def _is_exact_datetime(value: Any) -> bool:
    if value.__class__ is not datetime:
        return False
    zone = value.tzinfo
    return zone is UTC or (zone is None and not value.fold)


def _convert_date(value: Any) -> date:
    if isinstance(value, datetime):
        raise MisfitError(value, "date", advice="Pass its .date().")
    if not isinstance(value, date):
        raise MisfitError(value, "date")
    return date(value.year, value.month, value.day)


_decode_time = Decoder(time).decode


def _convert_time(value: Any) -> time:
    if not isinstance(value, time):
        raise MisfitError(value, "time")
    plain = time(
        value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold
    )
    back = _decode_time(pack(plain))
    if back.tzinfo != plain.tzinfo or back != plain or plain.fold:
        raise MisfitError(
            value, "time", "has a time zone that is no offset of whole minutes, or fold=1",
            "Pass it without, and keep the zone's name beside it.",
        )  # fmt: skip
    return plain


def _is_exact_time(value: Any) -> bool:
    return value.__class__ is time and value.tzinfo is None and not value.fold


def _convert_timedelta(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        try:
            plain = timedelta(value.days, value.seconds, value.microseconds)
        except (TypeError, ValueError):  # pandas.NaT
            raise MisfitError(value, "timedelta") from None
        if plain == value:  # else it has nanoseconds
            return plain
    raise MisfitError(value, "timedelta")


def _convert_uuid(value: Any) -> UUID:
    if not isinstance(value, UUID):
        raise MisfitError(value, "uuid")
    return UUID(int=value.int)


def _convert_decimal(value: Any) -> Decimal:
    if not isinstance(value, Decimal):
        raise MisfitError(value, "decimal")
    return Decimal(value)


def is_exact_int(value: Any) -> bool:
    return value.__class__ is int and INT_MIN <= value <= INT_MAX


def by_class(kind: Type, convert: Callable[[Any], Any], *classes: type) -> Fit:
    """The fit of a type whose values are exact if they are of these classes."""
    known = frozenset(classes)
    source = "value.__class__ in known", {"known": known}
    return Fit(kind, lambda value: value.__class__ in known, convert, known, source)


# ---- Any: what MessagePack has, and nothing that would come back as something else


def _keep_ext(code: int, data: memoryview) -> Ext:
    if code < 0:
        raise ValueError("MessagePack's own, of which rows.py uses one")
    return Ext(code, bytes(data))


_decode_any = Decoder(ext_hook=_keep_ext).decode
_ANY_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
_ANY = "None, bool, int, float, str, bytes, an aware datetime, or lists and dicts of these"


def is_exact_any(value: Any) -> bool:
    """Whether a value comes back equal. A NaN does not, so a list with one has to be converted."""
    if value.__class__ in _ANY_SCALARS:
        return True
    if value.__class__ is datetime:
        return value.tzinfo is UTC  # it comes back in UTC: not equal if another zone is in a fold
    try:
        return bool(_decode_any(pack(value)) == value)
    except VALUE_FAULTS:
        return False


def _is_exact_any_key(value: Any) -> bool:
    return is_exact_any({value: None})  # as a key: tuples are tuples there


def convert_any(value: Any) -> Any:
    value = view_copy(value)
    if isinstance(value, list):
        return [converted(f"[{at}]", convert_any, one) for at, one in enumerate(value)]
    if isinstance(value, dict):
        return {
            converted("", convert_any_key, one, "a key"): converted(
                f"[{shorten(one)}]", convert_any, other
            )
            for one, other in value.items()
        }
    return _convert_any_scalar(value)


def convert_any_key(value: Any) -> Any:
    """Keys come back as they are if they are scalars, or tuples of them."""
    if isinstance(value, tuple):
        return tuple(converted(f"[{at}]", convert_any_key, one) for at, one in enumerate(value))
    return _convert_any_scalar(value)


def _is_exact_live_key(value: Any) -> bool:
    is_nested = value.__class__ is tuple and any(isinstance(one, tuple) for one in value)
    return not is_nested and _is_exact_any_key(value)


def _convert_live_key(value: Any) -> Any:
    if isinstance(value, tuple) and any(isinstance(one, tuple) for one in value):
        raise MisfitError(
            value, "any", "is a tuple in which there are tuples",
            "Pass None, bool, int, float, str, bytes, an aware datetime, or a tuple of these.",
        )  # fmt: skip
    return convert_any_key(value)


def _convert_any_scalar(value: Any) -> Any:
    if value is None or value.__class__ in (bool, float):
        return value
    if isinstance(value, Enum) and not isinstance(value, int | str):
        raise _forgotten(value)
    if value.__class__ is Ext and value.code >= 0:
        return value
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise _forgotten(value)
        return convert_datetime(value)
    for cls, convert in _ANY_CONVERT:
        if isinstance(value, cls) or (cls is not str and _is_numpy(value, cls)):
            return convert(value)
    raise _forgotten(value)


def _is_numpy(value: Any, cls: type) -> bool:
    kinds = {bool: "b", int: "iu", float: "f"}.get(cls, "")
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return bool(kind) and kind in kinds and not value.shape


def _convert_any_int(value: Any) -> int:
    number = int(index(value))
    if not INT_MIN <= number < 2**64:
        return convert_int(value)  # refuses it
    return number


_ANY_CONVERT: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, convert_str),
    (bool, convert_bool),
    (int, _convert_any_int),
    (float, convert_float),
    (bytes, convert_bytes),
    (bytearray, convert_bytes),
    (memoryview, convert_bytes),
)


def _forgotten(value: Any) -> MisfitError:
    return MisfitError(
        value,
        "any",
        f"is of type {type(value).__name__}, which an Any would not give back",
        f"Pass {_ANY}, or declare the type that it has.",
    )


def converted(step: str, convert: Callable[[Any], Any], value: Any, role: str = "") -> Any:
    """Converts a part of a value. `step` is added to the path of an error."""
    try:
        return convert(value)
    except MisfitError as misfit:
        misfit.enter(step, role)
        raise


SCALARS: dict[str, Fit] = {
    "int": Fit("int", is_exact_int, convert_int),
    "float": by_class("float", convert_float, float),
    "bool": by_class("bool", convert_bool, bool),
    "str": by_class("str", convert_str, str),
    "bytes": by_class("bytes", convert_bytes, bytes),
    "none": by_class("none", _convert_none, type(None)),
    "datetime": Fit("datetime", _is_exact_datetime, convert_datetime),
    "date": by_class("date", _convert_date, date),
    "time": Fit("time", _is_exact_time, _convert_time),
    "timedelta": by_class("timedelta", _convert_timedelta, timedelta),
    "uuid": by_class("uuid", _convert_uuid, UUID),
    "decimal": by_class("decimal", _convert_decimal, Decimal),
    "any": Fit("any", is_exact_any, convert_any),
}
MEMBER_FLOAT = Fit(
    "float", lambda value: value.__class__ is float and value != 0.0, _convert_member_float
)
ANY_KEY = Fit("any", _is_exact_any_key, convert_any_key)
LIVE_ANY_KEY = Fit("any", _is_exact_live_key, _convert_live_key)
