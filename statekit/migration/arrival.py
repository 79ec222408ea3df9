"""Arrival: the new owner's side of a hand-over. Leaves come when touched, and by themselves.

    on demand   fetch.py    whoever touches a leaf that is not here asks for it and waits
    the stream  stream.py   a thread takes in what the old owner sends by itself
    reports     report.py   a thread tells the old owner what is here, so that it can forget it

Strategies say which of these there are:

    prioritised            on demand; the stream, hot leaves first. It gives way to those who wait
    on_demand              on demand only. Nothing comes that nobody asks for
    order_unaware          the stream only, leaf after leaf in their order
    order_unaware_batched  the stream only; leaves become usable in batches of a key-group's size
    all_at_once            the stream only, and fetch_from() returns when everything is here

(Where ownership moves in steps, each step is an arrival: steps.py.)

A leaf that has come is ours whatever happens to the old owner. One that has not is the old
owner's, who keeps it, shut: nothing was written to it here, so that it can still be given back.

With a home, a leaf has come when it is at home, and the old owner is told so when it is durable
there. The home's record names the hand-over before anything comes, and until the old owner knows
that all of it has. So a provider that is opened after a crash knows of which key-groups a part is
still there, does not take them for its own, and goes on with them (going_on.py).

What has come, what was asked for, reported or given back is in the participant's record (`state`,
protocol/handover.py), which is only read here. What is left is how to reach the old owner, who
waits for what, and why nothing comes.

    locks    a leaf's lock (loading.py) is held while a leaf is taken in and the participant is
             told of it, all of these while leaves are given back: so a leaf that is given back
             is not being taken in. The shell's lock comes after these, and after `lock`.
             `moving_in` comes after a leaf's lock and the residence's; no other is taken under it.
"""

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING

from statekit.assignment import show_groups
from statekit.errors import ClosedError, FencedError, MigrationError, StateKitError
from statekit.live.job import CheckpointJob, PartJob
from statekit.migration.departure import ALWAYS_DUE, HandOverProgress
from statekit.migration.fetch import Fetching
from statekit.migration.kept import Kept
from statekit.migration.report import Reports
from statekit.migration.stream import Streaming
from statekit.migration.waits import Waited, Waits
from statekit.native.buffers import BufferSlice
from statekit.protocol.calls import BeginReply
from statekit.protocol.handover import Incoming
from statekit.protocol.messages import Here
from statekit.residence.loading import Loading
from statekit.residence.sources import PullSource, PushSource, Wanted
from statekit.turns import short_turns

if TYPE_CHECKING:
    from statekit.migration.new_owner import NewOwnerShell
    from statekit.remote.channel import PeerChannel

CLOSE_SECONDS = 2.0  # to give back what has not come, when the provider is closed


