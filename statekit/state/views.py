"""Live views of lists, maps and sets in a state: Python's containers, with the native store behind.

A view is a place, not a copy: a state, a key, and the path from the value's root, encoded as C
reads it. Reading gives what is there now, or an empty container if nothing is there. Writing
creates containers that are missing on the way (`_levels` tells C which). A view of a nested
container is made by adding a step to the path. So a change touches only the nodes on its path, and
nothing else is decoded.

A method that makes one native call is atomic for other threads. A method that reads and then writes
(sort, setdefault, slices with a step) is not.

An item that is a list, dict or set is returned as a view, and may be given as a plain container. A
view of a list's item stands for a position: after an insertion before it, the view shows the item
that is at this position then.
"""

from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    ValuesView,
)
from collections.abc import (
    Set as AbstractSet,
)
from operator import index
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from msgspec import Raw
from msgspec.msgpack import Decoder

from statekit._fast import Place
from statekit._native import lib
from statekit.codecs import (
    Codec,
    ListShape,
    MapShape,
    SetShape,
    Shape,
    ValueShape,
    make_codec,
)
from statekit.errors import (
    InProcess,
    PathError,
    closed_error,
    where,
)
from statekit.exact import VALUE_FAULTS
from statekit.native.buffers import Buffer, pop_buffer, push_buffer

if TYPE_CHECKING:
    from statekit.state.containers import ContainerState

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_MISSING: Any = object()
_END = 2**63 - 1
_PAGE = 1024  # elements that an iteration over a list reads at a time
_NIL = b"\xc0"
_EMPTY_ARRAY = b"\x90"
_FIXINT = [bytes([number]) for number in range(128)]  # small positions, encoded
_LETTERS = {"l": b"l", "m": b"m"}
_IS_MISSING: int = lib.SK_MISSING
_IS_UNKNOWN: int = lib.SK_UNKNOWN
_GET: int = lib.SK_R_GET
_APPEND: int = lib.SK_W_APPEND
_SET: int = lib.SK_W_SET
_sk_read: Callable[..., int] = lib.sk_read
_sk_write: Callable[..., int] = lib.sk_write
_encode_int = make_codec(int).encode


