"""Shadow: leaves of another process, copied while it goes on using them, to be taken over later.

    copying   a thread asks for rounds (protocol/shadow.py): at first for everything, then for what
              has changed. Copies are decoded into a *twin*: a store of its own, which nobody reads,
              writes to, serves, checkpoints or fires timers of
    taking    take() has key-groups handed over. The offer brings what has changed since the last
              copy; that completes the twin's leaves, and these become ours as they are

A copy that does not fit, is damaged or was lost is no failure: then all of that leaf comes, in the
next round or by the hand-over itself. If either process dies before a step, the old owner owns what
it owned; if the source is not heard of for LOST_SECONDS, the copies are dropped.
"""

import threading
import uuid
from copy import copy as copied_error
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, NamedTuple

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import (
    ArgumentError,
    ClosedError,
    MemoryLimitError,
    PeerError,
    PeerLostError,
    StateKitError,
)
from statekit.migration.departure import bound_to, place_of, unbound
from statekit.migration.fetch import LEASES_MAX, Pieces
from statekit.native import Store
from statekit.native.buffers import BufferSlice
from statekit.native.frames import verify
from statekit.protocol.calls import CopyCall, Piece, PieceKind, ShadeCall, ShadeReply
from statekit.protocol.shadow import Copied, NotCopied, RoundDone, Shaded
from statekit.protocol.shadow import Shadow as Machine
from statekit.residence.loading import Loading

if TYPE_CHECKING:
    from statekit.migration.arrival import Arrival
    from statekit.migration.new_owner import NewOwnerShell
    from statekit.migration.shell import Credentials

LOST_SECONDS = 30.0  # after which the copies of a source that does not answer are dropped
RETRY_SECONDS = 0.5
JOIN_SECONDS = 1.0  # that drop() waits for a round to end
ROUND_SECONDS_MIN, ROUND_SECONDS_MAX = 0.02, 0.5  # between two rounds that no longer shrink
ROUND_SHARE = 4  # times as long as such a round takes
SMALL_BYTES = 64 << 10  # a round that needs no other
SHRINKS = 0.8  # a round is to be this much smaller than the one before
ROUNDS_MAX = 30  # before it counts as one that does not shrink


class ShadowProgress(NamedTuple):
    """How far a shadow is."""

    leaves_done: int  # that are copied
    leaves_total: int
    leaves_refused: int  # that cannot be copied, and come with the hand-over
    bytes: int  # of blocks, received
    rounds: int  # that are complete
    delta_bytes: int  # of the last of them
    rest_bytes: int  # that are expected to come before a step could begin
    memory: int  # bytes, of the copies

    @property
    def fraction(self) -> float:
        return self.leaves_done / self.leaves_total if self.leaves_total else 1.0


