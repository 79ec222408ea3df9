"""Giver: the old owner's part of a peer. Offers leaves, answers for them, and takes them back.

Departure (departure.py) is one hand-over as the user sees it, and reads leaves out; this is what
decides with the participant whether a leaf may be read out, and carries out what it says.

A home remembers who owns what, or an old owner that is killed would come back with what others
have by then. So its record changes before anybody may act on it:

    Shut     "given" is there before Begin is answered. If it cannot be written, nothing has begun
    Reopen   it is taken out before the leaves are opened. If it cannot be written, they stay shut,
             and whatever is asked next tries again
    Drop     "deleted" is there before the first row of a key-group is deleted (the janitor)
"""

import logging
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import compress, repeat
from time import perf_counter
from typing import Any

from statekit.assignment import group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import (
    ClosedError,
    HomeError,
    MigrationError,
    NotOwnedError,
)
from statekit.migration.departure import Departure
from statekit.migration.member import (
    Member,
    Owner,
    check_id,
    groups_of,
    leaves_of,
    life_and_number,
    whole_groups,
)
from statekit.native.kinds import residency_filter
from statekit.protocol.calls import (
    BeginCall,
    BeginReply,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    PickCall,
    PickReply,
    Piece,
    PieceKind,
    StreamCall,
)
from statekit.protocol.messages import (
    Action,
    AddToPart,
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
)
from statekit.residence.residence import Residence

_log = logging.getLogger("statekit")

DEPARTURES_KEPT = 64  # that are done: late calls about them are answered as the first ones were
PICK_BYTES_MAX = 4 << 20  # of entries in one reply
_IS_WHOLE = residency_filter("whole")
JANITOR_SECONDS = 5.0  # that memory waits at most to be freed, while leaves are being sent
JANITOR_SHARE = 9  # times as long as it takes to free a leaf, others work then
JANITOR_PAUSE_SECONDS_MAX = 0.05  # what took long was waiting for others, not work


