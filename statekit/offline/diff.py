"""How two checkpoints, or other sources like them, differ: which keys came, went and changed.

They are compared leaf by leaf, so it needs the memory of one leaf. If both have a leaf from the
same places in the same files, it is equal and need not be read. Of two checkpoints in one
directory, that goes for most leaves.

They need not have the same number of leaves. Leaves are prefixes of the routing hash, so one leaf
of the smaller number is a row of neighbouring leaves of the larger one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from statekit.render import PlainCodec
from statekit.schema import StateSchema

Kind: TypeAlias = Literal["added", "removed", "changed", "touched"]
_Rows: TypeAlias = dict[bytes, tuple[Any, int | None]]


class Readable(Protocol):
    """State that is read leaf by leaf, as a Checkpoint is."""

    @property
    def states(self) -> Mapping[str, StateSchema]: ...

    @property
    def leaf_count(self) -> int: ...

    def leaves(self) -> Iterator[int]:
        """The leaves that may have entries, ascending."""

    def leaf_bytes(self, leaf: int) -> int: ...

    def place(self, leaf: int) -> object:
        """Where a leaf lies: leaves of equal places are equal, and not read; None: not known."""

    def leaf_rows(self, leaf: int) -> dict[str, _Rows]: ...


class Difference(NamedTuple):
    """One key that differs. Values are as Block gives them; None if there is none."""

    kind: Kind  # "touched": the value is the same, and its time to live starts at another time
    key: bytes  # encoded
    before: Any
    after: Any


@dataclass
class StateDiff:
    """One state: how many keys differ, and the first of them."""

    name: str
    before: StateSchema | None
    after: StateSchema | None
    added: int = 0
    removed: int = 0
    changed: int = 0
    touched: int = 0
    first: list[Difference] = field(default_factory=list)
    _codecs: tuple[PlainCodec, PlainCodec] | None = field(default=None, repr=False)

    @property
    def is_same(self) -> bool:
        entries = self.added + self.removed + self.changed + self.touched
        return not entries and self.before == self.after

    def _are_equal(self, before: Any, after: Any) -> bool:
        """Equal values may have different bytes: sets and maps are stored in insertion order."""
        if self._codecs is None:
            assert self.before is not None
            assert self.after is not None
            self._codecs = PlainCodec(self.before), PlainCodec(self.after)
        was, now = self._codecs
        return bool(was.read(before) == now.read(after))

    def _add(self, difference: Difference, limit: int) -> None:
        setattr(self, difference.kind, getattr(self, difference.kind) + 1)
        if len(self.first) < limit:
            self.first.append(difference)


def diff(
    before: Readable,
    after: Readable,
    *,
    limit: int = 10,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[StateDiff]:
    """All states of both, in the order of their names. limit: how many differences are kept."""
    found = {
        name: StateDiff(name, before.states.get(name), after.states.get(name))
        for name in sorted({*before.states, *after.states})
    }
    for ours, theirs in _pairs(before, after, on_bytes):
        for name, state in found.items():
            for difference in _compare(state, ours.get(name, {}), theirs.get(name, {})):
                state._add(difference, limit)
    return list(found.values())


def _pairs(
    before: Readable, after: Readable, on_bytes: Callable[[int], None]
) -> Iterator[tuple[dict[str, _Rows], dict[str, _Rows]]]:
    """The rows of both for the same part of the hash range."""
    parts = min(before.leaf_count, after.leaf_count)
    factors = [one.leaf_count // parts for one in (before, after)]
    chosen = {leaf // factors[0] for leaf in before.leaves()}
    chosen |= {leaf // factors[1] for leaf in after.leaves()}
    for part in sorted(chosen):
        leaves = [range(part * factor, (part + 1) * factor) for factor in factors]
        places = [
            [one.place(leaf) for leaf in group]
            for one, group in zip((before, after), leaves, strict=True)
        ]
        if places[0] != places[1] or None in places[0]:
            yield _rows(before, leaves[0]), _rows(after, leaves[1])
        on_bytes(sum(map(before.leaf_bytes, leaves[0])) + sum(map(after.leaf_bytes, leaves[1])))


def _rows(source: Readable, leaves: range) -> dict[str, _Rows]:
    if len(leaves) == 1:
        return source.leaf_rows(leaves[0])
    found: dict[str, _Rows] = {}
    for leaf in leaves:
        for name, rows in source.leaf_rows(leaf).items():
            found.setdefault(name, {}).update(rows)
    return found


def _compare(state: StateDiff, before: _Rows, after: _Rows) -> Iterator[Difference]:
    was, now = state.before, state.after
    if was is not None and now is not None and (was.key, was.form) != (now.key, now.form):
        # Another kind of state under the same name: all entries are new.
        yield from (Difference("removed", key, row[0], None) for key, row in before.items())
        yield from (Difference("added", key, None, row[0]) for key, row in after.items())
        return
    for key, (value, stamp) in before.items():
        row = after.get(key)
        if row is None:
            yield Difference("removed", key, value, None)
        elif row[0] != value and not state._are_equal(value, row[0]):
            yield Difference("changed", key, value, row[0])
        elif row[1] != stamp:
            yield Difference("touched", key, value, row[0])
    for key, (value, _) in after.items():
        if key not in before:
            yield Difference("added", key, None, value)
