"""KVProvider: what a stream engine programs against.

A provider owns some key-groups and has the states under their keys: typed, in memory or larger
than memory, to be split and merged by moving leaves. It ties together what is explained elsewhere:
a native store (store/), a home for what memory does not hold (homes/), the traffic between them
(residence.py), types (schema.py, codecs.py) and the states themselves (state/).
"""

import atexit
import logging
import os
import threading
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from html import escape
from os import PathLike
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.checkpoint.reader import Checkpoint
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
    ClosedError,
    CommitError,
    HomeError,
    InProcess,
    KeyTypeError,
    KindError,
    NotOwnedError,
    OccupiedError,
    OverflowStateError,
    SchemaError,
    shorten,
)
from statekit.exact import VALUE_FAULTS
from statekit.format.description import plain_metadata
from statekit.homes.record import HomeRecord, HomeShare
from statekit.keys import KeyType, encode_key, key_codec, leaf_of_encoded
from statekit.live.checkpointer import Checkpointer, Holdings
from statekit.live.job import CheckpointJob
from statekit.live.periodic import PeriodicCheckpoints
from statekit.metrics import Metrics, MovedMetrics, StateCounters, StateMetrics
from statekit.migration.api import PeerApi
from statekit.native import Store
from statekit.native.columns import route
from statekit.native.ttl import SWEEP_SLOTS, TTL, Sweeper, Timestamp, as_ms, as_ttl
from statekit.protocol.messages import Leases, cut_leases
from statekit.residence.loading import Loading
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
)
from statekit.state.keyed import current_key
from statekit.state.value import NO_DEFAULT, NumberValueState
from statekit.uninterrupted import await_finalizers, finalize, uninterrupted

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
A = TypeVar("A")
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_log = logging.getLogger("statekit")

MEMORY_DEFAULT = 256 << 20  # of a provider whose home is not memory


_unclosed: "weakref.WeakSet[KVProvider]" = weakref.WeakSet()  # providers with a home ...
#: ... and their stores, by id: what is collected together is finalized in any order, and a store
#: must live until its provider has read it out.
_kept: dict[int, Store] = {}


def _leave_all() -> None:
    await_finalizers()
    with ExitStack() as stack:  # all of them, though a home may fail or a warning be an error
        for provider in [*_unclosed]:
            stack.callback(provider._leave)


atexit.register(_leave_all)


class Family:
    """The providers of one process that were split from each other: who owns which key-group."""

    def __init__(self) -> None:
        self.owners: dict[int, KVProvider] = {}

    def members(self) -> set["KVProvider"]:
        return set(self.owners.values())


class _Declaration:
    """How a state was asked for: enough to ask for it again on another provider."""

    def __init__(self, schema: StateSchema, ttl: TTL | None, make: Callable[..., Any]) -> None:
        self.schema = schema
        self.ttl = ttl
        self.make = make  # (raw, residence, schema) -> the typed state


