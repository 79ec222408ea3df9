"""Keys for people: as text on a command line, as JSON in files.

key type         text                   JSON
str              alice                  "alice"
int              7                      7
bytes            0x6162                 "0x6162"
tuple[str, int]  ["alice", 7]           ["alice", 7]
"""

import json
from typing import Any

from statekit.errors import KeyTypeError, shorten
from statekit.keys import KEY_FAULTS, KeyCodec, key_error


def hex_text(data: bytes) -> str:
    """Bytes as they are written for people: "0x6162"."""
    return f"0x{data.hex()}"


def parse_hex(text: str) -> bytes | None:
    """The bytes that "0x6162" stands for; None if it is no such text."""
    if text[:2] != "0x":
        return None
    try:
        return bytes.fromhex(text[2:]) if text[2:].isalnum() or text == "0x" else None
    except ValueError:
        return None


def listed(key: Any) -> Any:
    """A tuple as JSON has it."""
    return list(key) if isinstance(key, tuple) else key


def key_json(key: Any) -> Any:
    """A key for JSON: bytes in hex, a tuple as an array."""
    if isinstance(key, tuple):
        return [key_json(part) for part in key]
    return hex_text(key) if isinstance(key, bytes) else key


def key_text(codec: KeyCodec, key: Any) -> str:
    """A key as it is written on a command line.

    >>> from statekit.keys import key_codec
    >>> key_text(key_codec("(sb)"), ("alice", b"ab"))
    '["alice", "0x6162"]'
    >>> key_text(key_codec("i"), 7), key_text(key_codec("s"), "7")
    ('7', '7')
    """
    plain = key_json(key)
    return to_json(plain) if codec.is_tuple else str(plain)


def parse_key(codec: KeyCodec, text: str) -> Any:
    """The key that a text stands for.

    >>> from statekit.keys import key_codec
    >>> parse_key(key_codec("(sb)"), '["alice", "0x6162"]')
    ('alice', b'ab')
    >>> parse_key(key_codec("s"), "7")
    '7'
    """
    if codec.is_tuple:
        try:
            plain = json.loads(text)
        except ValueError:
            raise KeyTypeError(
                f"{shorten(text)} is no key of type {codec.python}. "
                f"Write a JSON array: {_key_example(codec)}."
            ) from None
        return key_from_json(codec, plain)
    if codec.text == "i":
        try:
            number = int(text)
        except ValueError:
            raise KeyTypeError(f"{shorten(text)} is no key of type int. Write 7 or -7.") from None
        return _checked_key(codec, number)
    return key_from_json(codec, text)


def key_from_json(codec: KeyCodec, plain: Any) -> Any:
    """The key from its JSON form, as key_json() gives it. Bytes may be bytes, too."""
    if not codec.is_tuple:
        return _checked_key(codec, _key_part(codec, codec.text, plain))
    if not isinstance(plain, list) or len(plain) != len(codec.parts):
        raise KeyTypeError(
            f"{shorten(plain)} is no key of type {codec.python}. "
            f"Write a JSON array: {_key_example(codec)}."
        )
    parts = [_key_part(codec, letter, one) for letter, one in zip(codec.parts, plain, strict=True)]
    return _checked_key(codec, tuple(parts))


def _key_part(codec: KeyCodec, letter: str, plain: Any) -> Any:
    if letter != "b" or isinstance(plain, bytes):
        return plain
    data = parse_hex(plain) if isinstance(plain, str) else None
    if data is None:
        hint = hex_text(plain.encode(errors="replace")) if isinstance(plain, str) else "0x6162"
        raise KeyTypeError(
            f"{shorten(plain)} is no key of type {codec.python}: bytes are written in hex. "
            f"Write {hint}."
        )
    return data


def _checked_key(codec: KeyCodec, key: Any) -> Any:
    try:
        codec.encode(key)
    except KEY_FAULTS:
        raise key_error(codec, key) from None
    return key


def _key_example(codec: KeyCodec) -> str:
    examples = {"s": "alice", "b": "0x6162", "i": 7}
    return to_json([examples[letter] for letter in codec.parts])


def to_json(plain: Any) -> str:
    """A plain value of the style "json" as one line of text."""
    return json.dumps(plain, ensure_ascii=False, allow_nan=False)
