"""Codecs: how values of one type become MessagePack and back, compiled once per type.

Measured on a dataclass of five fields (CPython 3.11, ns): msgspec encodes it in 260 and decodes
it in 550; msgpack needs 640 and 900 for the same map. So msgspec does the work, and tests read
the result with msgpack.

What is stored can be read: a value is checked before it goes in. Scalars by their class, flat
dataclasses by a generated function, items of containers each as if alone, all else by decoding
what was encoded.

A *shape* is the part of a type that stays alive in the store: lists, dicts and sets from the
root down. Below it everything is a value, read and written as a whole.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import index
from struct import Struct
from typing import Annotated, Any, NamedTuple, TypeAlias
from uuid import UUID

import msgspec
from msgspec.msgpack import Decoder, Encoder

from statekit.errors import SchemaError
from statekit.schema import Type, describe, show

Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[bytes | memoryview], Any]

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_INSTANCES = (tuple, Enum, date, time, timedelta, UUID, Decimal)
_HEAD_16, _HEAD_32 = Struct(">BH"), Struct(">BI")

# What encoders raise for a value that does not fit.
VALUE_FAULTS = (
    TypeError,
    ValueError,  # UnicodeEncodeError and msgspec.ValidationError are ValueErrors
    OverflowError,
    AttributeError,
    RecursionError,
)


def _plain_view(value: Any) -> Any:
    """Lets live views be stored inside other values: as copies."""
    copy = getattr(value, "_plain", None)
    if copy is None:
        raise TypeError(f"objects of type {type(value).__name__} cannot be stored")
    return copy()


_pack: Encode = Encoder(enc_hook=_plain_view).encode


class Codec:
    """encode raises one of VALUE_FAULTS for a value that is not of the type."""

    __slots__ = ("_decode_array", "decode", "encode", "hint", "is_plain", "type")

    def __init__(
        self,
        hint: Any,
        kind: Type,
        encode: Encode,
        decode: Decode,
        is_plain: Callable[[Any], bool] | None = None,
    ) -> None:
        self.hint = hint
        self.type = kind
        self.encode = encode
        self.decode = decode
        # Tells at a glance that msgspec packs a value rightly. False says nothing, and None is
        # for types where no glance is enough.
        self.is_plain = is_plain
        self._decode_array: Decode | None = None

    def decode_array(self, data: bytes) -> list[Any]:
        """A list of values from an array of them."""
        if self._decode_array is None:
            self._decode_array = Decoder(list[_storable(self.hint)]).decode  # type: ignore[misc]
        values: list[Any] = self._decode_array(data)
        return values

    def __repr__(self) -> str:
        return f"<Codec of {show(self.type)}>"


def make_codec(hint: Any) -> Codec:
    """The codec of a type hint. SchemaError if values of that type cannot be stored."""
    kind = describe(hint)
    try:
        decode: Decode = Decoder(_storable(hint)).decode
    except TypeError as error:
        raise SchemaError(
            f"{show(kind)} is no type that a state can hold: {error}. Use a simpler type."
        ) from None
    encode = _SCALAR_ENCODERS.get(kind) if isinstance(kind, str) else None
    if encode is not None:
        return Codec(hint, kind, encode, decode, _PLAIN.get(str(kind)))
    if dataclasses.is_dataclass(hint):
        return _record_codec(hint, kind, decode)
    return Codec(hint, kind, _checked_encoder(hint, decode), decode)


def _storable(hint: Any) -> Any:
    return Any if hint is object else hint


# ---- Scalars


def _encode_int(value: Any) -> bytes:
    if value.__class__ is not int:
        value = int(index(value))  # True is 1; a float is refused
    if not _INT_MIN <= value <= _INT_MAX:
        raise OverflowError
    return _pack(value)


def _encode_float(value: Any) -> bytes:
    if value.__class__ is not float:
        if isinstance(value, str | bytes):
            raise TypeError("float() would parse it")
        value = float(value)
    return _pack(value)


def _encode_bool(value: Any) -> bytes:
    if value is True:
        return b"\xc3"
    if value is False:
        return b"\xc2"
    raise TypeError("not a bool")


def _encode_str(value: Any) -> bytes:
    if value.__class__ is not str:
        if not isinstance(value, str):
            raise TypeError("not a str")
        value = str.__str__(value)
    return _pack(value)


def _encode_bytes(value: Any) -> bytes:
    if value.__class__ is not bytes:
        value = memoryview(value).tobytes()
    return _pack(value)


def _encode_datetime(value: Any) -> bytes:
    if value.__class__ is not datetime:
        if not isinstance(value, datetime):
            raise TypeError("not a datetime")
        value = value.to_pydatetime() if hasattr(value, "to_pydatetime") else value  # pandas
    return _pack(value)


def _encode_any(value: Any) -> bytes:
    data = _pack(value)
    if data[:2] == b"\xd7\xad":
        raise ValueError("extension types below 0 are MessagePack's own, and rows.py uses one")
    return data


_SCALAR_ENCODERS: dict[str, Encode] = {
    "int": _encode_int,
    "float": _encode_float,
    "bool": _encode_bool,
    "str": _encode_str,
    "bytes": _encode_bytes,
    "datetime": _encode_datetime,
    "any": _encode_any,
}
_PLAIN: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: value.__class__ is int and _INT_MIN <= value <= _INT_MAX,
    "float": lambda value: value.__class__ is float,
    "bool": lambda value: value.__class__ is bool,
    "str": lambda value: value.__class__ is str,
    "bytes": lambda value: value.__class__ is bytes,
    "any": lambda value: True,
}


# ---- Everything else


def _checked_encoder(hint: Any, decode: Decode) -> Encode:
    """Encodes, and decodes the result to see whether it is of the type."""
    cls = hint if isinstance(hint, type) else typing.get_origin(hint)
    # An instance, not something that looks like one: a list is no tuple, a text is no enum.
    takes = cls if isinstance(cls, type) and issubclass(cls, _INSTANCES) else object

    def encode_checked(value: Any) -> bytes:
        if not isinstance(value, takes):
            raise TypeError(f"not a {takes.__name__}")
        data = _pack(value)
        decode(data)
        return data

    return encode_checked


_FLAT = {int: "int", str: "str", float: "float", bool: "bool", bytes: "bytes"}


def _record_codec(cls: Any, kind: Type, decode: Decode) -> Codec:
    """The same for a dataclass, with a short cut for one whose fields are all scalars.

    For a class with `url: str` and `at: int` it is

        def is_plain(value):
            return value.__class__ is cls and value.url.__class__ is str and ...
        def encode_record(value):
            if value.__class__ is cls and value.url.__class__ is str and ...:
                return pack(value)
            return encode_closely(value)
    """

    def encode_closely(value: Any) -> bytes:
        if not isinstance(value, cls):
            raise TypeError(f"not a {cls.__name__}")
        data = _pack(value)
        decode(data)
        return data

    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    if not all(hints[name] in _FLAT for name in fields):
        return Codec(cls, kind, encode_closely, decode)
    tests = [f"value.{name}.__class__ is {_FLAT[hints[name]]}" for name in fields]
    scope: dict[str, Any] = {"cls": cls, "pack": _pack, "encode_closely": encode_closely}
    test = " and ".join(["value.__class__ is cls", *tests])
    lines = [
        f"def is_plain(value): return {test}",
        "def encode_record(value):",
        f" if {test}: return pack(value)",
        " return encode_closely(value)",
    ]
    exec("\n".join(lines), scope)  # names of fields are identifiers
    return Codec(cls, kind, scope["encode_record"], decode, scope["is_plain"])


# ---- Shapes


class Shape:
    """A node of the live part of a type. `letter` is what C creates for it."""

    __slots__ = ("codec",)
    letter = ""
    codec: Codec  # of the whole


class ValueShape(Shape):
    """A value: read and written as a whole."""

    __slots__ = ()


class ListShape(Shape):
    __slots__ = ("item",)
    letter = "l"

    def __init__(self, item: Shape) -> None:
        self.item = item


class MapShape(Shape):
    __slots__ = ("key", "value")
    letter = "m"

    def __init__(self, key: Codec, value: Shape) -> None:
        self.key = key
        self.value = value


class SetShape(Shape):
    """A set is stored as a map whose values are nil: adding and asking cost O(1)."""

    __slots__ = ("item",)
    letter = "m"

    def __init__(self, item: Codec) -> None:
        self.item = item


def make_shape(hint: Any) -> Shape:
    """The shape of a type hint."""
    kind = describe(hint)
    args = typing.get_args(hint) or ((str, Any) if kind[0] == "dict" else (Any,))
    shape: Shape
    match kind:
        case ["list", _]:
            item = make_shape(args[0])
            shape = ListShape(item)
            encode, is_plain = _list_encoder(item.codec)
        case ["dict", _, _]:
            key, value = make_codec(args[0]), make_shape(args[1])
            shape = MapShape(key, value)
            encode, is_plain = _dict_encoder(key, value.codec)
        case ["set", _]:
            member = _member_codec(make_codec(args[0]))
            shape = SetShape(member)
            encode, is_plain = _set_encoder(member), None
        case _:
            shape = ValueShape()
            shape.codec = make_codec(hint)
            return shape
    shape.codec = Codec(hint, kind, encode, _container_decoder(hint, shape), is_plain)
    return shape


# A container is its head and its items, each encoded as it would be alone. Two short cuts lead to
# the same bytes: scalars are packed together and msgspec looks through the result; items that are
# plain at a glance are packed together. What is neither (True for an int, a NumPy number, a set) is
# encoded one by one.


def _packer_at_once(hint: Any, *kinds: Type) -> Callable[[Any], bytes | None]:
    """What packs a whole container of scalars; it gives None for one that is to be looked at."""
    if not all(isinstance(kind, str) and kind in _AT_ONCE for kind in kinds):
        return lambda container: None
    check = Decoder(hint).decode

    def pack_and_check(container: Any) -> bytes | None:
        try:
            data = _pack(container)
            check(data)
        except VALUE_FAULTS:
            return None
        return data

    return pack_and_check


# As msgspec is to check them: ints of 64 bits have a sign here.
_AT_ONCE: dict[str, Any] = {
    "int": Annotated[int, msgspec.Meta(ge=_INT_MIN, le=_INT_MAX)],
    "float": float,
    "str": str,
    "bytes": bytes,
    "bool": bool,
    "any": Any,
}


_Plain: TypeAlias = Callable[[Any], bool] | None


class ItemAt(NamedTuple):
    """Where in a container the value is that a codec did not take: a fault's `item`."""

    at: Any  # position or key
    value: Any
    codec: Codec


