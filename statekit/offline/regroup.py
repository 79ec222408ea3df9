"""Regroup: the same state in another number of key-groups.

The leaves stay as they are if possible: G key-groups of S sub-groups have as many leaves as 2 G
key-groups of S / 2. If there are to be more key-groups than leaves, every leaf is cut into slices
of its hash range.
"""

from statekit.assignment import group_ranges, show_groups
from statekit.checkpoint.ownership import Claim
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.union import name_of
from statekit.checkpoint.writer import Attempt
from statekit.errors import ArgumentError, shorten
from statekit.native.block import Block, block_pieces, rewrite
from statekit.offline.copying import (
    CopyAttempt,
    OnBytes,
    check_empty,
    check_segments,
    ignore,
    pinned,
    refer,
)
from statekit.offline.fold import Folder
from statekit.storage import Storage

_GROUPS_MAX = 1 << 20


def regroup(
    source: Checkpoint, key_groups: int, out: Storage | None = None, *, on_bytes: OnBytes = ignore
) -> Checkpoint:
    """The same state in another number of key-groups. out: a new directory; None: in place."""
    check_key_groups(key_groups)
    if out is not None:
        check_empty(out)
    leaves = source.manifest.leaves
    owned = _regrouped(source, key_groups)
    target = source.storage if out is None else out
    # In place, the result is a state that no running process has: so it gets a claim of its own.
    with (
        pinned([source]),
        CopyAttempt(target, claim=Claim() if out is None else None) as attempt,
    ):
        if key_groups <= leaves:
            if out is None:
                check_segments(source, source.manifest.segments, on_bytes)
                refer(attempt, source, source.manifest.chains())
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
            attachments=source.manifest.attachments if out is None else (),
        )


def check_key_groups(key_groups: int) -> None:
    """ArgumentError if no store can have this number of key-groups."""
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
                f"{name_of(source)} has key-groups {show_groups(source.key_groups)} of {before}, "
                f"which are no whole ones of {key_groups}. Merge the workers' checkpoints first."
            )
    return group_ranges(
        [range(r.start // factor, r.stop // factor) for r in source.key_groups], key_groups
    )


def _slice(attempt: Attempt, source: Checkpoint, leaves: int, on_bytes: OnBytes) -> None:
    """Cuts every leaf into the new leaves that lie in its hash range."""
    folder = Folder(source)
    shift = 64 - (leaves.bit_length() - 1)  # a leaf's number is the first bits of the hash
    for leaf, chain in source.manifest.chains():
        blocks = []
        parts: set[int] = set()  # new leaves with entries: of many, most would be empty
        for block, data in block_pieces(folder.fold(leaf)):
            blocks.append(data)
            parts.update(hash_ >> shift for hash_ in block.hashes)
        for part in sorted(parts):
            pieces = [rewrite(data, leaf=part, leaves=leaves) for data in blocks]
            filled = [piece for piece in pieces if piece and Block(piece).entries]
            if filled:
                attempt.add(part, b"".join(filled))
        on_bytes(sum(segment.length for segment in chain))
