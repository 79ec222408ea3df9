"""OldOwnerShell: the old owner's part of a peer. It offers leaves, and reads them out.

Departure (departure.py) is one hand-over as the user sees it, and reads leaves out; this is what
asks the participant whether a leaf may be read out, and carries out what it says.

A home remembers who owns what, or an old owner that is killed would come back with what others
have by then. So its record changes before anybody may act on it:

    Shut     "given" is there before Begin is answered. If it cannot be written, nothing has begun
    TakeBack it is taken out, and the participant is told so; only then it says Reopen. If it cannot
             be written, the leaves stay shut, and whatever is asked next tries again
    Drop     "deleted" is there before the first row of a key-group is deleted (the janitor)
"""

import logging
import threading
from array import array
from collections.abc import Iterator
from contextlib import suppress
from itertools import compress
from time import perf_counter
from typing import Any
from weakref import WeakSet

from statekit.assignment import group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import (
    ClosedError,
    HomeError,
    LeaseError,
    MigrationError,
    NotOwnedError,
    StateKitError,
)
from statekit.migration.departure import Departure
from statekit.migration.shading import Shading
from statekit.migration.shell import (
    Owner,
    Shell,
    check_id,
    groups_of,
)
from statekit.migration.steps import SteppedDeparture
from statekit.native.kinds import residency_filter
from statekit.protocol.calls import (
    BeginCall,
    BeginReply,
    CopyCall,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    PickCall,
    PickReply,
    Piece,
    PieceKind,
    ShadeCall,
    ShadeReply,
    StreamCall,
)
from statekit.protocol.messages import (
    Accept,
    AddToPart,
    Begin,
    Credit,
    Declined,
    Drop,
    Fence,
    Fetch,
    GiveBack,
    Installed,
    InTransit,
    Leases,
    Moved,
    Never,
    Offer,
    Released,
    Reopen,
    Serve,
    Shut,
    TakeBack,
)
from statekit.residence.residence import Residence
from statekit.turns import short_turns

_log = logging.getLogger("statekit")

DEPARTURES_KEPT = 64  # that are done: late calls about them are answered as the first ones were
PICK_BYTES_MAX = 4 << 20  # of entries in one reply
_IS_WHOLE = residency_filter("whole")
JANITOR_SECONDS = 5.0  # that memory waits at most to be freed, while leaves are being sent
JANITOR_SHARE = 9  # times as long as it takes to free a leaf, others work then
JANITOR_PAUSE_SECONDS_MAX = 0.05  # what took long was waiting for others, not work


