"""Participant: what one process knows about leases, and what it says. A pure state machine.

There is no clock, socket, thread or chance in here: messages and calls come in, actions go out.
The gRPC shell and the simulator drive the same class. docs/protocol.md has every transition as a
table, and the argument why no leaf is lost or owned twice. In short:

    source:  OWNED -> OFFERED (nothing sent -> something sent) -> NONE
    target:  NONE -> EXPECTED -> (PARTIAL ->) OWNED, and closed once the source has let go

1. A leaf is shut before it is offered, so the source never accepts anything after the target may.
2. The target accepts nothing before content has come; from then on it is the owner.
3. The offered epoch is never used for anything else: a source that takes a leaf back does so with
   a still greater one, and only if nothing was sent, or the target has promised not to install it.
4. `epoch` of a leaf never falls, not even when the leaf has gone: what is late finds it greater.
5. A leaf is offered onward only when its last source has let go (Released). So there are never two
   hand-overs of a leaf whose outcome somebody does not know, and an authority that declares one
   target dead cannot bring back a leaf that has travelled on from there.

A participant's name belongs to one life of a process: one that lost its memory comes back under
another name, and with migrations of other ids. Otherwise it could be handed an offer again that
it had accepted, and written to, before.

What is known of leaves is in known.py, which makes many leaves that are alike as cheap as one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from statekit.errors import LeaseError
from statekit.protocol.known import Known, KnownLeaves
from statekit.protocol.messages import (
    OUTSIDE,
    Accept,
    Action,
    AddToPart,
    Credit,
    Drop,
    Expect,
    Fence,
    Fenced,
    Fetch,
    GiveBack,
    GivenBack,
    Grant,
    Here,
    Install,
    Installed,
    InTransit,
    Leases,
    Lost,
    Moved,
    Never,
    Offer,
    Part,
    PartFailed,
    Recover,
    Recovered,
    Refuse,
    Released,
    Reopen,
    Restore,
    Send,
    Serve,
    Settled,
    Shut,
    Table,
    Take,
    Unexpect,
    WritePart,
    first_epoch,
    runs_of,
)

NONE, OWNED, PARTIAL, OFFERED, EXPECTED = "none", "owned", "partial", "offered", "expected"
NUMBERS_MAX = 8  # checkpoints that a participant remembers its parts of

_HANDLERS = {
    Offer: "_on_offer",
    Accept: "_on_accept",
    Refuse: "_on_give_back",
    Fetch: "_on_fetch",
    Credit: "_on_credit",
    Here: "_on_here",
    Moved: "_on_moved",
    InTransit: "_on_in_transit",
    Never: "_on_never",
    Installed: "_on_installed",
    Released: "_on_released",
    GiveBack: "_on_give_back",
    GivenBack: "_on_given_back",
    Table: "_on_table",
    Take: "_on_take",
    Recover: "_on_recover",
}


class _Departure:
    """A migration in which leaves go from here."""

    __slots__ = ("credit", "is_accepted", "leaves", "streamed", "target")

    def __init__(self, target: str, leaves: Iterable[int]) -> None:
        self.target = target
        self.leaves = dict.fromkeys(leaves)  # that are still offered
        self.streamed: set[int] = set()  # of these: what the background stream need not send
        self.is_accepted = False
        self.credit = 0


class _Arrival:
    """A migration in which leaves come here."""

    __slots__ = ("leaves", "returned", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.leaves: dict[int, None] = {}  # that are not closed
        self.returned: dict[int, int] = {}  # given back, and the source has not said that it knows


class Participant:
    """One per process; not thread safe. Every call gives the actions to carry out, in order."""

    def __init__(self, name: str, generation: int = 0) -> None:
        self.name = name
        self.generation = generation
        self.is_fenced = generation == OUTSIDE  # owns nothing before own() is called
        self.barrier = 0  # the last checkpoint that was taken here
        self.version = 0  # of the table
        self.owners: tuple[str, ...] = ()  # by the table, one a leaf; () if there is none
        self.refuses = ""  # why offers are refused; "": they are not
        self._leaves = KnownLeaves()
        self._departures: dict[str, _Departure] = {}
        self._arrivals: dict[str, _Arrival] = {}
        self._parts: dict[int, dict[int, None]] = {}  # taken here: what is written of our part
        self._failed: set[int] = set()  # of those: there will be no part
        self._askers: dict[int, str] = {}  # who said Take(n)
        self._coordinator: str | None = None  # who said Recover
        self._sequence = 0
        self._migrations = 0

    # ---- What is known

    def state_of(self, leaf: int) -> str:
        known = self._leaves.get(leaf)
        return known.state if known else NONE

    def epoch_of(self, leaf: int) -> int:
        """The greatest epoch of the leaf that was ever valid here; -1 if it was never heard of."""
        known = self._leaves.get(leaf)
        return known.epoch if known else -1

    def covered_of(self, leaf: int) -> int:
        known = self._leaves.get(leaf)
        return known.covered if known else 0

    def moved_to(self, leaf: int) -> str | None:
        """Who is to have the leaf, as far as is known here; None if it is here, or unknown."""
        known = self._leaves.get(leaf)
        if known is None or known.state not in (NONE, OFFERED) or known.peer == self.name:
            return None  # ours by a word that came before the offer: on its way here
        return known.peer or None

    def leases(self, leaves: Sequence[int]) -> Leases:
        """The epochs of leaves that were heard of, as epoch_of() tells them."""
        return self._leaves.leases(leaves)

    def held(self) -> list[int]:
        """The leaves that are here, in any state."""
        return [leaf for leaf, known in self._leaves.items() if known.state is not NONE]

    def is_done(self, migration: str) -> bool:
        """Nothing of the migration is open here, if it was ever known here."""
        return migration not in self._departures and migration not in self._arrivals

    def unresolved(self, migration: str) -> tuple[int, ...]:
        """Source: leaves that are still offered. Target: those not here, or not let go."""
        part = self._departures.get(migration) or self._arrivals.get(migration)
        return tuple(part.leaves) if part else ()

    # ---- The source's calls

    def own(
        self,
        leaves: Iterable[int],
        covered: int = 0,
        generation: int | None = None,
        leases: Leases = (),
    ) -> list[Action]:
        """At the start or after a restore: these leaves are here, whole, and nobody else's.

        generation: that the restore was asked for; if another has begun since, nothing happens.
        leases: that ended before: of leaves that another participant of this process has
        disowned, or that an earlier life had. Others may remember these epochs, and would take an
        offer with smaller ones for an old one.
        """
        if generation is not None and generation != self.generation:
            return []
        leaves = [*leaves]
        alike = self._leaves.alike(leaves)
        for known, some in alike:
            if known is not None and known.state is not NONE:
                raise LeaseError(f"leaf {some[0]} is known already. Own leaves once.")
        for known, some in alike:
            # One that was here before comes back with a greater epoch: what is late finds it so.
            above = first_epoch(self.generation) if known is None else known.epoch + 1
            self._leaves.put(some, Known(OWNED, above, covered))
        mine = {*leaves} if leases else set()
        for run, epoch in leases:
            for known, some in self._leaves.alike([leaf for leaf in run if leaf in mine]):
                if known is not None and known.epoch <= epoch:
                    self._leaves.put(some, known._replace(epoch=epoch + 1))
        self.is_fenced = False
        self.barrier = max(self.barrier, covered)
        if self._coordinator is None:
            return []
        return [Send(self._coordinator, Recovered(self.name, self.generation))]

    def begin(
        self, migration: str, target: str, leaves: Iterable[int], above: int = 0
    ) -> list[Action]:
        """Shuts leaves and offers them to the target. The same migration again: only the offer.

        above: an epoch that the target knows. It takes none that is not higher; ours may be lower
        if these leaves were lost since, and restored or opened anew here.
        """
        if migration in self._departures:
            return [self._offer(migration)]
        leaves = tuple(leaves)
        alike = self._leaves.alike(leaves)
        for known, some in alike:
            if known is None or known.state is not OWNED:
                state = known.state if known else "not here"
                raise LeaseError(
                    f"leaf {some[0]} cannot be offered to {target!r}: it is {state}. "
                    "Offer leaves that are owned here."
                )
            if not known.is_closed:
                raise LeaseError(
                    f"leaf {some[0]} cannot be offered to {target!r} yet: {known.peer!r}, where it "
                    "came from, has not let go. Try again when that migration is done."
                )
        if target == self.name:
            raise LeaseError(f"leaves cannot be offered to {target!r}: it is this process.")
        if not leaves:
            return []
        for known, some in alike:
            assert known is not None
            self._leaves.put(
                some,
                known._replace(
                    state=OFFERED,
                    epoch=max(known.epoch, above) + 1,
                    peer=target,
                    migration=migration,
                    is_sent=False,
                ),
            )
        self._departures[migration] = _Departure(target, leaves)
        return [Shut(leaves), self._offer(migration)]

    def abort(
        self, migration: str, leaves: Iterable[int] | None = None
    ) -> tuple[list[Action], tuple[int, ...]]:
        """Source: takes back what was never sent. The rest is uncertain, and returned.

        leaves: only these of what was never sent. The target learns it from Moved, when it asks
        or says again that it waits.
        """
        departure = self._departures.get(migration)
        if departure is None:
            return [], ()
        chosen = departure.leaves if leaves is None else departure.leaves.keys() & set(leaves)
        unsent = [leaf for leaf in chosen if not self._leaves[leaf].is_sent]
        actions = self._take_back(unsent)
        return actions, self.unresolved(migration)

    def declare_dead(self, peer: str) -> tuple[list[Action], tuple[int, ...]]:
        """An authority vouches that the peer will never act again. What is lost is returned.

        Leaves offered to it come back as they were when offered; what it did with them is lost
        and must be replayed. Leaves that came from it, all of them, are here for good. Those of
        which something is missing are returned: only a recovery can complete them. Of these,
        leaves of which nothing has come are given up here. They need not be lost: their source
        may have taken them back, unknown to us, and handed them to another.
        """
        offered: list[int] = []
        for departure in self._departures.values():
            if departure.target == peer:
                offered += departure.leaves
        # Not into our part of a checkpoint that has begun: the dead may have put them into theirs.
        actions = self._take_back(offered, is_certain=False)
        lost: list[int] = []
        given_up: list[int] = []
        for migration, arrival in list(self._arrivals.items()):
            if arrival.source == peer:
                arrival.returned.clear()
                for leaf in list(arrival.leaves):
                    known = self._leaves[leaf]
                    if known.state is OWNED:
                        actions += self._close(leaf)
                        continue
                    lost.append(leaf)
                    if known.state is EXPECTED:
                        self._end(leaf, known)
                        given_up.append(leaf)
                self._forget_if_done(migration, arrival)
        if given_up:
            actions.append(Unexpect(tuple(given_up)))
        return actions, tuple(lost)

    def give_up(self, leaves: Iterable[int]) -> None:
        """Target, after declare_dead: whatever is here of these leaves, it is not ours any more."""
        for leaf in leaves:
            known = self._leaves.get(leaf)
            if known is not None and known.state is not NONE:
                self._end(leaf, known)

    def is_unsent(self, migration: str, leaf: int) -> bool:
        """Source: the leaf is offered, and nothing of it was ever sent: it can be taken back."""
        known = self._leaves.get(leaf)
        return (
            known is not None
            and known.state is OFFERED
            and known.migration == migration
            and not known.is_sent
        )

    def disown(self, leaves: Iterable[int]) -> Leases:
        """These leaves go to another participant of this process, in a way that is not ours.

        Their leases are returned, for the other one's own().
        """
        leaves = sorted(leaves)
        self.check_free(leaves)  # all of them, or none
        for known, some in self._leaves.alike(leaves):
            assert known is not None
            self._leaves.put(some, known._replace(state=NONE, peer=""))
        return self.leases(leaves)

    def check_free(self, leaves: Iterable[int]) -> None:
        """LeaseError if one of these is not ours, or another process may have a claim to it."""
        for known, some in self._leaves.alike([*leaves]):
            if known is None or known.state is not OWNED or not known.is_closed:
                raise LeaseError(
                    f"leaf {some[0]} cannot go: it is {known.state if known else 'not here'}, or "
                    "where it came from has not let go. Wait for the migration."
                )

    def fence(self, generation: int) -> list[Action]:
        """Somebody who knows says that a later generation has begun."""
        return self._fence(generation) if generation > self.generation else []

    def serves(self, sender: str, generation: int, leaf: int, epoch: int) -> bool:
        """Source: whether single entries may go to the sender, as if it had said Fetch with keys.

        For many leaves at once; the answer to a Fetch tells why not.
        """
        if generation != self.generation or self.is_fenced:
            return False
        known = self._offered(sender, leaf, epoch)
        if known is None:
            return False
        self._mark_sent(leaf, known)
        return True

    def unsent(self, migration: str) -> list[int]:
        """Source: what the background stream has to send; in which order is the driver's choice."""
        departure = self._departures.get(migration)
        if departure is None:
            return []
        return [leaf for leaf in departure.leaves if leaf not in departure.streamed]

    def send(self, migration: str, leaf: int) -> list[Action]:
        """Source, for the stream: serve the leaf now; [] if it need not be sent any more."""
        departure = self._departures.get(migration)
        if departure is None or leaf not in departure.leaves:
            return []
        known = self._leaves[leaf]
        self._mark_sent(leaf, known)
        departure.streamed.add(leaf)
        reply = Here(migration, self.generation, self._next(), leaf, known.epoch, True, None)
        return [Serve(departure.target, reply, ())]

    def sent(self, migration: str, leaf: int) -> None:
        """Source: a Serve with keys was answered with all of the leaf: no need to stream it."""
        departure = self._departures.get(migration)
        if departure is not None and leaf in departure.leaves:
            departure.streamed.add(leaf)

    def credit_of(self, migration: str) -> int:
        """Source: bytes that the stream may have sent in all. The driver counts."""
        departure = self._departures.get(migration)
        return departure.credit if departure else 0

    # ---- The target's calls

    def give_back(self, migration: str, leaves: Iterable[int] | None = None) -> list[Action]:
        """Target: never mind the leaves of which nothing has come; or only some of them."""
        arrival = self._arrivals.get(migration)
        if arrival is None:
            return []
        leases = []
        chosen = arrival.leaves if leaves is None else arrival.leaves.keys() & set(leaves)
        for known, some in self._leaves.alike(sorted(chosen)):
            if known is not None and known.state is EXPECTED:
                # At this epoch: nothing can be let in any more.
                self._leaves.put(some, known._replace(state=NONE))
                leases += [(leaf, known.epoch) for leaf in some]
        for leaf, epoch in leases:
            del arrival.leaves[leaf]
            arrival.returned[leaf] = epoch
        if not leases:
            return []
        return [
            Unexpect(tuple(leaf for leaf, _ in leases)),
            self._to(arrival.source, GiveBack, migration, tuple(leases)),
        ]

    def want(self, leaf: int, keys: tuple[Any, ...] = ()) -> list[Action]:
        """Target: somebody waits for the leaf; if it is large, for these entries of it."""
        known = self._leaves.get(leaf)
        if known is None or known.state not in (EXPECTED, PARTIAL):
            return []
        self._leaves.put((leaf,), known._replace(wanted=keys))
        return [self._to(known.peer, Fetch, known.migration, leaf, known.epoch, keys)]

    def grant(self, migration: str, bytes_total: int) -> list[Action]:
        """Target: lets the source's stream send up to so many bytes in all."""
        arrival = self._arrivals.get(migration)
        if arrival is None:
            return []
        return [self._to(arrival.source, Credit, migration, bytes_total)]

    # ---- Checkpoints

    def take(self, number: int) -> list[Action]:
        """The barrier of checkpoint n has passed here; [] if n or a later one was taken already.

        Offered and expected leaves are left out: whoever installs them next adds them to theirs.
        """
        if number <= self.barrier or self.is_fenced:
            return []
        leaves: list[int] = []
        unfinished: list[int] = []
        for known, some in self._leaves.alike():
            assert known is not None
            if (known.state is OWNED or known.state is PARTIAL) and known.covered < number:
                self._leaves.put(some, known._replace(covered=number))
                leaves += some
                if known.state is PARTIAL:
                    unfinished += some
        self.barrier = number
        self._parts[number] = {}
        while len(self._parts) > NUMBERS_MAX:
            oldest = next(iter(self._parts))
            del self._parts[oldest]
            self._failed.discard(oldest)
            self._askers.pop(oldest, None)
        return [WritePart(number, tuple(sorted(leaves)), tuple(sorted(unfinished)))]

    def part_written(self, number: int, leaves: Iterable[int]) -> list[Action]:
        """These leaves are in our part of n, durably."""
        written = self._parts.get(number)
        if written is None or number in self._failed:
            return []
        leaves = tuple(leaves)
        written.update(dict.fromkeys(leaves))
        asker = self._askers.get(number)
        if asker is None:
            return []
        return [Send(asker, Part(self.name, self.generation, number, leaves))]

    def part_failed(self, number: int) -> list[Action]:
        """Something of our part of n could not be written: there will be no checkpoint n."""
        if number not in self._parts:
            return []
        self._failed.add(number)
        asker = self._askers.get(number)
        if asker is None:
            return []
        return [Send(asker, PartFailed(self.name, self.generation, number))]

    # ---- Messages

    def on(self, sender: str, message: Any) -> list[Action]:
        """A message has come: at any time, in any order, any number of times."""
        kind = type(message)
        if message.generation != self.generation:
            if message.generation < self.generation:
                if kind is Fenced:
                    return []
                return [Send(sender, Fenced(self.generation))]
            if kind is not Recover:
                return self._fence(message.generation)
        elif kind is Fenced or (self.is_fenced and kind is not Recover):
            return []  # the sender will say it again, when we have something to say to it
        actions: list[Action] = getattr(self, _HANDLERS[kind])(sender, message)
        return actions

    def resend(self) -> list[Action]:
        """All that was not acknowledged, again. To be called now and then."""
        if self.is_fenced:
            return []
        actions: list[Action] = []
        for migration, departure in self._departures.items():
            if not departure.is_accepted:
                actions.append(self._offer(migration))
        for migration, arrival in self._arrivals.items():
            waiting: list[int] = []
            for leaf in arrival.leaves:
                known = self._leaves[leaf]
                if known.state is EXPECTED:
                    waiting.append(leaf)
                if known.state is OWNED:
                    actions.append(
                        self._to(arrival.source, Installed, migration, leaf, known.epoch)
                    )
                elif known.state is PARTIAL or known.wanted is not None:
                    actions.append(
                        self._to(arrival.source, Fetch, migration, leaf, known.epoch, ())
                    )
            if waiting:
                leases = tuple(self.leases(waiting))
                actions.append(self._to(arrival.source, Accept, migration, leases))
            if arrival.returned:
                returned = tuple(arrival.returned.items())
                actions.append(self._to(arrival.source, GiveBack, migration, returned))
        return actions + self._follow_table(self._leaves)

    # Target

    def _on_offer(self, sender: str, offer: Offer) -> list[Action]:
        migration, source = offer.migration, offer.source
        actions: list[Action] = []
        expected: list[int] = []
        waiting: list[tuple[range, int]] = []
        superseded: list[int] = []
        refused: list[tuple[int, int]] = []
        returned: list[tuple[int, int]] = []
        for leaves, epoch, covered in offer.grants:
            for known, some in self._leaves.alike(leaves):
                if known is not None and epoch <= known.epoch:
                    if epoch == known.epoch and known.state is NONE:
                        # We gave it back: it must not come any more.
                        returned += [(leaf, epoch) for leaf in some]
                    elif epoch == known.epoch and known.state is EXPECTED:
                        waiting += [(run, epoch) for run in runs_of(some)]
                    continue
                if known is not None and known.state is not NONE:
                    # A greater epoch is proof that ours has ended, in ways we were not told of.
                    for leaf in some:
                        self._end(leaf, known)
                    superseded += some
                state = NONE if self.refuses else EXPECTED
                self._leaves.put(
                    some, Known(state, epoch, covered, source, migration, offer.version)
                )
                if self.refuses:
                    refused += [(leaf, epoch) for leaf in some]
                else:
                    expected += some
                    waiting += [(run, epoch) for run in runs_of(some)]
        if superseded:
            actions.append(Unexpect(tuple(superseded)))
        if expected:
            arrival = self._arrivals.setdefault(migration, _Arrival(source))
            arrival.leaves.update(dict.fromkeys(expected))
            actions.append(Expect(tuple(expected), source))
        if refused:
            # The source may take our Accept for a word about all leaves, so a refusal that is
            # lost must be said again, as a GiveBack.
            arrival = self._arrivals.setdefault(migration, _Arrival(source))
            arrival.returned.update(refused)
            actions.append(self._to(sender, Refuse, migration, tuple(refused), self.refuses))
        if returned:
            actions.append(self._to(sender, GiveBack, migration, tuple(returned)))
        actions.append(self._to(sender, Accept, migration, tuple(waiting)))
        return actions

    def _on_here(self, sender: str, here: Here) -> list[Action]:
        leaf, migration = here.leaf, here.migration
        known = self._leaves.get(leaf)
        if known is None or known.epoch != here.epoch or known.state is OFFERED:
            return []
        if known.state is NONE:
            return [self._to(sender, GiveBack, migration, ((leaf, here.epoch),))]
        if known.state is OWNED:
            if known.is_closed:
                return []
            return [self._to(sender, Installed, migration, leaf, here.epoch)]
        actions: list[Action] = [Install(leaf, here.content, here.is_whole)]
        covered = known.covered
        if known.state is EXPECTED:
            actions += self._add_to_parts(leaf, known)
            covered = max(covered, self.barrier)
        new = known._replace(state=PARTIAL, covered=covered)
        if here.is_whole:
            new = new._replace(state=OWNED, is_closed=False, wanted=None)
            actions.append(self._to(sender, Installed, migration, leaf, here.epoch))
        self._leaves.put((leaf,), new)
        return actions

    def _on_moved(self, sender: str, moved: Moved) -> list[Action]:
        known = self._leaves.get(moved.leaf)
        if known is None or moved.epoch <= known.epoch or known.state is OFFERED:
            return []
        # The epoch stays what it is: an offer to us with the one of this message may be on its way.
        was_here = known.state is not NONE
        if was_here:
            self._end(moved.leaf, known)
        self._leaves.put((moved.leaf,), self._leaves[moved.leaf]._replace(peer=moved.to))
        return [Unexpect((moved.leaf,))] if was_here else []

    def _on_in_transit(self, sender: str, reply: InTransit) -> list[Action]:
        return []  # resend() asks again

    def _on_never(self, sender: str, never: Never) -> list[Action]:
        known = self._leaves.get(never.leaf)
        if known is None or known.epoch != never.epoch or known.peer != sender:
            return []
        if known.state is EXPECTED or known.state is PARTIAL:
            return [Lost(never.leaf, sender)]
        return []

    def _on_released(self, sender: str, released: Released) -> list[Action]:
        known = self._leaves.get(released.leaf)
        if known is None or known.state is not OWNED or known.epoch != released.epoch:
            return []
        return self._close(released.leaf)

    def _on_given_back(self, sender: str, given: GivenBack) -> list[Action]:
        arrival = self._arrivals.get(given.migration)
        if arrival is not None:
            for leaf, epoch in given.leases:
                if arrival.returned.get(leaf) == epoch:
                    del arrival.returned[leaf]
            self._forget_if_done(given.migration, arrival)
        return []

    # Source

    def _on_accept(self, sender: str, accept: Accept) -> list[Action]:
        departure = self._departures.get(accept.migration)
        if departure is not None and departure.target == sender:
            departure.is_accepted = True
        actions: list[Action] = []
        waiting = ((leaf, epoch) for leaves, epoch in accept.waiting for leaf in leaves)
        for leaf, epoch in waiting:
            known = self._leaves.get(leaf)
            if known is not None and known.state is OFFERED and known.epoch == epoch:
                if departure is not None and leaf in departure.leaves:
                    departure.streamed.discard(leaf)  # if it was sent: it may have been lost
            elif known is None or known.epoch != epoch:
                actions.append(self._where(sender, accept.migration, leaf, epoch))
        return actions

    def _on_fetch(self, sender: str, fetch: Fetch) -> list[Action]:
        leaf, epoch = fetch.leaf, fetch.epoch
        known = self._offered(sender, leaf, epoch)
        if known is None:
            return [self._where(sender, fetch.migration, leaf, epoch)]
        self._mark_sent(leaf, known)
        if not fetch.keys:
            self.sent(known.migration, leaf)
        reply = Here(known.migration, self.generation, self._next(), leaf, epoch, True, None)
        return [Serve(sender, reply, fetch.keys)]

    def _on_credit(self, sender: str, credit: Credit) -> list[Action]:
        departure = self._departures.get(credit.migration)
        if departure is not None:
            departure.credit = max(departure.credit, credit.bytes_total)
        return []

    def _on_installed(self, sender: str, installed: Installed) -> list[Action]:
        leaf, epoch = installed.leaf, installed.epoch
        known = self._leaves.get(leaf)
        actions: list[Action] = []
        if known is not None:
            if epoch != known.epoch or known.peer != sender:
                # Only an authority takes back what was sent: it was wrong about the target.
                return [self._where(sender, installed.migration, leaf, epoch)]
            if known.state is OFFERED:
                self._leaves.put((leaf,), known._replace(state=NONE))
                self._leave(leaf, known)
                actions.append(Drop(leaf))
        actions.append(self._to(sender, Released, installed.migration, leaf, epoch))
        return actions

    def _on_give_back(self, sender: str, message: GiveBack | Refuse) -> list[Action]:
        leaves = []
        for leaf, epoch in message.leases:
            known = self._leaves.get(leaf)
            if (
                known is not None
                and known.state is OFFERED
                and known.epoch == epoch
                and known.peer == sender
            ):
                leaves.append(leaf)
        actions = self._take_back(leaves)
        actions.append(self._to(sender, GivenBack, message.migration, message.leases))
        return actions

    # From the coordinator

    def _on_table(self, sender: str, table: Table) -> list[Action]:
        if table.version > self.version:
            self.version = table.version
            self.owners = table.owners
        self._coordinator = sender
        return self._follow_table(self._leaves)

    def _on_take(self, sender: str, take: Take) -> list[Action]:
        number = take.number
        actions = self.take(number)
        if number in self._parts:
            self._askers[number] = sender
            if number in self._failed:
                actions.append(Send(sender, PartFailed(self.name, self.generation, number)))
            elif self._parts[number]:
                written = tuple(self._parts[number])
                actions.append(Send(sender, Part(self.name, self.generation, number, written)))
        return actions

    def _on_recover(self, sender: str, recover: Recover) -> list[Action]:
        is_again = recover.generation == self.generation and (self.version or not self.is_fenced)
        self._coordinator = sender
        if is_again:
            if self.is_fenced:
                return []  # being restored
            return [Send(sender, Recovered(self.name, self.generation))]
        actions = self._fence(recover.generation)
        self.version = recover.version
        self.owners = recover.owners
        self.barrier = recover.number
        mine = tuple(leaf for leaf, owner in enumerate(self.owners) if owner == self.name)
        actions.append(Restore(self.generation, recover.number, mine))
        return actions

    # ---- Steps that several of them take

    def _mark_sent(self, leaf: int, known: Known) -> None:
        if not known.is_sent:
            self._leaves.put((leaf,), known._replace(is_sent=True))

    def _offered(self, sender: str, leaf: int, epoch: int) -> Known | None:
        """The leaf, if it is offered to the sender at this epoch."""
        known = self._leaves.get(leaf)
        if known is None or known.state is not OFFERED:
            return None
        return known if known.epoch == epoch and known.peer == sender else None

    def _take_back(self, leaves: Sequence[int], is_certain: bool = True) -> list[Action]:
        if not leaves:
            return []
        actions: list[Action] = []
        for known, some in self._leaves.alike(leaves):
            assert known is not None
            covered = known.covered
            for leaf in some:
                self._leave(leaf, known)
                if is_certain:
                    actions += self._add_to_parts(leaf, known)
                    covered = max(covered, self.barrier)
            # The offered epoch may be in the target's hands for ever: this is a still greater one.
            taken = known._replace(state=OWNED, epoch=known.epoch + 1, covered=covered, peer="")
            self._leaves.put(some, taken._replace(is_closed=True, is_sent=False))
        actions.append(Reopen(tuple(leaves)))
        return actions

    def _add_to_parts(self, leaf: int, known: Known) -> list[Action]:
        """Checkpoints that were taken here while the leaf was nobody's, and do not have it yet."""
        if known.covered >= self.barrier:
            return []
        return [AddToPart(n, leaf) for n in self._parts if n > known.covered]

    def _close(self, leaf: int) -> list[Action]:
        """The last source of an owned leaf has let go of it: it may travel on."""
        known = self._leaves[leaf]
        self._leaves.put((leaf,), known._replace(is_closed=True))
        arrival = self._arrivals.get(known.migration)
        if arrival is not None:
            arrival.leaves.pop(leaf, None)
            self._forget_if_done(known.migration, arrival)
        return self._follow_table((leaf,))

    def _leave(self, leaf: int, known: Known) -> None:
        """The leaf is not offered any more."""
        departure = self._departures[known.migration]
        del departure.leaves[leaf]
        departure.streamed.discard(leaf)
        if not departure.leaves:
            del self._departures[known.migration]

    def _end(self, leaf: int, known: Known) -> None:
        """The leaf is another's, in whatever state it was here."""
        if known.state is OFFERED:
            self._leave(leaf, known)
        else:
            arrival = self._arrivals.get(known.migration)
            if arrival is not None:
                arrival.leaves.pop(leaf, None)
                self._forget_if_done(known.migration, arrival)
        self._leaves.put((leaf,), known._replace(state=NONE, is_closed=True, wanted=None))

    def _forget_if_done(self, migration: str, arrival: _Arrival) -> None:
        if not arrival.leaves and not arrival.returned:
            self._arrivals.pop(migration, None)

    def _fence(self, generation: int) -> list[Action]:
        """Forgets everything: nothing of an earlier generation counts in this one."""
        self.generation = generation
        self.is_fenced = True
        self.version = 0
        self.owners = ()
        self._leaves.clear()
        self._departures.clear()
        self._arrivals.clear()
        self._parts.clear()
        self._failed.clear()
        self._askers.clear()
        return [Fence(generation)]

    def _follow_table(self, leaves: Iterable[int]) -> list[Action]:
        """Offers those of these leaves that are another's; says so if all is in its place."""
        if not self.owners:
            return []
        moving: dict[str, list[int]] = {}
        for leaf in leaves:
            known = self._leaves[leaf]
            # What a later table than ours has brought here stays: by ours we would send it back,
            # and so on to and fro until we are told of the later one.
            if known.state is OWNED and known.is_closed and known.version <= self.version:
                owner = self.owners[leaf]
                if owner != self.name:
                    moving.setdefault(owner, []).append(leaf)
        actions: list[Action] = []
        for owner, group in moving.items():
            self._migrations += 1
            migration = f"{self.generation}/{self.version}/{self.name}/{self._migrations}"
            actions += self.begin(migration, owner, group)
        if leaves is self._leaves and self._coordinator and self._is_settled():
            settled = Settled(self.name, self.generation, self.version)
            actions.append(Send(self._coordinator, settled))
        return actions

    def _is_settled(self) -> bool:
        if self._departures or self._arrivals:
            return False
        held = sum(known.state is not NONE for _, known in self._leaves.items())
        return held == self.owners.count(self.name)

    def _where(self, sender: str, migration: str, leaf: int, epoch: int) -> Send:
        """The answer to one who asks for a leaf at an epoch that it is not offered at."""
        known = self._leaves.get(leaf)
        if known is None or known.epoch < epoch:
            return self._to(sender, Never, migration, leaf, epoch)
        if known.state is EXPECTED:
            return self._to(sender, InTransit, migration, leaf, known.epoch)
        is_here = known.state is OWNED or known.state is PARTIAL
        to = self.name if is_here else known.peer
        return self._to(sender, Moved, migration, leaf, known.epoch, to)

    def _offer(self, migration: str) -> Send:
        departure = self._departures[migration]
        grants = []
        for known, some in self._leaves.alike(sorted(departure.leaves)):
            assert known is not None
            grants += [Grant(run, known.epoch, known.covered) for run in runs_of(some)]
        grants.sort(key=lambda grant: grant.leaves.start)
        return self._to(departure.target, Offer, migration, self.name, tuple(grants), self.version)

    def _to(self, peer: str, kind: Callable[..., Any], migration: str, *fields: Any) -> Send:
        self._sequence += 1
        return Send(peer, kind(migration, self.generation, self._sequence, *fields))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence
