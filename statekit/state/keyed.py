"""What states of every type can do: keys, items, deletion, batches, and how they show themselves.

A typed state uses a handle of the native store (`_raw`) and the provider's residence, which brings
entries that are not here. Operations call C directly and look at the answer. Only if C could not do
the operation at once, it takes the long way through `_when_here`.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from statekit._fast import Keyed
from statekit._native import lib
from statekit.codecs import Codec, as_misfit
from statekit.errors import (
    ArgumentError,
    BadValueError,
    ColumnError,
    CorruptBlockError,
    InProcess,
    NotOwnedError,
    OverflowStateError,
    StateKitError,
    UnknownEntryError,
    closed_error,
    package,
    shorten,
    where,
)
from statekit.exact import VALUE_FAULTS
from statekit.keys import KEY_FAULTS
from statekit.native.columns import Column, key_column
from statekit.native.states import State
from statekit.residence.fetch import AWAITED, BATCH_RECORDS_MAX
from statekit.residence.residence import Residence
from statekit.schema import StateSchema, show

if TYPE_CHECKING:
    import pandas
    import pyarrow

V = TypeVar("V")
R = TypeVar("R")

_contains: Callable[..., int] = lib.sk_contains
_delete: Callable[..., int] = lib.sk_delete
_OK: int = lib.SK_OK
_MISSING: int = lib.SK_MISSING  # _when_here handles statuses above it
_SHOWN = 5  # entries in a repr
_SHOWN_BYTES_MAX = 1 << 16  # larger values are not decoded for a repr
NO_KEY: Any = object()  # for a value without a key: a default, or a value of a batch

# The key of `with kv.key(...)`, for all states of all providers in this context.
current_key: ContextVar[Any] = ContextVar("statekit_current_key")


class KeyedState(Keyed, InProcess, ABC, Generic[V]):
    """A named collection of entries; V is what each key has."""

    __slots__ = ("__weakref__", "_codec", "_encode", "_raw", "_residence", "schema")
    _instead = (
        "Declare it on a provider of the other process; dict(state.items()) is a copy of its "
        "entries."
    )

    def __init__(
        self, raw: State, residence: Residence, schema: StateSchema, codec: Codec | None
    ) -> None:
        self._raw = raw
        self._ptr = raw._ptr  # None once the provider is closed; then cffi raises TypeError
        self._id = raw._id
        self._encode = raw.codec.encode
        self._residence = residence
        self._codec: Codec = codec  # type: ignore[assignment]  # timers have none, and need none
        self.schema = schema

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def _shown_as(self) -> str:
        return type(self).__name__

    # ---- One key

    def __contains__(self, key: Any) -> bool:
        encode = self._encode
        try:
            k = encode(key)
            status = _contains(self._ptr, self._id, k, len(k))
        except KEY_FAULTS as fault:
            raise self._raw._fault(fault, key) from None
        if status > _MISSING:
            return self._when_here(self._raw.contains, key)
        return status == _OK

    def __delitem__(self, key: Any) -> None:
        if not self._when_here(self._raw.delete, key):
            raise KeyError(key)

    def discard(self, key: Any) -> bool:
        """Removes the entry if there is one; True if there was."""
        encode = self._encode
        try:
            k = encode(key)
            status = _delete(self._ptr, self._id, k, len(k), 0)
        except KEY_FAULTS as fault:
            raise self._raw._fault(fault, key) from None
        if status > _MISSING:
            return self._when_here(self._raw.delete, key)
        return status == _OK

    def drop(self, key: Any) -> None:
        """Removes the entry, if there is one. Unlike discard(), it does not ask the home."""
        self._when_here(self._raw.delete, key, True)

    # ---- All entries

    def keys(self) -> Iterator[Any]:
        """All keys, leaf by leaf, each leaf as it is when it is reached."""
        decode = self._raw.codec.decode
        return (decode(key) for key, _ in self._residence.scan(self._raw))

    def __iter__(self) -> Iterator[Any]:
        return self.keys()

    def items(self) -> Iterator[tuple[Any, V]]:
        """All (key, value), the values as plain copies; see keys()."""
        decode_key, decode = self._raw.codec.decode, self._decoded
        return ((decode_key(key), decode(value)) for key, value in self._residence.scan(self._raw))

    def values(self) -> Iterator[V]:
        """All values, as plain copies; see keys()."""
        decode = self._decoded
        return (decode(value) for _, value in self._residence.scan(self._raw))

    def _decoded(self, stored: Any) -> V:
        """A value from what a scan gives."""
        try:
            value: V = self._codec.decode(stored)
        except VALUE_FAULTS as fault:
            raise self._unreadable(fault) from None
        return value

    def __len__(self) -> int:
        """The number of entries. Entries at home are counted, too, which may take long."""
        if self._residence.is_whole and not self.schema.timed:
            return self._residence.store.stats(self._raw).entries
        return sum(1 for _ in self._residence.scan(self._raw))

    def __bool__(self) -> bool:
        return any(True for _ in self._residence.scan(self._raw))

    def clear(self) -> None:
        """Removes all entries, at home too."""
        self._residence.clear(self._raw)

    def to_arrow(self, *, text: Collection[str] = ()) -> "pyarrow.Table":
        """All entries as a table: key (or one column for each part of a tuple), value.

        The columns follow from the declared type, whatever the state contains; text names types
        that are to be text instead of having columns of their own (docs/arrow.md).
        """
        from statekit.state.export import arrow_reader

        return arrow_reader(self, text).read_all()

    def to_pandas(self, *, text: Collection[str] = ()) -> "pandas.DataFrame":
        """All entries as a data frame; see to_arrow()."""
        package("pandas", "to_pandas()")
        return self.to_arrow(text=text).to_pandas()

    def __arrow_c_schema__(self) -> object:
        from statekit.state.export import arrow_schema

        return arrow_schema(self).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The entries as DuckDB, Polars, pyarrow and others read them, leaf by leaf."""
        from statekit.state.export import arrow_reader

        return arrow_reader(self).__arrow_c_stream__(requested_schema)

    # ---- Batches

    def contains_many(self, keys: Any) -> list[bool]:
        """Whether each key is there."""
        found = b"".join(self._chunked(self._raw.contains_many, keys))
        return list(map(bool, found))

    def delete_many(self, keys: Any) -> int:
        """Removes entries. Returns how many there were."""
        return sum(map(sum, self._chunked(self._raw.delete_many, keys)))

    def _chunked(
        self,
        call: Callable[..., R],
        keys: Any,
        *columns: Column,
        needs_values: bool = True,
    ) -> list[R]:
        """Runs a batch: at once if all entries are here, else in parts that are fetched in turn."""
        column = key_column(keys, self._raw.codec, f"the keys for state {self.name!r}")
        with self._residence.timed_batch(self._raw):
            if self._residence.home is None:
                if self._residence.loading is None or not (
                    needs_values or self._residence.awaits_peers
                ):
                    try:
                        return [call(column, *columns)]
                    except UnknownEntryError as unknown:
                        records, statuses = unknown.records, unknown.statuses
                    raise self._came_meanwhile(records[0], statuses)
                with self._residence.loaded(self._raw, column):
                    return [call(column, *columns)]
            results = []
            for start in range(0, max(column.n, 1), BATCH_RECORDS_MAX):
                part = column.slice(start, start + BATCH_RECORDS_MAX)
                rest = [other.slice(start, start + BATCH_RECORDS_MAX) for other in columns]
                try:
                    with self._residence.gathered(self._raw, part, needs_values):
                        results.append(call(part, *rest))
                except StateKitError as error:
                    _shift_record(error, start, column.n)
                    raise
            return results

    def _came_meanwhile(self, record: int, statuses: bytes | None) -> NotOwnedError:
        """Key-groups were another's when a batch began, and are coming from there since.

        Then the batch was first. (To find out before a batch would cost every batch a lock.)
        """
        error = NotOwnedError(
            "the key was in a key-group of another provider when the batch began, which has just "
            f"been taken over{where(self.name, record=record)}. Records that `statuses` has as 0 "
            "are done; do the others again."
        )
        error.state, error.record, error.statuses = self.name, record, statuses
        return error

    # ---- The current key

    @property
    def current(self) -> Any:
        """This state under the key of `with kv.key(...)`: what kv.keyed(key) gives for it."""
        try:
            key = current_key.get()
        except LookupError:
            raise ArgumentError(
                f"there is no current key{where(self.name)}. Use it inside `with kv.key(...)`."
            ) from None
        return self._bind(key)

    @abstractmethod
    def _bind(self, key: Any) -> Any:
        """The state under one key: a handle or a view."""

    # ---- What can go wrong

    def _when_here(self, call: Callable[..., R], *args: Any) -> R:
        if self._ptr is None:
            raise closed_error(self.name)
        try:
            return call(*args)
        except AWAITED as error:
            awaited = error
        return self._residence.call_again(awaited, self._raw, call, *args)

    def _encoded_items(self, codec: Codec, values: Any, keys: Any = ()) -> list[bytes]:
        """The values of a batch, each encoded. An error names the record and, if known, its key."""
        encode = codec.encode
        encoded: list[bytes] = []
        for item in value_items(values, self.name):
            try:
                encoded.append(encode(item))
            except VALUE_FAULTS as fault:
                at = len(encoded)
                key = keys[at] if isinstance(keys, list) and at < len(keys) else NO_KEY
                error = self._misfit(fault, item, key, codec)
                error.record = at
                error.args = (f"record {len(encoded)}: {error.args[0]}",)
                raise error from None
        return encoded

    def _misfit(self, fault: Exception, value: object, key: object, codec: Codec) -> StateKitError:
        """The error for a value that codec.encode() did not accept."""
        misfit = as_misfit(fault, value, codec)
        kind = OverflowStateError if misfit.is_too_large else BadValueError
        place = where(self.name) if key is NO_KEY else where(self.name, key)
        error = kind(
            f"{shorten(misfit.value)}{misfit.place()} {misfit.problem()}{place}. "
            f"{misfit.what_to_do()}"
        )
        error.state, error.key = self.name, None if key is NO_KEY else key
        return error

    def _unreadable(self, fault: Exception, key: object = NO_KEY) -> StateKitError:
        """The error for a stored value that is not what the schema says."""
        place = where(self.name) if key is NO_KEY else where(self.name, key)
        error = CorruptBlockError(
            f"what is stored is no {show(self.schema.type)} ({fault}){place}. "
            "Check whether another program wrote to the home, or restore it from a checkpoint."
        )
        error.state, error.key = self.name, None if key is NO_KEY else key
        return error

    def _encoded(self, codec: Codec, value: Any, key: Any = NO_KEY) -> bytes:
        try:
            return codec.encode(value)
        except VALUE_FAULTS as fault:
            raise self._misfit(fault, value, key, codec) from None

    # ---- How it is shown

    def _title(self) -> str:
        kinds = f"{self._raw.codec.python} -> {show(self.schema.type)}"
        return f"{self._shown_as} {self.name!r}: {kinds}"

    def _sample(self) -> list[tuple[str, str]]:
        """The first entries that are in memory, as text: a repr must not ask a server."""
        found: list[tuple[str, str]] = []
        if self._ptr is None:
            return found
        decode = self._raw.codec.decode
        for key, value in self._residence.store.scan(self._raw, partial=True):
            if isinstance(value, bytes | memoryview) and len(value) > _SHOWN_BYTES_MAX:
                text = f"<{len(value)} bytes>"
            else:
                text = shorten(self._decoded(value))
            found.append((shorten(decode(key)), text))
            if len(found) == _SHOWN:
                break
        return found

    def __repr__(self) -> str:
        if self._ptr is None:
            return f"<{self._title()}, closed>"
        entries = self._residence.store.stats(self._raw).entries
        shown = [f"{key}: {value}" for key, value in self._sample()]
        more = ["..."] if entries > _SHOWN else []
        body = ", ".join([*shown, *more])
        return f"<{self._title()}, {entries} in memory {{{body}}}>"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>"
            for key, value in self._sample()
        )
        closed = "" if self._ptr is not None else ", closed"
        return (
            f"<table><caption>{escape(self._title())}{closed}</caption>"
            f"<tr><th>key</th><th>value</th></tr>{rows}</table>"
        )


