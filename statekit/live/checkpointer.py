"""Checkpoints of a provider while it is in use: full, incremental, in the background, periodic.

Taking one has two steps. First, at one moment and under the residence's lock, the state is frozen:
a new epoch begins, and nothing is copied. The caller waits for that. Then blocks are encoded
without the GIL and written as packs. Both happen in a thread of their own, where no signal is
handled: Ctrl-C ends the waiting of the caller, but never cuts the work in half. A caller that is
interrupted cancels the checkpoint that it has asked for, so that nothing of it remains.

A part of a checkpoint that several processes write (checkpoint/parts.py) is taken the same way. It
becomes a lineage once somebody has published it. The next part checks whether that has happened; if
not, it is based on what was published before.

In one directory, one checkpoint is taken after the other. The next one waits for its turn before it
is frozen. (Late parts of a barrier are frozen first: their moment cannot wait.)

A *lineage* makes the next checkpoint in the same directory incremental: it is the last checkpoint
there, and the epoch at which it was frozen. A leaf that did not change since is referred to where
it is. Of a leaf that did, the changes are added to its chain. A leaf whose chain has become long,
or whose changes are half as large as the leaf, is written anew. So the chain of a leaf in the new
checkpoint is

    leaf was    since > 0 (has a lineage)   since = 0
    whole       base's chain + changes      all of it
    not whole,
      source    base's chain + changes      the source's chain + what is here
      home      base's chain + changes      all of it, completed with the home's rows

Changes of a leaf may have been written home in the meantime and evicted: then they are not known
here any more. So with a home, a leaf that changed is always written anew. The lower left case is
rare: the leaf changed between the decision and the freezing. Under the lock nothing is evicted, so
these changes are all here.
"""

import logging
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isqrt
from time import sleep
from typing import Any, NamedTuple, TypeAlias, TypeVar

from statekit import failpoints
from statekit.assignment import leaf_ranges, subtract
from statekit.checkpoint.ownership import Claim, draw_owner
from statekit.checkpoint.packs import read_frames
from statekit.checkpoint.parts import Part, part_of
from statekit.checkpoint.reader import Checkpoint, read_checkpoint
from statekit.checkpoint.retention import check_keep, collect
from statekit.checkpoint.writer import Attempt
from statekit.errors import (
    ArgumentError,
    CheckpointCancelledError,
    CheckpointError,
    MissingFileError,
    NoCheckpointError,
    StateKitError,
    StorageError,
    shorten,
)
from statekit.format.compression import check_compression
from statekit.format.description import plain_metadata
from statekit.format.manifest import Manifest, manifest_name
from statekit.live.job import CheckpointJob, Job, NothingOwnedError, PartJob, cause_of, kept
from statekit.live.periodic import PeriodicCheckpoints
from statekit.metrics import CheckpointMetrics
from statekit.native import Store
from statekit.native.kinds import RESIDENCIES
from statekit.residence.freeze import Frozen
from statekit.residence.residence import Residence
from statekit.schema import StateSchema
from statekit.storage import Storage, open_storage
from statekit.turns import short_turns

R = TypeVar("R", Checkpoint, Part)
J = TypeVar("J", CheckpointJob, PartJob)
Metadata: TypeAlias = dict[str, Any] | Callable[[], dict[str, Any]] | None

CHAIN_MAX = 8  # segments of a leaf; a longer chain costs more to read than it saves
# Of a large leaf, see _chain_max(). C picks from chains of 32 at most (csrc/chain.c).
CHAIN_LONG_MAX = 24
_LARGE_BYTES = 64 << 10  # a leaf from that size on is large
_SEGMENT_WORTH = 1500  # bytes of a leaf whose writing costs as much as half a segment more to read
DELTA_SHARE = 0.5  # if deltas have more than this share of the full segment, write the leaf anew
AHEAD_BYTES = 256 << 20  # how much writers may keep ahead of the disk before they have to wait
_YIELD_SECONDS = 5e-5
_WRITTEN_MAX = 8  # how many parts of a place are remembered until they are known to be published
_TRACKED = "checkpoints"  # among those who need deltas (residence/tracking.py)
_LINEAGES_MAX = 4  # directories; a forgotten one, the oldest, starts with a full checkpoint again
_WHOLE, _PARTIAL, _AWAY = map(RESIDENCIES.index, ("whole", "partial", "away"))

