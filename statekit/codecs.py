"""Codecs: how values of one type become MessagePack and back, compiled once per type.

Measured on a dataclass of five fields (CPython 3.11, ns): msgspec encodes it in 260 and decodes
it in 550; msgpack needs 640 and 900 for the same map. So msgspec does the work, and tests read
the result with msgpack.

What is stored comes back as it was: every value is checked before it goes in (fit.py). A scalar is
checked by its class, a record by a generated function, an item of a container as if it were alone.

A *shape* is the part of a type that stays alive in the store: lists, dicts and sets from the
root down. Below it everything is a value, read and written as a whole.
"""

import typing
from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec.msgpack import Decoder

from statekit import _fast
from statekit.errors import SchemaError, shorten
from statekit.exact import (
    INT_MAX,
    INT_MIN,
    VALUE_FAULTS,
    Fit,
    MisfitError,
    convert_bool,
    convert_bytes,
    convert_datetime,
    convert_float,
    convert_int,
    convert_str,
    pack,
)
from statekit.fit import Role, all_exact, make_fit
from statekit.schema import Type, describe, show, unwrapped

Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[bytes | memoryview], Any]

_HEAD_16, _HEAD_32 = Struct(">BH"), Struct(">BI")


class Codec:
    """encode raises one of VALUE_FAULTS for a value that is not of the type."""

    __slots__ = ("_decode_array", "decode", "encode", "fit", "hint", "native", "type")

    def __init__(
        self,
        hint: Any,
        kind: Type,
        encode: Encode,
        decode: Decode,
        fit: Fit | None = None,
        scalar: int = 0,
    ) -> None:
        self.hint = hint
        self.type = kind
        self.encode = encode
        self.decode = decode
        # How to tell values that may be encoded just by packing them with msgspec (exact values).
        # None for types that have no such values.
        self.fit = fit
        self._decode_array: Decode | None = None
        # As C sees it. scalar: which one it may encode and decode by itself (csrc/py.h), or 0.
        record = () if fit is None or fit.record is None else (pack, *fit.record)
        self.native = _fast.Codec(scalar, encode, decode, *record)

    def decode_array(self, data: bytes) -> list[Any]:
        """A list of values from an array of them."""
        if self._decode_array is None:
            self._decode_array = Decoder(list[_storable(self.hint)]).decode  # type: ignore[misc]
        values: list[Any] = self._decode_array(data)
        # Any is the type of keys: an array was a tuple, since no other key is stored as an array.
        return [_tupled(value) for value in values] if self.type == "any" else values

    def __repr__(self) -> str:
        return f"<Codec of {show(self.type)}>"


def make_codec(hint: Any, role: Role = "value") -> Codec:
    """The codec of a type hint. SchemaError if values of that type cannot be stored.

    role: "key" of a live map, or "member" of a live set; see fit.py.
    """
    kind = describe(hint)
    hint = unwrapped(hint)
    try:
        decode: Decode = Decoder(_storable(hint)).decode
    except (TypeError, NotImplementedError) as error:
        raise SchemaError(
            f"{show(kind)} is no type that a state can hold: {error}. Use a simpler type."
        ) from None
    fit, is_odd = make_fit(hint, role)
    if kind == "any" and role != "value":
        return Codec(hint, kind, _encoder(fit), lambda data: _tupled(decode(data)), fit)
    if is_odd:
        return Codec(hint, kind, _proving_encoder(fit, decode), decode)
    if isinstance(kind, str) and role != "member" and kind in _SCALAR_ENCODERS:
        scalar = _NATIVE_SCALARS.get(kind, 0)
        return Codec(hint, kind, _SCALAR_ENCODERS[kind], decode, fit, scalar)
    scalar = _NATIVE_SCALARS.get(str(kind), 0) if kind != "float" else 0  # -0.0 becomes 0.0
    codec = Codec(hint, kind, _encoder(fit), decode, fit, scalar)
    if role == "value" and kind[0] in ("list", "dict") and (args := typing.get_args(hint)):
        # C tells whether a value is exact by the codecs of its parts.
        *keys, item = (make_codec(arg).native for arg in args)
        codec.native._of_parts(pack, keys[0] if keys else None, item)
    return codec


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if value.__class__ is list else value


