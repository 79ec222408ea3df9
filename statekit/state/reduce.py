"""Reducing and aggregating state: under each key one value, into which new values are folded."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from statekit.errors import InProcess, shorten, unequal_columns
from statekit.native.columns import key_column
from statekit.schema import StateSchema
from statekit.state.keyed import KeyedState, value_items
from statekit.state.results import Values
from statekit.state.value import NO_DEFAULT, NumberValueState, ValueState

A = TypeVar("A")
I = TypeVar("I")  # noqa: E741  (what goes in)
R = TypeVar("R")
V = TypeVar("V")

_NATIVE: dict[Any, str] = {operator.add: "add", min: "min", max: "max"}


class _Folding(InProcess, Generic[A]):
    """The value state below, and the lock that makes read, fold and write one step."""

    __slots__ = ("__weakref__", "_lock", "_values")
    _instead = KeyedState._instead

    def __init__(self, values: ValueState[A]) -> None:
        self._values = values
        # One lock for all handles of the state: two handles with a lock each would overwrite each
        # other's folds.
        self._lock = values._residence.fold_lock(values.name)

    @property
    def name(self) -> str:
        return self._values.name

    @property
    def schema(self) -> StateSchema:
        return self._values.schema

    @property
    def _ptr(self) -> Any:
        return self._values._ptr

    @_ptr.setter
    def _ptr(self, ptr: Any) -> None:
        self._values._ptr = ptr

    @property
    def current(self) -> "KeyedFold":
        """This state under the key of `with kv.key(...)`."""
        return self._bind(self._values.current._key)

    def _bind(self, key: Any) -> "KeyedFold":
        return KeyedFold(self, key)

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def __delitem__(self, key: Any) -> None:
        with self._lock:
            del self._values[key]

    def discard(self, key: Any) -> bool:
        """Removes the entry if there is one; True if there was."""
        with self._lock:
            return self._values.discard(key)

    def keys(self) -> Iterator[Any]:
        return self._values.keys()

    def __iter__(self) -> Iterator[Any]:
        return self._values.keys()

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def contains_many(self, keys: Any) -> list[bool]:
        """Whether each key is there."""
        return self._values.contains_many(keys)

    def delete_many(self, keys: Any) -> int:
        """Removes entries. Returns how many there were."""
        with self._lock:
            return self._values.delete_many(keys)

    @property
    def state(self) -> ValueState[A]:
        """The values themselves, for batches and export."""
        return self._values

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._values!r}>"

    def _repr_html_(self) -> str:
        return self._values._repr_html_()


class ReduceState(_Folding[V]):
    """A value into which new values are reduced.

    operator.add, min and max of ints and floats run in C.

    >>> import operator, statekit as sk
    >>> kv = sk.open("memory:")
    >>> total = kv.reduce("total", int, operator.add)
    >>> total.add("alice", 3), total.add("alice", 4), total["alice"]
    (3, 7, 7)
    >>> longest = kv.reduce("longest", str, lambda a, b: max(a, b, key=len))
    >>> longest.add("alice", "ab"), longest.add("alice", "c")
    ('ab', 'ab')
    """

    __slots__ = ("_function", "_native")

    def __init__(self, values: ValueState[V], function: Callable[[V, V], V]) -> None:
        super().__init__(values)
        self._function = function
        native = _NATIVE.get(function) if isinstance(values, NumberValueState) else None
        self._native: Callable[[Any, V], V] | None = None
        if native is not None:
            self._native = getattr(values, native)

    def __arrow_c_schema__(self) -> object:
        return self._values.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The results, as DuckDB, Polars, pyarrow and others read them."""
        return self._values.__arrow_c_stream__(requested_schema)

    def add(self, key: Any, value: V) -> V:
        """Reduces a value into the key's value. Returns the result."""
        if self._native is not None:
            return self._native(key, value)
        with self._lock:
            found = self._values.get(key, NO_DEFAULT) if key in self._values else NO_DEFAULT
            result = value if found is NO_DEFAULT else self._function(found, value)
            self._values[key] = result
            return result

    def add_many(self, keys: Any, values: Any) -> None:
        """Reduces a column of values, each into the value of its key. Sums of numbers run in C."""
        if self._function is operator.add and self._native is not None:
            self._values.add_many(keys, values)
            return
        for key, value in _pairs(self._values, keys, values):
            self.add(key, value)

    def __getitem__(self, key: Any) -> V:
        return self._values[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self._values.get(key, default)

    def get_many(self, keys: Any) -> Values[V]:
        return self._values.get_many(keys)

    def items(self) -> Iterator[tuple[Any, V]]:
        return self._values.items()

    def values(self) -> Iterator[V]:
        return self._values.values()


class AggregateState(_Folding[A], Generic[A, I, R]):
    """An accumulator to which items are added, and a result that is made from it.

    >>> import statekit as sk
    >>> mean = sk.open("memory:").aggregate(
    ...     "mean", tuple[int, float], initial=(0, 0.0),
    ...     add=lambda acc, x: (acc[0] + 1, acc[1] + x), result=lambda acc: acc[1] / acc[0],
    ... )
    >>> mean.add("alice", 1.0), mean.add("alice", 2.0), mean["alice"]
    (1.0, 1.5, 1.5)
    """

    __slots__ = ("_add", "_initial", "_result")

    def __init__(
        self,
        values: ValueState[A],
        initial: A,
        add: Callable[[A, I], A],
        result: Callable[[A], R],
    ) -> None:
        super().__init__(values)
        self._initial = values._encoded(values._codec, initial)
        self._add = add
        self._result = result

    def add(self, key: Any, item: I) -> R:
        """Adds an item to the key's accumulator. Returns the new result."""
        values = self._values
        with self._lock:
            accumulator = values.get(key, NO_DEFAULT) if key in values else NO_DEFAULT
            if accumulator is NO_DEFAULT:
                accumulator = values._codec.decode(self._initial)  # a fresh one
            accumulator = self._add(accumulator, item)
            values[key] = accumulator
            return self._result(accumulator)

    def add_many(self, keys: Any, items: Any) -> None:
        """Adds a column of items, each to its key's accumulator."""
        for key, item in _pairs(self._values, keys, items):
            self.add(key, item)

    def __getitem__(self, key: Any) -> R:
        return self._result(self._values[key])

    def get(self, key: Any, default: Any = None) -> Any:
        return self._result(self._values[key]) if key in self._values else default

    def items(self) -> Iterator[tuple[Any, R]]:
        return ((key, self._result(value)) for key, value in self._values.items())

    def values(self) -> Iterator[R]:
        return (self._result(value) for value in self._values.values())


class KeyedFold:
    """A reducing or aggregating state under one key."""

    __slots__ = ("_key", "_state")

    def __init__(self, state: Any, key: Any) -> None:
        self._state = state
        self._key = key

    def get(self, default: Any = None) -> Any:
        return self._state.get(self._key, default)

    def add(self, value: Any) -> Any:
        return self._state.add(self._key, value)

    def clear(self) -> None:
        self._state.discard(self._key)

    def __repr__(self) -> str:
        return f"<{self._state.name!r} of {shorten(self._key)}: {shorten(self.get())}>"


def _pairs(state: ValueState[Any], keys: Any, values: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a key and a value, from a column of keys in any form that batches take."""
    codec = state._raw.codec
    column = key_column(keys, codec, f"the keys for state {state.name!r}")
    items = list(value_items(values, state.name))
    if column.n != len(items):
        raise unequal_columns(column.n, len(items), "values", state.name)
    rows = (codec.decode(column.encoded(record)) for record in range(column.n))
    return zip(rows, items, strict=True)