class Shadow:
    """Copies of another process' key-groups; see KVProvider.shadow()."""

    def __init__(
        self,
        shell: "NewOwnerShell",
        address: str,
        key_groups: tuple[range, ...],
        pace: int,
        credentials: "Credentials",
        timeout_s: float,
        limit: int,
    ) -> None:
        leaves = sum(map(len, key_groups)) * shell.subgroups
        if leaves > LEASES_MAX:
            raise ArgumentError(
                f"key-groups {show_groups(key_groups)} have {leaves} leaves, and a shadow may have "
                f"{LEASES_MAX}. Shadow {LEASES_MAX // shell.subgroups} key-groups at a time."
            )
        self.id = uuid.uuid4().hex
        self.source = address
        self._groups = key_groups
        self._shell = shell
        self._pace = pace
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._limit = limit
        self._channel = shell.channels.borrow(address, credentials, timeout_s)
        self._lock = threading.Lock()  # of the machine and the twin
        self._taking = threading.Lock()  # one step at a time
        self._changed = threading.Condition()  # notified after each round, and at the end
        self._machine = Machine(self.id, shell.generation, self._leaves(key_groups))
        self._twin: Store | None = None
        self._expected = 0  # bytes of the first round, about
        self._bytes = self._round_bytes = self._rounds = 0
        self._delta_bytes = 0
        self._refused = 0
        self._memory = 0  # of the twin, which may be closed while somebody looks
        self._is_steady = False
        self._error: StateKitError | None = None
        self._heard = monotonic()
        self._thread: threading.Thread | None = None

    def _leaves(self, groups: tuple[range, ...]) -> list[int]:
        return [leaf for part in leaf_ranges(groups, self._shell.subgroups) for leaf in part]

    # ---- What the user sees

    @property
    def key_groups(self) -> tuple[range, ...]:
        """Those that were not taken over yet."""
        return self._groups

    @property
    def progress(self) -> ShadowProgress:
        held = [*self._machine.held.values()]
        rest = self._delta_bytes if self._rounds else max(0, self._expected - self._bytes)
        return ShadowProgress(
            sum(map(bool, held)),
            len(held),
            self._refused,
            self._bytes,
            self._rounds,
            self._delta_bytes,
            rest,
            self._memory,
        )

    @property
    def is_steady(self) -> bool:
        """Whether rounds do not get smaller any more: a step would cost about as much as ever."""
        return self._is_steady

    @property
    def error(self) -> StateKitError | None:
        """Why nothing is copied; None while it is. It is tried again for a while."""
        return self._error

    @property
    def is_dropped(self) -> bool:
        return self._machine.is_over

    def wait(self, timeout: float | None = None) -> None:
        """Until rounds do not get smaller any more. Raises what keeps them from coming."""
        with self._changed:
            is_so = self._changed.wait_for(
                lambda: self._is_steady or self._error is not None or self.is_dropped, timeout
            )
            if self._error is not None and not self._is_steady:
                raise copied_error(self._error)
            if self.is_dropped:
                raise ClosedError("the shadow was dropped. Make another one.")
            if not is_so:
                done, total, *_ = self.progress
                raise TimeoutError(
                    f"after {timeout} s {done} of {total} leaves are copied from {self.source}, "
                    f"and {self.progress.rest_bytes} bytes are to come. Wait again; or take the "
                    "key-groups over as they are: what is not copied comes then."
                )

    def take(self, key_groups: KeyGroups | None = None) -> "Arrival":
        """Takes key-groups of the shadow over: they are this provider's when it returns.

        What fetch_from() returns is returned. key_groups: all that are left, unless told.
        """
        groups = self._groups if key_groups is None else group_ranges(key_groups)
        if not groups or (wrong := subtract(groups, self._groups)):
            raise ArgumentError(
                f"key-groups {show_groups(wrong if groups else ())} are not in this shadow, which "
                f"has {show_groups(self._groups)}. Take some of these."
            )
        with self._taking:
            leaves = self._leaves(groups)
            with self._lock:
                held = self._machine.step(leaves)
            is_taken = False
            try:
                arrival = self._shell.take_step(
                    self.source, groups, self._credentials, self._timeout_s, self, held
                )
                is_taken = True
            finally:
                with self._lock:
                    self._machine.stepped(leaves, is_taken)
                    if is_taken and self._twin is not None:
                        for part in leaf_ranges(groups, self._shell.subgroups):
                            self._twin.mark(part.start, part.stop, "away")  # what was of no use
                        self._memory = self._twin.bytes_used
            self._groups = subtract(self._groups, groups)
        if not self._groups:
            self.drop()
        return arrival

    def drop(self) -> None:
        """Forgets the copies, here and there. What was taken over is not affected."""
        self._end(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def __enter__(self) -> "Shadow":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __repr__(self) -> str:
        done, total, *_ = self.progress
        return (
            f"<Shadow of key-groups {show_groups(self._groups)} of {self.source}: "
            f"{done} of {total} leaves{', dropped' if self.is_dropped else ''}>"
        )

    # ---- Copying

    def open(self) -> None:
        """Asks the source for it. Raises if it cannot be, and leaves nothing behind then."""
        try:
            call = ShadeCall(self.id, self._shell.generation, self._shell.name, self._groups)
            reply = self._channel.shade(call)
            self._check(reply)
            self._expected = reply.bytes
            with self._lock:
                if self._machine.is_over or self._shell.is_closed:
                    raise ClosedError("the provider was closed while a shadow was being made.")
                if not self._machine.on_shaded(Shaded(self.id, reply.generation, reply.source)):
                    raise PeerError(
                        f"{self.source} is of generation {reply.generation}, this process of "
                        f"{self._shell.generation}. Nothing was copied."
                    )
                self._twin = Store(reply.key_groups, reply.subgroups, self._limit)
        except BaseException:
            self._end(None)
            raise
        self._thread = threading.Thread(target=self._run, name="statekit-shadow", daemon=True)
        self._thread.start()

    def _check(self, reply: ShadeReply) -> None:
        if self._limit and reply.bytes > self._limit:
            raise MemoryLimitError(
                f"key-groups {show_groups(self._groups)} take about {reply.bytes} bytes at "
                f"{self.source}, and a shadow may take {self._limit} here. Shadow fewer of them at "
                "a time, raise memory=, or take them over without a shadow "
                "(strategy='prioritised')."
            )

    def _run(self) -> None:
        try:
            while not self.is_dropped:
                began = perf_counter()
                try:
                    self._round()
                    self._heard = monotonic()
                    self._say(None)
                    spent = perf_counter() - began
                    pause = min(max(ROUND_SHARE * spent, ROUND_SECONDS_MIN), ROUND_SECONDS_MAX)
                    pause = pause if self._is_steady else 0.0
                except PeerLostError as error:
                    if monotonic() - self._heard > LOST_SECONDS:
                        raise
                    self._say(error)
                    pause = RETRY_SECONDS
                with self._changed:
                    self._changed.wait_for(lambda: self.is_dropped, pause)
        except StateKitError as error:
            self._end(None if self.is_dropped else error)
        except Exception as error:  # nobody foresaw it, and nobody must wait for ever
            self._end(PeerError(f"{self!r} cannot go on: {error!r}. Report this."))

    def _say(self, error: StateKitError | None) -> None:
        with self._changed:
            self._error = None if error is None else copied_error(error)
            self._changed.notify_all()

    def _round(self) -> None:
        machine = self._machine
        with self._lock:
            if machine.is_over:
                return
            asked = machine.round()
        call = CopyCall(self.id, machine.generation, asked.held, asked.number, self._pace)
        bases = dict(asked.held)
        pieces = Pieces()
        self._round_bytes = refused = 0
        is_done = False
        place = (self.id, machine.generation, machine.source, asked.number)
        for piece in self._channel.copy(call, is_over=lambda: machine.is_over):
            if machine.is_over:
                return
            self._bytes += len(piece.blocks)
            self._round_bytes += len(piece.blocks)
            if piece.kind is PieceKind.ROUND:
                with self._lock:
                    is_done = machine.on_done(RoundDone(*place, piece.epoch, piece.bytes_total))
            elif piece.kind is not PieceKind.HERE:
                refused += 1
                with self._lock:
                    machine.on_not_copied(NotCopied(*place, piece.leaf))
            elif pieces.add(piece, piece.epoch):
                base = bases.get(piece.leaf, 0) if piece.is_delta else 0
                self._apply(Copied(*place, piece.leaf, base, piece.epoch), pieces.take())
        self._refused = refused
        self._note_round(is_done)

    def _apply(self, copied: Copied, blocks: bytes | BufferSlice) -> None:
        machine = self._machine
        with self._lock:
            twin = self._twin
            if twin is None or not machine.accepts(copied):
                return
            leaf, base = copied.leaf, copied.base
            bound = bound_to(self.id, base, machine.source)
            place = place_of(leaf, copied.epoch)
            content: bytes | BufferSlice | None = blocks
            if base:
                content = unbound(blocks, bound, place)
            elif blocks and verify(blocks, bound, place) is not None:
                content = None
            if content is None:
                machine.spoiled(leaf)  # damaged on its way, or made against something else
                return
            try:
                twin.decode_fitting(leaf, content, "over" if base else "replace")
            except MemoryLimitError as error:
                raise MemoryLimitError(
                    f"a shadow of key-groups {show_groups(self._groups)} of {self.source} takes "
                    f"more than the {self._limit} bytes that it may take here ({error}). Shadow "
                    "fewer of them at a time, or take them over without a shadow."
                ) from error
            except StateKitError:
                # Its types have changed there, for example: all of it comes, or comes later.
                machine.spoiled(leaf)
                twin.mark(leaf, leaf + 1, "absent")
                return
            machine.applied(copied)
            self._memory = twin.bytes_used

    def _note_round(self, is_done: bool) -> None:
        if not is_done:
            return
        before = self._delta_bytes if self._rounds else None
        self._rounds += 1
        self._delta_bytes = self._round_bytes
        is_small = self._delta_bytes <= SMALL_BYTES and self._rounds > 1
        is_as_ever = before is not None and self._delta_bytes > SHRINKS * before
        is_steady = is_small or (is_as_ever and self._rounds > 2) or self._rounds >= ROUNDS_MAX
        self._is_steady = self._is_steady or is_steady

    # ---- Taking over

    def complete(
        self, arrival: "Arrival", piece: Piece, blocks: bytes | BufferSlice, base: int, to: Loading
    ) -> None:
        """The last changes of a leaf that was offered have come: the twin's leaf becomes ours.

        Nothing happens if they do not fit: then all of the leaf is asked for.
        """
        leaf = piece.leaf
        with self._lock:
            twin = self._twin
            fits = self._machine.fits(arrival.source_name, arrival.generation, leaf, base)
            if twin is None or not fits or arrival.epoch_of(leaf) != piece.epoch:
                return
            if self._may_revive(twin, arrival.watermark):
                return
            content = unbound(blocks, bound_to(arrival.id, base), place_of(leaf, piece.epoch))
            if content is None:
                return
            if content:
                twin.decode_fitting(leaf, content, "over")
            to.take_over(leaf, twin, arrival)

    def _may_revive(self, twin: Store, watermark: int | None) -> bool:
        """Whether the twin may have entries that have expired there, and not here.

        What expires is removed without a trace (csrc/ttl.c), so changes do not tell of it. That
        does no harm where it is as late as there.
        """
        here = self._shell.event_time
        if watermark is None or (here is not None and here >= watermark):
            return False
        clocks = self._shell.clocks
        return any(raw.timed and clocks.get(raw.name) != "processing" for raw in twin.states())

    # ---- The end

    def _end(self, error: StateKitError | None) -> None:
        with self._lock:
            is_first = not self._machine.is_over
            self._machine.end()
            twin, self._twin, self._memory = self._twin, None, 0
        if is_first:
            self._tell()
            self._shell.channels.give_back(self._channel, is_broken=error is not None)
            self._shell.shadow_ended(self)
        if twin is not None:
            twin.close()
        with self._changed:
            if error is not None:
                self._error = copied_error(error)
            self._changed.notify_all()

    def _tell(self) -> None:
        """The source need not remember anything for it. If it does not hear it, it finds out."""
        if not self._machine.source or self._shell.is_closed:
            return
        call = ShadeCall(self.id, self._shell.generation, self._shell.name, self._groups, True)
        try:
            self._channel.shade(call, timeout_s=1.0)
        except StateKitError:
            return  # it forgets by itself what nobody asks about
