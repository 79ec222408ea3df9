"""Single entries out of the chains of leaves, as packs have them (csrc/chain.c)."""

from collections.abc import Sequence
from itertools import compress, count
from typing import Any, NamedTuple

from statekit._native import ffi, lib
from statekit.errors import native_error
from statekit.native.columns import Column
from statekit.native.states import State
from statekit.native.store import Store

_IS_TO_LOAD = bytes(mark == lib.SK_TO_LOAD for mark in range(256))  # for bytes.translate()


class ChainSegment(NamedTuple):
    """One step of a leaf's chain: frames, and where a pack has them."""

    leaf: int
    data: bytes  # that the frames are in
    start: int  # of the frames, in data
    length: int
    pack_id: bytes
    offset: int  # of the frames, in the pack


def pick_entries(
    store: Store, state: State, keys: Column, segments: Sequence[ChainSegment]
) -> list[int]:
    """Brings the entries of keys here out of the chains of their leaves, "under" what is here.

    segments: by leaf, ascending, each chain newest first and all of it. A key that has no entry is
    known to be missing then. Returns the leaves that are to be loaded as a whole instead, because
    that is less work, or because something is wrong with them.
    """
    native = ffi.new("sk_segment[]", len(segments))
    pointers: dict[int, Any] = {}  # to each data, by id: several segments lie in one
    for at, (leaf, data, start, length, pack_id, offset) in enumerate(segments):
        one = native[at]
        for held in (data, pack_id):
            if id(held) not in pointers:
                pointers[id(held)] = ffi.from_buffer("uint8_t[]", held)
        one.leaf = leaf
        one.frames = pointers[id(data)] + start
        one.len = length
        one.pack = pointers[id(pack_id)]
        one.offset = offset
    column = ffi.new("sk_column *")
    keys.fill(column)
    outcomes = bytearray(store.leaves)
    status = lib.sk_chains_pick(
        store._ptr,
        state._id,
        column,
        keys.n,
        native,
        len(segments),
        ffi.from_buffer("uint8_t[]", outcomes),
    )
    if status:
        raise native_error(status, state.name)
    return [*compress(count(), outcomes.translate(_IS_TO_LOAD))]
