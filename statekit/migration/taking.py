"""Taker: the new owner's part of a peer. Takes leaves on, gives them back, and says what is here.

Arrival (arrival.py) is one hand-over as the user sees it, and brings leaves; this is what makes
them ours, and another's again.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    OccupiedError,
    PeerError,
    StateKitError,
    shorten,
)
from statekit.loading import LeafSource, Loading
from statekit.migration.arrival import CLOSE_SECONDS, STRATEGIES, Arrival
from statekit.migration.member import (
    AddLate,
    Credentials,
    Member,
    Owner,
    groups_of,
    leaves_of,
    whole_groups,
)
from statekit.migration.messages import (
    Action,
    Expect,
    GiveBack,
    Moved,
    Offer,
    Send,
    Unexpect,
    WritePart,
)
from statekit.remote.calls import (
    BeginCall,
    BeginReply,
    GiveBackCall,
    PeerHello,
)
from statekit.residence import Residence

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

_log = logging.getLogger("statekit")

# A checkpoint to begin from: how to read it, and which one it is.
Base: TypeAlias = tuple[LeafSource, bytes]

SETTLE_SECONDS = 10.0  # for leaves that are still arriving to be closed before they go on


class Taker(Member):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, epochs: Mapping[int, int]) -> None:
        super().__init__(owner, residence, epochs)
        self._arrivals: dict[str, Arrival] = {}
        self._leaves_in = self._bytes_in = self._leaves_fetched = 0  # of arrivals that are over
        self._add_late: AddLate | None = None  # to our part of the last checkpoint

    @property
    def loading(self) -> Loading | None:
        return self._residence.loading

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        return tuple(self._arrivals.values())

    # ---- Taking on

    def fetch_from(
        self,
        address: str,
        key_groups: KeyGroups | None,
        strategy: str,
        base: Base | None,
        credentials: Credentials,
        timeout_s: float,
    ) -> Arrival:
        """Has key-groups handed over by another process; they are ours when this returns."""
        check_strategy(strategy)
        arrival = self._take_on(address, key_groups, strategy, base, credentials, timeout_s)
        if strategy == "all_at_once":
            arrival.wait()
        return arrival

    def _take_on(
        self,
        address: str,
        key_groups: KeyGroups | None,
        strategy: str,
        base: Base | None,
        credentials: Credentials,
        timeout_s: float,
        migration: str = "",
    ) -> Arrival:
        self._check_generation(self.generation)  # who is fenced takes nothing over
        channel = self.connect(address, credentials, timeout_s)
        try:
            groups = self._check_hello(channel.hello(), address, key_groups)
            arrival = self._begin(channel, groups, strategy, base, migration or self._new_id())
        except BaseException:
            channel.close()
            if base is not None:
                base[0].release()
            raise
        if base is not None and not arrival.is_based:
            base[0].release()
        arrival.start()
        return arrival

    def _check_hello(
        self, hello: PeerHello, address: str, key_groups: KeyGroups | None
    ) -> tuple[range, ...]:
        store = self._residence.store
        here, there = (store.key_groups, store.subgroups), (hello.key_groups, hello.subgroups)
        if here != there:
            raise ArgumentError(
                f"{address} has {there[0]} key-groups x {there[1]} sub-groups; this provider has "
                f"{here[0]} x {here[1]}. Open both with the same numbers."
            )
        if hello.generation > self.generation:
            self._check_generation(hello.generation)  # raises: ours is over
        groups = hello.owned if key_groups is None else group_ranges(key_groups, here[0])
        if not groups:
            raise ArgumentError(f"no key-groups to fetch from {address}: name some that it has.")
        with self._owner.lock:
            mine = self._owner.owned()
            if common := subtract(groups, subtract(groups, mine)):
                raise OccupiedError(
                    f"key-groups {show_groups(common)} are this provider's already. "
                    f"Fetch others from {address}."
                )
            self._owner.take_in(hello.schemas)
        return groups

    def _begin(
        self,
        channel: "PeerChannel",
        groups: tuple[range, ...],
        strategy: str,
        base: Base | None,
        migration: str,
    ) -> Arrival:
        source, digest = base or (None, b"")
        generation, barrier = self._participant.generation, self._participant.barrier
        reply = channel.begin(BeginCall(migration, generation, self.name, groups, barrier, digest))
        granted = _check_offer(reply, migration, groups, self.subgroups, channel.address)
        try:
            return self._accept(channel, reply, granted, strategy, source if reply.based else None)
        except BaseException:
            # Nothing was taken over: the source is to go on with it. But not with a leaf that has
            # come in this very migration: to give that back would make two owners of it.
            with self._lock:
                self._participant.give_back(migration)
                leases = tuple(
                    (grant.leaf, grant.epoch)
                    for grant in reply.offer.grants
                    if self._participant.epoch_of(grant.leaf) < grant.epoch
                    or self._participant.state_of(grant.leaf) == "none"
                )
            with suppress(StateKitError):
                call = GiveBackCall(migration, generation, leases)
                channel.give_back(call, timeout_s=CLOSE_SECONDS)
            raise

    def _accept(
        self,
        channel: "PeerChannel",
        reply: BeginReply,
        granted: tuple[range, ...],
        strategy: str,
        base: LeafSource | None,
    ) -> Arrival:
        """What is offered is ours, and comes from now on."""
        arrival = Arrival(self, channel, reply, granted, strategy, base)
        store = self._residence.store
        with self._owner.lock:
            self._check_open()
            self._owner.take_in(reply.schemas)
            if store.time("event") is None and reply.watermark is not None:
                store.set_time("event", reply.watermark)
            still = nullcontext() if self.loading is None else self.loading.standing_still()
            with still:
                with self._lock:
                    actions = self._participant.on(reply.offer.source, reply.offer)
                earlier = self._supersede(actions)
            expected = [
                leaf for action in actions if isinstance(action, Expect) for leaf in action.leaves
            ]
            if len(expected) != len(reply.offer.grants):
                raise PeerError(
                    f"{channel.address} offers leaves at epochs that are over. Try again."
                )
            self._residence.expect(arrival, leaf_ranges(granted, self.subgroups))
            with self._lock:
                self._arrivals[arrival.id] = arrival
            self._owner.took(granted)
            self._complete_part(arrival, reply.offer)
        for one in earlier:
            with suppress(StateKitError):  # it is told again
                one.send_returned()  # of which nothing may be left: then it ends
        return arrival

    def _supersede(self, actions: Iterable[Action]) -> list[Arrival]:
        """Leaves that an earlier arrival waits for come in a later one: their source took them back
        when we seemed lost to it, and offers them anew. The earlier ones are returned.
        """
        gone = {
            leaf for action in actions if isinstance(action, Unexpect) for leaf in action.leaves
        }
        superseded = []
        for earlier in self.arrivals:
            leaves = sorted(gone & earlier._epochs.keys())
            if leaves:
                self._disown(earlier, groups_of(leaves, self.subgroups), leaves)
                superseded.append(earlier)
        return superseded

    def return_leaves(self, arrival: Arrival) -> tuple[range, ...]:
        """See Arrival.give_back()."""
        loading = self.loading
        if loading is None:
            return ()
        with self._owner.lock, loading.standing_still():
            with self._lock:
                groups = self._untouched(arrival)
                leaves = leaves_of(groups, self.subgroups)
                actions = self._participant.give_back(arrival.id, leaves)
            for action in actions:
                if isinstance(action, Send) and isinstance(action.message, GiveBack):
                    arrival.returning(action.message.leases)  # first: it is not done before that
            if actions:
                self._disown(arrival, groups)
        arrival.send_returned()
        return groups if actions else ()

    def _untouched(self, arrival: Arrival) -> tuple[range, ...]:
        """Key-groups of which no leaf has come."""
        state_of = self._participant.state_of
        return whole_groups(
            arrival.key_groups, self.subgroups, lambda leaf: state_of(leaf) == "expected"
        )

    def return_at_end(self, arrival: Arrival) -> None:
        """The provider is being closed: what has not come is left to the source, if it answers."""
        with self._lock:
            leaves = leaves_of(self._untouched(arrival), self.subgroups)
            actions = self._participant.give_back(arrival.id, leaves)
        leases = arrival.unheard()
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, GiveBack):
                leases += action.message.leases
        if not leases:
            return
        try:
            arrival.send_back(leases, timeout_s=CLOSE_SECONDS)
        except (StateKitError, ValueError) as error:
            _log.warning(
                "%s was closed before all leaves had come, and %s could not be told: %s",
                arrival,
                arrival.source,
                error,
            )

    def end_leases(self, arrival: Arrival, ended: Sequence[Moved]) -> None:
        """The source has taken leaves back."""
        loading = self.loading
        if loading is None:
            return
        with self._owner.lock, loading.standing_still():
            leaves = []
            for moved in ended:
                with self._lock:
                    actions = self._participant.on(arrival._offer.source, moved)
                leaves += [
                    leaf
                    for action in actions
                    if isinstance(action, Unexpect)
                    for leaf in action.leaves
                ]
            groups = groups_of(leaves, self.subgroups)
            if groups:
                self._disown(arrival, groups, leaves)

    def abandon(self, arrival: Arrival) -> tuple[range, ...]:
        """See Arrival.abandon()."""
        loading = self.loading
        still = nullcontext() if loading is None else loading.standing_still()
        with self._owner.lock, still:
            with self._lock:
                actions, lost = self._participant.declare_dead(arrival._offer.source)
                # Whole key-groups: half of one would go into checkpoints as if it were all of it.
                groups = groups_of(lost, self.subgroups)
                gone = leaves_of(groups, self.subgroups)
                self._participant.give_up(gone)
                same = [one for one in self.arrivals if one._offer.source == arrival._offer.source]
            self._carry_out(actions)  # what was offered to the dead one is ours again
            self._owner.gave(groups)
            for leaf in gone:
                self._residence.store.mark(leaf, leaf + 1, "away")
            for one in same:
                one.abandoned(gone)
        return groups

    def _disown(
        self, arrival: Arrival, groups: tuple[range, ...], leaves: Sequence[int] | None = None
    ) -> None:
        """Key-groups that were expected are another's after all. Nothing comes meanwhile."""
        self._owner.gave(groups)
        gone = leaves_of(groups, self.subgroups) if leaves is None else leaves
        for leaf in gone:
            self._residence.store.mark(leaf, leaf + 1, "away")
        arrival.forget(gone)

    # ---- The end of an arrival

    def finish(self, arrival: Arrival) -> None:
        """Everything of an arrival is here, and its source knows."""
        with self._lock:
            if self._arrivals.pop(arrival.id, None) is not None:
                self._leaves_in += arrival.progress.leaves_done
                self._bytes_in += arrival.bytes_received
                self._leaves_fetched += arrival.fetches
        loading = self.loading
        if loading is not None:
            loading.end()
        arrival.close_channel()

    def forget(self, arrival: Arrival) -> None:
        """An arrival is closed: with its provider, or because it was done and others ended it."""
        with self._lock:
            self._arrivals.pop(arrival.id, None)

    def settle(self, groups: Sequence[range]) -> None:
        """Leaves that are still on their way here are completed before they go on."""
        ranges = leaf_ranges(groups, self.subgroups)
        self._residence.load_from_peers(ranges)
        until = monotonic() + SETTLE_SECONDS
        wanted = set(leaves_of(groups, self.subgroups))
        for arrival in self.arrivals:
            if not wanted.isdisjoint(arrival._epochs):
                arrival.wait_reported(wanted, until)

    # ---- Checkpoints that several providers take together

    def take(self, barrier: int, add_late: AddLate) -> tuple[range, ...]:
        """Barrier n has passed here. The key-groups that belong into our part of checkpoint n.

        Not those that came from a process whose part has them. Those that come later from a
        process that n has not passed are added then, with add_late. The owner's lock is held.
        """
        with self._lock:
            actions = self._participant.take(barrier)
            if not actions:
                raise CheckpointError(
                    f"barrier {barrier} cannot pass here: {self._participant.barrier} has. "
                    "Number barriers upwards, and take the part of each once."
                )
            (part,) = (action for action in actions if isinstance(action, WritePart))
            # And those that nothing has come of: nobody changes them before they are here, so
            # they are as the barrier found them when they come.
            covered = self._participant.covered_of
            expected = [
                leaf
                for arrival in self._arrivals.values()
                for leaf in arrival.missing()
                if covered(leaf) < barrier
            ]
            self._add_late = add_late
        leaves = (*part.leaves, *expected)
        return groups_of(leaves, self.subgroups)

    def _complete_part(self, arrival: Arrival, offer: Offer) -> None:
        """Key-groups that no part of the last checkpoint has are added to ours, as they come."""
        barrier = self._participant.barrier
        late = sorted(
            {grant.leaf // self.subgroups for grant in offer.grants if grant.covered < barrier}
        )
        if late and self._add_late is not None:
            try:
                arrival.late_checkpoint = self._add_late(group_ranges(late))
            except StateKitError as error:  # that checkpoint will not be complete
                _log.warning(
                    "key-groups %s are in no part of checkpoint %d: %s",
                    show_groups(group_ranges(late)),
                    barrier,
                    error,
                )


def check_strategy(strategy: str) -> None:
    """ArgumentError if there is no such strategy."""
    if strategy not in STRATEGIES:
        raise ArgumentError(
            f"{shorten(strategy)} is no strategy. Use one of {', '.join(STRATEGIES)}."
        )


def _check_offer(
    reply: BeginReply, migration: str, groups: tuple[range, ...], subgroups: int, address: str
) -> tuple[range, ...]:
    """The key-groups that were granted: those that were asked for, all of them."""
    granted = [grant.leaf for grant in reply.offer.grants]
    if reply.offer.migration != migration or sorted(granted) != leaves_of(groups, subgroups):
        raise PeerError(
            f"{address} was asked for key-groups {show_groups(groups)} and offers "
            f"{len(granted)} leaves of others. It is not to be trusted; nothing was taken over."
        )
    return groups
