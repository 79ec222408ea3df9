"""The state of the current key: what a function is given as `st`.

A provider's call for one key crosses into C once for each operation, and makes a view first. A task
has thousands of keys, each of which does the same few things. So a cursor moves along the keys of a
*page*, which are known beforehand, and has for each state

    a cell     for a value: all values of the page are read with one get_many() when the first key
               asks for its own, changed in a list, and written with one put_many() and one
               delete_many() at the end of the page
    a view     for lists, maps, sets and timers: the provider's own, made when it is asked for. The
               entries of the page are brought into memory at once, when the first key asks

A value is encoded when it is set, so a wrong type is reported where it is set. What get() returns
is decoded anew, so changing it changes no state, as everywhere in statekit. Only numbers are kept
as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from statekit.errors import ArgumentError, shorten
from statekit.exact import VALUE_FAULTS
from statekit.native.columns import column
from statekit.native.ttl import as_ttl
from statekit.spark.rows import keys_of
from statekit.state import ValueState
from statekit.state.value import NO_DEFAULT, NumberValueState

RESERVED = frozenset({"key", "watermark", "batch_id"})


@dataclass(frozen=True, slots=True)
class State:
    """A state of a StatefulOp: its type, the default of a value, and how long entries live.

    state={"count": int} is short for state={"count": State(int)}. ttl: as in kv.value(); in event
    time it is driven by Spark's watermark.
    """

    type: Any
    default: Any = ...  # none. (An object of our own would not be the same once it was pickled)
    ttl: Any = None


@dataclass(frozen=True, slots=True)
class Timers:
    """Timers in event time, as a state of a StatefulOp. on_timer is called when one is due."""


class Fired(NamedTuple):
    """A timer that was due, as on_timer is given it."""

    name: str  # of the state of timers
    due: int  # event time in ms


def check_states(states: Any) -> dict[str, State | Timers]:
    """The states of an op, by name. ArgumentError for what is none."""
    if not isinstance(states, Mapping):
        raise ArgumentError(
            f"state={shorten(states)} is no dict of states. Pass {{name: type}}, such as "
            '{"count": int}.'
        )
    found: dict[str, State | Timers] = {}
    for name, spec in states.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise ArgumentError(
                f"{shorten(name)} cannot be the name of a state: a function finds it as st.<name>. "
                f"Use an identifier, and none of {', '.join(sorted(RESERVED))}."
            )
        if spec is Timers:
            spec = Timers()
        found[name] = spec if isinstance(spec, State | Timers) else State(spec)
    return found


def declare(
    kv: Any,
    states: Mapping[str, State | Timers],
    key_type: str,
    timer_leaves: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Declares the states of an op on a provider.

    timer_leaves: of each state of timers, the leaves whose timers may be due; all unless told.
    """
    for name, spec in states.items():
        if isinstance(spec, Timers):
            kv._timers(name, key_type, None if timer_leaves is None else timer_leaves[name])
        elif spec.default is not ...:
            kv.value(name, spec.type, default=spec.default, key=key_type, ttl=spec.ttl)
        else:
            kv.state(name, spec.type, key=key_type, ttl=spec.ttl)


class Page:
    """The keys that a cursor moves along, each once."""

    def __init__(self, keys: Any) -> None:
        self.column = keys  # as a state takes them


class Cell:
    """A value of the current key: get, set, exists, clear; for a number add, too."""

    __slots__ = ("_at", "_changed", "_page", "_state", "_values")

    def __init__(self, state: Any) -> None:
        self._state = state
        self._values: Any = None  # of the page, None where there is none; None: not read yet
        self._at = 0

    def _turn(self, page: Page) -> None:
        self._page = page
        self._values = None

    def _read(self) -> Any:
        """Reads the values of the page."""
        found = self._state.get_many(self._page.column)
        self._changed = bytearray(len(found))
        self._values = self._stored(found)
        return self._values

    def _stored(self, found: Any) -> list[Any]:
        raise NotImplementedError

    def get(self, default: Any = NO_DEFAULT) -> Any:
        """The value; else the default given here, else the state's default, else None."""
        raise NotImplementedError

    def set(self, value: Any) -> None:
        raise NotImplementedError

    @property
    def value(self) -> Any:
        """The value; KeyError if there is none and the state has no default."""
        found = self.get()
        if found is None and not self.exists():
            raise KeyError(self._key())
        return found

    @value.setter
    def value(self, value: Any) -> None:
        self.set(value)

    def exists(self) -> bool:
        values = self._read() if self._values is None else self._values
        return values[self._at] is not None

    def clear(self) -> None:
        """Removes the value."""
        values = self._read() if self._values is None else self._values
        values[self._at] = None
        self._changed[self._at] = 1

    def _missing(self, default: Any) -> Any:
        if default is not NO_DEFAULT:
            return default
        found = self._state._fresh_default()
        return None if found is NO_DEFAULT else found

    def _key(self) -> Any:
        return keys_of(take(self._page.column, [self._at]))[0]

    def _flush(self) -> None:
        """Writes what was changed."""
        values = self._values
        if values is None or 1 not in self._changed:
            return
        changed = np.frombuffer(self._changed, bool)
        there = np.fromiter((value is not None for value in values), bool, len(values))
        keys = self._page.column
        kept, gone = changed & there, changed & ~there
        if kept.all():
            self._put(keys, values)
        elif kept.any():
            at = np.flatnonzero(kept)
            self._put(take(keys, at), [values[i] for i in at.tolist()])
        if gone.any():
            self._state.delete_many(take(keys, np.flatnonzero(gone)))
        self._values = None

    def _put(self, keys: Any, values: list[Any]) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{self._state.name!r} of {shorten(self._key())}: {shorten(self.get())}>"


