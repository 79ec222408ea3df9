"""Loading: how leaves come to a provider that has not got them all yet.

A pull source (one or several checkpoints, sources.py) has leaves as chains of blocks. A leaf that
has not come yet is absent or, if something was written to it, partial; what is here is newer than
what the source has. To load it, its chain is read from the newest step to the oldest, and each
step fills in only what is not here yet. So changes and deletions made here in the meantime win,
and loading can be broken off at any step and started again.

A leaf comes when somebody touches it, or when the threads in the background reach it. Of several
that want a leaf, one reads it and the others wait. A leaf that cannot be read (damage, say) raises
whenever it is touched; the others are not affected.

If only a few entries of a leaf are wanted, these are *picked*: its chain is read and verified, and
nothing else of it is decoded. The leaf stays partial. To pick again costs reading and verifying
again, so after a few times the leaf is loaded. How often, and from how many entries on, is an
estimate that was not measured. What is wrong with a leaf is told by loading it.

A push source is a process that hands its leaves over. It is not read but brings leaves, also by
itself (fill()), and of a large leaf perhaps single entries first (spread()). It is told what is
here (taken()).

    locks    a leaf's lock is held while it is read and filled in. Nothing else is locked under
             it, so whoever holds the residence's lock may wait for this one, and never the reverse.
    types    the store may have a state with another type than the chain: int has become float, a
             time to live was added. Blocks are rewritten to what the store has. That may change
             when the user declares a state that has come already; retype() keeps all leaves from
             being filled in meanwhile.
"""

import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from itertools import compress, islice
from time import monotonic
from typing import Any

from statekit.checkpoint.reader import Chain, read_chains, read_runs
from statekit.errors import (
    CheckpointError,
    ClosedError,
    CorruptBlockError,
    DamagedError,
    HomeError,
    MemoryLimitError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    StateKitError,
    StorageError,
)
from statekit.native import Store
from statekit.native.block import block_pieces, fit_blocks
from statekit.native.buffers import BufferSlice
from statekit.native.chains import ChainSegment, Left, are_known, pick_entries
from statekit.native.columns import Column, column
from statekit.native.kinds import residency_filter
from statekit.native.states import State
from statekit.residence.sources import PullSource, PushSource, Sources, Wanted

_PICKS_LOCAL, _PICKS_FAR = 4, 1  # times that entries of a leaf are picked, before it is loaded
_PICKS_COUNTED = 255  # at most
_PICK_LEAF_BYTES = 4096  # smaller leaves are loaded
_PICK_WORTH_BYTES = 96  # of a leaf, that are loaded while one entry is picked: an estimate
_PICK_BYTES = 8 << 20  # that are read at once to pick from
_RUN_LEAVES = 16  # that are loaded at once: so many fewer calls, and no touch waits for long
_RUN_LEAF_BYTES = 64 << 10  # larger leaves are loaded one by one, where calls cost little
LEAF_LOCKS = 64  # leaves that can be read at the same time; a power of two
_THREADS_MAX = 8  # in the background
_RETRY_SECONDS = 1.0  # after which leaves move in again into a home that failed
STOP_SECONDS_MAX = 5.0  # that close() waits for a read on its way
_HERE = ("whole", "away")  # leaves that nothing is to be done about
_IS_MISSING = residency_filter("absent", "partial")  # the others


def _is_small(chain: Chain) -> bool:
    """Whether a leaf has at most one segment, with all that it has, and not much."""
    segments = chain.segments
    return chain.size <= _RUN_LEAF_BYTES and len(segments) <= 1


def _with_locks(locks: Sequence[threading.Lock], then: Callable[[], list[int]]) -> list[int]:
    """Not by an ExitStack: an interrupt in the middle of that leaves a lock held."""
    if not locks:
        return then()
    with locks[0]:
        return _with_locks(locks[1:], then)


class Loading:
    """The leaves of a provider that are still to come; see KVProvider.loading."""

    def __init__(
        self, store: Store, sources: Sources, on_end: Callable[[], None], background: bool = True
    ) -> None:
        self.sources = sources
        #: What went wrong, by leaf. A leaf that is read at another try is here no more. (-1: a home
        #: could not be told that all leaves are there.)
        self.errors: dict[int, StateKitError] = {}
        self.background = background  # whether threads bring what nobody asks for
        self._store = store
        self._on_end = on_end  # called when the threads have been everywhere
        # By leaf, and one for single entries.
        self._leaf_locks = [threading.Lock() for _ in range(LEAF_LOCKS + 1)]
        self._filling = [threading.Lock() for _ in range(LEAF_LOCKS + 1)]  # taken after these
        self._lock = threading.Lock()  # of all below
        self._threads: set[threading.Thread] = set()
        self._hand = 0  # the next leaf that the threads look at
        self._is_stopped = False
        self._stopping = threading.Event()  # the same, to be waited for
        self._is_idle = threading.Event()  # no thread is running
        self._is_idle.set()
        self._picks = bytearray(store.leaves)  # how often entries of each leaf were picked
        self._unfit: set[str] = set()  # states that nothing can be picked of
        self._loads_left = 0  # of leaves, before it pays to look whether all are here
        self._run_max = _RUN_LEAVES  # leaves that are loaded at once
        self._picks_max = _PICKS_FAR if sources.pull and sources.pull.is_far else _PICKS_LOCAL

    # ---- What the user sees

    @property
    def leaves_total(self) -> int:
        """The leaves that the provider owns."""
        stats = self._store.stats()
        return stats.whole + stats.partial + stats.absent

    @property
    def leaves_done(self) -> int:
        """Those of them that are here as a whole."""
        return self._store.stats().whole

    @property
    def leaves_left(self) -> int:
        """The leaves that are still to come.

        Those too that are being handed over to another process. They are not the provider's any
        more, but it is asked for them, and without the source it could not answer.
        """
        if left := self.leaves_owned_left:
            return left  # which leaves shut ones out; that does not matter before the end
        return sum(
            self._store.residencies(array("I", range(self._store.leaves))).translate(_IS_MISSING)
        )

    @property
    def leaves_owned_left(self) -> int:
        """The same without those that are being handed over."""
        stats = self._store.stats()
        return stats.partial + stats.absent

    @property
    def fraction(self) -> float:
        """From 0 to 1, by leaves."""
        total = self.leaves_total
        return self.leaves_done / total if total else 1.0

    def __repr__(self) -> str:
        try:
            done, total = self.leaves_done, self.leaves_total
        except ClosedError:
            return "<Loading, closed>"
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"<Loading: {done} of {total} leaves{failed}>"

    @property
    def is_stopped(self) -> bool:
        """Whether it was ended before everything was here, or since."""
        return self._is_stopped

    # ---- One leaf

    def is_here(self, leaf: int) -> bool:
        """Whether nothing is to be done about a leaf: it is whole, or another store's."""
        return self._store.residency(leaf) in _HERE

    def _take_in(self, leaf: int, steps: Sequence[bytes | BufferSlice]) -> None:
        """Puts what a source has of a leaf under what is here. The leaf's locks are held."""
        self._store.decode_chain(leaf, steps)

    def load(self, leaf: int) -> None:
        """Brings a leaf here, whole, unless it is here or another store's."""
        if self.is_here(leaf):
            return
        sources = self.sources
        push = sources.push_of(leaf) if sources.has_push else None
        if push is not None:
            # Not under the leaf's lock: another leaf that shares it must not wait for this process.
            with self._watched(leaf):
                push.bring((leaf,), self)
            return
        with self._leaf_locks[leaf % LEAF_LOCKS]:
            pull = self.sources.pull
            if pull is None or self.is_here(leaf):
                return
            with self._watched(leaf):
                steps = pull.read_leaf(leaf)
                with self._filling[leaf % LEAF_LOCKS]:
                    self._take_in(leaf, steps)
        if not self.background and not self._threads:  # else the last of these looks
            self._loads_left -= 1
            if self._loads_left <= 0:
                self._end_if_done()

    def _load_run(self, leaves: Sequence[int]) -> list[int]:
        """Brings small leaves here with few reads and native calls. Returns those that are left.

        One by one they would take more time in Python than in C. Whatever is unusual about a leaf,
        or wrong with it, is left to load(): a chain of several steps, compressed blocks, other
        types, damage.
        """
        pull = self.sources.pull
        if pull is None or len(leaves) < 2:
            return [*leaves]
        try:
            chains = [chain for chain in pull.locate(leaves) if _is_small(chain)]
            runs = read_runs(chains)
        except StateKitError:
            return [*leaves]
        if not runs:
            return [*leaves]

        def fill() -> list[int]:
            done: list[int] = []
            for run in runs:
                ours = run.only(self._is_pulled)
                count = self._store.decode_run(run.data, run.pack_id, run.offset, ours)
                done += ours[: 3 * count : 3]
            return done

        slots = sorted({chain.leaf % LEAF_LOCKS for chain in chains})
        done = set(self._with_slots(slots, fill))
        for leaf in self.errors.keys() & done:
            with self._watched(leaf):
                pass  # it was read at another try
        if done and not self.background and not self._threads:
            self._loads_left -= len(done)
            if self._loads_left <= 0:
                self._end_if_done()
        return [leaf for leaf in leaves if leaf not in done]

    def _end_if_done(self) -> None:
        """Where no threads look for leaves that are left: lets go of the source after the last."""
        self._loads_left = self.leaves_left  # before so many loads it is not the end
        if not self._loads_left:
            self.end()

    def load_many(self, leaves: Iterable[int]) -> None:
        """Brings leaves here, in as few requests as the sources can do it."""
        wanted: Iterable[int] = leaves
        if self.sources.has_push:
            wanted = [leaf for leaf in leaves if not self.is_here(leaf)]
            if len(wanted) > 1:
                for push, some in self.sources.by_push(wanted).items():
                    push.bring(some, self)
        for some in self._runs(wanted):
            for leaf in self._load_run(some):
                self.load(leaf)

    def _runs(self, leaves: Iterable[int]) -> Iterator[list[int]]:
        """Those that are not here, ascending, some at a time; one by one if they are not joined."""
        if self._run_max < 2:
            yield from ([leaf] for leaf in leaves)
            return
        left = iter(sorted({leaf for leaf in leaves if not self.is_here(leaf)}))
        while some := [*islice(left, self._run_max)]:
            yield some

    def fill(self, leaf: int, steps: Sequence[bytes | BufferSlice], source: PushSource) -> None:
        """Takes in a leaf that a process brings, if it is still from there that it is to come.

        The leaf may have been given back meanwhile, and be expected again in another hand-over:
        then these are not its contents.
        """
        with self._leaf_locks[leaf % LEAF_LOCKS]:
            if not self._is_from(leaf, source):
                return
            if self.is_here(leaf):
                if self._store.residency(leaf) != "away":
                    source.taken(leaf, steps)  # an interrupt kept who took it in from saying so
                return
            with self._watched(leaf):
                self._take_in_from(leaf, steps, source)
                source.taken(leaf, steps)

    def take_over(self, leaf: int, twin: Store, source: PushSource) -> None:
        """Takes in a leaf as fill() does, out of a store that has all of it.

        No entry is touched, if nothing has come before, nobody reads what comes (a checkpoint that
        was begun before), and the types are those that are here.
        """
        with self._leaf_locks[leaf % LEAF_LOCKS]:
            if not self._is_from(leaf, source) or self.is_here(leaf):
                return
            try:
                with self._filling[leaf % LEAF_LOCKS]:
                    steps = self._move_in_whole(leaf, twin, source)
            except (SchemaError, OccupiedError, MemoryLimitError):
                steps = [twin.encode_leaf(leaf)]
                with self._watched(leaf):
                    self._take_in_from(leaf, steps, source)
            source.taken(leaf, steps)

    def _move_in_whole(self, leaf: int, twin: Store, source: PushSource) -> list[bytes]:
        """Puts a leaf of another store in place of one of which nothing is here.

        Returns what it was, if somebody reads that.
        """
        with source.attaching() as is_read:
            steps = [twin.encode_leaf(leaf)] if is_read else []
            twin.move(self._store, leaf, leaf + 1)
        return steps

    def _take_in_from(
        self, leaf: int, steps: Sequence[bytes | BufferSlice], source: PushSource
    ) -> None:
        try:
            with self._filling[leaf % LEAF_LOCKS]:
                self._take_in(leaf, steps)
        except BaseException:
            if self._store.residency(leaf) == "partial":  # some of it: so it takes writes
                source.taken(leaf, None)
            raise

    def _is_from(self, leaf: int, source: PushSource) -> bool:
        return self.sources.push_of(leaf) is source and source.expects(leaf)

    def fetch(self, raw: State, keys: Sequence[bytes]) -> bool:
        """Brings entries of a state here, or their leaves, whichever is less work.

        False if some leaf comes from nowhere.
        """
        sources = self.sources
        for leaf, wanted in self._store.by_leaf(raw, keys).items():
            push = sources.push_of(leaf) if sources.has_push else None
            if push is None:
                self._fetch_pulled(raw, leaf, wanted)
            elif not self.is_here(leaf):
                with self._watched(leaf):
                    push.bring_keys((leaf,), {raw.name: wanted}, self)
        return sources.has_push or sources.pull is not None

    def bring(self, raw: State, keys: Column, wanted: Mapping[int, int]) -> None:
        """Brings entries of a batch here that are not: so many of each leaf. Or these leaves."""
        to_load = set(wanted)
        group: list[Chain] = []
        group_bytes = 0
        for chain in self._worth_picking(raw, wanted):
            to_load.discard(chain.leaf)
            group.append(chain)
            group_bytes += chain.size
            if group_bytes >= _PICK_BYTES:
                to_load.update(self._pick(raw, keys, group))
                group, group_bytes = [], 0
        if group:
            to_load.update(self._pick(raw, keys, group))
        if to_load:
            self.load_many(sorted(to_load))

    def _worth_picking(self, raw: State, wanted: Mapping[int, int]) -> list[Chain]:
        """The leaves of which so few entries are wanted that the leaf would be more work."""
        sources, picks, picks_max = self.sources, self._picks, self._picks_max
        if sources.pull is None or raw.name in self._unfit:
            return []
        leaves = [leaf for leaf in sorted(wanted) if picks[leaf] < picks_max]
        if sources.has_push:
            leaves = [leaf for leaf in leaves if sources.push_of(leaf) is None]
        return [
            chain
            for chain in sources.pull.locate(leaves)
            if chain.size > max(_PICK_LEAF_BYTES, wanted[chain.leaf] * _PICK_WORTH_BYTES)
        ]

    def _fetch_pulled(self, raw: State, leaf: int, keys: Sequence[bytes]) -> None:
        """Brings entries of a leaf here out of the checkpoint; or the leaf.

        Of several that want the same one reads, and the others wait.
        """
        chains = self._worth_picking(raw, {leaf: len(keys)})
        if chains:
            with self._leaf_locks[leaf % LEAF_LOCKS]:
                if not self._is_pulled(leaf) or are_known(raw, keys):
                    return
                if self._picks[leaf] < self._picks_max:
                    segments = self._read(chains)
                    with self._filling[leaf % LEAF_LOCKS]:
                        if segments and not any(
                            self._fill_picked(raw, column(keys, "b"), segments, chains)
                        ):
                            return
        self.load(leaf)

    def _pick(self, raw: State, keys: Column, chains: Sequence[Chain]) -> list[int]:
        """Brings the entries of keys in these leaves. Returns those to be loaded instead."""
        segments = self._read(chains)  # nobody waits for it: what a source has never changes
        if not segments:
            return [chain.leaf for chain in chains]  # some of them can be read, perhaps

        def fill() -> list[int]:
            ours = [chain for chain in chains if self._is_pulled(chain.leaf)]
            leaves = {chain.leaf for chain in ours}
            held = [segment for segment in segments if segment.leaf in leaves]
            left = self._fill_picked(raw, keys, held, ours)
            return left.to_load + left.unfit

        slots = sorted({chain.leaf % LEAF_LOCKS for chain in chains})
        return self._with_slots(slots, fill)

    def _with_slots(self, slots: Sequence[int], then: Callable[[], list[int]]) -> list[int]:
        """Does something while the locks of these leaves are held."""
        locks = [self._leaf_locks[slot] for slot in slots]
        return _with_locks([*locks, *(self._filling[slot] for slot in slots)], then)

    def _is_pulled(self, leaf: int) -> bool:
        """Whether the leaf is not whole, and what it lacks is in a checkpoint."""
        sources = self.sources
        return (
            sources.pull is not None
            and not self.is_here(leaf)
            and not (sources.has_push and sources.push_of(leaf) is not None)
        )

    def _read(self, chains: Sequence[Chain]) -> list[ChainSegment]:
        """[] if something is wrong: loading leaf by leaf will tell what."""
        try:
            return read_chains(chains)
        except CheckpointError:
            return []

    def _fill_picked(
        self, raw: State, keys: Column, segments: Sequence[ChainSegment], chains: Sequence[Chain]
    ) -> Left:
        """With the locks of the leaves held."""
        for chain in chains:
            self._picks[chain.leaf] = min(self._picks[chain.leaf] + 1, _PICKS_COUNTED)
        left = pick_entries(self._store, raw, keys, segments)
        if left.unfit:  # most likely its type was another: then so will all others be
            self._unfit.add(raw.name)
        return left

    def load_keys(self, leaves: Sequence[int], wanted: Wanted) -> None:
        """Brings entries of leaves here, or the leaves, whichever is sooner."""
        found = self._store.residencies(array("I", leaves))
        missing = [*compress(leaves, found.translate(_IS_MISSING))]
        sources = self.sources
        for push, some in sources.by_push(missing).items():
            push.bring_keys(some, wanted, self)
        for leaf in missing:
            if sources.push_of(leaf) is None:
                self.load(leaf)

    def spread(self, blocks: bytes, leaves: Iterable[int], source: PushSource) -> None:
        """Takes in entries of leaves, of which the others are still to come from the source.

        Under a lock of its own, so that nobody waits who takes in a leaf, nor for one: whichever
        of the two comes first, what is in the leaf stays.
        """
        with self._leaf_locks[LEAF_LOCKS], self._filling[LEAF_LOCKS]:
            ours = [leaf for leaf in leaves if self._is_from(leaf, source)]
            try:
                touched, error = self._store.spread(blocks, ours)
            except SchemaError:
                fitting = fit_blocks(blocks, self._store.types())
                touched, error = self._store.spread(fitting, ours)
            for leaf in touched:
                source.taken(leaf, None)
        if error is not None:
            raise error

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing comes meanwhile."""
        with ExitStack() as stack:
            for lock in self._leaf_locks:
                stack.enter_context(lock)
            yield

    @contextmanager
    def standing_still_within(self, seconds: float) -> Iterator[bool]:
        """The same for who must not wait for ever; whether it is so."""
        until = monotonic() + seconds
        with ExitStack() as stack:
            for lock in self._leaf_locks:
                if not lock.acquire(timeout=max(0.0, until - monotonic())):
                    yield False
                    return
                stack.callback(lock.release)
            yield True

    def stand_still(self, leaf: int) -> None:
        """Waits for who decides just now, while nothing comes, whose the leaf is."""
        with self._leaf_locks[leaf % LEAF_LOCKS]:
            pass

    def join(self, source: PushSource, leaves: Iterable[int]) -> None:
        """Leaves that were another store's come from this process from now on."""
        self.sources = self.sources.with_push(source, leaves)

    def load_state(self, name: str, leaf: int) -> None:
        """Brings only the entries of one state here; the leaf remains as it is otherwise."""
        store = self._store
        if self.sources.push_of(leaf) is not None:
            return  # see PushSource.bring_timers
        with self._leaf_locks[leaf % LEAF_LOCKS]:
            pull = self.sources.pull
            if pull is None or self.is_here(leaf):
                return
            with self._watched(leaf):
                for blocks in pull.read_leaf(leaf):
                    for block, piece in block_pieces(blocks):
                        if block.name == name:
                            with self._filling[leaf % LEAF_LOCKS]:
                                store.decode_fitting(leaf, bytes(piece), "under")

    @contextmanager
    def _watched(self, leaf: int) -> Iterator[None]:
        """Keeps the error of reading a leaf, or forgets an earlier one."""
        try:
            yield
        except NotOwnedError:
            raise  # nothing is wrong with the leaf
        except ClosedError:
            # If it came another way meanwhile, it may have been the last one that was missing: then
            # its peer was let go of, and whoever was still asking it finds a closed channel.
            if self.is_here(leaf):
                return
            raise
        except StateKitError as error:
            if self.is_here(leaf):
                return  # it came another way, or went: what was read here does not matter
            if isinstance(error, CorruptBlockError):
                raise self._damage(leaf, error) from error
            self._keep(leaf, error)
            raise
        if self.errors.pop(leaf, None) is not None and not self.errors and self.background:
            self.start()  # perhaps it was the last one that was missing

    def _damage(self, leaf: int, error: CorruptBlockError) -> DamagedError:
        """The exception for a block whose checksum was right: it was written like that."""
        source: PushSource | PullSource | None = self.sources.push_of(leaf) or self.sources.pull
        assert source is not None, f"leaf {leaf} came from nowhere"
        origin = source.checkpoint_of(leaf) if isinstance(source, PullSource) else None
        damage = DamagedError(
            f"leaf {leaf} of {origin or source!r} holds a block that is not "
            f"well-formed ({error}). {source.advice}",
            file="" if origin is None else origin.url,
        )
        self._keep(leaf, damage)
        return damage

    def _keep(self, leaf: int, error: StateKitError) -> None:
        # A copy, which has no traceback: that would hold the blocks that were being read, and us.
        # (And a memoryview in such a circle crashes the garbage collector of CPython 3.11.)
        self.errors[leaf] = copy(error)

    def raise_first(self) -> None:
        """Raises the first error, if there is one."""
        for error in [*self.errors.values()]:
            raise copy(error)

    def retype(self, name: str, kind: Any, timed: bool) -> Any:
        """Store.retype() while nothing is being filled in."""
        with ExitStack() as stack:
            for lock in self._filling:
                stack.enter_context(lock)
            return self._store.retype(name, kind, timed)

    # ---- In the background

    def start(self) -> None:
        """Has threads bring what is not here; those that run start over."""
        with self._lock:
            self._hand = 0
            if self._is_stopped or self._threads:
                return
            self._is_idle.clear()
            cores = os.cpu_count() or 1
            pull = self.sources.pull  # threads read; a process that hands over brings by itself
            is_far = pull is not None and pull.is_far
            count = _THREADS_MAX if is_far else min(max(cores, 2), _THREADS_MAX)
            self._threads = {
                threading.Thread(target=self._run, name="statekit-loading", daemon=True)
                for _ in range(count)
            }
            for thread in self._threads:
                thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Until the threads have been everywhere; False if they have not in time."""
        until = None if timeout is None else monotonic() + timeout
        if not self._is_idle.wait(timeout):
            return False
        return all(
            push.wait_here(None if until is None else max(0.0, until - monotonic()))
            for push in self.sources.pushes
        )

    def bring_timers(self, watermark: int) -> None:
        """Brings leaves that are handed over and may have timers that are due.

        (Timers of a checkpoint came first.)
        """
        for push in self.sources.pushes:
            push.bring_timers(watermark, self)

    @property
    def next_due(self) -> int | None:
        """No timer of leaves that are handed over is due earlier; None if none is to come."""
        dues = (push.next_due for push in self.sources.pushes)
        return min((due for due in dues if due is not None), default=None)

    def end(self) -> None:
        """To be called when the last leaf has come: lets go of the source."""
        with suppress(ClosedError):
            self._on_end()

    def _run(self) -> None:
        while leaves := self._next():
            for leaf in self._load_some(leaves):
                try:
                    self.load(leaf)
                except (MemoryLimitError, HomeError):
                    self._hand = self._store.leaves  # so would all others say
                    break
                except StateKitError:
                    continue  # it is among the errors, or the leaf went away
                except Exception as error:  # nobody foresaw it, and nobody must wait for ever
                    self.errors[leaf] = StorageError(
                        f"leaf {leaf} of {self.sources!r} could not be read: {error!r}. "
                        "Touch it to try again."
                    )
        with self._lock:
            is_last = not self._threads
        try:
            if is_last and not self._is_stopped:
                with suppress(ClosedError):  # just now: then there is nothing left to end
                    self._on_end()
        finally:
            with self._lock:
                if not self._threads:
                    self._is_idle.set()
        is_failed = any(isinstance(error, HomeError) for error in [*self.errors.values()])
        if is_last and is_failed and self.background and not self._stopping.wait(_RETRY_SECONDS):
            self.start()  # the home may be back, or have room again

    def _load_some(self, leaves: list[int]) -> list[int]:
        try:
            return self._load_run(leaves)
        except Exception:
            return leaves  # one by one, they tell what is wrong

    def _next(self) -> list[int]:
        """Some leaves that are not here; none if there is none, and then the thread is done."""
        store = self._store
        found: list[int] = []
        with self._lock:
            with suppress(ClosedError):
                while not self._is_stopped and self._hand < store.leaves:
                    leaf, self._hand = self._hand, self._hand + 1
                    if self.is_here(leaf) or self.sources.push_of(leaf) is not None:
                        continue
                    found.append(leaf)
                    if len(found) >= self._run_max:
                        return found
            if found:
                return found
            # Under the same hold: start() finds threads that will look again, or none.
            self._threads.discard(threading.current_thread())
        return found

    def stop(self) -> None:
        """Ends the threads and lets go of the source. What is not here does not come any more."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._stopping.set()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(STOP_SECONDS_MAX)
        self.release_sources()

    def release_sources(self) -> None:
        """The last step of stop()."""
        self.sources.release()
