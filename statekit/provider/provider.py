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
from os import PathLike
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

from statekit.assignment import leaf_ranges, show_groups
from statekit.checkpoint.parts import Part
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import (
    ClosedError,
    CommitError,
    InProcess,
    KindError,
    SchemaError,
    shorten,
)
from statekit.format.description import plain_metadata
from statekit.homes.record import HomeRecord, HomeShare
from statekit.live.checkpointer import Checkpointer, Holdings
from statekit.live.job import CheckpointJob, PartJob
from statekit.live.periodic import PeriodicCheckpoints
from statekit.metrics import Metrics, MovedMetrics, StateMetrics
from statekit.native import Store
from statekit.native.ttl import SWEEP_SLOTS, Sweeper, Timestamp, as_ms
from statekit.protocol.messages import cut_leases
from statekit.provider.declare import Declaration
from statekit.provider.recording import Recording
from statekit.provider.split import Family
from statekit.residence.loading import Loading
from statekit.residence.residence import Residence
from statekit.schema import StateSchema, check_evolution
from statekit.state.keyed import current_key
from statekit.storage import Storage
from statekit.uninterrupted import await_finalizers, finalize, uninterrupted

#: Writes key-groups that belong into a checkpoint and come after its barrier.
AddLate: TypeAlias = Callable[[tuple[range, ...]], CheckpointJob | PartJob]

_log = logging.getLogger("statekit")

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


class KVProvider(InProcess, Recording):
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
        self._family: Family = family
        self._lock = threading.RLock()
        self._declared: dict[str, Declaration] = {}
        self._states: dict[str, Any] = {}
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()  # all that are in use
        self._sweeper: Sweeper | None = None
        self._is_closed = False
        self._has_position = False  # commit() was given one
        self._checkpointer = Checkpointer(residence, self._lock, self._holdings)
        self._pid = os.getpid()
        self._unrecorded = ()
        if record.leases:
            self._leases = cut_leases(record.leases, leaf_ranges(mine, residence.store.subgroups))
        residence.register(record.schemas)
        residence.keeper = self  # who has a state has its provider
        for group in (group for part in mine for group in part):
            family.owners[group] = self
        if residence.ledger is not None:
            _unclosed.add(self)
            _kept[id(self)] = residence.store

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
        locks: _list[Any] = [self._lock, *self._residence.locks]
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
        if self._peer is not None:
            self._home.participants.discard(self._peer.name)
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
            choose=self._part_of(barrier, self._adding_late(url)),
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
        choose = self._part_of(barrier, self._adding_late(url))
        return self._checkpointer.start(url, base, compression, metadata, choose=choose, keep=keep)

    def write_part(
        self,
        url: str | PathLike[str] | Storage,
        *,
        number: int,
        base: Checkpoint | int | str | None = "auto",
        compression: str | None = None,
        barrier: int | None = None,
    ) -> Part:
        """Writes the state as it is now as a part of a checkpoint that several processes write.

        It is no checkpoint before statekit.publish() is given the parts of all. What this gives is
        small, can be pickled, and has to_json().
        url: the place of the whole checkpoint, the same for all processes.
        number: of the checkpoint; above the newest one there, and the same for all.
        base: "auto" writes what changed since the checkpoint that this state was restored from, or
        that its last part was published in. None writes all of it.
        compression, barrier: as in checkpoint(). Parts of key-groups that come late have their jobs
        in late_parts(barrier).
        FencedError if another process has restored from there and published since.
        """
        self._check_open()

        def add_late(groups: tuple[range, ...]) -> PartJob:
            return self._checkpointer.start_part(
                url, number, None, compression, choose=lambda: groups, is_extra=True
            )

        choose = self._part_of(barrier, add_late)
        return self._checkpointer.take_part(
            url, number, base, compression=compression, gives_way=False, choose=choose
        )

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
        self, barrier: int | None, add_late: AddLate
    ) -> Callable[[], tuple[range, ...]] | None:
        """What tells, at the moment of a checkpoint, which key-groups belong into our part.

        add_late: writes those that belong into it and come later.
        """
        if barrier is None:
            return None
        peer = self._as_peer()
        return lambda: peer.take(barrier, add_late)

    def _adding_late(self, url: str | PathLike[str]) -> AddLate:
        """Key-groups that come late are in checkpoints of their own, in the same place."""
        return lambda groups: self._checkpointer.start(
            url, None, choose=lambda: groups, is_extra=True
        )

    def _holdings(self) -> Holdings:
        return Holdings(self._mine, tuple(self._recorded.schemas))

    # ---- Key-groups; the rest is in split.py

    def _new(self, residence: Residence, record: HomeRecord) -> "KVProvider":
        return KVProvider(self.url, residence, record, (), self._home.share(), self._family)

    # ---- For other processes (migration/api.py)

    def _owned(self) -> tuple[range, ...]:
        return self._mine

    def _stored(self) -> "_list[StateSchema]":
        return self._recorded.schemas

    def _take_in(self, schemas: Iterable[StateSchema]) -> None:
        self._see_siblings()  # or states would be told apart by what was declared here alone
        mine = self.schemas
        for schema in schemas:
            if (known := mine.get(schema.name)) is not None:
                check_evolution(schema, known)
        for schema in schemas:
            if schema.name not in mine:
                self._native_state(schema)
                self._register(schema)

    def _since(self, digest: bytes) -> "array[int] | None":
        return self._checkpointer.since(digest)

    def _figures(self) -> dict[str, Any]:
        return self.metrics().as_dict()

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
        from html import escape

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