class NumberCell(Cell):
    """An int or float."""

    __slots__ = ("_convert", "_default", "_type", "_zero")

    def __init__(self, state: NumberValueState[Any]) -> None:
        super().__init__(state)
        self._type, self._convert, self._zero = state._type, state._convert, state._zero
        self._default = None if state._default is NO_DEFAULT else state._default

    def _stored(self, found: Any) -> list[Any]:
        numbers = found._numbers.tolist()
        if 0 in found.found:
            for at, there in enumerate(found.found):
                if not there:
                    numbers[at] = None
        return numbers  # type: ignore[no-any-return]

    def get(self, default: Any = NO_DEFAULT) -> Any:
        values = self._read() if self._values is None else self._values
        value = values[self._at]
        if value is None:
            return self._default if default is NO_DEFAULT else default
        return value

    def set(self, value: Any) -> None:
        values = self._read() if self._values is None else self._values
        at = self._at
        values[at] = value if value.__class__ is self._type else self._converted(value)
        self._changed[at] = 1

    def add(self, amount: Any = 1) -> Any:
        """Adds to the number, or to the default (0 if there is none). Returns the new number."""
        values = self._values
        if values is None:
            values = self._read()
        at = self._at
        if amount.__class__ is not self._type:
            amount = self._converted(amount)
        value = values[at]
        value = amount + (self._zero if value is None else value)
        values[at] = value
        self._changed[at] = 1
        return value

    def _converted(self, value: Any) -> Any:
        try:
            return self._convert(value)
        except VALUE_FAULTS as fault:
            raise self._state._misfit(fault, value, self._key(), self._state._codec) from None

    def _put(self, keys: Any, values: list[Any]) -> None:
        self._state.put_many(keys, values)


class ValueCell(Cell):
    """A value of any other type, kept encoded."""

    __slots__ = ("_encode",)

    def __init__(self, state: ValueState[Any]) -> None:
        super().__init__(state)
        self._encode = state._encode_value

    def _stored(self, found: Any) -> list[Any]:
        return found.encoded()  # type: ignore[no-any-return]

    def get(self, default: Any = NO_DEFAULT) -> Any:
        values = self._read() if self._values is None else self._values
        data = values[self._at]
        return self._missing(default) if data is None else self._state._decoded(data)

    def set(self, value: Any) -> None:
        values = self._read() if self._values is None else self._values
        try:
            values[self._at] = self._encode(value)
        except VALUE_FAULTS as fault:
            raise self._state._misfit(fault, value, self._key(), self._state._codec) from None
        self._changed[self._at] = 1

    def _put(self, keys: Any, values: list[Any]) -> None:
        state = self._state
        packed = column(values, "b", f"the values for state {state.name!r}")
        state._chunked(state._raw.put_many, keys, packed, needs_values=False)


def take(keys: Any, at: Any) -> Any:
    """Some keys of a column of keys."""
    return tuple(part.take(at) for part in keys) if isinstance(keys, tuple) else keys.take(at)


class Cursor:
    """All states of the current key, as attributes; and `key`, `watermark` and `batch_id`.

    It moves on when the function returns: do not keep it, nor what it gives.
    """

    __slots__ = ("_brought", "_cells", "_page", "batch_id", "key", "watermark")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"st.{name} cannot be assigned to. Use st.{name}.set(...) of a value, and the methods "
            "of lists, maps and sets."
        )

    def __getattr__(self, name: str) -> Any:
        states = [one for one in vars(type(self)) if not one.startswith("_")]
        raise AttributeError(f"there is no state {name!r}. Declared are: {', '.join(states)}.")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def _turn(self, page: Page) -> None:
        """Goes to another page."""
        _set_page(self, page)
        self._brought.clear()
        for cell in self._cells:
            cell._turn(page)

    def _flush(self) -> None:
        for cell in self._cells:
            cell._flush()

    def _view(self, state: Any) -> Any:
        if state.name not in self._brought:
            self._brought.add(state.name)
            state.contains_many(self._page.column)
        return state._bind(self.key)


_set_page = Cursor._page.__set__  # type: ignore[attr-defined]
set_key = Cursor.key.__set__  # type: ignore[attr-defined]


def _cell(state: ValueState[Any]) -> Cell:
    return NumberCell(state) if isinstance(state, NumberValueState) else ValueCell(state)


def make_cursor(
    kv: Any, states: Mapping[str, State | Timers], watermark: int | None, batch_id: int
) -> Cursor:
    """A cursor over the states of an op that were declared on a provider."""
    member: Any = property
    members: dict[str, Any] = {"__slots__": ()}
    cells = []
    for name, spec in states.items():
        state = kv[name]
        life = as_ttl(spec.ttl) if isinstance(spec, State) else None
        is_read_alone = life is not None and life.refresh == "read"
        if is_read_alone:
            # An entry that lives longer when it is read must not be read for keys that do not ask.
            members[name] = member(lambda st, state=state: state._bind(st.key))
        elif isinstance(state, ValueState):
            cell = _cell(state)
            cells.append(cell)
            members[name] = member(lambda _, cell=cell: cell)
        else:
            members[name] = member(lambda st, state=state: st._view(state))
    cursor: Cursor = type("Cursor", (Cursor,), members)()
    for name, value in (
        ("_cells", cells),
        ("_brought", set()),
        ("watermark", watermark),
        ("batch_id", batch_id),
    ):
        getattr(Cursor, name).__set__(cursor, value)
    return cursor
