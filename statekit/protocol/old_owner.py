"""OldOwner: a participant's role in hand-overs in which leaves go away from here.

    OWNED -> OFFERED (nothing sent -> something sent) -> NONE
                 \\-> RETURNED -> OWNED     taken back: shut until that is recorded

Each stream has a number and credit of its own. Credit that was granted to a stream that broke off
does not count for the next one, and late messages about the old stream carry another number. A new
stream sends all leaves that are left: nobody knows how much of the last one was lost on the way.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from statekit.assignment import common, subtract
from statekit.errors import LeaseError
from statekit.protocol.handover import Outgoing
from statekit.protocol.known import NONE, OFFERED, OWNED, RETURNED, Known
from statekit.protocol.machine import Machine
from statekit.protocol.messages import (
    Accept,
    Action,
    Begin,
    Credit,
    Declined,
    Drop,
    Fetch,
    GiveBack,
    GivenBack,
    Grant,
    Here,
    Installed,
    Offer,
    Released,
    Reopen,
    Send,
    Serve,
    Shut,
    TakeBack,
    maker_of,
    runs_of,
)


class OldOwner(Machine):
    """See Participant."""

    version: int  # of the table

    def __init__(self, *arguments: int | str) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        # Migrations that have begun here: their leaves and number, by the life that made them.
        self._begun: dict[str, list[tuple[tuple[range, ...], int]]] = {}

    # ---- Offering

    def begin(
        self, migration: str, target: str, leaves: Iterable[int], above: int = 0
    ) -> list[Action]:
        """Shuts leaves and offers them to the target. Called again, it only repeats the offer.

        above: an epoch that the target knows. It accepts higher epochs only. Our own epoch may be
        lower, if these leaves were lost since then and restored or opened anew here.
        """
        if migration in self._outgoing:
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
            offered = known._replace(state=OFFERED, epoch=max(known.epoch, above) + 1, peer=target)
            self._leaves.put(some, offered._replace(migration=migration, is_sent=False))
        self._outgoing[migration] = Outgoing(target, leaves)
        return [Shut(leaves), self._offer(migration)]

    def why_over(self, migration: str, leaves: Sequence[range]) -> str:
        """Why this migration of these leaves cannot begin any more; "" if it can.

        Either the process that made it has made a later one of some of these leaves, or it has
        begun before and is over. Such a Begin was on its way for longer than its sender waited. A
        hand-over would now take leaves from the later migration, or from here, for a process that
        does not want them any more.
        """
        maker, number = maker_of(migration)
        for begun, at in self._begun.get(maker, ()):
            if at >= number and common(tuple(leaves), begun):
                if at > number:
                    return f"migration {migration} comes too late: a later one of these has begun."
                return f"migration {migration} is over: declined, or taken back. Begin another."
        return ""

    def withdraw(self, migration: str, leaves: Sequence[range]) -> None:
        """Makes sure that this migration does not begin any more.

        Its maker is told so, or it was proposed from here and has failed.
        """
        maker, number = maker_of(migration)
        earlier = self._begun.get(maker, [])
        kept = [(subtract(begun, tuple(leaves)), at) for begun, at in earlier if at <= number]
        kept += [one for one in earlier if one[1] > number]
        self._begun[maker] = [one for one in kept if one[0]] + [(tuple(leaves), number)]

    def _on_begin(self, sender: str, begin: Begin) -> list[Action]:
        migration = begin.migration
        outgoing = self._outgoing.get(migration)
        if outgoing is not None and outgoing.target == sender:
            return [self._offer(migration)]
        reason = f"migration {migration} goes to another." if outgoing is not None else ""
        reason = reason or self.why_over(migration, begin.leaves)
        if not reason:
            # A migration may begin only once, whether it succeeds or not. Its sender may be told
            # that it has not begun, and forget it, while a copy of this Begin is still on its way.
            self.withdraw(migration, begin.leaves)
            try:
                leaves = chain.from_iterable(begin.leaves)
                return self.begin(migration, sender, leaves, begin.above)
            except LeaseError as error:
                reason = str(error)
        return [self._to(sender, Declined, migration, reason)]

    def _offer(self, migration: str) -> Send:
        outgoing = self._outgoing[migration]
        grants = []
        for known, some in self._leaves.alike(sorted(outgoing.leaves)):
            assert known is not None
            grants += [Grant(run, known.epoch, known.covered) for run in runs_of(some)]
        grants.sort(key=lambda grant: grant.leaves.start)
        return self._to(outgoing.target, Offer, migration, self.name, tuple(grants), self.version)

    # ---- Sending

    def serves(self, sender: str, generation: int, leaf: int, epoch: int) -> bool:
        """Whether single entries may go to the sender, as if it had said Fetch with keys.

        For calls about many leaves at once. If not, the answer to a Fetch tells why.
        """
        if generation != self.generation or self.is_fenced:
            return False
        known = self._offered(sender, leaf, epoch)
        if known is None:
            return False
        self._mark_sent(leaf, known)
        return True

    def served_whole(self, migration: str, leaf: int) -> None:
        """A Serve with keys was answered with all of the leaf: no need to stream it."""
        outgoing = self._outgoing.get(migration)
        if outgoing is not None and leaf in outgoing.leaves:
            outgoing.streamed.add(leaf)

    def unsent(self, migration: str) -> list[int]:
        """The leaves that the stream has to send now. The caller chooses their order."""
        outgoing = self._outgoing.get(migration)
        if outgoing is None or not self.has_credit(migration, outgoing.stream):
            return []
        return [leaf for leaf in outgoing.leaves if leaf not in outgoing.streamed]

    def send(self, migration: str, stream: int, leaf: int) -> list[Action]:
        """Serves the leaf by the stream now; [] if that need not or must not be done any more."""
        outgoing = self._outgoing.get(migration)
        if outgoing is None or stream != outgoing.stream:
            return []
        if leaf not in outgoing.leaves or leaf in outgoing.streamed:
            return []
        known = self._leaves[leaf]
        self._mark_sent(leaf, known)
        outgoing.streamed.add(leaf)
        number, epoch = self._next(), known.epoch
        reply = Here(migration, self.generation, number, leaf, epoch, True, None, stream)
        return [Serve(outgoing.target, reply, ())]

    def is_current(self, migration: str, stream: int) -> bool:
        """Whether the new owner reads this stream, and there is something left to send."""
        outgoing = self._outgoing.get(migration)
        return outgoing is not None and stream == outgoing.stream and bool(outgoing.leaves)

    def has_credit(self, migration: str, stream: int) -> bool:
        """Whether the stream may send the next piece now."""
        outgoing = self._outgoing.get(migration)
        return (
            outgoing is not None and stream == outgoing.stream and outgoing.sent < outgoing.credit
        )

    def sent(self, migration: str, stream: int, size: int) -> None:
        """The stream has sent `size` more bytes."""
        outgoing = self._outgoing.get(migration)
        if outgoing is not None and stream == outgoing.stream:
            outgoing.sent += size

    def _on_accept(self, sender: str, accept: Accept) -> list[Action]:
        outgoing = self._outgoing.get(accept.migration)
        if outgoing is not None and outgoing.target == sender:
            outgoing.is_accepted = True
            if accept.stream > outgoing.stream:
                outgoing.stream, outgoing.sent, outgoing.credit = accept.stream, 0, 0
                outgoing.streamed.clear()
            if accept.stream == outgoing.stream:
                outgoing.credit = max(outgoing.credit, accept.credit)
        actions: list[Action] = []
        for leaves, epoch in accept.waiting:
            for known, some in self._leaves.alike(leaves):
                if known is None or known.epoch != epoch:
                    actions += [self._where(sender, accept.migration, leaf, epoch) for leaf in some]
        return actions

    def _on_credit(self, sender: str, credit: Credit) -> list[Action]:
        outgoing = self._outgoing.get(credit.migration)
        if outgoing is not None and credit.stream == outgoing.stream:
            outgoing.credit = max(outgoing.credit, credit.bytes_total)
        return []

    def _on_fetch(self, sender: str, fetch: Fetch) -> list[Action]:
        leaf, epoch = fetch.leaf, fetch.epoch
        known = self._offered(sender, leaf, epoch)
        if known is None:
            return [self._where(sender, fetch.migration, leaf, epoch)]
        self._mark_sent(leaf, known)
        if not fetch.keys:
            self.served_whole(known.migration, leaf)
        reply = Here(known.migration, self.generation, self._next(), leaf, epoch, True, None)
        return [Serve(sender, reply, fetch.keys)]

    def _mark_sent(self, leaf: int, known: Known) -> None:
        if not known.is_sent:
            self._leaves.put((leaf,), known._replace(is_sent=True))

    def _offered(self, sender: str, leaf: int, epoch: int) -> Known | None:
        """The leaf, if it is offered to the sender at this epoch."""
        known = self._leaves.get(leaf)
        if known is None or known.state is not OFFERED:
            return None
        return known if known.epoch == epoch and known.peer == sender else None

    # ---- Letting go

    def _on_installed(self, sender: str, installed: Installed) -> list[Action]:
        leaf, epoch = installed.leaf, installed.epoch
        known = self._leaves.get(leaf)
        actions: list[Action] = []
        if known is not None:
            if epoch != known.epoch or known.peer != sender:
                # Only an authority that declares the target dead takes back a leaf that was sent.
                # The authority was wrong: the target still acts.
                return [self._where(sender, installed.migration, leaf, epoch)]
            if known.state is OFFERED:
                self._outgoing[known.migration].gone += 1
                self._end(leaf, known)
                actions.append(Drop(leaf))
                actions += self._sort_back(known.migration)
        actions.append(self._to(sender, Released, installed.migration, leaf, epoch))
        return actions

    # ---- Taking back

    def abort(self, migration: str) -> tuple[list[Action], tuple[int, ...]]:
        """Takes back key-groups of which nothing was sent. Returns the leaves still offered, too.

        The target learns of it from Moved, when it fetches or says again that it waits.
        """
        outgoing = self._outgoing.get(migration)
        if outgoing is None:
            return [], ()

        def is_unsent(known: Known | None) -> bool:
            if known is None or known.state is RETURNED:
                return known is not None
            return known.state is OFFERED and known.migration == migration and not known.is_sent

        actions = self._take_back(self._whole_groups(outgoing.leaves, is_unsent))
        return actions, tuple(outgoing.leaves)

    def make_way(self, target: str, leaves: Sequence[range]) -> list[Action]:
        """Takes back earlier offers of these leaves that the target forgot before anything came."""
        actions: list[Action] = []
        wanted = {*chain.from_iterable(leaves)}
        for migration, outgoing in [*self._outgoing.items()]:
            if outgoing.target == target and not wanted.isdisjoint(outgoing.leaves):
                actions += self.abort(migration)[0]
        return actions

    def taken_back(self, leaves: Sequence[int]) -> list[Action]:
        """An outcome of TakeBack: it is recorded that these leaves are ours. They may be opened."""
        actions: list[Action] = []
        for known, some in self._leaves.alike(leaves):
            assert known is not None
            assert known.state is RETURNED, f"{some} were not to be taken back"
            actions += self._add_to_parts(some, known)
            covered = max(known.covered, self.barrier)
            self._leaves.put(some, known._replace(state=OWNED, covered=covered, peer=""))
            outgoing = self._outgoing[known.migration]
            outgoing.returned += len(some)
            for leaf in some:
                del outgoing.back[leaf]
            self._forget_if_over(known.migration)
        return [*actions, Reopen(tuple(leaves))] if leaves else []

    def waiting_back(self) -> list[int]:
        """Leaves that were taken back, and may be opened once that is recorded."""
        found: list[int] = []
        for migration in self._outgoing:
            found += self._openable(migration)
        return sorted(found)

    def _on_give_back(self, sender: str, message: GiveBack) -> list[Action]:
        leaves = [
            leaf
            for leaf, epoch in message.leases
            if (known := self._leaves.get(leaf)) is not None
            and known.state is OFFERED
            and known.epoch == epoch
            and known.peer == sender
        ]
        actions = self._take_back(leaves)
        actions.append(self._to(sender, GivenBack, message.migration, message.leases))
        return actions

    def _take_back(self, leaves: Sequence[int], is_certain: bool = True) -> list[Action]:
        """is_certain: it is certain that the target's part of no checkpoint has these leaves."""
        migrations: dict[str, None] = {}
        for known, some in self._leaves.alike(leaves):
            assert known is not None
            migrations[known.migration] = None
            outgoing = self._outgoing[known.migration]
            for leaf in some:
                outgoing.back[leaf] = None
                del outgoing.leaves[leaf]
                outgoing.streamed.discard(leaf)
            covered = known.covered if is_certain else max(known.covered, self.barrier)
            # The target may hold on to the offered epoch for ever. So this one is greater still.
            taken = known._replace(state=RETURNED, epoch=known.epoch + 1, covered=covered)
            self._leaves.put(some, taken._replace(is_closed=True, is_sent=False))
        return [action for migration in migrations for action in self._sort_back(migration)]

    def _sort_back(self, migration: str) -> list[Action]:
        """What becomes of leaves that were taken back, when their hand-over has changed.

        A key-group is opened as a whole: its leaves that are back wait for those that are still
        offered. If the target has installed one of them and died, the others are of no use: owning
        them would put half of a key-group into checkpoints as if it were the whole key-group.
        """
        outgoing = self._outgoing.get(migration)
        if outgoing is None or not outgoing.back:
            return []
        hopeful = self._whole_groups(outgoing.back, _is_here)
        actions: list[Action] = []
        for leaf in sorted(outgoing.back.keys() - set(hopeful)):
            self._end(leaf, self._leaves[leaf])
            actions.append(Drop(leaf))
        openable = self._openable(migration)
        return [*actions, TakeBack(tuple(openable))] if openable else actions

    def _openable(self, migration: str) -> list[int]:
        back = self._outgoing[migration].back if migration in self._outgoing else {}
        return self._whole_groups(back, _is_ours) if back else []


def _is_here(known: Known | None) -> bool:
    return known is not None and known.state is not NONE


def _is_ours(known: Known | None) -> bool:
    return known is not None and known.state in (OWNED, RETURNED)