class View(Place, InProcess):
    """A place in a state. See the module."""

    __slots__ = ()
    _instead = "Its copy() is a plain list, dict or set, which can."

    _state: "ContainerState[Any]"
    _key: Any
    _k: bytes  # the encoded key
    _steps: bytes  # the encoded path
    _shape: Any
    _levels: bytes  # what to create on the way: a letter per level, down to here

    # ---- The two calls. If C cannot do one at once, the raw handle does it, through _when_here.

    def _read(
        self,
        op: int,
        steps: bytes | None = None,
        arg: bytes = b"",
        i: int = 0,
        j: int = 0,
        wants_bytes: bool = True,
    ) -> Any:
        """The bytes or the number that sk_read gives, or None if there is nothing."""
        state, k = self._state, self._k
        if steps is None:
            steps = self._steps
        try:
            buffer = pop_buffer()
        except IndexError:
            buffer = Buffer()
        is_fetched = False
        while True:
            try:
                length = _sk_read(
                    state._ptr, state._id, k, len(k), op, steps, len(steps),
                    arg, len(arg), i, j, buffer.ptr,
                )  # fmt: skip
            except TypeError:
                raise closed_error(state.name) from None
            if length != -_IS_UNKNOWN or is_fetched:
                break
            state._residence.fetch_one(state._raw, k, buffer.length)  # its leaf
            is_fetched = True
        if length >= 0:
            if wants_bytes:
                return buffer.take(length)
            push_buffer(buffer)
            return length
        push_buffer(buffer)
        if length == -_IS_MISSING:
            return None
        return state._when_here(state._raw.read, self._key, op, steps, arg, i, j, wants_bytes)

    def _write(
        self,
        op: int,
        steps: bytes | None = None,
        arg: bytes = b"",
        i: int = 0,
        j: int = 0,
        creates: bool = True,
    ) -> Any:
        """The element that sk_write took out, or True; None if there is nothing to write to."""
        state, k = self._state, self._k
        if steps is None:
            steps = self._steps
        levels = self._levels if creates else b""
        try:
            buffer = pop_buffer()
        except IndexError:
            buffer = Buffer()
        try:
            length = _sk_write(
                state._ptr, state._id, k, len(k), op, steps, len(steps), levels,
                arg, len(arg), i, j, buffer.ptr,
            )  # fmt: skip
        except TypeError:
            raise closed_error(state.name) from None
        if length > 0:
            return buffer.take(length)
        push_buffer(buffer)
        if length == 0:
            return True
        done = None
        if length == -_IS_UNKNOWN:
            state._residence.fetch_one(state._raw, k)
        if length != -_IS_MISSING:
            done = state._when_here(state._raw.write, self._key, op, steps, arg, i, j, levels)
        if done is None and creates:  # missing entries of maps are created, items of lists are not
            raise PathError(
                f"the list item that this view stands for is gone"
                f"{where(state.name, self._key)}. Take a new view of the list."
            )
        return done

    # ---- What views share

    def __len__(self) -> int:
        return self._read(lib.SK_R_LEN, wants_bytes=False) or 0

    def _data(self) -> bytes:
        """What is here, encoded."""
        if self._steps:
            data = self._read(_GET)
        else:
            data = self._state._when_here(self._state._raw.get_encoded, self._key)
        return _EMPTY[self._shape.letter] if data is None else data

    def _decoded(self, codec: Codec, data: bytes) -> Any:
        try:
            return codec.decode(data)
        except VALUE_FAULTS as fault:
            raise self._state._unreadable(fault, self._key) from None

    def _plain(self) -> Any:
        """A plain copy of what is here."""
        return self._decoded(self._shape.codec, self._data())

    def __copy__(self) -> Any:
        return self._plain()  # like copy(): a second view would stand for the same place

    def __deepcopy__(self, memo: Any) -> Any:
        return self._plain()

    def _encoded(self, codec: Codec, value: Any) -> bytes:
        try:
            return codec.encode(value)
        except VALUE_FAULTS as fault:
            raise self._state._misfit(fault, value, self._key, codec) from None

    def _at(self, step: bytes, shape: Shape) -> Any:
        """The view of a container one step further."""
        levels = self._levels + _LETTERS[shape.letter]
        return new_view(
            class_of(shape),
            self._state, self._key, self._k, self._steps + step, shape, levels,
        )  # fmt: skip

    def _is_root_of(self, state: Any, key: Any) -> bool:
        return self._state is state and self._key == key and not self._steps

    def _is_view_of(self, value: Any, step: bytes) -> bool:
        """True if it is a view of that very item: `view[key] += ...` has changed it already."""
        return (
            isinstance(value, View)
            and value._state is self._state
            and value._key == self._key
            and value._steps == self._steps + step
        )

    # ---- A repr of readable length, which reads not much more than it shows

    def __repr__(self) -> str:
        return self._shown(_REPR_CHARS)

    def _shown(self, room: int) -> str:
        """What is here, in about `room` characters, and how many more items there are."""
        opening, closing = _BRACKETS[self._shape.__class__]
        texts: list[str] = []
        used = 0
        for text in self._item_texts(room):
            if texts and used + len(text) > room:
                break
            texts.append(text)
            used += len(text) + 2
        if not texts:
            return "set()" if isinstance(self._shape, SetShape) else opening + closing
        if (more := len(self) - len(texts)) > 0:
            texts.append(f"... {more} more")
        return f"{opening}{', '.join(texts)}{closing}"

    def _item_texts(self, room: int) -> Iterator[str]:
        """The text of one item after the other. A few items are read at a time."""
        raise NotImplementedError

    def _entry_texts(self, show: Callable[[bytes, bytes], str]) -> Iterator[str]:
        """The texts of the first entries of a map, or members of a set."""
        raw = self._state._raw
        done, entries = 0, _REPR_PAGE
        while entries <= _REPR_ITEMS:
            page = self._state._when_here(raw.first_page, self._key, self._steps, entries)
            parts = [] if page is None else _split_array(page)
            keys, values = parts[::2], parts[1::2]
            yield from map(show, keys[done:], values[done:])
            if len(keys) < entries:
                return
            done, entries = len(keys), 4 * entries


