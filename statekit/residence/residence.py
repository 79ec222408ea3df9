"""Residence: what is here, what is at home, and the traffic between them.

A store keeps the hot entries of its leaves in memory; its home has the rest. Four things move:

    fetch      an operation found an entry unknown: ask the home, install the answer, do it again
    write back changes go home in batches, when memory is short or the user says flush()
    evict      clean entries that were not used lately leave memory
    scan       a whole state is read leaf by leaf: what is here over what is at home

Invariant: an entry that is not here and whose leaf is not whole is at home, in its newest
version. It holds because only clean entries are evicted, and an entry is clean only after the
home has confirmed it.

What was written back is at home, but not committed: the ledger (homes/ledger.py) keeps it apart,
so that whoever opens the home after a crash finds the last commit and nothing of what came after.
A commit takes what is dirty in all leaves at one moment, in one native call that holds their
locks. If that is more than a batch, it is written back first, without holding anybody up, until
what has changed meanwhile is little.

The danger is an answer that is older than what happened since it was asked for:

    thread A asks the home for k and gets v0
    thread B fetches k too, changes it to v1; k is written home and evicted
    thread A installs v0: v1 is lost

So evictions are counted, and an answer is installed only if none came between; the lock makes
the comparison and the installation one step. After two vain tries the question is asked with the
lock held.

A provider whose home is memory has no home here: its leaves are whole, or not its own. One that
is being restored lazily has a *source* instead (loading.py): then a leaf that is not whole is at
the source, as it was, under what is here. Leaves come from it as a whole, nothing is ever evicted,
and once all are here the source is gone and costs nothing more. There is never both a home and a
source.
"""

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, repeat
from time import monotonic, perf_counter
from typing import Any, TypeVar

from statekit.assignment import group_ranges, leaf_ranges
from statekit.errors import (
    BadValueError,
    HomeError,
    LeaseError,
    MemoryLimitError,
    UnknownEntryError,
)
from statekit.homes import Home, Row
from statekit.homes.home import HomeSnapshot, Named, row_name
from statekit.homes.ledger import Ledger, Position
from statekit.homes.rows import block_rows, native_read, read_value, split_stamp
from statekit.metrics import StateCounters
from statekit.native import Block, Store
from statekit.native.columns import route
from statekit.native.frames import bind, seal
from statekit.native.states import State
from statekit.residence.assemble import (
    Assembly,
    Rows,
    RowsByKey,
    bad_row,
    declare,
    empty_twin,
    install_rows,
    read_row,
    rows_over,
)
from statekit.residence.frozen import Frozen, Guard
from statekit.residence.loading import Loading
from statekit.residence.sources import PullSource, PushSource, Sources, Wanted
from statekit.schema import StateSchema

T = TypeVar("T")

_TRIES_UNLOCKED = 2
_FETCHES_MAX = 4  # for one operation, before it is done without regard to the budget
_VAIN_MIN = 32  # entries of a leaf asked for in vain, before its keys at home are read, ...
_VAIN_ROWS = 8  # ... if there are no more than so many for each that was asked for
_FILTER_KEY_BYTES = 6  # that a key at home takes once it is learned, about
_BUDGET_MIN = 16 << 10  # of bytes, however often a budget was split: an entry must fit
_EVICT_SHARE = 16  # a sixteenth of the budget is freed at a time
_WRITE_ROWS_MAX = 8192  # rows that are written home at a time
_WRITE_BYTES_MAX = 8 << 20
_COMMIT_BYTES_MAX, _COMMIT_BYTES_MIN = 16 << 20, 1 << 20  # what a commit writes in one step ...
_COMMIT_SHARE = 8  # ... but not more than this part of the budget
_COMMIT_ROUNDS = 8  # of writing back before a commit holds up those who write
_FAILED_SECONDS = 1.0  # after which a read tries again to write to a home that failed
BATCH_RECORDS_MAX = 16384  # of a batch, are brought here together
AWAITED = (UnknownEntryError, MemoryLimitError)  # what an operation may wait for; see settle()


