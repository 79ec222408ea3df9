"""Value state: one value of any type under each key.

ints and floats live in the slots of the native store, eight bytes each; every other type is
encoded (codecs.py). The states that a provider makes have C in front (fast.py): the methods here
are for what C cannot do at once. Those that may meet an entry at home call C themselves, and hand
everything but the expected answer to `_when_here`. See statekit/native/states.py.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any, Generic, TypeVar, overload

from statekit import _fast
from statekit._native import lib
from statekit.codecs import Codec
from statekit.errors import (
    KindError,
    StateKitError,
    shorten,
    where,
)
from statekit.exact import VALUE_FAULTS
from statekit.keys import KEY_FAULTS
from statekit.native.batch import Numbers
from statekit.native.buffers import new_read, pop_read, push_read, take_grown
from statekit.native.columns import column
from statekit.native.numbers import NumberState
from statekit.native.states import BytesState
from statekit.residence.fetch import AWAITED
from statekit.residence.residence import Residence
from statekit.schema import StateSchema, show
from statekit.state.keyed import KeyedState
from statekit.state.results import EncodedValues, NumberValues, Values

V = TypeVar("V")
D = TypeVar("D")
N = TypeVar("N", int, float)

_NO_NUMBER = -(2**63)  # this, or a NaN, may stand for "no value"
_get: Callable[..., int] = lib.sk_get
_value_status: Callable[[], int] = lib.sk_value_status
_MISSING: int = lib.SK_MISSING
_UNKNOWN: int = lib.SK_UNKNOWN
NO_DEFAULT: Any = _fast.NO_DEFAULT  # C must know it, too


class ValueState(KeyedState[V]):
    """One value under each key.

    >>> import statekit as sk
    >>> kv = sk.open("memory:")
    >>> visits = kv.value("visits", int, default=0)
    >>> visits["alice"] += 1
    >>> visits.add("alice", 5), visits["bob"]
    (6, 0)
    >>> emails = kv.value("emails", str)
    >>> emails["alice"] = "alice@example.org"
    >>> emails.get("bob", "unknown")
    'unknown'
    >>> emails["bob"]
    Traceback (most recent call last):
    ...
    KeyError: 'bob'
    """

    __slots__ = ("_decode", "_default", "_encode_value")
    _raw: BytesState

    def __init__(
        self,
        raw: Any,
        residence: Residence,
        schema: StateSchema,
        codec: Codec,
        default: Any = NO_DEFAULT,
    ) -> None:
        super().__init__(raw, residence, schema, codec)
        self._encode_value = codec.encode
        self._decode = codec.decode
        self._default = NO_DEFAULT
        if default is not NO_DEFAULT:
            self._default = self._encoded(codec, default)

    # ---- One key

    def __getitem__(self, key: Any) -> V:
        encode, decode = self._encode, self._decode
        try:
            k = encode(key)
            try:
                read = pop_read()
            except IndexError:
                read = new_read()
            pointer, view, room = read
            length = _get(self._ptr, self._id, k, len(k), pointer)
        except KEY_FAULTS as fault:
            raise self._raw._fault(fault, key) from None
        if length >= 0:
            if length > room:
                data = take_grown(pointer, length)
            else:
                data = view[:length]
                push_read(read)
            try:
                return decode(data)  # type: ignore[no-any-return]
            except VALUE_FAULTS as fault:
                raise self._unreadable(fault, key) from None
        push_read(read)
        if length == -_MISSING:
            return self._missing(key, NO_DEFAULT)  # type: ignore[no-any-return]
        if length == -_UNKNOWN:
            self._residence.fetch_one(self._raw, k)
        return self._read(key, NO_DEFAULT)  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: V) -> None:
        try:
            data = self._encode_value(value)
        except VALUE_FAULTS as fault:
            raise self._misfit(fault, value, key, self._codec) from None
        self._put_data(key, data)

    def _put_data(self, key: Any, data: bytes) -> None:
        """Puts an encoded value."""
        self._when_here(self._raw.put_encoded, key, data)

    @overload
    def get(self, key: Any) -> V | None: ...
    @overload
    def get(self, key: Any, default: D) -> V | D: ...
    def get(self, key: Any, default: Any = NO_DEFAULT) -> Any:
        """The value; else the default given here, else the state's default, else None."""
        if default is NO_DEFAULT and self._default is NO_DEFAULT:
            default = None
        return self._read(key, default)

    def _read(self, key: Any, default: Any) -> Any:
        """The value, or the default of this call, or that of the state; KeyError without either."""
        get = self._raw.get_encoded
        try:
            data = get(key)
        except AWAITED:
            data = self._when_here(get, key)
        if data is not None:
            try:
                return self._decode(data)
            except VALUE_FAULTS as fault:
                raise self._unreadable(fault, key) from None
        return self._missing(key, default)

    def _missing(self, key: Any, default: Any) -> Any:
        if default is NO_DEFAULT:
            default = self._fresh_default()
        if default is NO_DEFAULT:
            raise KeyError(key)
        return default

    def _fresh_default(self) -> Any:
        # Kept encoded: a caller may change the object that it gets, but not the default.
        return NO_DEFAULT if self._default is NO_DEFAULT else self._decode(self._default)

    def put(self, key: Any, value: V) -> None:
        """The same as state[key] = value."""
        self[key] = value

    def setdefault(self, key: Any, value: V) -> V:
        """The value; if there is none, `value` is put there first."""
        found = self._read(key, None)
        if found is None and key not in self:
            self[key] = value
            return value
        return found  # type: ignore[no-any-return]

    def pop(self, key: Any, default: Any = NO_DEFAULT) -> Any:
        """Removes the entry and returns its value; KeyError if there is none and no default."""
        data = self._when_here(self._raw.get_encoded, key)
        if data is None or not self.discard(key):
            if default is NO_DEFAULT:
                raise KeyError(key)
            return default
        return self._decode(data)

    # ---- Numbers only

    def add(self: "ValueState[N]", key: Any, amount: N = 1) -> N:
        """Adds to the number, or to the default (0 if there is none). Returns the new number."""
        raise self._not_numbers("add")

    def min(self: "ValueState[N]", key: Any, value: N) -> N:
        """Lowers the number to this one, if this one is less. Returns the new number."""
        raise self._not_numbers("min")

    def max(self: "ValueState[N]", key: Any, value: N) -> N:
        """Raises the number to this one, if this one is more. Returns the new number."""
        raise self._not_numbers("max")

    def compare_and_set(self: "ValueState[N]", key: Any, expected: N | None, desired: N) -> bool:
        """Sets the number if it is `expected` (None: if there is none); True if it was."""
        raise self._not_numbers("compare_and_set")

    def add_many(
        self: "ValueState[N]", keys: Any, amounts: Any = 1, *, returning: bool = False
    ) -> "Values[N] | None":
        """Adds to each key's number: one amount for all, or a column with one for each.

        returning: give back the new numbers, each as it is right after its record.
        """
        raise self._not_numbers("add_many")

    def _not_numbers(self, what: str) -> KindError:
        return KindError(
            f"values of type {show(self.schema.type)} have no {what}(){where(self.name)}. "
            "Declare the state with int or float."
        )

    # ---- Batches

    def get_many(self, keys: Any) -> Values[V]:
        """The values of many keys, in their order; see Values for missing ones."""
        parts = self._chunked(self._raw.get_many, keys)
        default = None if self._default is NO_DEFAULT else self._fresh_default
        return EncodedValues(parts, self._codec, self._decoded, default)

    def put_many(self, keys: Any, values: Any) -> None:
        """Sets the values of many keys. values: a list, an Arrow or NumPy array, a series."""
        encoded = self._encoded_items(self._codec, values, keys)
        packed = column(encoded, "b", f"the values for state {self.name!r}")
        self._chunked(self._raw.put_many, keys, packed, needs_values=False)

    def update(self, entries: Any) -> None:
        """Puts every entry of a mapping, or of an iterable of pairs."""
        entries = dict(entries)
        self.put_many(list(entries), list(entries.values()))

    def _bind(self, key: Any) -> "KeyedValue[V]":
        return KeyedValue(self, key)


