"""Loading: how the leaves of a lazily restored provider come to it.

A *source* (one or several checkpoints) has leaves as chains of blocks, and never changes. A leaf
that has not come yet is absent or, if something was written to it, partial; what is here is newer
than what the source has. To load it, its chain is read from the newest step to the oldest, and
each step fills in only what is not here yet. So changes and deletions made here in the meantime
win, and loading can be broken off at any step and started again.

A leaf comes when somebody touches it, or when the threads in the background reach it. Of several
that want a leaf, one reads it and the others wait. A leaf that cannot be read (damage, say) raises
whenever it is touched; the others are not affected.

A source may also be a process that hands its leaves over (migration/arrival.py). It differs in
three ways: it is not read but brings leaves, also by itself (fill()); of a large leaf single
entries can come first (spread()); and it forgets a leaf once it was told that it is here
(taken()).

    locks    a leaf's gate is held while it is read and filled in. Nothing else is locked under
             it, so whoever holds the residence's lock may wait for a gate, and never the reverse.
    types    the store may have a state with another type than the chain: int has become float, a
             time to live was added. Blocks are rewritten to what the store has. That may change
             when the user declares a state that has come already; retype() keeps all leaves from
             being filled in meanwhile.
"""

import os
import threading
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from itertools import compress
from time import monotonic
from typing import Any, TypeAlias

from statekit.checkpoint.reader import Checkpoint, open_checkpoint, read_checkpoint
from statekit.errors import (
    ClosedError,
    CorruptBlockError,
    DamagedError,
    MemoryLimitError,
    MissingFileError,
    NoCheckpointError,
    NotOwnedError,
    SchemaError,
    StateKitError,
    StorageError,
    shorten,
)
from statekit.format.manifest import manifest_name
from statekit.native import Block, Store
from statekit.native.block import rewrite
from statekit.native.buffers import Part
from statekit.native.kinds import residency_filter
from statekit.native.store import DecodeMode
from statekit.storage import Pin

_OPEN_TRIES_MAX = 8  # newest checkpoints that may be retired between being found and being pinned
_GATES = 64  # leaves that can be read at the same time; a power of two
_THREADS_MAX = 8  # in the background
_SLICED_MAX = 8  # leaves of the checkpoint that are kept while they are being sliced
_STOP_SECONDS_MAX = 5.0  # that close() waits for a read on its way
_HERE = ("whole", "away")  # leaves that nothing is to be done about
_IS_MISSING = residency_filter("absent", "partial")  # the others

Wanted: TypeAlias = Mapping[str, Sequence[bytes]]  # encoded keys, by state
NO_LOCK: AbstractContextManager[None] = nullcontext()
Types: TypeAlias = dict[str, tuple[str, bool]]  # of native states, by name: kind, timed


class LeafSource(ABC):
    """What leaves are restored from. Shared by providers; closed by the last one to let go."""

    is_far = False  # reading is mostly waiting, so that many threads at once pay
    is_peer = False  # a process that hands leaves over: nothing is written before something came
    advice = "Restore an older checkpoint: restore(..., at=number)."  # if a leaf is damaged

    def __init__(self) -> None:
        self._users = 1
        self._users_lock = threading.Lock()

    @abstractmethod
    def read_leaf(self, leaf: int) -> list[bytes]:
        """The leaf's blocks, newest step first; each step has one block of a state at most.

        They are of the provider's leaves, but of the types that they were stored with.
        """

    def checkpoint_of(self, leaf: int) -> Checkpoint | None:
        """The checkpoint that has this very leaf; None if the leaf is made of another's part."""
        return None

    def filled(self, leaves: int) -> Iterable[range]:
        """The leaves, of so many, that may have entries; all unless it knows better."""
        return (range(leaves),)

    def part_of(self, leaf: int) -> "LeafSource":
        """The source that this leaf comes from, where several are joined."""
        return self

    def without_peers(self) -> "LeafSource | None":
        """What remains of it if peers are left out."""
        return None if self.is_peer else self

    def pruned(self) -> "LeafSource | None":
        """What remains of it when parts are let go of that nothing more comes from."""
        return self

    def expects(self, leaf: int) -> bool:
        """Whether the leaf is still to come from here."""
        return True

    def bring(self, leaves: Sequence[int], loading: "Loading") -> None:
        """Has loading.fill() take in leaves, in as few requests as possible. If is_peer."""
        raise AssertionError(f"{self!r} is to be read")

    def bring_keys(self, leaves: Sequence[int], wanted: Wanted, loading: "Loading") -> None:
        """Has loading.spread() take in entries of leaves, or fill() these if that is better."""
        raise AssertionError(f"{self!r} is to be read")

    def bring_timers(self, loading: "Loading") -> None:  # noqa: B027
        """Has loading take in the leaves that have timers. If is_peer; else they came first."""

    def taken(self, leaf: int, steps: Sequence[bytes | Part] | None) -> None:  # noqa: B027
        """Told when something of a leaf is here; steps: all of it, and this is what it was."""

    def wait_here(self, timeout: float | None) -> bool:
        """Until nothing is still to come that comes by itself; False if it has not in time."""
        return True

    @property
    def is_settled(self) -> bool:
        """Whether it can be let go of when all leaves are here. A peer must know of them first."""
        return True

    def share(self) -> "LeafSource":
        """The same source once more; release() must follow."""
        with self._users_lock:
            assert self._users > 0, "a source that was let go of"
            self._users += 1
        return self

    def release(self) -> None:
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self._close()

    def _close(self) -> None:  # noqa: B027  (not abstract: there may be nothing to do)
        """Lets go of files. Nobody uses the source any more."""


