"""Fetching: what is not here is brought, and an operation is done once its entries are here.

From a home come entries, from a source leaves (sources.py, loading.py). Where there are both, a
leaf of the source moves in first (moving_in.py): then it is at home, and its entries come from
there.

The danger is an answer of the home that is older than what happened since it was asked for:

    thread A asks the home for k and gets v0
    thread B fetches k too, changes it to v1; k is written home and evicted
    thread A installs v0: v1 is lost

So evictions are counted, and an answer is installed only if none came between; the lock makes
the comparison and the installation one step. After two vain tries the question is asked with the
lock held.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from time import monotonic, perf_counter
from typing import Any, TypeVar

from statekit.assignment import group_ranges
from statekit.errors import (
    BadValueError,
    HomeError,
    MemoryLimitError,
    StateKitError,
    UnknownEntryError,
)
from statekit.homes import Row
from statekit.homes.ledger import Ledger
from statekit.homes.rows import NUMBER_KINDS, STAMP_MARK
from statekit.native.columns import Column, route
from statekit.native.states import State
from statekit.residence.assemble import bad_row, read_row
from statekit.residence.loading import Loading
from statekit.residence.moving_in import MovingIn
from statekit.residence.sources import PullSource, Sources, Wanted
from statekit.residence.writeback import WriteBack

T = TypeVar("T")

_TRIES_UNLOCKED = 2
_FETCHES_MAX = 4  # for one operation, before it is done without regard to the budget
_VAIN_MIN = 32  # entries of a leaf asked for in vain, before its keys at home are read, ...
_VAIN_ROWS = 8  # ... if there are no more than so many for each that was asked for
_FILTER_KEY_BYTES = 6  # that a key at home takes once it is learned, about
BATCH_RECORDS_MAX = 16384  # of a batch, are brought here together
AWAITED = (UnknownEntryError, MemoryLimitError)  # what an operation may wait for


def _unknown_records(raw: State, keys: Column) -> Sequence[int]:
    """The records of a batch whose entries are not here.

    If a record is refused (its key-group is another's), the operation itself is to say so, and
    which records it has done before. So only those before it are looked at.
    """
    while True:
        try:
            raw.contains_many(keys)
            return ()
        except UnknownEntryError as unknown:
            # Not the exception: its frames lead back to who keeps it, by way of memoryviews, and
            # CPython 3.11 crashes on collecting such a circle.
            return unknown.records
        except StateKitError as error:
            if not error.record:
                return ()
            keys = keys.slice(0, error.record)


class Fetching(WriteBack):
    """The part of a Residence (residence.py) that brings what is not here."""

    # ---- Doing an operation that may need what is not here

    def call_when_here(self, raw: State, call: Callable[..., T], *args: Any) -> T:
        """Does an operation, and again until its entry is here and there is room for it."""
        try:
            return call(*args)
        except AWAITED as error:
            awaited = error
        return self.call_again(awaited, raw, call, *args)

    def call_again(
        self,
        awaited: UnknownEntryError | MemoryLimitError,
        raw: State,
        call: Callable[..., T],
        *args: Any,
    ) -> T:
        """call_when_here() of a call that has said what it waits for."""
        fetches = 0
        while fetches < _FETCHES_MAX:
            if isinstance(awaited, UnknownEntryError):
                (key,) = awaited.keys
                self.fetch_one(raw, raw.codec.encode(key))
                fetches += 1
            else:
                try:
                    self.make_room(awaited)
                except MemoryLimitError:  # there is none to be made
                    if self.ledger is None or self._bytes_max >= (self.whole_budget or 0):
                        raise
                    # The budget was split. What fitted before that must fit still.
                    return self._call_beyond(self.whole_budget or 0, raw, call, *args)
            try:
                return call(*args)
            except AWAITED as error:
                awaited = error
        # The room that was made may have been that of the entry itself, over and over.
        return self._call_beyond(0, raw, call, *args)

    def _call_beyond(self, limit: int, raw: State, call: Callable[..., T], *args: Any) -> T:
        """Does an operation under another limit of memory (0: none), and makes room after it."""
        with self._lock:
            self.store.limit(limit)
            try:
                return call(*args)
            except UnknownEntryError as unknown:
                (key,) = unknown.keys
                self.fetch_one(raw, raw.codec.encode(key))
                return call(*args)
            finally:
                self._limit()
                self._trim()

    @contextmanager
    def gathered(self, raw: State, keys: Column, needs_values: bool) -> Iterator[None]:
        """Brings the entries of a batch here and keeps them here while the batch runs.

        needs_values: the operation reads what is there. Without it nothing needs to be fetched.
        Memory may pass the budget meanwhile, by what one batch needs.
        """
        leaves: list[int] | None = None
        while True:
            if self.loading is not None:
                # Without the lock: the process that a leaf comes from may be slow, and who takes
                # the leaf back from us needs locks that come before this one.
                leaves = leaves or sorted({*route(keys, raw.codec, self.store.leaves).tolist()})
                self.load_leaves(leaves)
            with self._lock:
                loading = self.loading
                is_here = loading is None or (leaves and all(map(loading.is_here, leaves)))
                if not is_here and keys.n:
                    continue  # some of them are expected since: they come first
                self.store.limit(0)
                try:
                    if needs_values and (records := _unknown_records(raw, keys)):
                        self.fetch(raw, list(dict.fromkeys(map(keys.encoded, records))))
                    yield
                finally:
                    self._limit()
                self._trim()
                return

    @contextmanager
    def loaded(self, raw: State, keys: Column) -> Iterator[None]:
        """Brings the entries of a batch here, and lets no leaves come while it runs."""
        self._bring(raw, keys)
        with self._lock:
            self._bring(raw, keys)  # a merge may have brought leaves in the meantime
            yield

    def _bring(self, raw: State, keys: Column) -> None:
        loading = self.loading
        if loading is None:
            return
        records = _unknown_records(raw, keys)
        if records:
            keys = keys.slice(0, records[-1] + 1)  # what comes behind may be refused
            leaves = route(keys, raw.codec, self.store.leaves).tolist()  # no view, in a frame
            loading.bring(raw, keys, Counter(map(leaves.__getitem__, records)))

    @contextmanager
    def timed_batch(self, raw: State) -> Iterator[None]:
        """Counts how long a batch takes."""
        began = perf_counter()
        yield
        self.counters[raw.name].batch_latency.observe(perf_counter() - began)

    # ---- From the home

    def fetch_one(self, raw: State, key: bytes, leaf: int | None = None) -> None:
        """fetch() of one entry, for the single-key path. leaf: of the key, if that is known."""
        home = self.ledger
        if home is not None:
            began = perf_counter()
            if leaf is None:
                leaf = raw.leaf_of_encoded(key)
            if self.loading is not None:
                self.load_leaves((leaf,))
            evictions = self._evictions
            value = home.get_one(leaf, self.numbers[raw.name], key)
            plain = value  # what most rows are: as the store takes it, so in fewer steps
            if value is None or raw.kind in NUMBER_KINDS or value[:2] == STAMP_MARK:
                plain = None
            with self._lock:
                if evictions == self._evictions and (
                    (plain is not None and raw.install_plain(key, plain))
                    or self._installs(raw, key, value)
                ):
                    if value is None:
                        self._asked_in_vain(raw, home, leaf)
                    self.counters[raw.name].fetched(1, perf_counter() - began)
                    return
        self.fetch(raw, [key])

    def _asked_in_vain(self, raw: State, home: Ledger, leaf: int) -> None:
        """The home had no such entry. If that happens often, its keys are learned instead."""
        place = leaf << 16 | self.numbers[raw.name]
        count = self._vain[place] = self._vain.get(place, 0) + 1
        if count < _VAIN_MIN or count & (count - 1):
            return  # at powers of two only
        rows_max = _VAIN_ROWS * count
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
        if self.loading is not None:
            self.load_leaves(sorted({leaf for leaf, _, _ in rows}))
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

    # ---- From sources

    @property
    def sources(self) -> Sources | None:
        """What leaves come from that are neither here nor at home."""
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
        self.loading = Loading(self.store, Sources(source), self.end_loading, background)

    def move_in_from(
        self,
        source: PullSource,
        leaves: Iterable[int],
        on_moved_in: Callable[[], None],
        background: bool,
    ) -> None:
        """Says that leaves, which are absent, are not at home but at a source.

        on_moved_in: called when all of them are at home, as often as it takes.
        """
        ledger = self.ledger
        assert ledger is not None
        assert self.loading is None
        coming = sorted(leaves)
        self._on_moved_in = on_moved_in
        ledger.coming.update(coming)
        for run in group_ranges(coming):
            self.store.set_gate(run.start, run.stop, "expected")
        loading = MovingIn(self, Sources(source), self.end_loading, background)
        loading.expect(coming)
        self.loading = loading

    def share_source(self, other: "Fetching") -> None:
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

    def end_loading(self) -> None:
        """Lets go of the source if everything is here."""
        if self.ledger is not None:
            self._end_moving_in()
            return
        with self._lock:
            loading = self.loading
            if loading is None or not self._is_all_here(loading):
                return
            try:
                loading.stop()  # first: who finds no loading may rely on the source being let go of
            finally:
                self.loading = None

    @staticmethod
    def _is_all_here(loading: Loading) -> bool:
        # If one of several hand-overs is done, to let go of all of them now would leave the other
        # peers with leaves that they keep for us for ever.
        pushes = loading.sources.pushes
        return not loading.leaves_left and all(push.is_settled for push in pushes)

    def _end_moving_in(self) -> None:
        """The same for a home: first its record forgets the source."""
        loading = self.loading
        with self._ending:
            if loading is None or loading.is_stopped or not self._is_all_here(loading):
                return
            try:
                self._on_moved_in()
                self._on_moved_in = lambda: None
                loading.errors.pop(-1, None)
            except HomeError as error:
                self.failures += 1  # the home knows still where its leaves came from: no harm
                loading.errors[-1] = copy(error)  # without a traceback
                return
        with self._lock:
            if self.loading is loading:
                if not self._is_all_here(loading):
                    return  # more is expected since
                assert isinstance(loading, MovingIn)
                loading.open_rest()
                self.loading = None
        loading.stop()

    def forget_coming(self) -> None:
        """Nothing is ours any more: what has not moved in stays where it is."""
        loading = self.loading
        if self.ledger is not None and isinstance(loading, MovingIn):
            self.loading = None
            self.ledger.coming.difference_update(loading.coming)
            loading.stop()

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
            if self.awaits_peers and not loading.leaves_owned_left:
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

    # ---- Timers and other states as a whole

    def bring_timers(self, watermark: int) -> None:
        """Brings timers here that are elsewhere and may be due: they must be in sight to fire."""
        loading = self.loading
        if loading is not None:
            loading.bring_timers(watermark)  # first: with a home, they are at home then
        if self._timerless:
            self._load_timerless()

    @property
    def next_due_elsewhere(self) -> int | None:
        """No timer that another process still has is due earlier; None if there is none."""
        loading = self.loading
        return None if loading is None else loading.next_due

    def _load_timerless(self) -> None:
        with self._lock:
            # Leaves that move in meanwhile may add to it. One that is shut may come back.
            found = [leaf for leaf in [*self._timerless] if leaf not in self.shut_leaves]
            self.load_timers(leaf for leaf in found if self.store.residency(leaf) != "away")
            self._timerless.difference_update(found)  # not before: the home may fail

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
            if (loading := self.loading) is not None:
                loading.load_state(raw.name, leaf)
            with self._lock:
                if leaf in self.ledger.coming:
                    continue  # it has no such entries, or it would have moved in
                if self.store.residency(leaf) == "whole":
                    continue
                for key, row in self.ledger.load(leaf, self.numbers[raw.name]):
                    self._install(raw, key, row)
