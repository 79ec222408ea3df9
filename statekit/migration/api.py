"""PeerApi: what a KVProvider does with other processes. Its part of the public interface.

    kv.serve("127.0.0.1:0")                 others may fetch from here, and look at the state
    kv.fetch_from(address, key_groups=…)    takes key-groups over; usable at once
    kv.migrate(to=address, key_groups=…)    the same, begun by the old owner
    kv.is_here(keys), kv.absent(keys), kv.prefetch(keys)    for engines that park records

It costs nothing until one of these is called: the peer, and with it what moves state and gRPC, is
imported then. So annotations are not evaluated here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count
from typing import TYPE_CHECKING, Any, overload

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import (
    ArgumentError,
    HomeError,
    NotOwnedError,
    UnknownEntryError,
    shorten,
)
from statekit.keys import KeyType, key_codec
from statekit.migration.strategies import STEPPED, TIMEOUT_S, Stepped, Strategy, Whole, canonical
from statekit.native.columns import route
from statekit.native.kinds import residency_filter
from statekit.protocol.messages import Leases, cut_leases, renew_leases
from statekit.residence.moving_in import MovingIn
from statekit.residence.residence import Residence
from statekit.residence.sources import CheckpointSource, open_pinned
from statekit.schema import StateSchema
from statekit.state.keyed import plain_items

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from statekit.homes.record import HomeArrival, HomeShare
    from statekit.live.job import CheckpointJob, PartJob
    from statekit.migration.arrival import Arrival
    from statekit.migration.departure import Departure
    from statekit.migration.peer import Peer
    from statekit.migration.shadow import Shadow
    from statekit.migration.shell import Credentials
    from statekit.migration.steps import OnStep, SteppedDeparture, Steps
    from statekit.protocol.calls import Limits
    from statekit.remote.security import TLS
    from statekit.remote.server import PeerServer

_IS_ABSENT, _IS_PARTIAL = residency_filter("absent"), residency_filter("partial")
_PREFETCHERS = 4  # threads that bring what engines ask for


class PeerApi(ABC):
    """See KVProvider."""

    _residence: Residence
    _home: HomeShare
    _lock: Any

    def __init__(self) -> None:
        self._peer: Peer | None = None
        self._leases: Leases = ()  # that ended before there was a peer, here or elsewhere
        self._prefetchers: ThreadPoolExecutor | None = None
        self._peer_lock = threading.Lock()

    # ---- What a provider must be able to do

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _owned(self) -> tuple[range, ...]: ...

    @abstractmethod
    def _stored(self) -> Sequence[StateSchema]: ...

    @abstractmethod
    def _take_in(self, schemas: Sequence[StateSchema]) -> None:
        """Takes on states of a peer."""

    @abstractmethod
    def _gave(self, part: tuple[range, ...]) -> None:
        """Key-groups are another's from now on."""

    @abstractmethod
    def _take_over(self, part: tuple[range, ...]) -> None:
        """Key-groups are this provider's from now on."""

    @abstractmethod
    def _record_given(self, part: tuple[range, ...], leases: Leases) -> None:
        """See Owner, as for the next two."""

    @abstractmethod
    def _record_taken(self, part: tuple[range, ...], leases: Leases) -> None: ...

    @abstractmethod
    def _record_deleted(self, part: tuple[range, ...]) -> None: ...

    @abstractmethod
    def _check_stranger(self, name: str) -> None: ...

    @abstractmethod
    def _interrupted(self) -> tuple[HomeArrival, ...]: ...

    @abstractmethod
    def _check_vacant(self, part: tuple[range, ...]) -> None: ...

    @abstractmethod
    def _record_asked(self, arrival: HomeArrival) -> None: ...

    @abstractmethod
    def _record_arriving(self, arrival: HomeArrival) -> None: ...

    @abstractmethod
    def _record_returned(self, migration: str, leases: Iterable[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _record_told(self, migration: str) -> None: ...

    @abstractmethod
    def _record_ended(self, part: tuple[range, ...]) -> None: ...

    @abstractmethod
    def _record_lost(self, part: tuple[range, ...]) -> None: ...

    @abstractmethod
    def _record_over(self, migration: str) -> None: ...

    @abstractmethod
    def _forget_recorded(self, migration: str) -> None: ...

    @abstractmethod
    def _since(self, digest: bytes) -> array[int] | None:
        """Per leaf: the epoch that a checkpoint has it of, if it is the last one in its place."""

    @abstractmethod
    def _figures(self) -> dict[str, Any]:
        """Metrics as plain data."""

    # ---- Being reached

    def serve(
        self,
        address: str = "127.0.0.1:0",
        *,
        tls: TLS | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        insecure: bool = False,
        generation: int | None = None,
    ) -> PeerServer:
        """Lets other processes fetch key-groups from here, and look at the state.

        address: "127.0.0.1:0" is any free port on this machine; the result's `address` tells. For
        another one TLS is needed, and a token or certificates of the peers (or insecure=True).
        tls, token: also used when this provider connects to others, unless told otherwise.
        generation: counts recoveries. Whoever restores state that another process may still hold
        gives the next number; processes of earlier ones are refused, and own nothing any more.
        """
        self._check_open()
        from statekit.migration.shell import Credentials
        from statekit.protocol.calls import Limits

        peer = self._as_peer()
        if generation is not None:
            peer.lead(generation)
        return peer.serve(address, Credentials(tls, token), limits or Limits(), insecure=insecure)

    def _as_peer(self) -> Peer:
        with self._lock:  # first: key-groups do not change hands meanwhile
            if self._peer is None:
                from statekit.migration.peer import Peer

                self._peer = Peer(_Owner(self), self._residence, self._leases)
                self._home.participants.add(self._peer.name)
                self._leases = ()
            return self._peer

    def _leases_of(self, part: tuple[range, ...]) -> Leases:
        """The epochs of key-groups' leases. Other processes may remember them."""
        if self._peer is not None:
            return self._peer.leases(part)
        if not self._leases:  # nothing was ever handed over
            return ()
        return cut_leases(self._leases, leaf_ranges(part, self._residence.store.subgroups))

    def _hand_on(self, other: PeerApi, part: tuple[range, ...]) -> None:
        """Key-groups went from here to another provider of this process, and so do their leases."""
        leases = self._leases_of(part)
        if self._peer is not None:
            self._peer.disown(part)
        if other._peer is not None:
            other._peer.own(part, leases)
        elif leases:
            other._leases = renew_leases(other._leases, leases)

    def _credentials(self, tls: TLS | None, token: str | None) -> Credentials:
        from statekit.migration.shell import Credentials

        known = self._as_peer().credentials
        return Credentials(tls or known.tls, token or known.token)

    # ---- Handing over

    @overload
    def fetch_from(
        self,
        peer: str,
        *,
        key_groups: KeyGroups | None = None,
        strategy: Whole = "prioritised",
        base: str | Checkpoint | None = None,
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Arrival: ...
    @overload
    def fetch_from(
        self,
        peer: str,
        *,
        key_groups: KeyGroups | None = None,
        strategy: Stepped,
        step: int | None = None,
        on_step: OnStep | None = None,
        pace: int | None = None,
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Steps: ...
    def fetch_from(
        self,
        peer: str,
        *,
        key_groups: KeyGroups | None = None,
        strategy: Strategy = "prioritised",
        base: str | Checkpoint | None = None,
        step: int | None = None,
        on_step: OnStep | None = None,
        pace: int | None = None,
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Arrival | Steps:
        """Takes key-groups over from another process.

        They are this provider's when it returns; with strategies in steps, some after the others.

        What is not here yet is fetched when it is touched, and the rest comes by itself.
        peer: the address that serve() gave there. key_groups: all that it has, unless told.
        strategy: "prioritised" fetches on demand and streams the rest, hot leaves first.
        "on_demand" fetches what is touched only; "order_unaware" and "order_unaware_batched" only
        stream; "all_at_once" returns when everything is here.
        "fluid" and "batched" return at once, and take ownership of one or `step` key-groups at a
        time: the result's `owned` tells which have come. The others are refused here, and served
        there. "seamless" copies everything first (see shadow()), and takes it over in small steps.
        on_step: called with the key-groups of each step, in a thread of its own.
        pace: of "seamless", bytes a second; see shadow().
        base: a place of checkpoints that this side can read, under whatever name. If the newest one
        there is one that the peer took last in some place, only what changed since comes from it.
        timeout: seconds after which a peer that does not answer raises PeerLostError.
        A home remembers what was on its way when its process ended: then this goes on with that, if
        the peer is the process that it was, and key_groups are among these, or not told.
        """
        self._check_open()
        self._check_stays()
        name, credentials = canonical(strategy), self._credentials(tls, token)
        if name in STEPPED:
            if base is not None:
                raise ArgumentError(
                    f"base= is for hand-overs of everything at once, and {name!r} moves ownership "
                    "in steps. Leave base out, or use strategy='prioritised'."
                )
            self._check_bytes(pace=pace)
            return self._as_peer().step_from(
                peer, key_groups, name, step, on_step, credentials, timeout, pace or 0
            )
        if step is not None or on_step is not None or pace is not None:
            raise ArgumentError(
                f"step=, on_step= and pace= are for strategies in steps ({', '.join(STEPPED)}); "
                f"{name!r} moves the ownership of everything at once. Leave them out."
            )
        based = None if base is None else _open_base(base, self._residence.store.leaves)
        return self._as_peer().fetch_from(peer, key_groups, name, based, credentials, timeout)

    def shadow(
        self,
        peer: str,
        *,
        key_groups: KeyGroups | None = None,
        pace: int | None = None,
        memory: int | None = None,
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Shadow:
        """Copies key-groups of another process, which goes on using them; to be taken over later.

        shadow.take() takes some of them over: what has changed since they were copied last is
        little, and all of it is here when that returns. Before that nothing is this provider's, and
        shadow.drop() is all it takes to want it no more.
        pace: bytes a second; the old owner chooses unless told, so that its own work goes on.
        memory: bytes that the copies may take; MemoryLimitError if they would take more. Unless
        told, this provider's own limit, if it has one.
        """
        self._check_open()
        self._check_stays()
        self._check_bytes(pace=pace, memory=memory)
        limit = memory if memory is not None else self._residence.budget or 0
        return self._as_peer().shade_from(
            peer, key_groups, pace or 0, self._credentials(tls, token), timeout, limit
        )

    @staticmethod
    def _check_bytes(**given: Any) -> None:
        for name, value in given.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name}={shorten(value)} is no number of bytes.")

    @property
    def shadows(self) -> tuple[Shadow, ...]:
        """Copies of other processes' key-groups that were not dropped."""
        peer = self._peer
        return () if peer is None else peer.shadows

    def _check_stays(self) -> None:
        """HomeError if what comes here is gone when this provider is closed."""
        home = self._residence.home
        if home is not None and home.is_private_copy:
            raise HomeError(
                "this is a copy to look at (look=1), which is gone when it is closed: what it took "
                "over would be lost. Open the home itself: leave look out."
            )

    @overload
    def migrate(
        self,
        to: str,
        *,
        key_groups: KeyGroups,
        strategy: Whole = "prioritised",
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Departure: ...
    @overload
    def migrate(
        self,
        to: str,
        *,
        key_groups: KeyGroups,
        strategy: Stepped,
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> SteppedDeparture: ...
    def migrate(
        self,
        to: str,
        *,
        key_groups: KeyGroups,
        strategy: Strategy = "prioritised",
        tls: TLS | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Departure | SteppedDeparture:
        """Hands key-groups over to another process, which serves at `to`; see fetch_from().

        Returns when it has taken them on: from then on they are refused here. Their state stays
        here until it is there; wait() for that before you close this provider. With a strategy in
        steps, it returns when the other process has agreed to take them.
        """
        self._check_open()
        name = canonical(strategy)
        peer = self._as_peer()
        groups = group_ranges(key_groups, self._residence.store.key_groups)
        return peer.migrate(to, groups, name, self._credentials(tls, token), timeout)

    def late_parts(self, barrier: int) -> tuple[CheckpointJob | PartJob, ...]:
        """What was added to this provider's part of a checkpoint after its barrier had passed.

        Key-groups that were between two owners then, and are here now, are written by jobs of their
        own: of checkpoints in the same place, which restore() is given with the others; or, if
        write_part() was used, of parts, which publish() is given with the others.
        """
        self._check_open()
        return () if self._peer is None else self._peer.late_parts(barrier)

    def end_barrier(self, barrier: int) -> None:
        """Says that checkpoint n is complete, or was given up: nothing is added to it here.

        Tell it to all providers. Without it, a provider that was opened after the barrier had
        passed counts as one that the barrier has not passed yet, and what it hands over is added
        to the new owner's part of n. Barriers up to n have passed here then, whether n was taken
        here or not.
        """
        self._check_open()
        if isinstance(barrier, bool) or not isinstance(barrier, int) or barrier < 1:
            raise ArgumentError(f"barrier is {shorten(barrier)}. Pass its number: 1 or greater.")
        with self._lock:
            self._as_peer().end_barrier(barrier)

    @property
    def migrations(self) -> tuple[Arrival | Departure | Steps, ...]:
        """The hand-overs that are not done; of those in steps, also the step that is taken now."""
        peer = self._peer
        if peer is None:
            return ()
        return (*peer.arrivals, *(one for one in peer.departures if not one.done), *peer.steps)

    def fence(self, generation: int) -> None:
        """Says that a later generation has begun elsewhere: this provider owns nothing any more."""
        self._check_open()
        self._as_peer().fence(generation)

    # ---- For engines that do not wait

    def is_here(self, keys: Any, *, key: KeyType = str) -> bool:
        """Whether the state under all these keys is here: nothing would be waited for."""
        return not len(self.absent(keys, key=key))

    def absent(self, keys: Any, *, key: KeyType = str) -> array[int]:
        """The positions of keys of a column whose state is still to come, ascending.

        Keys of other providers are not among them: these are refused, not waited for.
        """
        residence = self._residence
        loading = residence.loading
        if loading is None:
            self._check_open()
            return array("q")
        keys = _column(keys)
        store, codec = residence.store, key_codec(key)
        leaves = route(keys, codec, store.leaves)
        if isinstance(loading, MovingIn):  # what is at home is here, as far as engines care
            is_coming = loading.is_coming
            return array("q", (at for at, leaf in enumerate(leaves) if is_coming(leaf)))
        found = store.residencies(leaves)
        absent = array("q", compress(count(), found.translate(_IS_ABSENT)))
        partial = [*compress(count(), found.translate(_IS_PARTIAL))]
        if partial and (unknown := self._unknown(keys, partial, codec.text)):
            return array("q", sorted([*absent, *unknown]))
        return absent

    def _unknown(self, keys: Any, positions: Sequence[int], key_type: str) -> set[int]:
        """Those of some positions whose keys have entries that are not here, in any state."""
        items = plain_items(keys)
        some = [items[at] for at in positions]
        unknown: set[int] = set()
        for raw in self._residence.store.states():
            if raw.codec.text == key_type:
                try:
                    raw.contains_many(some)
                except UnknownEntryError as error:
                    unknown.update(positions[record] for record in error.records)
                except NotOwnedError:  # just now: then it will be refused
                    continue
        return unknown

    def prefetch(self, keys: Any, *, key: KeyType = str) -> Future[None]:
        """Brings the state under these keys here; the future is done when all of it is.

        What keeps it from coming (PeerLostError, ...) is raised by the future's result().
        """
        from concurrent.futures import Future, ThreadPoolExecutor

        self._check_open()
        residence = self._residence
        done: Future[None] = Future()
        keys = _column(keys)
        positions = self.absent(keys, key=key)
        if not positions:
            done.set_result(None)
            return done
        store, codec = residence.store, key_codec(key)
        items, encode = plain_items(keys), codec.encode
        some = [*dict.fromkeys(items[at] for at in positions)]
        leaves = set(route(some, codec, store.leaves))
        encoded = [encode(item) for item in some]
        wanted = {raw.name: encoded for raw in store.states() if raw.codec.text == codec.text}
        with self._peer_lock:
            if self._prefetchers is None:
                self._prefetchers = ThreadPoolExecutor(
                    _PREFETCHERS, thread_name_prefix="statekit-prefetch"
                )
            return self._prefetchers.submit(residence.load_keys, sorted(leaves), wanted)

    def _close_peer(self) -> None:
        """Nobody is answered any more, and nothing is brought."""
        peer, prefetchers = self._peer, self._prefetchers
        if peer is not None:
            peer.close()
        if prefetchers is not None:
            prefetchers.shutdown(wait=False, cancel_futures=True)


class _Owner:
    """A provider as its peer sees it."""

    def __init__(self, provider: PeerApi) -> None:
        self.lock = provider._lock
        self.owned = provider._owned
        self.schemas = provider._stored
        self.take_in = provider._take_in
        self.gave = provider._gave
        self.took = provider._take_over
        self.record_given = provider._record_given
        self.record_taken = provider._record_taken
        self.record_deleted = provider._record_deleted
        self.check_stranger = provider._check_stranger
        self.interrupted = provider._interrupted
        self.check_vacant = provider._check_vacant
        self.record_asked = provider._record_asked
        self.record_arriving = provider._record_arriving
        self.record_returned = provider._record_returned
        self.record_told = provider._record_told
        self.record_ended = provider._record_ended
        self.record_lost = provider._record_lost
        self.record_over = provider._record_over
        self.forget_recorded = provider._forget_recorded
        self.check_stays = provider._check_stays
        self.since = provider._since
        self.figures = provider._figures


def _column(keys: Any) -> Any:
    """Keys that can be looked at more than once, and by position."""
    return keys if hasattr(keys, "__getitem__") and not isinstance(keys, Mapping) else [*keys]


def _open_base(base: str | Checkpoint, leaves: int) -> tuple[CheckpointSource, bytes]:
    """A checkpoint to begin from, kept from being deleted, and its digest."""
    place, number = (base.url, base.number) if isinstance(base, Checkpoint) else (base, None)
    if not isinstance(place, str):
        raise ArgumentError(f"{shorten(base)} names no place of checkpoints. Give its URL.")
    checkpoint, pin = open_pinned(place, number)
    if checkpoint.manifest.leaves != leaves:
        pin.release()
        raise ArgumentError(
            f"the checkpoint in {checkpoint.url!r} has {checkpoint.manifest.leaves} leaves, this "
            f"provider {leaves}. A base has as many."
        )
    source = CheckpointSource([(checkpoint, pin)], leaves)
    return source, checkpoint.digest
