"""StateTable: a state of a checkpoint as a table, which is read when somebody asks for its rows.

Leaves are read in runs: those that lie close together in a pack with one call, so that an object
store sees few requests. Of most leaves the newest segment says all about the state: then its
columns become Arrow as they are. Where there are changes over it, a store puts the two together, as
it does when a checkpoint is restored.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from datetime import timedelta
from time import time
from typing import TYPE_CHECKING, Any, TypedDict

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import ArgumentError, SchemaError, package, shorten
from statekit.format.manifest import Segment
from statekit.format.pack import Stored, unpack_chain
from statekit.native import Block, Store
from statekit.native.block import block_pieces
from statekit.native.kinds import NO_TIME
from statekit.native.ttl import TTL
from statekit.render.columns import BATCH_ROWS, Piece, StateColumns, piece_of
from statekit.schema import StateSchema

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from statekit.checkpoint.reader import Checkpoint

_RUN_BYTES = 8 << 20  # of leaves that are read at once


class TableOptions(TypedDict, total=False):
    """What StateTable takes besides the state."""

    key_groups: KeyGroups | None
    batch_rows: int
    ttl: timedelta | float | None
    text: Collection[str]
    stamps: bool


class StateTable:
    """One state of a checkpoint, or of some of its key-groups.

    DuckDB, Polars, pandas (from 3.0) and pyarrow take it for a table (__arrow_c_stream__). It can
    be read any number of times.

    key_groups: only these. batch_rows: how many rows are made at a time. ttl: leave out entries
    that were not touched for so long, by the watermark of the checkpoint or by the clock, as the
    state has it. text: types that are to be text (render/columns.py). stamps: with a column that
    says when each entry of a state with a time to live was last touched.
    """

    def __init__(
        self,
        checkpoint: "Checkpoint",
        state: StateSchema,
        *,
        key_groups: KeyGroups | None = None,
        batch_rows: int = BATCH_ROWS,
        ttl: timedelta | float | None = None,
        text: Collection[str] = (),
        stamps: bool = False,
    ) -> None:
        if type(batch_rows) is not int or batch_rows < 1:
            raise ArgumentError(f"a batch cannot have {shorten(batch_rows)} rows. Pass 1 or more.")
        self.checkpoint = checkpoint
        self.state = state
        self._columns = StateColumns(state, text=text, stamps=stamps)
        self._groups = _chosen(checkpoint, key_groups)
        self._batch_rows = batch_rows
        self._ttl_ms = None if ttl is None else _ttl_ms(state, ttl)

    @property
    def schema(self) -> "pyarrow.Schema":
        """The columns: they follow from the declared type of the state alone."""
        return self._columns.schema

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.schema)
        return (
            f"<StateTable of state {self.state.name!r}, key-groups {show_groups(self._groups)} of "
            f"{self.checkpoint!r}: {columns}>"
        )

    def __iter__(self) -> "Iterator[pyarrow.RecordBatch]":
        """The rows, in batches of batch_rows; the last may have fewer."""
        return self._columns.batches(self._pieces(), self._batch_rows)

    def read(self) -> "pyarrow.Table":
        """All rows at once."""
        import pyarrow

        return pyarrow.Table.from_batches(self, self.schema)

    def to_pandas(self) -> "pandas.DataFrame":
        """All rows as a data frame."""
        package("pandas", "to_pandas()")
        return self.read().to_pandas()

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        import pyarrow

        reader = pyarrow.RecordBatchReader.from_batches(self.schema, self)
        return reader.__arrow_c_stream__(requested_schema)

    # ---- Reading

    def _pieces(self) -> Iterator[Piece]:
        found = state_pieces(self.checkpoint, self.state, self._groups)
        if self._ttl_ms is None:
            return found
        is_event = self.state.clock == "event"
        now_ms = self.checkpoint.watermark if is_event else int(time() * 1000)
        if now_ms is None:
            return found  # before the first watermark nothing expires
        last = max(now_ms - self._ttl_ms, NO_TIME)
        return (piece._replace(skip=_expired(piece, last)) for piece in found)


def state_pieces(
    checkpoint: "Checkpoint", state: StateSchema, groups: tuple[range, ...]
) -> Iterator[Piece]:
    """All entries of a state in some key-groups, leaf by leaf."""
    scratch: Store | None = None
    for leaf, steps in _chains(checkpoint, groups):
        blocks = [
            (block, data)
            for step in steps
            for block, data in block_pieces(step)
            if block.name == state.name
        ]
        if not blocks:
            continue
        block = blocks[0][0]
        if len(blocks) > 1 or block.is_delta:
            if scratch is None:
                scratch = _empty_store(checkpoint, state)
            whole = _folded(scratch, leaf, [bytes(data) for _, data in blocks])
            if not whole:
                continue
            block = Block(whole)
        yield piece_of(block, state)


def _expired(piece: Piece, last: int) -> Any:
    """A byte for each entry, 1 if it was last touched at `last` or before; None if none was."""
    if piece.stamps is None:
        return None
    import numpy

    stamps = numpy.frombuffer(piece.stamps, "q")
    expired = (stamps <= last) & (stamps != NO_TIME)
    return expired.view("u1") if expired.any() else None


def _chosen(checkpoint: "Checkpoint", key_groups: KeyGroups | None) -> tuple[range, ...]:
    if key_groups is None:
        return checkpoint.key_groups
    asked = group_ranges(key_groups, checkpoint.key_group_count)
    if missing := subtract(asked, checkpoint.key_groups):
        raise ArgumentError(
            f"checkpoint {checkpoint.number} of {checkpoint.url!r} does not have the key-groups "
            f"{show_groups(missing)}. It has {show_groups(checkpoint.key_groups)} of "
            f"{checkpoint.key_group_count}."
        )
    return asked


def _ttl_ms(state: StateSchema, ttl: timedelta | float) -> int:
    if not state.timed:
        raise SchemaError(
            f"state {state.name!r} is stored without a time to live, so it is not known when its "
            "entries were touched. Leave ttl out."
        )
    return TTL(ttl).after_ms


def _chains(
    checkpoint: "Checkpoint", groups: tuple[range, ...]
) -> Iterator[tuple[int, list[bytes]]]:
    """The steps of each leaf of some key-groups, newest first, as Checkpoint.read_leaf() has them.

    Leaves without entries are left out.
    """
    manifest = checkpoint.manifest
    leaves = manifest.segments.leaves  # one for each segment, ascending
    run: list[list[Segment]] = []
    size = 0
    for part in leaf_ranges(groups, checkpoint.subgroups):
        some = leaves[bisect_left(leaves, part.start) : bisect_left(leaves, part.stop)]
        for chain in manifest.locate(dict.fromkeys(some)):
            run.append(chain)
            size += sum(segment.length for segment in chain)
            if size >= _RUN_BYTES:
                yield from _read_run(checkpoint, run)
                run, size = [], 0
    yield from _read_run(checkpoint, run)


def _read_run(
    checkpoint: "Checkpoint", run: list[list[Segment]]
) -> Iterator[tuple[int, list[bytes]]]:
    manifest = checkpoint.manifest
    by_pack: dict[int, list[Segment]] = {}
    for chain in run:
        for segment in chain:
            by_pack.setdefault(segment.pack, []).append(segment)
    data = {pack: checkpoint.read_joined(pack, of_it) for pack, of_it in by_pack.items()}
    for chain in run:
        stored = []
        for segment in chain:
            start, piece = data[segment.pack][segment.offset]
            at = segment.offset - start
            frames = piece[at : at + segment.length]
            stored.append(Stored(manifest.packs[segment.pack], segment, frames, None))
        leaf = chain[0].leaf
        yield (
            leaf,
            unpack_chain(stored, manifest.leaves, checkpoint.storage.file, checkpoint.number),
        )


def _empty_store(checkpoint: "Checkpoint", schema: StateSchema) -> Store:
    store = Store(checkpoint.key_group_count, checkpoint.subgroups)
    store.mark(0, store.leaves, "away")
    store.state(schema.name, schema.kind, schema.key, timed=schema.timed)  # type: ignore[call-overload]
    return store


def _folded(store: Store, leaf: int, steps: list[bytes]) -> bytes:
    """One full block of a leaf from its steps, newest first; empty if nothing is left."""
    store.mark(leaf, leaf + 1, "absent")
    try:
        store.decode_chain(leaf, steps)
        return store.encode_leaf(leaf)
    finally:
        store.mark(leaf, leaf + 1, "away")
