"""RoutingTable: which participant is to have which leaf, as ranges, with a version.

Neighbouring leaves mostly have the same owner, so a table of many leaves is a few ranges. A table
never changes: a later one is made from it, and the difference of the two says what has to move.

>>> table = RoutingTable.assigned(1, {"a": [range(0, 2)], "b": [range(2, 4)]}, subgroups=4)
>>> table.owner_of(7), table.owner_of(8)
('a', 'b')
>>> table.moved(range(4, 10), "c").diff(table)
(Move(start=4, stop=8, old='a', new='c'), Move(start=8, stop=10, old='b', new='c'))
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import NamedTuple

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges
from statekit.errors import ArgumentError


class Move(NamedTuple):
    """Leaves start..stop-1 have another owner."""

    start: int
    stop: int
    old: str
    new: str


class RoutingTable(NamedTuple):
    """Leaves starts[i]..starts[i+1]-1 are names[i]'s; neighbours in `names` differ."""

    version: int
    leaves: int  # how many there are
    starts: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, version: int, owners: Sequence[str]) -> "RoutingTable":
        """From one owner per leaf, as messages have them."""
        starts, names, at = [], [], 0
        for owner, run in groupby(owners):
            starts.append(at)
            names.append(owner)
            at += sum(1 for _ in run)
        return cls(version, at, tuple(starts), tuple(names))

    @classmethod
    def assigned(
        cls, version: int, assignment: Mapping[str, KeyGroups], subgroups: int
    ) -> "RoutingTable":
        """From key-groups: each of 0, 1, 2, ... must be assigned to exactly one owner."""
        pieces = sorted(
            (part.start, part.stop, owner)
            for owner, groups in assignment.items()
            for part in leaf_ranges(group_ranges(groups), subgroups)
        )
        at = 0
        for start, stop, owner in pieces:
            if start != at:
                what = "nobody" if start > at else "more than one"
                raise ArgumentError(
                    f"key-group {min(start, at) // subgroups} is assigned to {what} "
                    f"(next to {owner!r}). Assign each key-group to one owner."
                )
            at = stop
        spread = (repeat(owner, stop - start) for start, stop, owner in pieces)
        return cls.of(version, list(chain.from_iterable(spread)))

    def owner_of(self, leaf: int) -> str:
        if not 0 <= leaf < self.leaves:
            raise ArgumentError(f"there is no leaf {leaf}. They are 0 to {self.leaves - 1}.")
        return self.names[bisect_right(self.starts, leaf) - 1]

    def owners(self) -> tuple[str, ...]:
        """One owner per leaf."""
        return tuple(chain.from_iterable(repeat(name, len(part)) for part, name in self.parts()))

    def parts(self) -> list[tuple[range, str]]:
        """All ranges of leaves and their owners, in order."""
        stops = (*self.starts[1:], self.leaves)
        return [
            (range(start, stop), name)
            for start, stop, name in zip(self.starts, stops, self.names, strict=True)
        ]

    def leaves_of(self, owner: str) -> tuple[range, ...]:
        return tuple(part for part, name in self.parts() if name == owner)

    def moved(self, leaves: Iterable[int], owner: str) -> "RoutingTable":
        """The next version, in which these leaves are `owner`'s."""
        owners = list(self.owners())
        for leaf in leaves:
            self.owner_of(leaf)
            owners[leaf] = owner
        return RoutingTable.of(self.version + 1, owners)

    def diff(self, older: "RoutingTable") -> tuple[Move, ...]:
        """What has to move from the older table to this one, as the longest possible ranges."""
        if older.leaves != self.leaves:
            raise ArgumentError(
                f"tables of {older.leaves} and {self.leaves} leaves do not compare."
            )
        moves: list[Move] = []
        bounds = sorted({*self.starts, *older.starts})
        for start, stop in zip(bounds, (*bounds[1:], self.leaves), strict=True):
            old, new = older.owner_of(start), self.owner_of(start)
            if old == new:
                continue
            if moves and moves[-1].stop == start and moves[-1][2:] == (old, new):
                start = moves.pop().start
            moves.append(Move(start, stop, old, new))
        return tuple(moves)