_new: Any = object.__new__


def new_view(
    cls: Any,
    state: "ContainerState[Any]",
    key: Any,
    k: bytes,
    steps: bytes,
    shape: Shape,
    levels: bytes,
) -> Any:
    """A view. Not by an __init__, which would take twice as long: views are made all the time."""
    view = _new(cls)
    view._state = state
    view._key = key
    view._k = k
    view._steps = steps
    view._shape = shape
    view._levels = levels
    view._plan = shape.plan
    return view


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room // 2]}...{text[-(room // 4) :]}"


def _below(room: int) -> int:
    return max(room // 4, 40)


_REPR_CHARS = 2000
_REPR_ITEMS = 1024  # there would be no room for more
_REPR_PAGE = 16  # items that are read at first: they may be large
_split_array: Callable[[bytes], list[Any]] = Decoder(list[Raw]).decode
_BRACKETS: dict[Any, tuple[str, str]] = {
    ListShape: ("[", "]"),
    MapShape: ("{", "}"),
    SetShape: ("{", "}"),
}
_EMPTY = {"l": _EMPTY_ARRAY, "m": b"\x80"}


class ListView(View, MutableSequence[T], Generic[T]):
    """A live list.

    >>> import statekit as sk
    >>> clicks = sk.open("memory:").list("clicks", str)
    >>> clicks["alice"].append("/home")
    >>> clicks["alice"] += ["/cart", "/pay"]
    >>> clicks["alice"][-2:], len(clicks["alice"]), clicks["bob"] == []
    (['/cart', '/pay'], 3, True)
    """

    __slots__ = ()
    _shape: ListShape

    # ---- Reading

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._slice(at)
        item = self._shape.item
        if not item.letter:
            data = self._read(_GET, self._steps + _index_step(at))
            if data is None:
                raise self._out_of_range(at)
            return item.codec.decode(data)
        return self._at(_index_step(self._position(at)), item)

    def _slice(self, at: slice) -> list[T]:
        start, stop, step = at.indices(len(self))
        if step < 0:
            start, stop = stop + 1, start + 1  # the same items, from the front
        return self._range(start, stop)[::step]

    def _range(self, start: int, stop: int) -> list[T]:
        """Plain copies of the items from start to stop."""
        data = self._read(lib.SK_R_SLICE, None, b"", start, max(start, stop))
        found: list[T] = self._shape.codec.decode(_EMPTY_ARRAY if data is None else data)
        return found

    def _position(self, at: Any) -> int:
        """The position from the front. IndexError if there is no such item."""
        position = _integer(at)
        length = len(self)
        if position < 0:
            position += length
        if not 0 <= position < length:
            raise self._out_of_range(at)
        return position

    def _out_of_range(self, at: Any) -> IndexError:
        return IndexError(
            f"list index {at} out of range: there are {len(self)} items"
            f"{where(self._state.name, self._key)}"
        )

    def __iter__(self) -> Iterator[T]:
        if not isinstance(self._shape.item, ValueShape):
            at = 0
            while at < len(self):
                yield self[at]
                at += 1
            return
        start = 0
        while page := self._range(start, start + _PAGE):
            yield from page
            start += len(page)

    def __reversed__(self) -> Iterator[T]:
        return iter(self[::-1])

    def __contains__(self, value: object) -> bool:
        return any(item is value or item == value for item in self)

    def index(self, value: Any, start: int = 0, stop: int = _END) -> int:
        """The position of the first item that is equal; ValueError if there is none."""
        start, stop, _ = slice(start, stop).indices(len(self))
        for at, item in enumerate(self._range(start, stop), start):
            if item is value or item == value:
                return at
        raise ValueError(f"{value!r} is not in the list{where(self._state.name, self._key)}")

    def count(self, value: Any) -> int:
        return self.copy().count(value)

    def copy(self) -> list[T]:
        """A plain list of what is here now."""
        found: list[T] = self._plain()
        return found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ListView):
            other = other.copy()
        return self.copy() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: Any) -> bool:
        return self.copy() < _listed(other)

    def __le__(self, other: Any) -> bool:
        return self.copy() <= _listed(other)

    def __gt__(self, other: Any) -> bool:
        return self.copy() > _listed(other)

    def __ge__(self, other: Any) -> bool:
        return self.copy() >= _listed(other)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return self.copy() + _listed(other)

    def __radd__(self, other: list[T]) -> list[T]:
        return other + self.copy()

    def __mul__(self, times: int) -> list[T]:
        return self.copy() * times

    __rmul__ = __mul__

    # ---- Writing

    @overload
    def __setitem__(self, at: int, value: T) -> None: ...
    @overload
    def __setitem__(self, at: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, slice):
            self._set_slice(at, value)
            return
        if self._is_view_of(value, _index_step(at)):
            return
        data = self._encoded(self._shape.item.codec, value)
        if self._write(_SET, self._steps + _index_step(at), data, creates=False) is None:
            raise self._out_of_range(at)

    def _set_slice(self, at: slice, values: Iterable[T]) -> None:
        items = list(values)
        start, stop, _ = at.indices(len(self))
        if at.step not in (None, 1):
            changed = self.copy()
            changed[at] = items  # ValueError if the lengths differ
            start, stop, items = 0, _END, changed
        self._splice(start, max(start, stop), items)

    def _splice(self, start: int, stop: int, items: list[T]) -> None:
        data = self._encoded(self._shape.codec, items)
        if self._write(lib.SK_W_SPLICE, None, data, start, stop, creates=False) is None and items:
            self._write(lib.SK_W_EXTEND, None, data)  # there is no list yet

    def __delitem__(self, at: Any) -> None:
        if isinstance(at, slice):
            if at.step in (None, 1):
                start, stop, _ = at.indices(len(self))
                self._splice(start, max(start, stop), [])
            else:
                kept = self.copy()
                del kept[at]
                self._splice(0, _END, kept)
            return
        if self._write(lib.SK_W_DELETE, self._steps + _index_step(at), creates=False) is None:
            raise self._out_of_range(at)

    def append(self, value: T) -> None:
        codec = self._shape.item.codec
        try:
            data = codec.encode(value)
        except VALUE_FAULTS as fault:
            raise self._state._misfit(fault, value, self._key, codec) from None
        self._write(_APPEND, None, data)

    def extend(self, values: Iterable[T]) -> None:
        items = list(values)
        if items:
            self._write(lib.SK_W_EXTEND, None, self._encoded(self._shape.codec, items))

    def __iadd__(self, values: Iterable[T]) -> "ListView[T]":
        self.extend(values)
        return self

    def __imul__(self, times: int) -> "ListView[T]":
        items = self.copy()
        self._splice(0, _END, items * times)
        return self

    def insert(self, at: int, value: T) -> None:
        data = self._encoded(self._shape.item.codec, value)
        self._write(lib.SK_W_INSERT, None, data, _clamped(at))

    def pop(self, at: int = -1) -> T:
        data = self._write(lib.SK_W_POP, None, b"", _clamped(at), creates=False)
        if data is None:
            raise self._out_of_range(at)
        item: T = self._shape.item.codec.decode(data)
        return item

    def remove(self, value: T) -> None:
        del self[self.index(value)]

    def clear(self) -> None:
        self._write(lib.SK_W_CLEAR, creates=False)

    def reverse(self) -> None:
        self._splice(0, _END, self[::-1])

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        """Sorts the items. ValueError if they change meanwhile, by `key` or by another thread."""
        data = self._data()
        items = sorted(self._decoded(self._shape.codec, data), key=key, reverse=reverse)
        if self._data() != data:
            raise ValueError(
                f"list modified during sort{where(self._state.name, self._key)}. It is as it was "
                "left, and not sorted."
            )
        self._splice(0, _END, items)

    def _item_texts(self, room: int) -> Iterator[str]:
        if isinstance(self._shape.item, ValueShape):
            start = 0
            while start < _REPR_ITEMS and (page := self._range(start, start + _REPR_PAGE)):
                yield from (_cut(repr(item), room) for item in page)
                start += len(page)
            return
        for at in range(min(len(self), _REPR_ITEMS)):
            yield self._at(_index_step(at), self._shape.item)._shown(_below(room))


