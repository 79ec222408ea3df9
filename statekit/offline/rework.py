"""Checkpoints made of checkpoints: rescale, merge, regroup, compact, edit.

Nothing is opened for this and no entry is decoded where none changes:

    rescale, merge   frames are copied as they are; only the mix that binds a checksum to its file
                     is taken off and put on again (copying.py)
    regroup          the leaves stay if they can: G key-groups of S sub-groups are as many leaves as
                     2 G of S / 2. Beyond that every leaf is cut into slices of its hash range
    compact          leaves that have deltas are folded, packs that are mostly garbage are copied,
                     and all else is referred to
    edit             one delta for one leaf, and all else is referred to

Every result is published as any checkpoint is (writer.py): it is there complete, or not at all. The
sources are pinned while they are read, so that no garbage collection takes them away.

All of a source is verified first, also what is only referred to. A new checkpoint over damage would
be the newest one, and the old ones, which might have been good, would be collected some day.

What goes with the state: the watermark (of several: the lowest, since an event that one of them
has not seen may be that old) and the metadata (of several: {"merged": [...]}, in their order).
"""

import contextlib
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, NamedTuple

from statekit.assignment import assign, group_ranges, leaf_ranges, show_groups, subtract
from statekit.checkpoint.ownership import Caretaker, Claim
from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.checkpoint.writer import Attempt
from statekit.errors import (
    ArgumentError,
    CheckpointCancelledError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    shorten,
    where,
)
from statekit.format.manifest import Segment
from statekit.keys import encode_key, key_codec, leaf_of_encoded
from statekit.native import Store
from statekit.native.block import Block, rewrite
from statekit.offline.copying import CopyAttempt, OnBytes, check_segments
from statekit.schema import StateSchema
from statekit.storage import Storage

_USED_MIN = 0.5  # of a pack; one of which less is used is copied by compact()
_GROUPS_MAX = 1 << 20
_FOREVER_MS = 1 << 62
_TOGETHER = 4  # workers that are written at the same time


def _ignore(_: int) -> None:
    pass


# ---- What several checkpoints are together


class Union(NamedTuple):
    """Sources of one geometry that own different key-groups."""

    sources: tuple[Checkpoint, ...]
    owned: tuple[range, ...]
    schemas: tuple[StateSchema, ...]
    watermark: int | None
    metadata: dict[str, Any]

    @property
    def first(self) -> Checkpoint:
        return self.sources[0]

    @property
    def compression(self) -> str | None:
        """What the frames are compressed with; if that differs, there is nothing to say."""
        found = {source.manifest.compression for source in self.sources}
        return found.pop() if len(found) == 1 else None


def unite(sources: Sequence[Checkpoint]) -> Union:
    """ArgumentError, OccupiedError or SchemaError if they do not go together."""
    if not sources:
        raise ArgumentError("there is no checkpoint to take. Give one at least.")
    first, *others = sources
    owned = first.key_groups
    schemas = dict(first.states)
    for other in others:
        here = (first.key_group_count, first.subgroups)
        there = (other.key_group_count, other.subgroups)
        if here != there:
            raise ArgumentError(
                f"{_name(first)} has {here[0]} key-groups x {here[1]} sub-groups, {_name(other)} "
                f"has {there[0]} x {there[1]}. Regroup one of them first."
            )
        common = subtract(owned, subtract(owned, other.key_groups))
        if common:
            raise OccupiedError(
                f"{_name(other)} has key-groups {show_groups(common)}, which another one has too. "
                "Give checkpoints of different workers, each once."
            )
        owned = group_ranges([*owned, *other.key_groups])
        for schema in other.manifest.schemas:
            known = schemas.setdefault(schema.name, schema)
            if known != schema:
                raise SchemaError(
                    f"state {schema.name!r} is {schema} in {_name(other)} and {known} in another "
                    "checkpoint. Take checkpoints of the same program."
                )
    marks = [source.watermark for source in sources]
    watermark = None if None in marks else min(mark for mark in marks if mark is not None)
    metadata = first.metadata
    if others:
        metadata = {"merged": [source.metadata for source in sources]}
    return Union(tuple(sources), owned, tuple(schemas.values()), watermark, metadata)