class Giver(Member):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._departures: dict[str, Departure] = {}
        self._leaves_out = self._bytes_out = 0  # of departures that are not known any more
        self._back: set[int] = set()  # ours again, and not opened yet
        self._late: dict[int, set[int]] = {}  # of these: what our part of a checkpoint lacks
        self._janitor: threading.Thread | None = None
        self._streams = 0  # that are being sent
        self._idle = threading.Condition()  # of the number of streams
        self._latest: dict[str, dict[int, int]] = {}  # number, by the maker's life and key-group
        self._withdrawn: set[str] = set()  # migrations that we proposed, and that failed

    @property
    def departures(self) -> tuple[Departure, ...]:
        return tuple(self._departures.values())

    # ---- Handing over

    def begin(self, call: BeginCall) -> BeginReply:
        self._check_open()
        self._check_generation(call.generation, self.credentials.knows_callers)
        check_id(call.migration)
        store = self._residence.store
        groups = group_ranges(call.key_groups, store.key_groups)
        self.settle(groups)
        with self._owner.lock:
            self._check_generation(call.generation, self.credentials.knows_callers)
            departure = self._departures.get(call.migration)
            if call.migration in self._withdrawn:
                raise MigrationError(f"migration {call.migration} was withdrawn.")
            if departure is None:
                self._check_late(call.migration, groups)
                leaves = leaves_of(groups, self.subgroups)
                self._open_back()
                self._take_back_from(call.target, leaves)
                self._check_owned(groups)
                since = self._owner.since(call.base) if call.base else None
                departure = self._depart(call, groups, leaves, since)
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
            )

    def _check_late(self, migration: str, groups: tuple[range, ...]) -> None:
        """MigrationError if whoever made this migration has made a later one of these key-groups.

        Such a call was on its way for longer than its sender waited. To hand over now would take
        key-groups from the later migration, or from here, for one who does not ask any more.
        """
        life, number = life_and_number(migration)
        latest = self._latest.setdefault(life, {})
        for part in groups:
            if max(map(latest.get, part, repeat(-1))) > number:
                raise MigrationError(
                    f"migration {migration} comes too late: a later one of these key-groups has "
                    "begun."
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
            actions = self._participant.begin(call.migration, call.target, leaves, call.above)
        try:
            (offer,) = self._carry_out(actions)
            assert isinstance(offer, Offer)
            departure = Departure(offer, groups, call.target, self._residence, since, self._abort)
        except BaseException:
            # Nobody was told: it has not begun.
            with self._lock:
                undo, _ = self._participant.abort(call.migration)
            self._carry_out(undo, Reopen)
            self._back.update(leaves)
            self._open_back(must_record=False)
            raise
        with self._lock:
            self._departures[call.migration] = departure
            done = [one.id for one in self._departures.values() if one.done]
            for migration in done[:-DEPARTURES_KEPT]:
                old = self._departures.pop(migration)
                self._leaves_out += old.progress.leaves_done
                self._bytes_out += old.bytes_sent
        return departure

    def _take_back_from(self, target: str, leaves: Sequence[int]) -> None:
        """Leaves that this target was offered before, and has lost sight of before any came."""
        actions: list[Action] = []
        with self._lock:
            for departure in self.departures:
                if departure.target == target and not departure.unfinished().isdisjoint(leaves):
                    groups = self._unsent_groups(departure)
                    again = leaves_of(groups, self.subgroups)
                    actions += self._participant.abort(departure.id, again)[0]
        self._carry_out(actions)  # nothing is to be said: the target learns it when it asks

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
        self._hear(call.generation)
        departure = self._departures.get(call.migration)
        released = []
        for leaf, epoch in call.leases:
            message = Installed(call.migration, call.generation, 0, leaf, epoch)
            with self._lock:
                owner = self._participant.moved_to(leaf) or ""
                sender = owner if departure is None else departure.target
                actions = self._participant.on(sender, message)
            if any(isinstance(one, Released) for one in self._carry_out(actions)):
                released.append((leaf, epoch))
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

    def _abort(self, departure: Departure, target_is_dead: bool) -> None:
        kept: tuple[int, ...] = ()
        with self._owner.lock:
            if target_is_dead:
                self.bury(departure.target)
            else:
                with self._lock:
                    groups = self._unsent_groups(departure)
                    leaves = leaves_of(groups, self.subgroups)
                    actions, kept = self._participant.abort(departure.id, leaves)
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

    def _unsent_groups(self, departure: Departure) -> tuple[range, ...]:
        is_unsent = self._participant.is_unsent
        return whole_groups(
            departure.key_groups, self.subgroups, lambda leaf: is_unsent(departure.id, leaf)
        )

    # ---- What the participant asks for

    def _shut(self, action: Shut) -> None:
        groups = groups_of(action.leaves, self.subgroups)
        self._residence.shut(leaf_ranges(groups, self.subgroups))
        self._owner.gave(groups)
        if self._residence.home is not None:
            self._owner.record_given(groups, self.leases(groups))

    def _reopen(self, action: Reopen) -> None:
        self._back.update(action.leaves)
        self._open_back()

    def _open_back(self, must_record: bool = True) -> None:
        """Opens key-groups that are back, with all their leaves. The owner's lock is held.

        must_record: not if the home cannot say so. It is tried again whenever something is asked.
        """
        if not self._back:
            return
        whole, torn = self._sort_out()
        leaves = leaves_of(whole, self.subgroups)
        if whole:
            try:
                self._owner.record_taken(whole, self.leases(whole))
            except HomeError as error:
                if must_record:
                    raise
                _log.warning(
                    "key-groups %s were not handed over after all, but the home may say so if it "
                    "is opened again before it was flushed: %s",
                    show_groups(whole),
                    error,
                )
            self._complete_parts(whole)
            self._residence.reopen(leaf_ranges(whole, self.subgroups))
            self._owner.took(subtract(whole, self._owner.owned()))
        self._back.difference_update(leaves, torn)
        for number, late in [*self._late.items()]:
            late.difference_update(leaves, torn)
            if not late:
                del self._late[number]
        for leaf in torn:
            self._free(leaf)
        for departure in [*self._departures.values()]:
            departure.returned(leaves)

    def _sort_out(self) -> tuple[tuple[range, ...], set[int]]:
        """Of leaves that are back: key-groups that are whole, and leaves that never will be.

        Of these the target had other leaves, which were let go of here and died with it. To own
        such a key-group would put the half of it into checkpoints as if that were all. Key-groups
        of which leaves are still offered wait for them.
        """
        with self._lock:
            state_of = self._participant.state_of
            groups = groups_of(self._back, self.subgroups)
            whole = whole_groups(groups, self.subgroups, lambda leaf: state_of(leaf) == "owned")
            hopeful = whole_groups(groups, self.subgroups, lambda leaf: state_of(leaf) != "none")
            lost = set(leaves_of(subtract(groups, hopeful), self.subgroups))
            torn = self._back & lost
            self._participant.disown(torn)
        return whole, torn

    def _add_to_part(self, action: AddToPart) -> None:
        self._late.setdefault(action.number, set()).add(action.leaf)

    def _complete_parts(self, groups: tuple[range, ...]) -> None:
        """Key-groups that are about to be opened are added to our parts of checkpoints.

        They were offered when a barrier passed, and are as they were then. So the target has not
        put them into its part, nor will it.
        """
        leaves = set(leaves_of(groups, self.subgroups))
        for number, late in self._late.items():
            if some := groups_of(late & leaves, self.subgroups):
                self.add_late(number, some)

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
        for departure in [*self._departures.values()]:
            departure.gone(leaf)

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
                    if not self._residence.handed_over():
                        self._janitor = None
                        return

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
        self._back.clear()
        self._late.clear()
        for departure in [*self._departures.values()]:
            departure.returned(departure.unfinished())


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