class Arrival(PushSource):
    """Key-groups on their way here from another process; see KVProvider.fetch_from()."""

    advice = "It was made like that where it comes from; the other leaves are not affected."

    def __init__(
        self,
        shell: "NewOwnerShell",
        channel: "PeerChannel",
        reply: BeginReply,
        state: Incoming,
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
        self.source_name = offer.source  # of its participant
        self.generation = offer.generation
        self.subgroups = reply.subgroups
        self.watermark = reply.watermark  # of the source, when it shut the leaves
        self.state = state
        self.shell = shell
        self.channel = channel
        self._has_channel = True
        self.maker = threading.get_ident()  # others may have been lent the same channel
        self.pack_id = bytes.fromhex(offer.migration)  # what checksums are bound to
        self.base = base  # what the leaves were some time ago, where both sides can read it
        self.is_known = is_known  # the source has shown who it is
        self.sizes = array("Q", bytes(8 * reply.key_groups * reply.subgroups))  # by leaf, about
        at = 0
        for leaves, _, _ in offer.grants:
            self.sizes[leaves.start : leaves.stop] = reply.sizes[at : at + len(leaves)]
            at += len(leaves)
        #: When, at the earliest, a timer is due of leaves that have some and are to come.
        self.timer_dues = _timer_dues(reply, state)
        #: Held while a leaf comes as a whole store's leaf, and while somebody begins to read.
        self.moving_in = threading.Lock()
        self.lock = threading.Condition()  # of all below; notified when `state` has changed
        self._waiting = 0  # threads that wait for a leaf that somebody else brings
        self._kept: list[Kept] = []
        self._error: StateKitError | None = None  # why nothing comes by itself any more
        self.is_closed = False
        self._is_cut_short = False  # it was closed before everything was here
        self.fetching = Fetching(self)
        self.streaming = Streaming(self)
        self.reports = Reports(self)
        #: Adds to our part of the last checkpoint what its source had not passed the barrier of.
        #: (KVProvider.late_parts() has all that was added to one.)
        self.late_checkpoint: CheckpointJob | PartJob | None = None
        self.waited = Waited()
        self.bytes_received = 0
        self.fetches = 0  # leaves that came on demand

    # ---- What the user sees

    @property
    def progress(self) -> HandOverProgress:
        done = self.state.done
        return HandOverProgress(done, done + len(self.state.missing), self.bytes_received)

    @property
    def waits(self) -> Waits:
        """How long callers have waited by now, and what for."""
        return self.waited.found

    @property
    def owned(self) -> tuple[range, ...]:
        """The key-groups that are this provider's: all of them, from the beginning."""
        return self.key_groups

    @property
    def is_based(self) -> bool:
        """Whether only what changed since a checkpoint comes from the source."""
        return self.base is not None

    @property
    def done(self) -> bool:
        """Whether everything is here."""
        return not self.state.missing

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
        self.streaming.start()
        with self.lock:
            while not self._is_waited_for():
                if self._error is not None:
                    raise copy(self._error)
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    return False
                self.lock.wait(left)
            if self.state.is_fenced:
                raise FencedError(
                    "a later generation has begun, from a checkpoint: this process owns nothing "
                    "any more. Restore it, or end it."
                )
            if self._is_cut_short:
                raise ClosedError("the provider was closed before all leaves had come.")
        return True

    def _is_waited_for(self) -> bool:
        if self.state.is_fenced or self._is_cut_short:
            return True
        if self.state.missing:
            return False
        return self.reports.is_done or self._error is not None  # untold, but all of it is here

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing comes any more, because of the provider or of its generation."""
        return self.is_closed or self.state.is_fenced

    @property
    def is_settled(self) -> bool:
        return self.is_closed or self.state.is_over

    @property
    def is_ended(self) -> bool:
        return self.reports.is_done and self.state.is_over

    def give_back(self) -> tuple[range, ...]:
        """Gives the key-groups back of which nothing has come; which ones.

        The old owner goes on with them. Those of which something is here come as before.
        """
        return self.shell.return_leaves(self)

    def abandon(self) -> tuple[range, ...]:
        """You know that the old owner is gone for good: what has not come is given up.

        Key-groups that are here as a whole stay, and may go on. The others are not this provider's
        any more and are returned: restore these from a checkpoint. (Hand-overs between the same
        two, either way, end with it.)
        """
        lost = self.shell.declare_dead(self.source_name)
        with self.lock:
            self.lock.wait_for(lambda: self.reports.is_done or self.is_closed, CLOSE_SECONDS)
        return lost

    def __repr__(self) -> str:
        done, total, _ = self.progress
        return (
            f"<Arrival of key-groups {show_groups(self.key_groups)} from {self.source}: "
            f"{done} of {total} leaves, {self.strategy}>"
        )

    # ---- What the participant knows

    def epoch_of(self, leaf: int) -> int:
        """The epoch at which the leaf is to come; -1 if it is not."""
        return self.state.missing.get(leaf, -1)

    def leases(self, leaves: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Those of these leaves that are still to come, and their epochs."""
        epochs = zip(leaves, map(self.state.missing.get, leaves), strict=True)
        return tuple((leaf, epoch) for leaf, epoch in epochs if epoch is not None)

    def changed(self) -> None:
        """What the participant knows of this hand-over has changed, or may have."""
        with self.lock:
            self.lock.notify_all()

    def ended(self) -> None:
        """Nothing more is to come, or to be said: the reports end it."""
        self.reports.forget_heard()
        self.forget_error()
        self.changed()
        self.reports.start()

    # ---- Waiting

    def wait_for(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Until it is so, or nothing comes any more. Every leaf that comes wakes who waits here."""
        with self.lock:
            self._waiting += 1
            try:
                return self.lock.wait_for(lambda: is_so() or self.is_cut_off, seconds)
            finally:
                self._waiting -= 1

    def wait_streamed(self, leaf: int) -> None:
        """Until the stream has brought the leaf."""
        self.streaming.start()
        missing = self.state.missing
        self.wait_for(lambda: leaf not in missing or self._error is not None)
        if leaf not in missing:
            return
        if self.is_closed:
            raise ClosedError("the provider was closed while a leaf was on its way.")
        if (error := self._error) is not None:
            raise copy(self.fetching.lost_leaf(leaf, error))

    def wait_reported(self, leaves: "set[int]", until: float) -> None:
        """Until the source has let go of these leaves. MigrationError if it does not in time."""
        state = self.state

        def is_told() -> bool:
            # Views look at the smaller of the two.
            is_here = state.missing.keys().isdisjoint(leaves)
            return is_here and state.installed.keys().isdisjoint(leaves)

        if not self.wait_for(is_told, until - monotonic()):
            raise MigrationError(
                f"leaves that came from {self.source} cannot go on yet: it has not let go of "
                "them. Try again when it answers."
            )

    def wait_taken(self, leaf: int) -> None:
        """Until whoever takes in a leaf, that is here, has said so."""
        missing = self.state.missing
        self.wait_for(lambda: leaf not in missing)

    def set_error(self, error: StateKitError) -> None:
        with self.lock:
            self._error = copy(error)  # without a traceback, which would hold blocks and us
            self.lock.notify_all()

    def forget_error(self) -> None:
        if self._error is not None:
            with self.lock:
                self._error = None
                self.lock.notify_all()

    # ---- What residence asks of it

    @short_turns()
    def bring(self, leaves: Sequence[int], loading: Loading) -> None:
        self.fetching.bring(leaves, loading)

    @short_turns()
    def bring_keys(self, leaves: Sequence[int], wanted: Wanted, loading: Loading) -> None:
        self.fetching.bring_keys(leaves, wanted, loading)

    def bring_timers(self, watermark: int, loading: Loading) -> None:
        """Brings the leaves that may have timers that are due: they must be in sight to fire."""
        if leaves := [leaf for leaf, due in self._timers_to_come() if due <= watermark]:
            loading.load_many(sorted(leaves))

    @property
    def next_due(self) -> int | None:
        """No timer that is to come is due earlier; None if none is to come."""
        return min((due for _, due in self._timers_to_come()), default=None)

    def due_soon(self) -> list[int]:
        """Leaves that may have timers that are due by now: what the stream brings first."""
        times = (self.watermark, self.shell.event_time)
        now = max((time for time in times if time is not None), default=ALWAYS_DUE)
        return sorted(leaf for leaf, due in self._timers_to_come() if due <= now)

    def _timers_to_come(self) -> list[tuple[int, int]]:
        """Leaf, due time."""
        missing = self.state.missing
        with self.lock:
            for leaf in [leaf for leaf in self.timer_dues if leaf not in missing]:
                del self.timer_dues[leaf]
            return [*self.timer_dues.items()]

    def expects(self, leaf: int) -> bool:
        return leaf in self.state.missing

    def taken(self, leaf: int, steps: Sequence[bytes | BufferSlice] | None) -> None:
        """Under the leaf's lock: the participant learns of it before anybody can give it back."""
        is_whole = steps is not None
        epoch = self.state.missing.get(leaf)
        if epoch is None:
            return  # entries of a leaf that has come as a whole meanwhile
        if steps is not None:
            for kept in [*self._kept]:  # first: who waits for the leaf finds it there
                kept.keep(leaf, steps)
        here = Here(self.id, self.generation, 0, leaf, epoch, is_whole, None)
        self.shell.tell(self.source_name, here)
        # Every leaf wakes whoever waits for leaves, but not who waits for the last one.
        if self.reports.is_idle or self._waiting or not self.state.missing:
            self.changed()
        self.reports.start()

    def was_here(self, leaf: int) -> None:
        """The leaf came in an earlier life of the provider, and is at home. Nobody waits yet."""
        here = Here(self.id, self.generation, 0, leaf, self.state.missing[leaf], True, None)
        self.shell.tell(self.source_name, here)

    def to_read(self) -> PullSource:
        kept = Kept(self)
        with self.moving_in:
            self._kept.append(kept)
        return kept

    @contextmanager
    def attaching(self) -> Iterator[bool]:
        """While a leaf is attached; whether a checkpoint that was begun before waits for it.

        None begins meanwhile: it would find neither what the leaf was, nor the leaf.
        """
        with self.moving_in:
            yield bool(self._kept)

    def unshare(self, kept: Kept) -> None:
        self._kept.remove(kept)

    # ---- The end

    def start(self) -> None:
        if self.strategy != "on_demand":
            self.streaming.start()

    def release(self) -> None:
        with self.lock:
            self.is_closed = True
            self._is_cut_short = bool(self.state.missing)
            is_open = bool(self.state.missing or self.state.returned) and not self.state.is_fenced
            self.lock.notify_all()
        is_told = not self.state.installed and not self.state.is_over
        if self.shell.has_home and not is_told and not self.state.is_fenced:
            self.shell.report_at_end(self)
        if is_open:
            self.shell.return_at_end(self)
        self.shell.forget(self)
        if self._is_cut_short:
            self.channel.close()  # nobody waits for an answer any more
        self.close_channel()
        if self.base is not None:
            self.base.release()

    def close_channel(self) -> None:
        """Nothing more is asked of the source."""
        with self.lock:
            is_ours, self._has_channel = self._has_channel, False
            is_broken = self._is_cut_short or self._error is not None
        if is_ours:
            self.shell.channels.give_back(self.channel, is_broken)


def _timer_dues(reply: BeginReply, state: Incoming) -> dict[int, int]:
    leaves = [leaf for part in reply.timer_leaves for leaf in part]
    dues = reply.timer_dues or [ALWAYS_DUE] * len(leaves)  # of a peer that does not tell them
    return {leaf: due for leaf, due in zip(leaves, dues, strict=True) if leaf in state.missing}
