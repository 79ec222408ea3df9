"""Departure: the old owner's side of a hand-over. It keeps leaves as they were, and reads them out.

From the moment of the offer the leaves are shut: nothing changes them any more, so every reading of
one gives the same bytes, however often it is asked for. A leaf goes when its new owner has said
that all of it is there.

Whoever waits for a leaf comes first. The background stream holds still while a fetch is being
answered, sends hot leaves before cold ones, and never more than its reader has given credit for.

Blocks travel as checkpoints have them, with their checksums bound to the migration, the leaf and
the epoch (csrc/frames.c): what was damaged, or is of another time or place, is found out.
"""

import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from itertools import chain, compress, count
from time import monotonic
from typing import NamedTuple

from statekit.assignment import show_groups
from statekit.native.buffers import BufferSlice
from statekit.native.frames import bind, seal, verify
from statekit.native.kinds import residency_filter
from statekit.native.states import State
from statekit.native.timers import TimersState
from statekit.protocol.calls import CHUNK_BYTES, RANGES_MAX, Piece, PieceKind
from statekit.protocol.handover import Outgoing
from statekit.protocol.messages import Offer, runs_of
from statekit.residence.residence import Residence
from statekit.turns import short_turns

ID_BYTES = 16  # of a migration or a shadow
_YIELD_SECONDS_MAX = 0.0005  # that the stream holds still for those who wait
_LEAF_BITS = 20
ALWAYS_DUE, NEVER_DUE = -(1 << 63), (1 << 63) - 1
_IS_NOT_WHOLE = residency_filter("partial", "absent", "away")
ENTRIES_PLACE = (1 << 64) - 1  # what the checksums of single entries are bound to


def place_of(leaf: int, epoch: int) -> int:
    """What a leaf's checksums are bound to, beside the migration's id."""
    return (epoch << _LEAF_BITS | leaf) & (1 << 64) - 1


def bound_to(name: str, base: int, source: str = "") -> bytes:
    """What checksums of a copy are bound to beside its place: whose it is, and what it changes.

    So a delta that was made against something else is found out as if it were damaged. Each delta
    begins with it, since one that is empty has no checksums.
    """
    text = f"{name}/{base}/{source}"
    return blake2b(text.encode(), digest_size=ID_BYTES).digest()


def unbound(delta: bytes | BufferSlice, bound: bytes, place: int) -> bytes | None:
    """The blocks of a delta; None if it is damaged, or was made against something else."""
    data = bytes(delta)
    blocks = data[ID_BYTES:]
    if data[:ID_BYTES] != bound or (blocks and verify(blocks, bound, place) is not None):
        return None
    return blocks


class HandOverProgress(NamedTuple):
    """How far a hand-over is."""

    leaves_done: int
    leaves_total: int
    bytes: int  # of blocks, sent or received

    @property
    def fraction(self) -> float:
        return self.leaves_done / self.leaves_total if self.leaves_total else 1.0


