"""Items: what travels in a channel from a sender to a receiver, in one order.

    records      a batch: what the job is about
    Watermark    no record before this time will come on this channel
    Barrier      the state of checkpoint n contains what came before, and nothing that comes after
    Mark         records of these key-groups go to their new owner from here on
    End          nothing comes any more

A channel keeps their order, and loses and repeats nothing. That is all that is asked of it:
between two channels there is no order.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol, Self, TypeAlias

#: Before all time, and after it: watermarks are milliseconds of 64 bits.
FIRST, LAST = -(1 << 63), (1 << 63) - 1


class Records(Protocol):
    """A batch. What the order is about needs to know no more of it than this."""

    @property
    def bytes(self) -> int:
        """The memory that it takes."""

    def groups(self) -> Collection[int]:
        """The key-groups of its records."""

    def split(self, groups: Collection[int]) -> tuple[Self | None, Self | None]:
        """The records of these key-groups, and the others, each in their order; None if none."""


class Change(NamedTuple):
    """Key-groups that get another owner."""

    groups: frozenset[int]
    old: str
    new: str


class Move(NamedTuple):
    """A version of the routing: what is different from the version before."""

    version: int
    changes: tuple[Change, ...]

    @property
    def involved(self) -> tuple[str, ...]:
        """The receivers that are told of it in their channels: old owners, then new ones."""
        named = [change.old for change in self.changes] + [change.new for change in self.changes]
        return tuple(dict.fromkeys(named))


class Watermark(NamedTuple):
    time: int


class Barrier(NamedTuple):
    number: int


class Mark(NamedTuple):
    move: Move


class End(NamedTuple):
    pass


Item: TypeAlias = Records | Watermark | Barrier | Mark | End
