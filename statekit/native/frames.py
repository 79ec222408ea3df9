"""Frames of a pack: blocks and compressed blocks, one after the other (csrc/frames.c).

A frame has a plain checksum while it is in memory; in a file, its checksum is bound to the file's
id and its place in it.

>>> from statekit import Store
>>> store = Store()
>>> store.state("n", "i64", int).put_many(list(range(1000)), list(range(1000)))
>>> frames = Frames()
>>> with store.snapshot() as snapshot:
...     filled = snapshot.fill(frames, 1 << 20)
>>> seal(frames.view())  # all have their checksums: fill() wrote them
>>> pack_id = bytes(16)
>>> bind(frames.view(), pack_id, 64)
>>> verify(frames.view(), pack_id, 64) is None
True
>>> verify(frames.view(), pack_id, 72)
0
"""

import weakref
from typing import Any, NamedTuple, TypeAlias

from statekit._native import ffi, lib
from statekit.errors import ArgumentError, native_error
from statekit.native.buffers import BufferSlice, empty_buffer, push_buffer, readable, span

Readable: TypeAlias = bytes | bytearray | memoryview
Writable: TypeAlias = bytearray | memoryview

_ID_BYTES = 16
# A squeezed entry has 8 bytes or more: its key, or the lengths of key and value. It is restored to
# three times that at most, a hash and two offsets of 8 bytes. A header is not squeezed.
_RESTORED_MAX, _HEADER_MAX = 4, 1024


class Head(NamedTuple):
    """What the header of a block says."""

    leaf: int
    leaves: int  # of the store it was made in
    name: bytes  # of the state
    is_delta: bool


class Frames:
    """Bytes in native memory that grow at their end. For one thread at a time.

    As with a bytearray, a call that would move the bytes raises BufferError while a view of them is
    alive.
    """

    __slots__ = ("_exported", "ptr")

    def __init__(self) -> None:
        self.ptr: Any = ffi.gc(ffi.new("sk_buf *"), lib.sk_buf_free)
        self._exported: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        return int(self.ptr.len)

    def __repr__(self) -> str:
        return f"<Frames of {len(self)} bytes>"

    def append(self, data: Readable) -> None:
        """Adds bytes at the end."""
        self.unshared()
        native = readable(data)
        status = lib.sk_buf_put(self.ptr, native, len(native))
        if status:
            raise native_error(status)

    def reserve(self, more: int) -> None:
        """Makes room for `more` bytes, so that adding them moves nothing."""
        self.unshared()
        status = lib.sk_buf_reserve(self.ptr, more)
        if status:
            raise native_error(status)

    def clear(self) -> None:
        """Forgets the bytes; their memory is kept for the next ones."""
        self.unshared()
        self.ptr.len = 0

    def view(self) -> memoryview:
        """The bytes, without a copy; they can be written to."""
        exported: Any = None if self._exported is None else self._exported()
        if exported is None:
            pointer = self.ptr
            # The view keeps the memory alive, even after this object is gone.
            data = ffi.gc(pointer.data, lambda _: pointer.len) if pointer.len else ffi.new("char *")
            exported = ffi.buffer(data, pointer.len)
            self._exported = weakref.ref(exported)
        return memoryview(exported)

    def unshared(self) -> Any:
        """The sk_buf, for a call that may move its bytes. BufferError while a view is alive."""
        if self._exported is not None and self._exported() is not None:
            raise BufferError("the frames are viewed and cannot change. Release the views first.")
        self._exported = None
        return self.ptr


def seal(frames: Writable) -> None:
    """Writes the plain checksum into frames that have none (0)."""
    native = ffi.from_buffer("uint8_t[]", frames, require_writable=True)
    _expect(lib.sk_frames_seal(native, len(native)))


def digest(frames: Readable) -> bytes:
    """Size and checksum of each frame, 12 bytes: a pack is named by these. Call before bind()."""
    native = readable(frames)
    buffer = empty_buffer()
    length = lib.sk_frames_digest(native, len(native), buffer.ptr)
    if length < 0:
        push_buffer(buffer)
        raise native_error(-length)
    return buffer.take(length)


def bind(frames: Writable, pack_id: bytes, offset: int) -> None:
    """Binds checksums to a pack and a place in it: the first frame is at `offset` in that pack.

    Binding them to the same place once more makes them plain again.
    """
    native = ffi.from_buffer("uint8_t[]", frames, require_writable=True)
    _expect(lib.sk_frames_bind(native, len(native), _checked(pack_id), offset))


def verify(frames: Readable | BufferSlice, pack_id: bytes, offset: int) -> int | None:
    """Where in `frames` the first bad frame begins; None if all are good.

    Good: bound to this place, and undamaged as far as a checksum can tell.
    """
    native, length = (frames, len(frames)) if frames.__class__ is bytes else span(frames)
    bad = ffi.new("uint64_t *")
    status = lib.sk_frames_verify(native, length, _checked(pack_id), offset, bad)
    if status == lib.SK_CORRUPT:
        return int(bad[0])
    _expect(status)
    return None


def read_head(block: Readable) -> Head:
    """The header of the block at the start of a buffer. CorruptBlockError if it is not valid.

    Block() reads the same header, but also prepares what is needed to look at entries.
    """
    native = readable(block)
    info = ffi.new("sk_block_info *")
    _expect(lib.sk_block_read(native, len(native), info))
    name: bytes = ffi.string(info.name)
    return Head(info.leaf, 1 << info.leaf_bits, name, bool(info.is_delta))


def _checked(pack_id: bytes) -> bytes:
    if len(pack_id) != _ID_BYTES:
        raise ArgumentError(f"{len(pack_id)} bytes are no id of a pack. It has {_ID_BYTES}.")
    return pack_id


def _expect(status: int) -> None:
    if status:
        raise native_error(status)


def squeeze(block: Readable) -> bytes | None:
    """A block in a form that compresses better; None if it has none (csrc/squeeze.c)."""
    buffer = empty_buffer()
    native = readable(block)
    status = lib.sk_block_squeeze(native, len(native), buffer.ptr)
    if status == lib.SK_OK:
        return buffer.take(buffer.length)
    push_buffer(buffer)
    if status in (lib.SK_MISSING, lib.SK_CORRUPT):
        return None
    raise native_error(status)


def restore(squeezed: Readable, size: int) -> bytearray | None:
    """The block of so many bytes that was squeezed; None if there is none."""
    native = readable(squeezed)
    if size > len(native) * _RESTORED_MAX + _HEADER_MAX:
        return None  # before memory is allocated
    block = bytearray(size)
    status = lib.sk_block_restore(native, len(native), ffi.from_buffer("uint8_t[]", block), size)
    if status == lib.SK_CORRUPT:
        return None
    if status:
        raise native_error(status)
    return block