class KVProvider(InProcess, PeerApi):
    """Typed state under the keys of some key-groups. Make one with statekit.open().

    Every method may be called from any thread.
    """

    _instead = (
        "Open a provider in the other process. State goes over with checkpoint() and "
        "statekit.restore(), or with serve() and fetch_from()."
    )

    def __init__(
        self,
        url: str,
        residence: Residence,
        record: HomeRecord,
        mine: tuple[range, ...],
        home: HomeShare,
        family: Family,
    ) -> None:
        super().__init__()
        self.url = url
        self._residence = residence
        self._recorded = record
        self._mine = mine
        self._home = home
        self._family = family
        self._lock = threading.RLock()
        self._declared: dict[str, _Declaration] = {}
        self._states: dict[str, Any] = {}
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()  # all that are in use
        self._sweeper: Sweeper | None = None
        self._is_closed = False
        self._has_position = False  # commit() was given one
        self._checkpointer = Checkpointer(residence, self._lock, self._holdings)
        self._pid = os.getpid()
        #: Key-groups that are ours, though the home's record may say that they are another's.
        self._unrecorded: tuple[range, ...] = ()
        self._leases = cut_leases(record.leases, leaf_ranges(mine, residence.store.subgroups))
        residence.register(record.schemas)
        residence.keeper = self  # who has a state has its provider
        for group in (group for part in mine for group in part):
            family.owners[group] = self
        if residence.ledger is not None:
            _unclosed.add(self)
            _kept[id(self)] = residence.store

    # ---- Declaring states

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
        cls = ValueState if value_kind(codec.type) == "bytes" else NumberValueState

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

        def make(raw: Any, residence: Residence, schema: StateSchema) -> TimersState:
            residence.load_state(raw, residence.leaves())
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
            return self._attach_state(_Declaration(asked, life, make))

    def _refuse_second(self, before: _Declaration, asked: StateSchema, life: TTL | None) -> None:
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

    def _attach_state(self, declaration: _Declaration) -> Any:
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

    # ---- Finding states

    def __getitem__(self, name: str) -> Any:
        """A state that was declared."""
        try:
            return self._states[name]
        except KeyError:
            stored = self._recorded.find(name)
            hint = f" (it is stored as {stored})" if stored is not None else ""
            known = ", ".join(sorted(self._states)) or "none"
            raise SchemaError(
                f"there is no state {name!r} in this provider{hint}. Declare it first; "
                f"declared are: {known}."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __iter__(self) -> NoReturn:
        raise KindError(
            "a provider is no collection. `for name in kv.schemas` goes through the names of its "
            "states, `for key in kv[name]` through the keys of one, `kv[name].items()` through its "
            "entries."
        )

    @property
    def schemas(self) -> Mapping[str, StateSchema]:
        """The schemas of all states that are stored, declared here or not."""
        return {schema.name: schema for schema in self._recorded.schemas}

    # ---- The current key

    @contextmanager
    def key(self, key: Any) -> Iterator["Keyed"]:
        """Sets the current key: inside, state.current is the state under this key.

        >>> import statekit as sk
        >>> kv = sk.open("memory:")
        >>> clicks = kv.list("clicks", str)
        >>> with kv.key("alice"):
        ...     clicks.current.append("/home")
        >>> clicks["alice"]
        ['/home']
        """
        token = current_key.set(key)
        try:
            yield Keyed(self, key)
        finally:
            current_key.reset(token)

    def keyed(self, key: Any) -> "Keyed":
        """All states under one key, as attributes: kv.keyed("alice").visits.get()."""
        return Keyed(self, key)

    # ---- Time

    def advance_watermark(self, watermark: Timestamp) -> None:
        """Moves event time on (it never goes back): entries with a TTL in event time expire."""
        store = self._residence.store
        store.set_time("event", as_ms(watermark, "watermark"))
        store.sweep(SWEEP_SLOTS)

    def sweep(self) -> int:
        """Clears away all entries that have expired; how many. (They are never returned anyway.)"""
        return self._residence.sweep()

    # ---- Homes

    def commit(self, metadata: dict[str, Any] | None = None) -> None:
        """Makes everything since the last commit durable at once: all states, and the timers.

        After a crash at any instant, reopening gives exactly the last commit, whatever left memory
        in between. metadata: what it belongs to, such as the offsets of your sources; `committed`
        gives it back. Without it, `committed` is None from now on.
        """
        self._check_open()
        with self._lock:
            residence = self._committing("commit()")
            self._settle_record()
            positions = []
            if metadata is not None:
                positions.append((self._mine, plain_metadata(metadata)))
                self._has_position = True
            residence.commit(self._mine, positions)

    @property
    def committed(self) -> dict[str, Any] | None:
        """What the last commit() was given; None if there was none, or nothing was given.

        CommitError if key-groups were committed with different metadata and then came together
        (siblings on one home that were merged, or are now opened as one): see `positions`.
        """
        found = self.positions
        if len(found) > 1:
            raise CommitError(
                f"the key-groups of {self.url!r} were committed at {len(found)} different "
                "positions: "
                + "; ".join(f"{show_groups(groups)} at {shorten(at)}" for groups, at in found)
                + ". Look at kv.positions, and replay each from its own."
            )
        return found[0][1] if found else None

    @property
    def positions(self) -> "_list[tuple[tuple[range, ...], dict[str, Any]]]":
        """The metadata of the last commit of each key-group, with the key-groups it is of."""
        self._check_open()
        ledger = self._residence.ledger
        return [] if ledger is None else deepcopy(ledger.positions_of(self._mine))

    def rollback(self) -> None:
        """Back to the last commit: all changes since then, in all states, are undone.

        Only what this provider owns: a key-group that was handed over does not come back, and one
        that has come since the last commit is as it was when it came.
        """
        self._check_open()
        with self._lock:
            residence = self._committing("rollback()")
            if residence.is_folding_here():
                raise CommitError(
                    "rollback() was called by the function of a reduce or aggregate state. Call it "
                    "when that has returned."
                )
            mine = self._mine
            uninterrupted(lambda _: residence.rollback(mine))

    def _committing(self, call: str) -> Residence:
        """The residence, if its home can be committed."""
        if self._residence.ledger is None:
            raise CommitError(
                f"{self.url!r} has no home, and only a home has commits: {call} cannot be done. "
                'Open "rocksdb:/path" or "redis://host/0", or use kv.checkpoint() and restore().'
            )
        return self._residence

    def flush(self) -> None:
        """Commits all changes, with the metadata of the last commit. Memory has nothing to do."""
        self._check_open()
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._settle_record()
        residence = self._residence
        if residence.ledger is not None:
            residence.commit(self._mine, residence.ledger.positions_of(self._mine))
            residence.drop_rows()

    @property
    def loading(self) -> Loading | None:
        """How far a lazy restore is; None once everything is here."""
        return self._residence.loading

    def wait_loaded(self, timeout: float | None = None) -> None:
        """Waits until a lazy restore has brought everything here.

        Raises the first error if some of it cannot be read (see loading.errors), and TimeoutError
        if it takes longer than so many seconds.
        """
        self._check_open()
        self._residence.wait_loaded(timeout)
        self._check_open()

    def close(self) -> None:
        """Commits and lets go. From then on the provider and its states raise ClosedError."""
        locks: _list[Any] = [self._lock, self._residence.lock]
        if any(
            lock._is_owned() for lock in locks
        ):  # we are in a signal handler, and cut work in two
            self._close(is_kept=True)
        else:
            uninterrupted(lambda _: self._close(is_kept=True))

    def _close(self, is_kept: bool) -> None:
        if self._is_parents:
            return
        # First and without the lock, which a checkpoint that is being started waits for.
        self._close_peer()
        self._checkpointer.close()
        with self._lock:
            if self._is_closed:
                return
            # Out of use first: a write that is taken now must not be lost.
            handles = [*self._handles, *self._residence.store.states()]
            native = self._residence.store._ptr
            try:
                for handle in handles:
                    handle._ptr = None
                if is_kept:
                    self._flush()
                self._let_go()
            except BaseException:
                if not self._is_closed:  # else there is nothing left to go back to
                    for handle in handles:
                        handle._ptr = native
                    self._checkpointer.reopen()
                raise

    @property
    def _is_parents(self) -> bool:
        """Whether it belongs to the process we were forked from, which goes on using the home."""
        return self._residence.ledger is not None and self._pid != os.getpid()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):  # True: it was never quite made
            finalize(self._leave)

    def _leave(self) -> None:
        """Commits what nobody will commit any more, where that is possible; and says so."""
        if self._residence.ledger is None or self._is_parents:
            return
        shown, done = repr(self), "It was flushed now."
        try:
            is_kept = not self._uses_positions()
            if not is_kept:
                done = (
                    "Changes since the last commit(), if any, are lost: once commit(metadata) was "
                    "used, nothing else is committed by itself."
                )
            self._close(is_kept)
        except Exception as error:
            done = f"It cannot be flushed now, so what was not committed is lost: {error}"
            _log.error("%s was left without close(). %s", shown, done)
        warnings.warn(
            f"{shown} was left without close(). {done} Call close(), or use it in a with "
            "statement.",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _let_go(self) -> None:
        self._is_closed = True
        _unclosed.discard(self)
        _kept.pop(id(self), None)
        self._residence.keeper = None
        if self._sweeper is not None:
            self._sweeper.stop()
        for state in self._handles:
            state._ptr = None
        self._residence.close()
        self._home.release()
        for group in (group for part in self._mine for group in part):
            if self._family.owners.get(group) is self:
                del self._family.owners[group]

    def __enter__(self) -> "KVProvider":
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Half a batch must not appear under the position of the batch before.
        self._close(is_kept=error is None or not self._uses_positions())

    def _uses_positions(self) -> bool:
        """Whether commits have a position, so that only the user can tell when one is due."""
        ledger = self._residence.ledger
        return ledger is not None and (self._has_position or bool(ledger.positions_of(self._mine)))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the provider of {self.url!r} is closed. Open another one.")

    # ---- Checkpoints

    def checkpoint(
        self,
        url: str | PathLike[str],
        *,
        base: Checkpoint | int | str | None = "auto",
        compression: str | None = None,
        metadata: dict[str, Any] | None = None,
        barrier: int | None = None,
        keep: int | None = None,
    ) -> Checkpoint:
        """Writes the state as it is now to a directory of checkpoints, and waits for it.

        url: a path, or a URL that fsspec knows ("s3://bucket/job/worker-0"). One directory is for
        the checkpoints of one provider.
        base: "auto" writes what changed since this provider's last checkpoint there, and all of it
        if there was none. None writes all of it.
        compression: "zstd" or "lz4", for storage that is slower than they are.
        metadata: what you want back when you restore, such as the offsets of your sources.
        barrier: the number of a checkpoint that several providers take together, each when the
        barrier of that number passes it. Key-groups that are handed over meanwhile are in the part
        of one of them; see docs/migration.md.
        keep: the number of newest checkpoints there that stay when this one is taken; all unless
        told. If the others cannot be removed, that is logged, and no reason to fail.
        One that is being taken there already comes first. FencedError if another process has
        restored from there and published since: this one was replaced.
        """
        self._check_open()
        return self._checkpointer.take(
            url,
            base,
            compression=compression,
            metadata=metadata,
            gives_way=False,
            choose=self._part_of(barrier, url),
            keep=keep,
        )

    def checkpoint_async(
        self,
        url: str | PathLike[str],
        *,
        base: Checkpoint | int | str | None = "auto",
        compression: str | None = None,
        metadata: dict[str, Any] | None = None,
        barrier: int | None = None,
        keep: int | None = None,
    ) -> CheckpointJob:
        """As checkpoint(), in the background: the state as it is now, while it goes on changing.

        Waits only while another one is being taken there: then it is the state after that.
        """
        self._check_open()
        choose = self._part_of(barrier, url)
        return self._checkpointer.start(url, base, compression, metadata, choose=choose, keep=keep)

    def checkpoint_every(
        self,
        url: str | PathLike[str],
        *,
        seconds: float,
        keep: int = 3,
        compression: str | None = None,
        metadata: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        background: bool = True,
        on_error: Callable[[Exception], object] | None = None,
    ) -> PeriodicCheckpoints:
        """Takes a checkpoint every so many seconds, until stopped or closed; keeps the newest.

        background=False: none is taken by itself. Call poll() between two records: it takes one if
        it is time, as checkpoint_async() does. So no checkpoint has a half of what a record does,
        and metadata and state are of the same record.
        background=True: a thread takes them, whatever is going on.
        metadata: a dict, or what is called for one immediately before each checkpoint freezes the
        state: by poll(), or in a thread of statekit. What it tells is never newer than the state:
        if you change the state first and count the offset up then, a replay misses nothing.
        What goes wrong is logged ("statekit", each cause once), counted (metrics), kept in `errors`
        and given to on_error, and the next one is tried. While the provider owns no key-groups,
        none is taken: it would push out the last one that has state.
        """
        self._check_open()
        return self._checkpointer.every(
            url, seconds, keep, background, on_error, compression=compression, metadata=metadata
        )

    def _part_of(
        self, barrier: int | None, url: str | PathLike[str]
    ) -> Callable[[], tuple[range, ...]] | None:
        """What tells, at the moment of a checkpoint, which key-groups belong into our part."""
        if barrier is None:
            return None
        peer = self._as_peer()

        def add_late(groups: tuple[range, ...]) -> CheckpointJob:
            return self._checkpointer.start(url, None, choose=lambda: groups, is_extra=True)

        return lambda: peer.take(barrier, add_late)

    def _holdings(self) -> Holdings:
        return Holdings(self._mine, tuple(self._recorded.schemas))

    # ---- Key-groups

    @property
    def key_groups(self) -> tuple[range, ...]:
        """The key-groups that this provider owns, as ascending ranges."""
        return self._mine

    @property
    def key_group_count(self) -> int:
        """How many key-groups there are in all."""
        return self._residence.store.key_groups

    @property
    def subgroups(self) -> int:
        """Sub-groups in each key-group."""
        return self._residence.store.subgroups

    def key_group_of(self, key: Any) -> int:
        """The key-group of a key, whoever owns it."""
        codec = key_codec(_key_type_of(key))
        store = self._residence.store
        data = encode_key(codec.text, key)
        return leaf_of_encoded(codec, data, store.leaves) // store.subgroups

    def key_groups_of(self, keys: Any, *, key: KeyType = str) -> memoryview:
        """The key-group of each key of a column (as batches take them), as unsigned ints.

        For engines that route whole micro-batches; numpy.asarray() of it costs no copy.
        """
        # Both are prefixes of the hash: a key-group is a leaf of a store without sub-groups.
        return route(keys, key_codec(key), self.key_group_count)

    def owner_of(self, key: Any) -> "KVProvider | None":
        """The provider that has a key: this one, or one it was split from or into, or None.

        >>> import statekit as sk
        >>> kv = sk.open("memory:")
        >>> left, right = kv.split([range(0, 64), range(64, 128)])
        >>> kv.owner_of("alice") is left, left.key_group_of("alice")
        (True, 15)
        """
        return self._family.owners.get(self.key_group_of(key))

    def split(self, ranges: Iterable[KeyGroups]) -> "_list[KVProvider]":
        """Hands key-groups over to new providers, one for each range, by moving their leaves.

        What is in no range stays here. The new providers have the same states and the same home;
        memory is shared out by the number of key-groups.
        """
        self._check_open()
        total = self.key_group_count
        if isinstance(ranges, range | str | bytes) or not isinstance(ranges, Iterable):
            raise ArgumentError(
                f"{shorten(ranges)} is no list of key-groups for new providers. Pass one range for "
                f"each: [range(0, {total // 2}), range({total // 2}, {total})], or what "
                f"statekit.assign({total}, 2) gives."
            )
        parts = [group_ranges(part, total) for part in ranges]
        group_ranges([group for part in parts for group in part])  # each group once
        for part in parts:
            if missing := subtract(part, self._mine):
                raise NotOwnedError(
                    f"key-groups {show_groups(missing)} are not this provider's, which has "
                    f"{show_groups(self._mine)}. Split what it has."
                )
        if self._peer is not None:
            self._peer.finish_coming([group for part in parts for group in part])
        return uninterrupted(lambda _: self._split(parts), self._unsplit)

    def _split(self, parts: "_list[tuple[range, ...]]") -> "_list[KVProvider]":
        made: _list[KVProvider] = []
        with self._lock:
            try:
                for part in parts:
                    made.append(self._split_off(part))
            except BaseException:
                self._unsplit(made)
                raise
        return made

    def _unsplit(self, made: "_list[KVProvider]") -> None:
        for provider in made:
            self._merge(provider)
            provider._let_go()

    def _split_off(self, part: tuple[range, ...]) -> "KVProvider":
        own = self._residence
        groups = sum(map(len, self._mine)) or 1
        share = None
        if own.budget is not None:
            share = own.budget * sum(map(len, part)) // groups
        if self._peer is not None:
            self._peer.check_free(part)
        other = self._sibling(share)
        try:
            own.move_leaves(other._residence, leaf_ranges(part, self.subgroups))
        except BaseException:
            other._let_go()
            raise
        if other._residence.loading is not None:
            other._residence.resume_loading()
        self._gave(part)
        other._take_over(part)
        self._hand_on(other, part)
        if own.budget is not None and share is not None:
            own.set_budget(own.budget - share)
        return other

    def _sibling(self, budget: int | None) -> "KVProvider":
        """A provider with the same states and home that owns nothing yet."""
        store = Store(self.key_group_count, self.subgroups)
        store.mark(0, store.leaves, "away")
        own = self._residence
        residence = Residence(store, own.ledger, budget)
        if own.loading is not None:
            residence.share_source(own)
        ours = self._recorded
        record = HomeRecord(ours.key_groups, ours.subgroups, [*ours.schemas])
        other = KVProvider(self.url, residence, record, (), self._home.share(), self._family)
        other._has_position = self._has_position
        event_time = self._residence.store.time("event")
        if event_time is not None:
            store.set_time("event", event_time)
        try:
            for declaration in self._declared.values():
                other._attach_state(declaration)
        except BaseException:
            other._let_go()
            raise
        return other

    # ---- For other processes (migration/api.py)

    def _owned(self) -> tuple[range, ...]:
        return self._mine

    def _stored(self) -> "_list[StateSchema]":
        return self._recorded.schemas

    def _take_in(self, schemas: Iterable[StateSchema]) -> None:
        mine = self.schemas
        for schema in schemas:
            if (known := mine.get(schema.name)) is not None:
                check_evolution(schema, known)
        for schema in schemas:
            if schema.name not in mine:
                self._native_state(schema)
                self._register(schema)

    def _gave(self, part: tuple[range, ...]) -> None:
        self._mine = subtract(self._mine, part)
        for group in (group for r in part for group in r):
            if self._family.owners.get(group) is self:
                del self._family.owners[group]

    # What the home's record says of who owns what. Siblings share it, and so may processes.

    def _record_given(self, part: tuple[range, ...], leases: Leases) -> None:
        self._record(lambda record: record.give(part, leases))

    def _record_taken(self, part: tuple[range, ...], leases: Leases) -> None:
        self._unrecorded = (*subtract(self._unrecorded, part), *part)
        self._record(lambda record: record.take(part, leases))

    def _record_deleted(self, part: tuple[range, ...]) -> None:
        self._record(lambda record: record.delete(part))

    def _settle_record(self) -> None:
        """What could not be written before must be there when a flush is done."""
        if self._unrecorded:
            self._record(lambda record: None)

    def _record(self, change: Callable[[HomeRecord], None]) -> None:
        """Changes the home's record, durably. The provider's lock is held."""
        home = self._residence.home
        while home is not None:
            expected = home.read_meta()
            stored = self._recorded.encode() if expected is None else expected
            record = HomeRecord.decode(stored, self.url)
            record.take(self._unrecorded)
            change(record)
            data = record.encode()
            if data == expected or home.write_meta(data, expected):
                self._recorded.refresh(record)
                break
        self._unrecorded = ()

    def _since(self, digest: bytes) -> "array[int] | None":
        return self._checkpointer.since(digest)

    def _figures(self) -> dict[str, Any]:
        return self.metrics().as_dict()

    def _take_over(self, part: tuple[range, ...]) -> None:
        self._mine = group_ranges((*self._mine, *part))
        self._checkpointer.came(leaf_ranges(part, self.subgroups))
        for group in (group for r in part for group in r):
            self._family.owners[group] = self

    def merge(self, other: "KVProvider") -> None:
        """Takes over all key-groups of another provider, which is left with none.

        It stays open (close it if it is of no more use): it may be given key-groups again.
        Refused, with nothing changed, if both have a key-group or their states do not agree.
        """
        self._check_open()
        if not isinstance(other, KVProvider):
            raise ArgumentError(
                f"{shorten(other)} is no provider. Pass what split() or open() gave."
            )
        other._check_open()
        self._check_mergeable(other)
        if other._peer is not None:
            other._peer.finish_coming(other._mine)
        uninterrupted(lambda _: self._merge(other))

    def _merge(self, other: "KVProvider") -> None:
        first, second = sorted((self, other), key=id)
        with first._lock, second._lock:
            part = other._mine
            if other._peer is not None:
                other._peer.check_free(part)
            is_moved = self._residence.ledger is other._residence.ledger
            if not is_moved:
                self._check_vacant(part)
            for name, declaration in other._declared.items():
                if name not in self._declared:
                    self._attach_state(declaration)
            for schema in other._recorded.schemas:
                self._register(schema)
                if not is_moved:
                    other._native_state(schema)  # also those that are stored and not declared
            here, there = self._residence.budget, other._residence.budget
            if here is not None:
                # Their memory comes with them; a provider that had given all away and takes from
                # one without a limit needs some again.
                self._residence.set_budget(here + (there or 0) or MEMORY_DEFAULT)
            leaves = leaf_ranges(part, self.subgroups)
            self._residence.let_in(leaves)
            if not is_moved:
                self._record_deleted(part)  # of what was handed over before: it is overwritten
            leases = other._leases_of(part)
            is_told = not is_moved and None not in (self._residence.home, other._residence.home)
            try:
                # From one home to another: at no instant would both be opened with them.
                other._residence.give(
                    self._residence,
                    leaves,
                    (lambda: other._record_given(part, leases)) if is_told else lambda: None,
                )
            except BaseException:
                if here is not None:
                    self._residence.set_budget(here)
                if is_told:
                    other._note(lambda: other._record_taken(part, leases))
                raise
            if not is_moved:
                self._note(lambda: self._record_taken(part, leases))
            other._gave(part)
            self._take_over(part)
            other._hand_on(self, part)
            if other._residence.forget_given() and is_told:
                other._note(lambda: other._record_taken(part, leases))  # as empty as a new home
            if there is not None:
                other._residence.set_budget(0)

    def _check_vacant(self, part: tuple[range, ...]) -> None:
        """OccupiedError if the home has rows of key-groups that come, and never gave them away."""
        home, ledger = self._residence.home, self._residence.ledger
        if home is None or ledger is None:
            return
        given = HomeRecord.read(home, self.url).given
        group = ledger.first_held(subtract(part, given))
        if group is not None:
            raise OccupiedError(
                f"{self.url!r} has entries of key-group {group}, with which it was not opened: "
                "they would be overwritten. Nothing was merged. Open the home with that key-group "
                "(owned=), or merge into another one."
            )

    def _note(self, record: Callable[[], None]) -> None:
        """Changes the home's record. If that fails, the next flush() tries it again, or fails."""
        try:
            record()
        except HomeError as error:
            _log.warning("the home does not say yet what is its own: %s", error)

    def _check_mergeable(self, other: "KVProvider") -> None:
        if other is self:
            raise ArgumentError("a provider cannot be merged with itself. Pass another one.")
        is_shared = self._residence.ledger is other._residence.ledger
        if self._recorded.id and self._recorded.id == other._recorded.id and not is_shared:
            raise ArgumentError(
                f"both providers have the home {self.url!r} open, each by itself: it would be "
                "given its own rows, and delete them. Close one, and open its key-groups with "
                "owned= where they are to be; providers that split() makes share their home."
            )
        here = (self.key_group_count, self.subgroups)
        there = (other.key_group_count, other.subgroups)
        if here != there:
            raise ArgumentError(
                f"a provider of {there[0]} key-groups x {there[1]} sub-groups cannot be merged "
                f"into one of {here[0]} x {here[1]}. Open both with the same numbers."
            )
        common = subtract(self._mine, subtract(self._mine, other._mine))
        if common:
            raise OccupiedError(
                f"both providers have key-groups {show_groups(common)}. "
                "Merge providers that own different ones."
            )
        self._see_siblings()
        other._see_siblings()
        mine = self.schemas
        for name, schema in other.schemas.items():
            if name in mine and mine[name] != schema:
                raise SchemaError(
                    f"state {name!r} is {mine[name]} here and {schema} there. "
                    "Nothing was merged; declare it alike on both sides."
                )
        for name, declared in self._declared.items():
            theirs = other._declared.get(name)
            if theirs is not None and theirs.ttl != declared.ttl:
                raise SchemaError(
                    f"state {name!r} has ttl {declared.ttl} here and {theirs.ttl} there. "
                    "Nothing was merged; declare it alike on both sides."
                )

    # ---- Figures

    def metrics(self) -> Metrics:
        """What is held and what was done, per state and in all."""
        self._check_open()
        residence = self._residence
        store = residence.store
        states = {}
        for name, counters in residence.counters.items():
            raw = next((raw for raw in store.states() if raw.name == name), None)
            if raw is None:
                continue
            stats = store.stats(raw)
            states[name] = StateMetrics(
                entries=stats.entries,
                bytes=stats.bytes,
                dirty=stats.dirty,
                operations=stats.operations,
                hits=max(0, stats.operations - counters.fetches),
                fetches=counters.fetches,
                spills=counters.spills,
                fetch_latency=counters.fetch_latency,
                batch_latency=counters.batch_latency,
            )
        total = store.stats()
        leaves = {
            "whole": total.whole,
            "partial": total.partial,
            "absent": total.absent,
            "away": total.away,
        }
        figures: dict[str, float] = {}
        if residence.home is not None:
            figures = {"failed_writes": residence.failures, **residence.home.metrics()}
        moved = MovedMetrics() if self._peer is None else self._peer.moved()
        return Metrics(
            states,
            store.bytes_used,
            residence.budget or 0,
            leaves,
            figures,
            moved,
            self._checkpointer.metrics,
        )

    def __repr__(self) -> str:
        if self._is_closed:
            return f"<KVProvider {self.url!r}, closed>"
        states = ", ".join(sorted(self._states)) or "no states"
        return (
            f"<KVProvider {self.url!r}, key-groups {show_groups(self._mine)} of "
            f"{self.key_group_count}, {self._residence.store.bytes_used} bytes: {states}>"
        )

    def _repr_html_(self) -> str:
        if self._is_closed:
            return f"<p>KVProvider {escape(self.url)}, closed</p>"
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(self.schemas[name]))}</td>"
            f"<td>{figures.entries}</td><td>{figures.bytes}</td></tr>"
            for name, figures in self.metrics().states.items()
        )
        return (
            f"<table><caption>KVProvider {escape(self.url)}, key-groups "
            f"{show_groups(self._mine)} of {self.key_group_count}</caption>"
            f"<tr><th>state</th><th>schema</th><th>entries</th><th>bytes</th></tr>{rows}</table>"
        )


