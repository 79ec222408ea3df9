"""Transfer: leaves that change hands, between residences of one process and between processes.

Two residences with the same home, or none, move leaves: no entry is touched. Between two homes
they go as rows. To another process they go as blocks (migration/): the leaf is *shut*, so that it
stays as it is while it is read out. It is *handed over* once the other process has it: from then
on its memory may be freed.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Self

from statekit.assignment import group_ranges
from statekit.errors import HomeError, LeaseError
from statekit.homes.ledger import Ledger
from statekit.native.frames import bind, seal
from statekit.native.states import State
from statekit.residence.assemble import (
    Assembly,
    Rows,
    declare,
    empty_twin,
    install_rows,
    named_rows,
    rows_over,
)
from statekit.residence.loading import Loading
from statekit.residence.moving_in import MovingIn
from statekit.residence.scan import Scanning
from statekit.residence.sources import PullSource, PushSource, Sources


class Transfer(Scanning):
    """The part of a Residence (residence.py) that gives leaves away and takes them in."""

    # ---- Between residences

    def give(
        self,
        target: "Transfer",
        ranges: Sequence[range],
        before_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """Hands leaves over: by moving them if both have the same home, else by way of rows.

        If it fails, the leaves are where they were. before_arrival: called when all rows are at
        the target's home, and before they count there.
        """
        if self.ledger is target.ledger:
            if self.loading is not None:
                target.share_source(self)
            self.move_leaves(target, ranges)
            if target.ledger is None and target.loading is None:
                return  # they are whole, with their timers
            try:
                target.load_timers(leaf for part in ranges for leaf in part)
            except BaseException:
                self.share_source(target)  # what was left here may all be here by now
                target.move_leaves(self, ranges)
                self.resume_loading()
                raise
            finally:
                target.resume_loading()
            return
        first, second = sorted((self, target), key=id)
        with first._lock, second._lock:
            # Out of reach first: what is written to them from here on must not be lost.
            aside = self._aside()
            self.move_leaves(aside, ranges)
            try:
                if target.ledger is None:
                    aside._load_whole(ranges)
                    aside.move_leaves(target, ranges)
                else:
                    aside._copy_rows(target, ranges, before_arrival)
            except BaseException:
                for part in ranges:
                    target.store.mark(part.start, part.stop, "away")
                aside.move_leaves(self, ranges)
                raise
            if self.ledger is not None:
                leaves = [leaf for part in ranges for leaf in part]
                self.ledger.came.difference_update(leaves)
                self.ledger.dropping.update(leaves)

    def forget_given(self) -> bool:
        """Deletes the rows of what was given away. If the home fails, flush() tries again."""
        if self.ledger is None:
            return True
        try:
            self.drop_rows()
        except HomeError:
            self.failures += 1
            return False
        return True

    def _aside(self) -> Self:
        """A residence with the same states and times that has no leaves."""
        aside = type(self)(empty_twin(self.store, self.store.time("event")), self.ledger, None)
        aside.schemas, aside.numbers, aside.counters = self.schemas, self.numbers, self.counters
        return aside

    def move_leaves(self, target: "Transfer", ranges: Sequence[range]) -> None:
        """Moves leaves from store to store: no entry is touched. All of them, or none.

        Leaves that are not whole must be at home or at the source of the target too. If not, they
        are loaded first.
        """
        leaves = [leaf for part in ranges for leaf in part]
        if self.loading is not None:
            self.load_from_peers(ranges)
        if not self._has_source_of(target):
            self.load_leaves(leaves)
        first, second = sorted((self, target), key=id)
        with first._lock, second._lock:
            if not self._has_source_of(target):
                self.load_leaves(leaves)  # one may have come in the meantime
            if self._frozen:
                self._protect(leaves)
            self._evictions += 1
            target._evictions += 1
            if target.budget is not None:
                target.store.limit(0)  # what is too much is evicted afterwards
            try:
                for part in ranges:
                    self.store.move(target.store, part.start, part.stop)
            except BaseException:
                # An interrupt may have come right after a move: see where each range is.
                self.store.limit(0)
                for part in ranges:
                    if len(part) and self.store.residency(part.start) == "away":
                        target.store.move(self.store, part.start, part.stop)
                raise
            finally:
                for one in (self, target):
                    if one.budget is not None:
                        one._limit()
            if self._timerless and target.ledger is self.ledger:
                moved = self._timerless.intersection(leaves)
                self._timerless -= moved
                target._timerless |= moved

    def _has_source_of(self, target: "Transfer") -> bool:
        """Whether leaves that are not whole can move there: what is not here is at hand there."""
        here, there = self.loading, target.loading
        if here is None or there is None:
            return here is there
        return here.sources.is_one_with(there.sources)

    def _load_whole(self, ranges: Sequence[range]) -> None:
        """Brings all entries of leaves here."""
        home = self.ledger
        assert home is not None
        states = declare(self.store, self.schemas)
        for leaf in (leaf for leaves in ranges for leaf in leaves):
            if self.store.residency(leaf) != "whole":
                install_rows(states, self._rows_at_home(home, leaf))
                self.store.mark(leaf, leaf + 1, "whole")

    def _rows_at_home(self, home: Ledger, leaf: int) -> Rows:
        return (
            (number, key, row)
            for number in range(len(self.schemas))
            for key, row in home.load(leaf, number)
        )

    def _copy_rows(
        self, target: "Transfer", ranges: Sequence[range], before_arrival: Callable[[], None]
    ) -> None:
        """Writes leaves to the target's home, where they are from then on."""
        ledger, subgroups = target.ledger, self.store.subgroups
        assert ledger is not None
        here = {raw.name for raw in self.store.states()}
        arrival = ledger.begin_moving_in(
            tuple(range(part.start // subgroups, part.stop // subgroups) for part in ranges)
        )
        for leaf in (leaf for part in ranges for leaf in part):
            is_whole = self.store.residency(leaf) == "whole"
            rows: Rows = (
                (target.numbers[name], key, row)
                for name, number in self.numbers.items()
                if self.ledger is not None and not (is_whole and name in here)
                for key, row in self.ledger.load(leaf, number)
            )
            merged = rows_over(target._rows_of(self.store.encode_leaf(leaf)), rows)
            target._protect((leaf,))
            ledger.replace(leaf, named_rows(leaf, merged))
        for part in ranges:
            target.store.mark(part.start, part.stop, "absent")
        target.load_timers(leaf for part in ranges for leaf in part)
        before_arrival()
        try:
            ledger.end_moving_in(arrival)
        except BaseException:
            ledger.void_moving_in(arrival)  # it may have been written all the same
            raise

    # ---- To another process

    def shut(self, ranges: Sequence[range]) -> None:
        """Refuses all operations on leaves from now on, and keeps what they hold."""
        with self._lock, self._no_move():
            done: list[range] = []
            try:
                for part in ranges:
                    self.store.set_gate(part.start, part.stop, "shut")
                    done.append(part)
            except BaseException:
                self._reopen(done)
                raise
            for part in ranges:
                self.shut_leaves.update(part)
            if self.ledger is not None:
                self.ledger.came.difference_update(chain.from_iterable(ranges))

    def reopen(self, ranges: Sequence[range]) -> None:
        """Takes leaves back that were shut."""
        with self._lock, self._no_move():
            self._reopen(ranges)

    def _reopen(self, ranges: Sequence[range]) -> None:
        for part in ranges:
            self.store.set_gate(part.start, part.stop, "open")
            if self.ledger is not None and self.ledger.has_sources:
                for leaf in part:
                    self.open_moved_in(leaf)  # it may have moved in while it was shut
            self.shut_leaves.difference_update(part)
            self._handed_over.difference_update(part)

    def _no_move(self) -> AbstractContextManager[None]:
        """No leaf moves in meanwhile."""
        loading = self.loading
        return loading.standing_still() if isinstance(loading, MovingIn) else nullcontext()

    def note_handed_over(self, leaf: int) -> None:
        """Another process has a leaf that was shut: free_handed_over() may free it."""
        with self._lock:
            if leaf in self.shut_leaves:
                self._handed_over.add(leaf)

    def handed_over(self) -> list[int]:
        """The leaves that free_handed_over() may free."""
        with self._lock:
            return sorted(self._handed_over)

    def free_handed_over(self, leaf: int) -> None:
        """Frees a leaf that another process has. One that has come back stays."""
        with self._lock:
            if leaf in self._handed_over:
                self._drop_kept(leaf)
                if self.ledger is not None and leaf not in self.ledger.came:
                    self.ledger.dropping.add(leaf)

    def let_in(self, ranges: Sequence[range]) -> None:
        """Leaves are about to come back from the process that they were handed over to.

        What was kept of them is of no use any more, and must not be freed when they are here.
        """
        with self._lock:
            for part in ranges:
                for leaf in self._handed_over.intersection(part):
                    self._drop_kept(leaf)

    def _drop_kept(self, leaf: int) -> None:
        self.store.mark(leaf, leaf + 1, "away")
        self._timerless.discard(leaf)
        self.shut_leaves.discard(leaf)
        self._handed_over.discard(leaf)

    def forget_shut(self) -> None:
        """Nothing is being handed over any more, and nothing is ours."""
        with self._lock:
            self.shut_leaves.clear()
            self._handed_over.clear()

    def encode_shut(
        self, leaf: int, state: State | None, since: int, pack_id: bytes, place: int
    ) -> bytes:
        """The blocks of a leaf that was shut, wherever its entries are, bound to a place.

        since: only what changed after that epoch, where that is known.
        """
        if self.store.residency(leaf) != "whole":
            if self.ledger is not None:
                self.load_leaves((leaf,))
                if leaf in self.ledger.coming:
                    raise LeaseError(f"leaf {leaf} cannot be read out: it is coming. Ask again.")
                blocks = bytearray(self._encode_completed(self.ledger, leaf, state))
                seal(blocks)
                bind(blocks, pack_id, place)
                return bytes(blocks)
            self.load_leaves((leaf,))
            if (residency := self.store.residency(leaf)) != "whole":
                # What is not here must never be taken for what is empty.
                raise LeaseError(f"leaf {leaf} cannot be read out: it is {residency}. Ask again.")
        return self.store.encode_bound(leaf, state, since, pack_id, place)

    def _encode_completed(self, home: Ledger, leaf: int, state: State | None) -> bytes:
        with self._lock:
            here, rows = self.store.encode_leaf(leaf), self._rows_at_home(home, leaf)
            name = None if state is None else state.name
            return self._assembly_now().over_rows(leaf, here, rows, name)

    def _assembly_now(self) -> Assembly:
        """One with the types that the states have now; they change when one is declared anew."""
        ttls = [raw.ttl_settings for raw in self.store.states()]
        types = (self.store.types(), ttls, tuple(self.schemas))
        if self._assembly is None or self._assembly[0] != types:
            self._assembly = types, Assembly.beside(self.store, self.schemas, None)
        return self._assembly[1]

    # ---- From another process, and from a checkpoint

    def expect(
        self, source: PushSource, ranges: Sequence[range], here: Collection[int] = ()
    ) -> None:
        """Leaves that were another's are ours, and come from a process that hands them over.

        Nothing is read from them or written to them before something of them has come.
        here: those that have come before, in an earlier life: they are at home.
        """
        with self._lock:
            for part in ranges:
                for leaf in self.shut_leaves and self.shut_leaves.intersection(part):
                    self._drop_kept(leaf)  # it was here before, and is back
            leaves = chain.from_iterable(ranges)
            if self.ledger is not None:
                self._expect_at_home(self.ledger, source, ranges, here)
                return
            if self.loading is None:
                sources = Sources(None).with_push(source, leaves)
                self.loading = Loading(self.store, sources, self.end_loading, background=False)
            else:
                self.loading.join(source, leaves)
            for part in ranges:
                self.store.set_gate(part.start, part.stop, "expected")

    def _expect_at_home(
        self, ledger: Ledger, source: PushSource, ranges: Sequence[range], here: Collection[int]
    ) -> None:
        leaves = [*chain.from_iterable(ranges)]
        if self._frozen:
            self._protect(leaves)  # what is at home of them is of an earlier time, and goes
        self._evictions += 1  # answers on their way are of the time before
        ledger.expect(leaves, here)
        loading = self.loading
        if loading is None:
            sources = Sources(None).with_push(source, leaves)
            loading = MovingIn(self, sources, self.end_loading, background=False)
            loading.expect(leaves)
            self.loading = loading
        else:
            assert isinstance(loading, MovingIn)
            loading.expect(leaves)
            loading.join(source, leaves)
        # Last: until then they are another's, and nobody takes what is at home for theirs.
        for leaf in here:
            self.store.mark(leaf, leaf + 1, "absent")
            self.note_timerless(leaf)
        for run in group_ranges([leaf for leaf in leaves if leaf not in here]):
            self.store.set_gate(run.start, run.stop, "expected")

    def moved_in(self, ranges: Sequence[range]) -> frozenset[int]:
        """Those of these leaves that have moved in, of sources that are not done."""
        if self.ledger is None:
            return frozenset()
        found = self.ledger.moved_in()
        return frozenset(leaf for part in ranges for leaf in part if leaf in found)

    def unexpect(self, leaves: Sequence[int]) -> list[int]:
        """Leaves are another's after all; nothing comes meanwhile. Those that had not moved in."""
        untouched: list[int] = []
        if self.ledger is not None:
            untouched = [leaf for leaf in leaves if leaf in self.ledger.coming]
        for run in group_ranges(sorted(leaves)):
            self.store.mark(run.start, run.stop, "away")
        if self.ledger is not None:
            self.ledger.coming.difference_update(untouched)
        return untouched

    def drop_partial(self, leaves: Iterable[int]) -> None:
        """What is at home of leaves is of no use: the next flush deletes it."""
        with self._lock:
            if self.ledger is not None:
                self.ledger.dropping.update(leaves)

    def fill_home(self, source: PullSource, leaves: Iterable[int]) -> None:
        """Writes what a source has of leaves home, in place of what is there, leaf by leaf."""
        ledger = self.ledger
        assert ledger is not None
        assembly = Assembly.beside(self.store, self.schemas, self.store.time("event"))
        for leaf in leaves:
            blocks = assembly.over_steps(leaf, b"", source.read_leaf(leaf))
            ledger.replace(leaf, self.rows_of_whole(leaf, blocks))
        ledger.home.flush()
