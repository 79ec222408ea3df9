"""Picks single entries out of the chains of leaves, as packs have them (csrc/chain.c)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from statekit._native import ffi, lib
from statekit.errors import native_error
from statekit.native.columns import Column
from statekit.native.states import State
from statekit.native.store import Store

_DONE = bytes((0, lib.SK_PICKED))


class ChainSegment(NamedTuple):
    """One step of a leaf's chain: frames, and where a pack has them."""

    leaf: int
    data: bytes  # the bytes that hold the frames
    start: int  # of the frames, in data
    length: int
    pack_id: bytes
    offset: int  # of the frames, in the pack


class Left(NamedTuple):
    """Leaves that nothing was picked from."""

    to_load: list[int]  # loading these as a whole is less work
    unfit: list[int]  # picking did not work; loading them will tell what is wrong, if anything is


def pick_entries(
    store: Store, state: State, keys: Column, segments: Sequence[ChainSegment]
) -> Left:
    """Brings the entries of keys into the store, from the chains of their leaves.

    They go "under" what is here. A key that has no entry is known to be missing then. segments: the
    whole chains, by ascending leaf, each chain newest first.
    """
    if not segments:
        return Left([], [])
    native = ffi.new("sk_segment[]", len(segments))
    pointers: dict[int, Any] = {}  # to each `data`, by its id: several segments may lie in one
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
    outcomes = bytearray(len(segments))
    native_outcomes = ffi.from_buffer("uint8_t[]", outcomes)
    status = lib.sk_chains_pick(
        store._ptr, state._id, column, keys.n, native, len(segments), native_outcomes
    )
    del native_outcomes  # it held the memory for C until here
    if status:
        raise native_error(status, state.name)
    if not outcomes.strip(_DONE):
        return Left([], [])
    return Left(
        [segments[at].leaf for at, outcome in enumerate(outcomes) if outcome == lib.SK_TO_LOAD],
        [segments[at].leaf for at, outcome in enumerate(outcomes) if outcome == lib.SK_UNFIT],
    )


def are_known(state: State, keys: Iterable[bytes]) -> bool:
    """Whether none of these encoded keys is unknown: each has an entry here or is missing."""
    ptr, number = state._ptr, state._id
    return all(lib.sk_contains(ptr, number, key, len(key)) != lib.SK_UNKNOWN for key in keys)
