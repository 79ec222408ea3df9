"""Folding: the chain of a leaf, a full segment and the changes over it, put together."""

from collections.abc import Iterator
from typing import Any

from statekit.checkpoint.reader import Checkpoint
from statekit.native import Store
from statekit.native.block import Block, rewrite
from statekit.schema import StateSchema

_FOREVER_MS = 1 << 62


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
        return b"".join(part for part, block in blocks_of(data) if block.entries)

    def _as_declared(self, data: bytes) -> bytes:
        """Older blocks are of the type that a state had then: int before it was float."""
        parts: list[bytes | memoryview] = []
        is_changed = False
        for part, block in blocks_of(data):
            kind, timed = self._declared.get(block.name, (block.kind, block.is_timed))
            if (kind, timed) != (block.kind, block.is_timed):
                parts.append(rewrite(part, kind=kind, timed=timed))
                is_changed = True
            else:
                parts.append(part)
        return b"".join(parts) if is_changed else data


def blocks_of(data: bytes) -> Iterator[tuple[memoryview, Block]]:
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
