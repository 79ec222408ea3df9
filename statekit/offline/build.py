"""Build: the first checkpoint of a directory, of what a store holds."""

from collections.abc import Sequence
from typing import Any

from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.writer import Attempt
from statekit.native import Store
from statekit.offline.copying import check_empty
from statekit.schema import StateSchema
from statekit.storage import Storage


def build(
    store: Store,
    out: Storage,
    schemas: Sequence[StateSchema],
    *,
    watermark: int | None = None,
    metadata: dict[str, Any] | None = None,
    compression: str | None = None,
) -> Checkpoint:
    """The first checkpoint of a new directory, with everything that a store holds."""
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