class NumberValueState(ValueState[N]):
    """ValueState of int or float: no encoding, and arithmetic in C."""

    __slots__ = ("_convert", "_if_missing", "_native_put", "_native_value_or", "_type", "_zero")
    _raw: NumberState[N]  # type: ignore[assignment]
    _shown_as = "ValueState"

    def __init__(
        self,
        raw: NumberState[N],
        residence: Residence,
        schema: StateSchema,
        codec: Codec,
        default: Any = NO_DEFAULT,
    ) -> None:
        super().__init__(raw, residence, schema, codec)
        self._native_value_or, self._native_put = raw._number.value_or, raw._native_put
        self._type, self._convert = raw._type, raw._convert
        if default is not NO_DEFAULT:
            default = raw._checked(default)
        self._default = default
        self._zero: N = raw._checked(0) if default is NO_DEFAULT else default
        self._if_missing: N = raw._checked(_NO_NUMBER) if default is NO_DEFAULT else default

    def __getitem__(self, key: Any) -> N:
        encode, read = self._encode, self._native_value_or
        try:
            k = encode(key)
            value: N = read(self._ptr, self._id, k, len(k), self._if_missing)
        except KEY_FAULTS as fault:
            raise self._raw._fault(fault, key) from None
        if value == value and value != _NO_NUMBER:
            return value
        if _value_status() == _UNKNOWN:
            self._residence.fetch_one(self._raw, k)
            ptr = self._ptr
            if ptr is not None:  # else it was closed meanwhile, and _read() below says so
                value = read(ptr, self._id, k, len(k), self._if_missing)
                if value == value and value != _NO_NUMBER:
                    return value
        number: N = self._read(key, NO_DEFAULT)
        return number

    def get(self, key: Any, default: Any = NO_DEFAULT) -> Any:
        if default is NO_DEFAULT:
            default = None if self._default is NO_DEFAULT else self._default
        return self._read(key, default)

    def __setitem__(self, key: Any, value: N) -> None:
        encode, put = self._encode, self._native_put
        try:
            if value.__class__ is not self._type:
                value = self._convert(value)
            k = encode(key)
            status = put(self._ptr, self._id, k, len(k), value)
        except KEY_FAULTS as fault:
            raise self._number_fault(fault, key, value) from None
        if status:
            self._when_here(self._raw.put, key, value)

    def _number_fault(self, fault: Exception, key: Any, value: Any) -> StateKitError:
        if self._ptr is None or not self._raw._encodes(key):
            return self._raw._fault(fault, key)
        return self._misfit(fault, value, key, self._codec)

    def _read(self, key: Any, default: Any) -> Any:
        get = self._raw.get
        try:
            value = get(key)
        except AWAITED:
            value = self._when_here(get, key)
        if value is not None:
            return value
        if default is NO_DEFAULT:
            default = self._default
        if default is NO_DEFAULT:
            raise KeyError(key)
        return default

    def pop(self, key: Any, default: Any = NO_DEFAULT) -> Any:
        value = self._when_here(self._raw.get, key)
        if value is None or not self.discard(key):
            if default is NO_DEFAULT:
                raise KeyError(key)
            return default
        return value

    def add(self, key: Any, amount: N = 1) -> N:
        add = self._raw.add
        try:
            return add(key, amount, self._zero)
        except AWAITED:
            return self._when_here(add, key, amount, self._zero)

    def min(self, key: Any, value: N) -> N:
        return self._when_here(self._raw.min, key, value)

    def max(self, key: Any, value: N) -> N:
        return self._when_here(self._raw.max, key, value)

    def compare_and_set(self, key: Any, expected: N | None, desired: N) -> bool:
        return self._when_here(self._raw.compare_and_set, key, expected, desired)

    def _decoded(self, stored: Any) -> N:
        number: N = stored
        return number

    def get_many(self, keys: Any) -> Values[N]:
        parts = self._chunked(self._raw.get_many, keys)
        return NumberValues(parts, None if self._default is NO_DEFAULT else lambda: self._default)

    def put_many(self, keys: Any, values: Any) -> None:
        letter = self._raw._number.column
        packed = column(values, letter, f"the values for state {self.name!r}")
        self._chunked(self._raw.put_many, keys, packed, needs_values=False)

    def add_many(
        self, keys: Any, amounts: Any = 1, *, returning: bool = False
    ) -> "Values[N] | None":
        raw, zero = self._raw, self._zero
        columns = []
        if not isinstance(amounts, Number):
            letter = raw._number.column
            columns = [column(amounts, letter, f"the amounts for state {self.name!r}")]

        def add_part(part: Any, part_amounts: Any = amounts) -> Any:
            return raw.add_many(part, part_amounts, initial=zero, returning=returning)

        parts = self._chunked(add_part, keys, *columns)
        if not returning:
            return None
        return NumberValues([Numbers(part, memoryview(b"\1" * len(part))) for part in parts], None)


