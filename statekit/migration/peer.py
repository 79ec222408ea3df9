"""Peer: a provider among others. It carries out what its participant says, and answers calls.

    KVProvider ──> Peer ──> Participant     who has which lease (pure; docs/protocol.md)
                    │  ├──> Departure       leaves that go: shut, read out on demand or as a stream
                    │  └──> Arrival         leaves that come
                    └──> PeerServer, PeerChannel (statekit/remote): the same calls, over gRPC

A call is a message and its reply: Begin makes the source's participant offer, and the offer is the
reply; Fetch is answered by the leaf; Installed by Released; GiveBack by GivenBack. So every message
of the protocol passes through Participant.on(), here as in the simulator.

The two sides of a hand-over are in old_owner.py and new_owner.py; what is here is about being
reached.
"""

import logging
import struct
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from statekit.assignment import leaf_ranges, show_groups, subtract
from statekit.errors import (
    ArgumentError,
    ClosedError,
    HomeError,
    KeyTypeError,
    MigrationError,
    NotOwnedError,
    PeerError,
    StateKitError,
    shorten,
)
from statekit.metrics import MovedMetrics, StateCounters
from statekit.migration.departure import Departure, pieces_of
from statekit.migration.new_owner import NewOwnerShell
from statekit.migration.old_owner import OldOwnerShell
from statekit.migration.shell import Credentials, Owner, check_id, leaves_of
from statekit.migration.steps import SteppedDeparture
from statekit.migration.strategies import STEPPED, TIMEOUT_S, canonical
from statekit.migration.waits import total_of
from statekit.native.states import State
from statekit.protocol.calls import (
    Limits,
    PeerHello,
    Piece,
    ProposeCall,
    QueryCall,
    QueryReply,
    ScanCall,
)
from statekit.protocol.messages import Fence, Leases
from statekit.remote.security import parse_address
from statekit.residence.residence import Residence
from statekit.schema import StateSchema
from statekit.version import __version__

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel
    from statekit.remote.server import PeerServer

_log = logging.getLogger("statekit")

WARM_SECONDS = 1.0  # for a server to be reached by the process that it is in


