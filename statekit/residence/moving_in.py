"""MovingIn: leaves of a provider with a home that are still at a source.

Such a leaf is *coming*: its source has all of it, and there is nothing of it in memory or at home.
The source is a checkpoint, or a process that hands leaves over.
It moves in as a whole: its chain is read, made into rows, and these are written home. From then on
it is a leaf like all others of that home, and nobody needs to know where it came from:

    coming      the leaf is in `ledger.coming` and its gate is "expected": every call about a key
                answers *unknown*, a blind write too
    moved in    its rows are at home, in place, and so is the row that says so (homes/ledger.py)

Why nothing is lost, and nothing is there twice:

1. Nothing is changed in a leaf that is coming. So nothing of it is dirty, pending or committed, and
   to move it in again, over what an earlier try has left, loses nothing.
2. It moves in outside of commits. What it holds is as old as the checkpoint or the hand-over, and
   so was there at every commit since. A rollback leaves it where it is: whatever was changed in it
   since then was changed after it had moved in.
3. The row that says so is written with the rows, or after them. Without it, whoever opens the home
   after a crash takes the leaf for coming still. The home's record says what from.
4. A process that hands leaves over forgets one when it was told that the leaf is here. It is told
   so after the home has made the leaf durable (migration/report.py). So whatever crashes when, one
   of the two has it; both have it only while the old owner keeps it shut.

A leaf moves in when somebody touches it, when the threads in the background reach it, or when the
stream of a process brings it. That takes the memory of a leaf for each of them, beside the budget;
and a stream is granted more only for what has been written home (migration/stream.py). Entries by
themselves are never asked for: the rest of their leaf would be nowhere.

    locks   a leaf's lock (loading.py), then the ledger's. So the ledger's lock is never held by who
            waits for a leaf.
    gates   a gate is opened under the leaf's lock. Who shuts gates, or opens them again, holds all
            leaf locks (Transfer.shut). Else a leaf that is being handed over could be opened here.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from statekit.errors import ClosedError
from statekit.homes.ledger import Ledger
from statekit.native import Store
from statekit.native.block import Block, block_pieces
from statekit.native.buffers import BufferSlice
from statekit.residence.assemble import Assembly
from statekit.residence.loading import LEAF_LOCKS, STOP_SECONDS_MAX, Loading
from statekit.residence.sources import PushSource, Sources, Wanted
from statekit.residence.writeback import WriteBack


class MovingIn(Loading):
    """See KVProvider.loading: leaves that are done are those that are at home."""

    def __init__(
        self,
        residence: WriteBack,
        sources: Sources,
        on_end: Callable[[], None],
        background: bool = True,
    ) -> None:
        super().__init__(residence.store, sources, on_end, background)
        assert residence.ledger is not None
        self._residence = residence
        self._ledger: Ledger = residence.ledger
        self._picks_max = 0  # an entry by itself would leave the rest of its leaf nowhere
        self._ours: set[int] = set()  # leaves that were to come; siblings have others
        self._opening: set[int] = set()  # leaves that have moved in, and are not open yet
        self._assembling: tuple[Any, Assembly] | None = None  # and of which types it is
        self._assembling_lock = threading.Lock()

    @property
    def leaves_done(self) -> int:
        """The leaves that are at home."""
        return max(0, self.leaves_total - self.leaves_left)  # one that is shut may be coming

    @property
    def leaves_left(self) -> int:
        return len(self.coming)

    @property
    def leaves_owned_left(self) -> int:
        residency = self._store.residency
        return sum(residency(leaf) != "away" for leaf in self.coming)

    @property
    def coming(self) -> set[int]:
        """Those that are coming. (No sibling has any of them: a leaf moves in, then moves on.)"""
        return self._ours & self._ledger.coming

    def is_coming(self, leaf: int) -> bool:
        return leaf in self._ledger.coming and leaf in self._ours

    def expect(self, leaves: Iterable[int]) -> None:
        """These are to move in, too."""
        self._ours = {*self._ours & self._ledger.coming, *leaves}

    def is_here(self, leaf: int) -> bool:
        """Whether nothing is to be done about a leaf: it is at home, or another store's."""
        if leaf in self._ledger.coming:
            return self._store.residency(leaf) == "away"
        return self._store.gate(leaf) != "expected"  # an interrupt came before it was opened

    def _take_in(self, leaf: int, steps: Sequence[bytes | BufferSlice]) -> None:
        if self.is_stopped:  # what does not come now is given back, or comes another time
            raise ClosedError("the provider was closed while a leaf was on its way.")
        blocks = self._assembly().over_steps(leaf, b"", steps)
        rows = self._residence.rows_of_whole(leaf, blocks)
        self._opening.add(leaf)  # before: an interrupt may come after it
        self._ledger.move_in(leaf, rows)
        if any(block.kind == "timers" for block in Block.each(blocks)):
            self._residence.note_timerless(leaf)  # before anybody can see the leaf
        self._residence.open_moved_in(leaf)
        self._opening.discard(leaf)

    def _move_in_whole(self, leaf: int, twin: Store, source: PushSource) -> list[bytes]:
        steps = [twin.encode_leaf(leaf)]
        self._take_in(leaf, steps)
        return steps

    def open_rest(self) -> None:
        """Opens what an interrupt has left unopened. All leaves have moved in."""
        for leaf in [*self._opening]:
            with self._leaf_locks[leaf % LEAF_LOCKS]:
                self._residence.open_moved_in(leaf)

    def _assembly(self) -> Assembly:
        """One with the types that the states have now; they change when one is declared anew."""
        store, schemas = self._store, self._residence.schemas
        with self._assembling_lock:
            ttls = [raw.ttl_settings for raw in store.states()]
            types = (store.types(), ttls, tuple(schemas))
            if self._assembling is None or self._assembling[0] != types:
                made = Assembly.beside(store, schemas, store.time("event"))
                self._assembling = types, made
            return self._assembling[1]

    def load_keys(self, leaves: Sequence[int], wanted: Wanted) -> None:
        self.load_many(leaves)

    def load_state(self, name: str, leaf: int) -> None:
        """Has the leaf move in if it has entries of a state."""
        if self.is_here(leaf):
            return
        if self.sources.has_push and self.sources.push_of(leaf) is not None:
            return  # see PushSource.bring_timers
        pull = self.sources.pull
        assert pull is not None
        steps: list[bytes] = []
        with self._watched(leaf):
            steps = pull.read_leaf(leaf)
        if any(block.name == name for step in steps for block, _ in block_pieces(step)):
            self.load(leaf)

    def release_sources(self) -> None:
        # Nothing is being written home any more when they are, and nothing will be.
        until = monotonic() + STOP_SECONDS_MAX
        for lock in self._filling:
            if lock.acquire(timeout=max(0.0, until - monotonic())):
                lock.release()
        super().release_sources()

    def stop(self) -> None:
        super().stop()
        if self._assembling is not None:
            self._assembling[1].close()
