"""NewOwner: a participant's role in hand-overs in which leaves come here.

    NONE -> EXPECTED -> (PARTIAL ->) OWNED, and closed once the old owner has let go

What is not acknowledged is said again (resend): a Begin, that a leaf is here, that a leaf was given
back. A leaf that was asked for and has not come is asked for again by whoever needs it, as soon as
the first one who asked has said that no answer came (unanswered). A stream that broke off is opened
anew.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from statekit.protocol.handover import Ask, Incoming
from statekit.protocol.known import EXPECTED, NONE, OFFERED, OWNED, PARTIAL, Known
from statekit.protocol.machine import Machine
from statekit.protocol.messages import (
    Accept,
    Action,
    Begin,
    Credit,
    Declined,
    Expect,
    Fetch,
    GiveBack,
    GivenBack,
    Here,
    Install,
    Installed,
    InTransit,
    Lost,
    Moved,
    Never,
    Offer,
    Released,
    Send,
    Unexpect,
    runs_of,
)

UNWANTED_MAX = 1024  # migrations of which is remembered that they are not wanted any more


class NewOwner(Machine):
    """See Participant."""

    # ---- Asking for leaves

    def ask(self, migration: str, source: str, leaves: Sequence[range]) -> list[Action]:
        """Asks the source to hand these leaves over. Called again, it only repeats the question."""
        if migration not in self._asks:
            heard = [epoch for run in leaves for _, epoch in self.leases(run)]
            self._asks[migration] = Ask(source, tuple(leaves), max(heard, default=0))
            self._unwanted.pop(migration, None)
        return [self._begin(migration)]

    def unask(self, migration: str) -> list[Action]:
        """The migration is not wanted any more.

        Whether it has begun is not known. So we ask once more, and give back what is offered then.
        """
        if migration not in self._asks:
            return []
        self._unwanted[migration] = None
        if len(self._unwanted) > UNWANTED_MAX:
            del self._unwanted[next(iter(self._unwanted))]
        return [self._begin(migration)]

    def asks(self, source: str) -> list[str]:
        """Migrations whose Begin or GiveBack this source has not acknowledged."""
        given = [m for m, one in self._incoming.items() if one.source == source and one.returned]
        return [m for m, ask in self._asks.items() if ask.source == source] + given

    def source_of(self, migration: str) -> str:
        """Who hands the leaves over, or was asked to; "" if that is not known any more."""
        known = self._asks.get(migration) or self._incoming.get(migration)
        return known.source if known else ""

    def forget_asks(self, migrations: Iterable[str]) -> None:
        """The source is gone, and with it what had begun there; or it says that nothing began."""
        for migration in migrations:
            self._asks.pop(migration, None)
            incoming = self._incoming.get(migration)
            if incoming is not None and not incoming.missing and not incoming.installed:
                incoming.returned.clear()
                del self._incoming[migration]

    def _begin(self, migration: str) -> Send:
        ask = self._asks[migration]
        return self._to(ask.source, Begin, migration, ask.leaves, ask.above)

    def _on_declined(self, sender: str, declined: Declined) -> list[Action]:
        ask = self._asks.get(declined.migration)
        if ask is not None and ask.source == sender:
            del self._asks[declined.migration]
        return []

    # ---- Expecting them

    def _on_offer(self, sender: str, offer: Offer) -> list[Action]:
        migration, source = offer.migration, offer.source
        self._asks.pop(migration, None)
        # Remembered beyond the first answer: an offer may be overtaken by a later one, of nothing,
        # or by word that the hand-over is over.
        is_wanted = migration not in self._unwanted
        expected: dict[int, int] = {}
        superseded: list[int] = []
        returned: list[tuple[int, int]] = []
        waiting: list[tuple[range, int]] = []
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
                    # A greater epoch proves that our lease has ended, though nobody told us.
                    for leaf in some:
                        self._end(leaf, known)
                    superseded += some
                covered = max(covered, self.ended)
                new = Known(EXPECTED, epoch, covered, source, migration, offer.version)
                if is_wanted:
                    self._leaves.put(some, new)
                    expected.update(dict.fromkeys(some, epoch))
                    waiting += [(run, epoch) for run in runs_of(some)]
                else:
                    self._leaves.put(some, new._replace(state=NONE))
                    returned += [(leaf, epoch) for leaf in some]
        actions: list[Action] = [Unexpect(tuple(superseded))] if superseded else []
        if expected:
            incoming = self._incoming.setdefault(migration, Incoming(source))
            incoming.missing.update(expected)
            actions.append(Expect(tuple(expected), source))
        if returned:
            # The source may understand our Accept as an answer about all leaves. So we repeat what
            # is given back until it is acknowledged.
            incoming = self._incoming.setdefault(migration, Incoming(source))
            incoming.returned.update(returned)
            actions.append(self._to(sender, GiveBack, migration, tuple(returned)))
        actions.append(self._accept(sender, migration, waiting))
        return actions

    def _accept(self, source: str, migration: str, waiting: Iterable[tuple[range, int]]) -> Send:
        incoming = self._incoming.get(migration)
        stream, credit = (0, 0) if incoming is None else (incoming.stream, incoming.granted)
        return self._to(source, Accept, migration, tuple(waiting), stream, credit)

    def want(
        self, migration: str, leaves: Iterable[int], keys: tuple[Any, ...] = ()
    ) -> list[Action]:
        """Somebody waits for these leaves, or, if they are large, for these entries of them.

        A leaf that was already asked for as a whole is not asked for again before unanswered().
        """
        incoming = self._incoming.get(migration)
        if incoming is None:
            return []
        wanted = [leaf for leaf in leaves if leaf in incoming.missing]
        if not keys:
            wanted = [leaf for leaf in wanted if leaf not in incoming.asked]
            incoming.asked.update(wanted)
        return [self._fetch(migration, incoming, leaf, keys) for leaf in wanted]

    def unanswered(self, migration: str, leaves: Iterable[int]) -> None:
        """An outcome of want(): nobody waits for these any more. Some of them may have come."""
        incoming = self._incoming.get(migration)
        if incoming is None:
            return
        for leaf in leaves:
            assert leaf in incoming.asked or leaf not in incoming.missing, (
                f"nobody has asked for leaf {leaf}"
            )
            incoming.asked.discard(leaf)

    def _fetch(
        self, migration: str, incoming: Incoming, leaf: int, keys: tuple[Any, ...] = ()
    ) -> Send:
        epoch = incoming.missing[leaf]
        return self._to(incoming.source, Fetch, migration, leaf, epoch, keys)

    # ---- The stream

    def open_stream(self, migration: str) -> list[Action]:
        """Lets the source send by itself what is missing; [] if nothing is missing."""
        incoming = self._incoming.get(migration)
        if incoming is None or not incoming.missing:
            return []
        incoming.stream += 1
        incoming.is_streaming = True
        incoming.received, incoming.granted = 0, self.window
        waiting = [leaf for leaf in sorted(incoming.missing) if leaf not in incoming.partial]
        return [self._accept(incoming.source, migration, self.leases(waiting))]

    def received(self, migration: str, stream: int, size: int) -> list[Action]:
        """The stream has brought `size` more bytes, and they were taken in."""
        incoming = self._incoming.get(migration)
        if incoming is None or stream != incoming.stream:
            return []
        incoming.received += size
        if incoming.received + self.window - incoming.granted < max(self.window // 4, 1):
            return []  # credit costs a message, so it is not given for every leaf
        incoming.granted = incoming.received + self.window
        return [self._to(incoming.source, Credit, migration, stream, incoming.granted)]

    def stream_ended(
        self, migration: str, stream: int, is_tried_again: bool = True
    ) -> list[Action]:
        """An outcome of open_stream(): nothing more comes by this stream.

        If something is missing, another one is opened, unless is_tried_again is False.
        """
        incoming = self._incoming.get(migration)
        if incoming is None or stream != incoming.stream:
            return []
        assert incoming.is_streaming, f"stream {stream} of {migration} ended before"
        incoming.is_streaming = False
        return self.open_stream(migration) if is_tried_again else []

    # ---- What comes

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
        if known.state is EXPECTED and covered < self.barrier:
            actions += self._add_to_parts((leaf,), known)
            covered = max(covered, self.barrier)
        new = known._replace(state=PARTIAL, covered=covered)
        incoming = self._incoming[known.migration]
        if here.is_whole:
            new = new._replace(state=OWNED, is_closed=False)
            incoming.install(leaf)
            actions.append(self._to(sender, Installed, migration, leaf, here.epoch))
        else:
            incoming.partial[leaf] = None
        self._leaves.put((leaf,), new)
        return actions

    def _on_moved(self, sender: str, moved: Moved) -> list[Action]:
        known = self._leaves.get(moved.leaf)
        if known is None or moved.epoch <= known.epoch or known.state is OFFERED:
            return []
        # Our epoch stays as it is: an offer to us with the epoch of this message may be on its way.
        was_here = known.state is not NONE
        if was_here:
            self._end(moved.leaf, known)
        self._leaves.put((moved.leaf,), self._leaves[moved.leaf]._replace(peer=moved.to))
        return [Unexpect((moved.leaf,))] if was_here else []

    def _on_in_transit(self, sender: str, reply: InTransit) -> list[Action]:
        return []  # whoever needs the leaf asks again

    def _on_never(self, sender: str, never: Never) -> list[Action]:
        known = self._leaves.get(never.leaf)
        if known is None or known.epoch != never.epoch or known.peer != sender:
            return []
        if known.state is EXPECTED or known.state is PARTIAL:
            return [Lost(never.leaf, sender)]
        if known.state is OWNED and not known.is_closed:
            return self._close(never.leaf)  # the sender has nothing left to let go of
        return []

    def _on_released(self, sender: str, released: Released) -> list[Action]:
        known = self._leaves.get(released.leaf)
        if known is None or known.state is not OWNED or known.epoch != released.epoch:
            return []
        return self._close(released.leaf)

    def _close(self, leaf: int) -> list[Action]:
        """The last source of an owned leaf has let go of it: it may travel on."""
        known = self._leaves[leaf]
        self._leaves.put((leaf,), known._replace(is_closed=True))
        incoming = self._incoming.get(known.migration)
        if incoming is not None:
            incoming.drop(leaf)
            self._forget_if_over(known.migration)
        return []

    # ---- Giving back

    def give_back(self, migration: str) -> list[Action]:
        """Gives back the key-groups of which nothing has come."""
        incoming = self._incoming.get(migration)
        if incoming is None:
            return []
        untouched = self._whole_groups(
            incoming.missing, lambda known: known is not None and known.state is EXPECTED
        )
        return self._return(migration, incoming, untouched)

    def decline(self, offer: Offer) -> list[Action]:
        """The offer could not be accepted: gives back the key-groups of which nothing has come.

        A key-group of which a leaf has come in this very migration is not given back: it would have
        two owners.
        """
        untouched: list[tuple[int, int]] = []
        for leaves, epoch, _ in offer.grants:

            def is_free(known: Known | None, epoch: int = epoch) -> bool:
                if known is None or known.state is NONE:
                    return True
                return known.state is EXPECTED and known.epoch == epoch

            untouched += [(leaf, epoch) for leaf in self._whole_groups(leaves, is_free)]
        incoming = self._incoming.setdefault(offer.migration, Incoming(offer.source))
        fresh = [lease for lease in untouched if self.epoch_of(lease[0]) < lease[1]]
        for leaf, epoch in fresh:  # so that nothing of this epoch can be installed any more
            self._leaves.put((leaf,), Known(NONE, epoch, 0, offer.source, offer.migration))
        expected = [leaf for leaf, _ in untouched if self.state_of(leaf) is EXPECTED]
        # [:1] leaves out its GiveBack: one message about all leaves follows below.
        actions = self._return(offer.migration, incoming, expected)[:1]
        incoming.returned.update(untouched)
        self._forget_if_over(offer.migration)
        if untouched:
            actions.append(self._to(offer.source, GiveBack, offer.migration, tuple(untouched)))
        return actions

    def _return(self, migration: str, incoming: Incoming, leaves: Sequence[int]) -> list[Action]:
        leases: list[tuple[int, int]] = []
        for known, some in self._leaves.alike(leaves):
            assert known is not None
            # The epoch stays, so that nothing of this epoch can be installed any more.
            self._leaves.put(some, known._replace(state=NONE))
            leases += [(leaf, known.epoch) for leaf in some]
        for leaf, epoch in leases:
            incoming.give_back(leaf, epoch)
        if not leases:
            return []
        return [
            Unexpect(tuple(leaf for leaf, _ in leases)),
            self._to(incoming.source, GiveBack, migration, tuple(leases)),
        ]

    def _on_given_back(self, sender: str, given: GivenBack) -> list[Action]:
        incoming = self._incoming.get(given.migration)
        if incoming is not None:
            for leaf, epoch in given.leases:
                if incoming.returned.get(leaf) == epoch:
                    del incoming.returned[leaf]
            self._forget_if_over(given.migration)
        return []

    # ---- Saying things again

    def unreported(self, migration: str, most: int | None = None) -> list[Action]:
        """Says which leaves are here, at most `most`, in case the old owner does not know."""
        incoming = self._incoming.get(migration)
        if incoming is None:
            return []
        return [
            self._to(incoming.source, Installed, migration, leaf, self.epoch_of(leaf))
            for leaf in islice(incoming.installed, most)
        ]

    def unreturned(self, migration: str) -> list[Action]:
        """Says which leaves were given back, in case the old owner does not know."""
        incoming = self._incoming.get(migration)
        if incoming is None or not incoming.returned:
            return []
        leases = tuple(incoming.returned.items())
        return [self._to(incoming.source, GiveBack, migration, leases)]

    def uncompleted(self, migration: str) -> list[Action]:
        """Fetches leaves of which some entries are here, if nobody has asked for the rest."""
        incoming = self._incoming.get(migration)
        if incoming is None:
            return []
        return [
            self._fetch(migration, incoming, leaf)
            for leaf in incoming.partial
            if leaf not in incoming.asked
        ]