def _name(checkpoint: Checkpoint) -> str:
    return f"checkpoint {checkpoint.number} of {checkpoint.url!r}"


@contextlib.contextmanager
def _pinned(sources: Iterable[Checkpoint]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.storage.pin(source.manifest.name))
        yield


def check_empty(out: Storage) -> None:
    """ArgumentError if a directory that a new line of checkpoints is to be in has files."""
    is_empty = not out.list()
    for name in out.subdirectories() if is_empty else ():
        # What a rescale that failed leaves behind is a directory with a lock in it.
        is_empty = name.startswith("worker-") and not out.sub(name).list()
        if not is_empty:
            break
    if not is_empty:
        raise ArgumentError(f"{out.shown!r} is not empty. Name a directory that is new.")


def _segments_of(source: Checkpoint, leaves: Iterable[range]) -> list[Segment]:
    """The segments of leaves, by leaf, oldest first."""
    segments = source.manifest.segments
    found: list[Segment] = []
    for part in leaves:
        start = bisect_left(segments.leaves, part.start)
        found += segments[start : bisect_left(segments.leaves, part.stop, start)]
    return found


# ---- Rescale and merge


def rescale(
    sources: Sequence[Checkpoint], out: Storage, workers: int, *, on_bytes: OnBytes = _ignore
) -> list[Checkpoint]:
    """The state of some workers shared out to others: out/worker-0, out/worker-1, ...

    Either all of them are there in the end, or (if it raises) none.
    """
    union = unite(sources)
    _check_whole(union, "Give those of all workers.")
    shares = assign(union.first.key_group_count, workers)
    check_empty(out)
    is_over = threading.Event()

    def step(more: int) -> None:
        if is_over.is_set():
            raise CheckpointCancelledError("another worker's part failed")
        on_bytes(more)

    with _pinned(sources), ThreadPoolExecutor(_TOGETHER, "statekit-rescale") as pool:
        # Several at a time, so that some read while others wait for the disk.
        jobs = [
            pool.submit(_gather, union, out.sub(f"worker-{at}"), (share,), step)
            for at, share in enumerate(shares)
        ]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            is_over.set()
            pool.shutdown(cancel_futures=True)
            # Whoever finds some of the workers must not take them for all.
            for job in jobs:
                with contextlib.suppress(Exception, CancelledError):
                    _remove(job.result())
            raise


def _check_whole(union: Union, what_to_do: str) -> None:
    """ArgumentError if some key-groups are nowhere."""
    total = union.first.key_group_count
    if missing := subtract((range(total),), union.owned):
        raise ArgumentError(
            f"key-groups {show_groups(missing)} of {total} are in none of the checkpoints. "
            f"{what_to_do}"
        )


def _remove(checkpoint: Checkpoint) -> None:
    """The manifest first: what remains if that is all is garbage."""
    manifest = checkpoint.manifest
    checkpoint.storage.delete([manifest.name, *(pack.name for pack in manifest.packs)])


def merge(
    sources: Sequence[Checkpoint],
    out: Storage,
    *,
    may_miss: bool = False,
    on_bytes: OnBytes = _ignore,
) -> Checkpoint:
    """The state of several workers as one checkpoint in a new directory.

    may_miss: also if they do not have all key-groups together.
    """
    union = unite(sources)
    if len(sources) > 1 and not may_miss:  # one alone may be a worker's
        _check_whole(
            union, "Give those of all workers, or say that these are enough: --missing-ok."
        )
    check_empty(out)
    with _pinned(sources):
        return _gather(union, out, union.owned, on_bytes)


