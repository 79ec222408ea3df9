"""Compact: leaves that have deltas are folded, the used parts of packs that are mostly garbage are
copied, and everything else is referred to.
"""

from collections import Counter

from statekit.checkpoint.ownership import Caretaker, Claim
from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.offline.copying import (
    CopyAttempt,
    OnBytes,
    check_segments,
    ignore,
    pinned,
    publish_like,
    refer,
)
from statekit.offline.fold import Folder

_USED_MIN = 0.5  # of a pack's bytes; if less is used, the used segments are copied


def compact(source: Checkpoint, *, on_bytes: OnBytes = ignore) -> Checkpoint | None:
    """A new checkpoint of the same state with every chain folded; None if there is nothing to do.

    What it uses of a pack is copied if that is less than a half, so that the pack can be collected
    together with the older checkpoints.
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
        with pinned([source]):
            check_segments(source, kept, on_bytes)  # older checkpoints may be collected next
        return None
    folder = Folder(source)
    with (
        pinned([source]),
        CopyAttempt(
            source.storage, compression=manifest.compression, claim=_claim_of(source)
        ) as attempt,
    ):
        check_segments(source, kept, on_bytes)
        refer(
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
        return publish_like(attempt, source)


def _claim_of(source: Checkpoint) -> Claim:
    """The newest checkpoint in another shape still belongs to its owner.

    An older one does not: compacting it goes back to an older state.
    """
    newest = open_checkpoint(source.storage)
    return Caretaker() if newest.number == source.number else Claim()