class JoinedSource(LeafSource):
    """A source for some leaves, and another one for all others. Both are its own."""

    def __init__(self, first: LeafSource, leaves: Iterable[int], second: LeafSource) -> None:
        super().__init__()
        self._leaves = frozenset(leaves)
        self._first, self._second = first, second
        self.is_far = first.is_far or second.is_far
        self.is_peer = first.is_peer or second.is_peer

    def part_of(self, leaf: int) -> LeafSource:
        return (self._first if leaf in self._leaves else self._second).part_of(leaf)

    def without_peers(self) -> LeafSource | None:
        if not self.is_peer:
            return self
        first, second = self._first.without_peers(), self._second.without_peers()
        if first is None or second is None:
            return first or second
        return JoinedSource(first.share(), self._leaves, second.share())

    def pruned(self) -> LeafSource | None:
        first, second = self._first.pruned(), self._second.pruned()
        if first is None or second is None:
            return first or second
        return JoinedSource(first, self._leaves, second)

    def read_leaf(self, leaf: int) -> list[bytes]:
        return self.part_of(leaf).read_leaf(leaf)

    def checkpoint_of(self, leaf: int) -> Checkpoint | None:
        return self.part_of(leaf).checkpoint_of(leaf)

    def bring(self, leaves: Sequence[int], loading: "Loading") -> None:
        for part, some in self._by_part(leaves).items():
            if part.is_peer:
                part.bring(some, loading)

    def bring_keys(self, leaves: Sequence[int], wanted: Wanted, loading: "Loading") -> None:
        for part, some in self._by_part(leaves).items():
            if part.is_peer:
                part.bring_keys(some, wanted, loading)

    def _by_part(self, leaves: Sequence[int]) -> dict[LeafSource, list[int]]:
        parts: dict[LeafSource, list[int]] = {}
        for leaf in leaves:
            parts.setdefault(self.part_of(leaf), []).append(leaf)
        return parts

    def bring_timers(self, loading: "Loading") -> None:
        self._first.bring_timers(loading)
        self._second.bring_timers(loading)

    def taken(self, leaf: int, steps: Sequence[bytes | Part] | None) -> None:
        self.part_of(leaf).taken(leaf, steps)

    def wait_here(self, timeout: float | None) -> bool:
        until = None if timeout is None else monotonic() + timeout
        if not self._first.wait_here(timeout):
            return False
        return self._second.wait_here(None if until is None else max(0.0, until - monotonic()))

    @property
    def is_settled(self) -> bool:
        return self._first.is_settled and self._second.is_settled

    def share(self) -> LeafSource:
        # Part by part: a peer must know whether somebody still reads what it hands over.
        return JoinedSource(self._first.share(), self._leaves, self._second.share())

    def _close(self) -> None:
        self._first.release()
        self._second.release()

    def __repr__(self) -> str:
        return f"<{self._first!r} and {self._second!r}>"


def open_pinned(place: Any, at: Any) -> tuple[Checkpoint, Pin]:
    """A checkpoint that is not deleted from now on."""
    for _ in range(_OPEN_TRIES_MAX):
        found = open_checkpoint(place, at)
        storage = found.storage
        try:
            pin = storage.pin(manifest_name(found.number))
        except MissingFileError:
            continue  # retired in between: then there is a newer one, or an error will say so
        try:
            # Once more: only what is read under the pin is sure to stay.
            checkpoint = read_checkpoint(storage, found.number)
            checkpoint.seen = found.seen
            return checkpoint, pin
        except BaseException:
            pin.release()
            raise
    raise NoCheckpointError(
        f"the checkpoints of {shorten(place)} are deleted as quickly as they are found. "
        "Keep more of them (keep=), or restore a copy of the directory."
    )


