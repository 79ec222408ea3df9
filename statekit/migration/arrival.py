"""Arrival: the new owner's side of a hand-over. Leaves come when touched, and by themselves.

    on demand   whoever touches a leaf that is not here asks for it and waits; a batch asks for all
                its leaves at once; of two that want a leaf one asks and the other waits for that
    the stream  a thread takes in what the old owner sends by itself, as far as it is given credit
    reports     a thread tells the old owner what is here, so that it can forget it

Strategies say which of these there are:

    prioritised      on demand; the stream, hot leaves first. It gives way to those who wait
    on_demand        on demand only. Nothing comes that nobody asks for
    gradual          the stream only, leaf after leaf in their order ("fluid")
    gradual_batched  the stream only; leaves become usable in batches of a key-group's size
    all_at_once      the stream only, and fetch_from() returns when everything is here

A leaf that has come is ours whatever happens to the old owner. One that has not is the old
owner's, who keeps it, shut: nothing was written to it here, so that it can still be given back.

    locks    a leaf's gate (loading.py) is held while a leaf is taken in and the participant is
             told of it, all gates while leaves are given back: so a leaf that is being given back
             is not being taken in. The peer's lock comes after the gates.
"""

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from queue import SimpleQueue
from tempfile import SpooledTemporaryFile
from time import monotonic, perf_counter, sleep
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from statekit.assignment import show_groups
from statekit.errors import (
    ClosedError,
    DamagedError,
    FencedError,
    MigrationError,
    NotOwnedError,
    PeerError,
    PeerLostError,
    StateKitError,
    temporary_failed,
)
from statekit.live.job import CheckpointJob
from statekit.migration.departure import ENTRIES_PLACE, Progress, place_of
from statekit.native import Block
from statekit.native.block import block_pieces, rewrite
from statekit.native.buffers import Part, unpinned
from statekit.native.frames import verify
from statekit.protocol.calls import (
    BeginReply,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    PickCall,
    Piece,
    PieceKind,
    StreamCall,
)
from statekit.protocol.messages import GivenBack, Here, Moved, Never, Released
from statekit.remote.security import unbelieved
from statekit.residence.loading import Loading
from statekit.residence.sources import PullSource, PushSource, Wanted

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel, PeerStream

Strategy: TypeAlias = Literal[
    "prioritised", "on_demand", "gradual", "gradual_batched", "all_at_once"
]
Keys: TypeAlias = tuple[tuple[str, tuple[bytes, ...]], ...]  # state, encoded keys
Steps: TypeAlias = list[bytes | Part]  # what to decode of a leaf, newest first
STRATEGIES: tuple[str, ...] = get_args(Strategy)
_FETCHING = ("prioritised", "on_demand")  # strategies in which touching a leaf asks for it

REQUEST_BYTES = 4 << 20  # of leaves that are asked for in one request
# Entries are asked for instead of leaves if these are larger, and so many times what the entries
# may take: then whoever waits has them sooner, and the leaves follow.
ENTRIES_FIRST_BYTES = 256 << 10
ENTRIES_SHARE = 4
ENTRY_BYTES = 128
REQUEST_KEYS = 4096  # in one request
LEASES_MAX = 65536  # in one request
WINDOW_BYTES = 16 << 20  # that the stream may be ahead of us
TARGET_SECONDS = 0.004  # that an answer may take; the stream gives way so that it does
PACED_SECONDS = 0.1  # after an answer was last asked for
PAUSE_SECONDS_MIN = 0.0005  # of the stream, after each leaf
PAUSE_SHARE = 3  # times as long as the leaf took, at most
REPORTS_MAX = 1024  # leaves in one report
REPORT_SECONDS = 0.02  # that a report waits for others to come along
RETRY_SECONDS = 1.0  # before a peer that was lost is told again what it must know
CLOSE_SECONDS = 2.0  # to give back what has not come, when the provider is closed
KEPT_BYTES = 16 << 20  # of leaves kept for a checkpoint in memory; the rest waits in a file
_TRIES = 2  # for a leaf that arrives damaged: the old owner has it still


class Receiver(Protocol):
    """The peer that leaves come to (taking.py)."""

    subgroups: int

    @property
    def loading(self) -> Loading | None: ...

    def tell(self, sender: str, message: Any) -> None:
        """The participant is to know of this."""

    def fence(self, generation: int) -> None:
        """A later generation has begun."""

    def end_leases(self, arrival: "Arrival", ended: Sequence[Moved]) -> None:
        """The source has taken leaves back."""

    def abandon(self, arrival: "Arrival") -> tuple[range, ...]:
        """Gives up what has not come from one who is dead."""

    def return_leaves(self, arrival: "Arrival") -> tuple[range, ...]:
        """Gives back what has not come."""

    def return_at_end(self, arrival: "Arrival") -> None:
        """The same when the provider is being closed."""

    def finish(self, arrival: "Arrival") -> None:
        """Everything is here, and the source knows."""

    def forget(self, arrival: "Arrival") -> None:
        """It is closed."""