class KeyedValue(Generic[V]):
    """A value state under one key, such as kv.keyed(key).visits.

    >>> import statekit as sk
    >>> kv = sk.open("memory:")
    >>> _ = kv.value("visits", int, default=0)
    >>> visits = kv.keyed("alice").visits
    >>> visits.set(3)
    >>> visits.add(2), visits.get()
    (5, 5)
    """

    __slots__ = ("_key", "_state")

    def __init__(self, state: ValueState[V], key: Any) -> None:
        self._state = state
        self._key = key

    def get(self, default: Any = NO_DEFAULT) -> Any:
        return self._state.get(self._key, default)

    def set(self, value: V) -> None:
        self._state[self._key] = value

    @property
    def value(self) -> V:
        """The value; KeyError if there is none and the state has no default."""
        return self._state[self._key]

    @value.setter
    def value(self, value: V) -> None:
        self._state[self._key] = value

    def add(self, amount: Any = 1) -> Any:
        """Adds to a number. Returns the new one."""
        return self._state.add(self._key, amount)

    def exists(self) -> bool:
        return self._key in self._state

    def clear(self) -> None:
        """Removes the value."""
        self._state.discard(self._key)

    def __repr__(self) -> str:
        return f"<{self._state.name!r} of {shorten(self._key)}: {shorten(self.get())}>"
