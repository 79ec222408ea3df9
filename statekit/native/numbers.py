"""Handles of number states: a 64-bit integer or float under each key.

The code has the shape that states.py explains. The two kinds differ in the native functions they
call and in what they accept as a number; NumberState has both in its slots.
"""

from collections.abc import Callable
from numbers import Number
from operator import index
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from statekit._native import ffi, lib
from statekit.errors import BadValueError, OverflowStateError, StateKitError, shorten, where
from statekit.exact import InexactError, exact_float
from statekit.keys import KEY_FAULTS, KeyCodec
from statekit.native.batch import Numbers, run_batch
from statekit.native.states import State

N = TypeVar("N", int, float)

_MISSING: int = lib.SK_MISSING
_CHANGED: int = lib.SK_CHANGED
_ADD: int = lib.SK_ADD
_MIN: int = lib.SK_MIN
_MAX: int = lib.SK_MAX
_NONE = -(2**63)  # this, or a NaN, may mean "no value": _value_status() tells
_value_status: Callable[[], int] = lib.sk_value_status


class _Kind(NamedTuple):
    """What sets i64 and f64 apart."""

    suffix: str  # of the fields of sk_batch_args
    type: type
    convert: Callable[[Any], Any]  # makes a `type` of what may pass for one, or raises TypeError
    column: str  # letter for column()
    format: Literal["q", "d"]  # of a memoryview
    cell: str  # the C type of a place for one number
    value: Callable[..., Any]
    value_or: Callable[..., Any]
    get: Callable[..., int]
    put: Callable[..., int]
    folded: Callable[..., Any]
    cas: Callable[..., int]


_I64 = _Kind(
    "i64", int, index, "i", "q", "int64_t *",
    lib.sk_i64_value, lib.sk_i64_value_or, lib.sk_i64_get, lib.sk_i64_put, lib.sk_i64_folded,
    lib.sk_i64_cas,
)  # fmt: skip
_F64 = _Kind(
    "f64", float, exact_float, "f", "d", "double *",
    lib.sk_f64_value, lib.sk_f64_value_or, lib.sk_f64_get, lib.sk_f64_put, lib.sk_f64_folded,
    lib.sk_f64_cas,
)  # fmt: skip


