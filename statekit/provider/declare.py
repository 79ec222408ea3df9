"""Declaring: how a provider's states are asked for, and made.

A state is declared once in a process, or the same way each time. Its schema is written into the
home's record, where several providers may be at it; what is stored there with another type is
checked for whether it can become this one.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from statekit.codecs import (
    Codec,
    ListShape,
    MapShape,
    SetShape,
    Shape,
    as_misfit,
    make_codec,
    make_shape,
)
from statekit.errors import (
    ArgumentError,
    BadValueError,
    OverflowStateError,
    SchemaError,
    shorten,
)
from statekit.exact import VALUE_FAULTS
from statekit.homes.record import HomeRecord
from statekit.keys import KeyType, key_codec
from statekit.metrics import StateCounters
from statekit.native.ttl import TTL, Sweeper, as_ttl
from statekit.residence.residence import Residence
from statekit.schema import StateSchema, Type, check_evolution, value_kind
from statekit.state import (
    AggregateState,
    ListState,
    MapState,
    ReduceState,
    SetState,
    TimersState,
    ValueState,
    fast,
)
from statekit.state.value import NO_DEFAULT

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
A = TypeVar("A")
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_list = list  # the class has a method of that name

_CONTAINERS = (
    (ListShape, "list", fast.ListState),
    (MapShape, "map", fast.MapState),
    (SetShape, "set", fast.SetState),
)


class Declaration:
    """How a state was asked for: enough to ask for it again on another provider."""

    def __init__(self, schema: StateSchema, ttl: TTL | None, make: Callable[..., Any]) -> None:
        self.schema = schema
        self.ttl = ttl
        self.make = make  # (raw, residence, schema) -> the typed state


class Declaring(ABC):
    """See KVProvider."""

    url: str
    _residence: Residence
    _recorded: HomeRecord
    _family: Any
    _lock: Any
    _declared: dict[str, Declaration]
    _states: dict[str, Any]
    _handles: "weakref.WeakSet[Any]"
    _sweeper: Sweeper | None

    @abstractmethod
    def _check_open(self) -> None: ...

    @overload
    def value(
        self, name: str, type: type[T], *, default: T = ..., key: KeyType = ..., ttl: Any = ...
    ) -> ValueState[T]: ...
    @overload
    def value(
        self, name: str, type: Any, *, default: Any = ..., key: KeyType = ..., ttl: Any = ...
    ) -> ValueState[Any]: ...
    def value(
        self,
        name: str,
        type: Any,  # noqa: A002
        *,
        default: Any = NO_DEFAULT,
        key: KeyType = str,
        ttl: Any = None,
    ) -> ValueState[Any]:
        """One value of a type under each key. default: what reading a missing key gives."""
        return self._value(name, type, key, ttl, default)  # type: ignore[no-any-return]

    def _value(
        self,
        name: str,
        hint: Any,
        key: KeyType,
        ttl: Any,
        default: Any = NO_DEFAULT,
        fold: Callable[[ValueState[Any]], Any] | None = None,
    ) -> Any:
        """A value state, or what `fold` makes of it."""
        codec = make_codec(hint)
        if default is not NO_DEFAULT:
            _check_value(codec, default, f"the default of state {name!r}")
        is_encoded = value_kind(codec.type) == "bytes"
        cls = fast.ValueState if is_encoded else fast.NumberValueState

        def make(raw: Any, residence: Residence, schema: StateSchema) -> Any:
            state: ValueState[Any] = cls(raw, residence, schema, codec, default)
            return state if fold is None else fold(state)

        return self._declare(name, "value", key, codec.type, ttl, make)

    @overload
    def list(
        self, name: str, item: type[T], *, key: KeyType = ..., ttl: Any = ...
    ) -> ListState[T]: ...
    @overload
    def list(
        self, name: str, item: Any, *, key: KeyType = ..., ttl: Any = ...
    ) -> ListState[Any]: ...
    def list(self, name: str, item: Any, *, key: KeyType = str, ttl: Any = None) -> ListState[Any]:
        """A list of items of a type under each key."""
        return self._container(name, make_shape(_list[item]), key, ttl)  # type: ignore[no-any-return]

    @overload
    def map(
        self, name: str, map_key: type[K], value: type[V], *, key: KeyType = ..., ttl: Any = ...
    ) -> MapState[K, V]: ...
    @overload
    def map(
        self, name: str, map_key: Any, value: Any, *, key: KeyType = ..., ttl: Any = ...
    ) -> MapState[Any, Any]: ...
    def map(
        self, name: str, map_key: Any, value: Any, *, key: KeyType = str, ttl: Any = None
    ) -> MapState[Any, Any]:
        """A map under each key."""
        return self._container(name, make_shape(dict[map_key, value]), key, ttl)  # type: ignore[no-any-return]

    @overload
    def state(  # type: ignore[overload-overlap]
        self, name: str, hint: "type[_list[T]]", *, key: KeyType = ..., ttl: Any = ...
    ) -> ListState[T]: ...
    @overload
    def state(  # type: ignore[overload-overlap]
        self, name: str, hint: type[dict[K, V]], *, key: KeyType = ..., ttl: Any = ...
    ) -> MapState[K, V]: ...
    @overload
    def state(  # type: ignore[overload-overlap]
        self, name: str, hint: "type[set[T]]", *, key: KeyType = ..., ttl: Any = ...
    ) -> SetState[T]: ...
    @overload
    def state(
        self, name: str, hint: type[T], *, key: KeyType = ..., ttl: Any = ...
    ) -> ValueState[T]: ...
    @overload
    def state(self, name: str, hint: Any, *, key: KeyType = ..., ttl: Any = ...) -> Any: ...
    def state(self, name: str, hint: Any, *, key: KeyType = str, ttl: Any = None) -> Any:
        """What a type hint says: lists, dicts and sets, nested as you like; else a value."""
        shape = make_shape(hint)
        if shape.letter:
            return self._container(name, shape, key, ttl)
        return self.value(name, hint, key=key, ttl=ttl)

    def _container(self, name: str, shape: Shape, key: KeyType, ttl: Any) -> Any:
        form, cls = next((form, cls) for node, form, cls in _CONTAINERS if isinstance(shape, node))

        def make(raw: Any, residence: Residence, schema: StateSchema) -> Any:
            return cls(raw, residence, schema, shape)

        return self._declare(name, form, key, shape.codec.type, ttl, make)

    def reduce(
        self,
        name: str,
        type: type[T],  # noqa: A002
        function: Callable[[T, T], T],
        *,
        key: KeyType = str,
        ttl: Any = None,
    ) -> ReduceState[T]:
        """A value that new ones are folded into: kv.reduce("total", int, operator.add)."""
        if not callable(function):
            raise ArgumentError(
                f"{function!r} is no function of two values (state {name!r}). "
                "Pass one such as operator.add."
            )
        return self._value(  # type: ignore[no-any-return]
            name, type, key, ttl, fold=lambda values: ReduceState(values, function)
        )

    @overload
    def aggregate(
        self,
        name: str,
        type: type[A],
        *,
        initial: A,
        add: Callable[[A, I], A],
        result: Callable[[A], R],
        key: KeyType = ...,
        ttl: Any = ...,
    ) -> AggregateState[A, I, R]: ...
    @overload
    def aggregate(
        self,
        name: str,
        type: type[A],
        *,
        initial: A,
        add: Callable[[A, I], A],
        key: KeyType = ...,
        ttl: Any = ...,
    ) -> AggregateState[A, I, A]: ...
    def aggregate(
        self,
        name: str,
        type: Any,  # noqa: A002
        *,
        initial: Any,
        add: Callable[[Any, Any], Any],
        result: Callable[[Any], Any] = lambda accumulator: accumulator,
        key: KeyType = str,
        ttl: Any = None,
    ) -> AggregateState[Any, Any, Any]:
        """An accumulator of a type that items are added to, and the result made of it."""
        for function, what in ((add, "add"), (result, "result")):
            if not callable(function):
                raise ArgumentError(
                    f"{what}={shorten(function)} is no function (state {name!r}). Pass "
                    "add(accumulator, item) and, if you like, result(accumulator)."
                )
        _check_value(make_codec(type), initial, f"the initial value of state {name!r}")
        return self._value(  # type: ignore[no-any-return]
            name, type, key, ttl, fold=lambda values: AggregateState(values, initial, add, result)
        )

    def timers(self, name: str, *, key: KeyType = str) -> TimersState:
        """Timers in event time under each key."""
        return self._timers(name, key, None)

    def _timers(self, name: str, key: KeyType, leaves: Iterable[int] | None) -> TimersState:
        """timers(). leaves: only their timers must be here; of others, those of keys that somebody
        touches. The caller knows that no timer of the others is due.
        """

        def make(raw: Any, residence: Residence, schema: StateSchema) -> TimersState:
            residence.load_state(raw, residence.leaves() if leaves is None else leaves)
            return TimersState(raw, residence, schema)

        return self._declare(name, "timers", key, "int", None, make)  # type: ignore[no-any-return]

    def _declare(
        self,
        name: str,
        form: str,
        key: KeyType,
        type_: Type,
        ttl: Any,
        make: Callable[..., Any],
    ) -> Any:
        self._check_open()
        life = as_ttl(ttl)
        asked = StateSchema(name, form, key_codec(key).text, type_, life.time if life else "")
        with self._lock:
            before = self._declared.get(name)
            if before is not None and (before.schema != asked or before.ttl != life):
                self._refuse_second(before, asked, life)
            for sibling in self._family.members():
                theirs = sibling._declared.get(name)
                if theirs is not None and theirs.schema != asked:
                    self._refuse_second(theirs, asked, life)
            return self._attach_state(Declaration(asked, life, make))

    def _refuse_second(self, before: Declaration, asked: StateSchema, life: TTL | None) -> None:
        if before.schema == asked:
            what, is_asked = f"ttl {before.ttl}", f"ttl {life}"
        else:
            what, is_asked = str(before.schema), str(asked)
        error = SchemaError(
            f"state {asked.name!r} is declared in this provider as {what}; asked for was "
            f"{is_asked}. Declare a state once, or the same way each time."
        )
        error.state = asked.name
        raise error

    def _attach_state(self, declaration: Declaration) -> Any:
        """The typed state of a declaration, on the native state of its name."""
        schema, residence = declaration.schema, self._residence
        if (stored := self._recorded.find(schema.name)) is not None:
            check_evolution(stored, schema)
        raw = self._native_state(schema)
        self._register(schema)
        if declaration.ttl is not None:
            life = declaration.ttl
            raw.ttl(life.after_ms, clock=life.time, on_read=life.refresh == "read")
            if self._sweeper is None and life.time == "processing":
                self._sweeper = Sweeper(residence.store)
        state = declaration.make(raw, residence, schema)
        self._declared[schema.name] = declaration
        self._states[schema.name] = state
        self._handles.add(state)
        return state

    def _native_state(self, schema: StateSchema) -> Any:
        store, kind = self._residence.store, schema.kind
        try:
            return store.state(schema.name, kind, schema.key, timed=schema.timed)  # type: ignore[call-overload]
        except SchemaError:
            if schema.name in self._declared:
                raise
            # It came with a checkpoint, where it has an older type; nobody here uses it yet.
            return self._residence.retype(schema.name, kind, schema.timed)

    def _register(self, schema: StateSchema) -> None:
        """Writes the schema into the home's description, where several providers may be at it."""
        residence = self._residence
        residence.counters.setdefault(schema.name, StateCounters())
        home = residence.home
        while True:
            expected = None if home is None else home.read_meta()
            if expected is not None:
                stored_record = HomeRecord.decode(expected, self.url)
                self._check_geometry(stored_record)
                self._recorded.refresh(stored_record)
            schemas = self._recorded.schemas
            if schema in schemas:
                break
            changed = [*schemas, schema]
            if (stored := self._recorded.find(schema.name)) is not None:
                check_evolution(stored, schema)
                changed = [schema if known is stored else known for known in schemas]
            self._recorded.schemas = changed
            if home is None or home.write_meta(self._recorded.encode(), expected):
                break
        residence.register(self._recorded.schemas)

    def _see_siblings(self) -> None:
        """Takes on what siblings have declared since: they share the home, and its states."""
        home = self._residence.home
        if home is not None:
            with self._lock:
                self._recorded.schemas = HomeRecord.read(home, self.url).schemas
                self._residence.register(self._recorded.schemas)

    def _check_geometry(self, stored: HomeRecord) -> None:
        """Two processes may have found a home new at the same time."""
        ours, theirs = self._recorded, (stored.key_groups, stored.subgroups)
        if theirs != (ours.key_groups, ours.subgroups):
            raise ArgumentError(
                f"{self.url!r} was made by another process with {theirs[0]} key-groups x "
                f"{theirs[1]} sub-groups; this one has {ours.key_groups} x {ours.subgroups}. "
                "Open it with the same numbers everywhere."
            )


def _check_value(codec: Codec, value: Any, what: str) -> None:
    """BadValueError before anything is declared, if a value is not of its state's type."""
    try:
        codec.encode(value)
    except VALUE_FAULTS as fault:
        misfit = as_misfit(fault, value, codec)
        given = f"{shorten(misfit.value)}{misfit.place()}"
        kind = OverflowStateError if misfit.is_too_large else BadValueError
        raise kind(f"{what}: {given} {misfit.problem()}. {misfit.what_to_do()}") from None