_log = logging.getLogger("statekit")

failpoints.register("checkpoint.freeze", "checkpoint.frozen", "checkpoint.link")


class Holdings(NamedTuple):
    """What a provider has at the moment of a checkpoint."""

    owned: tuple[range, ...]
    schemas: tuple[StateSchema, ...]


@dataclass
class _Lineage:
    checkpoint: Checkpoint
    since: "array[int]"  # per leaf: the epoch as of which the checkpoint has it; 0: write it anew
    epoch: int
    worn: list[int]  # leaves that are written anew because their chains are long


@dataclass
class _Written:
    """A part that was written, and is not known to be published."""

    part: Part
    owned: tuple[range, ...]  # leaves
    epoch: int  # as of which the part has them


class Checkpointer:
    """Takes the checkpoints of one provider."""

    def __init__(self, residence: Residence, lock: Any, holdings: Callable[[], Holdings]) -> None:
        self._residence = residence
        self._provider_lock = lock  # key-groups do not change hands while a state is frozen
        self._holdings = holdings
        self._lock = threading.Lock()
        self._lineages: dict[str, _Lineage] = {}
        self._written: dict[str, list[_Written]] = {}  # by place, oldest first
        self._publisher = ""  # our name among publishers; "" before it is needed
        self._claims: dict[str, Claim] = {}  # by place; kept for ever, or we could come back later
        self._turns = threading.Condition()
        self._jobs: set[Job[Any]] = set()  # those that are not over
        self._writing: dict[str, Job[Any]] = {}  # the job whose turn it is, by place
        self._taken = self._failed = 0
        self._uncleaned: set[tuple[Any, ...]] = set()  # causes that were logged
        self._periodic: list[PeriodicCheckpoints] = []
        self._came: array[int] | None = None  # per leaf: the epoch in which it was taken over

    def _owner(self) -> str:
        self._publisher = self._publisher or draw_owner()
        return self._publisher

    def succeed(self, checkpoint: Checkpoint) -> None:
        """What is here came from a checkpoint: we replace the publisher of its place."""
        with self._lock:
            claim = Claim(self._owner(), checkpoint.seen)
            before = self._claims.setdefault(checkpoint.storage.url, claim)
            if claim.generation < before.generation:  # two from one place: the lower one counts
                self._claims[checkpoint.storage.url] = claim

    def adopt(self, checkpoint: Checkpoint, epoch: int) -> None:
        """What is here came from a checkpoint. Changes after the epoch are changes to it."""
        self._residence.tracking.hold(_TRACKED, epoch)
        self._remember(checkpoint, epoch)

    def came(self, leaves: Sequence[range]) -> None:
        """Leaves were taken over from another provider. The provider's lock is held."""
        store = self._residence.store
        if self._came is None:
            self._came = array("I", bytes(4 * store.leaves))
        for part in leaves:
            self._came[part.start : part.stop] = array("I", [store.epoch]) * len(part)

    def since(self, digest: bytes) -> "array[int] | None":
        """Per leaf: the epoch after which its changes are changes to a checkpoint; 0: all of it is.

        None if we neither took that checkpoint as the last one in some place nor were restored from
        it. The provider's lock is held.
        """
        with self._lock:
            lineages = [*self._lineages.values()]
        for lineage in lineages:
            if lineage.checkpoint.digest == digest:
                return self._changes(self._residence.store, lineage, self._holdings())
        return None

    # ---- Taking one

    def start(
        self,
        url: Any,
        base: Any = "auto",
        compression: str | None = None,
        metadata: Metadata = None,
        storage: Storage | None = None,
        must_own: bool = False,
        gives_way: bool = True,
        choose: Callable[[], tuple[range, ...]] | None = None,
        is_extra: bool = False,
        keep: int | None = None,
    ) -> CheckpointJob:
        """Freezes the state now and writes it in the background. Waits if one is being written.

        gives_way: threads that use the state have priority. False if somebody waits for the result.
        must_own: NothingOwnedError if no key-group is owned at that moment.
        choose: called at that moment, says which of the owned key-groups belong into it.
        is_extra: the next one cannot be based on it; it has key-groups that are shut, too. The
        caller has the provider's lock.
        keep: how many of the newest checkpoints stay; None removes none.
        """
        storage = open_storage(url) if storage is None else storage
        if compression is not None:
            check_compression(compression)
        if keep is not None:
            check_keep(keep)
        if callable(metadata):
            # Called as late as possible, but before the state is frozen, since metadata must not be
            # newer than the state. And without a lock, since it may wait for threads that wait for
            # us.
            with self._turns:
                self._turns.wait_for(lambda: storage.url not in self._writing)
            metadata = metadata()
        order = _Order(
            storage, base, compression, plain_metadata(metadata), must_own, gives_way, choose,
            is_extra, keep,
        )  # fmt: skip
        return self._start(order, CheckpointJob(storage.shown, self._wake))

    def start_part(
        self,
        url: Any,
        number: int,
        base: Any = "auto",
        compression: str | None = None,
        gives_way: bool = True,
        choose: Callable[[], tuple[range, ...]] | None = None,
        is_extra: bool = False,
    ) -> PartJob:
        """Like start(), but for a part of checkpoint `number`, which another process publishes."""
        storage = url if isinstance(url, Storage) else open_storage(url)
        check_compression(compression)
        if type(number) is not int:
            raise ArgumentError(f"{shorten(number)} is no number of a checkpoint. Pass an int.")
        manifest_name(number)
        order = _Order(
            storage, base, compression, {}, False, gives_way, choose, is_extra, None, number
        )
        return self._start(order, PartJob(storage.shown, self._wake))

    def _start(self, order: "_Order", job: J) -> J:
        run: _Run | None = None
        try:
            if order.is_extra:
                run = self._freeze(job, order)
                job._is_frozen.set()
            threading.Thread(
                target=self._carry_out, args=(job, order, run), name="statekit-checkpoint"
            ).start()
            job._is_frozen.wait()
            if job.error is not None and not job._is_taken_up:
                raise job.error
            return job
        except BaseException:
            job.cancel()
            if run is not None:
                run.frozen.close()
            raise

    def take(self, url: Any, base: Any = "auto", **options: Any) -> Checkpoint:
        """Takes one and waits for it. If the base is gone, a full one is taken instead."""
        result = _waited_for(self.start(url, base, **options), options.get("choose"))
        return self.take(url, None, **options) if result is None else result

    def take_part(self, url: Any, number: int, base: Any = "auto", **options: Any) -> Part:
        """Like take(), but for a part."""
        job = self.start_part(url, number, base, **options)
        result = _waited_for(job, options.get("choose"))
        return self.take_part(url, number, None, **options) if result is None else result

    # ---- Whose turn it is

    def _take_turn(self, job: Job[Any], url: str) -> None:
        with self._turns:
            self._jobs.add(job)
            self._turns.wait_for(lambda: url not in self._writing or job._is_cancelled)
            job._check_cancelled()
            self._writing[url] = job

    def _end(
        self,
        job: Job[Any],
        url: str,
        result: Checkpoint | Part | None,
        error: BaseException | None,
    ) -> None:
        with self._turns:
            self._jobs.discard(job)
            if self._writing.get(url) is job:
                del self._writing[url]
            job._finish(result, error)
            self._turns.notify_all()

    def _wake(self) -> None:
        with self._turns:
            self._turns.notify_all()

    # ---- In the background

    def _carry_out(self, job: Job[Any], order: "_Order", run: "_Run | None") -> None:
        """Takes a checkpoint. run: the state was frozen already, only the rest is done."""
        with short_turns():
            result, error = self._carried_out(job, order, run)
        self._count(result, error)
        self._end(job, order.storage.url, result, error)

    def _carried_out(
        self, job: Job[Any], order: "_Order", run: "_Run | None"
    ) -> tuple[Checkpoint | Part | None, BaseException | None]:
        url = order.storage.url
        result: Checkpoint | Part | None = None
        error: BaseException | None = None
        try:
            try:
                self._take_turn(job, url)
                if run is None:
                    run = self._freeze(job, order)
                    job._is_frozen.set()
                    # Lets the caller go on first: otherwise we would keep the GIL for a while.
                    sleep(_YIELD_SECONDS)
                result = run.write()
            finally:
                if run is not None:
                    run.frozen.close()
            if not order.is_extra:
                if isinstance(result, Part):
                    self._note_written(url, _Written(result, run.parts, run.epoch))
                else:
                    self._remember(result, run.epoch)
                self._track()
        except _BaseGoneError as gone:
            error = CheckpointError(str(gone))
            job._is_base_gone = True
            with self._lock:
                if run is not None and self._lineages.get(url) is run.lineage:
                    del self._lineages[url]
        except BaseException as raised:
            error = kept(raised)
        if result is not None:
            error = None
        run = None  # an error may keep this frame alive, but must not keep the frozen state with it
        if result is not None and order.keep is not None:
            self._clean_up(job, order.storage, order.keep)
        return result, error

    def _clean_up(self, job: Job[Any], storage: Storage, keep: int) -> None:
        """Removes older ones. If that fails, the new one still counts as taken."""
        try:
            collect(storage, keep)
            self._uncleaned.clear()
        except Exception as left:
            job.cleanup_error = kept(left)
            cause = (storage.url, *cause_of(left))
            if cause not in self._uncleaned:
                self._uncleaned.add(cause)
                _log.warning(
                    "older checkpoints of %r could not be removed: %s The same cause is not logged "
                    "again before it is gone.",
                    storage.shown,
                    left,
                )

    def _count(self, result: Checkpoint | Part | None, error: BaseException | None) -> None:
        with self._lock:
            if result is not None:
                self._taken += 1
            elif not isinstance(error, NothingOwnedError | CheckpointCancelledError):
                self._failed += 1

    @property
    def metrics(self) -> CheckpointMetrics:
        """How many were taken, and how many could not be."""
        with self._lock:
            return CheckpointMetrics(self._taken, self._failed)

    # ---- Freezing

    def _freeze(self, job: Job[Any], order: "_Order") -> "_Run":
        """Fixes the state at this moment."""
        storage = order.storage
        lineage = self._base(storage, order.base)
        self._complete(job, lineage)
        failpoints.visit("checkpoint.freeze")
        frozen: Frozen | None = None
        try:
            with self._provider_lock:
                holdings = self._holdings()
                if order.must_own and not holdings.owned:
                    raise NothingOwnedError("no key-group is owned")
                if order.choose is not None:
                    holdings = holdings._replace(owned=order.choose())
                frozen = self._residence.freeze(
                    lambda store: self._plan(store, lineage, holdings), AHEAD_BYTES, order.is_extra
                )
                if not self._lineages and not self._written:
                    self._residence.tracking.hold(_TRACKED, frozen.snapshot.epoch)
                descent = self._descent(order, holdings)
            failpoints.visit("checkpoint.frozen")
            with self._lock:
                claim = self._claims.setdefault(storage.url, Claim(self._owner()))
            run = _Run(job, order, frozen, lineage, holdings, claim)
            run.descent = descent
        except BaseException:
            if frozen is not None:
                frozen.close()
            raise
        job._leaves_total = sum(map(len, run.parts))
        job._is_taken_up = True
        return run

    def _descent(self, order: "_Order", holdings: Holdings) -> Checkpoint | None:
        """The checkpoint that a part goes on from; None if all leaves came from elsewhere since.

        Even if the part refers to none of its packs: publish() compares what parts go on from.
        """
        lineage = self._lineages.get(order.storage.url)
        if order.part_number is None or order.base is None or lineage is None:
            return None
        worn = set(lineage.worn)
        subgroups = self._residence.store.subgroups
        for leaf in (leaf for part in leaf_ranges(holdings.owned, subgroups) for leaf in part):
            is_held = lineage.since[leaf] or leaf in worn
            if is_held and (self._came is None or self._came[leaf] <= lineage.epoch):
                return lineage.checkpoint
        return None

    def _base(self, storage: Storage, base: Any) -> _Lineage | None:
        """The lineage to go on from; None for a full checkpoint."""
        if base is None or base is False:
            return None
        self._find_published(storage)
        lineage = self._lineages.get(storage.url)
        if not (isinstance(base, str) and base == "auto"):
            _check_base(storage, base, lineage)
        if lineage is not None:
            # If the base is gone, it is better to know it now: later the attempt would have to
            # fail. If looking fails, the attempt will say why.
            with suppress(StorageError):
                if not lineage.checkpoint.exists():
                    return None
        return lineage

    def _complete(self, job: Job[Any], lineage: _Lineage | None) -> None:
        """Loads leaves that are to be written anew and are here only in part.

        Such leaves come from a lazy restore, if entries of them were picked. If they were not
        loaded, the entries that are here would be added to their chains, which would become longer
        with each checkpoint. If a leaf cannot be loaded, that is what happens; a caller that
        touches the leaf is told why.
        """
        sources, store = self._residence.sources, self._residence.store
        if sources is None or (lineage is not None and not lineage.worn):
            return
        leaves = range(store.leaves) if lineage is None else lineage.worn
        residencies = store.residencies(array("I", leaves))
        for leaf, residency in zip(leaves, residencies, strict=True):
            if residency == _PARTIAL and sources.push_of(leaf) is None:
                job._check_cancelled()
                with suppress(StateKitError):
                    self._residence.load_leaves((leaf,))

    def _plan(
        self, store: Store, lineage: _Lineage | None, holdings: Holdings
    ) -> "array[int] | None":
        """For each leaf the epoch after which its changes are wanted; 0 for all of the leaf."""
        since = None if lineage is None else self._changes(store, lineage, holdings)
        owned = self._holdings().owned
        if owned != holdings.owned or self._residence.shut_leaves:
            # All others are left out, not only owned ones: leaves that are shut may be in the
            # snapshot, too.
            left_out = subtract((range(store.key_groups),), holdings.owned)
            since = since or array("I", bytes(4 * store.leaves))
            for part in leaf_ranges(left_out, store.subgroups):
                since[part.start : part.stop] = array("I", [store.epoch]) * len(part)  # no changes
        return since

    def _changes(self, store: Store, lineage: _Lineage, holdings: Holdings) -> "array[int]":
        since = lineage.since[:]
        base = lineage.checkpoint
        covered = leaf_ranges(base.key_groups, base.subgroups)
        owned = leaf_ranges(holdings.owned, store.subgroups)
        if owned != covered:
            # Leaves that came in the meantime are not in the base, or differ from it.
            for part in subtract(owned, covered):
                since[part.start : part.stop] = array("I", bytes(4 * len(part)))
        if self._came is not None:
            # A leaf may have been given away and come back, from another checkpoint and perhaps
            # not loaded yet. The base has that leaf, but not as it is now.
            for leaf, epoch in enumerate(self._came):
                if epoch > since[leaf]:
                    since[leaf] = 0
        if self._residence.home is not None:
            for leaf, is_changed in enumerate(store.changed_leaves(lineage.epoch)):
                if is_changed:
                    since[leaf] = 0
        return since

    # ---- Parts, until they are published

    def _note_written(self, url: str, written: _Written) -> None:
        with self._lock:
            self._written.setdefault(url, []).append(written)
            while len(self._written) > _LINEAGES_MAX:
                del self._written[next(iter(self._written))]
            # If parts are never published, we must not remember changes for ever.
            del self._written[url][:-_WRITTEN_MAX]

    def _find_published(self, storage: Storage) -> None:
        """If some of our parts were published there since, the newest becomes the lineage."""
        with self._lock:
            written = [*self._written.get(storage.url, ())]
        for at in reversed(range(len(written))):
            part, owned, epoch = written[at].part, written[at].owned, written[at].epoch
            try:
                found = read_checkpoint(storage, part.number)
            except NoCheckpointError:
                continue  # not published yet; or collected, and then there is a newer one
            if part.file in found.manifest.parts:
                with self._lock:
                    self._written[storage.url] = written[at + 1 :]
                self._remember(found, epoch, owned)
                self._track()
                return

    def _track(self) -> None:
        """Lets the store forget changes that no future checkpoint needs."""
        with self._lock:
            known = [one.epoch for one in self._lineages.values()]
            known += [one.epoch for some in self._written.values() for one in some]
        self._residence.tracking.hold(_TRACKED, min(known))

    def _remember(
        self, checkpoint: Checkpoint, epoch: int, owned: tuple[range, ...] | None = None
    ) -> None:
        """owned: the leaves of the checkpoint that were ours at the epoch; None: all."""
        leaves = self._residence.store.leaves
        since = array("I", [epoch]) * leaves
        if owned is not None:
            for part in subtract((range(leaves),), owned):
                since[part.start : part.stop] = array("I", bytes(4 * len(part)))
        worn = _worn_chains(checkpoint.manifest)
        for leaf in worn:
            since[leaf] = 0
        with self._lock:
            url = checkpoint.storage.url
            self._lineages.pop(url, None)
            self._lineages[url] = _Lineage(checkpoint, since, epoch, worn)
            while len(self._lineages) > _LINEAGES_MAX:
                del self._lineages[next(iter(self._lineages))]

    # ---- Periodic, and the end

    def every(
        self,
        url: Any,
        seconds: float,
        keep: int,
        background: bool,
        on_error: Callable[[Exception], object] | None,
        **options: Any,
    ) -> "PeriodicCheckpoints":
        """Takes one every `seconds` seconds and keeps the `keep` newest."""
        check_compression(options.get("compression"))
        if not callable(metadata := options.get("metadata")):
            options["metadata"] = plain_metadata(metadata)
        periodic = PeriodicCheckpoints(self, url, seconds, keep, options, background, on_error)
        with self._lock:
            self._periodic.append(periodic)
        return periodic

    def forget(self, periodic: "PeriodicCheckpoints") -> None:
        with self._lock, suppress(ValueError):  # it was stopped before
            self._periodic.remove(periodic)

    def close(self) -> None:
        """Halts periodic checkpoints and lets those that are being written finish."""
        with self._lock:
            halted = [*self._periodic]
        for periodic in halted:
            periodic._halt()
        with self._turns:
            running = [*self._jobs]
        for job in running:
            job._done.wait()

    def reopen(self) -> None:
        """Goes on after close(), with the periodic checkpoints that were not stopped."""
        with self._lock:
            for periodic in self._periodic:
                periodic._go_on()


