"""Fetching: leaves that come because somebody needs them.

Whoever touches a leaf that is not here asks for it and waits; a batch asks for all its leaves at
once. Of two that want a leaf one asks and the other waits for that: the participant says who
(want, unanswered). Of large leaves the wanted entries are asked for first.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from statekit.errors import (
    DamagedError,
    FencedError,
    MigrationError,
    NotOwnedError,
    PeerError,
    PeerLostError,
    StateKitError,
)
from statekit.migration.departure import ENTRIES_PLACE, place_of
from statekit.migration.strategies import FETCHING
from statekit.native import Block
from statekit.native.block import block_pieces
from statekit.native.buffers import BufferSlice, unpinned
from statekit.native.frames import verify
from statekit.protocol.calls import FetchCall, PickCall, Piece, PieceKind
from statekit.protocol.messages import Fenced, Moved, Never
from statekit.remote.security import unbelieved
from statekit.residence.loading import Loading
from statekit.residence.sources import Wanted

if TYPE_CHECKING:
    from statekit.migration.arrival import Arrival

Keys: TypeAlias = tuple[tuple[str, tuple[bytes, ...]], ...]  # state, encoded keys
Steps: TypeAlias = list[bytes | BufferSlice]  # what to decode of a leaf, newest first

REQUEST_BYTES = 4 << 20  # of leaves that are asked for in one request
# Entries are asked for instead of leaves if these are larger, and so many times what the entries
# may take: then whoever waits has them sooner, and the leaves follow.
ENTRIES_FIRST_BYTES = 256 << 10
ENTRIES_SHARE = 4
ENTRY_BYTES = 128
REQUEST_KEYS = 4096  # in one request
LEASES_MAX = 65536  # in one request
_TRIES = 2  # for a leaf that arrives damaged: the old owner has it still


class Fetching:
    """What an arrival brings on demand."""

    def __init__(self, arrival: "Arrival") -> None:
        self._arrival = arrival
        self._failures: dict[int, PeerLostError] = {}  # of the last fetch of a leaf
        self.asked_at = 0.0  # when something was last asked for
        self.answer_s = 0.0  # about how long the answers take

    def bring(self, leaves: Sequence[int], loading: Loading) -> None:
        """See PushSource.bring()."""
        arrival = self._arrival
        if arrival.strategy not in FETCHING:
            with arrival.waited.on("queued"):
                for leaf in leaves:
                    arrival.wait_streamed(leaf)
            return
        mine = arrival.shell.want(arrival.id, leaves)
        asked = set(mine)
        try:
            for part in self._requests(mine):
                self._take_in(self.fetch(part), loading)
        except PeerLostError as error:
            self._failures.update(dict.fromkeys(mine, copy(error)))  # without its traceback
            raise
        finally:
            left = [leaf for leaf in mine if leaf in arrival.state.missing]
            if left:
                arrival.shell.unanswered(arrival.id, left)
                arrival.changed()
        for leaf in leaves:
            if leaf not in asked:
                self._await_asked(leaf, loading)

    def _take_in(self, found: Iterator[tuple[int, Steps]], loading: Loading) -> None:
        """Waits for what was asked for, leaf by leaf, and takes it in."""
        waited = self._arrival.waited
        while True:
            with waited.on("wire"):
                came = next(found, None)
            if came is None:
                return
            with waited.on("decode"):
                loading.fill(*came, self._arrival)

    def bring_keys(self, leaves: Sequence[int], wanted: Wanted, loading: Loading) -> None:
        """See PushSource.bring_keys()."""
        arrival = self._arrival
        missing = self._missing(leaves, loading)
        count = sum(map(len, wanted.values()))
        size = sum(map(arrival.sizes.__getitem__, missing))
        is_worth_it = size > max(ENTRIES_FIRST_BYTES, ENTRIES_SHARE * ENTRY_BYTES * count)
        if not is_worth_it or arrival.strategy not in FETCHING:
            self.bring(missing, loading)
            return
        for start in range(0, len(missing), LEASES_MAX):
            for keys in _portions(wanted):
                self._pick(missing[start : start + LEASES_MAX], keys, loading)

    def _missing(self, leaves: Iterable[int], loading: Loading) -> list[int]:
        """Those of these leaves that are to come.

        If one of the others was given back, or taken back, the participant knows it before the
        store does. Who looks in between must not find that it is neither to come nor gone.
        """
        missing = []
        for leaf in leaves:
            if leaf in self._arrival.state.missing:
                missing.append(leaf)
            else:
                loading.stand_still(leaf)
        return missing

    def bring_each(self, leaves: Iterable[int], loading: Loading) -> None:
        """Asks for leaves one by one. The source says why one is not there."""
        for leaf in leaves:
            try:
                for came, steps in self.fetch((leaf,)):
                    loading.fill(came, steps, self._arrival)
            except NotOwnedError:
                continue  # it was taken back: the reports see to that

    def _pick(self, leaves: Sequence[int], keys: Keys, loading: Loading) -> None:
        """Brings entries of leaves; or all of those that the source does not answer for."""
        arrival = self._arrival
        leases = arrival.leases(leaves)
        if not leases:
            return
        refused: Sequence[int] = ()
        with self._somebody_waits(leaves):
            with arrival.waited.on("wire"):
                call = PickCall(arrival.id, arrival.generation, leases, keys)
                reply = arrival.channel.pick(call)
            arrival.bytes_received += len(reply.blocks)
            try:
                self._check_place(reply.blocks, ENTRIES_PLACE, f"entries of leaf {leaves[0]}")
                with arrival.waited.on("decode"):
                    loading.spread(reply.blocks, [leaf for leaf, _ in leases], arrival)
                refused = reply.refused
            except DamagedError:
                refused = leaves
        self.bring([leaf for leaf in refused if leaf in arrival.state.missing], loading)

    @contextmanager
    def _somebody_waits(self, leaves: Sequence[int]) -> Iterator[None]:
        """Asks the source for something of leaves, which the stream gives way to."""
        began = self.asked_at = perf_counter()
        try:
            yield
            self.answer_s += (perf_counter() - began - self.answer_s) / 4
        except StateKitError as error:
            missing = self._arrival.state.missing
            if not any(leaf in missing for leaf in leaves):
                return  # they came by the stream, which may have ended everything
            if isinstance(error, PeerLostError):
                raise self.lost_leaf(leaves[0], error) from error
            raise

    def _await_asked(self, leaf: int, loading: Loading) -> None:
        """Waits for who has asked for the leaf; if that one fails, tries it here.

        Not if the peer was lost while we waited: then each of many would wait for its own time-out
        after that of the one before.
        """
        arrival, state = self._arrival, self._arrival.state
        before = self._failures.get(leaf)
        with arrival.waited.on("queued"):
            arrival.wait_for(lambda: leaf not in state.asked or leaf not in state.missing)
        is_here = not self._missing((leaf,), loading)
        failure = self._failures.get(leaf)
        if not is_here and failure is not None and failure is not before:
            raise copy(failure if failure.leaf == leaf else self.lost_leaf(leaf, failure))
        if not is_here and not arrival.is_cut_off:
            loading.load(leaf)

    def _requests(self, leaves: Sequence[int]) -> Iterator[list[int]]:
        """Leaves in portions that one request should bring."""
        part: list[int] = []
        size = 0
        for leaf in leaves:
            part.append(leaf)
            size += self._arrival.sizes[leaf]
            if size >= REQUEST_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part

    def fetch(self, leaves: Sequence[int]) -> Iterator[tuple[int, Steps]]:
        """Leaves that the source sends at once. Those that arrive damaged are asked for again."""
        for attempt in range(_TRIES):
            damaged: list[int] = []
            for piece, blocks in self._pieces(leaves):
                try:
                    steps = self.steps(piece, blocks)
                except DamagedError:
                    if attempt + 1 == _TRIES:
                        raise
                    damaged.append(piece.leaf)
                    continue
                self._arrival.fetches += 1
                yield piece.leaf, steps
            if not damaged:
                return
            leaves = damaged

    def _pieces(self, leaves: Sequence[int]) -> Iterator[tuple[Piece, bytes | BufferSlice]]:
        """Asks for leaves; the last piece of each, and its blocks."""
        arrival = self._arrival
        call = FetchCall(arrival.id, arrival.generation, arrival.leases(leaves))
        pieces = Pieces()
        with self._somebody_waits(leaves):
            for piece in arrival.channel.fetch(call):
                if piece.kind is not PieceKind.HERE:
                    self.refused(piece)
                elif pieces.add(piece, arrival.state.missing.get(piece.leaf)):
                    arrival.bytes_received += pieces.size
                    yield piece, pieces.take()

    # ---- What the source says

    def lost_leaf(self, leaf: int, error: StateKitError) -> StateKitError:
        """What whoever waits for a leaf is told, if the source does not answer."""
        if not isinstance(error, PeerLostError):
            return error
        arrival = self._arrival
        return PeerLostError(
            f"leaf {leaf} (key-group {leaf // arrival.subgroups}) cannot be had from "
            f"{arrival.source}, which does not answer: {error} What is here stays usable; the "
            "leaf is asked for again when it is touched.",
            peer=arrival.source,
            leaf=leaf,
            seconds=error.seconds,
        )

    def refused(self, piece: Piece) -> None:
        """The source says why a leaf is not there."""
        arrival, leaf, epoch = self._arrival, piece.leaf, piece.epoch
        if leaf not in arrival.state.missing:
            return  # it came by the stream while it was being asked for, and was let go of
        group, generation = leaf // arrival.subgroups, arrival.generation
        if piece.kind is PieceKind.FENCED:
            if not arrival.is_known:
                raise unbelieved(piece.generation, generation, arrival.source)
            arrival.reports.hear(Fenced(piece.generation))
            raise FencedError(
                f"{arrival.source} is of generation {piece.generation}, which began from a "
                "checkpoint: this process owns nothing any more. Restore it, or end it."
            )
        if piece.kind is PieceKind.NEVER:
            arrival.shell.tell(arrival.source_name, Never(arrival.id, generation, 0, leaf, epoch))
            raise MigrationError(
                f"{arrival.source} does not know leaf {leaf} (key-group {group}) of migration "
                f"{arrival.id}: it was started anew, perhaps. What has not come from it is lost; "
                "restore the key-groups that are not here from a checkpoint."
            )
        if piece.kind is PieceKind.IN_TRANSIT:
            raise MigrationError(
                f"leaf {leaf} (key-group {group}) is on its way to {arrival.source}, which does "
                "not have it yet. Try again."
            )
        if epoch <= arrival.state.missing.get(leaf, epoch - 1):
            raise MigrationError(
                f"leaf {leaf} (key-group {group}) was given to an earlier process of this home, "
                "which said that it was safe there, and it is not: was the home opened with "
                f"sync=0, and the power lost? Restore key-group {group} from a checkpoint."
            )
        arrival.reports.hear(Moved(arrival.id, generation, 0, leaf, epoch, piece.to))
        raise NotOwnedError(
            f"leaf {leaf} (key-group {group}) is not this provider's any more: it is at "
            f"{piece.to or arrival.source}. Route its keys there."
        )

    def _check_place(self, blocks: bytes | BufferSlice, place: int, what: str) -> None:
        """DamagedError if blocks are not of this migration and place, or damaged."""
        arrival = self._arrival
        bad = verify(blocks, arrival.pack_id, place) if blocks else None
        if bad is not None:
            raise DamagedError(
                f"{what} arrived damaged from {arrival.source} (byte {bad} of {len(blocks)}). "
                "It is there still: touch it to ask again."
            )

    def steps(self, last: Piece, blocks: bytes | BufferSlice) -> Steps:
        """What to decode, newest first. The leaf may be given back just now: ask the piece."""
        leaf, base = last.leaf, self._arrival.base
        self._check_place(blocks, place_of(leaf, last.epoch), f"leaf {leaf}")
        if not last.is_delta:
            return [blocks]
        if base is None:
            source = self._arrival.source
            raise PeerError(f"{source} sent changes of leaf {leaf} to nothing. Report this.")
        changes = bytes(blocks)
        steps: Steps = [changes] if changes else []
        full = {block.name for block in Block.each(changes) if not block.is_delta}
        for step in base.read_leaf(leaf):
            steps.append(_without(step, full) if full else step)
        return steps


class Pieces:
    """The pieces of a leaf, until all of them are there."""

    def __init__(self) -> None:
        self._leaf = -1
        self._parts: list[bytes | BufferSlice] = []
        self.size = 0  # bytes that have come of the leaf

    def add(self, piece: Piece, epoch: int | None) -> bool:
        """Whether the leaf is complete with it. Pieces of another lease are passed over.

        They follow each other: what was not complete when another leaf begins, never will be.
        """
        if piece.epoch != epoch:
            return False
        if piece.leaf != self._leaf:
            self._leaf, self._parts, self.size = piece.leaf, [], 0
        self._parts.append(piece.blocks if piece.is_last else unpinned(piece.blocks))
        self.size += len(piece.blocks)
        if self.size > piece.bytes_total:
            raise PeerError(f"more of leaf {piece.leaf} came than it was said to have.")
        return piece.is_last

    def take(self) -> bytes | BufferSlice:
        parts = self._parts
        self._leaf, self._parts, self.size = -1, [], 0
        return parts[0] if len(parts) == 1 else b"".join(map(bytes, parts))


def _portions(wanted: Wanted) -> Iterator[Keys]:
    """Keys in portions of which one request is made."""
    for state, keys in wanted.items():
        for start in range(0, len(keys), REQUEST_KEYS):
            yield ((state, tuple(keys[start : start + REQUEST_KEYS])),)


def _without(step: bytes, names: set[str]) -> bytes:
    """The blocks of a step, but for those of some states."""
    return b"".join(piece for block, piece in block_pieces(step) if block.name not in names)
