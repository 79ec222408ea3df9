"""What a participant knows of one hand-over: as old owner (Outgoing), as new owner (Incoming).

The machine writes these records; the process around it may read them at any time, from any thread:
how much is missing, what was not reported, what the stream may send. It keeps no copy of its own.
So a leaf is entered in its new place before it is removed from the old one. Otherwise a thread that
looks without a lock could find the leaf in no place, and believe that the hand-over is over.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Ask(NamedTuple):
    """New owner: a Begin that nobody has answered. Whether the migration has begun is not known."""

    source: str
    leaves: tuple[range, ...]
    above: int


class Outgoing:
    """A hand-over in which leaves go from here."""

    __slots__ = (
        "back",
        "credit",
        "gone",
        "is_accepted",
        "leaves",
        "returned",
        "sent",
        "stream",
        "streamed",
        "target",
    )

    def __init__(self, target: str, leaves: Iterable[int]) -> None:
        self.target = target
        self.leaves = dict.fromkeys(leaves)  # those that are still offered
        self.back: dict[int, None] = {}  # leaves that were taken back, and are not open yet
        self.gone = 0  # leaves that the new owner has
        self.returned = 0  # leaves that are open here again
        self.is_accepted = False
        self.stream = 0  # the number of the stream that the new owner reads
        self.credit = 0  # bytes that the stream may send in all
        self.sent = 0  # bytes that the stream has sent
        self.streamed: set[int] = set()  # leaves that the stream need not send any more

    @property
    def is_over(self) -> bool:
        """Whether all is done here: no leaf is still offered, and none waits to be opened again."""
        return not (self.leaves or self.back)


class Incoming:
    """A hand-over in which leaves come here."""

    __slots__ = (
        "asked",
        "done",
        "granted",
        "installed",
        "is_fenced",
        "is_streaming",
        "missing",
        "partial",
        "received",
        "returned",
        "source",
        "stream",
    )

    def __init__(self, source: str) -> None:
        self.source = source
        self.missing: dict[int, int] = {}  # leaf, epoch: leaves that are not here as a whole
        self.asked: set[int] = set()  # of those: somebody has asked for all of it, and waits
        self.partial: dict[int, None] = {}  # of those: some of its entries are here
        self.installed: dict[int, None] = {}  # whole leaves that the old owner has not let go of
        self.returned: dict[int, int] = {}  # leaf, epoch: given back; the old owner may not know
        self.done = 0  # leaves that have come as a whole
        self.stream = 0  # the number of the last stream that was opened
        self.is_streaming = False  # that stream brings leaves, as far as is known
        self.received = 0  # bytes that it has brought
        self.granted = 0  # bytes that it may bring in all
        self.is_fenced = False  # a later generation has begun: nothing comes, and nothing counts

    @property
    def is_over(self) -> bool:
        """Whether everything is here and the old owner knows it, or this process was fenced."""
        return self.is_fenced or not (self.missing or self.installed or self.returned)

    def install(self, leaf: int) -> None:
        """All of the leaf has come."""
        self.done += 1
        self.installed[leaf] = None
        self._leave_missing(leaf)

    def give_back(self, leaf: int, epoch: int) -> None:
        """The leaf is not wanted here any more."""
        self.returned[leaf] = epoch
        self._leave_missing(leaf)

    def drop(self, leaf: int) -> None:
        """The leaf does not come any more, or its old owner has let go."""
        self._leave_missing(leaf)
        self.installed.pop(leaf, None)

    def _leave_missing(self, leaf: int) -> None:
        self.asked.discard(leaf)
        self.partial.pop(leaf, None)
        self.missing.pop(leaf, None)
