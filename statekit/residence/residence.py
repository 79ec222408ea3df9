"""Residence: what is here, what is not, and the traffic between.

A store keeps the hot entries of its leaves in memory; its home has the rest. Its parts, each over
the ones before it:

    writeback.py   what is here goes home, and leaves memory
    fetch.py       what is not here is brought, and operations that wait for it are done
    commits.py     what is at home is made to count, or undone
    scan.py        whole states
    transfer.py    leaves that change hands

A provider whose home is memory has no home here: its leaves are whole, or not its own. One that
is being restored lazily has *sources* instead (sources.py, loading.py): then a leaf that is not
whole is at a source, as it was, under what is here. Leaves come from it as a whole, nothing is
ever evicted, and once all are here the sources are gone and cost nothing more.

With a home and sources, a leaf is at one of them and never at both: leaves of the sources (of
checkpoints, and of processes that hand them over) move in as a whole (moving_in.py), and are at
home from then on.
"""

import threading
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from statekit.homes.home import HomeSnapshot
from statekit.native import Store
from statekit.residence.freeze import Frozen, Guard
from statekit.residence.transfer import Transfer


class Residence(Transfer):
    """A store and its home. Every method may be called from any thread."""

    # ---- The state at one moment

    def freeze(
        self,
        plan: Callable[[Store], "array[int] | None"] = lambda store: None,
        bytes_max: int = 0,
        with_shut: bool = False,
    ) -> Frozen:
        """The state as it is now, here and at home; see Frozen.

        plan: decides at that moment from which epoch on the changes of each leaf are wanted.
        bytes_max: how far writers may encode ahead of the reader.
        with_shut: leaves that are shut too, for they are about to be opened again.
        """
        with self._lock, ExitStack() as undo:
            since = plan(self.store)
            loading = self.loading
            source = None if loading is None else loading.sources.to_read()
            if source is not None:
                undo.callback(source.release)
            rows: Guard | HomeSnapshot | None = None
            coming: frozenset[int] = frozenset()
            if self.ledger is not None:
                with self.ledger.lock:  # no leaf moves in between the two
                    rows, coming = self.ledger.snapshot(), frozenset(self.ledger.coming)
                if rows is not None:
                    undo.callback(rows.close)
            snapshot = self.store.snapshot(since, bytes_max)
            undo.callback(snapshot.close)
            if with_shut:
                snapshot.add_shut()
            if self.ledger is not None and rows is None:
                rows = Guard(self.ledger, range(len(self.schemas)), snapshot)
            frozen = Frozen(
                self.store,
                snapshot,
                since,
                source,
                rows,
                coming,
                [*self.schemas],
                self._frozen_closed,
            )
            self._frozen.append(frozen)
            undo.pop_all()
            return frozen

    def _frozen_closed(self, frozen: Frozen) -> None:
        with self._lock:
            self._frozen.remove(frozen)

    # ---- Folds, and the end

    def is_folding_here(self) -> bool:
        """Whether this thread is in the function of a reducing or aggregating state."""
        return any(lock._is_owned() for lock in [*self._fold_locks.values()])

    def fold_lock(self, name: str) -> Any:
        """The lock of a reducing or aggregating state, whichever handle it is used through."""
        with self._lock:
            return self._fold_locks.setdefault(name, threading.RLock())

    def close(self) -> None:
        """Forgets the store. What was not flushed is lost with it."""
        with self._lock:
            loading, self.loading = self.loading, None
        if loading is not None:
            loading.stop()
            with self._ending:
                pass  # a thread may be telling the home that all is there, which is closed next
        if self._assembly is not None:
            self._assembly[1].close()
        self.store.close()