class Residence:
    """A store and its home. Every method may be called from any thread."""

    def __init__(self, store: Store, ledger: Ledger | None, budget: int | None) -> None:
        self.store = store
        self.ledger = ledger  # of the home, which siblings share; None without a home
        self.budget = budget  # bytes of memory; None for no limit
        self.keeper: object = None  # the provider, which lives as long as one of its states
        self.loading: Loading | None = None  # while a source has what is not here
        self.schemas: Sequence[StateSchema] = ()  # of all states that are stored
        self.numbers: dict[str, int] = {}  # of the states, at home
        self.counters: dict[str, StateCounters] = {}
        self.lock = self._lock = threading.RLock()  # before the ledger's
        self._frozen: list[Frozen] = []  # that must be told before rows change
        self.shut_leaves: set[int] = set()  # that are being handed over to another process
        self._doomed: set[int] = set()  # of these: another process has them, memory may go
        self._assembly: tuple[Any, Assembly] | None = None  # for it, and of which types it is
        self._fold_locks: dict[str, Any] = {}
        self._timerless: set[int] = set()  # leaves whose timers a home that failed still has
        self._evictions = 0
        self._hand = 0  # the next leaf to be written back
        self.failures = 0  # of the home, when it was to be written to and nobody was waiting
        self._vain: dict[int, int] = {}  # leaf << 16 | state -> entries asked of the home in vain
        self._failed_at = -_FAILED_SECONDS  # when it last refused to take what was to go
        self._limit()
        if ledger is not None:
            store.write_back(True)

    @property
    def home(self) -> Home | None:
        """Where the entries are that are not here; None if all are."""
        return None if self.ledger is None else self.ledger.home

    def register(self, schemas: Sequence[StateSchema]) -> None:
        """Says what is stored; a state's number at home is its place in this list."""
        self.schemas = schemas
        self.numbers = {schema.name: at for at, schema in enumerate(schemas)}
        if self.ledger is not None:
            self.ledger.states = max(self.ledger.states, len(schemas))

    # ---- Leaves that are still to come

    @property
    def sources(self) -> Sources | None:
        """What leaves that are not whole come from, if that is not a home."""
        loading = self.loading
        return None if loading is None else loading.sources

    @property
    def is_whole(self) -> bool:
        """Whether what is here is all that is ours: nothing is coming, going, or at home."""
        return self.ledger is None and self.loading is None and not self.shut_leaves

    def restore_from(self, source: PullSource, background: bool = True) -> None:
        """Says where leaves come from that are absent; the source is let go of in the end."""
        assert self.ledger is None
        assert self.loading is None
        self.loading = Loading(self.store, Sources(source), self._end_loading, background)

    def share_source(self, other: "Residence") -> None:
        """Takes on the source of another residence, so that leaves can move that have not come."""
        first, second = sorted((self, other), key=id)
        with first._lock, second._lock:
            loading = other.loading
            if loading is None or self.loading is not None or self.ledger is not None:
                return
            pull = loading.sources.pull  # only: leaves of peers are here before they move
            if pull is not None:
                self.restore_from(pull.share(), loading.background)

    def resume_loading(self) -> None:
        """To be called when leaves have come that are not whole."""
        loading = self.loading
        if loading is not None and loading.background:
            loading.start()

    def _end_loading(self) -> None:
        """Lets go of the source if everything is here."""
        with self._lock:
            loading, stats = self.loading, self.store.stats()
            if loading is None or stats.partial or stats.absent:
                return
            if not all(push.is_settled for push in loading.sources.pushes):
                # One of several hand-overs is done. To let go of all of them now would leave the
                # other peers with leaves that they keep for us for ever.
                return
            try:
                loading.stop()  # first: who finds no loading may rely on the source being let go of
            finally:
                self.loading = None

    def wait_loaded(self, timeout: float | None = None) -> None:
        """Until nothing is still to come. Raises the first error that kept a leaf from coming."""
        until = None if timeout is None else monotonic() + timeout
        while (loading := self.loading) is not None:
            loading.start()
            if not loading.wait(None if until is None else max(0.0, until - monotonic())):
                raise TimeoutError(
                    f"after {timeout} s {loading.leaves_done} of {loading.leaves_total} leaves "
                    "are here. Wait again; what is not here comes when it is touched."
                )
            loading.raise_first()
            stats = self.store.stats()
            if self.awaits_peers and not stats.partial and not stats.absent:
                return  # all is here; who brought it may still have to tell where it came from

    def retype(self, name: str, kind: str, timed: bool) -> Any:
        """Store.retype() of a state that nobody uses, while leaves may be on their way."""
        with self._lock:
            loading = self.loading
            return (loading or self.store).retype(name, kind, timed)  # type: ignore[arg-type]

    def load_leaves(self, leaves: Iterable[int]) -> None:
        """Brings leaves here from the source, if there is one."""
        loading = self.loading
        if loading is not None:
            loading.load_many(leaves)

    def load_keys(self, leaves: Sequence[int], wanted: Wanted) -> None:
        """Brings entries of leaves here from the source, if there is one, or these leaves."""
        loading = self.loading
        if loading is not None:
            loading.load_keys(leaves, wanted)

    def expect(self, source: PushSource, ranges: Sequence[range]) -> None:
        """Leaves that were another's are ours, and come from a process that hands them over.

        Nothing is read from them or written to them before something of them has come.
        """
        assert self.ledger is None
        with self._lock:
            leaves = chain.from_iterable(ranges)
            if self.loading is None:
                sources = Sources(None).with_push(source, leaves)
                self.loading = Loading(self.store, sources, self._end_loading, background=False)
            else:
                self.loading.join(source, leaves)
            for part in ranges:
                for leaf in self.shut_leaves and self.shut_leaves.intersection(part):
                    self._drop_kept(leaf)  # it was here before, and is back
                self.store.set_gate(part.start, part.stop, "expected")

    @property
    def awaits_peers(self) -> bool:
        """Whether leaves may still come from another process."""
        loading = self.loading
        return loading is not None and loading.sources.has_push

    def load_from_peers(self, ranges: Sequence[range]) -> None:
        """Brings leaves here that another process still hands over, so that they can move on."""
        sources = self.sources
        if sources is not None and sources.has_push:
            leaves = (leaf for part in ranges for leaf in part)
            self.load_leaves([leaf for leaf in leaves if sources.push_of(leaf) is not None])

    @contextmanager
    def loaded(self, raw: State, keys: Any) -> Iterator[None]:
        """Brings the leaves of a batch's keys here, and lets no others come while it runs."""
        leaves = set(route(keys, raw.codec, self.store.leaves))
        self.load_leaves(leaves)
        with self._lock:
            self.load_leaves(leaves)  # a merge may have brought some in the meantime
            yield

    # ---- Doing an operation that may need the home

    def settle(self, raw: State, call: Callable[..., T], *args: Any) -> T:
        """Calls until the answer is here and there is room for it."""
        try:
            return call(*args)
        except AWAITED as error:
            awaited = error
        return self.settle_after(awaited, raw, call, *args)

    def settle_after(
        self,
        awaited: UnknownEntryError | MemoryLimitError,
        raw: State,
        call: Callable[..., T],
        *args: Any,
    ) -> T:
        """settle() of a call that has said what it waits for."""
        fetches = 0
        while fetches < _FETCHES_MAX:
            if isinstance(awaited, UnknownEntryError):
                (key,) = awaited.keys
                self.fetch_one(raw, raw.codec.encode(key))
                fetches += 1
            else:
                self.make_room(awaited)  # raises if there is none to be made
            try:
                return call(*args)
            except AWAITED as error:
                awaited = error
        # The room that was made may have been that of the entry itself, over and over.
        with self._lock:
            self.store.limit(0)
            try:
                return self._settle_here(raw, call, *args)
            finally:
                self._limit()
                self._trim()

    def _settle_here(self, raw: State, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except UnknownEntryError as unknown:
            (key,) = unknown.keys
            self.fetch_one(raw, raw.codec.encode(key))
            return call(*args)

    @contextmanager
    def gathered(self, raw: State, keys: Any, needs_values: bool) -> Iterator[None]:
        """Brings the entries of a batch here and keeps them here while the batch runs.

        needs_values: the operation reads what is there. Without it nothing needs to be fetched.
        Memory may pass the budget meanwhile, by what one batch needs.
        """
        with self._lock:
            self.store.limit(0)
            try:
                if needs_values:
                    try:
                        raw.contains_many(keys)
                    except UnknownEntryError as unknown:
                        encode = raw.codec.encode
                        wanted = list(dict.fromkeys(encode(key) for key in unknown.keys))
                        self.fetch(raw, wanted)
                yield
            finally:
                self._limit()
            self._trim()

    @contextmanager
    def timed_batch(self, raw: State) -> Iterator[None]:
        """Counts how long a batch takes."""
        began = perf_counter()
        yield
        self.counters[raw.name].batch_latency.observe(perf_counter() - began)

    def fetch_one(self, raw: State, key: bytes) -> None:
        """fetch() of one entry, for the single-key path."""
        home = self.ledger
        if home is not None:
            began = perf_counter()
            evictions = self._evictions
            value = home.get_one(raw.leaf_of_encoded(key), self.numbers[raw.name], key)
            with self._lock:
                if evictions == self._evictions and self._installs(raw, key, value):
                    if value is None:
                        self._asked_in_vain(raw, home, key)
                    self.counters[raw.name].fetched(1, perf_counter() - began)
                    return
        self.fetch(raw, [key])

    def _asked_in_vain(self, raw: State, home: Ledger, key: bytes) -> None:
        """The home had no such entry. If that happens often, its keys are learned instead."""
        place = raw.leaf_of_encoded(key) << 16 | self.numbers[raw.name]
        count = self._vain[place] = self._vain.get(place, 0) + 1
        if count < _VAIN_MIN or count & (count - 1):
            return  # at powers of two only
        leaf, rows_max = place >> 16, _VAIN_ROWS * count
        if self.budget is not None:
            rows_max = min(rows_max, self._bytes_max // 16 // _FILTER_KEY_BYTES)
        keys = home.keys(leaf, place & 0xFFFF, rows_max)
        if keys is not None:  # else they are too many yet for what it would save
            self._vain[place] = 0
            self.store.home_keys(raw, leaf, keys)
            self._trim()

    def fetch(self, raw: State, keys: Sequence[bytes]) -> None:
        """Asks the home for entries and installs what it says."""
        home = self.ledger
        if home is None:
            began = perf_counter()
            loading = self.loading
            is_done = loading is not None and loading.fetch(raw, keys)
            self.counters[raw.name].fetched(len(keys), perf_counter() - began)
            if is_done or all(
                self.store.residency(leaf) in ("whole", "away")
                for leaf in self.store.by_leaf(raw, keys)
            ):
                return
            raise UnknownEntryError(
                f"{len(keys)} entries of state {raw.name!r} are not here, and this provider has no "
                "home to ask. Attach or restore their key-groups first.",
                state=raw.name,
                keys=lambda: tuple(raw.codec.show(key) for key in keys),
            )
        began = perf_counter()
        number = self.numbers[raw.name]
        leaf_of = raw.leaf_of_encoded
        rows = [(leaf_of(key), number, key) for key in keys]
        tries = 0
        while not self._fetch_once(raw, home, rows, locked=tries >= _TRIES_UNLOCKED):
            tries += 1
        self.counters[raw.name].fetched(len(keys), perf_counter() - began)

    def _fetch_once(self, raw: State, home: Ledger, rows: list[Row], locked: bool) -> bool:
        evictions = self._evictions
        values = None if locked else home.get(rows)
        with self._lock:
            if values is not None:
                return evictions == self._evictions and all(
                    self._installs(raw, key, row)
                    for (_, _, key), row in zip(rows, values, strict=True)
                )
            self.store.limit(0)  # so that no room needs to be made in between
            try:
                for (_, _, key), row in zip(rows, home.get(rows), strict=True):
                    self._install(raw, key, row)
            finally:
                self._limit()
            if self.store.bytes_used > self._bytes_max:
                with suppress(MemoryLimitError, HomeError):  # who needs room next will be told
                    self._make_room_to_read(None)
        return True

    def _installs(self, raw: State, key: bytes, row: bytes | None) -> bool:
        """Installs what the home has said. False if room had to be made: then ask again.

        While room is made, another thread may change the entry, and the change go home and leave
        memory: what the home has said before must not come after it.
        """
        encoded, stamp = read_row(raw, row)
        try:
            raw.install_encoded(key, encoded, stamp)
        except MemoryLimitError as limit:
            with suppress(MemoryLimitError, HomeError):  # then it is done without regard to limits
                self._make_room_to_read(limit)
            return False
        except BadValueError as error:
            raise bad_row(raw, error) from None
        return True

    def _install(self, raw: State, key: bytes, row: bytes | None) -> None:
        encoded, stamp = read_row(raw, row)
        while True:
            try:
                raw.install_encoded(key, encoded, stamp)
                return
            except MemoryLimitError as limit:
                try:
                    self._make_room_to_read(limit)
                except (MemoryLimitError, HomeError):
                    # Nothing is left to evict, or the home takes nothing (its disk is full): an
                    # entry that is at home must be readable, and goes when room is next needed.
                    self.store.limit(0)
                    try:
                        raw.install_encoded(key, encoded, stamp)
                        return
                    finally:
                        self._limit()
            except BadValueError as error:
                raise bad_row(raw, error) from None

    def _is_expired(self, raw: State, stamp: int | None) -> bool:
        return stamp is not None and raw.timed and raw.is_expired(stamp)

    # ---- Making room

    def make_room(self, limit: MemoryLimitError | None) -> None:
        """Frees a part of the budget, writing home what must be; raises if nothing can go."""
        if self.ledger is None:
            assert limit is not None
            raise limit
        with self._lock:
            budget = self._bytes_max
            wanted = max(budget // _EVICT_SHARE, 1, self.store.bytes_used - budget)
            freed = self._evict(wanted)
            for is_cold in (True, False):
                # Cold entries first: hot ones would be written again and again.
                while freed < wanted:
                    written = self._write_back(wanted - freed, is_cold)
                    freed += self._evict(wanted - freed)
                    if not written:
                        break
            if freed == 0 and limit is not None:
                raise limit

    def _make_room_to_read(self, limit: MemoryLimitError | None) -> None:
        """make_room(), but a home that has just failed is not asked again for every read."""
        if monotonic() - self._failed_at < _FAILED_SECONDS:
            with self._lock:
                if not self._evict(self._bytes_max // _EVICT_SHARE) and limit is not None:
                    raise limit
            return
        try:
            self.make_room(limit)
        except HomeError:
            self.failures += 1
            self._failed_at = monotonic()
            raise

    def _evict(self, wanted: int) -> int:
        self._evictions += 1  # before: an answer asked for earlier must not be installed after
        return self.store.evict(wanted)

    def _write_back(self, bytes_wanted: int, cold: bool) -> int:
        """Writes changes home ahead of the commit, from where it last stopped; how many rows."""
        store = self.store
        written = 0
        while bytes_wanted > 0:
            start = self._hand
            rows, self._hand, counts, size = store.rows_take(
                start, self.numbers, _WRITE_ROWS_MAX, _WRITE_BYTES_MAX, cold=cold
            )
            self._send(rows, counts, start, self._hand)
            written += len(rows) // 2
            bytes_wanted -= size
            if self._hand >= store.leaves:
                self._hand = 0
                break
        return written

    def _send(self, rows: Named, counts: dict[str, int], start: int, stop: int) -> None:
        """Writes rows of leaves home that were taken, ahead of the commit."""
        is_written = False
        try:
            self._put(rows)
            is_written = True
        finally:
            # If an interrupt keeps us from it, rows_take() does it: they are dirty again.
            self.store.rows_done(start, stop, is_written)
        for name, count in counts.items():
            self.counters[name].written_back(count)

    def _put(self, rows: Named) -> None:
        """Writes rows home that the next commit is to make count."""
        assert self.ledger is not None
        if rows:
            self._protect_rows(rows)
            self.ledger.put(rows)

    def _protect_rows(self, rows: Named) -> None:
        if self._frozen:
            self._protect({int.from_bytes(name[:4]) for name in rows[::2] if name is not None})

    def _protect(self, leaves: Iterable[int]) -> None:
        """Tells who has frozen the state that rows of leaves are about to change, or to go."""
        guards: list[Guard] = [one.guard for one in self._frozen if one.guard is not None]
        if guards:
            for leaf in leaves:
                for guard in guards:
                    guard.protect(leaf)

    def _rows_of(self, blocks: bytes) -> RowsByKey:
        """The rows of a leaf's blocks, by the number of their state and their key."""
        rows: RowsByKey = {}
        for block in Block.each(blocks):
            number = self.numbers[block.name]
            for key, row in zip(block.key_list(), block_rows(block), strict=True):
                rows[number, key] = row
        return rows

    # ---- Commits

    def commit(self, key_groups: tuple[range, ...], positions: Sequence[Position]) -> None:
        """Makes everything since the last commit durable at once, with what it belongs to."""
        ledger, store = self.ledger, self.store
        assert ledger is not None
        with self._lock:
            ledger.settle()
            subgroups = store.subgroups
            groups = key_groups
            if self.shut_leaves:
                # They may come back, and must not have been passed over.
                shut = {leaf // subgroups for leaf in self.shut_leaves}
                groups = group_ranges({*shut, *(group for part in groups for group in part)})
            if not groups:
                return
            bytes_max = self._commit_bytes
            rounds = 0
            while (taken := store.rows_moment(self.numbers, bytes_max)) is None:
                self._hand = 0
                self._write_back(1 << 62, cold=False)
                rounds += 1
                if rounds == _COMMIT_ROUNDS:
                    bytes_max = 1 << 62  # they write faster than the home does, and must wait
            rows, counts = taken
            is_written = False
            self._evictions += 1  # answers on their way may be of rows that are moved
            try:
                self._protect_rows(rows)
                leaves = leaf_ranges(groups, subgroups)
                ledger.commit(groups, leaves, rows, positions, self._commit_bytes)
                is_written = True
            finally:
                self._evictions += 1
                store.rows_done(0, store.leaves, is_written)
            for name, count in counts.items():
                self.counters[name].written_back(count)

    @property
    def _commit_bytes(self) -> int:
        share = (self.budget or 0) // _COMMIT_SHARE
        return max(_COMMIT_BYTES_MIN, min(_COMMIT_BYTES_MAX, share))

    def rollback(self, key_groups: tuple[range, ...]) -> None:
        """Back to the last commit, in these key-groups."""
        ranges = leaf_ranges(key_groups, self.store.subgroups)
        ledger = self.ledger
        assert ledger is not None
        with ExitStack() as folds:
            for lock in [*self._fold_locks.values()]:  # a fold must not write what it read before
                folds.enter_context(lock)
            self._rollback(ledger, ranges)

    def _rollback(self, ledger: Ledger, ranges: tuple[range, ...]) -> None:
        with self._lock:
            self._protect(leaf for part in ranges for leaf in part)
            with ledger.lock:  # or a sibling's commit that fails would leave us half rolled back
                ledger.settle()  # before anything is given up
                self._evictions += 1  # answers on their way are of the time before
                for part in ranges:
                    self.store.mark(part.start, part.stop, "absent")
                ledger.rollback(ranges)
                self._evictions += 1
            self._timerless.update(leaf for part in ranges for leaf in part)
            self._load_timerless()

    def drop_rows(self) -> None:
        """Deletes the rows of leaves at home that others have by now."""
        with self._lock:
            if (ledger := self.ledger) is not None and ledger.dropping:
                self._protect([*ledger.dropping])
                ledger.drop()

    # ---- Whole states

    def clear(self, raw: State) -> None:
        """Drops all entries of a state in the leaves that are this provider's."""
        self.load_leaves(self.leaves())
        with self._lock:
            self._evictions += 1  # answers on their way are of the time before
            for leaf in self.leaves():
                self.load_leaves((leaf,))
                if self.ledger is not None:
                    self._protect((leaf,))
                    self.ledger.clear(leaf, self.numbers[raw.name])
                self.store.clear(raw, leaf, leaf + 1, blind=True)
            self._evictions += 1  # and those asked for meanwhile

    def leaves(self) -> Iterator[int]:
        """The leaves that are this provider's."""
        store, shut = self.store, self.shut_leaves
        # In this order: one that was handed over is marked as away before it is no longer shut.
        return (
            leaf
            for leaf in range(store.leaves)
            if leaf not in shut and store.residency(leaf) != "away"
        )

    def scan(self, raw: State) -> Iterator[tuple[bytes, Any]]:
        """All entries of a state as (encoded key, value), each leaf as it is when reached."""
        for leaf in self.leaves():
            yield from self.scan_leaf(raw, leaf)

    def scan_leaf(self, raw: State, leaf: int) -> Iterator[tuple[bytes, Any]]:
        # First what is here, then what is at home. The other way round, an entry that is written
        # home and evicted in between would be in neither.
        self.load_leaves((leaf,))
        was_whole = self.store.residency(leaf) == "whole"
        seen: set[bytes] = set()
        blocks = self.store.encode_leaf(leaf, raw)
        if self.store.residency(leaf) == "away":
            return  # it was handed over meanwhile: what is still at home is of the past
        for block in Block.each(blocks):
            for (key, value), gone in zip(block, block.marks or repeat(0), strict=False):
                seen.add(key)
                if not gone:
                    yield key, value
        # Asked before and after: an eviction may have come in between.
        if self.ledger is None or (was_whole and self.store.residency(leaf) == "whole"):
            return
        for key, row in self.ledger.load(leaf, self.numbers[raw.name]):
            if key in seen:
                continue
            value, stamp = split_stamp(raw.kind, row)
            if raw.timed and stamp is None:
                # Memory may know that it has expired: ask for it as anybody would.
                found = self.settle(raw, raw.get_encoded, raw.codec.decode(key))
                if found is not None:
                    yield key, native_read(raw.kind, found)
            elif not self._is_expired(raw, stamp):
                yield key, read_value(raw.kind, value)

    def bring_timers(self) -> None:
        """Brings timers here that are elsewhere: they must be in sight to fire."""
        if self._timerless:
            self._load_timerless()
        loading = self.loading
        if loading is not None:
            loading.bring_timers()

    def _load_timerless(self) -> None:
        with self._lock:
            leaves = [leaf for leaf in self._timerless if self.store.residency(leaf) != "away"]
            self.load_timers(leaves)
            self._timerless.clear()  # not before: the home may fail, and is asked again

    def load_timers(self, leaves: Iterable[int]) -> None:
        """Brings all timers of leaves here: they must be in sight to fire."""
        for raw in self.store.states():
            if raw.kind == "timers" and raw.name in self.numbers:
                self.load_state(raw, leaves)

    def load_state(self, raw: State, leaves: Iterable[int]) -> None:
        """Brings all entries of a state here that are in some leaves."""
        if self.ledger is None:
            for leaf in leaves:
                if (loading := self.loading) is None:
                    return
                loading.load_state(raw.name, leaf)
            return
        for leaf in leaves:
            with self._lock:
                if self.store.residency(leaf) == "whole":
                    continue
                for key, row in self.ledger.load(leaf, self.numbers[raw.name]):
                    self._install(raw, key, row)

    def sweep(self) -> int:
        """Removes all expired entries, at home too; how many."""
        self.load_leaves(self.leaves())
        removed = self.store.sweep(1 << 62)
        home = self.ledger
        for raw in self.store.states():
            if home is None or not raw.timed or raw.name not in self.numbers:
                continue
            for leaf in self.leaves():
                removed += self._sweep_home(home, raw, leaf)
        return removed

    def _sweep_home(self, home: Ledger, raw: State, leaf: int) -> int:
        # Memory may have a younger version of such a row, but then it is yet to be written.
        number = self.numbers[raw.name]
        with self._lock:
            expired = [
                row_name(leaf, number, key)
                for key, row in home.load(leaf, number)
                if self._is_expired(raw, split_stamp(raw.kind, row)[1])
            ]
            self._put([part for name in expired for part in (name, None)])
        return len(expired)

    # ---- Moving leaves

    def set_budget(self, budget: int) -> None:
        """Changes how much memory may hold."""
        with self._lock:
            self.budget = budget
            self._limit()
            self._trim()

    def _limit(self) -> None:
        self.store.limit(0 if self.budget is None else self._bytes_max)

    @property
    def _bytes_max(self) -> int:
        """What memory may hold: the budget, or what works at all if that is less."""
        return max(self.budget or 0, _BUDGET_MIN)

    def _trim(self) -> None:
        """Makes room if memory is above the budget, after something that succeeded.

        If the home fails now, that must not look as if what was done had failed; whoever needs
        room next will be told.
        """
        if self.budget is None or self.ledger is None or self.store.bytes_used <= self._bytes_max:
            return
        try:
            self.make_room(None)
        except HomeError:
            self.failures += 1

    def give(
        self,
        target: "Residence",
        ranges: Sequence[range],
        before_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """Hands leaves over: by moving them if both have the same home, else by way of rows.

        If it fails, the leaves are where they were. before_arrival: called when all rows are at
        the target's home, and before they count there.
        """
        if self.ledger is target.ledger:
            target.share_source(self)
            self.move_leaves(target, ranges)
            try:
                target.load_timers(leaf for part in ranges for leaf in part)
            except BaseException:
                self.share_source(target)  # what was left here may all be here by now
                target.move_leaves(self, ranges)
                self.resume_loading()
                raise
            finally:
                target.resume_loading()
            return
        first, second = sorted((self, target), key=id)
        with first._lock, second._lock:
            # Out of reach first: what is written to them from here on must not be lost.
            aside = self._aside()
            self.move_leaves(aside, ranges)
            try:
                if target.ledger is None:
                    aside._load_whole(ranges)
                    aside.move_leaves(target, ranges)
                else:
                    aside._copy_rows(target, ranges, before_arrival)
            except BaseException:
                for part in ranges:
                    target.store.mark(part.start, part.stop, "away")
                aside.move_leaves(self, ranges)
                raise
            if self.ledger is not None:
                leaves = [leaf for part in ranges for leaf in part]
                self.ledger.came.difference_update(leaves)
                self.ledger.dropping.update(leaves)

    def forget_given(self) -> bool:
        """Deletes the rows of what was given away. If the home fails, flush() tries again."""
        try:
            self.drop_rows()
        except HomeError:
            self.failures += 1
            return False
        return True

    def _aside(self) -> "Residence":
        """A residence with the same states and times that has no leaves."""
        aside = Residence(empty_twin(self.store, self.store.time("event")), self.ledger, None)
        aside.schemas, aside.numbers, aside.counters = self.schemas, self.numbers, self.counters
        return aside

    def move_leaves(self, target: "Residence", ranges: Sequence[range]) -> None:
        """Moves leaves from store to store: no entry is touched. All of them, or none.

        Leaves that are not whole must be at home or at the source of the target too. If not, they
        are loaded first.
        """
        leaves = [leaf for part in ranges for leaf in part]
        self.load_from_peers(ranges)
        if not self._has_source_of(target):
            self.load_leaves(leaves)
        first, second = sorted((self, target), key=id)
        with first._lock, second._lock:
            if not self._has_source_of(target):
                self.load_leaves(leaves)  # one may have come in the meantime
            self._protect(leaves)
            self._evictions += 1
            target._evictions += 1
            target.store.limit(0)  # what is too much is evicted afterwards
            try:
                for part in ranges:
                    self.store.move(target.store, part.start, part.stop)
            except BaseException:
                # An interrupt may have come right after a move: see where each range is.
                self.store.limit(0)
                for part in ranges:
                    if len(part) and self.store.residency(part.start) == "away":
                        target.store.move(self.store, part.start, part.stop)
                raise
            finally:
                self._limit()
                target._limit()

    def _has_source_of(self, target: "Residence") -> bool:
        """Whether leaves that are not whole can move there: what is not here is at hand there."""
        here, there = self.sources, target.sources
        if here is None or there is None:
            return here is there
        return here.pull is there.pull and not here.has_push and not there.has_push

    def _load_whole(self, ranges: Sequence[range]) -> None:
        """Brings all entries of leaves here."""
        home = self.ledger
        assert home is not None
        states = declare(self.store, self.schemas)
        for leaf in (leaf for leaves in ranges for leaf in leaves):
            if self.store.residency(leaf) != "whole":
                install_rows(states, self._rows_at_home(home, leaf))
                self.store.mark(leaf, leaf + 1, "whole")

    def _rows_at_home(self, home: Ledger, leaf: int) -> Rows:
        return (
            (number, key, row)
            for number in range(len(self.schemas))
            for key, row in home.load(leaf, number)
        )

    def _copy_rows(
        self, target: "Residence", ranges: Sequence[range], before_arrival: Callable[[], None]
    ) -> None:
        """Writes leaves to the target's home, where they are from then on."""
        ledger, subgroups = target.ledger, self.store.subgroups
        assert ledger is not None
        here = {raw.name for raw in self.store.states()}
        arrival = ledger.begin_arrival(
            tuple(range(part.start // subgroups, part.stop // subgroups) for part in ranges)
        )
        for leaf in (leaf for part in ranges for leaf in part):
            is_whole = self.store.residency(leaf) == "whole"
            rows: Rows = (
                (target.numbers[name], key, row)
                for name, number in self.numbers.items()
                if self.ledger is not None and not (is_whole and name in here)
                for key, row in self.ledger.load(leaf, number)
            )
            merged = rows_over(target._rows_of(self.store.encode_leaf(leaf)), rows)
            target._protect((leaf,))
            ledger.replace(leaf, _named(leaf, merged))
        for part in ranges:
            target.store.mark(part.start, part.stop, "absent")
        target.load_timers(leaf for part in ranges for leaf in part)
        before_arrival()
        try:
            ledger.end_arrival(arrival)
        except BaseException:
            ledger.void_arrival(arrival)  # it may have been written all the same
            raise

    # ---- Leaves that another process takes over (migration/)

    def shut(self, ranges: Sequence[range]) -> None:
        """Refuses all operations on leaves from now on, and keeps what they hold."""
        with self._lock:
            done: list[range] = []
            try:
                for part in ranges:
                    self.store.set_gate(part.start, part.stop, "shut")
                    done.append(part)
            except BaseException:
                self.reopen(done)
                raise
            for part in ranges:
                self.shut_leaves.update(part)
            if self.ledger is not None:
                self.ledger.came.difference_update(chain.from_iterable(ranges))

    def reopen(self, ranges: Sequence[range]) -> None:
        """Takes leaves back that were shut."""
        with self._lock:
            for part in ranges:
                self.store.set_gate(part.start, part.stop, "open")
                self.shut_leaves.difference_update(part)
                self._doomed.difference_update(part)

    def doom(self, leaf: int) -> None:
        """Another process has a leaf that was shut: free_doomed() may free it."""
        with self._lock:
            if leaf in self.shut_leaves:
                self._doomed.add(leaf)

    def doomed(self) -> list[int]:
        """The leaves that free_doomed() may free."""
        with self._lock:
            return sorted(self._doomed)

    def free_doomed(self, leaf: int) -> None:
        """Frees a leaf that is doomed. One that has come back is not."""
        with self._lock:
            if leaf in self._doomed:
                self._drop_kept(leaf)
                if self.ledger is not None and leaf not in self.ledger.came:
                    self.ledger.dropping.add(leaf)

    def let_in(self, ranges: Sequence[range]) -> None:
        """Leaves are about to come back from the process that they were handed over to.

        What was kept of them is of no use any more, and must not be freed when they are here.
        """
        with self._lock:
            for part in ranges:
                for leaf in self._doomed.intersection(part):
                    self._drop_kept(leaf)

    def _drop_kept(self, leaf: int) -> None:
        self.store.mark(leaf, leaf + 1, "away")
        self.shut_leaves.discard(leaf)
        self._doomed.discard(leaf)

    def forget_shut(self) -> None:
        """Nothing is being handed over any more, and nothing is ours."""
        with self._lock:
            self.shut_leaves.clear()
            self._doomed.clear()

    def encode_shut(
        self, leaf: int, state: State | None, since: int, pack_id: bytes, place: int
    ) -> bytes:
        """The blocks of a leaf that was shut, wherever its entries are, bound to a place.

        since: only what changed after that epoch, where that is known.
        """
        if self.store.residency(leaf) != "whole":
            if self.ledger is not None:
                blocks = bytearray(self._encode_completed(self.ledger, leaf, state))
                seal(blocks)
                bind(blocks, pack_id, place)
                return bytes(blocks)
            self.load_leaves((leaf,))
            if (residency := self.store.residency(leaf)) != "whole":
                # What is not here must never be taken for what is empty.
                raise LeaseError(f"leaf {leaf} cannot be read out: it is {residency}. Ask again.")
        return self.store.encode_bound(leaf, state, since, pack_id, place)

    def _encode_completed(self, home: Ledger, leaf: int, state: State | None) -> bytes:
        with self._lock:
            here, rows = self.store.encode_leaf(leaf), self._rows_at_home(home, leaf)
            name = None if state is None else state.name
            return self._assembly_now().over_rows(leaf, here, rows, name)

    def _assembly_now(self) -> Assembly:
        """One with the types that the states have now; they change when one is declared anew."""
        ttls = [raw.ttl_settings for raw in self.store.states()]
        types = (self.store.types(), ttls, tuple(self.schemas))
        if self._assembly is None or self._assembly[0] != types:
            self._assembly = types, Assembly.beside(self.store, self.schemas, None)
        return self._assembly[1]

    def fill_home(self, source: PullSource, leaves: Iterable[int]) -> None:
        """Writes what a source has of leaves home, in place of what is there, leaf by leaf."""
        ledger = self.ledger
        assert ledger is not None
        assembly = Assembly.beside(self.store, self.schemas, self.store.time("event"))
        for leaf in leaves:
            blocks = assembly.over_steps(leaf, b"", source.read_leaf(leaf))
            ledger.replace(leaf, _named(leaf, self._rows_of(blocks)))
        ledger.home.flush()

    # ---- The state at one moment

    def freeze(
        self,
        plan: Callable[[Store], "array[int] | None"] = lambda store: None,
        bytes_max: int = 0,
        with_shut: bool = False,
    ) -> Frozen:
        """The state as it is now, here and at home; see Frozen.

        plan: decides at that moment from which epoch on the changes of each leaf are wanted.
        bytes_max: how far writers may encode ahead of the reader.
        with_shut: leaves that are shut too, for they are about to be opened again.
        """
        with self._lock, ExitStack() as undo:
            since = plan(self.store)
            loading = self.loading
            source = None if loading is None else loading.sources.to_read()
            if source is not None:
                undo.callback(source.release)
            rows: Guard | HomeSnapshot | None = None
            if self.ledger is not None and (rows := self.ledger.snapshot()) is not None:
                undo.callback(rows.close)
            snapshot = self.store.snapshot(since, bytes_max)
            undo.callback(snapshot.close)
            if with_shut:
                snapshot.add_shut()
            if self.ledger is not None and rows is None:
                rows = Guard(self.ledger, range(len(self.schemas)), snapshot)
            frozen = Frozen(
                self.store, snapshot, since, source, rows, [*self.schemas], self._frozen_closed
            )
            self._frozen.append(frozen)
            undo.pop_all()
            return frozen

    def _frozen_closed(self, frozen: Frozen) -> None:
        with self._lock:
            self._frozen.remove(frozen)

    def is_folding_here(self) -> bool:
        """Whether this thread is in the function of a reducing or aggregating state."""
        return any(lock._is_owned() for lock in [*self._fold_locks.values()])

    def fold_lock(self, name: str) -> Any:
        """The lock of a reducing or aggregating state, whichever handle it is used through."""
        with self._lock:
            return self._fold_locks.setdefault(name, threading.RLock())

    def close(self) -> None:
        """Forgets the store. What was not flushed is lost with it."""
        with self._lock:
            loading, self.loading = self.loading, None
        if loading is not None:
            loading.stop()
        if self._assembly is not None:
            self._assembly[1].close()
        self.store.close()


def _named(leaf: int, rows: RowsByKey) -> list[bytes | None]:
    """Rows of a leaf as one flat list; deletions are left out."""
    named: list[bytes | None] = []
    for (number, key), row in rows.items():
        if row is not None:
            named += (row_name(leaf, number, key), row)
    return named