def _storable(hint: Any) -> Any:
    return Any if hint is object else dict[str, Any] if hint is dict else hint


# ---- Values. Scalars have encoders of their own, because theirs is the hottest path of all.


def _encode_int(value: Any) -> bytes:
    if value.__class__ is not int or not INT_MIN <= value <= INT_MAX:
        value = convert_int(value)  # True is 1; a float is refused
    return pack(value)


def _encode_float(value: Any) -> bytes:
    if value.__class__ is not float:
        value = convert_float(value)
    return pack(value)


def _encode_bool(value: Any) -> bytes:
    if value is True:
        return b"\xc3"
    if value is False:
        return b"\xc2"
    return pack(convert_bool(value))


def _encode_str(value: Any) -> bytes:
    if value.__class__ is not str:
        value = convert_str(value)
    return pack(value)


def _encode_bytes(value: Any) -> bytes:
    if value.__class__ is not bytes:
        value = convert_bytes(value)
    return pack(value)


def _encode_datetime(value: Any) -> bytes:
    return pack(convert_datetime(value))


# sk_py_scalar in csrc/py.h
_NATIVE_SCALARS = {"int": 1, "float": 2, "bool": 3, "str": 4, "bytes": 5}
_SCALAR_ENCODERS: dict[str, Encode] = {
    "int": _encode_int,
    "float": _encode_float,
    "bool": _encode_bool,
    "str": _encode_str,
    "bytes": _encode_bytes,
    "datetime": _encode_datetime,
}


def _encoder(fit: Fit) -> Encode:
    """Packs an exact value as it is, and converts any other first.

    The conversion raises an error that says what is wrong, and where.
    """
    test, scope = fit.source or ("is_exact(value)", {"is_exact": fit.is_exact})
    scope = {**scope, "convert": fit.convert, "pack": pack, "VALUE_FAULTS": VALUE_FAULTS}
    lines = [
        "def encode(value):",
        " try:",
        f"  if {test}: return pack(value)",
        " except VALUE_FAULTS: return pack(convert(value))",
        " return pack(convert(value))",
    ]
    exec("\n".join(lines), scope)
    encode: Encode = scope["encode"]
    return encode


def _proving_encoder(fit: Fit, decode: Decode) -> Encode:
    """Encodes, and decodes the result to see whether it is what was given."""
    encode, convert = _encoder(fit), fit.convert

    def is_same(back: Any, value: Any, data: bytes) -> bool:
        try:
            # The members of a set come in any order, so equal values may have different bytes.
            return encode(back) == data or bool(convert(back) == convert(value))
        except VALUE_FAULTS:
            return False

    def encode_proved(value: Any) -> bytes:
        data = encode(value)
        if not is_same(decode(data), value, data):
            raise MisfitError(
                value,
                fit.kind,
                "would not come back as it is: its class makes something else of its fields",
                "Let its __post_init__ and the like leave alone what they made before.",
            )
        return data

    return encode_proved


# ---- Shapes


class Shape:
    """A node of the live part of a type. `letter` is what C creates for it."""

    __slots__ = ("codec", "plan")
    letter = ""
    codec: Codec  # of the whole
    plan: _fast.Plan  # how C encodes the parts of a view of it


class ValueShape(Shape):
    """A value: read and written as a whole."""

    __slots__ = ()


class ListShape(Shape):
    __slots__ = ("item",)
    letter = "l"

    def __init__(self, item: Shape) -> None:
        self.item = item
        self.plan = _fast.Plan(None, _native_codec(item))


class MapShape(Shape):
    __slots__ = ("key", "value")
    letter = "m"

    def __init__(self, key: Codec, value: Shape) -> None:
        self.key = key
        self.value = value
        self.plan = _fast.Plan(key.native, _native_codec(value))


class SetShape(Shape):
    """A set is stored as a map whose values are nil: adding and asking cost O(1)."""

    __slots__ = ("item",)
    letter = "m"

    def __init__(self, item: Codec) -> None:
        self.item = item
        self.plan = _fast.Plan(item.native, None)


