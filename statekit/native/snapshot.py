"""Snapshots: the store as it was at one moment, read while it goes on changing."""

import threading
from array import array
from collections.abc import Iterator
from struct import Struct
from typing import Any, NamedTuple

from statekit._native import ffi, lib
from statekit.errors import ClosedError, native_error
from statekit.native.buffers import empty_buffer, push_buffer
from statekit.native.frames import Frames
from statekit.native.kinds import NO_TIME, Residency, residency_name

_RECORDS_MAX = 8192  # leaves that one call of fill() reads at most
_RECORD = Struct("<IIQQI4x")  # sk_filled


class Filled(NamedTuple):
    """A leaf that Snapshot.fill() has put into a buffer."""

    leaf: int
    residency: int  # by number, as in kinds.RESIDENCIES
    offset: int  # of its first block in the buffer
    length: int  # bytes of its blocks
    is_delta: bool  # a delta was asked for, or the leaf was not whole


class Snapshot:
    """Iterates over (leaf, its blocks), each leaf once. Get one from Store.snapshot().

    Several threads may read it together: each leaf goes to one of them. Close it, best with a
    `with` statement: while it is open, a thread that changes a leaf which was not read yet must
    encode that leaf first.
    """

    __slots__ = ("_cell", "_idle", "_ptr", "_readers", "epoch", "leaves", "watermark")

    def __init__(self, store: Any, since: "array[int] | None", bytes_max: int) -> None:
        # The cell owns what C puts into it, so that nothing leaks if a signal interrupts us.
        self._cell = ffi.gc(ffi.new("sk_snapshot **"), _close)
        epochs = ffi.NULL if since is None else ffi.from_buffer("uint32_t[]", since)
        status = lib.sk_snapshot_open(store, epochs, bytes_max, self._cell)
        if status:
            raise native_error(status)
        self._ptr = self._cell[0]
        self._idle = threading.Condition()  # close() waits until nobody reads
        self._readers = 0
        self.epoch: int = lib.sk_snapshot_epoch(self._ptr)
        watermark = lib.sk_snapshot_watermark(self._ptr)
        #: Event time when it was taken; None if there was none. It has all entries alive then.
        self.watermark: int | None = None if watermark == NO_TIME else watermark
        self.leaves: int = lib.sk_leaf_count(store)

    def add_shut(self) -> None:
        """Adds leaves that are shut, as they are. Call it before reading, and before gates open."""
        lib.sk_snapshot_add_shut(self._ptr)

    def _begin(self) -> Any:
        with self._idle:
            if self._ptr is None:
                raise ClosedError("the snapshot is closed. Take another one.")
            self._readers += 1
            return self._ptr

    def _end(self) -> None:
        with self._idle:
            self._readers -= 1
            if self._readers == 0:
                self._idle.notify_all()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return self

    def __next__(self) -> tuple[int, bytes]:
        leaf = ffi.new("uint32_t *")
        buffer = empty_buffer()
        pointer = self._begin()
        try:
            length = lib.sk_snapshot_next(pointer, leaf, buffer.ptr)
        finally:
            self._end()
        if length < 0:
            push_buffer(buffer)
            if length == -lib.SK_END:
                raise StopIteration
            raise native_error(-length)
        return leaf[0], buffer.take(length)

    def fill(self, frames: Frames, bytes_max: int) -> list[Filled]:
        """Appends the blocks of leaf after leaf, with checksums, until there are bytes_max.

        Takes at least one leaf, if one is left; a leaf without entries gives nothing. An empty list
        means that no leaf is left (for this thread; another may be reading the last one). The GIL
        is released meanwhile.
        """
        buffer = frames.unshared()
        records = ffi.new("sk_filled[]", min(_RECORDS_MAX, self.leaves))
        pointer = self._begin()
        try:
            count = lib.sk_snapshot_fill(pointer, bytes_max, records, len(records), buffer)
        finally:
            self._end()
        if count == -lib.SK_END:
            return []
        if count < 0:
            raise native_error(-count)
        rows = _RECORD.iter_unpack(ffi.buffer(records, count * _RECORD.size))
        return [
            Filled(leaf, residency, offset, length, bool(is_delta))
            for leaf, residency, offset, length, is_delta in rows
        ]

    def residency(self, leaf: int) -> Residency:
        """The residency of the leaf when the snapshot was taken.

        Of a leaf that was not whole, the snapshot has only the entries that were here.
        """
        pointer = self._begin()
        try:
            return residency_name(lib.sk_snapshot_residency(pointer, leaf))
        finally:
            self._end()

    def residencies(self) -> bytes:
        """residency() of every leaf, one byte each, by number as in kinds.RESIDENCIES."""
        out = bytearray(self.leaves)
        pointer = self._begin()
        try:
            status = lib.sk_snapshot_residencies(pointer, ffi.from_buffer("uint8_t[]", out))
        finally:
            self._end()
        if status:
            raise native_error(status)
        return bytes(out)

    def close(self) -> None:
        """Lets go of the snapshot, once nobody reads it. Closing twice does no harm."""
        with self._idle:
            self._ptr = None
            self._idle.wait_for(lambda: self._readers == 0)
            cell, self._cell = self._cell, None
            if cell is not None:
                ffi.release(cell)

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(cell: Any) -> None:
    lib.sk_snapshot_close(cell[0])