class NumberState(State, Generic[N]):
    """An i64 or f64 under each key."""

    __slots__ = (
        "_convert", "_native_cas", "_native_folded", "_native_put", "_native_value", "_number",
        "_type",
    )  # fmt: skip

    def __init__(
        self,
        ptr: Any,
        state_id: int,
        name: str,
        kind: str,
        codec: KeyCodec,
        timed: bool,
        number: _Kind,
    ) -> None:
        super().__init__(ptr, state_id, name, kind, codec, timed)
        self._number = number
        self._type, self._convert = number.type, number.convert
        self._native_value, self._native_put = number.value, number.put
        self._native_folded, self._native_cas = number.folded, number.cas

    def _value_fault(self, fault: Exception, value: object, place: str) -> StateKitError:
        problem, advice = str(fault), InexactError.advice
        cls: type[StateKitError] = BadValueError
        if isinstance(fault, OverflowError) and self._type is float:
            cls, problem = OverflowStateError, "is larger than any float"
            advice = "Declare the state with Decimal."
        elif not isinstance(fault, InexactError):
            return super()._value_fault(fault, value, place)
        error = cls(f"{shorten(value)} {problem}{place}. {advice}")
        error.state = self.name
        return error

    def get(self, key: Any, default: N | None = None) -> N | None:
        encode, read = self._encode, self._native_value
        try:
            k = encode(key)
            value: N = read(self._ptr, self._id, k, len(k))
        except KEY_FAULTS as fault:
            raise self._fault(fault, key) from None
        if value == value and value != _NONE:
            return value
        # Perhaps there is no value. A signal handler may have changed the status since, so ask
        # again.
        cell = ffi.new(self._number.cell)
        status = self._number.get(self._ptr, self._id, k, len(k), cell)
        if not status:
            return cast("N", cell[0])
        if status == _MISSING:
            return default
        raise self._refuse(status, key)

    def put(self, key: Any, value: N) -> None:
        encode, put = self._encode, self._native_put
        try:
            if value.__class__ is not self._type:
                value = self._convert(value)
            k = encode(key)
            status = put(self._ptr, self._id, k, len(k), value)
        except KEY_FAULTS as fault:
            raise self._fault(fault, key, value) from None
        if status:
            raise self._refuse(status, key)

    def add(self, key: Any, amount: N = 1, initial: N = 0, _fold: int = _ADD) -> N:
        """Adds to the value, or to `initial` if there is none. Returns the new value."""
        # min() and max() call this with another _fold: a common helper would cost add() a call.
        encode, fold = self._encode, self._native_folded
        number = self._type
        try:
            if amount.__class__ is not number:
                amount = self._convert(amount)
            if initial.__class__ is not number:
                initial = self._convert(initial)
            k = encode(key)
            value: N = fold(self._ptr, self._id, k, len(k), _fold, amount, initial)
        except KEY_FAULTS as fault:
            wrong = amount if not self._fits(amount) else initial
            raise self._fault(fault, key, wrong) from None
        if value == value and value != _NONE:
            return value
        if status := _value_status():
            raise self._refuse(status, key)
        return value

    def min(self, key: Any, value: N) -> N:
        """Lowers the value to this one, if this one is less. Returns the new value."""
        return self.add(key, value, 0, _MIN)

    def max(self, key: Any, value: N) -> N:
        """Raises the value to this one, if this one is more. Returns the new value."""
        return self.add(key, value, 0, _MAX)

    def compare_and_set(self, key: Any, expected: N | None, desired: N) -> bool:
        """Sets the value if it is `expected` (None: if there is none); True if it was."""
        native_cas = self._native_cas
        try:
            k = self._encode(key)
            desired = self._convert(desired)
            cell = ffi.NULL
            if expected is not None:
                cell = ffi.new(self._number.cell, self._convert(expected))
            status = native_cas(self._ptr, self._id, k, len(k), cell, desired, ffi.NULL)
        except KEY_FAULTS as fault:
            wrong = desired if not self._fits(desired) else expected
            raise self._fault(fault, key, wrong) from None
        if status in (_MISSING, _CHANGED):
            return False
        if status:
            raise self._refuse(status, key)
        return True

    def _checked(self, value: Any) -> N:
        """A number that fits into the state."""
        try:
            cell = ffi.new(self._number.cell, self._convert(value))
        except KEY_FAULTS as fault:
            raise self._value_fault(fault, value, where(self.name)) from None
        number: N = cell[0]
        return number

    def _fits(self, value: Any) -> bool:
        try:
            self._checked(value)
        except StateKitError:
            return False
        return True

    def get_many(self, keys: Any) -> Numbers:
        """The values and, one byte per key, whether there is one (0 stands for a missing one)."""
        batch = run_batch(self, lib.SK_B_GET, keys, out_format=self._number.format)
        assert batch.out is not None
        return Numbers(batch.out, batch.done())

    def put_many(self, keys: Any, values: Any) -> None:
        run_batch(self, lib.SK_B_PUT, keys, values=values, want=self._number.column)

    def add_many(
        self, keys: Any, amounts: Any = 1, *, initial: N = 0, returning: bool = False
    ) -> "memoryview[Any] | None":
        """Adds a number to each key's value: one number for all, or a column with one for each.

        returning: give back the new values, each as it is right after its record.
        """
        number = self._number
        fields = {f"initial_{number.suffix}": self._checked(initial)}
        if isinstance(amounts, Number):
            fields[f"operand_{number.suffix}"] = self._checked(amounts)
            amounts = None
        return run_batch(
            self,
            lib.SK_B_ADD,
            keys,
            values=amounts,
            want=number.column,
            numbers=fields,
            out_format=number.format if returning else None,
        ).out


class I64State(NumberState[int]):
    """A signed 64-bit integer under each key.

    >>> from statekit import Store
    >>> visits = Store().state("visits", "i64")
    >>> visits.add("alice"), visits.add("alice", 5)
    (1, 6)
    >>> visits.add_many(["bob", "alice", "bob"], returning=True).tolist()
    [1, 7, 2]
    >>> visits.get_many(["alice", "carol"]).to_list()
    [7, None]
    """

    __slots__ = ()
    _takes = "Pass an int."

    def __init__(
        self, ptr: Any, state_id: int, name: str, kind: str, codec: KeyCodec, timed: bool
    ) -> None:
        super().__init__(ptr, state_id, name, kind, codec, timed, _I64)


class F64State(NumberState[float]):
    """A 64-bit float under each key."""

    __slots__ = ()
    _takes = "Pass a float or an int."

    def __init__(
        self, ptr: Any, state_id: int, name: str, kind: str, codec: KeyCodec, timed: bool
    ) -> None:
        super().__init__(ptr, state_id, name, kind, codec, timed, _F64)