def _gather(
    union: Union,
    out: Storage,
    owned: tuple[range, ...],
    on_bytes: OnBytes,
) -> Checkpoint:
    """Some key-groups of a union, copied into a new directory."""
    subgroups = union.first.subgroups
    with CopyAttempt(out) as attempt:
        for source in union.sources:
            wanted = _segments_of(source, leaf_ranges(owned, subgroups))
            attempt.copy(source, wanted, on_bytes)
        attempt.compression = union.compression  # as the frames are
        return attempt.publish(
            key_groups=union.first.key_group_count,
            subgroups=subgroups,
            owned=owned,
            schemas=union.schemas,
            watermark=union.watermark,
            metadata=union.metadata,
        )


# ---- Folding


class Folder:
    """Puts the chain of a leaf together, in a store that holds one leaf at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._store = Store(checkpoint.key_group_count, checkpoint.subgroups)
        self._declared: dict[str, tuple[str, bool]] = {}
        for schema in checkpoint.manifest.schemas:
            declare(self._store, schema)
            self._declared[schema.name] = schema.kind, schema.timed
        self._store.mark(0, self._store.leaves, "absent")

    def fold(self, leaf: int) -> bytes:
        """One full block for each state that has entries in the leaf."""
        steps = [self._as_declared(step) for step in self._checkpoint.read_leaf(leaf)]
        data = steps[0] if steps else b""
        if len(steps) > 1 or any(block.is_delta for block in Block.each(data)):
            for step in steps[:-1]:
                self._store.decode_leaf(leaf, step, "under")
            self._store.decode_leaf(leaf, steps[-1], "under_all")
            data = self._store.encode_leaf(leaf)
            self._store.mark(leaf, leaf + 1, "absent")
        return b"".join(part for part, block in _blocks(data) if block.entries)

    def _as_declared(self, data: bytes) -> bytes:
        """Older blocks are of the type that a state had then: int before it was float."""
        parts: list[bytes | memoryview] = []
        is_changed = False
        for part, block in _blocks(data):
            kind, timed = self._declared.get(block.name, (block.kind, block.is_timed))
            if (kind, timed) != (block.kind, block.is_timed):
                parts.append(rewrite(part, kind=kind, timed=timed))
                is_changed = True
            else:
                parts.append(part)
        return b"".join(parts) if is_changed else data


def _blocks(data: bytes) -> Iterator[tuple[memoryview, Block]]:
    """The blocks of a leaf, and the bytes of each."""
    view, at = memoryview(data), 0
    for block in Block.each(data):
        yield view[at : at + block.size], block
        at += block.size


def declare(store: Store, schema: StateSchema) -> Any:
    """The native state of a schema."""
    kind: Any = schema.kind
    return store.state(schema.name, kind, schema.key, timed=schema.timed)


def declare_timed(store: Store, schema: StateSchema) -> Any:
    """So, and its entries get stamps by the clock of the state, with no end to their life."""
    raw = declare(store, schema)
    if schema.timed:
        raw.ttl(_FOREVER_MS, clock=schema.clock)
    return raw


# ---- Regroup


def regroup(
    source: Checkpoint, key_groups: int, out: Storage | None = None, *, on_bytes: OnBytes = _ignore
) -> Checkpoint:
    """The same state in another number of key-groups. out: a new directory; else where it is."""
    check_key_groups(key_groups)
    if out is not None:
        check_empty(out)
    leaves = source.manifest.leaves
    owned = _regrouped(source, key_groups)
    target = source.storage if out is None else out
    # In place it is a state that no running process has.
    with (
        _pinned([source]),
        CopyAttempt(target, claim=Claim() if out is None else None) as attempt,
    ):
        if key_groups <= leaves:
            if out is None:
                check_segments(source, source.manifest.segments, on_bytes)
                _refer(attempt, source, source.manifest.chains())
            else:
                attempt.copy(source, source.manifest.segments, on_bytes)
        else:
            attempt.compression = source.manifest.compression
            _slice(attempt, source, key_groups, on_bytes)
        attempt.compression = source.manifest.compression
        return attempt.publish(
            key_groups=key_groups,
            subgroups=max(leaves // key_groups, 1),
            owned=owned,
            schemas=source.manifest.schemas,
            base=source.number if out is None else None,
            watermark=source.watermark,
            metadata=source.metadata,
        )


def check_key_groups(key_groups: int) -> None:
    """ArgumentError if no store has so many."""
    if not isinstance(key_groups, int) or not 1 <= key_groups <= _GROUPS_MAX:
        raise ArgumentError(
            f"there cannot be {shorten(key_groups)} key-groups. "
            f"Use a power of 2, {_GROUPS_MAX} at most."
        )
    if key_groups & (key_groups - 1):
        below = 1 << key_groups.bit_length() - 1
        raise ArgumentError(
            f"{key_groups} key-groups: their number must be a power of 2. "
            f"Use {below} or {2 * below}."
        )


def _regrouped(source: Checkpoint, key_groups: int) -> tuple[range, ...]:
    """The owned key-groups, counted in the new way."""
    before = source.key_group_count
    if key_groups >= before:
        factor = key_groups // before
        return tuple(range(r.start * factor, r.stop * factor) for r in source.key_groups)
    factor = before // key_groups
    for part in source.key_groups:
        if part.start % factor or part.stop % factor:
            raise ArgumentError(
                f"{_name(source)} has key-groups {show_groups(source.key_groups)} of {before}, "
                f"which are no whole ones of {key_groups}. Merge the workers' checkpoints first."
            )
    return group_ranges(
        [range(r.start // factor, r.stop // factor) for r in source.key_groups], key_groups
    )


def _slice(attempt: Attempt, source: Checkpoint, leaves: int, on_bytes: OnBytes) -> None:
    """Every leaf as so many leaves as lie in its hash range."""
    folder = Folder(source)
    shift = 64 - (leaves.bit_length() - 1)  # a leaf's number is the first bits of the hash
    for leaf, chain in source.manifest.chains():
        blocks = []
        parts: set[int] = set()  # most of many would be empty
        for data, block in _blocks(folder.fold(leaf)):
            blocks.append(data)
            parts.update(hash_ >> shift for hash_ in block.hashes)
        for part in sorted(parts):
            pieces = [rewrite(data, leaf=part, leaves=leaves) for data in blocks]
            filled = [piece for piece in pieces if piece and Block(piece).entries]
            if filled:
                attempt.add(part, b"".join(filled))
        on_bytes(sum(segment.length for segment in chain))


def _refer(
    attempt: Attempt, source: Checkpoint, chains: Iterable[tuple[int, Sequence[Segment]]]
) -> None:
    packs = source.manifest.packs
    for leaf, chain in chains:
        attempt.refer(leaf, chain, packs)


# ---- Compact


def compact(source: Checkpoint, *, on_bytes: OnBytes = _ignore) -> Checkpoint | None:
    """A new checkpoint of the same state with every chain folded; None if there is nothing to do.

    Packs of which it uses less than a half are copied, so that they can go with the older ones.
    """
    manifest = source.manifest
    used: Counter[int] = Counter()
    for segment in manifest.segments:
        used[segment.pack] += segment.length
    folded = {leaf for leaf, chain in manifest.chains() if len(chain) > 1}
    for leaf in folded:
        for segment in manifest.chain(leaf):
            used[segment.pack] -= segment.length
    wasteful = {
        pack for pack, ref in enumerate(manifest.packs) if 0 < used[pack] < ref.size * _USED_MIN
    }
    copied = [one for one in manifest.segments if one.leaf not in folded and one.pack in wasteful]
    moved = folded | {segment.leaf for segment in copied}
    kept = [one for one in manifest.segments if one.leaf not in moved]
    if not moved:
        with _pinned([source]):
            check_segments(source, kept, on_bytes)  # whoever compacts may collect the others next
        return None
    folder = Folder(source)
    with (
        _pinned([source]),
        CopyAttempt(
            source.storage, compression=manifest.compression, claim=_claim_of(source)
        ) as attempt,
    ):
        check_segments(source, kept, on_bytes)
        _refer(
            attempt,
            source,
            ((leaf, chain) for leaf, chain in manifest.chains() if leaf not in moved),
        )
        attempt.copy(source, copied, on_bytes)
        for leaf in sorted(folded):
            blocks = folder.fold(leaf)
            if blocks:
                attempt.add(leaf, blocks)
            on_bytes(sum(segment.length for segment in manifest.chain(leaf)))
        return _publish_like(attempt, source)


def _claim_of(source: Checkpoint) -> Claim:
    """The newest one in another shape is still its owner's. An older one is not: it goes back."""
    newest = open_checkpoint(source.storage)
    return Caretaker() if newest.number == source.number else Claim()


