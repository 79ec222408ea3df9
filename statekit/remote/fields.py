"""Fields: messages of peer.proto as bytes, for those messages that are sent all the time.

protobuf for Python gives memory back to the system after every 10,000 messages that it has freed
(malloc_trim), which looks through the whole heap. In a process with a gigabyte of state that takes
0.1 s, during which nothing else runs: records would wait for it every few seconds of a hand-over.
So protobuf writes and reads only what is said once in a hand-over; this module does the rest.
Columns of numbers have a fixed width in peer.proto, so each column takes one copy.

Bytes that are read may come from a stranger: read() and its Fields raise nothing but WireError, and
n bytes never become more than about 30 n bytes of memory.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from statekit.native.buffers import BufferSlice

FIELDS_MAX = 3 * 65536  # in one message
_FIELD_MAX = 15  # up to this number a tag is one byte
_PART_BYTES = 4096  # smaller parts are copied, which is cheaper than a BufferSlice
_NUMBER, _BYTES = 0, 2  # how a field is written: the lowest three bits of its tag
_IS_BIG_ENDIAN = sys.byteorder == "big"


class WireError(Exception):
    """What a peer sent breaks the rules; the message says how. It never leaves this package."""


# ---- Writing: each function gives the bytes of one field


def number(field: int, value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise OverflowError(f"{value} has no 64 bits")
    return bytes((field << 3 | _NUMBER, *_varint(value))) if value else b""


def text(field: int, value: str) -> bytes:
    return content(field, value.encode())


def content(field: int, value: bytes) -> bytes:
    return item(field, value) if value else b""


def items(field: int, values: Iterable[bytes]) -> bytes:
    return b"".join([item(field, value) for value in values])


def texts(field: int, values: Iterable[str]) -> bytes:
    return items(field, [value.encode() for value in values])


def item(field: int, value: bytes) -> bytes:
    return b"".join((head(field, len(value)), value))


def head(field: int, size: int) -> bytes:
    """What comes before a field of `size` bytes."""
    tag = field << 3 | _BYTES
    return bytes((tag, size)) if size < 1 << 7 else bytes((tag, *_varint(size)))


def column32(field: int, values: Iterable[int]) -> bytes:
    return content(field, _little_endian(array("I", values)).tobytes())


def column64(field: int, values: Iterable[int]) -> bytes:
    return content(field, _little_endian(array("Q", values)).tobytes())


def _little_endian(found: "array[int]") -> "array[int]":
    if _IS_BIG_ENDIAN:
        found.byteswap()
    return found


def _varint(value: int) -> list[int]:
    """A number in bytes of 7 bits each, the lowest bits first."""
    found = []
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return found


# ---- Reading


class Fields:
    """The fields of a message. A field that is not there reads as empty."""

    __slots__ = ("_found", "_what")

    def __init__(self, found: dict[int, list[Any]], what: str) -> None:
        self._found = found
        self._what = what

    def number(self, field: int) -> int:
        """If the field came several times, the last one counts, as in protobuf."""
        found = self._found.get(field)
        if found is None:
            return 0
        if found[-1].__class__ is not int:
            self._refuse()
        value: int = found[-1]
        return value

    def text(self, field: int) -> str:
        return self._text(self.content(field))

    def content(self, field: int) -> bytes:
        found = self.items(field)
        return bytes(found[-1]) if found else b""

    def items(self, field: int) -> list[Any]:
        """All values that came, in order: bytes, or a BufferSlice for a large one of `parts`."""
        found = self._found.get(field, [])
        if found and int in {value.__class__ for value in found}:
            self._refuse()
        return found

    def texts(self, field: int) -> list[str]:
        return [self._text(value) for value in self.items(field)]

    def column32(self, field: int) -> "array[int]":
        return self._column("I", field)

    def column64(self, field: int) -> "array[int]":
        return self._column("Q", field)

    def _column(self, letter: str, field: int) -> "array[int]":
        found = array(letter)
        for value in self.items(field):
            if len(value) % found.itemsize:
                self._refuse()
            found.frombytes(value)
        return _little_endian(found)

    def _text(self, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise WireError(f"no {self._what}")


def read(data: bytes, what: str, parts: int = 0) -> Fields:
    """The fields of a message. what: its name; parts: a field with large values, not copied."""
    found: dict[int, list[Any]] = {}
    at = count = 0
    end = len(data)
    while at < end:
        count += 1
        tag = data[at]
        at += 1
        value = data[at] if at < end else 0x80
        if value < 0x80:
            at += 1
        else:
            value, at = _read_varint(data, at, what)
        field, how = tag >> 3, tag & 7
        if not 0 < field <= _FIELD_MAX or how not in (_NUMBER, _BYTES) or count > FIELDS_MAX:
            raise WireError(f"no {what}")
        if how == _BYTES:
            stop = at + value
            if stop > end:
                raise WireError(f"no {what}")
            is_part = field == parts and value >= _PART_BYTES
            part = BufferSlice(data, at, stop) if is_part else data[at:stop]
            found.setdefault(field, []).append(part)
            at = stop
        else:
            found.setdefault(field, []).append(value)
    return Fields(found, what)


def _read_varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    found = shift = 0
    while shift < 70 and at < len(data):
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found & (1 << 64) - 1, at
        shift += 7
    raise WireError(f"no {what}")


def cut(data: bytes, sizes: Sequence[int], what: str) -> list[bytes]:
    """Cuts bytes into pieces of these sizes, which must add up to all of them."""
    if sum(sizes) != len(data):
        raise WireError(f"no {what}: {len(data)} bytes that are to be {sum(sizes)}")
    found, at = [], 0
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found