class OldOwnerShell(Shell):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._departures: dict[str, Departure] = {}
        self._leaves_out = self._bytes_out = 0  # of departures that are not known any more
        self._janitor: threading.Thread | None = None
        self._streams = 0  # that are being sent
        self._idle = threading.Condition()  # of the number of streams
        self.shading = Shading(self, residence, self.name)
        self.gone = threading.Condition()  # notified when a departure has changed, or begun
        self._stepped: WeakSet[SteppedDeparture] = WeakSet()  # that are told of departures

    @property
    def departures(self) -> tuple[Departure, ...]:
        return tuple(self._departures.values())

    # ---- Handing over

    def begin(self, call: BeginCall) -> BeginReply:
        self._check_open()
        self._check_generation(call.generation, self.credentials.knows_callers)
        check_id(call.migration)
        groups = group_ranges(call.key_groups, self._residence.store.key_groups)
        try:
            reply = self._answer_begin(call, groups)
        except BaseException:
            # Who asked is told so, and forgets it. The same call once more, which may be on its way
            # still, must not begin then.
            with self._lock:
                if call.migration not in self._departures:
                    self._participant.withdraw(call.migration, leaf_ranges(groups, self.subgroups))
            raise
        return reply._replace(pieces=self._inline(call)) if call.inline_bytes else reply

    def _inline(self, call: BeginCall) -> tuple[Piece, ...]:
        """What may go with the offer, if all of it may. The target then need not ask for it.

        Under none of the locks that the offer was made under. If it fails, the target asks.
        """
        departure = self._departures.get(call.migration)
        if departure is None or self.has_home:
            return ()
        if call.shadow:
            return self._inline_changes(departure, call)
        if sum(departure.sizes) > call.inline_bytes:
            return ()
        fetch = FetchCall(call.migration, call.generation, departure.leases())
        found: list[Piece] = []
        size = 0
        with suppress(StateKitError):
            for piece in self.fetch(fetch):
                found.append(piece)
                size += len(piece.blocks)
                if size > min(2 * call.inline_bytes, self.limits.message_bytes // 2):
                    return ()
        return tuple(found)

    def _inline_changes(self, departure: Departure, call: BeginCall) -> tuple[Piece, ...]:
        """What has changed in each leaf since the target copied it."""
        most = min(call.inline_bytes, self.limits.message_bytes // 2)
        epochs = dict(departure.leases())
        found: list[Piece] = []
        size = 0
        for leaf, held in call.held:
            epoch = epochs.get(leaf)
            since = self.shading.since(call.target, call.shadow, call.generation, leaf, held)
            if epoch is None or not since:
                continue
            fetch = Fetch(call.migration, call.generation, 0, leaf, epoch)
            with self._lock:
                actions = self._participant.on(call.target, fetch)
            if not any(isinstance(action, Serve) for action in actions):
                continue
            with suppress(StateKitError):
                pieces = departure.read_changes(leaf, epoch, since)
                size += sum(len(piece.blocks) for piece in pieces)
                if size > most:
                    break  # all of these come, then
                found += pieces
        return tuple(found)

    # ---- Shadows

    def shade(self, call: ShadeCall) -> ShadeReply:
        self._check_open()
        self._check_generation(call.generation, self.credentials.knows_callers)
        groups = group_ranges(call.key_groups, self._residence.store.key_groups)
        with self._owner.lock:
            size = self.shading.shade(call._replace(key_groups=groups), self._owner.owned())
            schemas = tuple(self._owner.schemas())
        store = self._residence.store
        return ShadeReply(
            self.name, self.generation, store.key_groups, store.subgroups, schemas, size
        )

    def copy(self, call: CopyCall) -> Iterator[Piece]:
        self._check_open()
        self._check_generation(call.generation, self.credentials.knows_callers)
        yield from self.shading.copy(call)

    def _answer_begin(self, call: BeginCall, groups: tuple[range, ...]) -> BeginReply:
        store = self._residence.store
        self.finish_coming(groups)
        with self._owner.lock:
            self._check_generation(call.generation, self.credentials.knows_callers)
            departure = self._departures.get(call.migration)
            if departure is None:
                departure = self._depart(call, groups)
            elif departure.target != call.target:
                raise MigrationError(
                    f"migration {call.migration} goes to {departure.target}, not {call.target}."
                )
            elif departure.is_returned:
                raise MigrationError(
                    f"migration {call.migration} is over: all of it was taken back. Begin another."
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
                timer_dues=departure.timer_dues,
            )

    def _depart(self, call: BeginCall, groups: tuple[range, ...]) -> Departure:
        leaves = leaf_ranges(groups, self.subgroups)
        with self._lock:
            if reason := self._participant.why_over(call.migration, leaves):
                raise MigrationError(reason)
        self._open_back()
        with self._lock:
            back = self._participant.make_way(call.target, leaves)
        self._carry_out(back)  # nothing is to be said: the target learns it when it asks
        self._check_owned(groups)
        since = self._owner.since(call.base) if call.base else None
        begin = Begin(call.migration, call.generation, 0, leaves, call.above)
        with self._lock:
            actions = self._participant.on(call.target, begin)
            outgoing = self._participant.outgoing(call.migration)
        try:
            (answer,) = self._carry_out(actions)
            if isinstance(answer, Declined):
                raise LeaseError(answer.reason)
            assert isinstance(answer, Offer)
            assert outgoing is not None
            departure = Departure(
                answer, groups, call.target, self._residence, outgoing, since, self._abort
            )
        except BaseException:
            # Nobody was told: it has not begun.
            with self._lock:
                undo, _ = self._participant.abort(call.migration)
            self._carry_out(undo, TakeBack)
            self._open_back(must_record=False)
            raise
        with self._lock:
            self._departures[call.migration] = departure
            for stepped in [*self._stepped]:
                stepped.note(departure)
            self._departures_changed()
            done = [one.id for one in self._departures.values() if one.done]
            for migration in done[:-DEPARTURES_KEPT]:
                old = self._departures.pop(migration)
                self._leaves_out += old.progress.leaves_done
                self._bytes_out += old.bytes_sent
        return departure

    def _check_owned(self, key_groups: tuple[range, ...]) -> None:
        with self._owner.lock:
            if missing := subtract(key_groups, self._owner.owned()):
                raise NotOwnedError(
                    f"key-groups {show_groups(missing)} are not this provider's, which has "
                    f"{show_groups(self._owner.owned())}. Hand over what it has."
                )

    # ---- Reading out

    def fetch(self, call: FetchCall) -> Iterator[Piece]:
        self._hear(call.generation)
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
        self._hear(call.generation)
        departure = self._departures.get(call.migration)
        everything = tuple(leaf for leaf, _ in call.leases)
        store = self._residence.store
        if departure is None or not {raw.name for raw in store.states()} >= {
            state for state, _ in call.keys
        }:
            return PickReply(b"", everything)
        with departure.somebody_waits():
            whole = store.residencies(array("I", everything)).translate(_IS_WHOLE)
            with self._lock:
                serves = self._participant.serves
                served = {
                    leaf
                    for leaf, epoch in compress(call.leases, whole)
                    if serves(departure.target, call.generation, leaf, epoch)
                }
            blocks = departure.pick(call.keys, served)
        if len(blocks) > PICK_BYTES_MAX:  # then leaves are what should be sent
            return PickReply(b"", everything)
        return PickReply(blocks, tuple(leaf for leaf in everything if leaf not in served))

    def _answer(self, sender: str, call: FetchCall, leaf: int, epoch: int) -> tuple[bool, Piece]:
        message = Fetch(call.migration, call.generation, 0, leaf, epoch)
        with self._lock:
            actions = self._participant.on(sender, message)
        if any(isinstance(action, Serve) for action in actions):
            return True, _NOTHING
        said = self._carry_out(actions)
        return False, _refusal(said[0] if said else None, leaf, epoch, self.generation)

    def stream(
        self,
        call: StreamCall,
        credits: Iterator[int],  # noqa: A002
        /,
    ) -> Iterator[Piece]:
        departure = self._departures.get(call.migration)
        if departure is None or call.generation != self.generation:
            self._check_generation(call.generation, self.credentials.knows_callers)
            raise MigrationError(f"there is no migration {call.migration} from here.")
        with self._idle:
            self._streams += 1
        try:
            with short_turns():
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
        participant, migration = self._participant, call.migration
        stream = self._next_stream(departure, call)
        for leaf in dict.fromkeys((*call.first, *departure.order)):
            departure.give_way()
            with self._lock:
                actions = participant.send(migration, stream, leaf)
            if not actions:
                continue
            serve = actions[0]
            assert isinstance(serve, Serve)
            for piece in departure.read(leaf, serve.reply.epoch):
                while not participant.has_credit(migration, stream):
                    if not participant.is_current(migration, stream):
                        return  # all of it is there by now, or another stream brings it
                    try:
                        total = next(credits)
                    except StopIteration:
                        return
                    granted = Credit(migration, call.generation, 0, stream, total)
                    with self._lock:
                        participant.on(departure.target, granted)
                with self._lock:
                    participant.sent(migration, stream, len(piece.blocks))
                yield piece

    def _next_stream(self, departure: Departure, call: StreamCall) -> int:
        """The number of a stream that the target has opened: it ends those before."""
        with self._lock:
            outgoing = self._participant.outgoing(call.migration)
            stream = 1 if outgoing is None else outgoing.stream + 1
            accept = Accept(call.migration, call.generation, 0, (), stream)
            self._carry_out(self._participant.on(departure.target, accept))
        return stream

    def installed(self, call: InstalledCall) -> tuple[tuple[int, int], ...]:
        self._hear(call.generation)
        departure = self._departures.get(call.migration)
        released = []
        is_back = False
        for leaf, epoch in call.leases:
            message = Installed(call.migration, call.generation, 0, leaf, epoch)
            with self._lock:
                owner = self._participant.moved_to(leaf) or ""
                sender = owner if departure is None else departure.target
                actions = self._participant.on(sender, message)
            said = self._carry_out(actions, TakeBack)
            is_back = is_back or any(isinstance(one, TakeBack) for one in actions)
            if any(isinstance(one, Released) for one in said):
                released.append((leaf, epoch))
        if is_back:  # left over from when the home could not say so
            with self._owner.lock, suppress(HomeError):
                self._open_back()
        return tuple(released)

    def give_back(self, call: GiveBackCall) -> None:
        self._hear(call.generation)
        departure = self._departures.get(call.migration)
        sender = departure.target if departure is not None else ""
        message = GiveBack(call.migration, call.generation, 0, call.leases)
        with self._owner.lock:
            with self._lock:
                actions = self._participant.on(sender, message)
            self._carry_out(actions)  # says GivenBack: the answer to this call
            self._open_back()  # also what an earlier one could not open

    # ---- Taking back

    def _withdraw(self, migration: str, groups: tuple[range, ...]) -> None:
        """A proposal of ours has failed, as far as we know: takes back what was not sent.

        The target may have begun, and its answer or ours was lost; or it begins later. Otherwise
        key-groups would be offered to one who does not know it, and nobody would have them.
        """
        with self._owner.lock:
            with self._lock:
                self._participant.withdraw(migration, leaf_ranges(groups, self.subgroups))
            departure = self._departures.get(migration)
            if departure is not None:
                with suppress(MigrationError):  # the target has some of it: it has taken over
                    self._abort(departure, False)

    def _abort(self, departure: Departure, target_is_dead: bool) -> None:
        kept: tuple[int, ...] = ()
        with self._owner.lock:
            if target_is_dead:
                self.declare_dead(departure.target)
            else:
                with self._lock:
                    actions, kept = self._participant.abort(departure.id)
                self._carry_out(actions)
            self._open_back()
            lost = subtract(departure.key_groups, self._owner.owned())
        if target_is_dead and lost:
            raise MigrationError(
                f"key-groups {show_groups(lost)} are lost with {departure.target}, which had some "
                "of their state already. Restore them from a checkpoint; the others are back."
            )
        if kept:
            open_groups = groups_of(kept, self.subgroups)
            raise MigrationError(
                f"key-groups {show_groups(open_groups)} cannot be taken back: {departure.target} "
                "may have some of their state already. Wait for it; or, if it is gone for good, "
                "abort(target_is_dead=True)."
            )

    # ---- What the participant asks for

    def _shut(self, action: Shut) -> None:
        groups = groups_of(action.leaves, self.subgroups)
        self._residence.shut(leaf_ranges(groups, self.subgroups))
        self._owner.gave(groups)
        if self._residence.home is not None:
            self._owner.record_given(groups, self.leases(groups))

    def _take_back(self, action: TakeBack) -> None:
        self._open_back()

    def _open_back(self, must_record: bool = True) -> None:
        """Opens key-groups that are back, once the home says so. The owner's lock is held.

        must_record: not if the home cannot say so. It is tried again whenever something is asked.
        """
        with self._lock:
            leaves = self._participant.waiting_back()
        if not leaves:
            return
        groups = groups_of(leaves, self.subgroups)
        try:
            self._owner.record_taken(groups, self.leases(groups))
        except HomeError as error:
            if must_record:
                raise
            _log.warning(
                "key-groups %s were not handed over after all, but the home may say so if it "
                "is opened again before it was flushed: %s",
                show_groups(groups),
                error,
            )
        with self._lock:
            actions = self._participant.taken_back(leaves)
        try:
            self._carry_out(actions, Reopen)
        finally:  # they are ours: whatever becomes of parts of checkpoints, they must be open
            for action in actions:
                if isinstance(action, Reopen):
                    self._reopen(action)

    def _add_to_part(self, action: AddToPart) -> None:
        """Key-groups that are about to be opened are added to our parts of checkpoints.

        They were offered when a barrier passed, and are as they were then. So the target has not
        put them into its part, nor will it.
        """
        self.add_late(action.number, groups_of(action.leaves, self.subgroups))

    def _reopen(self, action: Reopen) -> None:
        groups = groups_of(action.leaves, self.subgroups)
        self._residence.reopen(leaf_ranges(groups, self.subgroups))
        self._owner.took(subtract(groups, self._owner.owned()))
        self._departures_changed()

    def _departures_changed(self) -> None:
        for departure in [*self._departures.values()]:
            departure.changed()
        with self.gone:
            self.gone.notify_all()

    def _drop(self, action: Drop) -> None:
        self._free(action.leaf)

    def _free(self, leaf: int) -> None:
        """Another process has the leaf. Its memory is freed when nobody is being served."""
        self._residence.note_handed_over(leaf)
        with self._lock:
            if self._janitor is None:
                self._janitor = threading.Thread(
                    target=self._run_janitor, name="statekit-janitor", daemon=True
                )
                self._janitor.start()
        self._departures_changed()

    def _run_janitor(self) -> None:
        # Freeing takes a third as long as sending, and whoever waits for a leaf comes first. What
        # is not freed yet is shut, and was there before: memory does not grow by it.
        with suppress(ClosedError):  # then all of it is freed
            while True:
                self._wait_idle(JANITOR_SECONDS)
                try:
                    self._free_handed_over(JANITOR_SHARE)
                except HomeError as error:
                    _log.warning("what was handed over is not deleted at home yet: %s", error)
                    with self._lock:
                        self._janitor = None  # the next one tries again
                    return
                with self._lock:
                    self._janitor = None
                # Not under the shell's lock, which comes last. What is noted from now on finds no
                # janitor; what was noted before is seen here.
                if not self._residence.handed_over():
                    return
                with self._lock:
                    if self._janitor is not None:
                        return  # another has begun
                    self._janitor = threading.current_thread()

    def _free_handed_over(self, share: float) -> None:
        """Frees what others have; share: times as long as it takes to free one, others work."""
        leaves = self._residence.handed_over()
        with self._owner.lock:
            self._owner.record_deleted(groups_of(leaves, self.subgroups))
        for leaf in leaves:
            began = perf_counter()
            self._residence.free_handed_over(leaf)
            if share:
                worked = perf_counter() - began
                self._wait_idle(min(share * worked, JANITOR_PAUSE_SECONDS_MAX))

    def _wait_idle(self, seconds: float) -> None:
        """Until nothing is being sent, but for so long at most."""
        with self._idle:
            self._idle.wait_for(lambda: not self._streams or self.is_closed, seconds)

    def _fenced(self, action: Fence) -> None:
        store = self._residence.store
        try:
            self._owner.record_given(self._owner.owned(), ())
        except HomeError as error:
            _log.warning("a home that was fenced does not say so: %s", error)
        self._owner.gave(self._owner.owned())
        store.mark(0, store.leaves, "away")
        self._residence.forget_shut()
        self._residence.forget_coming()
        self._departures_changed()


_NOTHING = Piece(PieceKind.NEVER, 0, 0)


def _refusal(message: Any, leaf: int, epoch: int, generation: int) -> Piece:
    """Why a leaf is not served, as a piece."""
    if isinstance(message, Moved):
        return Piece(PieceKind.MOVED, leaf, message.epoch, to=message.to)
    if isinstance(message, InTransit):
        return Piece(PieceKind.IN_TRANSIT, leaf, message.epoch)
    if isinstance(message, Never):
        return Piece(PieceKind.NEVER, leaf, epoch)
    return Piece(PieceKind.FENCED, leaf, epoch, generation=generation)
