"""Peer: a provider among others. It carries out what its participant says, and answers calls.

    KVProvider ──> Peer ──> Participant     who has which lease (pure; docs/protocol.md)
                    │  ├──> Departure       leaves that go: shut, read out on demand or as a stream
                    │  └──> Arrival         leaves that come
                    └──> PeerServer, PeerChannel (statekit/remote): the same calls, over gRPC

A call is a message and its reply: Begin makes the source's participant offer, and the offer is the
reply; Fetch is answered by the leaf; Installed by Released; GiveBack by GivenBack. So every message
of the protocol passes through Participant.on(), here as in the simulator.

    locks   the provider's lock is held while key-groups change hands, so that a checkpoint has
            them or has them not. The peer's own lock guards the participant only, comes last, and
            nothing is waited for under it.
"""

import itertools
import logging
import os
import socket
import struct
import threading
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.checkpoint.job import CheckpointJob
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    FencedError,
    KeyTypeError,
    MigrationError,
    NotOwnedError,
    OccupiedError,
    PeerError,
    StateKitError,
    shorten,
)
from statekit.loading import LeafSource, Loading
from statekit.metrics import MovedMetrics
from statekit.migration.arrival import CLOSE_SECONDS, STRATEGIES, Arrival
from statekit.migration.departure import Departure
from statekit.migration.messages import (
    Action,
    Drop,
    Expect,
    Fence,
    Fetch,
    GiveBack,
    Installed,
    InTransit,
    Moved,
    Never,
    Offer,
    Released,
    Reopen,
    Send,
    Serve,
    Shut,
    Unexpect,
    WritePart,
)
from statekit.migration.participant import Participant
from statekit.remote.calls import (
    BeginCall,
    BeginReply,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    Limits,
    PeerHello,
    PickCall,
    PickReply,
    Piece,
    PieceKind,
    ProposeCall,
    QueryCall,
    QueryReply,
    StreamCall,
)
from statekit.remote.security import parse_address
from statekit.residence import Residence
from statekit.schema import StateSchema
from statekit.version import __version__

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel
    from statekit.remote.server import PeerServer

_log = logging.getLogger("statekit")

# Begins a checkpoint of these key-groups only, as they are at that moment.
AddLate: TypeAlias = Callable[[tuple[range, ...]], CheckpointJob]
# A checkpoint to begin from: how to read it, its place, its number.
Base: TypeAlias = tuple[LeafSource, str, int]

TIMEOUT_S = 10.0  # before a peer that does not answer counts as lost
DEPARTURES_KEPT = 64  # that are done: late calls about them are answered as the first ones were
JANITOR_SECONDS = 5.0  # that memory waits at most to be freed, while leaves are being sent
_LIFE_DIGITS = 16  # hexadecimal: half of a migration's id
WARM_SECONDS = 1.0  # for a server to be reached by the process that it is in
SETTLE_SECONDS = 10.0  # for leaves that are still arriving to be closed before they go on


class Owner(Protocol):
    """What a peer needs of its provider. All but `lock` are called with the lock held."""

    @property
    def lock(self) -> Any: ...

    def owned(self) -> tuple[range, ...]:
        """Key-groups."""

    def schemas(self) -> Sequence[StateSchema]: ...

    def take_in(self, schemas: Sequence[StateSchema]) -> None:
        """Declares states of a peer that are not known here; SchemaError if they do not fit."""

    def gave(self, key_groups: tuple[range, ...]) -> None:
        """These are another's from now on."""

    def took(self, key_groups: tuple[range, ...]) -> None:
        """These are ours from now on."""

    def since(self, url: str, number: int) -> "array[int] | None":
        """Per leaf: the epoch that a checkpoint has it of; None if it is not our last one there."""

    def figures(self) -> dict[str, Any]: ...


class Credentials:
    """What a provider shows to others, and asks of them."""

    def __init__(self, tls: Any = None, token: str | None = None) -> None:
        self.tls = tls
        self.token = token


