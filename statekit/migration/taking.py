"""Taker: the new owner's part of a peer. Takes leaves on, gives them back, and says what is here.

Arrival (arrival.py) is one hand-over as the user sees it, and brings leaves; this is what makes
them ours, and another's again.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    OccupiedError,
    PeerError,
    PeerLostError,
    StateKitError,
    shorten,
)
from statekit.live.job import CheckpointJob
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
from statekit.protocol.calls import (
    BeginCall,
    BeginReply,
    GiveBackCall,
    PeerHello,
)
from statekit.protocol.messages import (
    Action,
    AddToPart,
    Expect,
    GiveBack,
    Install,
    Leases,
    Lost,
    Moved,
    Offer,
    Unexpect,
    WritePart,
)
from statekit.protocol.participant import NUMBERS_MAX
from statekit.residence.loading import Loading
from statekit.residence.residence import Residence
from statekit.residence.sources import PullSource

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

_log = logging.getLogger("statekit")

# A checkpoint to begin from: how to read it, and which one it is.
Base: TypeAlias = tuple[PullSource, bytes]

SETTLE_SECONDS = 10.0  # for leaves that are still arriving to be closed before they go on


class _Unanswered(NamedTuple):
    """A Begin that was not answered: whether the source has begun is not known.

    The same Begin again tells, and has no effect if it has: so a later try goes on from here.
    """

    address: str
    source: str  # the name of its participant, which is one life of a process
    call: BeginCall
    credentials: Credentials


class _Part(NamedTuple):
    """Our part of a checkpoint: how to add to it, and what was added."""

    add: AddLate
    late: list[CheckpointJob]


class Taker(Member):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._arrivals: dict[str, Arrival] = {}
        self._unanswered: dict[str, _Unanswered] = {}  # by migration
        self._leaves_in = self._bytes_in = self._leaves_fetched = 0  # of arrivals that are over
        self._parts: dict[int, _Part] = {}  # by number: of the last checkpoints

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
        self._check_generation(self.generation, True)  # who is fenced takes nothing over
        channel = self.connect(address, credentials, timeout_s)
        try:
            hello = channel.hello()
            if hello.generation > self.generation:
                self._check_generation(hello.generation, credentials.knows_servers)  # raises
            arrival = self._begin_any(
                channel, hello, key_groups, strategy, base, credentials, migration
            )
        except BaseException:
            channel.close()
            if base is not None:
                base[0].release()
            raise
        if base is not None and not arrival.is_based:
            base[0].release()
        arrival.start()
        return arrival

    def _begin_any(
        self,
        channel: "PeerChannel",
        hello: PeerHello,
        key_groups: KeyGroups | None,
        strategy: str,
        base: Base | None,
        credentials: Credentials,
        migration: str,
    ) -> Arrival:
        """Begins; or goes on with what was begun before, if that was not answered."""
        digest = b"" if base is None else base[1]
        earlier = [] if migration else self._earlier(channel.address, hello.name)
        for one in earlier:
            call = one.call
            asked = _joined(hello.owned, call.key_groups) if key_groups is None else key_groups
            groups = group_ranges(asked, hello.key_groups)
            if (groups, digest) == (call.key_groups, call.base):
                try:
                    return self._begin(channel, one, strategy, base)
                except PeerLostError:
                    raise
                except StateKitError:
                    pass  # it had not begun, or it is over: what the source has now counts
            elif subtract(groups, subtract(groups, call.key_groups)):
                self._return_unanswered(channel, one)
        if earlier:
            hello = channel.hello()
        groups = self._check_hello(hello, channel.address, key_groups)
        barrier = self._participant.barrier
        number = migration or self._new_id()
        with self._lock:
            parts = leaf_ranges(groups, self.subgroups)
            heard = [epoch for part in parts for _, epoch in self._participant.leases(part)]
        above = max(heard, default=0)
        call = BeginCall(number, self.generation, self.name, groups, barrier, digest, above)
        new = _Unanswered(channel.address, hello.name, call, credentials)
        return self._begin(channel, new, strategy, base, is_ours=not migration)

    def _earlier(self, address: str, source: str) -> list[_Unanswered]:
        """What was begun there and not answered."""
        with self._lock:
            there = [one for one in self._unanswered.values() if one.address == address]
            for one in there:
                if one.source != source:  # that process is gone, and what it had begun
                    del self._unanswered[one.call.migration]
            return [one for one in there if one.source == source]

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
        asked: _Unanswered,
        strategy: str,
        base: Base | None,
        is_ours: bool = True,
    ) -> Arrival:
        """is_ours: whether it is our own idea, so that we are to know that it was not answered."""
        call = asked.call
        if is_ours:
            self._unanswered[call.migration] = asked  # before: an interrupt may come
        try:
            reply = channel.begin(call)
            granted = _check_offer(
                reply, call.migration, call.key_groups, self.subgroups, channel.address
            )
        except PeerError as error:
            if is_ours:
                error.add_note(
                    "It may have begun all the same. fetch_from() again goes on with it; closing "
                    "this provider gives it back, and so does abort() of the departure there."
                )
            raise
        except StateKitError:
            self._unanswered.pop(call.migration, None)  # it says that it has not begun
            raise
        try:
            arrival = self._accept(
                channel,
                reply,
                granted,
                strategy,
                base[0] if base is not None and reply.based else None,
                asked.credentials.knows_servers,
            )
        except BaseException:
            # Nothing was taken over: the source is to go on with it. But not with a leaf that has
            # come in this very migration: to give that back would make two owners of it.
            with self._lock:
                self._participant.give_back(call.migration)
                state_of, epoch_of = self._participant.state_of, self._participant.epoch_of
                leases = tuple(
                    (leaf, grant.epoch)
                    for grant in reply.offer.grants
                    for leaf in grant.leaves
                    if epoch_of(leaf) < grant.epoch or state_of(leaf) == "none"
                )
            with suppress(StateKitError):  # then it is tried again with the next fetch_from()
                back = GiveBackCall(call.migration, call.generation, leases)
                channel.give_back(back, timeout_s=CLOSE_SECONDS)
                self._unanswered.pop(call.migration, None)
            raise
        self._unanswered.pop(call.migration, None)
        return arrival

    def _return_unanswered(
        self, channel: "PeerChannel", asked: _Unanswered, timeout_s: float | None = None
    ) -> None:
        """What may have been begun is not wanted any more, as it was asked for."""
        call = asked.call
        try:
            offer = channel.begin(call, timeout_s=timeout_s).offer
            leases = tuple((leaf, one.epoch) for one in offer.grants for leaf in one.leaves)
            back = GiveBackCall(call.migration, call.generation, leases)
            channel.give_back(back, timeout_s=timeout_s)
        except PeerError:
            raise
        except StateKitError:
            pass  # it has not begun, or it is over
        self._unanswered.pop(call.migration, None)

    def return_unanswered(self) -> None:
        """The provider is being closed: nobody goes on with what was begun and not answered."""
        for asked in [*self._unanswered.values()]:
            try:
                with self.connect(asked.address, asked.credentials, CLOSE_SECONDS) as channel:
                    if channel.hello().name == asked.source:
                        self._return_unanswered(channel, asked)
            except StateKitError as error:
                _log.warning(
                    "closed while %s may be handing key-groups %s over to this provider: %s",
                    asked.address,
                    show_groups(asked.call.key_groups),
                    error,
                )

    def _accept(
        self,
        channel: "PeerChannel",
        reply: BeginReply,
        granted: tuple[range, ...],
        strategy: str,
        base: PullSource | None,
        is_known: bool,
    ) -> Arrival:
        """What is offered is ours, and comes from now on."""
        arrival = Arrival(self, channel, reply, granted, strategy, base, is_known)
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
            self._carry_out(actions, Expect, Unexpect)
            expected = sum(len(one.leaves) for one in actions if isinstance(one, Expect))
            if expected != sum(len(grant.leaves) for grant in reply.offer.grants):
                raise PeerError(
                    f"{channel.address} offers leaves at epochs that are over. Try again."
                )
            self._residence.expect(arrival, leaf_ranges(granted, self.subgroups))
            with self._lock:
                self._arrivals[arrival.id] = arrival
            self._owner.took(granted)
            self._cover(arrival, reply.offer)
        for one in earlier:
            with suppress(StateKitError):  # it is told again
                one.send_returned()  # of which nothing may be left: then it ends
        return arrival

    def _supersede(self, actions: Iterable[Action]) -> list[Arrival]:
        """Leaves that an earlier arrival waits for come in a later one: their source took them back
        when we seemed lost to it, and offers them anew. The earlier ones are returned.
        """
        gone = set(_unexpected(actions))
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
            for message in self._carry_out(actions, Unexpect):
                assert isinstance(message, GiveBack)
                arrival.returning(message.leases)  # first: it is not done before that
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
        for message in self._carry_out(actions, Unexpect):
            assert isinstance(message, GiveBack)
            leases += message.leases
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
                self._carry_out(actions, Unexpect)
                leaves += _unexpected(actions)
            groups = groups_of(leaves, self.subgroups)
            if groups:
                self._disown(arrival, groups, leaves)

    def abandon(self, arrival: Arrival) -> tuple[range, ...]:
        """See Arrival.abandon()."""
        return self.bury(arrival._offer.source)

    def bury(self, name: str) -> tuple[range, ...]:
        loading = self.loading
        still = nullcontext() if loading is None else loading.standing_still()
        with self._owner.lock, still:
            with self._lock:
                actions, lost = self._participant.declare_dead(name)
                # Whole key-groups: half of one would go into checkpoints as if it were all of it.
                groups = groups_of(lost, self.subgroups)
                gone = leaves_of(groups, self.subgroups)
                self._participant.give_up(gone)
                same = [one for one in self.arrivals if one._offer.source == name]
            self._owner.gave(groups)
            for leaf in gone:
                self._residence.store.mark(leaf, leaf + 1, "away")
            for one in same:
                one.abandoned(gone)
            self._carry_out(actions, Unexpect)  # what was offered to the dead one is ours again
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
        arrivals = self.arrivals
        wanted = set(leaves_of(groups, self.subgroups)) if arrivals else set()
        for arrival in arrivals:
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
            self._carry_out(actions, WritePart)
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
            self._parts[barrier] = _Part(add_late, [])
            while len(self._parts) > NUMBERS_MAX:
                del self._parts[next(iter(self._parts))]
        leaves = (*part.leaves, *expected)
        return groups_of(leaves, self.subgroups)

    def _cover(self, arrival: Arrival, offer: Offer) -> None:
        """Key-groups that no part of a checkpoint has are added to ours, as they come."""
        for number in [*self._parts]:
            late = [leaf for one in offer.grants if one.covered < number for leaf in one.leaves]
            if late:
                groups = groups_of(late, self.subgroups)
                arrival.late_checkpoint = self.add_late(number, groups)

    def add_late(self, number: int, groups: tuple[range, ...]) -> CheckpointJob | None:
        try:
            job = self._parts[number].add(groups)
        except StateKitError as error:  # that checkpoint will not be complete
            _log.warning(
                "key-groups %s are in no part of checkpoint %d: %s",
                show_groups(groups),
                number,
                error,
            )
            return None
        self._parts[number].late.append(job)
        return job

    def late_parts(self, number: int) -> tuple[CheckpointJob, ...]:
        """See KVProvider.late_parts()."""
        part = self._parts.get(number)
        return () if part is None else tuple(part.late)

    # ---- What the participant learns

    def tell(self, sender: str, message: Any) -> None:
        """A message whose effects are on their way, or done: content, and what follows from it.

        Parts of checkpoints: _cover() has seen to what comes, take() to what is coming.
        """
        with self._lock:
            actions = self._participant.on(sender, message)
        self._carry_out(actions, Install, AddToPart, Lost)


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
    granted = group_ranges([grant.leaves for grant in reply.offer.grants])
    if reply.offer.migration != migration or granted != leaf_ranges(groups, subgroups):
        raise PeerError(
            f"{address} was asked for key-groups {show_groups(groups)} and offers leaves of "
            f"others, {show_groups(granted)}. It is not to be trusted; nothing was taken over."
        )
    return groups


def _joined(some: tuple[range, ...], others: tuple[range, ...]) -> tuple[range, ...]:
    return group_ranges((*some, *subtract(others, some)))


def _unexpected(actions: Iterable[Action]) -> list[int]:
    """The leaves that are not ours after all."""
    return [leaf for one in actions if isinstance(one, Unexpect) for leaf in one.leaves]