def _listed(values: Any) -> list[Any]:
    return values.copy() if isinstance(values, ListView) else values


def _clamped(at: Any) -> int:
    """A position that fits into 64 bits. A larger one is out of range anyway."""
    return max(-_END, min(_END, _integer(at)))


def _integer(at: Any) -> int:
    try:
        return index(at)
    except TypeError:
        raise TypeError(
            f"list indices must be integers or slices, not {type(at).__name__}"
        ) from None


def _index_step(at: Any) -> bytes:
    if at.__class__ is int and 0 <= at < 128:
        return _FIXINT[at]
    return _encode_int(_clamped(at))


class MapView(View, MutableMapping[K, V], Generic[K, V]):
    """A live dict, in the order of insertion.

    If values are containers, a key that is not there yet gives a view, too, as with a defaultdict.
    The key is created by the first write. get() and `in` tell whether it is really there.

    >>> import statekit as sk
    >>> prefs = sk.open("memory:").map("prefs", str, float)
    >>> prefs["alice"]["volume"] = 0.7
    >>> prefs["alice"] |= {"speed": 1.5}
    >>> prefs["alice"], prefs["alice"].get("tone"), len(prefs["bob"])
    ({'volume': 0.7, 'speed': 1.5}, None, 0)
    """

    __slots__ = ()
    _shape: MapShape

    def _step(self, key: Any) -> bytes:
        try:
            return self._shape.key.encode(key)
        except VALUE_FAULTS as fault:
            raise self._key_error(fault, key) from None

    def _key_error(self, fault: Exception, key: Any) -> Exception:
        error = self._state._misfit(fault, key, self._key, self._shape.key)
        error.args = (f"the map key {error.args[0]}",)
        return error

    # ---- Reading

    def __getitem__(self, key: K) -> V:
        shape = self._shape
        try:
            step = shape.key.encode(key)
        except VALUE_FAULTS as fault:
            raise self._key_error(fault, key) from None
        if shape.value.letter:
            view: V = self._at(step, shape.value)
            return view
        data = self._read(_GET, self._steps + step)
        if data is None:
            raise KeyError(key)
        value: V = shape.value.codec.decode(data)
        return value

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: Any, default: Any = None) -> Any:
        if not isinstance(self._shape.value, ValueShape):
            is_there = key in self
            return self[key] if is_there else default
        data = self._read(_GET, self._steps + self._step(key))
        return default if data is None else self._shape.value.codec.decode(data)

    def __contains__(self, key: object) -> bool:
        try:
            step = self._shape.key.encode(key)
        except VALUE_FAULTS:
            return False
        return self._read(lib.SK_R_HAS, None, step, wants_bytes=False) is not None

    def __iter__(self) -> Iterator[K]:
        return iter(self._key_list())

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._key_list())

    def _key_list(self) -> list[K]:
        data = self._read(lib.SK_R_KEYS)
        return [] if data is None else self._shape.key.decode_array(data)

    def keys(self) -> KeysView[K]:
        return _Keys(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def copy(self) -> dict[K, V]:
        """A plain dict of what is here now."""
        found: dict[K, V] = self._plain()
        return found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MapView):
            other = other.copy()
        return self.copy() == other if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Mapping[K, V]) -> dict[K, V]:
        return self.copy() | dict(other)

    def __ror__(self, other: Mapping[K, V]) -> dict[K, V]:
        return dict(other) | self.copy()

    # ---- Writing

    def __setitem__(self, key: K, value: V) -> None:
        shape = self._shape
        codec = shape.value.codec
        try:
            step = shape.key.encode(key)
        except VALUE_FAULTS as fault:
            raise self._key_error(fault, key) from None
        if self._is_view_of(value, step):
            return
        try:
            data = codec.encode(value)
        except VALUE_FAULTS as fault:
            raise self._state._misfit(fault, value, self._key, codec) from None
        self._write(_SET, self._steps + step, data)

    def __delitem__(self, key: K) -> None:
        if self._write(lib.SK_W_DELETE, self._steps + self._step(key), creates=False) is None:
            raise KeyError(key)

    @overload
    def pop(self, key: K) -> V: ...
    @overload
    def pop(self, key: K, default: V | D) -> V | D: ...
    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        data = self._write(lib.SK_W_TAKE, None, self._step(key), creates=False)
        if data is not None:
            return self._shape.value.codec.decode(data)
        if default is _MISSING:
            raise KeyError(key)
        return default

    def popitem(self) -> tuple[K, V]:
        keys = self._key_list()
        if not keys:
            raise KeyError(f"the map is empty{where(self._state.name, self._key)}")
        return keys[-1], self.pop(keys[-1])

    def setdefault(self, key: K, default: Any = None) -> V:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, other: Any = (), /, **more: Any) -> None:
        entries = dict(other, **more)
        if entries:
            self._write(lib.SK_W_UPDATE, None, self._encoded(self._shape.codec, entries))

    def __ior__(self, other: Any) -> "MapView[K, V]":  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        self._write(lib.SK_W_CLEAR, creates=False)

    def _item_texts(self, room: int) -> Iterator[str]:
        key, value = self._shape.key, self._shape.value
        if isinstance(value, ValueShape):

            def show(k: bytes, v: bytes) -> str:
                found = self._decoded(key, k), self._decoded(value.codec, v)
                return ": ".join(_cut(repr(one), room) for one in found)

            yield from self._entry_texts(show)
            return
        for one in self._key_list()[:_REPR_ITEMS]:
            below = self._at(key.encode(one), value)
            yield f"{_cut(repr(one), room)}: {below._shown(_below(room))}"