class _Moved:
    """Sums for MovedMetrics."""

    def __init__(self) -> None:
        self.migrations = 0
        self.leaves_in = self.leaves_out = self.leaves_fetched = 0
        self.bytes_in = self.bytes_out = 0

    def count_in(self, arrival: Arrival) -> None:
        self.leaves_in += arrival.progress.leaves_done
        self.bytes_in += arrival.bytes_received
        self.leaves_fetched += arrival.fetches

    def count_out(self, departure: Departure) -> None:
        self.leaves_out += departure.progress.leaves_done
        self.bytes_out += departure.bytes_sent


class Peer:
    """One per provider, from the first time it serves, fetches or passes a barrier."""

    def __init__(self, owner: Owner, residence: Residence, epochs: Mapping[int, int]) -> None:
        self._owner = owner
        self._residence = residence
        self.subgroups = residence.store.subgroups
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lock = threading.RLock()
        self._participant = Participant(self.name)
        self._departures: dict[str, Departure] = {}
        self._arrivals: dict[str, Arrival] = {}
        self._server: PeerServer | None = None
        self.credentials = Credentials()
        self.limits = Limits()
        self.is_closed = False
        self._dropped: list[int] = []  # leaves whose memory is still to be freed
        self._janitor: threading.Thread | None = None
        self._streams = 0  # that are being sent
        self._idle = threading.Condition()  # of the number of streams
        self._past = _Moved()  # by migrations that are not known any more
        # Ids of migrations are their maker's life and a growing number: late ones are told by it.
        self._life = uuid.uuid4().hex[:_LIFE_DIGITS]
        self._numbers = itertools.count(1)
        self._latest: dict[str, dict[int, int]] = {}  # number, by the maker's life and key-group
        self._withdrawn: set[str] = set()  # migrations that we proposed, and that failed
        self._proposals: dict[str, Future[None]] = {}  # by migration: what others proposed to us
        self._add_late: AddLate | None = None  # to our part of the last checkpoint
        with owner.lock:
            self._participant.own(_leaves(owner.owned(), self.subgroups), epochs=epochs)

    @property
    def loading(self) -> Loading | None:
        return self._residence.loading

    @property
    def generation(self) -> int:
        return self._participant.generation

    @property
    def departures(self) -> tuple[Departure, ...]:
        return tuple(self._departures.values())

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        return tuple(self._arrivals.values())

    # ---- Being reached

    def serve(
        self, address: str, credentials: Credentials, limits: Limits, **options: Any
    ) -> "PeerServer":
        from statekit.remote.server import PeerServer

        if self._server is not None and self._server.is_serving:
            raise MigrationError(
                f"this provider is served at {self._server.address} already. Close that first."
            )
        server = PeerServer(
            self,
            address,
            tls=credentials.tls,
            token=credentials.token,
            limits=limits,
            **options,
        )
        self._server, self.credentials, self.limits = server, credentials, limits
        # The first channel of a process takes gRPC 20 ms. No record should wait for that when the
        # first hand-over comes. (Where the certificate is not one for this address, it fails.)
        with (
            suppress(PeerError),
            self.connect(server.address, credentials, WARM_SECONDS) as channel,
        ):
            channel.hello()
        return server

    @property
    def address(self) -> str:
        """Where this provider is served. MigrationError if it is not."""
        if self._server is None:
            raise MigrationError("this provider is not served. Call kv.serve() first.")
        return self._server.address

    def connect(self, address: str, credentials: Credentials, timeout_s: float) -> "PeerChannel":
        from statekit.remote.channel import PeerChannel

        return PeerChannel(
            address,
            tls=credentials.tls,
            token=credentials.token,
            limits=self.limits,
            timeout_s=timeout_s,
        )

    # ---- Taking over

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
        if strategy not in STRATEGIES:
            raise ArgumentError(
                f"{shorten(strategy)} is no strategy. Use one of {', '.join(STRATEGIES)}."
            )
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

    def _new_id(self) -> str:
        return f"{self._life}{next(self._numbers):0{_LIFE_DIGITS}x}"

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
        groups: tuple[range, ...],
        strategy: str,
        base: Base | None,
        migration: str,
    ) -> Arrival:
        source, url, number = base or (None, "", 0)
        generation, barrier = self._participant.generation, self._participant.barrier
        reply = channel.begin(
            BeginCall(migration, generation, self.name, groups, barrier, url, number)
        )
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
                    self._arrivals[arrival.id] = arrival
                    actions = self._participant.on(reply.offer.source, reply.offer)
                self._supersede(arrival, actions)
            expected = [
                leaf for action in actions if isinstance(action, Expect) for leaf in action.leaves
            ]
            if len(expected) != len(reply.offer.grants):
                raise PeerError(
                    f"{channel.address} offers leaves at epochs that are over. Try again."
                )
            self._residence.expect(arrival, leaf_ranges(granted, self.subgroups))
            self._owner.took(granted)
            self._complete_part(arrival, reply.offer)
        return arrival

    def _supersede(self, later: Arrival, actions: Iterable[Action]) -> None:
        """Leaves that an earlier arrival waits for come in a later one: their source took them back
        when we seemed lost to it, and offers them anew.
        """
        gone = {
            leaf for action in actions if isinstance(action, Unexpect) for leaf in action.leaves
        }
        for earlier in self.arrivals:
            leaves = [] if earlier is later else sorted(gone & earlier._epochs.keys())
            if leaves:
                groups = group_ranges(sorted({leaf // self.subgroups for leaf in leaves}))
                self._disown(earlier, groups, leaves)
                earlier.send_returned()  # of which nothing may be left: then it ends

    def return_leaves(self, arrival: Arrival) -> tuple[range, ...]:
        """See Arrival.give_back()."""
        loading = self.loading
        if loading is None:
            return ()
        with self._owner.lock, loading.standing_still():
            with self._lock:
                groups = self._untouched(arrival)
                leaves = _leaves(groups, self.subgroups)
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
        state_of, subs = self._participant.state_of, self.subgroups
        return group_ranges(
            [
                group
                for part in arrival.key_groups
                for group in part
                if all(
                    state_of(leaf) == "expected" for leaf in range(group * subs, (group + 1) * subs)
                )
            ]
        )

    def return_at_end(self, arrival: Arrival) -> None:
        """The provider is being closed: what has not come is left to the source, if it answers."""
        with self._lock:
            leaves = _leaves(self._untouched(arrival), self.subgroups)
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
            groups = group_ranges(sorted({leaf // self.subgroups for leaf in leaves}))
            if groups:
                self._disown(arrival, groups, leaves)

    def _disown(
        self, arrival: Arrival, groups: tuple[range, ...], leaves: Sequence[int] | None = None
    ) -> None:
        """Key-groups that were expected are another's after all. Nothing comes meanwhile."""
        self._owner.gave(groups)
        gone = _leaves(groups, self.subgroups) if leaves is None else leaves
        for leaf in gone:
            self._residence.store.mark(leaf, leaf + 1, "away")
        arrival.forget(gone)

    def finish(self, arrival: Arrival) -> None:
        """Everything of an arrival is here, and its source knows."""
        with self._lock:
            if self._arrivals.pop(arrival.id, None) is not None:
                self._past.count_in(arrival)
        loading = self.loading
        if loading is not None:
            loading.end()

    def forget(self, arrival: Arrival) -> None:
        """An arrival is closed: with its provider, or because it was done and others ended it."""
        with self._lock:
            self._arrivals.pop(arrival.id, None)

    def disown(self, went: Iterable[range]) -> dict[int, int]:
        """Key-groups went to another provider of this process; the epochs of their leases."""
        with self._lock:
            return self._participant.disown(_leaves(went, self.subgroups))

    def own(self, came: Iterable[range], epochs: Mapping[int, int]) -> None:
        """Key-groups came from another provider of this process."""
        with self._lock:
            leaves = _leaves(came, self.subgroups)
            self._participant.own(leaves, self._participant.barrier, epochs=epochs)

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
        return group_ranges(sorted({leaf // self.subgroups for leaf in leaves}))

    def _complete_part(self, arrival: Arrival, offer: Offer) -> None:
        """Key-groups that no part of the last checkpoint has are added to ours, as they come."""
        barrier = self._participant.barrier
        late = sorted(
            {grant.leaf // self.subgroups for grant in offer.grants if grant.covered < barrier}
        )
        if late and self._add_late is not None:
            arrival.late_checkpoint = self._add_late(group_ranges(late))

    def tell(self, sender: str, message: Any) -> list[Action]:
        """A message whose effects are on their way already."""
        with self._lock:
            return self._participant.on(sender, message)

    def fence(self, generation: int) -> None:
        """A later generation has begun: we own nothing any more."""
        with self._owner.lock, self._lock:
            if generation > self._participant.generation:
                self._carry_out(self._participant.fence(generation))

    def lead(self, generation: int) -> None:
        """Begins a later generation with what is owned here; for who restored it."""
        with self._owner.lock, self._lock:
            if generation < self.generation or self._departures or self._arrivals:
                raise MigrationError(
                    f"generation {generation} cannot begin here: this is {self.generation}, with "
                    f"{len(self._departures) + len(self._arrivals)} migrations."
                )
            if generation > self.generation:
                barrier = self._participant.barrier
                self._participant = Participant(self.name, generation)
                self._participant.own(_leaves(self._owner.owned(), self.subgroups), barrier)

    # ---- Handing over

    def migrate(
        self,
        to: str,
        key_groups: tuple[range, ...],
        strategy: str,
        credentials: Credentials,
        timeout_s: float,
    ) -> Departure:
        """Asks another process to fetch key-groups from here; returns when it has begun."""
        address = self.address
        self._check_owned(key_groups)
        migration = self._new_id()
        channel = self.connect(to, credentials, timeout_s)
        try:
            channel.propose(ProposeCall(migration, self.generation, address, key_groups, strategy))
        except StateKitError:
            self._withdraw(migration)
            raise
        finally:
            channel.close()
        with self._lock:
            return self._departures[migration]  # the target began before it answered

    def _withdraw(self, migration: str) -> None:
        """A proposal of ours has failed, as far as we know: takes back what was not sent.

        The target may have begun, and its answer or ours was lost; or it begins later. Otherwise
        key-groups would be offered to one who does not know it, and nobody would have them.
        """
        with self._owner.lock:
            self._withdrawn.add(migration)
            departure = self._departures.get(migration)
            if departure is not None:
                with suppress(MigrationError):  # the target has some of it: it has taken over
                    self._abort(departure, False)

    def _check_owned(self, key_groups: tuple[range, ...]) -> None:
        with self._owner.lock:
            if missing := subtract(key_groups, self._owner.owned()):
                raise NotOwnedError(
                    f"key-groups {show_groups(missing)} are not this provider's, which has "
                    f"{show_groups(self._owner.owned())}. Hand over what it has."
                )

    def _abort(self, departure: Departure, target_is_dead: bool) -> None:
        with self._owner.lock:
            with self._lock:
                if target_is_dead:
                    actions, _ = self._participant.declare_dead(departure.target)
                    kept: tuple[int, ...] = ()
                else:
                    groups = self._unsent_groups(departure)
                    leaves = _leaves(groups, self.subgroups)
                    actions, kept = self._participant.abort(departure.id, leaves)
            self._carry_out(actions)
            lost = subtract(departure.key_groups, self._owner.owned())
        if target_is_dead and lost:
            raise MigrationError(
                f"key-groups {show_groups(lost)} are lost with {departure.target}, which had some "
                "of their state already. Restore them from a checkpoint; the others are back."
            )
        if kept:
            open_groups = group_ranges(sorted({leaf // self.subgroups for leaf in kept}))
            raise MigrationError(
                f"key-groups {show_groups(open_groups)} cannot be taken back: {departure.target} "
                "may have some of their state already. Wait for it; or, if it is gone for good, "
                "abort(target_is_dead=True)."
            )

    def _unsent_groups(self, departure: Departure) -> tuple[range, ...]:
        is_unsent, subs = self._participant.is_unsent, self.subgroups
        return group_ranges(
            [
                group
                for part in departure.key_groups
                for group in part
                if all(
                    is_unsent(departure.id, leaf)
                    for leaf in range(group * subs, (group + 1) * subs)
                )
            ]
        )

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Does what the participant of a source says. The owner's lock is held."""
        subs = self.subgroups
        for action in actions:
            if isinstance(action, Shut):
                groups = group_ranges(sorted({leaf // subs for leaf in action.leaves}))
                self._residence.shut(leaf_ranges(groups, subs))
                self._owner.gave(groups)
            elif isinstance(action, Reopen):
                whole, torn = self._sort_out(action.leaves)
                back = [leaf for leaf in action.leaves if leaf not in torn]
                self._residence.reopen([range(leaf, leaf + 1) for leaf in back])
                self._owner.took(whole)
                for leaf in torn:
                    self._drop(leaf)
                for departure in [*self._departures.values()]:
                    departure.returned(action.leaves)
            elif isinstance(action, Drop):
                self._drop(action.leaf)
            elif isinstance(action, Fence):
                self._fenced()

    def _sort_out(self, leaves: Sequence[int]) -> tuple[tuple[range, ...], set[int]]:
        """Of leaves that are back: the key-groups that are whole, and the leaves of others.

        Of these the target had other leaves, which were let go of here and died with it. To own
        such a key-group would put the half of it into checkpoints as if that were all.
        """
        subs = self.subgroups
        groups = sorted({leaf // subs for leaf in leaves})
        with self._lock:
            state_of = self._participant.state_of
            whole = [
                group
                for group in groups
                if all(
                    state_of(leaf) == "owned" for leaf in range(group * subs, (group + 1) * subs)
                )
            ]
            torn = {leaf for leaf in leaves if leaf // subs not in whole}
            self._participant.disown(torn)
        return group_ranges(whole), torn

    def _drop(self, leaf: int) -> None:
        """Another process has the leaf. Its memory is freed when nobody is being served."""
        with self._lock:
            self._dropped.append(leaf)
            if self._janitor is None:
                self._janitor = threading.Thread(
                    target=self._run_janitor, name="statekit-janitor", daemon=True
                )
                self._janitor.start()
        for departure in [*self._departures.values()]:
            departure.gone(leaf)

    def _run_janitor(self) -> None:
        # Freeing takes a third as long as sending, and whoever waits for a leaf comes first. What
        # is not freed yet is shut, and was there before: memory does not grow by it.
        while True:
            with self._idle:
                self._idle.wait_for(lambda: not self._streams or self.is_closed, JANITOR_SECONDS)
            with self._owner.lock:
                with self._lock:
                    dropped, self._dropped = self._dropped, []
                    if not dropped or self.is_closed:
                        self._janitor = None
                        return
                for leaf in dropped:
                    self._residence.drop(leaf)

    def _fenced(self) -> None:
        store = self._residence.store
        self._owner.gave(self._owner.owned())
        store.mark(0, store.leaves, "away")
        self._residence.shut_leaves.clear()
        for departure in [*self._departures.values()]:
            departure.returned(departure.unfinished())

    # ---- Calls of others (PeerService)

    def hello(self) -> PeerHello:
        store = self._residence.store
        with self._owner.lock:
            return PeerHello(
                self.name,
                self.name,
                self.generation,
                store.key_groups,
                store.subgroups,
                self._owner.owned(),
                tuple(self._owner.schemas()),
                __version__,
            )

    def begin(self, call: BeginCall) -> BeginReply:
        self._check_open()
        self._check_generation(call.generation)
        _check_id(call.migration)
        store = self._residence.store
        groups = group_ranges(call.key_groups, store.key_groups)
        leaves = _leaves(groups, self.subgroups)
        self.settle(groups)
        with self._owner.lock:
            self._check_generation(call.generation)
            departure = self._departures.get(call.migration)
            if call.migration in self._withdrawn:
                raise MigrationError(f"migration {call.migration} was withdrawn.")
            if departure is None:
                self._check_late(call.migration, groups)
                self._take_back_from(call.target, leaves)
                self._check_owned(groups)
                since = None
                if call.base_url:
                    since = self._owner.since(call.base_url, call.base_number)
                departure = self._depart(call, groups, leaves, since)
            elif departure.target != call.target:
                raise MigrationError(
                    f"migration {call.migration} goes to {departure.target}, not {call.target}."
                )
            return BeginReply(
                departure.offer,
                self._participant.barrier,
                tuple(self._owner.schemas()),
                store.key_groups,
                store.subgroups,
                store.time("event"),
                departure.timer_leaves,
                departure.sizes,
                departure.since is not None,
            )

    def _check_late(self, migration: str, groups: tuple[range, ...]) -> None:
        """MigrationError if whoever made this migration has made a later one of these key-groups.

        Such a call was on its way for longer than its sender waited. To hand over now would take
        key-groups from the later migration, or from here, for one who does not ask any more.
        """
        life, number = migration[:_LIFE_DIGITS], int(migration[_LIFE_DIGITS:], 16)
        latest = self._latest.setdefault(life, {})
        for part in groups:
            for group in part:
                if latest.get(group, -1) > number:
                    raise MigrationError(
                        f"migration {migration} comes too late: a later one of key-group {group} "
                        "has begun."
                    )
        for part in groups:
            latest.update(dict.fromkeys(part, number))

    def _depart(
        self,
        call: BeginCall,
        groups: tuple[range, ...],
        leaves: Sequence[int],
        since: "array[int] | None",
    ) -> Departure:
        with self._lock:
            actions = self._participant.begin(call.migration, call.target, leaves)
        self._carry_out(actions)
        (offer,) = (
            action.message
            for action in actions
            if isinstance(action, Send) and isinstance(action.message, Offer)
        )
        departure = Departure(offer, groups, call.target, self._residence, since, self._abort)
        with self._lock:
            self._departures[call.migration] = departure
            done = [one.id for one in self._departures.values() if one.done]
            for migration in done[:-DEPARTURES_KEPT]:
                self._past.count_out(self._departures.pop(migration))
        return departure

    def _take_back_from(self, target: str, leaves: Sequence[int]) -> None:
        """Leaves that this target was offered before, and has lost sight of before any came."""
        with self._lock:
            mine = set(leaves)
            for departure in [*self._departures.values()]:
                if departure.target == target and not mine.isdisjoint(departure.unfinished()):
                    groups = self._unsent_groups(departure)
                    again = _leaves(groups, self.subgroups)
                    actions, _ = self._participant.abort(departure.id, again)
                    self._carry_out(actions)

    def settle(self, groups: Sequence[range]) -> None:
        """Leaves that are still on their way here are completed before they go on."""
        ranges = leaf_ranges(groups, self.subgroups)
        self._residence.load_from_peers(ranges)
        until = monotonic() + SETTLE_SECONDS
        wanted = set(_leaves(groups, self.subgroups))
        for arrival in self.arrivals:
            if not wanted.isdisjoint(arrival._epochs):
                arrival.wait_reported(wanted, until)

    def _check_generation(self, generation: int) -> None:
        if generation > self.generation:
            self.fence(generation)
        if generation != self.generation or self._participant.is_fenced:
            raise FencedError(
                f"generation {max(generation, self.generation)} has begun, from a checkpoint; "
                f"this is about generation {min(generation, self.generation)}, which is over. "
                "Restore from that checkpoint, or end the process."
            )

    def fetch(self, call: FetchCall) -> Iterator[Piece]:
        departure = self._departures.get(call.migration)
        if departure is None:
            for leaf, epoch in call.leases:
                yield self._answer("", call, leaf, epoch)[1]
            return
        with departure.somebody_waits():
            for leaf, epoch in call.leases:
                serve, refusal = self._answer(departure.target, call, leaf, epoch)
                if serve:
                    yield from departure.read(leaf, epoch)
                else:
                    yield refusal

    def pick(self, call: PickCall) -> PickReply:
        departure = self._departures.get(call.migration)
        if departure is None:
            return PickReply(b"", tuple(leaf for leaf, _ in call.leases))
        with departure.somebody_waits():
            with self._lock:
                serves = self._participant.serves
                refused = tuple(
                    leaf
                    for leaf, epoch in call.leases
                    if not serves(departure.target, call.generation, leaf, epoch)
                )
            return PickReply(departure.pick(call.keys, refused), refused)

    def _answer(self, sender: str, call: FetchCall, leaf: int, epoch: int) -> tuple[bool, Piece]:
        message = Fetch(call.migration, call.generation, 0, leaf, epoch)
        with self._lock:
            (action,) = self._participant.on(sender, message) or (None,)
        if isinstance(action, Serve):
            return True, _NOTHING
        return False, _refusal(action, leaf, epoch, self.generation)

    def stream(
        self,
        call: StreamCall,
        credits: Iterator[int],  # noqa: A002
        /,
    ) -> Iterator[Piece]:
        departure = self._departures.get(call.migration)
        if departure is None or call.generation != self.generation:
            self._check_generation(call.generation)
            raise MigrationError(f"there is no migration {call.migration} from here.")
        with self._idle:
            self._streams += 1
        try:
            yield from self._send(departure, call, credits)
        finally:
            with self._idle:
                self._streams -= 1
                self._idle.notify_all()

    def _send(
        self,
        departure: Departure,
        call: StreamCall,
        credits: Iterator[int],  # noqa: A002
    ) -> Iterator[Piece]:
        granted = sent = 0
        for leaf in dict.fromkeys((*call.first, *departure.order)):
            departure.give_way()
            with self._lock:
                actions = self._participant.send(call.migration, leaf)
            if not actions:
                continue
            serve = actions[0]
            assert isinstance(serve, Serve)
            for piece in departure.read(leaf, serve.reply.epoch):
                while sent >= granted:
                    try:
                        granted = max(granted, next(credits))
                    except StopIteration:
                        return
                sent += len(piece.blocks)
                yield piece

    def installed(self, call: InstalledCall) -> tuple[tuple[int, int], ...]:
        departure = self._departures.get(call.migration)
        released = []
        for leaf, epoch in call.leases:
            message = Installed(call.migration, call.generation, 0, leaf, epoch)
            with self._lock:
                owner = self._participant.moved_to(leaf) or ""
                sender = owner if departure is None else departure.target
                actions = self._participant.on(sender, message)
            for action in actions:
                if isinstance(action, Drop):
                    self._drop(action.leaf)
                elif isinstance(action, Send) and isinstance(action.message, Released):
                    released.append((leaf, epoch))
        return tuple(released)

    def give_back(self, call: GiveBackCall) -> None:
        departure = self._departures.get(call.migration)
        sender = departure.target if departure is not None else ""
        message = GiveBack(call.migration, call.generation, 0, call.leases)
        with self._owner.lock:
            with self._lock:
                actions = self._participant.on(sender, message)
            self._carry_out(actions)

    def propose(self, call: ProposeCall) -> None:
        """Somebody wants to hand over: fetches from there. Done when it has begun."""
        self._check_open()
        self._check_generation(call.generation)
        if self._residence.home is not None:
            raise MigrationError("a provider whose state is at home takes no key-groups over.")
        credentials = self.credentials
        if not (credentials.token or credentials.tls or parse_address(call.address).is_local):
            raise PeerError(
                f"{call.address} is not on this machine, and whoever proposed it did not have to "
                "say who it is. Serve with a token or mutual TLS to take key-groups from there."
            )
        _check_id(call.migration)
        # The same proposal again waits for the first, and has the same answer: it was repeated
        # because that answer was late or lost, and what has begun cannot begin once more.
        with self._lock:
            is_new = call.migration not in self._proposals
            done = self._proposals.setdefault(call.migration, Future())
        if not is_new:
            done.result(2 * TIMEOUT_S)
            return
        try:
            self._take_on(
                call.address,
                call.key_groups,
                call.strategy,
                None,
                credentials,
                TIMEOUT_S,
                call.migration,
            )
        except BaseException as error:
            with self._lock:
                del self._proposals[call.migration]
            done.set_exception(error)
            raise
        done.set_result(None)

    def query(self, call: QueryCall) -> QueryReply:
        self._check_open()
        residence = self._residence
        schema = next((one for one in self._owner.schemas() if one.name == call.state), None)
        raw = next((one for one in residence.store.states() if one.name == call.state), None)
        if schema is None or raw is None:
            known = ", ".join(sorted(one.name for one in self._owner.schemas())) or "none"
            raise ArgumentError(f"there is no state {call.state!r} here. There are: {known}.")
        values = []
        for encoded in call.keys:
            try:
                key = raw.codec.decode(encoded)
            except (ValueError, struct.error):
                raise KeyTypeError(
                    f"{shorten(encoded)} is no encoded key of state {call.state!r}, whose keys "
                    f"are {raw.codec.text!r}."
                ) from None
            values.append(residence.settle(raw, raw.get_encoded, key))
        return QueryReply(schema, tuple(values))

    def figures(self) -> dict[str, Any]:
        return self._owner.figures()

    def moved(self) -> MovedMetrics:
        """What came and went."""
        with self._lock:
            total = copy(self._past)
            for arrival in self._arrivals.values():
                total.count_in(arrival)
            for departure in self._departures.values():
                total.count_out(departure)
                total.migrations += not departure.done
            total.migrations += len(self._arrivals)
            return MovedMetrics(**vars(total))

    # ---- The end

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the provider is closed.")

    def close(self) -> None:
        """Before the provider goes: nobody is answered any more."""
        if self.is_closed:
            return
        self.is_closed = True
        with self._idle:
            self._idle.notify_all()
        for departure in self.departures:
            if not departure.done:
                done, total, _ = departure.progress
                _log.warning(
                    "closed while %s had fetched %d of %d leaves of key-groups %s; what it has "
                    "not is lost with this provider",
                    departure.target,
                    done,
                    total,
                    show_groups(departure.key_groups),
                )
        if self._server is not None:
            self._server.close()


_NOTHING = Piece(PieceKind.NEVER, 0, 0)


def _refusal(action: Action | None, leaf: int, epoch: int, generation: int) -> Piece:
    """Why a leaf is not served, as a piece."""
    message = action.message if isinstance(action, Send) else None
    if isinstance(message, Moved):
        return Piece(PieceKind.MOVED, leaf, message.epoch, to=message.to)
    if isinstance(message, InTransit):
        return Piece(PieceKind.IN_TRANSIT, leaf, message.epoch)
    if isinstance(message, Never):
        return Piece(PieceKind.NEVER, leaf, epoch)
    return Piece(PieceKind.FENCED, leaf, epoch, generation=generation)


def _leaves(groups: Iterable[range], subgroups: int) -> list[int]:
    return [leaf for part in leaf_ranges(groups, subgroups) for leaf in part]


def _check_id(migration: str) -> None:
    """Before anything is shut for it: checksums are bound to these 16 bytes."""
    if len(migration) != 32 or not set(migration) <= set("0123456789abcdef"):
        raise ArgumentError(f"{shorten(migration)} is no migration: 32 hexadecimal digits are.")


def _check_offer(
    reply: BeginReply, migration: str, groups: tuple[range, ...], subgroups: int, address: str
) -> tuple[range, ...]:
    """The key-groups that were granted: those that were asked for, all of them."""
    granted = [grant.leaf for grant in reply.offer.grants]
    if reply.offer.migration != migration or sorted(granted) != _leaves(groups, subgroups):
        raise PeerError(
            f"{address} was asked for key-groups {show_groups(groups)} and offers "
            f"{len(granted)} leaves of others. It is not to be trusted; nothing was taken over."
        )
    return groups
