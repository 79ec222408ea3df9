"""Participant: what one process knows about leases, and what it says. A pure state machine.

There is no clock, socket, thread or randomness in here: messages and calls come in, actions go out.
The gRPC shell and the simulator drive the same class. docs/protocol.md has every transition as a
table, and the argument why no leaf is lost or owned twice. In short:

    source:  OWNED -> OFFERED (nothing sent -> something sent) -> NONE      old_owner.py
    target:  NONE -> EXPECTED -> (PARTIAL ->) OWNED, and closed once the    new_owner.py
             source has let go

1. A leaf is shut before it is offered. So the source accepts no more operations from the moment on
   at which the target may accept some.
2. The target accepts no operations before content has come; from then on it is the owner.
3. The offered epoch is never used for anything else: a source that takes a leaf back does so with
   a still greater one, and only if nothing was sent, or the target has promised not to install it.
4. `epoch` of a leaf never falls, not even when the leaf has gone: late messages have a smaller one.
5. A leaf is offered onward only when its last source has let go (Released). So there are never two
   hand-overs of a leaf whose outcome somebody does not know, and an authority that declares one
   target dead cannot bring back a leaf that has travelled on from there.

A participant's name belongs to one life of a process: a process that lost its memory comes back
under another name, and gives its migrations other ids. Otherwise it could get an offer again that
it accepted in its earlier life, and whose leaves it has changed since.

All state of a hand-over is here. The process around it carries out actions and says what came of
them; it keeps no copy of what is known here. What it may read is in handover.py. If it does not
know an action, that is a bug of that process. If it reports an outcome of an action that was not
asked for, that is a bug too, and is asserted here.
"""

from collections.abc import Iterable
from typing import Any

from statekit.protocol.known import EXPECTED, NONE, OFFERED, OWNED, PARTIAL, RETURNED
from statekit.protocol.machine import WINDOW_BYTES
from statekit.protocol.messages import (
    Accept,
    Action,
    Begin,
    Credit,
    Declined,
    Fence,
    Fenced,
    Fetch,
    GiveBack,
    GivenBack,
    Here,
    Installed,
    InTransit,
    Leases,
    Moved,
    Never,
    Offer,
    PartFailed,
    PartWritten,
    Recover,
    Recovered,
    Released,
    Restore,
    Send,
    Settled,
    Table,
    Take,
    TakeBack,
    Unexpect,
    WritePart,
)
from statekit.protocol.new_owner import NewOwner
from statekit.protocol.old_owner import OldOwner

__all__ = ["EXPECTED", "NONE", "OFFERED", "OWNED", "PARTIAL", "RETURNED", "Participant"]

NUMBERS_MAX = 8  # how many checkpoints a participant remembers its parts of