class Arrival(PushSource):
    """Key-groups on their way here from another process; see KVProvider.fetch_from()."""

    advice = "It was made like that where it comes from; the other leaves are not affected."

    def __init__(
        self,
        peer: Receiver,
        channel: "PeerChannel",
        reply: BeginReply,
        key_groups: tuple[range, ...],
        strategy: str,
        base: PullSource | None,
        is_known: bool,
    ) -> None:
        offer = reply.offer
        self.id = offer.migration
        self.key_groups = key_groups
        self.strategy = strategy
        self.source = channel.address
        self._peer = peer
        self._channel = channel
        self._offer = offer
        self._pack_id = bytes.fromhex(offer.migration)
        self._base = base  # what the leaves were some time ago, where both sides can read it
        self._is_known = is_known  # the source has shown who it is
        self._epochs: dict[int, int] = {}
        self._sizes = array("Q", bytes(8 * reply.key_groups * reply.subgroups))  # by leaf
        at = 0
        for leaves, epoch, _ in offer.grants:
            self._epochs.update(dict.fromkeys(leaves, epoch))
            self._sizes[leaves.start : leaves.stop] = reply.sizes[at : at + len(leaves)]
            at += len(leaves)
        self._timer_leaves = [
            leaf for part in reply.timer_leaves for leaf in part if leaf in self._epochs
        ]
        self._moved = threading.Condition()  # of all below
        self._missing = set(self._epochs)  # not here as a whole
        self._claimed: set[int] = set()  # being fetched, by somebody
        self._failures: dict[int, PeerLostError] = {}  # of the last fetch of a leaf
        self._asked_at = 0.0  # when something was last asked for on demand
        self._answer_s = 0.0  # about how long the answers take
        self._pause_s = 0.0  # that the stream stands still at each leaf, for that reason
        self._awaiting = 0  # threads that wait for a leaf that somebody else brings
        self._unreported: list[int] = []  # here, and the source does not know
        self._partial: list[int] = []  # of which the rest is to be fetched
        self._ended: list[Moved] = []  # leases that ended, as the source says
        self._returned: list[tuple[int, int]] = []  # given back, and the source does not know
        self._returning = threading.Lock()  # held by who tells it
        self._fenced_by = 0  # a later generation, that the source is of
        self._kept: list[_Kept] = []
        self._error: StateKitError | None = None  # why nothing comes by itself any more
        self._is_closed = False
        self._is_settled = False  # everything is here, the source knows, and so does the provider
        self._streaming: threading.Thread | None = None
        self._reporting: threading.Thread | None = None
        #: Adds to our part of the last checkpoint what its source had not passed the barrier of.
        #: (KVProvider.late_parts() has all that was added to one.)
        self.late_checkpoint: CheckpointJob | None = None
        self.bytes_received = 0
        self.fetches = 0  # leaves that came on demand

    # ---- What the user sees

    @property
    def progress(self) -> Progress:
        total = len(self._epochs)
        return Progress(total - len(self._missing), total, self.bytes_received)

    @property
    def is_based(self) -> bool:
        """Whether only what changed since a checkpoint comes from the source."""
        return self._base is not None

    @property
    def done(self) -> bool:
        """Whether everything is here."""
        return not self._missing

    @property
    def error(self) -> StateKitError | None:
        """Why nothing comes by itself any more; None while it does. A touch tries again."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Until everything is here, and the old owner knows it.

        Raises what keeps it from coming, such as PeerLostError, and TimeoutError.
        """
        if not self.wait_here(timeout):
            done, total, _ = self.progress
            raise TimeoutError(
                f"after {timeout} s {done} of {total} leaves are here from {self.source}. "
                "Wait again; what is not here comes when it is touched."
            )

    def wait_here(self, timeout: float | None) -> bool:
        until = None if timeout is None else monotonic() + timeout
        self.start_stream()
        with self._moved:
            while not self._is_over():
                if self._error is not None:
                    raise copy(self._error)
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    return False
                self._moved.wait(left)
            if self._missing:
                raise ClosedError("the provider was closed before all leaves had come.")
        return True

    def _is_over(self) -> bool:
        if self._missing:
            return self._is_closed
        return self._is_settled or self._error is not None  # untold, but all of it is here

    @property
    def is_settled(self) -> bool:
        return self._is_closed or self._is_finished()

    @property
    def is_ended(self) -> bool:
        return self._is_settled and self._is_finished()

    def wait_reported(self, leaves: "set[int]", until: float) -> None:
        """Until the source has let go of these leaves. MigrationError if it does not in time."""
        with self._moved:
            self._awaiting += 1
            try:
                is_told = self._moved.wait_for(
                    lambda: (
                        leaves.isdisjoint(self._missing) and leaves.isdisjoint(self._unreported)
                    ),
                    until - monotonic(),
                )
            finally:
                self._awaiting -= 1
        if not is_told:
            raise MigrationError(
                f"leaves that came from {self.source} cannot go on yet: it has not let go of "
                "them. Try again when it answers."
            )

    def give_back(self) -> tuple[range, ...]:
        """Gives the key-groups back of which nothing has come; which ones.

        The old owner goes on with them. Those of which something is here come as before.
        """
        return self._peer.return_leaves(self)

    def abandon(self) -> tuple[range, ...]:
        """You know that the old owner is gone for good: what has not come is given up.

        Key-groups that are here as a whole stay, and may go on. The others are not this provider's
        any more and are returned: restore these from a checkpoint. (Hand-overs between the same
        two, either way, end with it.)
        """
        lost = self._peer.abandon(self)
        with self._moved:
            self._moved.wait_for(lambda: self._is_settled or self._is_closed, CLOSE_SECONDS)
        return lost

    def __repr__(self) -> str:
        done, total, _ = self.progress
        return (
            f"<Arrival of key-groups {show_groups(self.key_groups)} from {self.source}: "
            f"{done} of {total} leaves, {self.strategy}>"
        )

    # ---- On demand

    def bring(self, leaves: Sequence[int], loading: Loading) -> None:
        if self.strategy not in _FETCHING:
            for leaf in leaves:
                self._await(leaf)
            return
        mine = self._claim(leaves)
        claimed = set(mine)
        try:
            for part in self._requests(mine):
                for leaf, steps in self._fetch(part):
                    loading.fill(leaf, steps, self)
                    self._unclaim((leaf,))
        except PeerLostError as error:
            with self._moved:
                self._failures.update(dict.fromkeys(mine, copy(error)))  # without its traceback
            raise
        finally:
            self._unclaim(mine)
        for leaf in leaves:
            if leaf not in claimed:
                self._await_claim(leaf, loading)

    def bring_keys(self, leaves: Sequence[int], wanted: Wanted, loading: Loading) -> None:
        missing = [leaf for leaf in leaves if leaf in self._missing]
        count = sum(map(len, wanted.values()))
        size = sum(map(self._sizes.__getitem__, missing))
        is_worth_it = size > max(ENTRIES_FIRST_BYTES, ENTRIES_SHARE * ENTRY_BYTES * count)
        if not is_worth_it or self.strategy not in _FETCHING:
            self.bring(missing, loading)
            return
        for start in range(0, len(missing), LEASES_MAX):
            for keys in _portions(wanted):
                self._pick(missing[start : start + LEASES_MAX], keys, loading)

    def _pick(self, leaves: Sequence[int], keys: Keys, loading: Loading) -> None:
        """Brings entries of leaves; or all of those that the source does not answer for."""
        epochs = self._epochs
        leases = tuple((leaf, epochs[leaf]) for leaf in leaves if leaf in epochs)
        if not leases:
            return
        refused: Sequence[int] = ()
        with self._somebody_waits(leaves):
            reply = self._channel.pick(PickCall(self.id, self._offer.generation, leases, keys))
            self.bytes_received += len(reply.blocks)
            try:
                self._check_place(reply.blocks, ENTRIES_PLACE, f"entries of leaf {leaves[0]}")
                loading.spread(reply.blocks, [leaf for leaf, _ in leases], self)
                refused = reply.refused
            except DamagedError:
                refused = leaves
        self.bring([leaf for leaf in refused if leaf in self._missing], loading)

    @contextmanager
    def _somebody_waits(self, leaves: Sequence[int]) -> Iterator[None]:
        """Asks the source for something of leaves, which the stream gives way to."""
        began = self._asked_at = perf_counter()
        try:
            yield
            self._answer_s += (perf_counter() - began - self._answer_s) / 4
        except StateKitError as error:
            if self._missing.isdisjoint(leaves):
                return  # they came by the stream, which may have ended everything
            if isinstance(error, PeerLostError):
                raise self._lost_leaf(leaves[0], error) from error
            raise

    def _claim(self, leaves: Iterable[int]) -> list[int]:
        """Those of these leaves that nobody else is fetching."""
        with self._moved:
            mine = [leaf for leaf in leaves if leaf in self._missing and leaf not in self._claimed]
            self._claimed.update(mine)
        return mine

    def _unclaim(self, leaves: Sequence[int]) -> None:
        with self._moved:
            if self._claimed.isdisjoint(leaves):
                return
            self._claimed.difference_update(leaves)
            self._moved.notify_all()

    def _await_claim(self, leaf: int, loading: Loading) -> None:
        """Waits for who fetches the leaf; if that one fails, tries it here.

        Not if the peer was lost while we waited: then each of many would wait for its own time-out
        after that of the one before.
        """
        with self._moved:
            before = self._failures.get(leaf)
            self._awaiting += 1
            try:
                self._moved.wait_for(lambda: leaf not in self._claimed or leaf not in self._missing)
            finally:
                self._awaiting -= 1
            is_here = leaf not in self._missing
            failure = self._failures.get(leaf)
        if not is_here and failure is not None and failure is not before:
            raise copy(failure if failure.leaf == leaf else self._lost_leaf(leaf, failure))
        if not is_here and not self._is_closed:
            loading.load(leaf)

    def _await(self, leaf: int) -> None:
        """Waits until the stream has brought the leaf."""
        self.start_stream()
        with self._moved:
            self._awaiting += 1
            try:
                while leaf in self._missing:
                    if self._is_closed:
                        raise ClosedError("the provider was closed while a leaf was on its way.")
                    if self._error is not None:
                        raise copy(self._lost_leaf(leaf, self._error))
                    self._moved.wait()
            finally:
                self._awaiting -= 1

    def _requests(self, leaves: Sequence[int]) -> Iterator[list[int]]:
        """Leaves in portions that one request should bring."""
        part: list[int] = []
        size = 0
        for leaf in leaves:
            part.append(leaf)
            size += self._sizes[leaf]
            if size >= REQUEST_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part

    def _fetch(self, leaves: Sequence[int]) -> Iterator[tuple[int, Steps]]:
        """Leaves that the source sends at once. Those that arrive damaged are asked for again."""
        for attempt in range(_TRIES):
            damaged: list[int] = []
            for piece, blocks in self._pieces(leaves):
                try:
                    steps = self._steps(piece, blocks)
                except DamagedError:
                    if attempt + 1 == _TRIES:
                        raise
                    damaged.append(piece.leaf)
                    continue
                self.fetches += 1
                yield piece.leaf, steps
            if not damaged:
                return
            leaves = damaged

    def _pieces(self, leaves: Sequence[int]) -> Iterator[tuple[Piece, bytes | Part]]:
        """Asks for leaves; the last piece of each, and its blocks."""
        epochs = self._epochs
        leases = tuple((leaf, epochs[leaf]) for leaf in leaves if leaf in epochs)
        parts = _Parts()
        with self._somebody_waits(leaves):
            for piece in self._channel.fetch(FetchCall(self.id, self._offer.generation, leases)):
                if piece.kind is not PieceKind.HERE:
                    self._refused(piece)
                elif parts.add(piece, self._epochs):
                    blocks = parts.take()
                    self.bytes_received += len(blocks)
                    yield piece, blocks

    def _lost_leaf(self, leaf: int, error: StateKitError) -> StateKitError:
        if not isinstance(error, PeerLostError):
            return error
        return PeerLostError(
            f"leaf {leaf} (key-group {leaf // self._peer.subgroups}) cannot be had from "
            f"{self.source}, which does not answer: {error} What is here stays usable; the leaf is "
            "asked for again when it is touched.",
            peer=self.source,
            leaf=leaf,
            seconds=error.seconds,
        )

    def _refused(self, piece: Piece) -> None:
        """The source says why a leaf is not there."""
        leaf, epoch = piece.leaf, piece.epoch
        if leaf not in self._missing:
            return  # it came by the stream while it was being asked for, and was let go of
        group = leaf // self._peer.subgroups
        if piece.kind is PieceKind.FENCED and not self._is_known:
            raise unbelieved(piece.generation, self._offer.generation, self.source)
        if piece.kind is PieceKind.FENCED:
            # By another thread: this one may hold locks that come after those of fencing.
            with self._moved:
                self._fenced_by = max(self._fenced_by, piece.generation)
                self._moved.notify_all()
            self._start_reports()
            raise FencedError(
                f"{self.source} is of generation {piece.generation}, which began from a "
                "checkpoint: this process owns nothing any more. Restore it, or end it."
            )
        if piece.kind is PieceKind.NEVER:
            never = Never(self.id, self._offer.generation, 0, leaf, epoch)
            self._peer.tell(self._offer.source, never)
            raise MigrationError(
                f"{self.source} does not know leaf {leaf} (key-group {group}) of migration "
                f"{self.id}: it was started anew, perhaps. What has not come from it is lost; "
                "restore the key-groups that are not here from a checkpoint."
            )
        if piece.kind is PieceKind.IN_TRANSIT:
            raise MigrationError(
                f"leaf {leaf} (key-group {group}) is on its way to {self.source}, which does not "
                "have it yet. Try again."
            )
        moved = Moved(self.id, self._offer.generation, 0, leaf, epoch, piece.to)
        with self._moved:
            self._ended.append(moved)
            self._moved.notify_all()
        self._start_reports()
        raise NotOwnedError(
            f"leaf {leaf} (key-group {group}) is not this provider's any more: it is at "
            f"{piece.to or self.source}. Route its keys there."
        )

    def _check_place(self, blocks: bytes | Part, place: int, what: str) -> None:
        """DamagedError if blocks are not of this migration and place, or damaged."""
        bad = verify(blocks, self._pack_id, place) if blocks else None
        if bad is not None:
            raise DamagedError(
                f"{what} arrived damaged from {self.source} (byte {bad} of {len(blocks)}). "
                "It is there still: touch it to ask again."
            )

    def _steps(self, last: Piece, blocks: bytes | Part) -> Steps:
        """What to decode, newest first. The leaf may be given back just now: ask the piece."""
        leaf = last.leaf
        self._check_place(blocks, place_of(leaf, last.epoch), f"leaf {leaf}")
        if last.is_delta and self._base is None:
            raise PeerError(f"{self.source} sent changes of leaf {leaf} to nothing. Report this.")
        if self._base is None or not last.is_delta:
            return [blocks]
        changes = bytes(blocks)
        steps: Steps = [changes] if changes else []
        full = {block.name for block in Block.each(changes) if not block.is_delta}
        for step in self._base.read_leaf(leaf):
            steps.append(_without(step, full) if full else step)
        return steps

    # ---- What has come

    def taken(self, leaf: int, steps: Sequence[bytes | Part] | None) -> None:
        """Under the leaf's gate: the participant learns of it before anybody can give it back."""
        is_whole = steps is not None
        here = Here(self.id, self._offer.generation, 0, leaf, self._epochs[leaf], is_whole, None)
        self._peer.tell(self._offer.source, here)
        if steps is not None:
            for kept in [*self._kept]:
                kept.keep(leaf, steps)
        with self._moved:
            is_news = not (self._unreported or self._partial)
            if not is_whole:
                self._partial.append(leaf)
            elif leaf in self._missing:
                self._missing.discard(leaf)
                self._unreported.append(leaf)
            # Every leaf wakes whoever waits for leaves, but not who waits for the last one.
            if is_news or self._awaiting or not self._missing:
                self._moved.notify_all()
        if self._reporting is None:
            self._start_reports()

    def wait_taken(self, leaf: int) -> None:
        """Until whoever takes in a leaf, that is here, has said so."""
        with self._moved:
            self._awaiting += 1
            try:
                self._moved.wait_for(lambda: leaf not in self._missing or self._is_closed)
            finally:
                self._awaiting -= 1

    def expects(self, leaf: int) -> bool:
        return leaf in self._missing

    def missing(self) -> set[int]:
        """The leaves that are not here as a whole."""
        return set(self._missing)

    def forget(self, leaves: Iterable[int]) -> None:
        """Leaves are not to come any more."""
        with self._moved:
            for leaf in leaves:
                self._missing.discard(leaf)
                self._epochs.pop(leaf, None)
            self._moved.notify_all()

    def abandoned(self, leaves: Iterable[int]) -> None:
        """The source is dead: there is nobody to be told anything, and nothing more comes."""
        with self._moved:
            self._missing.clear()
            self._fenced_by = 0
            for leaf in leaves:
                self._epochs.pop(leaf, None)
            self._unreported, self._returned, self._ended, self._partial = [], [], [], []
            self._error = None
            self._moved.notify_all()
        self._start_reports()  # which ends it

    def bring_timers(self, loading: Loading) -> None:
        """Brings the leaves that have timers, which must be in sight to fire."""
        with self._moved:
            leaves = [leaf for leaf in self._timer_leaves if leaf in self._missing]
            self._timer_leaves = leaves
        if leaves:
            loading.load_many(leaves)

    # ---- By itself

    def start(self) -> None:
        if self.strategy != "on_demand":
            self.start_stream()

    def start_stream(self) -> None:
        """Has a thread take in what the source sends; one that waits to try again does so now."""
        with self._moved:
            if self._is_closed or not self._missing:
                return
            if self._error is not None:
                self._error = None
                self._moved.notify_all()
            if self._streaming is None:
                self._streaming = threading.Thread(
                    target=self._run_stream, name="statekit-arrival", daemon=True
                )
                self._streaming.start()

    def _run_stream(self) -> None:
        first = self._timer_leaves if self.strategy == "prioritised" else sorted(self._missing)
        while self._missing and not self._is_closed:
            before = len(self._missing)
            try:
                self._take_stream(tuple(leaf for leaf in first if leaf in self._missing))
                if self._missing and len(self._missing) == before:
                    self._ask_rest()
            except StateKitError as error:
                if not self._may_retry(error):
                    break
            except Exception as error:  # nobody foresaw it, and nobody must wait for ever
                unforeseen = PeerError(
                    f"leaves from {self.source} cannot be taken in: {error!r}. Report this."
                )
                self._may_retry(unforeseen)
                break
            first = sorted(self._missing)
        with self._moved:
            self._streaming = None
            self._moved.notify_all()
            is_asked = self._error is None  # again, while this thread was about to end
        if is_asked:
            self.start_stream()

    def _may_retry(self, error: StateKitError) -> bool:
        """Tells who waits what the matter is; True after a while if the peer may come back."""
        if self._is_closed:
            return False
        with self._moved:
            self._error = copy(error)  # without a traceback, which would hold blocks and us
            self._moved.notify_all()
            if not isinstance(error, PeerLostError):
                return False
            self._moved.wait_for(lambda: self._is_closed or self._error is None, RETRY_SECONDS)
        return True

    def _take_stream(self, first: tuple[int, ...]) -> None:
        received = granted = 0
        batch: list[tuple[int, Steps]] = []
        batch_size = self._peer.subgroups if self.strategy == "gradual_batched" else 1
        call = StreamCall(self.id, self._offer.generation, first)
        stream = self._channel.stream(call, credit=WINDOW_BYTES)
        try:
            began = perf_counter()
            for leaf, steps, size in self._read_ahead(stream):
                if self._is_closed:
                    return
                self._error = None
                received += size
                if steps is not None:
                    batch.append((leaf, steps))
                    if len(batch) >= batch_size:
                        self._fill(batch)
                self._give_way(perf_counter() - began)
                began = perf_counter()
                if received - granted >= WINDOW_BYTES // 4:  # not for every leaf: it is a message
                    granted = received
                    stream.grant(received + WINDOW_BYTES)
            self._fill(batch)
        finally:
            stream.close()

    def _read_ahead(self, stream: "PeerStream") -> Iterator[tuple[int, Steps | None, int]]:
        """Leaves of a stream, received and checked by a thread while others are being decoded.

        Leaf, what to decode if that is complete, bytes. Both threads have about as much to do; how
        far this one is ahead is bounded by the credit that the stream has.
        """
        inbox: SimpleQueue[tuple[int, Steps | None, int] | StateKitError | None] = SimpleQueue()

        def receive() -> None:
            try:
                for item in self._receive(stream):
                    inbox.put(item)
                inbox.put(None)
            except StateKitError as error:
                inbox.put(error)
            except BaseException as error:
                inbox.put(PeerError(f"a stream from {self.source} cannot be read: {error!r}."))
                raise

        threading.Thread(target=receive, name="statekit-receive", daemon=True).start()
        while (item := inbox.get()) is not None:
            if isinstance(item, StateKitError):
                raise item
            yield item

    def _receive(self, stream: "PeerStream") -> Iterator[tuple[int, Steps | None, int]]:
        parts = _Parts()
        for piece in stream:
            if piece.kind is not PieceKind.HERE:
                with suppress(NotOwnedError):
                    self._refused(piece)
                continue
            steps: Steps | None = None
            if parts.add(piece, self._epochs):
                blocks = parts.take()
                self.bytes_received += len(blocks)
                with suppress(DamagedError):  # it is asked for again
                    steps = self._steps(piece, blocks)
            yield piece.leaf, steps, len(piece.blocks)

    def _fill(self, batch: list[tuple[int, Steps]]) -> None:
        loading = self._peer.loading
        for leaf, steps in batch:
            if loading is not None:
                loading.fill(leaf, steps, self)
        batch.clear()

    def _give_way(self, worked_s: float) -> None:
        """Lets those go first who wait: the slower they are answered, the longer it stands still.

        At most so many times as long as it has worked: the stream is what ends the waiting.
        """
        if self.strategy != "prioritised" or perf_counter() - self._asked_at > PACED_SECONDS:
            self._pause_s = 0.0
            return
        if self._answer_s > TARGET_SECONDS:
            self._pause_s = min(1.5 * self._pause_s + PAUSE_SECONDS_MIN, PAUSE_SHARE * worked_s)
        else:
            self._pause_s *= 0.8
        if self._pause_s > PAUSE_SECONDS_MIN:
            sleep(self._pause_s)

    def _ask_rest(self) -> None:
        """The stream brought nothing, and something is missing: the source says why."""
        loading = self._peer.loading
        if loading is None:
            return
        for part in self._requests(sorted(self._missing)):
            for leaf in part:
                try:
                    for came, steps in self._fetch((leaf,)):
                        loading.fill(came, steps, self)
                except NotOwnedError:
                    continue  # it was taken back: housekeeping knows
        self._settle_ended()

    # ---- Reports

    def _start_reports(self) -> None:
        with self._moved:
            if self._reporting is None and not self._is_closed:
                self._reporting = threading.Thread(
                    target=self._run_reports, name="statekit-reports", daemon=True
                )
                self._reporting.start()

    def _run_reports(self) -> None:
        """Tells the source what is here, fetches the rest of leaves; ends when all is done."""
        try:
            while self._wait_for_chores():
                self._do_chores()
            if not self._is_closed:
                self._peer.finish(self)
        finally:
            with self._moved:
                self._reporting = None
                self._is_settled = True
                self._moved.notify_all()

    def _wait_for_chores(self) -> bool:
        with self._moved:
            self._moved.wait_for(self._has_chores)
            if self._is_closed or self._is_finished():
                return False
            self._moved.wait(REPORT_SECONDS)  # others come along
            return True

    def _do_chores(self) -> None:
        with self._moved:
            partial, self._partial = self._partial, []
        try:
            if self._fenced_by:
                self._peer.fence(self._fenced_by)
            self._settle_ended()
            self._report()
            self.send_returned()
            if partial and self._streaming is None:
                self._bring_rest(partial)
        except Exception as error:  # also what nobody foresaw: it is tried again
            known = error if isinstance(error, StateKitError) else PeerError(repr(error))
            with self._moved:
                if self._error is None and self._streaming is None:
                    self._error = copy(known)
                self._partial += partial
                self._moved.notify_all()
                self._moved.wait_for(lambda: self._is_closed, RETRY_SECONDS)

    def _has_chores(self) -> bool:
        return (
            bool(self._is_closed or self._unreported or self._ended or self._partial)
            or bool(self._returned or self._fenced_by)
            or self._is_finished()
        )

    def _is_finished(self) -> bool:
        is_open = self._missing or self._unreported or self._ended or self._returned
        return not (is_open or self._fenced_by)

    def _report(self) -> None:
        while self._unreported and not self._is_closed:
            with self._moved:
                leaves = self._unreported[:REPORTS_MAX]
                leases = [(leaf, self._epochs[leaf]) for leaf in leaves if leaf in self._epochs]
            generation = self._offer.generation
            call = InstalledCall(self.id, generation, tuple(leases))
            released = set(self._channel.installed(call)) if leases else set()
            for leaf, epoch in released:
                self._peer.tell(self._offer.source, Released(self.id, generation, 0, leaf, epoch))
            if kept := [lease for lease in leases if lease not in released]:
                self._ask_why(kept)
            with self._moved:
                del self._unreported[: len(leaves)]
                self._moved.notify_all()

    def _ask_why(self, leases: Sequence[tuple[int, int]]) -> None:
        """The source does not let go of leaves: it was told that we are dead, and took them back.

        Then they are not ours any more, whatever we have done with them.
        """
        for piece in self._channel.fetch(FetchCall(self.id, self._offer.generation, tuple(leases))):
            leaf = piece.leaf
            if piece.kind is PieceKind.MOVED and piece.epoch > self._epochs.get(leaf, 1 << 64):
                self._ended.append(
                    Moved(self.id, self._offer.generation, 0, leaf, piece.epoch, piece.to)
                )
        self._settle_ended()

    def returning(self, leases: Iterable[tuple[int, int]]) -> None:
        """Leaves are the source's again, which send_returned() tells it."""
        with self._moved:
            self._returned += leases

    def unheard(self) -> tuple[tuple[int, int], ...]:
        """What was given back, and the source may not know."""
        with self._moved:
            return tuple(self._returned)

    def send_returned(self) -> None:
        """Tells the source what was given back. If it does not answer, it is told again later.

        Until it knows nobody has these leaves: we let nothing in any more, and it waits for us.
        """
        try:
            with self._returning:
                leases = self.unheard()
                if not leases:
                    return
                self.send_back(leases)
                generation = self._offer.generation
                self._peer.tell(self._offer.source, GivenBack(self.id, generation, 0, leases))
                with self._moved:
                    told = set(leases)
                    self._returned = [lease for lease in self._returned if lease not in told]
                    self._moved.notify_all()
        finally:
            self._start_reports()  # which also ends an arrival of which nothing is left

    def _bring_rest(self, leaves: Iterable[int]) -> None:
        loading = self._peer.loading
        if loading is not None:
            for leaf in leaves:
                if leaf in self._missing:
                    loading.load(leaf)

    def _settle_ended(self) -> None:
        with self._moved:
            ended, self._ended = self._ended, []
        if ended:
            self._peer.end_leases(self, ended)

    # ---- For checkpoints

    def to_read(self) -> PullSource:
        kept = _Kept(self)
        self._kept.append(kept)
        return kept

    def unshare(self, kept: "_Kept") -> None:
        self._kept.remove(kept)

    # ---- The end

    def release(self) -> None:
        with self._moved:
            self._is_closed = True
            is_open = bool(self._missing or self._returned)
            self._moved.notify_all()
        if is_open:
            self._peer.return_at_end(self)
        self._peer.forget(self)
        self._channel.close()
        if self._base is not None:
            self._base.release()

    def close_channel(self) -> None:
        """Nothing more is asked of the source."""
        self._channel.close()

    def send_back(
        self, leases: tuple[tuple[int, int], ...], timeout_s: float | None = None
    ) -> None:
        call = GiveBackCall(self.id, self._offer.generation, leases)
        self._channel.give_back(call, timeout_s=timeout_s)


