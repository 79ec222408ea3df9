"""Sender: the routing of one task that sends records to a keyed stage. Pure, like align.py.

It says which receiver has a key-group, and what is to be sent besides records. Its user, who has
the sockets, sends what it returns in that order, and to each receiver after all records that were
routed to it before: nothing of these may be left in a buffer.

When the routing changes, the mark goes to the old and the new owners before any record is routed
anew, whether there are records or not: somebody waits for the marks of all senders. Old owners get
theirs first, so that they can let go while new owners still fetch their breath. All receivers hear
each watermark at once, the ones that own nothing too: a new owner knows what the old one knew.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from statekit.engine.items import FIRST, Barrier, End, Mark, Move, Watermark
from statekit.errors import EngineError


class Send(NamedTuple):
    """To be sent, after all records that were routed to this receiver before."""

    to: str
    item: Watermark | Barrier | Mark | End


class Sender:
    """Who gets what, as of the last move that this sender was told of.

    owners: the receiver of each key-group, as of version.
    receivers: all that there are; the others of them own nothing yet.
    """

    def __init__(
        self, owners: Sequence[str], receivers: Iterable[str] = (), version: int = 0
    ) -> None:
        self.owners = [*owners]
        self.version = version
        self.watermark = FIRST
        self.is_ended = False
        self._receivers = dict.fromkeys([*receivers, *owners])

    @property
    def receivers(self) -> tuple[str, ...]:
        """Those that have not left."""
        return tuple(self._receivers)

    def move(self, move: Move) -> list[Send]:
        """The coordinator says: route by this from now on."""
        self._check(move)
        self.version = move.version
        for change in move.changes:
            for group in change.groups:
                self.owners[group] = change.new
        if self.is_ended:  # the end that was sent counts as the mark
            return []
        return [Send(receiver, Mark(move)) for receiver in move.involved]

    def _check(self, move: Move) -> None:
        if move.version <= self.version:
            raise EngineError(
                f"a sender that routes by version {self.version} was told of version "
                f"{move.version}. Moves are numbered upwards, and each is told once."
            )
        for groups, old, new in move.changes:
            if new not in self._receivers:
                raise EngineError(
                    f"move {move.version} gives key-groups to {new!r}, which is no receiver here. "
                    "Open its channel first."
                )
            for group in groups:
                if not 0 <= group < len(self.owners) or self.owners[group] != old:
                    raise EngineError(
                        f"move {move.version} takes key-group {group} from {old!r}, which does not "
                        "have it."
                    )

    def advance(self, watermark: int) -> list[Send]:
        """This task will send no record before this time any more."""
        if watermark <= self.watermark or self.is_ended:
            return []
        self.watermark = watermark
        return self._to_all(Watermark(watermark))

    def barrier(self, number: int) -> list[Send]:
        """This task's part of a checkpoint contains what was sent up to here."""
        return [] if self.is_ended else self._to_all(Barrier(number))

    def end(self) -> list[Send]:
        """This task sends nothing any more."""
        if self.is_ended:
            return []
        self.is_ended = True
        return self._to_all(End())

    def open(self, receiver: str) -> list[Send]:
        """A receiver has come. It owns nothing yet."""
        if receiver in self._receivers:
            raise EngineError(f"the channel to {receiver!r} is open already. Open it once.")
        self._receivers[receiver] = None
        if self.is_ended:
            return [Send(receiver, End())]
        return [Send(receiver, Watermark(self.watermark))] if self.watermark > FIRST else []

    def leave(self, receiver: str) -> list[Send]:
        """A receiver goes. All it had was moved away."""
        if receiver not in self._receivers:
            raise EngineError(f"there is no channel to {receiver!r} that could be closed.")
        if receiver in self.owners:
            raise EngineError(f"{receiver!r} still has key-groups. Move them away first.")
        del self._receivers[receiver]
        return [] if self.is_ended else [Send(receiver, End())]

    def _to_all(self, item: Watermark | Barrier | End) -> list[Send]:
        return [Send(receiver, item) for receiver in self._receivers]
