"""Assemble: a leaf as one whole, from what is here of it and from the base that it lies over.

A leaf that is not whole has its rest elsewhere, in its *base*: the rows of a home, or the chain of
a checkpoint (the steps that PullSource.read_leaf() gives). A checkpoint, another process or another
home wants the leaf as one. The rule is the same wherever that is:

    What is here wins. Then comes the base, its newest part first, and each part fills in only what
    is not known yet. What is unknown after the last part is missing: the leaf is whole.

Why that is right:

1. What is here is newer than the base. An entry leaves memory only after the home has confirmed
   it, and what came from a chain was put under what was here. A deletion counts as something that
   is here: its tombstone stays until the leaf is whole.
2. Of a chain, a step is newer than those behind it. A full block says all about its state, so what
   lies under it is not among the steps at all (checkpoint/reader.py). Rows of a home have one
   version each, so there is no order among them.
3. So whichever part knows an entry first has its newest version, and what is known is never
   touched again. Hence it can be broken off after any part and begun again, and what is written
   to the leaf meanwhile is simply something that is here.

Parts are bytes of any age: a state may have had another type then (int that is float by now).
Store.decode_chain() rewrites such blocks; rows are read as what the state is now (homes/rows.py).

A row whose time to live is over is left out; what is here says so by itself.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from statekit.errors import BadValueError, CorruptBlockError, where
from statekit.homes.home import row_name
from statekit.homes.rows import NUMBER_KINDS, STAMP_MARK, native_value, split_stamp
from statekit.native import Store
from statekit.native.buffers import BufferSlice
from statekit.native.states import State
from statekit.schema import StateSchema

Rows: TypeAlias = Iterable[tuple[int, bytes, bytes]]  # number of the state, encoded key, row
RowsByKey: TypeAlias = dict[tuple[int, bytes], bytes | None]  # by number and key; None: deleted


class Assembly:
    """A store of its own, like another one, in which leaves are put together one by one.

    Several threads may do so at a time, with different leaves.
    """

    def __init__(self, scratch: Store, schemas: Sequence[StateSchema]) -> None:
        """scratch: owns nothing, and is the assembly's from now on.

        schemas: of all states that a base may have rows of, by their numbers at home.
        """
        self._scratch = scratch
        self._states = declare(scratch, schemas)

    @classmethod
    def beside(
        cls, store: Store, schemas: Sequence[StateSchema], watermark: int | None
    ) -> "Assembly":
        """One for the leaves of a store, as it is now, at this event time."""
        return cls(empty_twin(store, watermark), schemas)

    def over_rows(self, leaf: int, here: bytes, rows: Rows, state: str | None = None) -> bytes:
        """Blocks of a leaf, all or those of one state, from blocks over the rows of a home."""
        scratch = self._scratch
        scratch.mark(leaf, leaf + 1, "absent")
        try:
            if here:
                scratch.decode_leaf(leaf, here, "over")
            install_rows(self._states, rows)
            scratch.mark(leaf, leaf + 1, "whole")
            only = [raw for raw in scratch.states() if raw.name == state]
            assert state is None or only, f"the assembly is not of a store that has {state!r}"
            return scratch.encode_leaf(leaf, only[0] if only else None)
        finally:
            scratch.mark(leaf, leaf + 1, "away")

    def over_steps(self, leaf: int, here: bytes, steps: Sequence[bytes | BufferSlice]) -> bytes:
        """Blocks of a leaf from blocks over a chain, newest step first."""
        scratch = self._scratch
        scratch.mark(leaf, leaf + 1, "absent")
        try:
            if here:
                scratch.decode_leaf(leaf, here, "over")
            scratch.decode_chain(leaf, steps)
            return scratch.encode_leaf(leaf)
        finally:
            scratch.mark(leaf, leaf + 1, "away")

    def close(self) -> None:
        self._scratch.close()


def empty_twin(store: Store, watermark: int | None) -> Store:
    """A store with the same leaves and states, at this event time, that owns nothing."""
    twin = Store(store.key_groups, store.subgroups)
    twin.mark(0, store.leaves, "away")
    if watermark is not None:
        twin.set_time("event", watermark)
    for raw in store.states():
        other = twin.state(raw.name, raw.kind, raw.codec.text, timed=raw.timed)  # type: ignore[call-overload]
        if raw.ttl_settings is not None:
            after_ms, clock, on_read = raw.ttl_settings
            other.ttl(after_ms, clock=clock, on_read=on_read)
    return twin


def declare(store: Store, schemas: Sequence[StateSchema]) -> list[State]:
    """The native states of schemas. Those that the store has are left as they are.

    A state may be stored, and not declared by this process: then only its schema is known.
    """
    known = {raw.name: raw for raw in store.states()}
    found: list[State] = []
    for schema in schemas:
        raw = known.get(schema.name)
        if raw is None:
            raw = store.state(schema.name, schema.kind, schema.key, timed=schema.timed)  # type: ignore[call-overload]
        found.append(raw)
    return found


def install_rows(states: Sequence[State], rows: Rows) -> None:
    """Puts rows of a home under what a store has. states: by their numbers at home."""
    for number, key, row in rows:
        raw = states[number]
        encoded, stamp = read_row(raw, row)
        try:
            if encoded is not None:
                raw.install_encoded(key, encoded, stamp)
        except BadValueError as error:
            raise bad_row(raw, error) from None


def rows_over(here: RowsByKey, rows: Rows) -> RowsByKey:
    """The same rule where a leaf stays rows, on its way from one home to another.

    Rows are not read then: a stamp that a row has not got yet is not made up on the way.
    """
    merged: RowsByKey = {(number, key): row for number, key, row in rows}
    merged.update(here)
    return merged


def named_rows(leaf: int, rows: RowsByKey) -> list[bytes | None]:
    """Rows of a leaf as one flat list (homes/home.py, Named); deletions are left out."""
    named: list[bytes | None] = []
    for (number, key), row in rows.items():
        if row is not None:
            named += (row_name(leaf, number, key), row)
    return named


def read_row(raw: State, row: bytes | None) -> tuple[bytes | None, int | None]:
    """What to install for a row of the home: encoded value (None: there is none) and stamp."""
    if row is None:
        return None, None
    kind, stamp = raw.kind, None
    if row[:2] == STAMP_MARK:  # else there is no stamp: no need to ask
        row, stamp = split_stamp(kind, row)
        if stamp is not None and raw.timed and raw.is_expired(stamp):
            return None, stamp
    return (native_value(kind, row) if kind in NUMBER_KINDS else row), stamp


def bad_row(raw: State, error: BadValueError) -> CorruptBlockError:
    """The exception for a row that the store does not take."""
    return CorruptBlockError(
        f"the home's row for this key is no {raw.kind} ({error}){where(raw.name)}. "
        "Check whether another program wrote to the home, or restore it."
    )
