"""NewOwnerShell: the new owner's part of a peer. It takes leaves on, and gives them back.

Arrival (arrival.py) is one hand-over as the user sees it, and brings leaves; this is what makes
them ours, and another's again, as the participant says.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

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
    CheckpointError,
    NotOwnedError,
    OccupiedError,
    PeerError,
    PeerLostError,
    StateKitError,
)
from statekit.homes.record import HomeArrival
from statekit.live.job import CheckpointJob, PartJob
from statekit.migration.arrival import CLOSE_SECONDS, Arrival
from statekit.migration.fetch import Pieces
from statekit.migration.going_on import Base, GoingOn
from statekit.migration.shadow import Shadow
from statekit.migration.shell import (
    AddLate,
    Credentials,
    Owner,
    groups_of,
    leaves_of,
)
from statekit.migration.steps import OnStep, Steps
from statekit.migration.strategies import step_size
from statekit.migration.waits import Waited, Waits, total_of
from statekit.protocol.calls import (
    BeginCall,
    BeginReply,
    GiveBackCall,
    InstalledCall,
    PeerHello,
    Piece,
    PieceKind,
)
from statekit.protocol.messages import (
    Accept,
    Action,
    AddToPart,
    Credit,
    Expect,
    GivenBack,
    Install,
    Leases,
    Lost,
    Moved,
    Offer,
    Released,
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

LEASES_AT_END_MAX = 65536  # that a source is told of when the provider is closed
SETTLE_SECONDS = 10.0  # for leaves that are still arriving to be closed before they go on
# What may come in the answer to Begin: for one small key-group, that saves a thread, a stream
# and a second call.
INLINE_BYTES = 256 << 10
INLINE_GROUPS = 1
STEP_INLINE_BYTES = 4 << 20  # in a step, which is waited for
# That an answer may take longer for each leaf of which changes are asked for. With 65,536 of them,
# a machine that had much else to do took longer than callers wait for a small answer.
HELD_SECONDS = 0.001


class _Asked(NamedTuple):
    """How to ask once more for what the participant has asked for, and nobody answered."""

    address: str
    call: BeginCall
    credentials: Credentials


class _Step(NamedTuple):
    """A step of a hand-over: its content comes with the offer, where that is possible."""

    shadow: Shadow | None = None
    held: tuple[tuple[int, int], ...] = ()  # leaf, epoch of the source's store


class _Passed(NamedTuple):
    """Our part of a checkpoint: how to add to it, and what was added."""

    add: AddLate
    late: list[CheckpointJob | PartJob]


class NewOwnerShell(GoingOn):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._arrivals: dict[str, Arrival] = {}
        self._steps: list[Steps] = []  # that are not over
        self._shadows: list[Shadow] = []  # that were not dropped
        self._copied_in = 0  # bytes, for shadows that are not known any more
        self._asked: dict[str, _Asked] = {}  # by migration, while the participant waits
        self._leaves_in = self._bytes_in = self._leaves_fetched = 0  # of arrivals that are over
        self._waited = Waits()  # the same
        self.aligned = Waited()  # of steps
        self._parts: dict[int, _Passed] = {}  # by number: of the last checkpoints

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
        arrival = self._take_on(address, key_groups, strategy, base, credentials, timeout_s)
        if strategy == "all_at_once":
            arrival.wait()
        return arrival

    def step_from(
        self,
        address: str,
        key_groups: KeyGroups | None,
        strategy: str,
        step: int | None,
        on_step: OnStep | None,
        credentials: Credentials,
        timeout_s: float,
        pace: int = 0,
        memory: int = 0,
    ) -> Steps:
        """Has key-groups handed over in steps; returns before the first of them."""
        size = step_size(strategy, step)
        self._check_generation(self.generation, True)
        groups = self._ask_who(address, key_groups, credentials, timeout_s)
        made = Steps(
            self,
            address,
            groups,
            strategy,
            size,
            on_step,
            credentials,
            timeout_s,
            pace,
            memory or self._residence.budget or 0,
        )
        with self._lock:
            self._check_open()
            self._steps.append(made)
        made.start()
        return made

    @property
    def steps(self) -> tuple[Steps, ...]:
        """Hand-overs in steps that are not over."""
        return tuple(self._steps)

    def steps_ended(self, steps: Steps) -> None:
        with self._lock:
            if steps in self._steps:
                self._steps.remove(steps)

    def take_step(
        self,
        address: str,
        groups: tuple[range, ...],
        credentials: Credentials,
        timeout_s: float,
        shadow: Shadow | None = None,
        held: tuple[tuple[int, int], ...] = (),
    ) -> Arrival:
        """One step: key-groups are ours when this returns, and mostly here.

        held: what a shadow has of them.
        """
        step = _Step(shadow, held)
        return self._take_on(address, groups, "prioritised", None, credentials, timeout_s, "", step)

    # ---- Shadows

    def shade_from(
        self,
        address: str,
        key_groups: KeyGroups | None,
        pace: int,
        credentials: Credentials,
        timeout_s: float,
        limit: int,
    ) -> Shadow:
        """Begins to copy key-groups of another process, to take them over later."""
        self._check_generation(self.generation, True)
        groups = self._ask_who(address, key_groups, credentials, timeout_s)
        made = Shadow(self, address, groups, pace, credentials, timeout_s, limit)
        with self._lock:
            if not self.is_closed:  # close() drops those that are in the list by then
                self._shadows.append(made)
        made.open()
        return made

    @property
    def event_time(self) -> int | None:
        return self._residence.store.time("event")

    @property
    def clocks(self) -> dict[str, str]:
        """By which clock entries expire, of states that have a time to live here."""
        states = self._residence.store.states()
        return {raw.name: raw.ttl_settings[1] for raw in states if raw.ttl_settings is not None}

    @property
    def shadows(self) -> tuple[Shadow, ...]:
        """Those that were not dropped."""
        return tuple(self._shadows)

    def shadow_ended(self, shadow: Shadow) -> None:
        with self._lock:
            if shadow in self._shadows:
                self._shadows.remove(shadow)
                self._copied_in += shadow.progress.bytes

    def _ask_who(
        self,
        address: str,
        key_groups: KeyGroups | None,
        credentials: Credentials,
        timeout_s: float,
    ) -> tuple[range, ...]:
        """Key-groups that are there, and that this process may take over."""
        channel = self.channels.borrow(address, credentials, timeout_s)
        is_broken = True
        try:
            hello = channel.hello()
            if hello.generation > self.generation:
                self._check_generation(hello.generation, credentials.knows_servers)  # raises
            asked = hello.owned if key_groups is None else key_groups
            groups = self._check_hello(hello, channel.address, asked)
            self.channels.note(channel, hello)
            is_broken = False
        finally:
            self.channels.give_back(channel, is_broken)
        if missing := subtract(groups, hello.owned):
            raise NotOwnedError(
                f"{address} does not have key-groups {show_groups(missing)}. It has "
                f"{show_groups(hello.owned)}."
            )
        return groups

    def _take_on(
        self,
        address: str,
        key_groups: KeyGroups | None,
        strategy: str,
        base: Base | None,
        credentials: Credentials,
        timeout_s: float,
        migration: str = "",
        step: _Step | None = None,
    ) -> Arrival:
        self._check_generation(self.generation, True)  # who is fenced takes nothing over
        channel = self.channels.borrow(address, credentials, timeout_s)
        before = self.arrivals
        try:
            hello = self._hello(channel, key_groups)
            if hello.generation > self.generation:
                self._check_generation(hello.generation, credentials.knows_servers)  # raises
            arrival = self._begin_any(
                channel, hello, key_groups, strategy, base, credentials, migration, step
            )
        except BaseException:
            me = threading.get_ident()
            if begun := [
                one
                for one in self.arrivals
                if one.channel is channel and one.maker == me and one not in before
            ]:
                begun[0].start()  # an interrupt came when it was ours already
                raise
            self.channels.give_back(channel, is_broken=True)
            if base is not None:
                base[0].release()
            raise
        if base is not None and not arrival.is_based:
            base[0].release()
        arrival.start()
        return arrival

    def _hello(self, channel: "PeerChannel", key_groups: KeyGroups | None) -> PeerHello:
        """Who is there. On a warm channel, what it said last will do where nothing rests on it.

        Somebody else may be there by now. Then the offer says so, or the call fails, as it does if
        that happens after Hello.
        """
        known = self.channels.known(channel)
        rests = key_groups is None or self.has_home or self._owner.interrupted()
        if known is None or rests or any(self._asked):
            known = channel.hello()
            self.channels.note(channel, known)
        return known

    def _begin_any(
        self,
        channel: "PeerChannel",
        hello: PeerHello,
        key_groups: KeyGroups | None,
        strategy: str,
        base: Base | None,
        credentials: Credentials,
        migration: str,
        step: _Step | None,
    ) -> Arrival:
        """Begins; or goes on with what was begun before, if that was not answered."""
        if not migration:
            is_known = credentials.knows_servers
            gone_on = self._go_on(channel, hello, key_groups, strategy, base, is_known)
            if gone_on is not None:
                return gone_on
        digest = b"" if base is None else base[1]
        earlier = [] if migration else self._unanswered(channel.address, hello.name)
        for one in earlier:
            call = one.call
            asked = _joined(hello.owned, call.key_groups) if key_groups is None else key_groups
            groups = group_ranges(asked, hello.key_groups)
            if (groups, digest) == (call.key_groups, call.base):
                try:
                    return self._begin(channel, one, strategy, base, step=step)
                except PeerLostError:
                    raise
                except StateKitError:
                    pass  # it had not begun, or it is over: what the source has now counts
            elif common(groups, call.key_groups):
                self._return_unanswered(channel, one)
        if earlier:
            hello = channel.hello()
        groups = self._check_hello(hello, channel.address, key_groups)
        number = migration or self.new_id()
        with self._lock:
            leaves = leaf_ranges(groups, self.subgroups)
            (begin,) = self._carry_out(self._participant.ask(number, hello.name, leaves))
            barrier = self._participant.barrier
        call = BeginCall(number, self.generation, self.name, groups, barrier, digest, begin.above)
        if not migration:
            # What was proposed is taken back if nothing is heard of it: nothing may have gone.
            most = self.limits.message_bytes // 4  # what comes must fit into one message here
            inline_bytes = min(most, _inline_bytes(strategy, groups, step is not None))
            call = call._replace(inline_bytes=inline_bytes)
        if step is not None and step.shadow is not None:
            call = call._replace(shadow=step.shadow.id, held=step.held)
        new = _Asked(channel.address, call, credentials)
        if self.has_home:
            told = "" if base is None else repr(base[0])
            entry = HomeArrival(groups, number, self.name, hello.name, channel.address)
            with self._owner.lock:
                self._owner.record_asked(entry._replace(base=digest.hex(), base_shown=told))
        return self._begin(channel, new, strategy, base, is_ours=not migration, step=step)

    def _unanswered(self, address: str, source: str) -> list[_Asked]:
        """What was asked for there, and not answered."""
        with self._lock:
            there = [one for one in self._asked.values() if one.address == address]
            open_ones = self._participant.asks(source)
            gone = [one for one in there if one.call.migration not in open_ones]
            self._forget_asked(*(one.call.migration for one in gone))  # with that process
            return [one for one in there if one not in gone]

    def give_up(
        self,
        address: str,
        groups: tuple[range, ...],
        credentials: Credentials,
        timeout_s: float,
    ) -> tuple[range, ...]:
        """Nobody goes on with what was asked for of these, and not answered.

        Key-groups that may have been offered to us still, since nobody answers.
        """
        asked = [one for one in [*self._asked.values()] if common(one.call.key_groups, groups)]
        if not asked or self.is_closed:
            return ()
        channel = self.channels.borrow(address, credentials, timeout_s)
        is_broken = True
        try:
            there = self._unanswered(channel.address, channel.hello().name)
            for one in asked:
                if one in there:
                    self._return_unanswered(channel, one)
            is_broken = False
        except PeerError as error:
            left = [one for one in asked if one.call.migration in self._asked]
            unknown = group_ranges([part for one in left for part in one.call.key_groups])
            _log.warning(
                "%s may be handing key-groups %s over to this provider: %s",
                address,
                show_groups(unknown),
                error,
            )
            return unknown
        finally:
            self.channels.give_back(channel, is_broken)
        return ()

    def _forget_asked(self, *migrations: str) -> None:
        """The source is gone, or says that it has not begun: nobody waits for it any more."""
        with self._lock:
            self._participant.forget_asks(migrations)
            for migration in migrations:
                self._asked.pop(migration, None)
        for arrival in self.arrivals:
            arrival.changed()

    def _check_hello(
        self, hello: PeerHello, address: str, key_groups: KeyGroups | None
    ) -> tuple[range, ...]:
        here, there = self._geometry, (hello.key_groups, hello.subgroups)
        if here != there:
            raise _other_geometry(address, there, here)
        groups = hello.owned if key_groups is None else group_ranges(key_groups, here[0])
        if not groups:
            raise ArgumentError(f"no key-groups to fetch from {address}: name some that it has.")
        with self._owner.lock:
            mine = self._owner.owned()
            if both := common(groups, mine):
                raise OccupiedError(
                    f"key-groups {show_groups(both)} are this provider's already. "
                    f"Fetch others from {address}."
                )
            self._owner.check_stranger(hello.name)
            self._owner.check_vacant(groups)
            self._owner.take_in(hello.schemas)
        return groups

    def _begin(
        self,
        channel: "PeerChannel",
        asked: _Asked,
        strategy: str,
        base: Base | None,
        is_ours: bool = True,
        step: _Step | None = None,
    ) -> Arrival:
        """is_ours: whether it is our own idea, so that we are to know that it was not answered."""
        call = asked.call
        if is_ours:
            self._asked[call.migration] = asked  # before: an interrupt may come
        began = perf_counter()
        try:
            timeout_s = channel.timeout_s + HELD_SECONDS * len(call.held)
            reply = channel.begin(call, timeout_s=timeout_s)
            self._check_geometry(channel, reply, call)
            granted = _check_offer(
                reply, call.migration, call.key_groups, self.subgroups, channel.address
            )
        except PeerError as error:
            if is_ours:
                error.add_note(
                    "It may have begun all the same. fetch_from() again goes on with it; closing "
                    "this provider gives it back, and so does abort() of the departure there."
                )
            else:
                self._forget_asked(call.migration)  # whoever proposed it withdraws it
                self._owner.forget_recorded(call.migration)
            raise
        except StateKitError:
            self._forget_asked(call.migration)  # it says that it has not begun
            self._owner.forget_recorded(call.migration)
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
            # Nothing was taken over: the source is to go on with it. If it does not hear that now,
            # the next fetch_from() says it again.
            still = nullcontext() if self.loading is None else self.loading.standing_still()
            with self._owner.lock, still:
                with self._lock:
                    actions = self._participant.decline(reply.offer)
                self._carry_out(actions)
            if (begun := self._arrivals.get(call.migration)) is not None:
                begun.ended()
            with suppress(StateKitError):
                self._send_returned(channel, reply.offer.source, call, CLOSE_SECONDS)
                self._forget_asked(call.migration)
                if begun is None:
                    self._owner.forget_recorded(call.migration)
            raise
        self._asked.pop(call.migration, None)
        arrival.waited.add(shut=perf_counter() - began)
        if reply.pieces:
            with arrival.waited.on("decode"):
                shadow = None if step is None else step.shadow
                self._take_inline(arrival, call, reply.pieces, shadow)
        return arrival

    def _check_geometry(self, channel: "PeerChannel", reply: BeginReply, call: BeginCall) -> None:
        """Another process may be there than the one that has said how many leaves it has.

        Its leaves are others, though their numbers may be the same. They go back at once; the
        participant has not heard of them.
        """
        here, there = self._geometry, (reply.key_groups, reply.subgroups)
        if here == there:
            return
        leases = [(leaf, grant.epoch) for grant in reply.offer.grants for leaf in grant.leaves]
        back = GiveBackCall(call.migration, reply.offer.generation, tuple(leases))
        channel.give_back(back, timeout_s=CLOSE_SECONDS)
        raise _other_geometry(channel.address, there, here)

    @property
    def _geometry(self) -> tuple[int, int]:
        store = self._residence.store
        return store.key_groups, store.subgroups

    def _take_inline(
        self, arrival: Arrival, call: BeginCall, given: Sequence[Piece], shadow: Shadow | None
    ) -> None:
        """Takes in what came with the offer. Whatever cannot be comes again, as all the rest."""
        held = dict(call.held)
        pieces = Pieces()
        try:
            for piece in given:
                if piece.kind is PieceKind.HERE:
                    with suppress(StateKitError):
                        if pieces.add(piece, arrival.epoch_of(piece.leaf)):
                            self._take_piece(arrival, piece, pieces, shadow, held)
        finally:
            if left := [one.leaf for one in given if one.leaf in arrival.state.missing]:
                self.unanswered(arrival.id, left)
                arrival.changed()

    def _take_piece(
        self,
        arrival: Arrival,
        piece: Piece,
        pieces: Pieces,
        shadow: Shadow | None,
        held: dict[int, int],
    ) -> None:
        loading = self.loading
        arrival.bytes_received += pieces.size
        blocks = pieces.take()
        if loading is None:
            return
        if piece.is_delta and not arrival.is_based:
            if shadow is not None:
                shadow.complete(arrival, piece, blocks, held.get(piece.leaf, 0), loading)
            return
        loading.fill(piece.leaf, arrival.fetching.steps(piece, blocks), arrival)

    def _return_unanswered(
        self, channel: "PeerChannel", asked: _Asked, timeout_s: float | None = None
    ) -> None:
        """What may have been begun is not wanted any more, as it was asked for."""
        call = asked.call
        source = self._participant.source_of(call.migration)
        try:
            with self._lock:
                is_unknown = bool(self._participant.unask(call.migration))  # whether it has begun
            if is_unknown:
                offer = channel.begin(call, timeout_s=timeout_s).offer
                self._hear_offer(offer)
            self._send_returned(channel, source, call, timeout_s)
        except PeerError:
            raise
        except StateKitError:
            pass  # it has not begun, or it is over
        self._forget_asked(call.migration)
        self._owner.forget_recorded(call.migration)

    def _send_returned(
        self, channel: "PeerChannel", source: str, call: BeginCall, timeout_s: float | None
    ) -> None:
        """Tells the source of what was offered, and not taken on, that it may go on with it."""
        leases = self.unreturned(call.migration)
        if leases:
            self._owner.record_returned(call.migration, leases)
            back = GiveBackCall(call.migration, call.generation, leases)
            channel.give_back(back, timeout_s=timeout_s)
            self.tell(source, GivenBack(call.migration, call.generation, 0, leases))
            self._owner.record_told(call.migration)

    def return_unanswered(self) -> None:
        """The provider is being closed: nobody goes on with what was begun and not answered."""
        for asked in [*self._asked.values()]:
            try:
                with self.connect(asked.address, asked.credentials, CLOSE_SECONDS) as channel:
                    if asked in self._unanswered(asked.address, channel.hello().name):
                        self._return_unanswered(channel, asked)
            except StateKitError as error:
                _log.warning(
                    "closed while %s may be handing key-groups %s over to this provider: %s",
                    asked.address,
                    show_groups(asked.call.key_groups),
                    error,
                )

    def _hear_offer(self, offer: Offer) -> list[Action]:
        """What the participant makes of an offer; all but Expect is done. The owner's lock is
        held where something is expected.
        """
        still = nullcontext() if self.loading is None else self.loading.standing_still()
        with self._owner.lock, still:
            with self._lock:
                actions = self._participant.on(offer.source, offer)
            self._carry_out(actions, Expect)
        return actions

    def _accept(
        self,
        channel: "PeerChannel",
        reply: BeginReply,
        granted: tuple[range, ...],
        strategy: str,
        base: PullSource | None,
        is_known: bool,
        here: Collection[int] | None = None,
    ) -> Arrival:
        """What is offered is ours, and comes from now on.

        here: leaves that have come into our home in an earlier life, with which this goes on.
        """
        store, offer = self._residence.store, reply.offer
        with self._owner.lock:
            self._check_open()
            self._owner.take_in(reply.schemas)
            if store.time("event") is None and reply.watermark is not None:
                store.set_time("event", reply.watermark)
            if (ledger := self._residence.ledger) is not None:
                if here is None:
                    self._record_offer(channel.address, reply, granted)
                else:
                    ledger.go_on_expecting(granted)
            actions = self._hear_offer(offer)
            state = self._participant.incoming(offer.migration)
            expected = sum(len(one.leaves) for one in actions if isinstance(one, Expect))
            if (
                here is not None and state is not None
            ):  # an interrupt may have come after an earlier try
                expected = len(state.missing)
            if state is None or expected != sum(len(grant.leaves) for grant in offer.grants):
                raise PeerError(
                    f"{channel.address} offers leaves at epochs that are over. Try again."
                )
            # Who touches what has come with the offer waits for it, and does not ask for it.
            self.want(offer.migration, dict.fromkeys(one.leaf for one in reply.pieces))
            arrival = Arrival(self, channel, reply, state, granted, strategy, base, is_known)
            self._residence.expect(arrival, leaf_ranges(granted, self.subgroups), here or ())
            with self._lock:
                self._arrivals[arrival.id] = arrival
            self._owner.took(granted)
            for leaf in here or ():
                arrival.was_here(leaf)
            self._cover(arrival, offer)
        for earlier in self.arrivals:
            # Leaves that one waited for may come in this one: their source took them back when we
            # seemed lost to it, and offers them anew. If nothing is left of it, it ends.
            if earlier.state.is_over:
                earlier.reports.start()
        return arrival

    # ---- Giving back

    def return_leaves(self, arrival: Arrival) -> tuple[range, ...]:
        """See Arrival.give_back()."""
        loading = self.loading
        if loading is None:
            return ()
        with self._owner.lock, loading.standing_still():
            with self._lock:
                actions = self._participant.give_back(arrival.id)
            self._carry_out(actions)  # says GiveBack: which the reports say, until it is heard
        arrival.reports.send_returned()
        return groups_of(_unexpected(actions), self.subgroups)

    def return_at_end(self, arrival: Arrival) -> None:
        """The provider is being closed: what has not come is left to the source, if it answers."""
        loading = self.loading
        if loading is None or not self.has_home:
            still: AbstractContextManager[bool] = nullcontext(True)
        else:  # nothing may come into the home that is given back
            still = loading.standing_still_within(CLOSE_SECONDS)
        with still as is_still:
            if is_still:
                with self._lock:
                    actions = self._participant.give_back(arrival.id)
                self._carry_out(actions, Unexpect)  # nobody touches it any more
        leases = self.unreturned(arrival.id)
        if not leases:
            return
        try:
            self.record_returned(arrival.id, leases)
            call = GiveBackCall(arrival.id, arrival.generation, leases)
            arrival.channel.give_back(call, timeout_s=CLOSE_SECONDS)
            self.record_told(arrival.id)
        except (StateKitError, ValueError) as error:
            _log.warning(
                "%s was closed before all leaves had come, and %s could not be told: %s",
                arrival,
                arrival.source,
                error,
            )

    def report_at_end(self, arrival: Arrival) -> None:
        """The same, with a home: what has come stays there, and the source may let go of it."""
        if arrival.state.is_over:
            self._owner.record_over(arrival.id)
            return
        leases = self.unreported(arrival.id, LEASES_AT_END_MAX)
        call = InstalledCall(arrival.id, arrival.generation, leases)
        try:
            self.make_durable()
            for leaf, epoch in arrival.channel.installed(call, timeout_s=CLOSE_SECONDS):
                released = Released(arrival.id, arrival.generation, 0, leaf, epoch)
                self.tell(arrival.source_name, released)
        except (StateKitError, ValueError) as error:
            _log.info("%s does not know yet what has come from it: %s", arrival.source, error)
            return
        if arrival.state.is_over:
            self._owner.record_over(arrival.id)

    def end_leases(self, arrival: Arrival, ended: Sequence[Moved]) -> None:
        """The source has taken leaves back."""
        loading = self.loading
        if loading is None:
            return
        touched: list[int] = []
        with self._owner.lock, loading.standing_still():
            actions: list[Action] = []
            with self._lock:
                for moved in ended:
                    actions += self._participant.on(arrival.source_name, moved)
            self._carry_out(actions, Unexpect)
            if gone := _unexpected(actions):
                untouched = self._unexpect(Unexpect(tuple(gone)))  # all at once: they may be many
                touched = sorted({*gone}.difference(untouched))
                if self.has_home:
                    # What is at home of them is not theirs, or our own, any more.
                    lost = groups_of(touched, self.subgroups)
                    self._owner.record_lost(lost)
                    self._owner.record_ended(subtract(groups_of(gone, self.subgroups), lost))
        if self.has_home and touched:
            self._residence.drop_partial(touched)

    def declare_dead(self, name: str) -> tuple[range, ...]:
        loading = self.loading
        still = nullcontext() if loading is None else loading.standing_still()
        with self._owner.lock:
            with still:
                with self._lock:
                    actions, lost = self._participant.declare_dead(name)
                self._carry_out([one for one in actions if isinstance(one, Unexpect)])
            try:
                # What was offered to the dead one is ours again. Not while all leaves stand still:
                # the residence's lock is needed, and who holds it may wait for a leaf.
                self._carry_out([one for one in actions if not isinstance(one, Unexpect)])
            finally:
                for arrival in self.arrivals:
                    if arrival.source_name == name:
                        arrival.ended()
        groups = groups_of(lost, self.subgroups)
        if self.has_home and groups:
            self._owner.record_lost(groups)
            self._residence.drop_partial(lost)
        return groups

    def _unexpect(self, action: Unexpect) -> list[int]:
        """Leaves are another's after all, and their key-groups. Nothing comes meanwhile.

        Those that had not moved into a home are returned.
        """
        self._owner.gave(groups_of(action.leaves, self.subgroups))
        untouched = self._residence.unexpect(action.leaves)
        for arrival in self.arrivals:
            arrival.changed()
        return untouched

    # ---- The end of an arrival

    def finish(self, arrival: Arrival) -> None:
        """Everything of an arrival is here, and its source knows."""
        self._owner.record_over(arrival.id)
        with self._lock:
            if self._arrivals.pop(arrival.id, None) is not None:
                self._leaves_in += arrival.progress.leaves_done
                self._bytes_in += arrival.bytes_received
                self._leaves_fetched += arrival.fetches
                self._waited = total_of((self._waited, arrival.waits))
        loading = self.loading
        if loading is not None:
            loading.end()
        arrival.close_channel()  # it stays warm for the next one

    def forget(self, arrival: Arrival) -> None:
        """An arrival is closed: with its provider, or because it was done and others ended it."""
        with self._lock:
            self._arrivals.pop(arrival.id, None)

    def finish_coming(self, groups: Sequence[range]) -> None:
        self._residence.load_from_peers(leaf_ranges(groups, self.subgroups))
        until = monotonic() + SETTLE_SECONDS
        arrivals = self.arrivals
        wanted = set(leaves_of(groups, self.subgroups)) if arrivals else set()
        for arrival in arrivals:
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
                for leaf in [*arrival.state.missing]
                if covered(leaf) < barrier
            ]
            self._parts[barrier] = _Passed(add_late, [])
            while len(self._parts) > NUMBERS_MAX:
                del self._parts[next(iter(self._parts))]
        leaves = (*part.leaves, *expected)
        return groups_of(leaves, self.subgroups)

    def end_barrier(self, number: int) -> None:
        """Nothing is added any more to our part of checkpoint n. The owner's lock is held."""
        with self._lock:
            self._participant.end(number)

    def _cover(self, arrival: Arrival, offer: Offer) -> None:
        """Key-groups that no part of a checkpoint has are added to ours, as they come."""
        ended = self._participant.ended
        for number in [one for one in self._parts if one > ended]:
            late = [leaf for one in offer.grants if one.covered < number for leaf in one.leaves]
            if late:
                groups = groups_of(late, self.subgroups)
                arrival.late_checkpoint = self.add_late(number, groups)

    def add_late(self, number: int, groups: tuple[range, ...]) -> CheckpointJob | PartJob | None:
        try:
            job = self._parts[number].add(groups)
        except Exception as error:  # whatever it is, that checkpoint will not be complete
            _log.warning(
                "key-groups %s are in no part of checkpoint %d: %s",
                show_groups(groups),
                number,
                error,
            )
            return None
        self._parts[number].late.append(job)
        return job

    def late_parts(self, number: int) -> tuple[CheckpointJob | PartJob, ...]:
        """See KVProvider.late_parts()."""
        part = self._parts.get(number)
        return () if part is None else tuple(part.late)

    # ---- What the participant is asked, and told

    def tell(self, sender: str, message: Any) -> None:
        """A message whose effects are on their way, or done: content, and what follows from it.

        Parts of checkpoints: _cover() has seen to what comes, take() to what is coming.
        """
        with self._lock:
            actions = self._participant.on(sender, message)
        self._carry_out(actions, Install, AddToPart, Lost)

    def want(self, migration: str, leaves: Iterable[int]) -> list[int]:
        """Those of these leaves that are to come, and that nobody else has asked for."""
        with self._lock:
            said = self._carry_out(self._participant.want(migration, leaves))
        return [message.leaf for message in said]

    def unanswered(self, migration: str, leaves: Iterable[int]) -> None:
        """Whoever has asked for these leaves waits no more."""
        with self._lock:
            self._participant.unanswered(migration, leaves)

    def open_stream(self, migration: str) -> Accept | None:
        """The stream to open; None if there is nothing that it could bring."""
        with self._lock:
            said = self._carry_out(self._participant.open_stream(migration))
        return said[0] if said else None

    def stream_ended(self, migration: str, stream: int, is_tried_again: bool) -> Accept | None:
        """The stream to open in its place, if there is one."""
        with self._lock:
            actions = self._participant.stream_ended(migration, stream, is_tried_again)
            said = self._carry_out(actions)
        return said[0] if said else None

    def received(self, migration: str, stream: int, size: int) -> Credit | None:
        """What to grant a stream that has brought so many bytes."""
        with self._lock:
            said = self._carry_out(self._participant.received(migration, stream, size))
        return said[0] if said else None

    def unreported(self, migration: str, most: int) -> tuple[tuple[int, int], ...]:
        """Leases of leaves that are here, as the source may not know."""
        with self._lock:
            said = self._carry_out(self._participant.unreported(migration, most))
        return tuple((message.leaf, message.epoch) for message in said)

    def unreturned(self, migration: str) -> tuple[tuple[int, int], ...]:
        """Leases that were given back, as the source may not know."""
        with self._lock:
            said = self._carry_out(self._participant.unreturned(migration))
        return said[0].leases if said else ()

    def uncompleted(self, migration: str) -> list[int]:
        """Leaves of which entries are here, and nobody has asked for the rest."""
        with self._lock:
            said = self._carry_out(self._participant.uncompleted(migration))
        return [message.leaf for message in said]


def _inline_bytes(strategy: str, groups: tuple[range, ...], is_step: bool) -> int:
    """How much of what is asked for may come with the offer."""
    if is_step:
        return STEP_INLINE_BYTES
    is_small = sum(map(len, groups)) <= INLINE_GROUPS
    return INLINE_BYTES if is_small and strategy in ("prioritised", "all_at_once") else 0


def _other_geometry(address: str, there: tuple[int, int], here: tuple[int, int]) -> ArgumentError:
    return ArgumentError(
        f"{address} has {there[0]} key-groups x {there[1]} sub-groups; this provider has "
        f"{here[0]} x {here[1]}. Open both with the same numbers."
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