_HANDLERS = {
    Begin: "_on_begin",
    Declined: "_on_declined",
    Offer: "_on_offer",
    Accept: "_on_accept",
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


class Participant(OldOwner, NewOwner):
    """One per process; not thread safe. Every call gives the actions to carry out, in order."""

    def __init__(
        self, name: str, generation: int = 0, subgroups: int = 1, window: int = WINDOW_BYTES
    ) -> None:
        super().__init__(name, generation, subgroups, window)
        self.version = 0  # of the table
        self.owners: tuple[str, ...] = ()  # by the table, one per leaf; () if there is no table
        self._failed: set[int] = set()  # checkpoints of which our part could not be written
        self._askers: dict[int, str] = {}  # who said Take(n)
        self._coordinator: str | None = None  # who said Recover
        self._migrations = 0

    def own(
        self,
        leaves: Iterable[int],
        covered: int = 0,
        generation: int | None = None,
        leases: Leases = (),
    ) -> list[Action]:
        if generation is not None and generation != self.generation:
            return []
        super().own(leaves, covered, generation, leases)
        if self._coordinator is None:
            return []
        return [Send(self._coordinator, Recovered(self.name, self.generation))]

    # ---- What an authority says

    def declare_dead(self, peer: str) -> tuple[list[Action], tuple[int, ...]]:
        """An authority vouches that the peer will never act again. Returns lost leaves, too.

        Leaves offered to the peer come back as they were when offered; what it did with them is
        lost and must be replayed. Leaves that came from it as a whole stay here for good if all of
        their key-group has come. Half of a key-group would go into checkpoints as if it were all of
        it, so such leaves are given up, and returned: only a recovery can complete them. (Leaves of
        which nothing has come need not be lost: their source may have taken them back, and we do
        not know it.)
        """
        offered: list[int] = []
        for outgoing in self._outgoing.values():
            if outgoing.target == peer:
                offered += outgoing.leaves
        # These leaves do not go into our part of a checkpoint that has begun: the dead peer may
        # have put them into its own part.
        actions = self._take_back(sorted(offered), is_certain=False)
        for migration in [m for m, ask in self._asks.items() if ask.source == peer]:
            del self._asks[migration]
        gone = [one for one in self._incoming.items() if one[1].source == peer]
        missing = [leaf for _, incoming in gone for leaf in incoming.missing]
        lost = tuple(self._with_siblings(sorted(missing)))
        for leaf in lost:
            known = self._leaves.get(leaf)
            if known is not None and known.state is not NONE:
                self._end(leaf, known)
        if lost:
            actions.append(Unexpect(lost))
        for migration, incoming in gone:
            incoming.returned.clear()
            for leaf in [*incoming.installed]:
                actions += self._close(leaf)
            self._forget_if_over(migration)
        return actions, lost

    def fence(self, generation: int) -> list[Action]:
        """A later generation has begun, says somebody who knows it."""
        return self._fence(generation) if generation > self.generation else []

    def _fence(self, generation: int) -> list[Action]:
        """Forgets everything: nothing of an earlier generation counts in this one."""
        self.generation = generation
        self.is_fenced = True
        self.ended = 0
        self.version = 0
        self.owners = ()
        for outgoing in self._outgoing.values():
            outgoing.returned += len(outgoing.leaves) + len(outgoing.back)
            outgoing.leaves.clear()
            outgoing.back.clear()
        for incoming in self._incoming.values():
            incoming.is_fenced = True
            incoming.asked.clear()
        self._leaves.clear()
        self._outgoing.clear()
        self._incoming.clear()
        self._asks.clear()
        self._begun.clear()
        self._parts.clear()
        self._failed.clear()
        self._askers.clear()
        return [Fence(generation)]

    # ---- Checkpoints

    def take(self, number: int) -> list[Action]:
        """The barrier of checkpoint n has passed here; [] if n or a later one was taken already.

        Offered and expected leaves are left out: the process that installs or reopens them next
        adds them to its part.
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

    def end(self, number: int) -> list[Action]:
        """Checkpoint n is complete, or was given up: nothing here belongs into it any more.

        Only an authority knows that. A participant that began after barrier n has not passed it
        either, and what it hands over would be added to the part of whoever has passed it.
        """
        if number <= self.ended or self.is_fenced:
            return []
        for known, some in self._leaves.alike():
            assert known is not None
            if known.covered < number:
                self._leaves.put(some, known._replace(covered=number))
        self.ended = number
        self.barrier = max(self.barrier, number)
        return []

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
        return [Send(asker, PartWritten(self.name, self.generation, number, leaves))]

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
            return []  # the sender will say it again when we are able to answer
        actions: list[Action] = getattr(self, _HANDLERS[kind])(sender, message)
        return actions

    def resend(self) -> list[Action]:
        """Repeats everything that was not acknowledged. To be called now and then."""
        actions: list[Action] = [self._begin(migration) for migration in self._asks]
        for migration, outgoing in self._outgoing.items():
            if outgoing.leaves and not outgoing.is_accepted:
                actions.append(self._offer(migration))
        if back := self.waiting_back():
            actions.append(TakeBack(tuple(back)))
        for migration, incoming in self._incoming.items():
            actions += self.unreported(migration)
            actions += self.unreturned(migration)
            actions += self.uncompleted(migration)
            waiting = sorted(incoming.missing.keys() - incoming.partial.keys())
            if waiting:
                actions.append(self._accept(incoming.source, migration, self.leases(waiting)))
        return actions + self._follow_table(self._leaves)

    def _close(self, leaf: int) -> list[Action]:
        return super()._close(leaf) + self._follow_table((leaf,))

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
                actions.append(
                    Send(sender, PartWritten(self.name, self.generation, number, written))
                )
        return actions

    def _on_recover(self, sender: str, recover: Recover) -> list[Action]:
        is_again = recover.generation == self.generation and (self.version or not self.is_fenced)
        self._coordinator = sender
        if is_again:
            if self.is_fenced:
                return []  # the restore is still under way
            return [Send(sender, Recovered(self.name, self.generation))]
        actions = self._fence(recover.generation)
        self.version = recover.version
        self.owners = recover.owners
        self.barrier = recover.number
        mine = tuple(leaf for leaf, owner in enumerate(self.owners) if owner == self.name)
        actions.append(Restore(self.generation, recover.number, mine))
        return actions

    def _follow_table(self, leaves: Iterable[int]) -> list[Action]:
        """Offers the leaves that the table gives to others. Says Settled if all is in its place."""
        if not self.owners:
            return []
        moving: dict[str, list[int]] = {}
        for leaf in leaves:
            known = self._leaves[leaf]
            # A leaf that a later table than ours has brought here stays. By our table we would send
            # it back, and it would go to and fro until we are told of the later table.
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
        if self._outgoing or self._incoming or self._asks:
            return False
        held = sum(known.state is not NONE for _, known in self._leaves.items())
        return held == self.owners.count(self.name)
