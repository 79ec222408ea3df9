"""Native memory for results: buffers that are reused, and buffers that are given away.

A call needs a place for its result that no other thread uses meanwhile: cffi releases the GIL.
Making a buffer costs more than the call, so used ones are kept in lists. list.pop and list.append
are atomic, so these free lists need no lock. A caller that does not return a buffer (after an
exception, say) does no harm: the garbage collector frees it.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from statekit._native import ffi, lib

KEEP_BYTES_MAX = 1 << 20  # buffers that grew beyond this are freed after use

_LEN, _CAP = 1, 2  # words of an sk_buf


class Buffer:
    """A reusable sk_buf: call C with `ptr`, then take(n) what it wrote."""

    __slots__ = ("_cap", "_head", "_view", "ptr")

    def __init__(self) -> None:
        own = ffi.new("sk_buf *")
        self.ptr = ffi.gc(own, lib.sk_buf_free)
        self._head = memoryview(ffi.buffer(own)).cast("Q")
        self._cap = 0
        self._view: Any = b""

    def take(self, length: int) -> bytes:
        """Copies the result out and returns the buffer to the free list."""
        # The capacity, not the length, tells whether the memory was moved: C may reserve more
        # than it needs, and it may have done so in an earlier call that failed.
        cap = self._head[_CAP]
        if cap != self._cap:
            self._view = ffi.buffer(self.ptr.data, cap) if cap else b""
            self._cap = cap
        data: bytes = self._view[:length]
        if cap > KEEP_BYTES_MAX:
            self._view = b""
            self._cap = 0
            lib.sk_buf_free(self.ptr)
        _push(self)
        return data

    def clear(self) -> None:
        self._head[_LEN] = 0

    @property
    def length(self) -> int:
        return self._head[_LEN]


_free: list[Buffer] = []
pop_buffer: Callable[[], Buffer] = _free.pop  # IndexError if there is none
push_buffer: Callable[[Buffer], None] = _free.append
_push = push_buffer


def empty_buffer() -> Buffer:
    """A buffer for the functions that append to what it holds."""
    try:
        buffer = pop_buffer()
    except IndexError:
        return Buffer()
    buffer.clear()
    return buffer


# Reusable sk_bufs for sk_get alone, taken apart for speed: (pointer, view, room). sk_get moves the
# memory only for a value longer than `room`, so `view` is good for all others. Plain tuples, as
# a NamedTuple is unpacked more slowly.
Read: TypeAlias = tuple[Any, Any, int]

_reads: list[Read] = []
pop_read: Callable[[], Read] = _reads.pop  # IndexError if there is none
push_read: Callable[[Read], None] = _reads.append


def new_read() -> Read:
    return ffi.gc(ffi.new("sk_buf *"), lib.sk_buf_free), b"", 0


def take_grown(pointer: Any, length: int) -> bytes:
    """What sk_get wrote if it was longer than `room`."""
    data: bytes = ffi.buffer(pointer.data, length)[:]
    if (room := pointer.cap) > KEEP_BYTES_MAX:
        lib.sk_buf_free(pointer)
        room = 0
    push_read((pointer, ffi.buffer(pointer.data, room) if room else b"", room))
    return data


def owned_view(buf: Any) -> memoryview:
    """The bytes of an sk_buf as a view. They are freed when all views made from it are gone."""
    if buf.len == 0:
        lib.sk_buf_free(buf)
        return memoryview(b"")
    data = ffi.gc(buf.data, lambda _: lib.sk_buf_free(buf), buf.cap)
    return memoryview(ffi.buffer(data, buf.len))


def readable(data: Any) -> Any:
    """What to pass to C for `const uint8_t *`: bytes as they are, other buffers by address."""
    if data.__class__ is bytes:
        return data
    if data.__class__ is memoryview:
        return _from_view(data)
    return ffi.from_buffer("uint8_t[]", data)


# CPython before 3.12.7 crashes when it collects a cycle with a memoryview that is used by address
# (gh-77894), and the traceback of an error makes a cycle. So what a view is of is used by address.
_from_view: Callable[[Any], Any] = partial(ffi.from_buffer, "uint8_t[]")
_used: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _from_what_is_viewed(view: Any) -> Any:
    try:
        whole = ffi.from_buffer("uint8_t[]", view.obj)
    except (BufferError, TypeError, ValueError):  # it was released, or is part of a matrix
        return ffi.from_buffer("uint8_t[]", view)
    start = (ffi.from_buffer("uint8_t[]", view) + 0) - (whole + 0) if view.nbytes else 0
    part = whole[start : start + view.nbytes]
    _used[part] = whole  # which keeps the memory; a part does not
    return part


if sys.version_info < (3, 12, 7):
    _from_view = _from_what_is_viewed


class BufferSlice:
    """A part of bytes, without a copy, like a memoryview.

    Unlike a memoryview, it may be in a cycle of references: CPython before 3.12.7 crashes when it
    collects memoryviews in a cycle (gh-77894), and tracebacks make cycles.
    """

    __slots__ = ("data", "start", "stop")

    def __init__(self, data: bytes, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= len(data)
        self.data = data
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __bytes__(self) -> bytes:
        return self.data[self.start : self.stop]

    def __eq__(self, other: object) -> bool:
        return bytes(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


def unpinned(data: bytes | BufferSlice) -> bytes | BufferSlice:
    """The same bytes, to be kept: a copy if they are less than half of what they keep in memory."""
    return bytes(data) if data.__class__ is BufferSlice and 2 * len(data) < len(data.data) else data


def span(data: Any) -> tuple[Any, int]:
    """What to pass to C for `const uint8_t *` and its length. Keep the data until C is done."""
    if data.__class__ is BufferSlice:
        return ffi.from_buffer("uint8_t[]", data.data) + data.start, len(data)
    native = readable(data)
    return native, len(native)


def native_text(pointer: Any) -> str:
    """A C string as text. Names may come from blocks and be any bytes: none may raise here."""
    text: str = ffi.string(pointer).decode(errors="surrogateescape")
    return text
