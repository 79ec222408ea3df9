"""Folding: the chain of a leaf, a full segment and the changes over it, put together."""

from typing import Any

from statekit.checkpoint.reader import Checkpoint
from statekit.native import Store
from statekit.native.block import Block, block_pieces, fit_blocks
from statekit.residence.assemble import Assembly
from statekit.schema import StateSchema

_FOREVER_MS = 1 << 62


class Folder:
    """Puts the chains of a checkpoint's leaves together, one at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        schemas = checkpoint.manifest.schemas
        self._types = {schema.name: (schema.kind, schema.timed) for schema in schemas}
        scratch = Store(checkpoint.key_group_count, checkpoint.subgroups)
        scratch.mark(0, scratch.leaves, "away")
        self._assembly = Assembly(scratch, schemas)

    def fold(self, leaf: int) -> bytes:
        """One full block for each state that has entries in the leaf."""
        steps = self._checkpoint.read_leaf(leaf)
        data = steps[0] if steps else b""
        if len(steps) > 1 or any(block.is_delta for block in Block.each(data)):
            data = self._assembly.over_steps(leaf, b"", steps)
        else:
            data = fit_blocks(data, self._types)
        return b"".join(piece for block, piece in block_pieces(data) if block.entries)


def declare_timed(store: Store, schema: StateSchema) -> Any:
    """The native state of a schema. Entries get stamps from its clock, but never expire."""
    kind: Any = schema.kind
    raw: Any = store.state(schema.name, kind, schema.key, timed=schema.timed)
    if schema.timed:
        raw.ttl(_FOREVER_MS, clock=schema.clock)
    return raw
