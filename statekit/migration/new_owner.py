"""NewOwnerShell: the new owner's part of a peer. It takes leaves on.

Arrival (arrival.py) is one hand-over as the user sees it, and brings leaves; this is what makes
them ours, as the participant says. Its parts have files of their own: what was asked for and not
answered (asking.py), what does not come after all (returning.py), what a home remembers
(going_on.py), and checkpoints (barriers.py).
"""

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
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
    NotOwnedError,
    OccupiedError,
    PeerError,
    PeerLostError,
    StateKitError,
)
from statekit.homes.record import HomeArrival
from statekit.migration.arrival import CLOSE_SECONDS, Arrival
from statekit.migration.asking import Asked, Asking
from statekit.migration.barriers import Barriers
from statekit.migration.fetch import Pieces
from statekit.migration.going_on import Base
from statekit.migration.returning import Returning
from statekit.migration.shadow import Shadow
from statekit.migration.shell import (
    Credentials,
    Owner,
    leaves_of,
)
from statekit.migration.steps import OnStep, Steps
from statekit.migration.strategies import step_size
from statekit.migration.waits import Waited, Waits, total_of
from statekit.protocol.calls import (
    BeginCall,
    BeginReply,
    GiveBackCall,
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
    Install,
    Leases,
    Lost,
    Offer,
)
from statekit.residence.loading import Loading
from statekit.residence.residence import Residence
from statekit.residence.sources import PullSource

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

SETTLE_SECONDS = 10.0  # for leaves that are still arriving to be closed before they go on
# What may come in the answer to Begin: for one small key-group, that saves a thread, a stream
# and a second call.
INLINE_BYTES = 256 << 10
INLINE_GROUPS = 1
STEP_INLINE_BYTES = 4 << 20  # in a step, which is waited for
# That an answer may take longer for each leaf of which changes are asked for. With 65,536 of them,
# a machine that had much else to do took longer than callers wait for a small answer.
HELD_SECONDS = 0.001


class _Step(NamedTuple):
    """A step of a hand-over: its content comes with the offer, where that is possible."""

    shadow: Shadow | None = None
    held: tuple[tuple[int, int], ...] = ()  # leaf, epoch of the source's store


class NewOwnerShell(Returning, Asking, Barriers):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._arrivals: dict[str, Arrival] = {}
        self._steps: list[Steps] = []  # that are not over
        self._shadows: list[Shadow] = []  # that were not dropped
        self._copied_in = 0  # bytes, for shadows that are not known any more
        self._leaves_in = self._bytes_in = self._leaves_fetched = 0  # of arrivals that are over
        self._waited = Waits()  # the same
        self.aligned = Waited()  # of steps

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
        new = Asked(channel.address, call, credentials)
        if self.has_home:
            told = "" if base is None else repr(base[0])
            entry = HomeArrival(groups, number, self.name, hello.name, channel.address)
            with self._owner.lock:
                self._owner.record_asked(entry._replace(base=digest.hex(), base_shown=told))
        return self._begin(channel, new, strategy, base, is_ours=not migration, step=step)

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
        asked: Asked,
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
