"""Handles of list, map and nested states: MessagePack in, MessagePack out, at any path.

This layer moves bytes: an element, a map key or a sub-tree is one value in MessagePack. A path
is a tuple of steps from the value's root: an int into a list (negative counts from the end),
a key into a map.

>>> import msgpack
>>> from statekit import Store
>>> orders = Store().state("orders", "nested")
>>> orders.append("alice", msgpack.packb({"sku": 7}), path=("2026-11",), shape="ml")
True
>>> msgpack.unpackb(orders.get("alice", ("2026-11", -1, "sku")))
7
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

from msgpack import packb

from statekit._native import ffi, lib
from statekit.errors import PathError, StateKitError, shorten, where
from statekit.keys import KEY_FAULTS, KeyCodec
from statekit.native.batch import Blobs, run_batch
from statekit.native.buffers import Buffer, empty_buffer, pop_buffer, push_buffer
from statekit.native.states import State

Step: TypeAlias = str | bytes | int | float | bool | tuple[Any, ...] | None
Path: TypeAlias = tuple[Step, ...]

_MISSING = lib.SK_MISSING
_LAST = 2**63 - 1  # "to the end" of a slice
_SHAPES = {"list": b"l", "map": b"m", "nested": b""}  # what a write may create by default
_TYPES = {ord("l"): "list", ord("m"): "map", ord("s"): "scalar"}
_PAGE_ELEMENTS = 1024
_FIXSTR = [bytes([0xA0 | length]) for length in range(32)]  # heads of short strings
_FIXINT = [bytes([number]) for number in range(128)]
_GET, _LEN, _APPEND = lib.SK_R_GET, lib.SK_R_LEN, lib.SK_W_APPEND
_FAULTS = (*KEY_FAULTS, AttributeError, BufferError)

_sk_read = lib.sk_read
_sk_write = lib.sk_write


def encode_path(path: Path) -> bytes:
    """A path as C reads it: its steps in MessagePack, one after the other."""
    return b"".join([_encode_step(step) for step in path])


def _encode_step(step: Step) -> bytes:
    # The two usual kinds of steps are packed by hand: packb() makes a packer for each call.
    if step.__class__ is str:
        data = step.encode()
        if len(data) < 32:
            return _FIXSTR[len(data)] + data
    elif step.__class__ is int and 0 <= step < 128:
        return _FIXINT[step]
    packed: bytes = packb(step)
    return packed


class ContainerState(State):
    """A list, a map, or any nesting of them under each key.

    Reads give None where there is no such key or path. Writes give False where there is nothing
    to write to, unless `shape` says what to create there: one letter per level from the root,
    'l' or 'm'. In list and map states the root is created without being asked.
    """

    __slots__ = ("_shape",)
    _takes = "Pass MessagePack bytes, and ints as positions."

    def __init__(
        self, ptr: Any, state_id: int, name: str, kind: str, codec: KeyCodec, timed: bool
    ) -> None:
        super().__init__(ptr, state_id, name, kind, codec, timed)
        self._shape = _SHAPES[kind]

    put = State.put_encoded

    # ---- Reading

    def get(self, key: Any, path: Path = ()) -> bytes | None:
        """The value at the path."""
        if not path:
            return self.get_encoded(key)
        value: bytes | None = self._read(key, _GET, path, b"", 0, 0, True)
        return value

    def length(self, key: Any, path: Path = ()) -> int | None:
        """The number of elements of the list or map."""
        count: int | None = self._read(key, _LEN, path, b"", 0, 0, False)
        return count

    def type_of(self, key: Any, path: Path = ()) -> str | None:
        """'list', 'map' or 'scalar'."""
        letter = self._read(key, lib.SK_R_TYPE, path, b"", 0, 0, False)
        return None if letter is None else _TYPES[letter]

    def slice(
        self, key: Any, start: int = 0, stop: int | None = None, path: Path = ()
    ) -> bytes | None:
        """An array of the list's elements from start to stop, which count as in a Python slice."""
        end = _LAST if stop is None else stop
        elements: bytes | None = self._read(key, lib.SK_R_SLICE, path, b"", start, end, True)
        return elements

    def has(self, key: Any, map_key: bytes, path: Path = ()) -> bool:
        """True if the map has this key."""
        return self._read(key, lib.SK_R_HAS, path, map_key, 0, 0, False) is not None

    def keys(self, key: Any, path: Path = ()) -> bytes | None:
        """An array of the map's keys."""
        names: bytes | None = self._read(key, lib.SK_R_KEYS, path, b"", 0, 0, True)
        return names

    def pages(
        self, key: Any, path: Path = (), elements_max: int = _PAGE_ELEMENTS
    ) -> Iterator[bytes]:
        """Arrays of up to elements_max elements of a list, or keys and values of a map in turn.

        ChangedDuringIterationError if the container gains or loses elements meanwhile.
        """
        steps = encode_path(path)
        position = ffi.new("uint64_t[2]")  # cursor, version
        while (page := self._page(key, steps, position, elements_max)) is not None:
            yield page

    def first_page(self, key: Any, steps: bytes, elements_max: int) -> bytes | None:
        """The first of the pages() at an encoded path; None if there is nothing."""
        return self._page(key, steps, ffi.new("uint64_t[2]"), elements_max)

    def _page(self, key: Any, steps: bytes, position: Any, elements_max: int) -> bytes | None:
        buffer = empty_buffer()
        try:
            k = self._encode(key)
            length = lib.sk_page(
                self._ptr, self._id, k, len(k), steps, len(steps),
                position, position + 1, elements_max, buffer.ptr,
            )  # fmt: skip
        except KEY_FAULTS as fault:
            raise self._fault(fault, key) from None
        if length >= 0:
            return buffer.take(length)
        push_buffer(buffer)
        if length in (-lib.SK_END, -_MISSING):
            return None
        raise self._refuse(-length, key)

    # ---- Writing

    def set(self, key: Any, path: Path, packed: bytes, shape: str | None = None) -> bool:
        """Puts a value at the path, whose last step may be a new map key."""
        return self._write(key, lib.SK_W_SET, path, packed, 0, 0, shape) is True

    def delete_at(self, key: Any, path: Path) -> bool:
        """Removes the element or map entry that the path leads to."""
        return self._write(key, lib.SK_W_DELETE, path, b"", 0, 0, None) is True

    def append(self, key: Any, packed: bytes, path: Path = (), shape: str | None = None) -> bool:
        """Adds an element to the end of the list."""
        return self._write(key, _APPEND, path, packed, 0, 0, shape) is True

    def extend(self, key: Any, packed: bytes, path: Path = (), shape: str | None = None) -> bool:
        """Adds the elements of an array to the end of the list."""
        return self._write(key, lib.SK_W_EXTEND, path, packed, 0, 0, shape) is True

    def insert(
        self, key: Any, at: int, packed: bytes, path: Path = (), shape: str | None = None
    ) -> bool:
        """Inserts an element before position `at`, clamped as list.insert does."""
        return self._write(key, lib.SK_W_INSERT, path, packed, at, 0, shape) is True

    def pop(self, key: Any, at: int = -1, path: Path = ()) -> bytes | None:
        """Removes the element at a position and returns it."""
        element: bytes | None = self._write(key, lib.SK_W_POP, path, b"", at, 0, None)
        return element

    def splice(self, key: Any, start: int, stop: int, packed: bytes, path: Path = ()) -> bool:
        """Replaces the elements from start to stop by those of an array."""
        return self._write(key, lib.SK_W_SPLICE, path, packed, start, stop, None) is True

    def update(self, key: Any, packed: bytes, path: Path = (), shape: str | None = None) -> bool:
        """Puts every entry of a map into the map."""
        return self._write(key, lib.SK_W_UPDATE, path, packed, 0, 0, shape) is True

    def take(self, key: Any, map_key: bytes, path: Path = ()) -> bytes | None:
        """Removes the map's entry with this key and returns its value."""
        value: bytes | None = self._write(key, lib.SK_W_TAKE, path, map_key, 0, 0, None)
        return value

    def clear(self, key: Any, path: Path = ()) -> bool:
        """Removes all elements of the list or map, which stays."""
        return self._write(key, lib.SK_W_CLEAR, path, b"", 0, 0, None) is True

    # ---- Batches

    def get_many(self, keys: Any) -> Blobs:
        """All values, each MessagePack, in one piece of memory."""
        return run_batch(self, lib.SK_B_GET, keys, wants_bytes=True).blobs()

    def put_many(self, keys: Any, values: Any) -> None:
        """values: a column of bytes, each MessagePack."""
        run_batch(self, lib.SK_B_PUT, keys, values=values, want="b")

    def append_many(self, keys: Any, values: Any, *, raw: bool = False) -> None:
        """Appends to each key's list: str, int or float elements, or bytes, each MessagePack.

        raw: bytes are elements themselves, not MessagePack.
        """
        run_batch(self, lib.SK_B_APPEND, keys, values=values, raw=raw)

    def map_put_many(self, keys: Any, map_keys: Any, values: Any, *, raw: bool = False) -> None:
        """Puts one entry into each key's map; map_keys and values as in append_many()."""
        run_batch(self, lib.SK_B_MAP_PUT, keys, values=values, map_keys=map_keys, raw=raw)

    # ---- The two native calls

    def read(
        self,
        key: Any,
        op: int,
        steps: bytes,
        arg: bytes = b"",
        i: int = 0,
        j: int = 0,
        wants_bytes: bool = True,
    ) -> Any:
        """sk_read at an encoded path: the bytes or number it gives; None if nothing is there."""
        encode = self._encode
        try:
            k = encode(key)
            try:
                buffer = pop_buffer()
            except IndexError:
                buffer = Buffer()
            length: int = _sk_read(
                self._ptr, self._id, k, len(k), op, steps, len(steps),
                arg, len(arg), i, j, buffer.ptr,
            )  # fmt: skip
        except _FAULTS as fault:
            raise self._input_fault(fault, key, arg, (i, j)) from None
        if wants_bytes and length >= 0:
            return buffer.take(length)
        push_buffer(buffer)
        if length < -_MISSING:
            raise self._refuse(-length, key)
        return None if length < 0 else length

    def write(
        self,
        key: Any,
        op: int,
        steps: bytes,
        arg: bytes = b"",
        i: int = 0,
        j: int = 0,
        shape: bytes = b"",
    ) -> Any:
        """sk_write at an encoded path: the element taken out, or True; None if nothing is there."""
        encode = self._encode
        try:
            if arg.__class__ is not bytes:
                arg = memoryview(arg).tobytes()
            k = encode(key)
            try:
                buffer = pop_buffer()
            except IndexError:
                buffer = Buffer()
            length: int = _sk_write(
                self._ptr, self._id, k, len(k), op, steps, len(steps), shape,
                arg, len(arg), i, j, buffer.ptr,
            )  # fmt: skip
        except _FAULTS as fault:
            raise self._input_fault(fault, key, arg, (i, j)) from None
        if length > 0:
            return buffer.take(length)
        push_buffer(buffer)
        if length < -_MISSING:
            raise self._refuse(-length, key)
        return length == 0 or None

    def _read(
        self, key: Any, op: int, path: Path, arg: bytes, i: int, j: int, wants_bytes: bool
    ) -> Any:
        return self.read(key, op, self._steps(key, path), arg, i, j, wants_bytes)

    def _write(
        self, key: Any, op: int, path: Path, arg: bytes, i: int, j: int, shape: str | None
    ) -> Any:
        levels = self._shape if shape is None else shape.encode()
        return self.write(key, op, self._steps(key, path), arg, i, j, levels)

    def _steps(self, key: Any, path: Path) -> bytes:
        try:
            return encode_path(path) if path else b""
        except _FAULTS:
            raise PathError(
                f"{shorten(path)} is no path{where(self.name, key)}. "
                "Pass a tuple of map keys and list positions."
            ) from None

    def _input_fault(
        self, fault: Exception, key: Any, arg: Any, positions: tuple[Any, Any]
    ) -> StateKitError:
        return self._fault(fault, key, positions if isinstance(arg, bytes) else arg)
