"""Handles of timers: under each key a set of due times, taken out when a watermark passes them.

>>> from statekit import Store
>>> timers = Store().state("expiry", "timers")
>>> timers.set("alice", 300)
>>> timers.set("bob", 100)
>>> timers.next_due
100
>>> timers.due(200)
[(100, 'bob')]
>>> timers.get("alice"), timers.get("bob")
((300,), ())
"""

from array import array
from struct import Struct
from typing import Any

from statekit._native import ffi, lib
from statekit.errors import closed_error, native_error, where
from statekit.keys import KEY_FAULTS
from statekit.native.buffers import empty_buffer, push_buffer
from statekit.native.states import State

_OK: int = lib.SK_OK
_MISSING: int = lib.SK_MISSING
_NONE = 2**63 - 1  # what sk_timers_next answers if there is no timer
_HEAD = Struct("<qI")


class TimersState(State):
    """Any number of timers under each key, each due at an int of 64 bits, ms by convention.

    Setting a timer twice has the same effect as setting it once. Timers are never evicted.
    """

    __slots__ = ()
    _takes = "Pass an int."

    def set(self, key: Any, due: int) -> None:
        """Sets a timer; one that is set already stays as it is."""
        encode = self._encode
        try:
            k = encode(key)
            status = lib.sk_timer_set(self._ptr, self._id, k, len(k), due)
        except KEY_FAULTS as fault:
            raise self._fault(fault, key, due) from None
        if status:
            raise self._refuse(status, key)

    def cancel(self, key: Any, due: int) -> bool:
        """Cancels a timer; True if it was set."""
        encode = self._encode
        try:
            k = encode(key)
            status = lib.sk_timer_cancel(self._ptr, self._id, k, len(k), due)
        except KEY_FAULTS as fault:
            raise self._fault(fault, key, due) from None
        if status > _MISSING:
            raise self._refuse(status, key)
        return bool(status == _OK)

    def get(self, key: Any) -> tuple[int, ...]:
        """The due times of a key, in order; empty if it has none."""
        encoded = self.get_encoded(key)
        return () if encoded is None else self.decode(encoded)

    def decode(self, encoded: bytes) -> tuple[int, ...]:
        """The due times from their bytes, as get_encoded() and blocks have them."""
        return tuple(memoryview(encoded).cast("q"))

    def due(
        self, watermark: int, *, start: int = 0, stop: int | None = None, peek: bool = False
    ) -> list[tuple[int, Any]]:
        """Takes out the timers of leaves [start, stop) that are due at the watermark.

        Returns (due, key) of each, ordered by time and then by the key's bytes. Each timer is
        given to one caller, once. peek: leave them in place.
        """
        ptr = self._ptr
        if ptr is None:
            raise closed_error(self.name)
        buffer = empty_buffer()
        end = lib.sk_leaf_count(ptr) if stop is None else stop
        flags = lib.SK_PEEK if peek else 0
        try:
            count = lib.sk_timers_due(ptr, self._id, start, end, watermark, flags, buffer.ptr)
        except (TypeError, OverflowError) as fault:
            raise self._value_fault(fault, watermark, where(self.name)) from None
        if count < 0:
            push_buffer(buffer)
            raise native_error(-count, self.name)
        data = buffer.take(buffer.length)
        decode = self.codec.decode
        timers, at = [], 0
        for _ in range(count):
            due, size = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            timers.append((due, decode(data[at : at + size])))
            at += size
        return timers

    def lower_dues(self, dues: "array[int]") -> None:
        """Lowers each leaf's number ('q') to its earliest due time; also of leaves that are shut.

        That may be too early, if timers that were due then were removed; it is never too late.
        """
        if self._ptr is None:
            raise closed_error(self.name)
        out = ffi.from_buffer("int64_t[]", dues)
        status = lib.sk_timers_dues(self._ptr, self._id, 0, len(dues), out)
        if status:
            raise native_error(status, self.name)

    @property
    def next_due(self) -> int | None:
        """When the next timer that is here is due; None if there is none."""
        if self._ptr is None:
            raise closed_error(self.name)
        due: int = lib.sk_timers_next(self._ptr, self._id)
        return None if due == _NONE else due

    def next_due_of(self, start: int, stop: int) -> int | None:
        """The same of leaves [start, stop)."""
        if self._ptr is None:
            raise closed_error(self.name)
        due: int = lib.sk_timers_next_of(self._ptr, self._id, start, stop)
        return None if due == _NONE else due
