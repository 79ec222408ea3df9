"""Whole states as Arrow, leaf by leaf; the columns are those of render/columns.py."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from statekit.errors import package
from statekit.native import Block
from statekit.render.columns import Piece, StateColumns, piece_of, piece_of_rows

if TYPE_CHECKING:
    import pyarrow

    from statekit.state.keyed import KeyedState


def arrow_schema(state: "KeyedState[Any]", text: Collection[str] = ()) -> "pyarrow.Schema":
    """The columns of a state: they follow from its declared type alone."""
    return StateColumns(state.schema, text=text).schema


def arrow_reader(
    state: "KeyedState[Any]", text: Collection[str] = ()
) -> "pyarrow.RecordBatchReader":
    """All entries of a state, in batches: each leaf as it is when it is reached."""
    pyarrow = package("pyarrow", "to_arrow()")
    columns = StateColumns(state.schema, text=text)
    batches = columns.batches(_pieces(state))
    return pyarrow.RecordBatchReader.from_batches(columns.schema, batches)


def _pieces(state: "KeyedState[Any]") -> Iterator[Piece]:
    raw, residence = state._raw, state._residence
    for leaf in residence.leaves():
        if residence.ledger is not None:  # some of its entries may be at home: rows, one by one
            if rows := list(residence.scan_leaf(raw, leaf)):
                yield piece_of_rows(rows, state.schema)
            continue
        residence.load_leaves((leaf,))
        for block in Block.each(residence.store.encode_leaf(leaf, raw)):
            yield piece_of(block, state.schema, _deleted(block))


def _deleted(block: Block) -> Any:
    """A byte for each entry, 1 if it is a deletion; None if none is."""
    marks = block.marks
    if marks is None:
        return None
    import numpy

    return numpy.frombuffer(marks, "u1")