class CheckpointSource(LeafSource):
    """Checkpoints as a source, for a store of so many leaves: as many as theirs, or more.

    Their manifests are pinned, so that nothing they refer to is deleted meanwhile; the pins are
    the source's from then on.
    """

    def __init__(self, pinned: Sequence[tuple[Checkpoint, Pin]], leaves: int) -> None:
        super().__init__()
        self._leaves = leaves
        self._spans: list[tuple[range, int, Checkpoint]] = []  # of our leaves, times finer, whose
        self._sliced: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()
        self._sliced_lock = threading.Lock()
        self._pins = [pin for _, pin in pinned]
        self.is_far = not all(one.storage.is_local for one, _ in pinned)
        for checkpoint, _ in pinned:
            width = leaves // checkpoint.key_group_count  # of a key-group, in our leaves
            finer = leaves // (checkpoint.key_group_count * checkpoint.subgroups)
            assert finer >= 1, "leaves are sliced, never joined"
            for part in checkpoint.key_groups:
                span = range(part.start * width, part.stop * width)
                self._spans.append((span, finer, checkpoint))

    def filled(self, leaves: int) -> Iterable[range]:
        for checkpoint in {id(one): one for _, _, one in self._spans}.values():
            finer = leaves // checkpoint.manifest.leaves
            run = range(0)
            for leaf in dict.fromkeys(checkpoint.manifest.segments.leaves.tolist()):
                start = leaf * finer
                if start == run.stop and run:
                    run = range(run.start, start + finer)
                    continue
                yield run
                run = range(start, start + finer)
            yield run

    def _find(self, leaf: int) -> tuple[int, Checkpoint] | None:
        for span, finer, checkpoint in self._spans:
            if leaf in span:
                return finer, checkpoint
        return None

    def checkpoint_of(self, leaf: int) -> Checkpoint | None:
        found = self._find(leaf)
        return found[1] if found is not None and found[0] == 1 else None

    def read_leaf(self, leaf: int) -> list[bytes]:
        found = self._find(leaf)
        if found is None:
            return []
        finer, checkpoint = found
        if finer == 1:
            return checkpoint.read_leaf(leaf)
        steps = []
        for blocks in self._read_coarse(checkpoint, leaf // finer):
            step = [
                rewrite(bytes(piece), leaf=leaf, leaves=self._leaves)
                for _, piece in block_pieces(blocks)
            ]
            steps.append(b"".join(step))
        return steps

    def _read_coarse(self, checkpoint: Checkpoint, leaf: int) -> list[bytes]:
        """A leaf of the checkpoint. Its slices are wanted one after the other: it is kept."""
        name = (id(checkpoint), leaf)
        with self._sliced_lock:
            if name in self._sliced:
                return self._sliced[name]
        steps = checkpoint.read_leaf(leaf)
        with self._sliced_lock:
            self._sliced[name] = steps
            while len(self._sliced) > _SLICED_MAX:
                self._sliced.popitem(last=False)
        return steps

    def _close(self) -> None:
        for pin in self._pins:
            pin.release()
        self._pins = []

    def __repr__(self) -> str:
        shown = {id(one): f"{one.url!r} number {one.number}" for _, _, one in self._spans}
        return f"<CheckpointSource: {', '.join(shown.values()) or 'nothing'}>"


def fit_blocks(blocks: bytes, types: Types) -> bytes:
    """Blocks as a store with these types takes them."""
    parts: list[Any] = []
    is_changed = False
    for block, piece in block_pieces(blocks):
        kind, timed = types.get(block.name, (block.kind, block.is_timed))
        if (kind, timed) == (block.kind, block.is_timed):
            parts.append(piece)
        else:
            is_changed = True
            parts.append(rewrite(bytes(piece), kind=kind, timed=timed))
    return b"".join(parts) if is_changed else blocks


def block_pieces(blocks: bytes) -> Iterator[tuple[Block, memoryview]]:
    """The blocks that lie one after the other, and the bytes of each."""
    view = memoryview(blocks)
    at = 0
    for block in Block.each(blocks):
        yield block, view[at : at + block.size]
        at += block.size


def decode_steps(
    store: Store,
    leaf: int,
    steps: Sequence[bytes | Part],
    lock: AbstractContextManager[Any] = NO_LOCK,
) -> None:
    """Fills a chain in under what a leaf has, which is whole then.

    lock: held while types are compared and a block is taken in.
    """
    for blocks in steps[:-1]:
        with lock:
            _decode(store, leaf, blocks, "under")
    with lock:
        _decode(store, leaf, steps[-1] if steps else b"", "under_all")


def _decode(store: Store, leaf: int, blocks: bytes | Part, mode: DecodeMode) -> None:
    try:
        store.decode_leaf(leaf, blocks, mode)
    except SchemaError:
        # Types differ, which is rare. The store has taken in nothing, so looking first is not worth
        # it: that takes a fifth of the time that a restore takes.
        store.decode_leaf(leaf, fit_blocks(bytes(blocks), _types(store)), mode)
        # What is here now is not what the checkpoint has: entries have got stamps, say, which must
        # not be given anew with every restore. So the next checkpoint writes the leaf anew.
        store.forget(leaf)


def _types(store: Store) -> Types:
    return {raw.name: (raw.kind, raw.timed) for raw in store.states()}


class Loading:
    """The leaves of a provider that are still to come; see KVProvider.loading."""

    def __init__(
        self, store: Store, source: LeafSource, on_end: Callable[[], None], background: bool = True
    ) -> None:
        self.source = source
        #: What went wrong, by leaf. A leaf that is read at another try is here no more.
        self.errors: dict[int, StateKitError] = {}
        self.background = background  # whether threads bring what nobody asks for
        self._store = store
        self._on_end = on_end  # called when the threads have been everywhere
        self._gates = [threading.Lock() for _ in range(_GATES + 1)]  # one for single entries
        self._filling = [threading.Lock() for _ in range(_GATES + 1)]  # taken after the gate
        self._lock = threading.Lock()  # of all below
        self._threads: set[threading.Thread] = set()
        self._hand = 0  # the next leaf that the threads look at
        self._is_stopped = False
        self._is_idle = threading.Event()  # no thread is running
        self._is_idle.set()

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
    def fraction(self) -> float:
        """From 0 to 1, by leaves."""
        stats = self._store.stats()
        total = stats.whole + stats.partial + stats.absent
        return stats.whole / total if total else 1.0

    def __repr__(self) -> str:
        try:
            done, total = self.leaves_done, self.leaves_total
        except ClosedError:
            return "<Loading, closed>"
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"<Loading: {done} of {total} leaves{failed}>"

    # ---- One leaf

    def load(self, leaf: int) -> None:
        """Brings a leaf here, whole, unless it is here or another store's."""
        if self._store.residency(leaf) in _HERE:
            return
        if self.source.is_peer and self.source.part_of(leaf).is_peer:
            # Not under the gate: another leaf of this gate must not wait for this peer.
            with self._watched(leaf):
                self.source.bring((leaf,), self)
            return
        with self._gates[leaf % _GATES]:
            if self._store.residency(leaf) in _HERE:
                return
            with self._watched(leaf):
                self._fill(leaf, self.source.read_leaf(leaf))

    def load_many(self, leaves: Iterable[int]) -> None:
        """Brings leaves here, in as few requests as the source can do it."""
        wanted: Iterable[int] = leaves
        if self.source.is_peer:
            wanted = [leaf for leaf in leaves if self._store.residency(leaf) not in _HERE]
            if len(wanted) > 1:
                self.source.bring(wanted, self)
        for leaf in wanted:
            self.load(leaf)

    def fill(self, leaf: int, steps: Sequence[bytes | Part], source: LeafSource) -> None:
        """Takes in a leaf that a source brings, if it is still from there that it is to come.

        The leaf may have been given back meanwhile, and be expected again in another hand-over:
        then these are not its contents.
        """
        with self._gates[leaf % _GATES]:
            if self._store.residency(leaf) in _HERE or not self._is_from(leaf, source):
                return
            with self._watched(leaf):
                self._fill(leaf, steps)

    def _is_from(self, leaf: int, source: LeafSource) -> bool:
        return self.source.part_of(leaf) is source and source.expects(leaf)

    def _fill(self, leaf: int, steps: Sequence[bytes | Part]) -> None:
        try:
            decode_steps(self._store, leaf, steps, self._filling[leaf % _GATES])
        except BaseException:
            if self._store.residency(leaf) == "partial":  # some of it: so it takes writes
                self.source.taken(leaf, None)
            raise
        self.source.taken(leaf, steps)

    def fetch(self, state: str, leaf: int, keys: Sequence[bytes]) -> None:
        """Brings entries of a leaf here: only them if it is large and a peer's, else all of it."""
        if not self.source.is_peer or not self.source.part_of(leaf).is_peer:
            self.load(leaf)
        elif self._store.residency(leaf) not in _HERE:
            with self._watched(leaf):
                self.source.bring_keys((leaf,), {state: keys}, self)

    def load_keys(self, leaves: Sequence[int], wanted: Wanted) -> None:
        """Brings entries of leaves here, or the leaves, whichever is sooner."""
        found = self._store.residencies(array("I", leaves))
        missing = [*compress(leaves, found.translate(_IS_MISSING))]
        if self.source.is_peer and missing:
            self.source.bring_keys(missing, wanted, self)
        for leaf in missing:
            if not self.source.part_of(leaf).is_peer:
                self.load(leaf)

    def spread(self, blocks: bytes, leaves: Iterable[int], source: LeafSource) -> None:
        """Takes in entries of leaves, of which the others are still to come from the source.

        Under a gate of its own, so that nobody waits who takes in a leaf, nor for one: whichever
        of the two comes first, what is in the leaf stays.
        """
        with self._gates[_GATES], self._filling[_GATES]:
            ours = [leaf for leaf in leaves if self._is_from(leaf, source)]
            try:
                touched, error = self._store.spread(blocks, ours)
            except SchemaError:
                fitting = fit_blocks(blocks, _types(self._store))
                touched, error = self._store.spread(fitting, ours)
            for leaf in touched:
                source.taken(leaf, None)
        if error is not None:
            raise error

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing comes meanwhile."""
        with ExitStack() as stack:
            for gate in self._gates:
                stack.enter_context(gate)
            yield

    def join(self, source: LeafSource, leaves: Iterable[int]) -> None:
        """Leaves that were another store's come from this source from now on.

        Hand-overs that are done make room: or there would be one more with each, for as long as
        there is always one that is not.
        """
        earlier = self.source.pruned()
        self.source = source if earlier is None else JoinedSource(source, leaves, earlier)

    def load_state(self, name: str, leaf: int) -> None:
        """Brings only the entries of one state here; the leaf remains as it is otherwise."""
        store = self._store
        if self.source.part_of(leaf).is_peer:
            return  # see LeafSource.bring_timers
        with self._gates[leaf % _GATES]:
            if store.residency(leaf) in _HERE:
                return
            with self._watched(leaf):
                for blocks in self.source.read_leaf(leaf):
                    for block, piece in block_pieces(blocks):
                        if block.name == name:
                            with self._filling[leaf % _GATES]:
                                _decode(store, leaf, bytes(piece), "under")

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
            if self._store.residency(leaf) in _HERE:
                return
            raise
        except StateKitError as error:
            if self._store.residency(leaf) in _HERE:
                return  # it came another way, or went: what was read here does not matter
            if isinstance(error, CorruptBlockError):
                raise self._damage(leaf, error) from error
            self._keep(leaf, error)
            raise
        if self.errors.pop(leaf, None) is not None and not self.errors and self.background:
            self.start()  # perhaps it was the last one that was missing

    def _damage(self, leaf: int, error: CorruptBlockError) -> DamagedError:
        """The exception for a block whose checksum was right: it was written like that."""
        origin = self.source.checkpoint_of(leaf)
        damage = DamagedError(
            f"leaf {leaf} of {origin or self.source.part_of(leaf)!r} holds a block that is not "
            f"well-formed ({error}). {self.source.part_of(leaf).advice}",
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
            count = _THREADS_MAX if self.source.is_far else min(max(cores, 2), _THREADS_MAX)
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
        return self.source.wait_here(None if until is None else max(0.0, until - monotonic()))

    def end(self) -> None:
        """To be called when the last leaf has come: lets go of the source."""
        with suppress(ClosedError):
            self._on_end()

    def _run(self) -> None:
        while (leaf := self._next()) is not None:
            try:
                self.load(leaf)
            except MemoryLimitError:
                self._hand = self._store.leaves  # so would all others say
            except StateKitError:
                continue  # it is among the errors, or the leaf went away
            except Exception as error:  # nobody foresaw it, and nobody must wait for ever
                self.errors[leaf] = StorageError(
                    f"leaf {leaf} of {self.source!r} could not be read: {error!r}. "
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

    def _next(self) -> int | None:
        """A leaf that is not here; None if there is none, and then the thread is done."""
        store = self._store
        with self._lock:
            with suppress(ClosedError):
                while not self._is_stopped and self._hand < store.leaves:
                    leaf, self._hand = self._hand, self._hand + 1
                    if store.residency(leaf) in _HERE or self.source.part_of(leaf).is_peer:
                        continue
                    return leaf
            # Under the same hold: start() finds threads that will look again, or none.
            self._threads.discard(threading.current_thread())
        return None

    def stop(self) -> None:
        """Ends the threads and lets go of the source. What is not here does not come any more."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(_STOP_SECONDS_MAX)
        self.source.release()
