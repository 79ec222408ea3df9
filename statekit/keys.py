"""Keys: their types, their encoded bytes, and where they are routed.

A key type is given as a Python type (`str`, `bytes`, `int`, `tuple[str, int]`) or as the text
that the native store uses ("s", "b", "i", "(si)"). The encoding and the hash are part of the
public contract (csrc/statekit.h, "Keys"): every process, and Spark's xxhash64(), must agree.

>>> encode_key(str, "alice")
b'alice'
>>> encode_key(tuple[str, int], ("alice", 7))
b'\\x05\\x00\\x00\\x00alice\\x07\\x00\\x00\\x00\\x00\\x00\\x00\\x00'
>>> decode_key("i", encode_key("i", -1))
-1
"""

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from types import GenericAlias
from typing import Any, NewType, TypeAlias, get_args, get_origin

from statekit._native import ffi, lib
from statekit.errors import ArgumentError, KeyTypeError, native_error, shorten, where

KeyType: TypeAlias = str | type | GenericAlias

# What the encoders below raise for a key that does not fit. key_error() makes a message of it.
KEY_FAULTS = (TypeError, ValueError, OverflowError, struct.error)

_LETTERS: dict[object, str] = {str: "s", bytes: "b", int: "i"}
_NAMES = {"s": "str", "b": "bytes", "i": "int"}

_INT = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
_pack_int = _INT.pack
_pack_length = _LENGTH.pack


@dataclass(frozen=True, slots=True, eq=False)
class KeyCodec:
    """How keys of one type become bytes and back. encode raises one of KEY_FAULTS."""

    text: str  # "s", "(si)": as the native store writes the type
    parts: str  # "s", "si": one letter a part
    native: bytes  # text, for C
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    @property
    def is_tuple(self) -> bool:
        return self.text[0] == "("

    def show(self, data: bytes) -> Any:
        """The decoded key; the bytes themselves if they are no key of this type."""
        try:
            return self.decode(data)
        except KEY_FAULTS:
            return data

    @property
    def python(self) -> str:
        """The type as Python writes it: "str", "tuple[str, int]"."""
        names = ", ".join(_NAMES[part] for part in self.parts)
        return f"tuple[{names}]" if self.is_tuple else names


def key_type_text(key_type: KeyType) -> str:
    """The native store's name of a key type.

    >>> key_type_text(tuple[str, int])
    '(si)'
    """
    if isinstance(key_type, str):
        text = key_type
    elif get_origin(key_type) is tuple:
        text = f"({''.join(map(_letter, get_args(key_type)))})"
    else:
        text = _letter(key_type)
    parts = text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text
    fits = parts is not text or len(text) == 1
    if not (fits and parts and set(parts) <= set("sbi") and len(parts) <= lib.SK_KEY_PARTS_MAX):
        raise KeyTypeError(
            f"{shorten(key_type)} is no key type. Use str, bytes, int, or a tuple of up to "
            f"{lib.SK_KEY_PARTS_MAX} of these, such as tuple[str, int]."
        )
    return text


def _letter(part: Any) -> str:
    while isinstance(part, NewType):
        part = part.__supertype__
    return _LETTERS.get(part, "?") if isinstance(part, Hashable) else "?"


def key_codec(key_type: KeyType) -> KeyCodec:
    """The codec of a key type; the same object for the same type, however it is written.

    >>> key_codec(tuple[str, int]) is key_codec("(si)")
    True
    """
    return _codec(key_type_text(key_type))


@lru_cache(maxsize=256)
def _codec(text: str) -> KeyCodec:
    parts = text.strip("()")
    if text[0] == "(":
        encode, decode = _tuple_encoder(parts), _tuple_decoder(parts)
    else:
        encode, decode = _ENCODERS[text], _DECODERS[text]
    return KeyCodec(text, parts, text.encode(), encode, decode)


def encode_key(key_type: KeyType, key: Any) -> bytes:
    """The bytes under which a key is stored."""
    codec = key_codec(key_type)
    try:
        return codec.encode(key)
    except KEY_FAULTS:
        raise key_error(codec, key) from None


def decode_key(key_type: KeyType, data: bytes) -> Any:
    """The key that encode_key() turned into these bytes."""
    codec = key_codec(key_type)
    try:
        return codec.decode(data)
    except KEY_FAULTS:
        raise KeyTypeError(
            f"{shorten(data)} is not an encoded key of type {codec.python}. "
            "Decode it with the key type that it was encoded with."
        ) from None


def key_hash(key_type: KeyType, key: Any) -> int:
    """The routing hash of a key: XXH64 with seed 42, unsigned; a tuple's parts are folded.

    >>> hex(key_hash(str, "alice"))
    '0x1fa8c90ada963493'
    """
    codec = key_codec(key_type)
    data = encode_key(key_type, key)
    out = ffi.new("uint64_t *")
    status = lib.sk_key_hash(codec.native, data, len(data), out)
    if status:
        raise native_error(status, key=key)
    return int(out[0])


