"""Tracking: how far back deltas must reach, for all who need them.

    checkpoints   back to the oldest checkpoint that the next one of some place may go on from
    shadows       back to what each of them has confirmed that it has (migration/shading.py)

The store remembers deletions of later epochs than one (sk_track). That is the oldest that anybody
needs; it only rises. When nobody needs one, nothing is remembered.

How much memory that may take is bounded by the store: a table never remembers many more deletions
than it has entries. Beyond that it forgets them, and whoever asks for an older delta is given all
entries of that table (csrc/table.h). The same happens if somebody asks for a delta from before its
tracking began. So nobody's delta is ever wrong because of what others need; it is only larger.
"""

import threading

from statekit.native import Store


class Tracking:
    """Who needs deltas of a store, and back to which epoch."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._needed: dict[str, int] = {}
        self._now: int | None = None

    def hold(self, user: str, epoch: int) -> None:
        """This user needs deltas since that epoch, and no older ones any more."""
        with self._lock:
            self._needed[user] = epoch
            self._settle()

    def release(self, user: str) -> None:
        """This user needs none."""
        with self._lock:
            self._needed.pop(user, None)
            self._settle()

    def _settle(self) -> None:
        oldest = min(self._needed.values(), default=None)
        if oldest is None:
            if self._now is not None:
                self._store.untrack()
        elif self._now is None or oldest > self._now:
            self._store.track(oldest)
        else:
            return  # what is remembered already goes back further
        self._now = oldest

    def __repr__(self) -> str:
        return f"<Tracking since {self._now}, for {', '.join(self._needed) or 'nobody'}>"
