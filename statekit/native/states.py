"""Handles of one state in a store: what every kind can do, one key at a time or in batches.

These methods are the single-key fast path: most of their time is the cffi call itself. Hence
the shape of the code: callables are loaded into locals (CPython 3.11 does not specialise calls
through slots), and there is no `with` and no helper before the call. Every outcome that is not the
expected one is turned into an exception by the methods at the top, _fault() and _refuse().
"""

from collections.abc import Callable
from typing import Any

from statekit._native import ffi, lib
from statekit.errors import (
    ArgumentError,
    BadValueError,
    InProcess,
    OverflowStateError,
    StateKitError,
    closed_error,
    native_error,
    shorten,
    unknown_entry,
    where,
)
from statekit.keys import KEY_FAULTS, KeyCodec, key_error
from statekit.native.batch import Blobs, run_batch
from statekit.native.buffers import new_read, pop_read, push_read, readable, take_grown
from statekit.native.kinds import NO_TIME, Clock, clock_number

_OK: int = lib.SK_OK
_MISSING: int = lib.SK_MISSING
_UNKNOWN: int = lib.SK_UNKNOWN
_BLIND: int = lib.SK_BLIND
_NOTHING = object()
_NULL: Any = ffi.NULL

_contains: Callable[..., int] = lib.sk_contains
_delete: Callable[..., int] = lib.sk_delete
_get: Callable[..., int] = lib.sk_get
_install: Callable[..., int] = lib.sk_install
_put: Callable[..., int] = lib.sk_put


