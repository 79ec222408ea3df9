"""Machine: what both sides of a hand-over share. The old owner's side and the new one's extend it.

What is known of leaves is kept by known.py, where many leaves that are alike cost as much as one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from statekit.errors import LeaseError
from statekit.protocol.handover import Ask, Incoming, Outgoing
from statekit.protocol.known import (
    EXPECTED,
    NONE,
    OFFERED,
    OWNED,
    PARTIAL,
    RETURNED,
    Known,
    KnownLeaves,
)
from statekit.protocol.messages import (
    OUTSIDE,
    Action,
    AddToPart,
    InTransit,
    Leases,
    Moved,
    Never,
    Send,
    first_epoch,
    runs_of,
)

WINDOW_BYTES = 16 << 20  # how far a stream may be ahead of its reader


class Machine:
    """What one process knows of its leaves, and of the hand-overs that they are in."""

    def __init__(
        self, name: str, generation: int = 0, subgroups: int = 1, window: int = WINDOW_BYTES
    ) -> None:
        self.name = name
        self.generation = generation
        self.subgroups = subgroups  # leaves per key-group; a key-group changes hands as a whole
        self.window = window
        self.is_fenced = generation == OUTSIDE  # owns nothing before own() is called
        self.barrier = 0  # the last checkpoint that was taken here
        self.ended = 0  # nothing is added any more to checkpoints up to this one
        self._leaves = KnownLeaves()
        self._outgoing: dict[str, Outgoing] = {}  # by migration, like the next two
        self._incoming: dict[str, Incoming] = {}
        self._asks: dict[str, Ask] = {}
        self._unwanted: dict[str, None] = {}  # migrations: what is still offered is given back
        # By the number of a checkpoint that was taken here: leaves of our part that are written.
        self._parts: dict[int, dict[int, None]] = {}
        self._sequence = 0

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
            return None  # peer is us: we heard that it is ours before its offer came
        return known.peer or None

    def leases(self, leaves: Sequence[int]) -> Leases:
        """The epochs of those leaves that were ever heard of, as epoch_of() gives them."""
        return self._leaves.leases(leaves)

    def held(self) -> list[int]:
        """The leaves that are here, in any state."""
        return [leaf for leaf, known in self._leaves.items() if known.state is not NONE]

    def outgoing(self, migration: str) -> Outgoing | None:
        """The hand-over, if it is not over here. Not to be changed by the caller."""
        return self._outgoing.get(migration)

    def incoming(self, migration: str) -> Incoming | None:
        """The same, for a hand-over in which leaves come here."""
        return self._incoming.get(migration)

    def is_done(self, migration: str) -> bool:
        """Whether the migration is over here, or was never known here."""
        return not (
            migration in self._outgoing or migration in self._incoming or migration in self._asks
        )

    # ---- Leaves that come and go by other ways than a hand-over

    def own(
        self,
        leaves: Iterable[int],
        covered: int = 0,
        generation: int | None = None,
        leases: Leases = (),
    ) -> list[Action]:
        """At the start or after a restore: these leaves are here, whole, and nobody else's.

        generation: the one that the restore was for; if another has begun since, nothing happens.
        leases: earlier leases of these leaves, which have ended: another participant of this
        process has disowned them, or an earlier life had them. Other processes may remember their
        epochs, and would take an offer with a smaller epoch for an old one.
        """
        if generation is not None and generation != self.generation:
            return []
        leaves = [*leaves]
        alike = self._leaves.alike(leaves)
        for known, some in alike:
            if known is not None and known.state is not NONE:
                raise LeaseError(f"leaf {some[0]} is known already. Own leaves once.")
        for known, some in alike:
            # A leaf that was here before comes back with a greater epoch, so that messages that
            # are late do not fit it any more.
            above = first_epoch(self.generation) if known is None else known.epoch + 1
            self._leaves.put(some, Known(OWNED, above, covered))
        mine = {*leaves} if leases else set()
        for run, epoch in leases:
            for known, some in self._leaves.alike([leaf for leaf in run if leaf in mine]):
                if known is not None and known.epoch <= epoch:
                    self._leaves.put(some, known._replace(epoch=epoch + 1))
        self.is_fenced = False
        self.barrier = max(self.barrier, covered)
        return []

    def disown(self, leaves: Iterable[int]) -> Leases:
        """These leaves go to another participant of this process, without a hand-over.

        Their leases are returned, to be passed to own() of that participant.
        """
        leaves = sorted(leaves)
        self.check_free(leaves)  # all of them, or none
        for known, some in self._leaves.alike(leaves):
            assert known is not None
            self._leaves.put(some, known._replace(state=NONE, peer=""))
        return self.leases(leaves)

    def check_free(self, leaves: Iterable[int]) -> None:
        """LeaseError if one of these is not ours, or if another process may have a claim to it."""
        for known, some in self._leaves.alike([*leaves]):
            if known is None or known.state is not OWNED or not known.is_closed:
                raise LeaseError(
                    f"leaf {some[0]} cannot go: it is {known.state if known else 'not here'}, or "
                    "where it came from has not let go. Wait for the migration."
                )

    # ---- Steps that both sides take

    def _add_to_parts(self, leaves: Iterable[int], known: Known) -> list[Action]:
        """Adds leaves to checkpoints that were taken here while these leaves were nobody's."""
        if known.covered >= self.barrier:
            return []
        return [AddToPart(n, tuple(leaves)) for n in self._parts if n > known.covered]

    def _end(self, leaf: int, known: Known) -> None:
        """The leaf is another's, in whatever state it was here."""
        outgoing = self._outgoing.get(known.migration)
        incoming = self._incoming.get(known.migration)
        if known.state is OFFERED or known.state is RETURNED:
            assert outgoing is not None
            outgoing.leaves.pop(leaf, None)
            outgoing.back.pop(leaf, None)
            outgoing.streamed.discard(leaf)
        elif incoming is not None:
            incoming.drop(leaf)
        self._leaves.put((leaf,), known._replace(state=NONE, is_closed=True))
        self._forget_if_over(known.migration)

    def _forget_if_over(self, migration: str) -> None:
        outgoing, incoming = self._outgoing.get(migration), self._incoming.get(migration)
        if outgoing is not None and outgoing.is_over:
            del self._outgoing[migration]
        if incoming is not None and incoming.is_over:
            del self._incoming[migration]

    def _whole_groups(
        self, leaves: Iterable[int], is_so: Callable[[Known | None], bool]
    ) -> list[int]:
        """Those of these leaves, ascending, in whose key-group is_so() holds for every leaf."""
        chosen = sorted(leaves)
        all_of_them = self._with_siblings(chosen)
        wrong: set[int] = set()
        for known, some in self._leaves.alike(all_of_them):
            if not is_so(known):
                wrong.update(leaf // self.subgroups for leaf in some)
        if not wrong:
            return chosen
        return [leaf for leaf in chosen if leaf // self.subgroups not in wrong]

    def _with_siblings(self, leaves: Sequence[int]) -> list[int]:
        """All leaves of the key-groups that these ascending leaves are of."""
        size = self.subgroups
        if size == 1:
            return [*leaves]
        found: list[int] = []
        for run in runs_of(leaves):
            start = max(run.start // size * size, found[-1] + 1 if found else 0)
            found += range(start, -(-run.stop // size) * size)
        return found

    def _where(self, sender: str, migration: str, leaf: int, epoch: int) -> Send:
        """The answer to a process that asks for a leaf at an epoch at which it is not offered."""
        known = self._leaves.get(leaf)
        if known is None or known.epoch < epoch:
            return self._to(sender, Never, migration, leaf, epoch)
        if known.state is EXPECTED:
            return self._to(sender, InTransit, migration, leaf, known.epoch)
        is_here = known.state in (OWNED, PARTIAL, RETURNED)
        to = self.name if is_here else known.peer
        return self._to(sender, Moved, migration, leaf, known.epoch, to)

    def _to(self, peer: str, kind: Callable[..., Any], migration: str, *fields: Any) -> Send:
        return Send(peer, kind(migration, self.generation, self._next(), *fields))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence
