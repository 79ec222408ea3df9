"""Committing: everything since the last commit becomes durable at home at once, or is undone.

What was written back is at home, but not committed: the ledger (homes/ledger.py) keeps it apart,
so that whoever opens the home after a crash finds the last commit and nothing of what came after.
A commit takes what is dirty in all leaves at one moment, in one native call that holds their
locks. If that is more than a batch, it is written back first, without holding anybody up, until
what has changed meanwhile is little.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from statekit.assignment import group_ranges, leaf_ranges, subtract
from statekit.homes.ledger import Ledger, Position
from statekit.residence.fetch import Fetching

_COMMIT_BYTES_MAX, _COMMIT_BYTES_MIN = 16 << 20, 1 << 20  # what a commit writes in one step ...
_COMMIT_SHARE = 8  # ... but not more than this part of the budget
_COMMIT_ROUNDS = 8  # of writing back before a commit holds up those who write


class Committing(Fetching):
    """The part of a Residence (residence.py) that commits and rolls back."""

    def commit(self, key_groups: tuple[range, ...], positions: Sequence[Position]) -> None:
        """Makes everything since the last commit durable at once, with what it belongs to."""
        ledger, store = self.ledger, self.store
        assert ledger is not None
        with self._lock:
            ledger.settle()
            subgroups = store.subgroups
            groups = key_groups
            if self.shut_leaves:
                # They may come back, and must not have been passed over.
                shut = {leaf // subgroups for leaf in self.shut_leaves}
                groups = group_ranges({*shut, *(group for part in groups for group in part)})
            if not groups:
                return
            bytes_max = self._commit_bytes
            rounds = 0
            while (taken := store.rows_moment(self.numbers, bytes_max)) is None:
                self._hand = 0
                self._write_back(1 << 62, cold=False)
                rounds += 1
                if rounds == _COMMIT_ROUNDS:
                    bytes_max = 1 << 62  # they write faster than the home does, and must wait
            rows, counts = taken
            is_written = False
            self._evictions += 1  # answers on their way may be of rows that are moved
            try:
                self._protect_rows(rows)
                leaves = leaf_ranges(groups, subgroups)
                ledger.commit(groups, leaves, rows, positions, self._commit_bytes)
                is_written = True
            finally:
                self._evictions += 1
                store.rows_done(0, store.leaves, is_written)
            for name, count in counts.items():
                self.counters[name].written_back(count)

    @property
    def _commit_bytes(self) -> int:
        share = (self.budget or 0) // _COMMIT_SHARE
        return max(_COMMIT_BYTES_MIN, min(_COMMIT_BYTES_MAX, share))

    def rollback(self, key_groups: tuple[range, ...]) -> None:
        """Back to the last commit, in these key-groups."""
        ranges = leaf_ranges(key_groups, self.store.subgroups)
        ledger = self.ledger
        assert ledger is not None
        with ExitStack() as folds:
            for lock in [*self._fold_locks.values()]:  # a fold must not write what it read before
                folds.enter_context(lock)
            self._rollback(ledger, ranges)

    def _rollback(self, ledger: Ledger, ranges: tuple[range, ...]) -> None:
        with self._lock:
            self._protect(leaf for part in ranges for leaf in part)
            with ledger.lock:  # or a sibling's commit that fails would leave us half rolled back
                ledger.settle()  # before anything is given up
                self._evictions += 1  # answers on their way are of the time before
                # Nothing was ever changed in leaves that are coming, and they stay expected.
                changed = subtract(ranges, group_ranges(ledger.coming)) if ledger.coming else ranges
                for part in changed:
                    self.store.mark(part.start, part.stop, "absent")
                ledger.rollback(ranges)
                self._evictions += 1
            self._timerless.update(leaf for part in changed for leaf in part)
            self._load_timerless()

    def drop_rows(self) -> None:
        """Deletes the rows of leaves at home that others have by now."""
        with self._lock:
            if (ledger := self.ledger) is not None and ledger.dropping:
                self._protect([*ledger.dropping])
                ledger.drop()