class _Parts:
    """The pieces of a leaf, until all of them are there."""

    def __init__(self) -> None:
        self._leaf = -1
        self._parts: list[bytes | Part] = []
        self._bytes = 0

    def add(self, piece: Piece, epochs: dict[int, int]) -> bool:
        """Whether the leaf is complete with it. Pieces of other leases are passed over.

        They follow each other: what was not complete when another leaf begins, never will be.
        """
        if epochs.get(piece.leaf) != piece.epoch:
            return False
        if piece.leaf != self._leaf:
            self._leaf, self._parts, self._bytes = piece.leaf, [], 0
        self._parts.append(piece.blocks if piece.is_last else unpinned(piece.blocks))
        self._bytes += len(piece.blocks)
        if self._bytes > piece.bytes_total:
            raise PeerError(f"more of leaf {piece.leaf} came than it was said to have.")
        return piece.is_last

    def take(self) -> bytes | Part:
        parts = self._parts
        self._leaf, self._parts, self._bytes = -1, [], 0
        return parts[0] if len(parts) == 1 else b"".join(map(bytes, parts))


class _Kept(PullSource):
    """Leaves of an arrival as they came, for a checkpoint that was begun before they did."""

    def __init__(self, arrival: Arrival) -> None:
        super().__init__()
        self._arrival = arrival
        self._lock = threading.Lock()
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._file: IO[bytes] = SpooledTemporaryFile(KEPT_BYTES)  # noqa: SIM115
        self._error: StateKitError | None = None

    def keep(self, leaf: int, steps: Sequence[bytes | Part]) -> None:
        # State in use comes before a copy of it: if there is no room, the checkpoint fails.
        with self._lock:
            if self._error is not None:
                return
            try:
                places = []
                for step in steps:
                    places.append((self._file.seek(0, 2), len(step)))
                    self._file.write(bytes(step))
                self._places[leaf] = places
            except OSError as error:
                self._error = temporary_failed(error)
            except ValueError:  # closed: nobody reads it any more
                return

    def read_leaf(self, leaf: int) -> list[bytes]:
        if leaf not in self._places:
            loading = self._arrival._peer.loading
            if loading is not None:
                loading.load(leaf)
            self._arrival.wait_taken(leaf)  # whoever took it in may not have come to keep() yet
        with self._lock:
            if self._error is not None:
                raise self._error
            if leaf not in self._places:
                raise MigrationError(
                    f"leaf {leaf} was given back while a checkpoint was waiting for it. "
                    "Take the checkpoint again."
                )
            steps = []
            for start, length in self._places[leaf]:
                self._file.seek(start)
                # With no checksums: those of messages and of other packs are bound to these.
                step = self._file.read(length)
                steps.append(b"".join(rewrite(piece) for _, piece in block_pieces(step)))
            return steps

    def _close(self) -> None:
        self._arrival.unshare(self)
        with self._lock:
            self._file.close()


def _portions(wanted: Wanted) -> Iterator[Keys]:
    """Keys in portions of which one request is made."""
    for state, keys in wanted.items():
        for start in range(0, len(keys), REQUEST_KEYS):
            yield ((state, tuple(keys[start : start + REQUEST_KEYS])),)


def _without(step: bytes, names: set[str]) -> bytes:
    """The blocks of a step, but for those of some states."""
    return b"".join(piece for block, piece in block_pieces(step) if block.name not in names)