class State(InProcess):
    """What states of every kind can do. Get one from Store.state()."""

    _instead = "Ask a store of the other process for it; blocks carry entries over."

    __slots__ = (
        "_encode", "_id", "_ptr", "_raw_key", "codec", "kind", "name", "timed", "ttl_settings",
    )  # fmt: skip

    def __init__(
        self, ptr: Any, state_id: int, name: str, kind: str, codec: KeyCodec, timed: bool
    ) -> None:
        self._ptr = ptr  # None once the store is closed; then cffi raises TypeError
        self._id = state_id
        self._encode = codec.encode
        self._raw_key = (
            bytes if codec.text == "b" else None
        )  # keys of this class are encoded already
        self.codec = codec
        self.name = name
        self.kind = kind
        self.timed = timed
        self.ttl_settings: tuple[int, Clock, bool] | None = None  # the arguments of ttl()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, keys {self.codec.python}>"

    def _fault(self, fault: Exception, key: object, value: object = _NOTHING) -> StateKitError:
        """Says what was wrong with the arguments of a call that never reached C."""
        if self._ptr is None:
            return closed_error(self.name)
        if value is _NOTHING or not self._encodes(key):
            return key_error(self.codec, key, self.name)
        error = self._value_fault(fault, value, where(self.name, key))
        error.key = key
        return error

    def _value_fault(self, fault: Exception, value: object, place: str) -> StateKitError:
        error: StateKitError
        if isinstance(fault, OverflowError):
            error = OverflowStateError(
                f"{shorten(value)} does not fit into 64 bits, which is -2**63 to 2**63 - 1{place}. "
                "Use a float state or a smaller number."
            )
        else:
            error = BadValueError(
                f"{shorten(value)} is of type {type(value).__name__}, which a state of kind "
                f"{self.kind} does not take{place}. {self._takes}"
            )
        error.state = self.name
        return error

    def _refuse(self, status: int, key: object) -> StateKitError:
        """The exception for a status that is not an answer."""
        if status == _UNKNOWN:
            return unknown_entry(self.name, key)
        return native_error(status, self.name, key)

    def _encodes(self, key: object) -> bool:
        try:
            self._encode(key)
        except KEY_FAULTS:
            return False
        return True

    _takes = "Pass bytes."

    def contains(self, key: Any) -> bool:
        encode = self._encode
        try:
            k = encode(key)
            status = _contains(self._ptr, self._id, k, len(k))
        except KEY_FAULTS as fault:
            raise self._fault(fault, key) from None
        if status > _MISSING:
            raise self._refuse(status, key)
        return status == _OK

    def delete(self, key: Any, blind: bool = False) -> bool:
        """Removes the entry; True if there was one.

        blind: do not ask whether it exists. Then the leaf need not be whole.
        """
        encode = self._encode
        try:
            k = encode(key)
            status = _delete(self._ptr, self._id, k, len(k), _BLIND if blind else 0)
        except KEY_FAULTS as fault:
            raise self._fault(fault, key) from None
        if status > _MISSING:
            raise self._refuse(status, key)
        return status == _OK

    def get_encoded(self, key: Any) -> bytes | None:
        """The value as bytes: 8 bytes little endian, the bytes, or MessagePack."""
        try:
            if key.__class__ is self._raw_key:
                k = key
            else:
                encode = self._encode
                k = encode(key)
            try:
                read = pop_read()
            except IndexError:
                read = new_read()
            pointer, view, room = read
            length = _get(self._ptr, self._id, k, len(k), pointer)
        except KEY_FAULTS as fault:
            raise self._fault(fault, key) from None
        if length > room:
            return take_grown(pointer, length)
        if length >= 0:
            data: bytes = view[:length]
            push_read(read)
            return data
        push_read(read)
        if length == -_MISSING:
            return None
        raise self._refuse(-length, key)

    def put_encoded(self, key: Any, value: bytes) -> None:
        """Sets the value from the bytes that get_encoded() gives."""
        try:
            if value.__class__ is not bytes:
                value = memoryview(value).tobytes()
            if key.__class__ is self._raw_key:
                k = key
            else:
                encode = self._encode
                k = encode(key)
            status = _put(self._ptr, self._id, k, len(k), value, len(value))
        except KEY_FAULTS as fault:
            raise self._fault(fault, key, value) from None
        if status:
            raise self._refuse(status, key)

    def install(self, key: Any, encoded: bytes | None, stamp: int | None = None) -> None:
        """Takes in what the leaf's home answered for a key: its encoded value, or None if missing.

        Does nothing if the key is here already, because what is here is newer. stamp: in a timed
        state, when the home's entry was last touched, in ms; None counts as now.
        """
        try:
            k = self._encode(key)
        except KEY_FAULTS as fault:
            raise self._fault(fault, key, encoded) from None
        self.install_encoded(k, encoded, stamp)

    def install_plain(self, key: bytes, encoded: bytes) -> bool:
        """install_encoded() without a stamp; False if it must say why it cannot."""
        try:
            status = _install(self._ptr, self._id, key, len(key), encoded, len(encoded), NO_TIME)
        except TypeError:  # closed
            return False
        return not status

    def install_encoded(self, key: bytes, encoded: bytes | None, stamp: int | None = None) -> None:
        """install() of a key that is encoded already."""
        try:
            if encoded is None:
                value, size = _NULL, 0
            else:
                value = encoded if encoded.__class__ is bytes else readable(encoded)
                size = len(value)
            stamp_ms = NO_TIME if stamp is None else stamp
            status = _install(self._ptr, self._id, key, len(key), value, size, stamp_ms)
        except KEY_FAULTS as fault:
            raise self._fault(fault, self.codec.show(key), encoded) from None
        if status:
            raise self._refuse(status, self.codec.show(key))

    def ttl(self, ms: int, *, clock: Clock = "processing", on_read: bool = False) -> None:
        """Entries of this timed state expire `ms` after they were last written; 0: never.

        clock: "processing" is the system's clock, "event" the watermark set by Store.set_time().
        on_read: reading an entry starts its time anew, too.
        """
        if self._ptr is None:
            raise closed_error(self.name)
        try:
            status = lib.sk_state_ttl(self._ptr, self._id, ms, clock_number(clock), on_read)
        except (TypeError, OverflowError):
            raise ArgumentError(
                f"{shorten(ms)} is no time to live{where(self.name)}. Give milliseconds, 0 or more."
            ) from None
        if status:
            raise native_error(status, self.name)
        self.ttl_settings = (ms, clock, on_read)

    def is_expired(self, stamp: int) -> bool:
        """Whether an entry with this stamp, here or anywhere else, has expired by now."""
        if self._ptr is None:
            raise closed_error(self.name)
        answer: int = lib.sk_stamp_expired(self._ptr, self._id, stamp)
        if answer < 0:
            raise native_error(-answer, self.name)
        return answer == 1

    def leaf_of_encoded(self, k: bytes) -> int:
        """The leaf of an encoded key."""
        if self._ptr is None:
            raise closed_error(self.name)
        leaf: int = lib.sk_key_leaf(self._ptr, self._id, k, len(k))
        if leaf < 0:
            raise self._refuse(-leaf, self.codec.show(k))
        return leaf

    def probe_cost(self, key: Any) -> int:
        """Groups of slots visited plus keys compared to find this key."""
        try:
            k = self._encode(key)
            cost: int = lib.sk_probe_cost(self._ptr, self._id, k, len(k))
        except KEY_FAULTS as fault:
            raise self._fault(fault, key) from None
        if cost < 0:
            raise self._refuse(-cost, key)
        return cost

    def contains_many(self, keys: Any) -> memoryview:
        """One byte per key: 1 if it is there."""
        return run_batch(self, lib.SK_B_HAS, keys).done()

    def delete_many(self, keys: Any, *, blind: bool = False) -> memoryview:
        """Removes entries; one byte per key: 1 if there was one. blind: as in delete()."""
        flags = {"flags": _BLIND if blind else 0}
        return run_batch(self, lib.SK_B_DELETE, keys, numbers=flags).done()


class BytesState(State):
    """Opaque bytes under each key, up to 1 GiB.

    >>> from statekit import Store
    >>> pages = Store().state("pages", "bytes")
    >>> pages.put("/home", b"<html>")
    >>> pages.get("/home"), pages.get("/nowhere")
    (b'<html>', None)
    """

    __slots__ = ()

    get = State.get_encoded
    put = State.put_encoded

    def get_many(self, keys: Any) -> Blobs:
        """All values in one piece of memory, with offsets and a mask of those that exist."""
        return run_batch(self, lib.SK_B_GET, keys, wants_bytes=True).blobs()

    def put_many(self, keys: Any, values: Any) -> None:
        run_batch(self, lib.SK_B_PUT, keys, values=values, want="b")