def _shift_record(error: StateKitError, start: int, n: int) -> None:
    """Turns an error about a part of a batch into one about the whole batch."""
    if error.record is not None:
        told = f"record {error.record}"
        error.record += start
        error.args = (str(error.args[0]).replace(told, f"record {error.record}"),)
    if error.statuses is not None:
        after = n - start - len(error.statuses)
        error.statuses = bytes(start) + error.statuses + bytes([lib.SK_END]) * after


def value_items(values: Any, state: str) -> Any:
    """The values of a batch as Python objects. ColumnError if they are no column."""
    if isinstance(values, str | bytes | Mapping | AbstractSet) or not isinstance(values, Iterable):
        raise ColumnError(
            f"{shorten(values)} is no column of values{where(state)}. "
            "Pass a list, an Arrow or NumPy array, or a series."
        )
    return plain_items(values)


def plain_items(values: Any) -> Any:
    """A column as Python objects: codecs and users do not expect the scalars of Arrow or NumPy."""
    if hasattr(values, "to_pylist"):
        return values.to_pylist()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(values, numpy.ndarray) and values.dtype.kind in "mM":
        # NumPy would turn nanoseconds into ints.
        whole = values.astype(f"{values.dtype.kind}8[us]")
        lost = (whole != values) & (values == values)  # NaT is not equal to itself
        if lost.any():
            at = int(lost.argmax())
            raise ColumnError(
                f"item {at}, {values[at]}, has nanoseconds, which a datetime or timedelta has not. "
                "Round it to microseconds."
            )
        values = whole
    return values.tolist() if hasattr(values, "tolist") else values