class Departure:
    """Key-groups on their way to another process; see KVProvider.migrate()."""

    def __init__(
        self,
        offer: Offer,
        key_groups: tuple[range, ...],
        target: str,
        residence: Residence,
        state: Outgoing,
        since: "array[int] | None",
        abort: Callable[["Departure", bool], None],
    ) -> None:
        self.id = offer.migration
        self.key_groups = key_groups
        self.target = target
        self.offer = offer
        self.since = since  # per leaf: the epoch that the target's base has it of; 0: all of it
        self.state = state  # as the participant knows it: only read here
        self._residence = residence
        self._abort = abort
        self._pack_id = bytes.fromhex(offer.migration)
        self.leaves = [*chain.from_iterable(grant.leaves for grant in offer.grants)]
        #: About how large each is. What is not in memory is not known: it counts as small.
        self.sizes = array("Q")
        sizes = residence.store.leaf_sizes()
        for grant in offer.grants:
            self.sizes += sizes[grant.leaves.start : grant.leaves.stop]
        self.timer_leaves, self.timer_dues = _timer_leaves(residence, self.leaves)
        self._moved = threading.Condition()
        self._is_told = False  # who waits knows that it is over
        self._waiting = 0  # fetches that are being answered
        self.bytes_sent = 0

    # ---- What the user sees

    @property
    def progress(self) -> HandOverProgress:
        total = len(self.leaves) - self.state.returned
        return HandOverProgress(self.state.gone, total, self.bytes_sent)

    @property
    def done(self) -> bool:
        """Whether nothing is left here that the new owner may still ask for."""
        return self.state.is_over

    def wait(self, timeout: float | None = None) -> None:
        """Until the new owner has everything. TimeoutError if that takes longer."""
        with self._moved:
            if not self._moved.wait_for(lambda: self.done, timeout):
                done, total, _ = self.progress
                raise TimeoutError(
                    f"after {timeout} s {self.target} has {done} of {total} leaves. Wait again, "
                    "or abort() what it has not asked for."
                )

    def abort(self, *, target_is_dead: bool = False) -> None:
        """Takes back the key-groups of which nothing was sent, so that work goes on here.

        MigrationError names those that the target may have: it can still ask for the rest of
        them. target_is_dead: you know that it is gone for good. Then they come back too, as they
        were at the hand-over; what it did to them since is lost with it.
        """
        self._abort(self, target_is_dead)

    def __repr__(self) -> str:
        done, total, _ = self.progress
        return (
            f"<Departure of key-groups {show_groups(self.key_groups)} to {self.target}: "
            f"{done} of {total} leaves>"
        )

    # ---- What the peer calls

    def leases(self) -> tuple[tuple[int, int], ...]:
        """What was offered."""
        return tuple((leaf, one.epoch) for one in self.offer.grants for leaf in one.leaves)

    @cached_property
    def order(self) -> list[int]:
        """The leaves as the stream sends them: what was used most comes first."""
        return sorted(self.leaves, key=self._residence.store.heat().__getitem__, reverse=True)

    @property
    def is_returned(self) -> bool:
        """Whether all of it was taken back."""
        return self.state.is_over and not self.state.gone

    def changed(self) -> None:
        """What the participant knows of this hand-over has changed, or may have.

        Said of all hand-overs with each leaf that goes: those that are over cost nothing.
        """
        if self._is_told:
            return
        with self._moved:
            self._is_told = self.done
            self._moved.notify_all()

    @contextmanager
    def somebody_waits(self) -> Iterator[None]:
        """The stream holds still meanwhile."""
        with self._moved:
            self._waiting += 1
        try:
            with short_turns():
                yield
        finally:
            with self._moved:
                self._waiting -= 1
                self._moved.notify_all()

    def give_way(self) -> None:
        """Lets those go first who wait, for a bounded time."""
        if not self._waiting:
            return
        until = monotonic() + _YIELD_SECONDS_MAX
        with self._moved:
            self._moved.wait_for(lambda: not self._waiting, until - monotonic())

    # ---- Reading out

    def read(self, leaf: int, epoch: int) -> Iterator[Piece]:
        """All of a leaf, or what changed since the base."""
        since = 0 if self.since is None else self.since[leaf]
        blocks = self._encode(leaf, epoch, None, since)
        return self._pieces(leaf, epoch, blocks, is_delta=since > 0)

    def read_changes(self, leaf: int, epoch: int, since: int) -> list[Piece]:
        """What has changed in a leaf since an epoch, for a copy of that epoch.

        Its checksums are bound to that epoch too: it completes nothing else.
        """
        bound = bound_to(self.id, since)
        place = place_of(leaf, epoch)
        blocks = bound + self._residence.encode_shut(leaf, None, since, bound, place)
        return [*self._pieces(leaf, epoch, blocks, is_delta=True)]

    def pick(self, keys: Iterable[tuple[str, Sequence[bytes]]], leaves: Collection[int]) -> bytes:
        """Single entries of these leaves, which are whole here, as blocks that are of all leaves.

        Keys of other leaves are passed over: whoever asks may have no right to them.
        """
        store = self._residence.store
        known = {raw.name: raw for raw in store.states()}
        blocks = bytearray()
        marks = bytearray(store.leaves)
        for leaf in leaves:
            marks[leaf] = 1
        for name, some in keys:
            blocks += store.pick_many(known[name], some, marks)
        seal(blocks)
        bind(blocks, self._pack_id, ENTRIES_PLACE)
        self.bytes_sent += len(blocks)
        return bytes(blocks)

    def _encode(self, leaf: int, epoch: int, state: State | None, since: int = 0) -> bytes:
        place = place_of(leaf, epoch)
        return self._residence.encode_shut(leaf, state, since, self._pack_id, place)

    def _pieces(
        self,
        leaf: int,
        epoch: int,
        blocks: bytes,
        is_whole: bool = True,
        is_delta: bool = False,
    ) -> Iterator[Piece]:
        self.bytes_sent += len(blocks)
        yield from pieces_of(leaf, epoch, blocks, is_whole, is_delta)


def pieces_of(
    leaf: int, epoch: int, blocks: bytes, is_whole: bool = True, is_delta: bool = False
) -> Iterator[Piece]:
    """A leaf, cut as it is sent."""
    total = len(blocks)
    for at in range(0, total or 1, CHUNK_BYTES):
        stop = at + CHUNK_BYTES
        chunk = blocks if total <= CHUNK_BYTES else blocks[at:stop]
        yield Piece(PieceKind.HERE, leaf, epoch, chunk, stop >= total, is_whole, is_delta, total)


def _timer_leaves(
    residence: Residence, leaves: Sequence[int]
) -> tuple[tuple[range, ...], "array[int]"]:
    """Leaves that have timers, or may have; and when, at the earliest, the first is due in each.

    What is not in memory is not known: it may have timers that are due at any time.
    """
    states = [raw for raw in residence.store.states() if isinstance(raw, TimersState)]
    # A home may have some of a state that was not declared since it was opened.
    if not states and not any(schema.kind == "timers" for schema in residence.schemas):
        return (), array("q")
    store = residence.store
    dues = array("q", [NEVER_DUE]) * store.leaves
    residencies = store.residencies(array("I", leaves))
    found = {*compress(leaves, residencies.translate(_IS_NOT_WHOLE))}
    for leaf in found:
        dues[leaf] = ALWAYS_DUE
    for raw in states:
        found.update(compress(count(), store.leaf_entries(raw)))
        raw.lower_dues(dues)
    runs = runs_of(sorted(found.intersection(leaves)))
    # If they are too many for a message, some leaves between them come early too.
    step = -(-len(runs) // RANGES_MAX) or 1
    parts = (runs[at : at + step] for at in range(0, len(runs), step))
    ranges = tuple(range(part[0].start, part[-1].stop) for part in parts)
    told = array("q")
    for part in ranges:
        told += dues[part.start : part.stop]
    return ranges, told
