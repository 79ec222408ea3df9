"""GoingOn: what a home remembers of hand-overs into it, and how a later life goes on with them.

The home's record (homes/record.py, HomeArrival) names a hand-over before it is asked for, and its
leases before a leaf can move in. Whoever opens the home after a crash may go on with it, under the
id and the name that the old owner knows. docs/protocol.md says why that is safe.
"""

import threading
from abc import abstractmethod
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from statekit.assignment import (
    KeyGroups,
    common,
    group_ranges,
    leaf_ranges,
    show_groups,
    subtract,
)
from statekit.errors import (
    ArgumentError,
    LeaseError,
    OccupiedError,
    PeerError,
    StateKitError,
)
from statekit.homes.record import HomeArrival
from statekit.migration.arrival import Arrival
from statekit.migration.shell import Shell
from statekit.protocol.calls import (
    BeginCall,
    BeginReply,
    GiveBackCall,
    InstalledCall,
    PeerHello,
)
from statekit.protocol.messages import cut_leases
from statekit.residence.sources import PullSource
from statekit.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

# A checkpoint to begin from: how to read it, and which one it is.
Base: TypeAlias = tuple[PullSource, bytes]


class GoingOn(Shell):
    """The part of a NewOwnerShell (new_owner.py) that a home is for."""

    _arrivals: dict[str, Arrival]

    @abstractmethod
    def _accept(
        self,
        channel: "PeerChannel",
        reply: BeginReply,
        granted: tuple[range, ...],
        strategy: str,
        base: PullSource | None,
        is_known: bool,
        here: Collection[int] | None = None,
    ) -> Arrival: ...

    def _record_offer(self, address: str, reply: BeginReply, granted: tuple[range, ...]) -> None:
        """The home is told what is coming before anything can come. The owner's lock is held."""
        offer = reply.offer
        known = {one.migration: one for one in self._owner.interrupted()}
        entry = known.get(offer.migration) or HomeArrival(
            granted, offer.migration, self.name, offer.source, address
        )
        leases = [(grant.leaves, grant.epoch) for grant in offer.grants]
        entry = entry._replace(key_groups=granted, leases=leases)
        if not reply.based:
            entry = entry._replace(base="", base_shown="")
        self._owner.record_arriving(entry)

    def _go_on(
        self,
        channel: "PeerChannel",
        hello: PeerHello,
        key_groups: KeyGroups | None,
        strategy: str,
        base: Base | None,
        is_known: bool,
    ) -> Arrival | None:
        """Goes on with what was coming from there when an earlier life of this provider ended.

        The old owner sees the same hand-over go on. It was told of no leaf that is not at home, and
        keeps all others. None: nothing of it is wanted, or left.
        """
        asked = None if key_groups is None else group_ranges(key_groups, hello.key_groups)
        for entry in self._owner.interrupted():
            # Those of this life go on by themselves.
            is_ours = entry.target == self.name or entry.migration in self._arrivals
            if entry.source != hello.name or is_ours:
                continue
            self._check_one_owner(channel.address, common(entry.held, hello.owned))
            groups = subtract(entry.key_groups, hello.owned)  # which it has taken back
            if asked is None and groups:
                self._check_left(channel.address, groups)
            if asked is None or common(asked, groups) or not groups:
                if asked is not None and groups and (others := subtract(asked, groups)):
                    raise ArgumentError(
                        f"of key-groups {show_groups(asked)}, {show_groups(common(asked, groups))} "
                        f"are still on their way from {channel.address} since an earlier process "
                        f"of this home. Fetch these first, and {show_groups(others)} then."
                    )
                arrival = self._go_on_with(channel, entry, groups, strategy, base, is_known)
                if arrival is not None:
                    return arrival
        return None

    def _check_left(self, address: str, groups: tuple[range, ...]) -> None:
        """Whoever goes on with a hand-over owns what it brings: nobody else may be doing so.

        Where several processes may have the home open, only the user can know that.
        """
        home = self._residence.home
        if home is None or home.is_locked:
            return
        shown = show_groups(groups)
        raise ArgumentError(
            f"key-groups {shown} are on their way from {address} into this home, to a provider "
            "that may be open in another process. If that one is gone for good, name these as "
            "key_groups=, and fetch_from() goes on with them. If it lives, name others."
        )

    def _go_on_with(
        self,
        channel: "PeerChannel",
        entry: HomeArrival,
        groups: tuple[range, ...],
        strategy: str,
        base: Base | None,
        is_known: bool,
    ) -> Arrival | None:
        self._tell_held(channel, entry)
        if entry.returned:
            leases = tuple((leaf, epoch) for run, epoch in entry.returned for leaf in run)
            channel.give_back(GiveBackCall(entry.migration, self.generation, leases))
            self._owner.record_told(entry.migration)
        if (back := subtract(entry.key_groups, groups)) and entry.leases:
            self._owner.record_lost(back)
        if not groups:
            self._owner.forget_recorded(entry.migration)
            return None
        digest = b"" if base is None else base[1]
        if entry.base and digest.hex() != entry.base:
            raise ArgumentError(
                f"what is still on its way from {channel.address} was begun from "
                f"{entry.base_shown}: give that checkpoint as base=."
            )
        above = max((epoch for _, epoch in entry.leases), default=0)
        call = BeginCall(
            entry.migration, self.generation, entry.target, entry.every, 0, digest, above
        )
        try:
            reply = channel.begin(call)
        except PeerError:
            raise
        except StateKitError:
            # It is over there: what we have all of was let go of, and the rest was taken back.
            self._owner.record_over(entry.migration)
            return None
        grants = reply.offer.grants
        if entry.leases and [(one.leaves, one.epoch) for one in grants] != [*entry.leases]:
            raise PeerError(
                f"{channel.address} offers other leaves than it did before this provider was "
                "opened again. It is not to be trusted; nothing was taken over."
            )
        ranges = leaf_ranges(groups, self.subgroups)
        with self._owner.lock:
            if both := common(groups, self._owner.owned()):
                raise OccupiedError(f"key-groups {show_groups(both)} are this provider's already.")
            here = self._residence.moved_in(ranges) if entry.leases else None
        left = [
            one._replace(leaves=run)
            for one in grants
            for run, _ in cut_leases([(one.leaves, 0)], ranges)
        ]
        reply = reply._replace(sizes=_cut_sizes(reply, ranges))
        reply = reply._replace(offer=reply.offer._replace(grants=tuple(left)))
        changes_to = base[0] if base is not None and reply.based else None
        maker = threading.get_ident()

        def accept(_: object) -> Arrival:
            arrival = self._accept(channel, reply, groups, strategy, changes_to, is_known, here)
            arrival.maker = maker  # who was lent the channel: not the thread that does this
            return arrival

        # If Ctrl-C cut it in two, what has come could not be given back, as it is otherwise.
        return uninterrupted(accept)

    def _tell_held(self, channel: "PeerChannel", entry: HomeArrival) -> None:
        """Tells the old owner of key-groups that were complete when the home was opened again."""
        held = cut_leases([*entry.leases], leaf_ranges(entry.held, self.subgroups))
        leases = tuple((leaf, epoch) for run, epoch in held for leaf in run)
        if not leases:
            return
        self.make_durable()
        channel.installed(InstalledCall(entry.migration, self.generation, leases))

    def _check_one_owner(self, address: str, groups: tuple[range, ...]) -> None:
        """LeaseError if key-groups that came from there are still ours, and there again."""
        with self._owner.lock:
            both = common(groups, self._owner.owned())
        if both:
            raise LeaseError(
                f"{address} has taken key-groups {show_groups(both)} back, because it was told "
                "that this provider is gone for good; but they had all come, and its home has "
                "them. Both have them now: close one of the two, and replay what the other one is "
                "to have."
            )

    def make_durable(self) -> None:
        """What has come survives a crash, as far as the home promises that."""
        if (ledger := self._residence.ledger) is not None:
            ledger.make_durable()

    def record_returned(self, migration: str, leases: Iterable[tuple[int, int]]) -> None:
        """Before the source hears that leaves are its own again, our home must know it."""
        self._owner.record_returned(migration, leases)

    def record_told(self, migration: str) -> None:
        """The source has heard it."""
        self._owner.record_told(migration)


def _cut_sizes(reply: BeginReply, ranges: Sequence[range]) -> "array[int]":
    """The sizes of those leaves only, in their order."""
    found, at = array("Q"), 0
    for grant in reply.offer.grants:
        start = grant.leaves.start
        for run, _ in cut_leases([(grant.leaves, 0)], ranges):
            found += reply.sizes[at + run.start - start : at + run.stop - start]
        at += len(grant.leaves)
    return found