def _publish_like(attempt: Attempt, source: Checkpoint) -> Checkpoint:
    return attempt.publish(
        key_groups=source.key_group_count,
        subgroups=source.subgroups,
        owned=source.key_groups,
        schemas=source.manifest.schemas,
        base=source.number,
        watermark=source.watermark,
        metadata=source.metadata,
    )


# ---- Edit


def edit(source: Checkpoint, state: str, key: Any, value: bytes | None) -> Checkpoint:
    """A new checkpoint with one entry set (as State.put_encoded() takes it) or, None, deleted."""
    schema = source._schema(state)
    encoded = encode_key(schema.key, key)
    leaf = leaf_of_encoded(key_codec(schema.key), encoded, source.manifest.leaves)
    group = leaf // source.subgroups
    if not any(group in part for part in source.key_groups):
        raise NotOwnedError(
            f"the key {shorten(key)} is of key-group {group}, and {_name(source)} has "
            f"{show_groups(source.key_groups)}. Edit the checkpoint of the worker that has it."
        )
    if value is None and source.find(state, encoded) is None:
        raise ArgumentError(f"there is nothing to delete{where(state, key)}. Check the key.")
    chain = source.manifest.chain(leaf)
    block = _one_entry(source, schema, encoded, leaf, value, is_delta=len(chain) > 0)
    with (
        _pinned([source]),
        Attempt(source.storage, compression=source.manifest.compression, claim=Claim()) as attempt,
    ):
        check_segments(source, source.manifest.segments)
        _refer(attempt, source, source.manifest.chains())
        attempt.add(leaf, block)
        return _publish_like(attempt, source)


