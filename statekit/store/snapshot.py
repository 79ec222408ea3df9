"""Snapshots: the store as it was at one moment, read while it goes on changing."""

import threading
from array import array
from collections.abc import Iterator
from typing import Any

from statekit._native import ffi, lib
from statekit.errors import ClosedError, native_error
from statekit.store.buffers import empty_buffer
from statekit.store.kinds import Residency, residency_name


class Snapshot:
    """Iterates over (leaf, its blocks), each leaf once. Get one from Store.snapshot().

    Close it, best with `with`: while it is open, whoever changes a leaf that it has not read
    yet must encode that leaf first.
    """

    __slots__ = ("_cell", "_lock", "_ptr", "epoch")

    def __init__(self, store: Any, since: "array[int] | None", bytes_max: int) -> None:
        # The cell owns what C puts into it, so that nothing is lost if a signal interrupts us.
        self._cell = ffi.gc(ffi.new("sk_snapshot **"), _close)
        epochs = ffi.NULL if since is None else ffi.from_buffer("uint32_t[]", since)
        status = lib.sk_snapshot_open(store, epochs, bytes_max, self._cell)
        if status:
            raise native_error(status)
        self._ptr = self._cell[0]
        self._lock = threading.Lock()  # one reader at a time, and no close() under it
        self.epoch: int = lib.sk_snapshot_epoch(self._ptr)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return self

    def __next__(self) -> tuple[int, bytes]:
        leaf = ffi.new("uint32_t *")
        buffer = empty_buffer()
        with self._lock:
            if self._ptr is None:
                raise ClosedError("the snapshot is closed. Take another one.")
            length = lib.sk_snapshot_next(self._ptr, leaf, buffer.ptr)
        if length == -lib.SK_END:
            raise StopIteration
        if length < 0:
            raise native_error(-length)
        return leaf[0], buffer.take(length)

    def residency(self, leaf: int) -> Residency:
        """What the leaf was when the snapshot was taken.

        One that was not whole is in the snapshot only as far as it was here.
        """
        with self._lock:
            if self._ptr is None:
                raise ClosedError("the snapshot is closed. Take another one.")
            return residency_name(lib.sk_snapshot_residency(self._ptr, leaf))

    def close(self) -> None:
        """Lets go of the snapshot. Closing twice does no harm."""
        with self._lock:
            self._ptr = None
            cell, self._cell = self._cell, None
            if cell is not None:
                ffi.release(cell)

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(cell: Any) -> None:
    lib.sk_snapshot_close(cell[0])