def _encode_item(codec: Codec, value: Any, at: Any) -> bytes:
    try:
        return codec.encode(value)
    except VALUE_FAULTS as fault:
        if not hasattr(fault, "item"):  # else it is known more closely
            fault.item = ItemAt(at, value, codec)  # type: ignore[union-attr]
        raise


def _list_encoder(item: Codec) -> tuple[Encode, _Plain]:
    is_plain_item = item.is_plain
    at_once = _packer_at_once(list[_AT_ONCE.get(str(item.type), Any)], item.type)  # type: ignore[misc]

    def encode_list(value: Any) -> bytes:
        items = value if value.__class__ is list else list(_items_of(value))
        data = at_once(items)
        if data is not None:
            return data
        if is_plain_item is not None and all(map(is_plain_item, items)):
            return _pack(items)
        encoded = [_encode_item(item, one, at) for at, one in enumerate(items)]
        return _head(0x90, 0xDC, len(items)) + b"".join(encoded)

    if is_plain_item is None:
        return encode_list, None
    return encode_list, lambda value: value.__class__ is list and all(map(is_plain_item, value))


def _dict_encoder(key: Codec, value: Codec) -> tuple[Encode, _Plain]:
    is_plain_key, is_plain_value = key.is_plain, value.is_plain
    hints = [_AT_ONCE.get(str(kind), Any) for kind in (key.type, value.type)]
    at_once = _packer_at_once(dict[hints[0], hints[1]], key.type, value.type)  # type: ignore[valid-type]

    def encode_dict(entries: Any) -> bytes:
        if entries.__class__ is not dict:
            entries = dict(_entries_of(entries))
        data = at_once(entries)
        if data is not None:
            return data
        if is_plain is not None and is_plain(entries):
            return _pack(entries)
        # Two keys that are encoded alike (1 and True) are one, and the last value counts.
        pairs = {
            _encode_item(key, one, one): _encode_item(value, other, one)
            for one, other in entries.items()
        }
        return _head(0x80, 0xDE, len(pairs)) + b"".join([k + v for k, v in pairs.items()])

    is_plain: _Plain = None
    if is_plain_key is not None and is_plain_value is not None:

        def is_plain(entries: Any) -> bool:
            return (
                entries.__class__ is dict
                and all(map(is_plain_key, entries))
                and all(map(is_plain_value, entries.values()))
            )

    return encode_dict, is_plain