class Keyed:
    """All states of a provider under one key, as attributes; see KVProvider.keyed().

    A value state gives a handle with get, set and add; lists, maps and sets give their views.
    """

    __slots__ = ("_key", "_provider")

    def __init__(self, provider: KVProvider, key: Any) -> None:
        self._provider = provider
        self._key = key

    def __getattr__(self, name: str) -> Any:
        if name in Keyed.__slots__:  # copy.copy() looks at one that is not made yet
            raise AttributeError(name)
        try:
            return self[name]
        except SchemaError as error:
            raise AttributeError(str(error)) from None

    def __getitem__(self, name: str) -> Any:
        """A state whose name is no identifier."""
        return self._provider[name]._bind(self._key)

    def __repr__(self) -> str:
        return f"<{self._provider!r} under {shorten(self._key)}>"


_list = list  # the class has a method of that name
_CONTAINERS = (
    (ListShape, "list", ListState),
    (MapShape, "map", MapState),
    (SetShape, "set", SetState),
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


def _key_type_of(key: Any) -> str:
    """The key type that a key has by itself."""
    letters = {str: "s", bytes: "b", int: "i"}
    parts = key if isinstance(key, tuple) else (key,)
    text = "".join(letters.get(type(part), "?") for part in parts)
    if "?" in text or not text:
        raise KeyTypeError(
            f"the key {shorten(key)} is of type {type(key).__name__}, which no key has. "
            "Use str, bytes, int, or a tuple of these."
        )
    return f"({text})" if isinstance(key, tuple) else text