class _BaseGoneError(CheckpointError):
    """The base was removed while its successor was being written."""


def _check_base(storage: Storage, base: Any, lineage: _Lineage | None) -> None:
    """Refuses a base that is not the last checkpoint there."""
    advice = 'Leave base out (it is "auto"), or pass base=None for a full checkpoint.'
    if type(base) is not int and not isinstance(base, Checkpoint):
        raise ArgumentError(f"{shorten(base)} is no base of a checkpoint. {advice}")
    known = None if lineage is None else lineage.checkpoint
    if isinstance(base, Checkpoint) and base.storage.url == storage.url:
        base = base.number
    if known is None or base != known.number:
        raise CheckpointError(
            f"{shorten(base)} cannot be the base of a checkpoint to {storage.shown!r}: "
            f"the changes since are known for checkpoint {known.number if known else 'none'} "
            f"only. {advice}"
        )


class _Order(NamedTuple):
    """What is asked for; see Checkpointer.start()."""

    storage: Storage
    base: Any
    compression: str | None
    metadata: dict[str, Any]
    must_own: bool
    gives_way: bool
    choose: Callable[[], tuple[range, ...]] | None
    is_extra: bool
    keep: int | None
    part_number: int | None = None  # a part of that checkpoint; None: a checkpoint


class _Run:
    """One checkpoint, from the frozen state to the manifest."""

    def __init__(
        self,
        job: Job[Any],
        order: _Order,
        frozen: Frozen,
        lineage: _Lineage | None,
        holdings: Holdings,
        claim: Claim,
    ) -> None:
        self.job = job
        self.order = order
        self.storage = order.storage
        self.frozen = frozen
        self.lineage = lineage
        self.holdings = holdings
        self.claim = claim
        self.epoch: int = frozen.snapshot.epoch
        self.store = frozen.store
        # The owned leaves as ranges: making a list would take long, and the caller waits.
        self.parts = leaf_ranges(holdings.owned, self.store.subgroups)
        self._confirmed: set[Checkpoint] = set()  # origins that were found to exist
        self.descent: Checkpoint | None = None  # of a part: what it goes on from

    def write(self) -> Checkpoint | Part:
        if self.lineage is None:
            return self._write()
        base = self.lineage.checkpoint
        try:
            with self.storage.pin(base.manifest.name):
                # Compared by contents: the directory may have been emptied and used by another
                # provider, which has come to the same number.
                if not base.exists():
                    raise self._base_gone()
                return self._write()
        except MissingFileError:
            # Where other processes do not see the pin, publish() looks once more.
            if base.exists():
                raise
            raise self._base_gone() from None

    def _base_gone(self) -> _BaseGoneError:
        assert self.lineage is not None
        return _BaseGoneError(
            f"checkpoint {self.lineage.checkpoint.number} of {self.storage.shown!r}, which this "
            "one was to be based on, is gone. Take it again: it will be full."
        )

    def _write(self) -> Checkpoint | Part:
        with Attempt(
            self.storage,
            compression=self.order.compression,
            gives_way=self.order.gives_way,
            claim=self.claim,
            number=self.order.part_number,
        ) as attempt:
            self.job._begin(attempt)
            if self.frozen.has_home:
                self._add_completed(attempt)
            else:
                attempt.fill(self.frozen.snapshot, self.job._filled)
                self._link_leaves(attempt)
            what: dict[str, Any] = {
                "key_groups": self.store.key_groups,
                "subgroups": self.store.subgroups,
                "owned": self.holdings.owned,
                "schemas": self.holdings.schemas,
                "watermark": self.frozen.snapshot.watermark,
            }
            if self.order.part_number is not None:
                is_referred = self.lineage is not None
                found = attempt.write_part(base=self.descent, is_referred=is_referred, **what)
                for origin in self._confirmed:  # checked after the part is there, like the base
                    if not origin.exists():
                        raise _gone(origin)
                return part_of(*found)
            base = None if self.lineage is None else self.lineage.checkpoint.number
            return attempt.publish(base=base, metadata=self.order.metadata, **what)

    def _link_leaves(self, attempt: Attempt) -> None:
        """Puts the older segments of each leaf under the new ones."""
        failpoints.visit("checkpoint.link")
        # There may be a million leaves, most of them empty: the loops go over the others only.
        residencies = self.frozen.snapshot.residencies()
        away = sum(residencies.count(_AWAY, part.start, part.stop) for part in self.parts)
        assert not away, f"{away} leaves are owned and away"
        if self.lineage is not None:
            manifest, since = self.lineage.checkpoint.manifest, self.frozen.since
            assert since is not None
            leaves = manifest.segments.leaves  # ascending
            based: set[int] = set()
            for part in self.parts:
                start = bisect_left(leaves, part.start)
                stop = bisect_left(leaves, part.stop, start)
                based.update(
                    leaf
                    for leaf in leaves[start:stop].tolist()
                    if since[leaf] and residencies[leaf] != _AWAY
                )
            attempt.refer_chains(manifest, based)
        unread = [
            leaf
            for part in self.parts
            if residencies.count(_WHOLE, part.start, part.stop) < len(part)
            for leaf in part
            if residencies[leaf] != _WHOLE and not self._is_based(leaf)
        ]
        for at, leaf in enumerate(unread):
            self.job._reach(len(unread) - at)
            self._add_source(attempt, leaf)
        self.job._reach(0)

    def _has(self, leaf: int) -> bool:
        """Whether the leaf belongs into this checkpoint."""
        return any(leaf in part for part in self.parts)

    def _is_based(self, leaf: int) -> bool:
        since = self.frozen.since
        return since is not None and since[leaf] > 0

    def _refer_base(self, attempt: Attempt, leaf: int) -> None:
        assert self.lineage is not None
        manifest = self.lineage.checkpoint.manifest
        attempt.refer(leaf, manifest.chain(leaf), manifest.packs)

    def _add_source(self, attempt: Attempt, leaf: int) -> None:
        """Adds what the source has of a leaf that is not whole here."""
        source = self.frozen.source
        assert source is not None, f"leaf {leaf} is not whole and comes from nowhere"
        origin = source.checkpoint_of(leaf)
        if origin is not None and origin.storage.url == self.storage.url:
            self._confirm(origin)
            attempt.refer(leaf, origin.manifest.chain(leaf), origin.manifest.packs)
        elif origin is not None:
            for segment in reversed(origin.manifest.chain(leaf)):
                pack = origin.manifest.packs[segment.pack]
                attempt.add_frames(leaf, read_frames(origin.storage, pack, segment), below=True)
        else:  # regrouped: the leaf is made of several leaves of the source
            for blocks in source.read_leaf(leaf):
                if blocks:
                    attempt.add(leaf, blocks, below=True)

    def _confirm(self, origin: Checkpoint) -> None:
        """Checks that an origin exists: its pin prevents collecting it, not deleting its place."""
        if origin not in self._confirmed and not origin.exists():
            raise _gone(origin)
        self._confirmed.add(origin)

    def _add_completed(self, attempt: Attempt) -> None:
        """All leaves of a provider with a home, one by one."""
        frozen = self.frozen
        seen: set[int] = set()
        for leaf, blocks in frozen.snapshot:
            seen.add(leaf)
            if self._has(leaf):
                self._add_leaf(attempt, leaf, blocks)
        residencies = frozen.snapshot.residencies()
        for leaf in (leaf for part in self.parts for leaf in part):
            if leaf in seen:
                continue
            if self._is_based(leaf):
                self._refer_base(attempt, leaf)
                self.job._leaves_done += 1
            elif residencies[leaf] != _WHOLE:
                self._add_leaf(attempt, leaf, b"")
            else:
                self.job._leaves_done += 1

    def _add_leaf(self, attempt: Attempt, leaf: int, blocks: bytes) -> None:
        if self._is_based(leaf):
            attempt.add(leaf, blocks)
            self._refer_base(attempt, leaf)
        else:
            if RESIDENCIES.index(self.frozen.snapshot.residency(leaf)) != _WHOLE:
                blocks = self.frozen.complete(leaf, blocks)
            if blocks:
                attempt.add(leaf, blocks)
        self.job._leaves_done += 1