def _set_encoder(member: Codec) -> Encode:
    def encode_set(members: Any) -> bytes:
        packed = dict.fromkeys([_encode_item(member, one, one) for one in _items_of(members)])
        return _head(0x80, 0xDE, len(packed)) + b"".join([one + b"\xc0" for one in packed])

    return encode_set


def _member_codec(codec: Codec) -> Codec:
    """Members of a set are found by their bytes, so equal ones must have equal bytes."""
    if codec.type != "float":
        return codec
    return Codec(codec.hint, codec.type, lambda one: _encode_float(one + 0.0), codec.decode)


def _head(short: int, long: int, count: int) -> bytes:
    """The head of a MessagePack array or map."""
    if count < 16:
        return bytes([short | count])
    return _HEAD_16.pack(long, count) if count < 65536 else _HEAD_32.pack(long + 1, count)


def _container_decoder(hint: Any, shape: Shape) -> Decode:
    decode: Decode = Decoder(_stored_hint(hint, shape)).decode
    if not _has_sets(shape):
        return decode

    def decode_with_sets(data: bytes | memoryview) -> Any:
        return _from_stored(decode(data), shape)

    return decode_with_sets


def _has_sets(shape: Shape) -> bool:
    if isinstance(shape, ListShape):
        return _has_sets(shape.item)
    if isinstance(shape, MapShape):
        return _has_sets(shape.value)
    return isinstance(shape, SetShape)


def _stored_hint(hint: Any, shape: Shape) -> Any:
    """The hint with the sets of the live part as dicts."""
    args = typing.get_args(hint)
    if isinstance(shape, SetShape):
        return dict[args[0] if args else Any, None]  # type: ignore[misc]
    if isinstance(shape, ListShape) and args:
        return list[_stored_hint(args[0], shape.item)]  # type: ignore[misc]
    if isinstance(shape, MapShape) and args:
        return dict[args[0], _stored_hint(args[1], shape.value)]  # type: ignore[misc,valid-type]
    return _storable(hint)


def _from_stored(value: Any, shape: Shape) -> Any:
    if isinstance(shape, ListShape):
        return [_from_stored(item, shape.item) for item in value]
    if isinstance(shape, MapShape):
        return {key: _from_stored(item, shape.value) for key, item in value.items()}
    return set(value) if isinstance(shape, SetShape) else value


def _items_of(value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError("not a list or set")
    return value


def _entries_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError("not a mapping")
    return value.items()


def fault_reason(fault: Exception) -> str:
    """What a fault says that its type does not, for a message."""
    if isinstance(fault, msgspec.ValidationError):
        return str(fault).replace("`", "")
    return ""
