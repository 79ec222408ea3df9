"""Edit: one entry of a checkpoint is set or deleted, by a delta for its leaf."""

import time
from typing import Any

from statekit.assignment import show_groups
from statekit.checkpoint.ownership import Claim
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.union import name_of
from statekit.checkpoint.writer import Attempt
from statekit.errors import ArgumentError, NotOwnedError, shorten, where
from statekit.keys import encode_key, key_codec, leaf_of_encoded
from statekit.native import Store
from statekit.offline.copying import check_segments, pinned, publish_like, refer
from statekit.offline.fold import declare_timed
from statekit.schema import StateSchema


def edit(source: Checkpoint, state: str, key: Any, value: bytes | None) -> Checkpoint:
    """A new checkpoint in which one entry is set, or deleted if the value is None.

    value: as State.put_encoded() takes it.
    """
    schema = source._schema(state)
    encoded = encode_key(schema.key, key)
    leaf = leaf_of_encoded(key_codec(schema.key), encoded, source.manifest.leaves)
    group = leaf // source.subgroups
    if not any(group in part for part in source.key_groups):
        raise NotOwnedError(
            f"the key {shorten(key)} is of key-group {group}, and {name_of(source)} has "
            f"{show_groups(source.key_groups)}. Edit the checkpoint of the worker that has it."
        )
    if value is None and source.find(state, encoded) is None:
        raise ArgumentError(f"there is nothing to delete{where(state, key)}. Check the key.")
    chain = source.manifest.chain(leaf)
    block = _one_entry(source, schema, encoded, leaf, value, is_delta=len(chain) > 0)
    with (
        pinned([source]),
        Attempt(source.storage, compression=source.manifest.compression, claim=Claim()) as attempt,
    ):
        check_segments(source, source.manifest.segments)
        refer(attempt, source, source.manifest.chains())
        attempt.add(leaf, block)
        return publish_like(attempt, source)


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
    store.mark(leaf, leaf + 1, "absent")  # so that the leaf is encoded as a delta
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