def _native_codec(shape: Shape) -> _fast.Codec | None:
    """How C encodes a part; None for one that is a container itself, and given as a view."""
    return None if shape.letter else shape.codec.native


def make_shape(hint: Any) -> Shape:
    """The shape of a type hint."""
    kind = describe(hint)
    hint = unwrapped(hint)
    args = typing.get_args(hint) or ((str, Any) if kind[0] == "dict" else (Any,))
    shape: Shape
    match kind:
        case ["list", _]:
            item = make_shape(args[0])
            shape = ListShape(item)
            encode, fit = _list_encoder(kind, item.codec)
        case ["dict", _, _]:
            key, value = make_codec(args[0], "key"), make_shape(args[1])
            shape = MapShape(key, value)
            encode, fit = _dict_encoder(kind, key, value.codec)
        case ["set", _]:
            _check_member(kind[1])
            member = make_codec(args[0], "member")
            shape = SetShape(member)
            encode, fit = _set_encoder(kind, member), None
        case _:
            shape = ValueShape()
            shape.codec = make_codec(hint)
            return shape
    shape.codec = Codec(hint, kind, encode, _container_decoder(hint, shape), fit)
    if fit is not None and isinstance(shape, ListShape):
        shape.codec.native._of_parts(pack, None, shape.item.codec.native)
    elif fit is not None and isinstance(shape, MapShape):
        shape.codec.native._of_parts(pack, shape.key.native, shape.value.codec.native)
    return shape


def _check_member(kind: Type) -> None:
    """SchemaError for a type whose values C does not accept as keys of a map."""

    def is_scalar(part: Type) -> bool:
        if isinstance(part, list) and part[0] == "union":
            return all(map(is_scalar, part[1:]))
        return isinstance(part, str) or part[0] in ("enum", "flags")

    members = kind[1:] if isinstance(kind, list) and kind[0] == "union" else [kind]
    for member in members:
        parts = [member]
        if isinstance(member, list) and member[0] in ("tuple", "tuple*"):
            parts = member[1:]
        elif isinstance(member, list) and member[0] == "row":
            parts = [part for part, _ in member[2].values()]
        if not all(map(is_scalar, parts)):
            raise SchemaError(
                f"{show(member)} cannot be in a set that is alive: its members are stored as keys, "
                "which are scalars or tuples of scalars. Use such a tuple, or kv.value(name, "
                f"set[{show(kind)}]), which is read and written as a whole."
            )


# A container is its head and its items, each encoded as it would be alone. Two short cuts lead to
# the same bytes: scalars are packed together, and msgspec checks the result; exact items are packed
# together. If neither works (True for an int, a NumPy number, a set), items are encoded one by one.


def _packer_at_once(hint: Any, *kinds: Type) -> Callable[[Any], bytes | None]:
    """A function that packs a whole container of scalars at once.

    It returns None for a container whose items have to be looked at one by one.
    """
    if not all(isinstance(kind, str) and kind in _AT_ONCE for kind in kinds):
        return lambda container: None
    check = Decoder(hint).decode

    def pack_and_check(container: Any) -> bytes | None:
        try:
            data = pack(container)
            # The type alone does not tell: msgspec packs Color.RED as "red", and an array of
            # numbers as bytes. So the result must be equal to the container, too.
            return data if check(data) == container else None
        except VALUE_FAULTS:
            return None

    return pack_and_check


# The types that msgspec is to check. An int has 64 bits, one of them for the sign. Floats are left
# out: msgspec would accept an int as a float although no float is equal to it.
_AT_ONCE: dict[str, Any] = {
    "int": Annotated[int, msgspec.Meta(ge=INT_MIN, le=INT_MAX)],
    "str": str,
    "bytes": bytes,
    "bool": bool,
}


def _item(step: str, codec: Codec, value: Any, role: str = "") -> bytes:
    """A part of a container, encoded. `step` is added to the path of an error."""
    try:
        return codec.encode(value)
    except VALUE_FAULTS as fault:
        misfit = as_misfit(fault, value, codec)
        misfit.enter(step, role)
        raise misfit from None