class Peer(OldOwnerShell, NewOwnerShell):
    """One per provider, from the first time it serves, fetches or passes a barrier."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._server: PeerServer | None = None
        self._proposals: dict[str, Future[None]] = {}  # by migration: what others proposed to us

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
        if not credentials.knows_callers:
            _log.warning(
                "%s asks nobody who they are: whoever can connect may read all state here, and "
                "take key-groups over. Give serve() a token=, or tls= with a ca.",
                server.address,
            )
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

    def lead(self, generation: int) -> None:
        """Begins a later generation with what is owned here; for who restored it."""
        with self._owner.lock, self._lock:
            open_ones = len(self._arrivals) + sum(not one.done for one in self.departures)
            if generation < self.generation or open_ones:
                raise MigrationError(
                    f"generation {generation} cannot begin here: this is {self.generation}, with "
                    f"{open_ones} migrations that are not done."
                )
            if generation > self.generation:
                barrier, ended = self._participant.barrier, self._participant.ended
                owned = self._owner.owned()
                leases = self.leases(owned)
                self._participant = self._new_participant(generation)
                leaves = leaves_of(owned, self.subgroups)
                self._participant.own(leaves, barrier, leases=leases)
                self._participant.end(ended)

    def migrate(
        self,
        to: str,
        key_groups: tuple[range, ...],
        strategy: str,
        credentials: Credentials,
        timeout_s: float,
    ) -> Departure | SteppedDeparture:
        """Asks another process to fetch key-groups from here; returns when it has begun."""
        address = self.address
        self._check_owned(key_groups)
        migration = self.new_id()
        stepped = SteppedDeparture(key_groups, to, self.gone, lambda: self.is_closed)
        if strategy in STEPPED:
            with self._lock:
                self._stepped.add(stepped)  # before: the first step may begin at once
        channel = self.channels.borrow(to, credentials, timeout_s)
        is_broken = True
        try:
            channel.propose(ProposeCall(migration, self.generation, address, key_groups, strategy))
            is_broken = False
        except StateKitError:
            self._withdraw(migration, key_groups)
            raise
        finally:
            self.channels.give_back(channel, is_broken)
        if strategy in STEPPED:
            return stepped
        departure = self._departures.get(migration)  # the target began before it answered
        if departure is None:
            raise PeerError(f"{to} says that it has begun, and has not. Nothing was handed over.")
        return departure

    # ---- Calls of others (PeerService); the rest is in old_owner.py

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
                watermark=store.time("event"),
            )

    def propose(self, call: ProposeCall) -> None:
        """Somebody wants to hand over: fetches from there. Done when it has begun."""
        self._check_open()
        strategy = canonical(call.strategy)
        self._check_generation(call.generation, self.credentials.knows_callers)
        self._owner.check_stays()
        credentials = self.credentials
        if not (credentials.knows_callers or parse_address(call.address).is_local):
            raise PeerError(
                f"{call.address} is not on this machine, and whoever proposed it did not have to "
                "say who it is. Serve with a token or mutual TLS to take key-groups from there."
            )
        check_id(call.migration)
        # The same proposal again waits for the first, and has the same answer: it was repeated
        # because that answer was late or lost, and what has begun cannot begin once more.
        with self._lock:
            is_new = call.migration not in self._proposals
            done = self._proposals.setdefault(call.migration, Future())
        if not is_new:
            done.result(2 * TIMEOUT_S)
            return
        try:
            if strategy in STEPPED:
                self.step_from(
                    call.address, call.key_groups, strategy, None, None, credentials, TIMEOUT_S
                )
                done.set_result(None)
                return
            self._take_on(
                call.address,
                call.key_groups,
                strategy,
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
        if schema is None:
            known = ", ".join(sorted(one.name for one in self._owner.schemas())) or "none"
            raise ArgumentError(f"there is no state {call.state!r} here. There are: {known}.")
        raw = self._native_state(schema)
        values = []
        for encoded in call.keys:
            try:
                key = raw.codec.decode(encoded)
            except (ValueError, struct.error):
                raise KeyTypeError(
                    f"{shorten(encoded)} is no encoded key of state {call.state!r}, whose keys "
                    f"are {raw.codec.text!r}."
                ) from None
            values.append(residence.call_when_here(raw, raw.get_encoded, key))
        return QueryReply(schema, tuple(values))

    def _native_state(self, schema: StateSchema) -> State:
        """The store's state of that name, which need not have been declared: it may be at home."""
        residence = self._residence
        residence.counters.setdefault(schema.name, StateCounters())
        for raw in residence.store.states():
            if raw.name == schema.name:
                return raw
        kind: Any = schema.kind
        made: State = residence.store.state(schema.name, kind, schema.key, timed=schema.timed)
        return made

    def scan(self, call: ScanCall) -> Iterator[Piece]:
        self._check_open()
        with self._owner.lock:  # key-groups do not change hands while the state is frozen
            if missing := subtract(call.key_groups, self._owner.owned()):
                raise NotOwnedError(
                    f"key-groups {show_groups(missing)} are not here, or not any more; here are "
                    f"{show_groups(self._owner.owned())}. Ask again."
                )
            frozen = self._residence.freeze()
        with frozen:
            for leaf, blocks in frozen.leaves(leaf_ranges(call.key_groups, self.subgroups)):
                yield from pieces_of(leaf, 0, blocks)

    def _fenced(self, action: Fence) -> None:
        super()._fenced(action)
        for arrival in self.arrivals:
            arrival.ended()

    def figures(self) -> dict[str, Any]:
        return self._owner.figures()

    def moved(self) -> MovedMetrics:
        """What came and went."""
        with self._lock:
            arrivals, departures = self.arrivals, self.departures
            now = (self._waited, self.aligned.found, *(one.waits for one in arrivals))
            waited = total_of(now)._asdict()
            return MovedMetrics(
                migrations=len(arrivals) + sum(not one.done for one in departures),
                leaves_in=self._leaves_in + sum(one.progress.leaves_done for one in arrivals),
                leaves_out=self._leaves_out + sum(one.progress.leaves_done for one in departures),
                bytes_in=self._bytes_in + sum(one.bytes_received for one in arrivals),
                bytes_out=self._bytes_out + sum(one.bytes_sent for one in departures),
                leaves_fetched=self._leaves_fetched + sum(one.fetches for one in arrivals),
                shadow_bytes=sum(one.progress.memory for one in self.shadows),
                shadowed_by=len(self.shading),
                copied_in=self._copied_in + sum(one.progress.bytes for one in self.shadows),
                copied_out=self.shading.bytes_sent,
                **{f"waited_{what}_s": seconds for what, seconds in waited.items()},
            )

    # ---- The end

    def close(self) -> None:
        """Before the provider goes: nobody is answered any more."""
        if self.is_closed:
            return
        with self._lock:  # whoever looks at it and begins something is in time, or is refused
            self.is_closed = True
        with self._idle:
            self._idle.notify_all()
        with self.gone:
            self.gone.notify_all()
        for steps in (ending := self.steps):
            steps.end()
        for shadow in self.shadows:
            shadow.drop()
        self.shading.close()
        for steps in ending:
            steps.join()
        self.return_unanswered()
        for departure in self.departures:
            self._leave_behind(departure)
        if self._residence.home is not None:
            try:
                with suppress(ClosedError):  # the home was let go of: nothing is deleted any more
                    # What others have is deleted by the flush that comes now.
                    self._free_handed_over(0)
            except HomeError as error:
                _log.warning("what was handed over is not deleted at home: %s", error)
        self.channels.close()
        if self._server is not None:
            self._server.close()

    def _leave_behind(self, departure: Departure) -> None:
        """What becomes of a hand-over that is not done when the provider goes."""
        has_home = self._residence.home is not None
        if has_home:  # where what nobody fetched must be found again
            try:
                self._abort(departure, False)
            except MigrationError:
                pass  # the new owner has some of it: see below
            except HomeError as error:
                _log.warning("%s cannot be ended: %s", departure, error)
        if departure.done:
            return
        done, total, _ = departure.progress
        _log.warning(
            "closed while %s had fetched %d of %d leaves of key-groups %s; what it has not is %s",
            departure.target,
            done,
            total,
            show_groups(departure.key_groups),
            "at home, as it was when it was handed over: open(..., reclaim=True) if it is gone"
            if has_home
            else "lost with this provider",
        )
