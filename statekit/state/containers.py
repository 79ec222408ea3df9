"""List, map, set and nested state: a container under each key, changed in place."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from statekit.codecs import Codec, ListShape, MapShape, Shape, ValueShape
from statekit.errors import KindError, where
from statekit.keys import KEY_FAULTS
from statekit.native.columns import Column, column
from statekit.native.containers import ContainerState as RawContainer
from statekit.residence.residence import Residence
from statekit.schema import StateSchema
from statekit.state.keyed import KeyedState
from statekit.state.results import EncodedValues, Values
from statekit.state.views import ListView, MapView, SetView, View, new_view

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")  # the view
D = TypeVar("D")

_NATIVE = {"str": "s", "int": "i", "float": "f"}  # items that a batch encodes in C


class ContainerState(KeyedState[V]):
    """What list, map and set state share. state[key] is a live view, empty if nothing is there."""

    __slots__ = ("_rooted", "_shape")
    _raw: RawContainer

    def __init__(self, raw: Any, residence: Residence, schema: StateSchema, shape: Shape) -> None:
        super().__init__(raw, residence, schema, shape.codec)
        self._shape = shape
        self._rooted = self._viewed, shape, self._root  # what all views of a key have

    _viewed: type[View]
    _root: bytes  # what C creates under a new key

    def _view(self, key: Any) -> Any:
        encode = self._encode
        try:
            k = encode(key)
        except KEY_FAULTS as fault:
            raise self._raw._fault(fault, key) from None
        cls, shape, root = self._rooted
        return new_view(cls, self, key, k, b"", shape, root)

    def get(self, key: Any, default: Any = None) -> Any:
        """The view if something is there, else the default."""
        return self._view(key) if key in self else default

    def copy(self, key: Any) -> V:
        """A plain copy of what is under a key; empty if nothing is there."""
        plain: V = self._view(key)._plain()
        return plain

    def _bind(self, key: Any) -> Any:
        return self._view(key)

    def _put(self, key: Any, value: Any) -> None:
        if isinstance(value, View) and value._is_root_of(self, key):
            return  # state[key] += ... has changed it in place already
        self._put_data(key, self._encoded(self._codec, value, key))

    def _put_data(self, key: Any, data: bytes) -> None:
        self._when_here(self._raw.put_encoded, key, data)

    def get_many(self, keys: Any) -> Values[V | None]:
        """Plain copies of many keys' containers; None where there is none."""
        parts = self._chunked(self._raw.get_many, keys)
        return EncodedValues(parts, self._codec, self._decoded, None)

    def put_many(self, keys: Any, values: Any) -> None:
        """Sets the containers of many keys."""
        encoded = self._encoded_items(self._codec, values, keys)
        packed = column(encoded, "b", f"the values for state {self.name!r}")
        self._chunked(self._raw.put_many, keys, packed, needs_values=False)

    def _items_column(self, values: Any, codec: Codec, what: str) -> Column:
        """A column of items: as it is if C can encode it, else encoded here."""
        letter = _NATIVE.get(codec.type) if isinstance(codec.type, str) else None
        name = f"the {what} for state {self.name!r}"
        if letter is not None:
            return column(values, letter, name)
        return column(self._encoded_items(codec, values), "b", name)


class ListState(ContainerState[list[T]], Generic[T]):
    """A list under each key.

    >>> import statekit as sk
    >>> clicks = sk.open("memory:").list("clicks", str)
    >>> clicks["alice"].append("/home")
    >>> clicks.append_many(["bob", "alice"], ["/faq", "/cart"])
    >>> sorted(clicks.items())
    [('alice', ['/home', '/cart']), ('bob', ['/faq'])]
    """

    __slots__ = ()
    _shape: ListShape
    _viewed = ListView
    _root = b"l"

    def __getitem__(self, key: Any) -> ListView[T]:
        view: ListView[T] = self._view(key)
        return view

    def __setitem__(self, key: Any, value: Iterable[T]) -> None:
        self._put(key, value)

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def get(self, key: Any) -> ListView[T] | None: ...
        @overload
        def get(self, key: Any, default: D) -> ListView[T] | D: ...
        def get(self, key: Any, default: Any = None) -> Any: ...

    def append(self, key: Any, value: T) -> None:
        """Appends one item: state[key].append(value)."""
        self._view(key).append(value)

    def append_many(self, keys: Any, values: Any) -> None:
        """Appends one item to each key's list, in one native call."""
        items = self._items_column(values, self._shape.item.codec, "items")
        self._chunked(self._raw.append_many, keys, items)


class MapState(ContainerState[dict[K, V]], Generic[K, V]):
    """A map under each key, in the order of insertion; its values may be containers again.

    >>> import statekit as sk
    >>> orders = sk.open("memory:").state("orders", dict[str, list[int]])
    >>> orders["alice"]["2026-11"].append(7)
    >>> orders["alice"]["2026-11"].append(8)
    >>> orders["alice"]
    {'2026-11': [7, 8]}
    """

    __slots__ = ()
    _shape: MapShape
    _viewed = MapView
    _root = b"m"

    def __getitem__(self, key: Any) -> MapView[K, V]:
        view: MapView[K, V] = self._view(key)
        return view

    def __setitem__(self, key: Any, value: Mapping[K, V]) -> None:
        self._put(key, value)

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def get(self, key: Any) -> MapView[K, V] | None: ...
        @overload
        def get(self, key: Any, default: D) -> MapView[K, V] | D: ...
        def get(self, key: Any, default: Any = None) -> Any: ...

    def update_many(self, keys: Any, map_keys: Any, values: Any) -> None:
        """Puts one entry into each key's map, in one native call."""
        if not isinstance(self._shape.value, ValueShape):
            raise KindError(
                f"update_many() puts values, and the values here are containers"
                f"{where(self.name)}. Use put_many(), or the views."
            )
        names = self._items_column(map_keys, self._shape.key, "map keys")
        items = self._items_column(values, self._shape.value.codec, "values")
        self._chunked(self._raw.map_put_many, keys, names, items)


class SetState(ContainerState[set[T]], Generic[T]):
    """A set under each key.

    >>> import statekit as sk
    >>> tags = sk.open("memory:").state("tags", set[str])
    >>> tags["alice"].add("new")
    >>> tags["alice"], tags["bob"]
    ({'new'}, set())
    """

    __slots__ = ()
    _viewed = SetView
    _root = b"m"

    def __getitem__(self, key: Any) -> SetView[T]:
        view: SetView[T] = self._view(key)
        return view

    def __setitem__(self, key: Any, value: Iterable[T]) -> None:
        self._put(key, value)

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def get(self, key: Any) -> SetView[T] | None: ...
        @overload
        def get(self, key: Any, default: D) -> SetView[T] | D: ...
        def get(self, key: Any, default: Any = None) -> Any: ...
