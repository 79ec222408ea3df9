"""Rescale and merge: the key-groups of some workers shared out to others, or to one.

Frames are copied as they are. Only their checksums change: each is unbound from its old place and
bound to its new one (copying.py).
"""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress

from statekit.assignment import assign, leaf_ranges
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.union import Union, check_alike, unite
from statekit.errors import CheckpointCancelledError
from statekit.offline.copying import (
    CopyAttempt,
    OnBytes,
    check_empty,
    ignore,
    pinned,
    segments_of,
)
from statekit.storage import Storage

_TOGETHER = 4  # workers that are written at the same time


def rescale(
    sources: Sequence[Checkpoint], out: Storage, workers: int, *, on_bytes: OnBytes = ignore
) -> list[Checkpoint]:
    """The state of some workers, shared out to others: out/worker-0, out/worker-1, ...

    In the end all of these are there, or none if it raises.
    """
    union = _united(sources)
    union.check_whole("Give those of all workers.")
    shares = assign(union.key_groups, workers)
    check_empty(out)
    is_over = threading.Event()

    def step(more: int) -> None:
        if is_over.is_set():
            raise CheckpointCancelledError("another worker's part failed")
        on_bytes(more)

    with pinned(sources), ThreadPoolExecutor(_TOGETHER, "statekit-rescale") as pool:
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
            # Nobody must find some of the workers and believe that they are all.
            for job in jobs:
                with suppress(Exception, CancelledError):
                    _remove(job.result())
            raise


def _united(sources: Sequence[Checkpoint]) -> Union:
    """The union. Frames are copied as they are, so the leaves must be the same."""
    check_alike(sources)
    return unite(sources)


def _remove(checkpoint: Checkpoint) -> None:
    """Removes a checkpoint, its manifest first: if no more is removed, the rest is garbage."""
    manifest = checkpoint.manifest
    checkpoint.storage.delete([manifest.name, *(pack.name for pack in manifest.packs)])


def merge(
    sources: Sequence[Checkpoint],
    out: Storage,
    *,
    may_miss: bool = False,
    on_bytes: OnBytes = ignore,
) -> Checkpoint:
    """The state of several workers as one checkpoint in a new directory.

    may_miss: allowed even if together they do not have all key-groups.
    """
    union = _united(sources)
    if len(sources) > 1 and not may_miss:  # a single source may be that of one worker
        union.check_whole("Give those of all workers, or say that these are enough: --missing-ok.")
    check_empty(out)
    with pinned(sources):
        return _gather(union, out, union.covered, on_bytes)


def _gather(
    union: Union,
    out: Storage,
    owned: tuple[range, ...],
    on_bytes: OnBytes,
) -> Checkpoint:
    """Some key-groups of a union, copied into a new directory."""
    with CopyAttempt(out) as attempt:
        for source in union.checkpoints:
            wanted = segments_of(source, leaf_ranges(owned, union.subgroups))
            attempt.copy(source, wanted, on_bytes)
        attempt.compression = union.compression  # that of the copied frames
        return attempt.publish(
            key_groups=union.key_groups,
            subgroups=union.subgroups,
            owned=owned,
            schemas=union.schemas,
            watermark=union.watermark,
            metadata=union.metadata,
        )