def _no_conversion(value: Any) -> Any:
    raise AssertionError("live containers are encoded item by item")


def _list_encoder(kind: Type, item: Codec) -> tuple[Encode, Fit | None]:
    at_once = _packer_at_once(list[_AT_ONCE.get(str(item.type), Any)], item.type)  # type: ignore[misc]
    are_exact = _all_exact(item.fit)

    def encode_list(value: Any) -> bytes:
        items = value if value.__class__ is list else list(_items_of(value, kind))
        data = at_once(items)
        if data is not None:
            return data
        if are_exact(items):
            return pack(items)
        encoded = [_item(f"[{at}]", item, one) for at, one in enumerate(items)]
        return _head(0x90, 0xDC, len(items)) + b"".join(encoded)

    if item.fit is None:
        return encode_list, None
    is_exact = lambda value: value.__class__ is list and are_exact(value)  # noqa: E731
    return encode_list, Fit(kind, is_exact, _no_conversion)


def _dict_encoder(kind: Type, key: Codec, value: Codec) -> tuple[Encode, Fit | None]:
    hints = [_AT_ONCE.get(str(part), Any) for part in (key.type, value.type)]
    at_once = _packer_at_once(dict[hints[0], hints[1]], key.type, value.type)  # type: ignore[valid-type]
    keys_exact, values_exact = _all_exact(key.fit), _all_exact(value.fit)

    def encode_dict(entries: Any) -> bytes:
        if entries.__class__ is not dict:
            entries = dict(_entries_of(entries, kind))
        data = at_once(entries)
        if data is not None:
            return data
        if keys_exact(entries) and values_exact(entries.values()):
            return pack(entries)
        # Two keys with the same bytes (1 and True) are one key, and the last value counts.
        pairs = {
            _item("", key, one, "a key"): _item(f"[{shorten(one)}]", value, other)
            for one, other in entries.items()
        }
        return _head(0x80, 0xDE, len(pairs)) + b"".join([k + v for k, v in pairs.items()])

    if key.fit is None or value.fit is None:
        return encode_dict, None

    def is_exact(entries: Any) -> bool:
        return entries.__class__ is dict and keys_exact(entries) and values_exact(entries.values())

    return encode_dict, Fit(kind, is_exact, _no_conversion)


def _set_encoder(kind: Type, member: Codec) -> Encode:
    def encode_set(members: Any) -> bytes:
        packed = dict.fromkeys(
            [_item("", member, one, "a member") for one in _items_of(members, kind)]
        )
        return _head(0x80, 0xDE, len(packed)) + b"".join([one + b"\xc0" for one in packed])

    return encode_set


def _all_exact(fit: Fit | None) -> Callable[[Any], bool]:
    """A function that tells whether all items may be packed as they are."""
    if fit is None:
        return lambda items: False
    look = all_exact(fit)

    def are_exact(items: Any) -> bool:
        try:
            return look(items)
        except VALUE_FAULTS:
            return False  # encoding the items one by one finds out what is wrong

    return are_exact


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
    """The hint, in which the sets of the live part have become dicts."""
    hint = unwrapped(hint)
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


def _items_of(value: Any, kind: Type) -> Iterable[Any]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise MisfitError(value, kind)
    return value


def _entries_of(value: Any, kind: Type) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise MisfitError(value, kind)
    return value.items()


def as_misfit(fault: Exception, value: Any, codec: Codec) -> MisfitError:
    """What is wrong with a value, from one of VALUE_FAULTS that storing it raised."""
    if isinstance(fault, MisfitError):
        return fault
    if isinstance(fault, RecursionError):
        return MisfitError(
            value, codec.type, "is nested too deeply or contains itself", "Make it flatter."
        )
    try:
        codec.encode(value)  # a state of numbers stores without the codec: now it tells more
    except MisfitError as misfit:
        return misfit
    except VALUE_FAULTS as other:
        fault = other
    reason = str(fault).replace("`", "")
    return MisfitError(value, codec.type, f"does not fit {show(codec.type)}: {reason}")