def _waited_for(job: Job[R], choose: object = None) -> R | None:
    """The result of a job; None if its base was gone, so that it must be taken again, in full.

    choose: given for a barrier. Then it cannot be taken again, since the moment is over.
    """
    try:
        return job.wait()
    except CheckpointError:
        if not job._is_base_gone or choose is not None:
            raise
        return None
    except BaseException:  # an interrupt
        job.cancel()
        job._done.wait()
        raise


def _gone(origin: Checkpoint) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {origin.number} of {origin.url!r}, which this provider is still being "
        "restored from, is gone. Restore another one."
    )


def _worn_chains(manifest: Manifest) -> list[int]:
    """Leaves that the next checkpoint writes anew."""
    return [
        leaf
        for leaf, (full, *changes) in manifest.changed()
        if 1 + len(changes) >= _chain_max(leaf, full) or sum(changes) > DELTA_SHARE * full
    ]


def _chain_max(leaf: int, full: int) -> int:
    """How long the chain of a leaf may be whose full segment has so many bytes.

    Writing a leaf anew costs time by its size, and a segment more costs something at each reading.
    With L segments that is full / L + L / 2 segments for each checkpoint, so the best L grows with
    the root of the size. And large leaves that were all written at once, and all change with each
    checkpoint, must not all be written anew at once: that checkpoint would take many times as long
    as the others. So their limits differ, from leaf to leaf.
    """
    if full < _LARGE_BYTES:
        return CHAIN_MAX
    longest = min(CHAIN_LONG_MAX, max(CHAIN_MAX, isqrt(full // _SEGMENT_WORTH)))
    return longest - leaf % (longest // 2)