def leaf_of(key_type: KeyType, key: Any, key_groups: int = 128, subgroups: int = 16) -> int:
    """The leaf of a key in a store of that geometry; its key-group is leaf // subgroups.

    >>> leaf_of(str, "alice"), leaf_of(str, "alice", key_groups=1, subgroups=1)
    (253, 0)
    """
    are_ints = isinstance(key_groups, int) and isinstance(subgroups, int)
    leaves = key_groups * subgroups if are_ints and key_groups > 0 < subgroups else 0
    if leaves & (leaves - 1) or not 0 < leaves <= lib.SK_LEAVES_MAX:
        raise ArgumentError(
            f"no store has {shorten(key_groups)} key-groups of {shorten(subgroups)} sub-groups. "
            f"Use powers of two whose product is at most {lib.SK_LEAVES_MAX}."
        )
    return key_hash(key_type, key) >> 64 - (leaves.bit_length() - 1)


def leaf_of_encoded(codec: KeyCodec, data: bytes, leaves: int) -> int:
    """The leaf of an encoded key, in a store that has `leaves` leaves."""
    out = ffi.new("uint64_t *")
    status = lib.sk_key_hash(codec.native, data, len(data), out)
    if status:
        raise native_error(status, key=codec.show(data))
    return int(out[0]) >> 65 - leaves.bit_length()


def key_error(codec: KeyCodec, key: object, state: str | None = None) -> KeyTypeError:
    """What to raise when codec.encode(key) raised one of KEY_FAULTS."""
    problem, advice = _key_problem(codec, key)
    error = KeyTypeError(f"the key {shorten(key)} {problem}{where(state)}. {advice}")
    error.state, error.key = state, key
    return error


def _key_problem(codec: KeyCodec, key: object) -> tuple[str, str]:
    """What is wrong with a key, and what to do."""
    if isinstance(key, int) and codec.text == "i":
        return (
            "does not fit into 64 bits, which is -2**63 to 2**63 - 1",
            "Declare the state with key=str or key=bytes for larger ones.",
        )
    if isinstance(key, str) and codec.text == "s":
        return "has no UTF-8 form", "Remove its lone surrogates or use a bytes key."
    if not isinstance(key, tuple) or not codec.is_tuple:
        return (
            f"is of type {type(key).__name__}, not {codec.python}",
            "Pass a key of the state's key type.",
        )
    if len(key) != len(codec.parts):
        return (
            f"has {len(key)} parts, and does not fit {codec.python}",
            "Pass a key of the state's key type.",
        )
    for at, (letter, part) in enumerate(zip(codec.parts, key, strict=True)):
        of_part = _codec(letter)
        try:
            of_part.encode(part)
        except KEY_FAULTS:
            problem, advice = _key_problem(of_part, part)
            return f"does not fit {codec.python}: its part {at}, {shorten(part)}, {problem}", advice
    return f"does not fit {codec.python}", "Pass a key of the state's key type."


def _check_bytes(key: Any) -> bytes:
    if key.__class__ is bytes:
        return key
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise TypeError("not bytes")


def _decode_int(data: bytes) -> int:
    value: int = _INT.unpack(data)[0]
    return value


# str.encode and Struct.pack are C functions that check the type themselves: as fast as it gets.
_ENCODERS: dict[str, Callable[[Any], bytes]] = {"s": str.encode, "b": _check_bytes, "i": _pack_int}
_DECODERS: dict[str, Callable[[bytes], Any]] = {"s": bytes.decode, "b": bytes, "i": _decode_int}


def _tuple_encoder(parts: str) -> Callable[[Any], bytes]:
    """Writes the encoder's source and compiles it: several times as fast as a loop over the parts.

    For "(si)" it is

        def encode_tuple(key):
            if not isinstance(key, tuple):
                raise TypeError
            p0, p1, = key
            p0 = s(p0)
            return n(len(p0)) + p0 + i(p1)
    """
    names = [f"p{at}" for at in range(len(parts))]
    variable = [(name, part) for name, part in zip(names, parts, strict=True) if part != "i"]
    pieces = [
        f"i({name})" if part == "i" else f"n(len({name})) + {name}"
        for name, part in zip(names, parts, strict=True)
    ]
    lines = [
        "def encode_tuple(key):",
        " if not isinstance(key, tuple): raise TypeError",
        f" {', '.join(names)}, = key",  # ValueError if there are more or fewer
        *(f" {name} = {part}({name})" for name, part in variable),
        f" return {' + '.join(pieces)}",
    ]
    scope: dict[str, Any] = {**_ENCODERS, "n": _pack_length}
    exec("\n".join(lines), scope)  # made of the letters s, b and i alone
    encode: Callable[[Any], bytes] = scope["encode_tuple"]
    return encode


def _tuple_decoder(parts: str) -> Callable[[bytes], Any]:
    def decode_tuple(data: bytes) -> tuple[Any, ...]:
        key = []
        at = 0
        for part in parts:
            if part == "i":
                size = 8
            else:
                size = _LENGTH.unpack_from(data, at)[0]
                at += 4
            piece = data[at : at + size]
            if len(piece) != size:
                raise ValueError("too short")
            key.append(_DECODERS[part](piece))
            at += size
        if at != len(data):
            raise ValueError("too long")
        return tuple(key)

    return decode_tuple