class _Keys(KeysView[K]):
    """All keys, read at once."""

    _mapping: MapView[K, Any]

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._mapping)


class _Values(ValuesView[V]):
    """All values, read at once."""

    _mapping: MapView[Any, V]

    def __iter__(self) -> Iterator[V]:
        if isinstance(self._mapping._shape.value, ValueShape):
            return iter(self._mapping.copy().values())
        return (self._mapping[key] for key in self._mapping)

    def __reversed__(self) -> Iterator[V]:
        return reversed(list(self))


class _Items(ItemsView[K, V]):
    """All entries, read at once."""

    _mapping: MapView[K, V]

    def __contains__(self, item: object) -> bool:
        # A map of containers gives a view for every key, whether the key is there or not.
        match item:
            case (key, value) if key in self._mapping:
                found: Any = self._mapping[key]  # type: ignore[index]
                return bool(found is value or found == value)
            case _:
                return False

    def __iter__(self) -> Iterator[tuple[K, V]]:
        if isinstance(self._mapping._shape.value, ValueShape):
            return iter(self._mapping.copy().items())
        return ((key, self._mapping[key]) for key in self._mapping)

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        return reversed(list(self))


class SetView(View, MutableSet[T], Generic[T]):
    """A live set, in the order of insertion.

    >>> import statekit as sk
    >>> tags = sk.open("memory:").state("tags", set[str])
    >>> tags["alice"] |= {"new", "eu"}
    >>> "eu" in tags["alice"], "eu" in tags["bob"], len(tags["alice"])
    (True, False, 2)
    """

    __slots__ = ()
    _shape: SetShape

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> set[Any]:
        return set(values)

    def __contains__(self, value: object) -> bool:
        try:
            step = self._shape.item.encode(value)
        except VALUE_FAULTS:
            return False
        return self._read(lib.SK_R_HAS, None, step, wants_bytes=False) is not None

    def __iter__(self) -> Iterator[T]:
        data = self._read(lib.SK_R_KEYS)
        return iter([] if data is None else self._shape.item.decode_array(data))

    def add(self, value: T) -> None:
        self._write(_SET, self._steps + self._encoded(self._shape.item, value), _NIL)

    def discard(self, value: Any) -> None:
        try:
            step = self._shape.item.encode(value)
        except VALUE_FAULTS:
            return  # a value of another type cannot be here
        self._write(lib.SK_W_DELETE, self._steps + step, creates=False)

    def remove(self, value: Any) -> None:
        step = self._encoded(self._shape.item, value)
        if self._write(lib.SK_W_DELETE, self._steps + step, creates=False) is None:
            raise KeyError(value)

    def pop(self) -> T:
        """Removes a member and returns it; KeyError if there is none."""
        raw = self._state._raw
        while True:
            page = self._state._when_here(raw.first_page, self._key, self._steps, 1)
            if page is None:
                raise KeyError(f"pop from an empty set{where(self._state.name, self._key)}")
            step = bytes(_split_array(page)[0])
            if self._write(lib.SK_W_DELETE, self._steps + step, creates=False) is not None:
                member: T = self._decoded(self._shape.item, step)
                return member  # else another thread was quicker

    def update(self, *others: Iterable[T]) -> None:
        values = [value for other in others for value in other]
        if values:
            self._write(lib.SK_W_UPDATE, None, self._encoded(self._shape.codec, values))

    def __ior__(self, other: AbstractSet[Any]) -> "SetView[T]":  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        self._write(lib.SK_W_CLEAR, creates=False)

    def _item_texts(self, room: int) -> Iterator[str]:
        item = self._shape.item
        return self._entry_texts(lambda k, _: _cut(repr(self._decoded(item, k)), room))

    def copy(self) -> set[T]:
        """A plain set of what is here now."""
        found: set[T] = self._plain()
        return found

    def union(self, *others: Iterable[Any]) -> set[Any]:
        return self.copy().union(*others)

    def intersection(self, *others: Iterable[Any]) -> set[T]:
        return self.copy().intersection(*others)

    def difference(self, *others: Iterable[Any]) -> set[T]:
        return self.copy().difference(*others)

    def symmetric_difference(self, other: Iterable[Any]) -> set[Any]:
        return self.copy().symmetric_difference(other)

    def difference_update(self, *others: Iterable[Any]) -> None:
        for value in self.intersection(*[[one for other in others for one in other]]):
            self.discard(value)

    def intersection_update(self, *others: Iterable[Any]) -> None:
        for value in self.difference(self.intersection(*others)):
            self.discard(value)

    def symmetric_difference_update(self, other: Iterable[Any]) -> None:
        self ^= set(other)

    def issubset(self, other: Iterable[Any]) -> bool:
        return self.copy().issubset(other)

    def issuperset(self, other: Iterable[Any]) -> bool:
        return self.copy().issuperset(other)

    def __eq__(self, other: object) -> bool:
        return self.copy() == set(other) if isinstance(other, AbstractSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


_VIEWS: dict[type[Shape], type[Any]] = {
    ListShape: ListView,
    MapShape: MapView,
    SetShape: SetView,
}


def class_of(shape: Shape) -> type[Any]:
    """The class of the views of a container."""
    return _VIEWS[shape.__class__]


def use(faster: Iterable[type[View]]) -> None:
    """From now on views inside views are of these classes, each derived from one of the above."""
    for cls in faster:
        for shape, known in _VIEWS.items():
            if issubclass(cls, known):
                _VIEWS[shape] = cls