def _one_entry(
    source: Checkpoint,
    schema: StateSchema,
    key: bytes,
    leaf: int,
    value: bytes | None,
    is_delta: bool,
) -> bytes:
    """A block with one entry or deletion."""
    store = Store(source.key_group_count, source.subgroups)
    raw = declare_timed(store, schema)
    store.mark(leaf, leaf + 1, "absent")  # so that what is here then is a delta
    if value is None:
        raw.delete(raw.codec.decode(key), blind=True)
    else:
        raw.install_encoded(key, value, _touched(source, schema))  # checks the value
    if not is_delta:
        store.mark(leaf, leaf + 1, "whole")
    return store.encode_leaf(leaf)


def _touched(source: Checkpoint, schema: StateSchema) -> int | None:
    """The stamp of an entry that is changed now."""
    return source.watermark if schema.clock == "event" else time.time_ns() // 1_000_000


# ---- From nothing


def build(
    store: Store,
    out: Storage,
    schemas: Sequence[StateSchema],
    *,
    watermark: int | None = None,
    metadata: dict[str, Any] | None = None,
    compression: str | None = None,
) -> Checkpoint:
    """The first checkpoint of a new directory, of all that a store holds."""
    check_empty(out)
    with store.snapshot() as snapshot, Attempt(out, compression=compression) as attempt:
        attempt.fill(snapshot)
        return attempt.publish(
            key_groups=store.key_groups,
            subgroups=store.subgroups,
            owned=(range(store.key_groups),),
            schemas=schemas,
            watermark=watermark,
            metadata=metadata,
        )


__all__ = [
    "Folder",
    "Union",
    "build",
    "check_empty",
    "check_key_groups",
    "compact",
    "declare",
    "declare_timed",
    "edit",
    "merge",
    "regroup",
    "rescale",
    "unite",
]
